"""The platform's HTTP API for a workspace, as typed calls.

The client retries only a call whose token was rejected, once with each other token it finds. Every call can raise
`PlatformError`. Shapes: the platform's sources of May and August 2026.
"""

import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import anyio
import httpx

from codex_workspace.common.files import read_config_file, replace_file
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.environment import Secret
from codex_workspace.platform.client_types import (
    ActivityRow,
    CursorLost,
    Delegation,
    DeliveryMode,
    PlatformBusy,
    PlatformError,
    PlatformPeer,
    PlatformRejected,
    PlatformUnauthorized,
    PlatformUnreachable,
    ResponseTooLarge,
    WorkspaceRemoved,
    as_object,
    as_objects,
    parse_json,
    parse_time,
    read_activity_row,
    text_field,
)
from codex_workspace.protocol.jsonrpc import objects
from codex_workspace.storage.memories import Memory

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 20.0
CONNECT_S: Final = 10.0

PROXY_S: Final = 200.0
"""The platform's proxy itself waits 180 s for the other agent."""

MAX_BODY_BYTES: Final = 32 << 20
"""The limit of a response; a page of the activity holds whole requests of up to 1 MB."""

LONGEST_RETRY_AFTER_S: Final = 300.0
USUAL_RETRY_AFTER_S: Final = 5.0
MAX_ERROR_CHARS: Final = 200
REMEMBERED_DELEGATIONS: Final = 1000
MAX_TOKEN_BYTES: Final = 4096


class WorkspaceToken:
    """The token that authenticates the workspace's calls.

    Args:
        file: where tokens that the platform issues are stored.
        other_files: files that a provisioner writes.
        from_environment: the last resort.

    `on_secret` is called with each new token and with the platform's inbound secret, so that both are redacted.
    """

    def __init__(self, file: Path, other_files: Sequence[Path] = (), from_environment: Secret | None = None) -> None:
        self._files = (file, *other_files)
        self._from_environment = from_environment
        self.on_secret: Callable[[Secret], None] = lambda _secret: None
        self.current: Secret | None = next(self.candidates(), None)

    def candidates(self) -> Iterator[Secret]:
        """Read all tokens that exist at this moment, in the order in which they are tried."""
        for file in self._files:
            found = read_secret(file)
            if found is not None:
                yield found
        if self._from_environment is not None:
            yield self._from_environment

    def store(self, token: Secret) -> None:
        """Store a new token durably and use it."""
        replace_file(self._files[0], token.reveal().encode())
        self.use(token)

    def use(self, token: Secret) -> None:
        """Use this token from now on."""
        self.current = token
        self.on_secret(token)


