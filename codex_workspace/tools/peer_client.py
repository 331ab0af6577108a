"""A2A client for the peers of config.yaml, and the values of tasks at peers. Requests go to the configured origin only.

If a peer's card names an interface on another origin, the configured URL is used instead. Without `allow_private`,
connections are made to public addresses only (`safe_http.AddressGuard`).
"""

import logging
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import anyio
import httpcore
import httpx
from a2a.client import A2ACardResolver, Client, ClientCallContext, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientTimeoutError, AgentCardResolutionError
from a2a.types import (
    AgentCard,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    Task,
    TaskState,
)
from a2a.utils.constants import TransportProtocol
from a2a.utils.errors import A2AError

from codex_workspace.common.a2a_terms import AWAITING_INPUT, WORKING
from codex_workspace.common.errors import ToolRefused
from codex_workspace.common.safe_http import (
    USER_AGENT,
    AddressGuard,
    AllowList,
    GuardedNetwork,
    TargetRefused,
    tls_context,
)
from codex_workspace.config.environment import Secret
from codex_workspace.config.settings import PeerEntry

logger = logging.getLogger(__name__)

REQUEST_S: Final = 20.0
"""Timeout of one request. Sending a message may take longer, as some peers respond only when the task is done."""

CONNECT_S: Final = 10.0

MAX_ANSWER_BYTES: Final = 8 << 20
"""Limit of one response."""

FIRST_POLL_S: Final = 0.1
LONGEST_POLL_S: Final = 3.0

NOT_A2A: Final = "does not respond with valid A2A"

_HANDLE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}:[A-Za-z0-9._-]{1,128}")
_ANYWHERE: Final = AllowList.parse(["0.0.0.0/0", "::/0"])
_TASK_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_BINDINGS: Final = (TransportProtocol.JSONRPC.value, TransportProtocol.HTTP_JSON.value)


