"""The platform's HTTP API for a workspace, as typed calls: what goes in and comes out is checked here.

Who calls when, and what is kept meanwhile, is left to `platform_host`, `inbox` and the tools. Nothing is tried again
here but a call that was refused for its token, once for each other token that is to be found. Shapes: the platform's
sources of May and August 2026.
"""

import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

import anyio
import httpx

from codex_workspace.common.errors import AgentError
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.environment import Secret

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 20.0
CONNECT_S: Final = 10.0

PROXY_S: Final = 200.0
"""The platform itself waits 180 s for the agent at the other end of its proxy."""

MAX_BODY_BYTES: Final = 32 << 20
"""Of one answer; a page of the inbox holds whole requests of up to 1 MB."""

MAX_TOKEN_BYTES: Final = 4096
MAX_DIGITS: Final = 300
MAX_DEPTH: Final = 100
_BRACKETS: Final = re.compile(rb'"(?:\\.|[^"\\])*+"|[][{}]', re.DOTALL)
"""Brackets of JSON, and its texts, in which they are none."""

MAX_PAGE: Final = 500
"""The platform takes a larger `limit` for this one."""

LONGEST_RETRY_AFTER_S: Final = 300.0
USUAL_RETRY_AFTER_S: Final = 5.0
MAX_SAID_CHARS: Final = 200
REMEMBERED_DELEGATIONS: Final = 1000

DeliveryMode = Literal["push", "poll"]


class PlatformError(AgentError):
    """The platform did not do what it was asked for. It wants to be left alone for `retry_after_s` seconds."""

    retry_after_s: float = 0.0


class PlatformUnauthorized(PlatformError):
    """None of the tokens that are to be found is taken."""


class WorkspaceRemoved(PlatformError):
    """The workspace was removed from the platform: there is nothing more to do there."""


class CursorLost(PlatformError):
    """The inbox's cursor is unknown: pruned, or never there."""


class PlatformRejected(PlatformError):
    """The platform refuses this request, and will again; `status` is HTTP's."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class PlatformBusy(PlatformError):
    """Too many requests, or the one at the other end has no time; nothing was done."""

    def __init__(self, sentence: str, retry_after_s: float) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class PlatformUnreachable(PlatformError):
    """The platform is out of reach or fails. `maybe_done`: the request may have come to it all the same."""

    def __init__(self, sentence: str, *, maybe_done: bool) -> None:
        super().__init__(sentence)
        self.maybe_done = maybe_done


class ResponseTooLarge(PlatformUnreachable):
    """The platform's answer has more than `MAX_BODY_BYTES`, and was not read."""

    def __init__(self) -> None:
        super().__init__(f"The platform's answer has more than {MAX_BODY_BYTES} bytes.", maybe_done=True)


@dataclass(frozen=True, slots=True)
class Registration:
    """What the platform says to a registration: how it delivers, and its own secret for calls to us, if it has one."""

    delivery: DeliveryMode
    inbound_secret: Secret | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """A heartbeat's figures. `error_rate`: between 0 and 1."""

    active_tasks: int
    current_task: str = ""
    error_rate: float = 0.0
    sample_error: str = ""
    uptime_s: int = 0
    wedged: bool = False
    capabilities: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ActivityRow:
    """A row of a workspace's activity.

    source_id: the workspace it came from, None for the user; target_id: the one it is about. created_at: the
    platform's text, by which rows are ordered. request: the whole JSON-RPC request, None where there is none that is
    an object. answered: the row holds an answer, so it was delivered by push. seq: a number that grows, None where the
    platform has none.
    """

    id: str
    created_at: str
    method: str = ""
    source_id: str | None = None
    summary: str = ""
    request: JsonObject | None = None
    response: JsonValue = None
    answered: bool = False
    seq: int | None = None
    target_id: str | None = None


@dataclass(frozen=True, slots=True)
class ActivityPage:
    """Some rows, oldest first. limit: how many were asked for in the end. is_cut: fewer than wanted, for their size."""

    rows: list[ActivityRow]
    limit: int
    is_cut: bool = False

    @property
    def is_last(self) -> bool:
        """There are no more in that direction."""
        return len(self.rows) < self.limit


@dataclass(frozen=True, slots=True)
class PlatformPeer:
    """An agent that this one may talk to; what it says of itself is in `card`."""

    id: str
    name: str = ""
    role: str = ""
    status: str = ""
    card: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class ProxyAnswer:
    """What came of a message to another agent. `queued`: it will be delivered later, and nobody answers here.

    result: JSON-RPC's, None where it is queued.
    """

    queued: bool
    text: str = ""
    result: JsonObject | None = None
    queue_id: str = ""