def read_secret(file: Path) -> Secret | None:
    """Return the secret in a file; None if there is no file or its content cannot be an HTTP header's value."""
    try:
        text = read_config_file(file, MAX_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return as_secret(text)


def as_secret(text: str) -> Secret | None:
    """Return a text as a secret; None if it cannot be an HTTP header's value."""
    return Secret(text) if text and text.isascii() and text.isprintable() and len(text) <= MAX_TOKEN_BYTES else None


class PlatformClient:
    """The calls of one workspace; from `open_platform_client`.

    reported_delegations: delegations whose result a tool has returned to the model; the inbox skips these results.
    awaited_delegations: delegations that a tool waits for at the moment.
    """

    def __init__(self, http: httpx.AsyncClient, workspace_id: str, token: WorkspaceToken) -> None:
        self.workspace_id: Final = workspace_id
        self.reported_delegations: Final[deque[str]] = deque(maxlen=REMEMBERED_DELEGATIONS)
        self.awaited_delegations: Final[list[str]] = []
        self._http = http
        self._token = token
        self._self = f"/workspaces/{quote(workspace_id, safe='')}"

    # --- Registration ---

    async def register(
        self, card: JsonObject, url: str, delivery: DeliveryMode | None
    ) -> tuple[DeliveryMode, Secret | None]:
        """Register the agent; return the delivery mode and the platform's inbound secret, and store an issued token.

        `delivery` None: the platform's own setting applies.

        Raises:
            PlatformRejected: the platform does not accept the URL or the delivery mode.
        """
        body: JsonObject = {"id": self.workspace_id, "agent_card": card, "url": url}
        if delivery is not None:
            body["delivery_mode"] = delivery
        try:
            fields = as_object(await self._call("POST", "/registry/register", body))
        except PlatformUnauthorized:
            # If all tokens were revoked, the platform issues one to a request without a token.
            fields = as_object(await self._once("POST", "/registry/register", body, None, None, TIMEOUT_S))
        issued = text_field(fields, "auth_token")
        if issued:
            self._token.store(Secret(issued))
        mode: DeliveryMode = "poll" if fields.get("delivery_mode") == "poll" else "push"
        return mode, self._inbound_secret(fields)

    async def heartbeat(self, report: JsonObject) -> Secret | None:
        """Send a heartbeat; return the platform's inbound secret if the response has one."""
        body = {"workspace_id": self.workspace_id, **report}
        return self._inbound_secret(as_object(await self._call("POST", "/registry/heartbeat", body)))

    def _inbound_secret(self, fields: JsonObject) -> Secret | None:
        secret = as_secret(text_field(fields, "platform_inbound_secret"))
        if secret is not None:
            self._token.on_secret(secret)
        return secret

    async def is_removed(self) -> bool:
        """Ask whether the workspace was removed; False if the platform does not say so."""
        try:
            await self._call("GET", self._self)
        except WorkspaceRemoved:
            return True
        except PlatformError:
            return False
        return False

    # --- The inbox ---

    async def activity(self, *, limit: int = 100, **where: str | int | None) -> list[ActivityRow]:
        """Return rows of the workspace's activity, oldest first.

        `where`: the platform's parameters. With `since_id`, the rows after that row; else the newest rows, of the last
        `since_secs` seconds, before `before_ts` (RFC 3339). There may be fewer than `limit`, if the response would be
        too large.

        Raises:
            CursorLost: the platform does not have the row `since_id` any more.
        """
        given = {"type": "a2a_receive", "limit": limit, **where}
        params = {name: str(value) for name, value in given.items() if value is not None}
        try:
            found = await self._call("GET", f"{self._self}/activity", params=params)
        except ResponseTooLarge:
            if limit <= 1:
                raise
            return await self.activity(limit=limit // 2, **where)
        if not isinstance(found, list):
            raise PlatformUnreachable("The platform's activity is not a list.", outcome_unknown=True)
        rows = [row for each in found if (row := read_activity_row(each)) is not None]
        return rows if "since_id" in where else rows[::-1]

    async def acknowledge(self, seq: int) -> bool:
        """Acknowledge all rows up to `seq`, so that the platform may prune them; False if it has no such call."""
        try:
            await self._call("POST", f"{self._self}/activity/ack", {"acked_seq": seq})
        except PlatformRejected as rejected:
            if rejected.status in (404, 405):
                return False
            raise
        return True

    # --- Messages and delegations ---

    async def notify(self, text: str) -> None:
        """Show the user a message."""
        await self._call("POST", f"{self._self}/notify", {"message": text})

    async def send(
        self, target_id: str, text: str, message_id: str, metadata: JsonObject | None = None, timeout_s: float = PROXY_S
    ) -> None:
        """Send another agent a message through the platform; what it replies at once is dropped."""
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
        fields = as_object(await self._call_proxy(path, body, timeout_s))
        error = fields.get("error")
        if error is not None:
            raise PlatformRejected(f"The other agent rejected the message: {_error_text(error)}", status=200)

    async def peers(self) -> list[PlatformPeer]:
        """Return the agents that this workspace may send messages to."""
        found = await self._call("GET", f"/registry/{quote(self.workspace_id, safe='')}/peers")
        return [peer for each in as_objects(found) if (peer := _read_peer(each)).id]

    async def delegate(self, target_id: str, task: str, idempotency_key: str | None = None) -> str:
        """Give another agent a task to do in the background; return the delegation's id."""
        body: JsonObject = {"target_id": target_id, "task": task}
        if idempotency_key is not None:
            body["idempotency_key"] = idempotency_key
        return text_field(as_object(await self._call("POST", f"{self._self}/delegate", body)), "delegation_id")

    async def delegations(self) -> list[Delegation]:
        """Return the latest delegations of this workspace."""
        return [
            Delegation(
                text_field(row, "delegation_id") or text_field(row, "id"),
                text_field(row, "target_id"),
                text_field(row, "status"),
                text_field(row, "response_preview") or text_field(row, "result"),
                text_field(row, "error") or text_field(row, "error_detail"),
            )
            for row in as_objects(await self._call("GET", f"{self._self}/delegations"))
        ]

    # --- Memory ---

    async def commit_memory(self, content: str) -> None:
        """Store a text for this workspace."""
        await self._call("POST", f"{self._self}/memories", {"content": content, "scope": "LOCAL"})

    async def recall_memories(self, query: str = "") -> list[Memory]:
        """Return the stored texts that match `query`; all of them if it is empty."""
        params = {"scope": "LOCAL", **({"q": query} if query else {})}
        rows = as_objects(await self._call("GET", f"{self._self}/memories", params=params))
        return [Memory(text_field(row, "content"), parse_time(text_field(row, "created_at"))) for row in rows]

    # --- HTTP ---

    async def _call(
        self,
        method: str,
        path: str,
        body: JsonObject | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> JsonValue:
        """Send a request and return the response; if the token is rejected, try each other one."""
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

    async def _call_proxy(self, path: str, body: JsonObject, timeout_s: float) -> JsonValue:
        """Send a request to another agent, whose own 401 and 410 the proxy passes on."""
        while True:
            token = self._token.current
            try:
                return await self._once("POST", path, body, None, token, timeout_s)
            except WorkspaceRemoved as error:
                raise PlatformRejected("The other agent was removed from the platform.", status=410) from error
            except PlatformUnauthorized as error:
                # A call of the workspace's own shows whose 401 it is, and finds a token that was rotated.
                await self._call("GET", f"{self._self}/activity", params={"limit": "1"})
                if self._token.current == token:
                    raise PlatformUnreachable("The other agent rejects the platform's token.") from error

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
            # httpx applies its timeout to each chunk of a response.
            with anyio.fail_after(timeout_s + CONNECT_S):
                async with self._http.stream(
                    method, path, json=body, params=params, headers=headers, timeout=timeout
                ) as response:
                    content = await _read_body(response)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise PlatformUnreachable("The platform cannot be reached.") from error
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise PlatformUnreachable(
                f"The platform did not respond ({type(error).__name__}).", outcome_unknown=True
            ) from error
        return _check(response, content, path)


@asynccontextmanager
async def open_platform_client(
    url: str, workspace_id: str, token: WorkspaceToken, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[PlatformClient]:
    """Open the client of one workspace on the platform at `url`."""
    # A redirect would carry the token elsewhere.
    async with httpx.AsyncClient(
        base_url=url, headers={"Origin": url}, follow_redirects=False, transport=transport
    ) as http:
        yield PlatformClient(http, workspace_id, token)


def _read_peer(row: JsonObject) -> PlatformPeer:
    card = as_object(row.get("agent_card"))
    name, role, status = (text_field(row, key) for key in ("name", "role", "status"))
    lines = [
        f"name: {name}, role: {role}, status: {status}",
        text_field(card, "description"),
        *(f"- {text_field(each, 'name')}: {text_field(each, 'description')}" for each in objects(card, "skills")),
    ]
    return PlatformPeer(text_field(row, "id"), name, "\n".join(line for line in lines if line))


async def _read_body(response: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise ResponseTooLarge(
                f"The platform's response has more than {MAX_BODY_BYTES} bytes.", outcome_unknown=True
            )
    return bytes(content)


def _check(response: httpx.Response, content: bytes, path: str) -> JsonValue:
    """Return a response's JSON, or raise the error that its status means."""
    status = response.status_code
    body = parse_json(content)
    if status < 300:
        if body is None:
            raise PlatformUnreachable("The platform's response is not JSON.", outcome_unknown=True)
        return body
    fields = as_object(body)
    sentence = _error_text(fields.get("error"))
    match status:
        case 401:
            raise PlatformUnauthorized("The platform rejects the workspace's token.")
        case 410 if path.endswith("/activity") and "removed" not in sentence:
            raise CursorLost("The platform no longer knows the inbox's cursor.")
        case 410:
            raise WorkspaceRemoved("The workspace was removed from the platform.")
        case 429:
            raise PlatformBusy("The platform's rate limit is reached.", retry_after_s=_retry_after(response, fields))
        case 503 if fields.get("busy") or fields.get("restarting") or fields.get("waking"):
            raise PlatformBusy(f"The other agent is busy: {sentence}", retry_after_s=_retry_after(response, fields))
        case _ if status >= 500:
            raise PlatformUnreachable(f"The platform responds with HTTP {status}.", outcome_unknown=True)
        case _:
            raise PlatformRejected(f"The platform rejects the request (HTTP {status}): {sentence}", status=status)


def _retry_after(response: httpx.Response, fields: JsonObject) -> float:
    value: object = response.headers.get("retry-after") or fields.get("retry_after")
    try:
        seconds = float(str(value))
    except ValueError:
        return USUAL_RETRY_AFTER_S
    return min(max(0.0, seconds), LONGEST_RETRY_AFTER_S)


def _error_text(error: JsonValue) -> str:
    text = text_field(error, "message") if isinstance(error, dict) else error
    return re.sub(r"\s+", " ", text)[:MAX_ERROR_CHARS] if isinstance(text, str) else ""