class PeerTaskState(StrEnum):
    """State of a task that was given to a peer."""

    DONE = "done"
    WORKING = "working"
    ASKING = "asking"
    FAILED = "failed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class PeerTaskHandle:
    """Identifies a task at a peer; as text `peer:task`."""

    peer: str
    task: str

    def __str__(self) -> str:
        return f"{self.peer}:{self.task}"

    @classmethod
    def parse(cls, text: str) -> "PeerTaskHandle":
        """Parse the text form; raises ToolRefused if it is malformed."""
        if not _HANDLE.fullmatch(text):
            raise ToolRefused("That is not a handle; use the one that delegate_task returned, unchanged.")
        peer, _, task = text.partition(":")
        return cls(peer, task)


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A peer.

    description: from config.yaml. problem: why the peer is unavailable. card_text: from its agent card (untrusted).
    """

    name: str
    description: str = ""
    problem: str = ""
    card_text: str = ""


@dataclass(frozen=True, slots=True)
class PeerTaskReport:
    """State of a task at a peer.

    text: the peer's answer (untrusted). handle: None if the task cannot be queried later. note: our own remark.
    """

    peer: str
    state: PeerTaskState
    text: str = ""
    handle: PeerTaskHandle | None = None
    note: str = ""


class PeerClient:
    """Delegates tasks to the peers of config.yaml."""

    def __init__(self, peers: Iterable[PeerEntry], tokens: Mapping[str, Secret]) -> None:
        self._peers: Final[Mapping[str, PeerEntry]] = {peer.name: peer for peer in peers}
        self._tokens = tokens

    async def peers(self) -> list[PeerInfo]:
        """Return all peers, each with the content of its card or the reason why that is unavailable."""
        found: dict[str, PeerInfo] = {}

        async def fetch(peer: PeerEntry) -> None:
            try:
                async with _open_http(peer, self._tokens.get(peer.name)) as http:
                    card = await _card(http, peer)
                    found[peer.name] = PeerInfo(peer.name, peer.description, card_text=_introduction(card))
            except ToolRefused as error:
                found[peer.name] = PeerInfo(peer.name, peer.description, problem=str(error))

        async with anyio.create_task_group() as tasks:
            for peer in self._peers.values():
                tasks.start_soon(fetch, peer)
        return [found[name] for name in self._peers]

    async def delegate(self, peer: str, task: str, wait_s: float, continues: PeerTaskHandle | None) -> PeerTaskReport:
        """Send `task` to a peer, or with `continues` an answer to its question; wait at most `wait_s` seconds.

        Raises:
            ToolRefused: the peer is unknown, or rejects the task.
        """
        known = self._known(peer)
        if continues is not None and continues.peer != peer:
            raise ToolRefused(f"That handle belongs to a task at {continues.peer}, not at {peer}.")
        until = anyio.current_time() + wait_s
        async with _client(known, self._tokens.get(known.name)) as client:
            earlier = None if continues is None else await _task(client, continues)
            request = SendMessageRequest(
                message=_message(task, earlier),
                # Poll the task instead, so that a broken connection does not lose the answer.
                configuration=SendMessageConfiguration(return_immediately=True),
            )
            patience = ClientCallContext(timeout=max(REQUEST_S, wait_s))
            async for answer in client.send_message(request, context=patience):
                if answer.HasField("message"):
                    return PeerTaskReport(peer, PeerTaskState.DONE, _text(answer.message.parts))
                return await _followed(client, peer, answer.task, until)
            raise ToolRefused(f"The peer {peer} {NOT_A2A}.")

    async def check(self, handle: PeerTaskHandle, wait_s: float) -> PeerTaskReport:
        """Return the state of a task; wait at most `wait_s` seconds for its end.

        Raises:
            ToolRefused: the peer or the task is unknown.
        """
        known = self._known(handle.peer)
        until = anyio.current_time() + wait_s
        async with _client(known, self._tokens.get(known.name)) as client:
            return await _followed(client, handle.peer, await _task(client, handle), until)

    def _known(self, name: str) -> PeerEntry:
        if name not in self._peers:
            names = ", ".join(self._peers) or "none"
            raise ToolRefused(f"There is no peer with that name; the peers are: {names}.")
        return self._peers[name]


@asynccontextmanager
async def _open_http(peer: PeerEntry, token: Secret | None) -> AsyncIterator[httpx.AsyncClient]:
    """Open an HTTP client that reaches only the peer.

    Raises:
        ToolRefused: the peer cannot be reached, may not be called, or does not respond with valid A2A.
    """
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token.reveal()}"
    timeout = httpx.Timeout(REQUEST_S, connect=CONNECT_S)
    try:
        async with httpx.AsyncClient(transport=PeerTransport(peer), headers=headers, timeout=timeout) as http:
            yield http
    except TargetRefused as error:
        raise ToolRefused(
            f"The peer {peer.name} may not be called: its address is not public, and allow_private is not set "
            "for it in config.yaml."
        ) from error
    except ToolRefused:
        raise
    except Exception as error:  # the SDK raises many kinds for a malformed response
        logger.info("a request to the peer %s failed", peer.name, exc_info=True)
        raise ToolRefused(f"The peer {peer.name} {_problem(error)}.") from error


@asynccontextmanager
async def _client(peer: PeerEntry, token: Secret | None) -> AsyncIterator[Client]:
    async with _open_http(peer, token) as http:
        config = ClientConfig(
            streaming=False, polling=True, httpx_client=http, supported_protocol_bindings=list(_BINDINGS)
        )
        yield ClientFactory(config).create(await _card(http, peer))


async def _card(http: httpx.AsyncClient, peer: PeerEntry) -> AgentCard:
    card = await A2ACardResolver(http, peer.url).get_agent_card()
    here = _origin(httpx.URL(peer.url))
    for interface in card.supported_interfaces:
        if _origin(httpx.URL(interface.url)) != here:
            interface.url = peer.url
    return card


async def _task(client: Client, handle: PeerTaskHandle) -> Task:
    return await client.get_task(GetTaskRequest(id=handle.task))


async def _followed(client: Client, peer: str, task: Task, until: float) -> PeerTaskReport:
    """Poll the task until it ends or asks for input, or until the deadline."""
    pause_s = FIRST_POLL_S
    handle = PeerTaskHandle(peer, task.id) if _TASK_ID.fullmatch(task.id) else None
    while task.status.state in WORKING and handle is not None:
        left_s = until - anyio.current_time()
        if left_s <= 0:
            break
        await anyio.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, LONGEST_POLL_S)
        try:
            task = await _task(client, handle)
        except (A2AError, httpx.HTTPError) as error:
            if not _is_transient(error):
                raise
            if anyio.current_time() >= until:
                return PeerTaskReport(
                    peer, PeerTaskState.UNREACHABLE, handle=handle, note=f"The peer {_problem(error)}."
                )
    return _report(peer, task, handle)


def _report(peer: str, task: Task, handle: PeerTaskHandle | None) -> PeerTaskReport:
    results = [_artifact(list(artifact.parts), artifact.name) for artifact in task.artifacts]
    said = "\n".join(text for text in (*results, _text(task.status.message.parts)) if text)
    if task.status.state in WORKING:
        return PeerTaskReport(peer, PeerTaskState.WORKING, said, handle)
    if task.status.state in AWAITING_INPUT:
        return PeerTaskReport(peer, PeerTaskState.ASKING, said, handle)
    if task.status.state == TaskState.TASK_STATE_COMPLETED:
        return PeerTaskReport(peer, PeerTaskState.DONE, said)
    state = TaskState.Name(task.status.state).removeprefix("TASK_STATE_").lower()
    return PeerTaskReport(peer, PeerTaskState.FAILED, said, note=f"The task's state is {state}.")


def _artifact(parts: list[Part], name: str) -> str:
    text = _text(parts)
    files = [part.filename or name or "a file" for part in parts if not part.HasField("text")]
    return "\n".join([*([text] if text else []), *(f"[file not shown: {each}]" for each in files)])


def _text(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts)


def _message(text: str, earlier: Task | None) -> Message:
    message = Message(role=Role.ROLE_USER, message_id=str(uuid.uuid4()), parts=[Part(text=text)])
    if earlier is not None:
        message.task_id, message.context_id = earlier.id, earlier.context_id
    return message


def _introduction(card: AgentCard) -> str:
    skills = [f"- {skill.name}: {skill.description}" for skill in card.skills]
    return "\n".join([f"{card.name}: {card.description}", *skills])


def _is_transient(error: Exception) -> bool:
    cause = _cause(error)
    lost = isinstance(error, A2AClientTimeoutError) or isinstance(cause, httpx.RequestError)
    return lost or (isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code in (429, 500, 502, 503))


def _problem(error: Exception) -> str:
    """Describe an error of a peer without the peer's own text."""
    status = error.status_code if isinstance(error, AgentCardResolutionError) else None
    cause = _cause(error)
    if isinstance(cause, httpx.HTTPStatusError):
        status = cause.response.status_code
    if status in (401, 403):
        return f"rejects the token (HTTP {status}); the operator can set it with token_env"
    if status is not None:
        return f"answers HTTP {status}"
    if isinstance(error, A2AClientTimeoutError) or isinstance(cause, httpx.TimeoutException):
        return "did not answer in time; it may still be working on the task"
    if isinstance(cause, httpx.RemoteProtocolError):
        return "closed the connection or sent an invalid response"
    if isinstance(cause, httpx.RequestError):
        return "is unreachable"
    if isinstance(error, A2AError) and not isinstance(error, AgentCardResolutionError):
        return f"rejects the request ({type(error).__name__})"
    return NOT_A2A