@dataclass(frozen=True, slots=True)
class Delegation:
    """Work that was given to another agent through the platform."""

    id: str
    target_id: str = ""
    status: str = ""
    result: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class PlatformMemory:
    """A text that the platform keeps for the workspace."""

    content: str
    created_at: str = ""


class WorkspaceToken:
    """The workspace's token: kept in `file`, for this user's eyes only; read anew where the platform refuses it.

    `others`: files that a provisioner writes. `given`: the environment's. `learned` hears of each that is used, and of
    the platform's own secret.
    """

    def __init__(
        self,
        file: Path,
        others: Sequence[Path] = (),
        given: Secret | None = None,
        learned: Callable[[Secret], None] | None = None,
    ) -> None:
        self._file = file
        self._others = tuple(others)
        self._given = given
        self._learned = learned
        self.current: Secret | None = next(self.candidates(), None)

    def candidates(self) -> Iterator[Secret]:
        """Give all tokens that are to be found at this moment, ours first."""
        for file in (self._file, *self._others):
            found = read_secret(file)
            if found is not None:
                yield found
        if self._given is not None:
            yield self._given

    def keep(self, token: Secret) -> None:
        """Write a token down; it is durable on return."""
        write_secret(self._file, token)
        self.use(token)

    def use(self, token: Secret) -> None:
        """Show this one from now on."""
        self.current = token
        self.learn(token)

    def learn(self, secret: Secret) -> None:
        """Have a secret known as one."""
        if self._learned is not None:
            self._learned(secret)