def _cause(error: Exception) -> BaseException | None:
    return error if isinstance(error, httpx.HTTPError) else error.__cause__


class PeerTransport(httpx.AsyncHTTPTransport):
    """Reaches one peer: its origin only, checked addresses, no proxies; its responses are limited in size."""

    def __init__(self, peer: PeerEntry) -> None:
        super().__init__(verify=tls_context(), trust_env=False)
        self._origin = _origin(httpx.URL(peer.url))
        guard = AddressGuard(_ANYWHERE if peer.allow_private else AllowList())
        # httpx has no parameter for the network.
        self._pool = httpcore.AsyncConnectionPool(tls_context(), network_backend=GuardedNetwork(guard, CONNECT_S))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and return the response; its body is streamed.

        Raises:
            TargetRefused: the request goes to another origin, or the address is not allowed.
            httpx.RequestError: the peer is unreachable, or closed the connection.
        """
        if _origin(request.url) != self._origin:
            raise TargetRefused("the request goes to another host than the peer's")
        try:
            response = await super().handle_async_request(request)
        except OSError as error:  # the host has no address
            raise httpx.ConnectError(str(error), request=request) from error
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Bounded(response.stream, request)
        if response.headers.get("content-encoding", "identity") != "identity":
            # A small compressed response could expand to any size.
            await response.stream.aclose()
            raise httpx.RemoteProtocolError("the response is compressed, which was not requested", request=request)
        return response


class _Bounded(httpx.AsyncByteStream):
    """A response body that fails if it is too large."""

    def __init__(self, stream: httpx.AsyncByteStream, request: httpx.Request) -> None:
        self._stream = stream
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for piece in self._stream:
            read += len(piece)
            if read > MAX_ANSWER_BYTES:
                raise httpx.RemoteProtocolError("the response is too large", request=self._request)
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)