def write_secret(file: Path, secret: Secret) -> None:
    """Write a secret down, for this user's eyes only; it is durable on return."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(secret.reveal())
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)


def read_secret(file: Path) -> Secret | None:
    """Return what a file holds, None where it is not there or holds nothing that a header can."""
    try:
        with file.open("rb") as source:
            text = source.read(MAX_TOKEN_BYTES + 1).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return Secret(text) if text and text.isprintable() and len(text) <= MAX_TOKEN_BYTES else None


class PlatformClient:
    """The calls of one workspace; from `open_platform_client`.

    told_by_tools: the delegations whose end a tool has told the model, so that the inbox need not.
    waited_by_tools: those that a tool waits for, which may tell of them, or end without it.
    """

    def __init__(self, http: httpx.AsyncClient, workspace_id: str, token: WorkspaceToken) -> None:
        self.workspace_id: Final = workspace_id
        self.told_by_tools: Final[deque[str]] = deque(maxlen=REMEMBERED_DELEGATIONS)
        self.waited_by_tools: Final[list[str]] = []
        self._http = http
        self._token = token
        self._self = f"/workspaces/{quote(workspace_id, safe='')}"

    # --- Being there ---

    async def register(self, card: JsonObject, url: str, delivery: DeliveryMode | None) -> Registration:
        """Say who and where we are; a token that is minted is kept.

        `delivery` None: as the platform has it.

        Raises:
            Refused: the platform does not take the URL, or the mode.
            PlatformError: see the module.
        """
        body: JsonObject = {"id": self.workspace_id, "agent_card": card, "url": url}
        if delivery is not None:
            body["delivery_mode"] = delivery
        try:
            said = _object(await self._call("POST", "/registry/register", body))
        except PlatformUnauthorized:
            # Where all tokens were revoked, the platform mints one for whoever comes without.
            said = _object(await self._once("POST", "/registry/register", body, None, None, TIMEOUT_S))
        minted = _text(said, "auth_token")
        if minted:
            self._token.keep(Secret(minted))
        mode: DeliveryMode = "poll" if said.get("delivery_mode") == "poll" else "push"
        return Registration(mode, self._inbound_secret(said))

    async def heartbeat(self, beat: HeartbeatReport) -> Secret | None:
        """Tell how we are; return the platform's own secret for calls to us, where it tells a new one."""
        body: JsonObject = {
            "workspace_id": self.workspace_id,
            "error_rate": beat.error_rate,
            "sample_error": beat.sample_error,
            "active_tasks": beat.active_tasks,
            "uptime_seconds": beat.uptime_s,
            "current_task": beat.current_task,
            "runtime_metadata": {"capabilities": dict(beat.capabilities)},
        }
        if beat.wedged:
            body["runtime_state"] = "wedged"
        return self._inbound_secret(_object(await self._call("POST", "/registry/heartbeat", body)))

    def _inbound_secret(self, said: JsonObject) -> Secret | None:
        text = _text(said, "platform_inbound_secret")
        if not (text and text.isascii() and text.isprintable() and len(text) <= MAX_TOKEN_BYTES):
            return None
        self._token.learn(Secret(text))
        return Secret(text)

    async def is_removed(self) -> bool:
        """Ask whether the workspace was removed; False where nobody says so."""
        try:
            await self._call("GET", self._self)
        except WorkspaceRemoved:
            return True
        except PlatformError:
            return False
        return False

    # --- The inbox ---

    async def activity(
        self,
        *,
        kind: str = "a2a_receive",
        since_id: str | None = None,
        since_s: int | None = None,
        before: str | None = None,
        limit: int = 100,
    ) -> list[ActivityRow]:
        """Return a page of our activity, oldest first, whatever the platform's order.

        With `since_id`, what came after that row; else the newest rows, of the last `since_s` seconds, before `before`
        (RFC 3339).

        Raises:
            CursorLost: there is no row `since_id` any more.
        """
        asked: dict[str, str] = {"type": kind, "limit": str(min(limit, MAX_PAGE))}
        if since_id is not None:
            asked["since_id"] = since_id
        if since_s is not None:
            asked["since_secs"] = str(since_s)
        if before is not None:
            asked["before_ts"] = before
        try:
            found = await self._call("GET", f"{self._self}/activity", params=asked)
        except CursorLost as lost:
            if since_id is not None:
                raise
            raise PlatformUnreachable("The platform misses a cursor where there is none.", maybe_done=True) from lost
        if not isinstance(found, list):
            raise PlatformUnreachable("The platform's inbox is not a list.", maybe_done=True)
        rows = [row for each in found if (row := _row(each)) is not None]
        return rows if since_id is not None else rows[::-1]

    async def page(
        self, *, since_id: str | None = None, since_s: int | None = None, before: str | None = None, limit: int
    ) -> ActivityPage:
        """Return a page of our inbox like `activity`; a smaller one where what was asked for is too large to be read.

        Raises:
            CursorLost: there is no row `since_id` any more.
            TooLarge: a row of it is too large on its own.
        """
        fits = limit
        while True:
            try:
                rows = await self.activity(since_id=since_id, since_s=since_s, before=before, limit=fits)
            except ResponseTooLarge:
                if fits == 1:
                    raise
                fits //= 2
            else:
                return ActivityPage(rows, fits, fits < limit)

    async def acknowledge(self, seq: int) -> bool:
        """Say up to which row all is done, so that it may be pruned; False where the platform knows no such call."""
        try:
            await self._call("POST", f"{self._self}/activity/ack", {"acked_seq": seq})
        except PlatformRejected as refused:
            if refused.status in (404, 405):
                return False
            raise
        return True

    # --- Talking ---

    async def notify(self, text: str) -> None:
        """Show the user a message."""
        await self._call("POST", f"{self._self}/notify", {"message": text})

    async def send(
        self, target_id: str, text: str, message_id: str, metadata: JsonObject | None = None, timeout_s: float = PROXY_S
    ) -> ProxyAnswer:
        """Send another agent a message through the platform, and return its answer if it comes at once."""
        message: JsonObject = {
            "kind": "message",
            "role": "user",
            "messageId": message_id,
            "parts": [{"kind": "text", "text": text}],
        }
        if metadata:
            message["metadata"] = metadata
        body: JsonObject = {
            "jsonrpc": "2.0",
            "id": message_id,
            "method": "message/send",
            "params": {"message": message},
        }
        path = f"/workspaces/{quote(target_id, safe='')}/a2a"
        said = _object(await self._call_other(path, body, timeout_s))
        if said.get("status") == "queued" or said.get("queued") is True:
            return ProxyAnswer(True, queue_id=_text(said, "queue_id"))
        error = said.get("error")
        if error is not None:
            raise PlatformRejected(f"The other agent has not taken it: {_sentence(error)}", 200)
        result = _object(said.get("result"))
        return ProxyAnswer(False, text_of_result(result), result)

    async def peers(self) -> list[PlatformPeer]:
        """Return the agents that this one may talk to."""
        found = await self._call("GET", f"/registry/{quote(self.workspace_id, safe='')}/peers")
        return [peer for each in (found if isinstance(found, list) else []) if (peer := _peer(_object(each))).id]

    async def delegate(self, target_id: str, task: str, idempotency_key: str | None = None) -> str:
        """Give another agent work, to be done in the background; return the delegation's id."""
        body: JsonObject = {"target_id": target_id, "task": task}
        if idempotency_key is not None:
            body["idempotency_key"] = idempotency_key
        return _text(_object(await self._call("POST", f"{self._self}/delegate", body)), "delegation_id")

    async def delegations(self) -> list[Delegation]:
        """Return the work that was given away lately."""
        found = await self._call("GET", f"{self._self}/delegations")
        rows = [_object(each) for each in (found if isinstance(found, list) else [])]
        return [
            Delegation(
                _text(row, "delegation_id") or _text(row, "id"),
                _text(row, "target_id"),
                _text(row, "status"),
                _text(row, "response_preview") or _text(row, "result"),
                _text(row, "error") or _text(row, "error_detail"),
            )
            for row in rows
        ]

    # --- Remembering ---

    async def commit_memory(self, content: str) -> None:
        """Have the platform keep a text for this workspace."""
        await self._call("POST", f"{self._self}/memories", {"content": content, "scope": "LOCAL"})

    async def recall_memories(self, query: str = "") -> list[PlatformMemory]:
        """Return what the platform keeps of `query`, all where it is empty."""
        asked = {"scope": "LOCAL", **({"q": query} if query else {})}
        found = await self._call("GET", f"{self._self}/memories", params=asked)
        rows = [_object(each) for each in (found if isinstance(found, list) else [])]
        return [PlatformMemory(_text(row, "content"), _text(row, "created_at")) for row in rows]

    async def chat_history(self, limit: int = 50) -> list[ActivityRow]:
        """Return what was said lately, oldest first."""
        return await self.activity(limit=limit)

    # --- The line ---

    async def _call(
        self,
        method: str,
        path: str,
        body: JsonObject | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> JsonValue:
        """Send a request and return its answer; a token that is refused gives way to others, read anew."""
        tried: list[Secret | None] = []
        token = self._token.current
        while True:
            try:
                return await self._once(method, path, body, params, token, timeout_s)
            except PlatformUnauthorized:
                tried.append(token)
                token = next((each for each in self._token.candidates() if each not in tried), None)
                if token is None:
                    raise
                self._token.use(token)

    async def _call_other(self, path: str, body: JsonObject, timeout_s: float) -> JsonValue:
        """Send another agent something: its own status is passed on, and says nothing of our place here."""
        while True:
            token = self._token.current
            try:
                return await self._once("POST", path, body, None, token, timeout_s)
            except WorkspaceRemoved as error:
                raise PlatformRejected("The other agent is not there any more.", 410) from error
            except PlatformUnauthorized as error:
                # Whose refusal it is, a call of our own tells; it finds a token that was rotated, too.
                await self._call("GET", f"{self._self}/activity", params={"limit": "1"})
                if self._token.current == token:
                    raise PlatformUnreachable("The other agent lets nobody in.", maybe_done=False) from error

    async def _once(
        self,
        method: str,
        path: str,
        body: JsonObject | None,
        params: Mapping[str, str] | None,
        token: Secret | None,
        timeout_s: float,
    ) -> JsonValue:
        headers = {"X-Workspace-ID": self.workspace_id}
        if token is not None:
            headers["Authorization"] = f"Bearer {token.reveal()}"
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        try:
            # The client's own bound is for each piece of an answer.
            with anyio.fail_after(timeout_s + CONNECT_S):
                async with self._http.stream(
                    method, path, json=body, params=params, headers=headers, timeout=timeout
                ) as response:
                    content = await _bounded(response)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise PlatformUnreachable("The platform cannot be reached.", maybe_done=False) from error
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise PlatformUnreachable(
                f"The platform did not answer ({type(error).__name__}).", maybe_done=True
            ) from error
        return _judged(response, content, path)


@asynccontextmanager
async def open_platform_client(
    url: str, workspace_id: str, token: WorkspaceToken, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[PlatformClient]:
    """Hold ready the calls of one workspace to the platform at `url`."""
    # A proxy for the outside world may stand between; a redirect would carry the token elsewhere.
    async with httpx.AsyncClient(
        base_url=url, headers={"Origin": url}, follow_redirects=False, transport=transport
    ) as http:
        yield PlatformClient(http, workspace_id, token)


async def _bounded(response: httpx.Response) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > MAX_BODY_BYTES:
            raise ResponseTooLarge
    return bytes(content)


def _judged(response: httpx.Response, content: bytes, path: str) -> JsonValue:
    """Return an answer's JSON, or raise what its status means."""
    status = response.status_code
    said = _parsed(content)
    if status < 300:
        if said is None:
            raise PlatformUnreachable("The platform's answer is no JSON.", maybe_done=True)
        return said
    sentence = _sentence(_object(said).get("error"))
    match status:
        case 401:
            raise PlatformUnauthorized("The platform does not take the workspace's token.")
        case 410 if path.endswith("/activity") and "removed" not in sentence:
            raise CursorLost("The platform does not know the inbox's cursor any more.")
        case 410:
            raise WorkspaceRemoved("The workspace was removed from the platform.")
        case 429:
            raise PlatformBusy("The platform wants fewer requests.", _retry_after(response, said))
        case 503 if _object(said).get("busy") or _object(said).get("restarting") or _object(said).get("waking"):
            raise PlatformBusy(f"The other agent has no time: {sentence}", _retry_after(response, said))
        case _ if status >= 500:
            raise PlatformUnreachable(f"The platform answers HTTP {status}.", maybe_done=True)
        case _:
            raise PlatformRejected(f"The platform refuses it (HTTP {status}): {sentence}", status)


def _parsed(content: bytes) -> JsonValue:
    """Return what JSON says, less what lies too deep, and with numbers of many digits as texts; None for what is none.

    Other agents' words are in the platform's answers: none of them may make all of an answer unreadable.
    """
    try:
        parsed: JsonValue = json.loads(content, parse_int=_number)
    except RecursionError:
        return _parsed(_shallow(content))
    except ValueError:
        return None
    return parsed


def _number(digits: str) -> int | str:
    return int(digits) if len(digits) <= MAX_DIGITS else digits


def _shallow(content: bytes) -> bytes:
    """Return JSON with null in the place of what has more than `MAX_DEPTH` levels above it."""
    kept, depth, start, end = bytearray(), 0, 0, 0
    for found in _BRACKETS.finditer(content):
        match found[0]:
            case b"[" | b"{":
                depth += 1
                if depth == MAX_DEPTH + 1:
                    start = found.start()
            case b"]" | b"}":
                depth -= 1
                if depth == MAX_DEPTH:
                    kept += content[end:start] + b"null"
                    end = found.end()
    return bytes(kept + content[end:] if depth <= MAX_DEPTH else b"")


def _retry_after(response: httpx.Response, said: JsonValue) -> float:
    told: object = response.headers.get("retry-after") or _object(said).get("retry_after")
    try:
        seconds = float(str(told))
    except ValueError:
        return USUAL_RETRY_AFTER_S
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if math.isfinite(seconds) else USUAL_RETRY_AFTER_S


def _sentence(error: JsonValue) -> str:
    text = _text(error, "message") if isinstance(error, dict) else error
    return re.sub(r"\s+", " ", text)[:MAX_SAID_CHARS] if isinstance(text, str) else ""


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _text(holder: JsonObject, key: str) -> str:
    value = holder.get(key)
    return value if isinstance(value, str) else ""


def _row(value: JsonValue) -> ActivityRow | None:
    row = _object(value)
    # A body may come as text.
    request, seq, source = row.get("request_body"), row.get("seq"), _text(row, "source_id")
    if isinstance(request, str):
        request = _parsed(request.encode())
    if not _text(row, "id"):
        return None
    return ActivityRow(
        id=_text(row, "id"),
        created_at=_text(row, "created_at"),
        method=_text(row, "method"),
        source_id=source or None,
        summary=_text(row, "summary"),
        request=request if isinstance(request, dict) else None,
        response=row.get("response_body"),
        answered=row.get("response_body") is not None or row.get("duration_ms") is not None,
        seq=seq if isinstance(seq, int) else None,
        target_id=_text(row, "target_id") or None,
    )


def _peer(row: JsonObject) -> PlatformPeer:
    card = row.get("agent_card")
    return PlatformPeer(
        _text(row, "id"),
        _text(row, "name"),
        _text(row, "role"),
        _text(row, "status"),
        card if isinstance(card, dict) else None,
    )


def text_of_parts(parts: JsonValue) -> str:
    """Return the text of A2A 0.3 parts, by either of the names that their kind has."""
    found = [_object(part) for part in (parts if isinstance(parts, list) else [])]
    return "".join(_text(part, "text") for part in found if "text" in (part.get("kind"), part.get("type")))


def text_of_result(result: JsonObject) -> str:
    """Return the text of an answer: a message's, or a task's artifacts and, without them, its status."""
    artifacts = result.get("artifacts")
    held = [_object(each).get("parts") for each in (artifacts if isinstance(artifacts, list) else [])]
    told = [text_of_parts(parts) for parts in (result.get("parts"), *held)]
    status = _object(_object(result.get("status")).get("message"))
    return "\n".join(text for text in told if text) or text_of_parts(status.get("parts"))


def is_queued(result: str) -> bool:
    """Tell whether a delegation's result is only the platform's word that a polling peer has it in its inbox."""
    said = _object(_parsed(result.encode(errors="replace")))
    return said.get("status") == "queued" and said.get("delivery_mode") == "poll"
