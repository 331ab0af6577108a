"""A stand-in of the platform, for tests and for play on one machine: `python -m codex_workspace platform`.

It speaks the platform's HTTP API to workspaces, with SQLite behind it, delivers to them by push and by inbox, and does
wrong on demand (`Faults`). A message of the user is a POST to `/workspaces/<id>/a2a` without a token, as the canvas
sends it; `GET /stand-in/shown/<id>` lists what the user was shown.

What it cannot prove, as it only does what was read in the platform's sources of May and August 2026:

- the order and the locks of the real platform under load, its rate limit (one per address, here one per workspace), its
  database's failures other than by an error's number, and what it does of messages on their way when it ends;
- anything of the firewall before it, of origins, of provisioning (nothing is started, restarted or given tokens but by
  `token_file`), of liveness (nobody goes offline for silence), of budgets, and of what the canvas draws;
- that a release of the platform, or of its runtime's package, still is as they were then.
"""

import contextlib
import ipaddress
import json
import logging
import os
import signal
import ssl
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, wraps
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import anyio
import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codex_workspace.groups import plain_task_group
from codex_workspace.server import bind, serving
from codex_workspace.stand_in_delivery import NOTIFICATION, Delivery, Outcome, Push
from codex_workspace.stand_in_faults import Fault, Faults, read_faults
from codex_workspace.stand_in_store import CursorGone, Era, Given, Mode, NewRow, StandInStore, Workspace
from codex_workspace.terminal import clean
from codex_workspace.wire import JsonObject, JsonValue

MAX_REQUEST_BYTES: Final = 1 << 20
MAX_PAGE: Final = 500
USUAL_PAGE: Final = 100
LONGEST_SINCE_S: Final = 2_592_000
MOST_LISTED: Final = 50

MAX_PREVIEW_BYTES: Final = 300
"""So much of the result of work is listed; the whole is in a row of the type `delegation`."""

KEPT_REQUESTS: Final = 10_000
MINUTE_S: Final = 60.0

SELF_REPORTED: Final = frozenset(
    ("a2a_send", "a2a_receive", "task_update", "agent_log", "skill_promotion", "memory_write", "error")
)


@dataclass(frozen=True, slots=True)
class Options:
    """How the platform is.

    mode: how it delivers to whoever does not say. era: see `Era`; of August are acknowledging rows, work that was
    received in the list of work, and `kind` for `type` in the parts of work. wait_s: so long an
    agent's answer is waited for. rate_per_minute: of each workspace. private_urls: agents may be at private addresses.
    retry_s, result_rows, tells_secret: see `Delivery`.
    """

    mode: Mode = "push"
    era: Era = "may"
    wait_s: float = 180.0
    rate_per_minute: int = 600
    private_urls: bool = False
    retry_s: float = 8.0
    result_rows: bool = False
    tells_secret: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that a workspace has sent; `at`: a monotonic clock's seconds."""

    workspace_id: str
    method: str
    path: str
    status: int
    at: float


class StandIn:
    """A platform that runs; what tests do to it, and see of it."""

    def __init__(self, url: str, store: StandInStore, faults: Faults, delivery: Delivery, options: Options) -> None:
        self.url: Final = url
        self.store: Final = store
        self.faults: Final = faults
        self.requests: Final[deque[Asked]] = deque(maxlen=KEPT_REQUESTS)
        self._delivery = delivery
        self._options = options
        self._changed = anyio.Event()
        delivery.changed = self.notice

    def notice(self) -> None:
        """Wake those who wait in `until`."""
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds; it is looked at again whenever something was kept or asked."""
        while not holds():
            await self._changed.wait()

    # --- What the operator, the user and other agents do ---

    def add_workspace(
        self,
        workspace_id: str,
        token: str | None = None,
        delivery: Mode | None = None,
        *,
        name: str = "",
        role: str = "",
        parent_id: str | None = None,
        url: str = "",
        token_file: Path | None = None,
    ) -> None:
        """Make a workspace; without a `token`, one is minted at its first registration.

        url: where it is, whatever it says itself. token_file: where a provisioner writes its new tokens.
        """
        self.store.add_workspace(
            workspace_id,
            delivery=delivery or self._options.mode,
            name=name,
            role=role,
            parent_id=parent_id,
            url=url,
            token_file=token_file,
        )
        if token is not None:
            self.store.mint(workspace_id, token)

    async def canvas_message(self, workspace_id: str, text: str, message_id: str | None = None) -> Outcome:
        """Send an agent a message of the user's; with push it returns when the agent has answered."""
        request = message_of(text, message_id)
        request["params"] = {"message": _inside(request, "message"), "metadata": {"history": []}}
        return await self._delivery.send(None, self._known(workspace_id), request)

    async def peer_message(
        self,
        from_id: str,
        to_id: str,
        text: str,
        message_id: str | None = None,
        metadata: JsonObject | None = None,
    ) -> Outcome:
        """Send an agent another's message, or by the same ids its own prompt."""
        return await self._delivery.send(from_id, self._known(to_id), message_of(text, message_id, metadata))

    def upload(self, workspace_id: str, name: str, content: bytes, mime_type: str = "text/plain") -> str:
        """Put a file of the user's before an agent that polls: the instruction to fetch it; returns the file's id."""
        file_id = self.store.upload(workspace_id, content)
        request: JsonObject = {
            "file_id": file_id,
            "name": name,
            "mimeType": mime_type,
            "size": len(content),
            "uri": f"platform-pending:{workspace_id}/{file_id}",
        }
        self.write(NewRow(workspace_id, "a2a_receive", None, workspace_id, "chat_upload_receive", name, request))
        return file_id

    def write(self, row: NewRow) -> str:
        """Write a row of any kind; returns its id."""
        return self._delivery.write(row)

    def rotate_token(self, workspace_id: str) -> str:
        """Make a workspace's tokens void and a new one, in its token file where it has one; returns it."""
        self.store.revoke(workspace_id)
        token = self.store.mint(workspace_id)
        file = self._known(workspace_id).token_file
        if file is not None:
            _write_secret(file, token)
        return token

    def revoke_tokens(self, workspace_id: str) -> None:
        """Make a workspace's tokens void; the next registration mints one."""
        self.store.revoke(workspace_id)

    def prune(self, workspace_id: str) -> None:
        """Forget all rows that a workspace has."""
        self.store.prune(workspace_id)

    def remove(self, workspace_id: str) -> None:
        """Remove a workspace."""
        self.store.remove(workspace_id)
        self.notice()

    # --- What became of it ---

    def workspace(self, workspace_id: str) -> Workspace:
        """Return a workspace as it is now."""
        return self._known(workspace_id)

    def activity(self, workspace_id: str) -> list[JsonObject]:
        """Return all rows of a workspace, oldest first."""
        return self.store.page(workspace_id, "august", limit=-1)[::-1]

    def notifications(self, workspace_id: str) -> list[str]:
        """Return what an agent has notified the user of, oldest first."""
        return [text for how, text in self.store.shown(workspace_id) if how == NOTIFICATION]

    def shown(self, workspace_id: str) -> list[str]:
        """Return what the user was shown of an agent, answers and notifications, oldest first."""
        return [text for _, text in self.store.shown(workspace_id)]

    @property
    def delegations(self) -> list[Given]:
        """Return the work that was given, oldest first."""
        return self.store.delegations()[::-1]

    @property
    def pushes(self) -> list[Push]:
        """Return what was sent to agents' addresses since the start."""
        return self._delivery.pushes

    def _known(self, workspace_id: str) -> Workspace:
        found = self.store.workspace(workspace_id)
        if found is None:
            raise LookupError(f"there is no workspace {workspace_id}")
        return found


@asynccontextmanager
async def running_stand_in(
    file: Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    options: Options | None = None,
    faults: Faults | None = None,
) -> AsyncIterator[StandIn]:
    """Run a platform while the block runs; what it keeps stays in `file`, so that leaving and entering is a restart.

    Raises:
        ConfigError: the port is taken.
    """
    options, faults = options or Options(), faults or Faults()
    store = StandInStore(file)
    store.requeue_dispatched()
    with contextlib.closing(store), bind(host, port) as listener:
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        # A proxy for the outside world may stand between.
        async with httpx.AsyncClient(trust_env=False, verify=_trusted()) as http, plain_task_group() as tasks:
            delivery = Delivery(
                *(store, faults, http, tasks, _nobody_waits),
                wait_s=options.wait_s,
                retry_s=options.retry_s,
                result_rows=options.result_rows,
                tells_secret=options.tells_secret,
                part_name="type" if options.era == "may" else "kind",
            )
            platform = StandIn(url, store, faults, delivery, options)
            async with serving(_app(_Api(platform, delivery, options), platform, options), listener):
                yield platform
            tasks.cancel_scope.cancel()


@cache
def _trusted() -> ssl.SSLContext:
    """Return whom agents behind TLS are to be vouched by; it takes 50 ms to read."""
    return ssl.create_default_context()


def _nobody_waits() -> None:
    pass


def message_of(text: str, message_id: str | None = None, metadata: JsonObject | None = None) -> JsonObject:
    """Return a request as the platform and its agents send it: A2A 0.3, `message/send`."""
    message: JsonObject = {
        "role": "user",
        "messageId": message_id or str(uuid.uuid4()),
        "parts": [{"kind": "text", "text": text}],
    }
    if metadata:
        message["metadata"] = metadata
    return {"jsonrpc": "2.0", "id": str(uuid.uuid4()), "method": "message/send", "params": {"message": message}}


# --- HTTP ---


class Refusal(Exception):
    """What is asked for is not done; `body` says why."""

    def __init__(self, status: int, error: str, /, **more: JsonValue) -> None:
        super().__init__(error)
        self.status = status
        self.body: JsonObject = {"error": error, **more}


Said: TypeAlias = "JsonValue | Response"
Endpoint = Callable[[Request], Awaitable[Said]]


def _answering(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            said = await endpoint(request)
        except Refusal as refusal:
            return JSONResponse(refusal.body, refusal.status)
        return said if isinstance(said, Response) else JSONResponse(said)

    return answer


def _app(api: "_Api", platform: StandIn, options: Options) -> Starlette:
    own = "/workspaces/{id}"
    routes: tuple[tuple[str, str, Endpoint], ...] = (
        ("POST", "/registry/register", api.register),
        ("POST", "/registry/heartbeat", api.heartbeat),
        ("GET", "/registry/discover/{id}", api.discover),
        ("GET", "/registry/{id}/peers", api.peers),
        ("GET", own, api.about),
        ("POST", f"{own}/a2a", api.proxy),
        ("GET", f"{own}/a2a/queue/{{queue_id}}", api.queued),
        ("POST", f"{own}/notify", api.notify),
        ("GET", f"{own}/activity", api.activity),
        ("POST", f"{own}/activity", api.report),
        *([("POST", f"{own}/activity/ack", api.acknowledge)] if options.era == "august" else []),
        ("POST", f"{own}/delegate", api.delegate),
        ("GET", f"{own}/delegations", api.delegations),
        ("POST", f"{own}/memories", api.remember),
        ("GET", f"{own}/memories", api.memories),
        ("GET", f"{own}/pending-uploads/{{file_id}}/content", api.uploaded),
        ("POST", f"{own}/pending-uploads/{{file_id}}/ack", api.fetched),
        ("GET", "/stand-in/shown/{id}", api.shown),
    )
    return Starlette(
        routes=[Route(path, _answering(endpoint), methods=[method]) for method, path, endpoint in routes],
        middleware=[Middleware(_Line, platform=platform, rate_per_minute=options.rate_per_minute)],
    )


@dataclass(slots=True)
class _Api:
    """The endpoints."""

    platform: StandIn
    delivery: Delivery
    options: Options

    @property
    def store(self) -> StandInStore:
        return self.platform.store

    # --- Being there ---

    async def register(self, request: Request) -> JsonValue:
        # Who was removed is answered as everybody is, and minted a token that is good for nothing: as there.
        body = await _body(request)
        workspace_id, card, url = _text(body, "id"), body.get("agent_card"), _text(body, "url")
        if not workspace_id or not isinstance(card, dict):
            raise Refusal(400, "id and agent_card are required")
        told = body.get("delivery_mode")
        if told not in (None, "", "push", "poll"):
            raise Refusal(400, "delivery_mode must be 'push' or 'poll'")
        known = self.store.workspace(workspace_id)
        if self.store.has_token(workspace_id):
            self._require_token(request, workspace_id)
        mode: Mode = self.options.mode if known is None else known.delivery
        match told:
            case "push" | "poll":
                mode = told
            case _:
                pass
        if mode == "push":
            self._require_url(url if known is None or not known.url else url or known.url)
        self.store.add_workspace(workspace_id, delivery=mode, name=_text(card, "name"))
        self.store.register(workspace_id, card, url, mode)
        said: JsonObject = {"status": "registered", "delivery_mode": mode}
        if not self.store.has_token(workspace_id):
            said["auth_token"] = self.store.mint(workspace_id)
        registered = self.store.workspace(workspace_id)
        if registered is not None:
            said["platform_inbound_secret"] = registered.inbound_secret
        return said

    def _require_url(self, url: str) -> None:
        if not url:
            raise Refusal(400, "url is required for push-mode workspaces")
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise Refusal(400, "invalid url")
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            if address.is_private and not address.is_loopback and not self.options.private_urls:
                raise Refusal(400, "url resolves to a private address")

    async def heartbeat(self, request: Request) -> JsonValue:
        body = await _body(request)
        workspace_id = _text(body, "workspace_id")
        if not workspace_id:
            raise Refusal(400, "workspace_id is required")
        workspace = self._known(workspace_id)
        self._require_token(request, workspace_id)
        rate, status = body.get("error_rate"), workspace.status
        if isinstance(rate, int | float):
            status = "degraded" if rate >= 0.5 else "online" if rate < 0.1 else status
        if body.get("runtime_state") == "wedged":
            status = "degraded"
        self.store.beat(workspace_id, body, status)
        now = self._known(workspace_id)
        if now.active_tasks < 1 and now.delivery == "push":
            self.delivery.tasks.start_soon(self.delivery.drain, workspace_id)
        return {"status": "ok", "platform_inbound_secret": now.inbound_secret}

    async def about(self, request: Request) -> JsonValue:
        workspace = self._known(request.path_params["id"])
        if workspace.status == "removed":
            raise _removed(workspace)
        return {**_listed(workspace), "current_task": _text(workspace.heartbeat, "current_task")}

    async def peers(self, request: Request) -> JsonValue:
        workspace_id = request.path_params["id"]
        self._require_token(request, workspace_id)
        me = self._known(workspace_id)
        return [_listed(other) for other in self.store.workspaces() if other.id != me.id and self._may_talk(me, other)]

    async def discover(self, request: Request) -> JsonValue:
        caller_id = request.headers.get("x-workspace-id")
        if not caller_id:
            raise Refusal(400, "X-Workspace-ID header is required")
        self._require_token(request, caller_id)
        target = self._known(request.path_params["id"])
        if not self._may_talk(self._known(caller_id), target):
            raise Refusal(403, "access denied: workspaces cannot communicate")
        if target.delivery == "push" and not target.url:
            raise Refusal(503, "workspace has no URL", status=target.status)
        return {"id": target.id, "url": target.url, "name": target.name, "status": target.status}

    # --- Talking ---

    async def proxy(self, request: Request) -> Said:
        caller_id = request.headers.get("x-workspace-id") or self._owner_of_token(request)
        body = _normal(await _body(request))
        if caller_id is not None:
            self._require_token(request, caller_id)
        target = self.store.workspace(request.path_params["id"])
        if target is None or target.status == "removed":
            raise Refusal(404, "workspace not found")
        if caller_id is not None and not self._may_talk(self._known(caller_id), target):
            raise Refusal(403, "access denied: workspaces cannot communicate per hierarchy rules")
        outcome = await self.delivery.send(caller_id, target, body, _seconds(request.headers.get("x-timeout")))
        if isinstance(outcome.body, str):
            return Response(outcome.body, outcome.status)
        return JSONResponse(outcome.body, outcome.status)

    async def queued(self, request: Request) -> JsonValue:
        found = self.store.queued(request.path_params["id"], request.path_params["queue_id"])
        if found is None:
            raise Refusal(404, "queue item not found")
        return found

    async def notify(self, request: Request) -> JsonValue:
        workspace = self._own(request)
        body = await _body(request)
        message, attachments = _text(body, "message"), body.get("attachments")
        if not message:
            raise Refusal(400, "message is required")
        for each in attachments if isinstance(attachments, list) else []:
            if not (isinstance(each, dict) and _text(each, "uri") and _text(each, "name")):
                raise Refusal(400, "attachment uri and name are required")
        if not workspace.talks_to_user:
            raise Refusal(403, "talk_to_user_disabled", hint="the user has not allowed it")
        self.store.show(workspace.id, NOTIFICATION, message)
        summary = f"Agent message: {message[:80]}"
        self.delivery.write(NewRow(workspace.id, method="notify", summary=summary, response={"result": message}))
        return {"status": "sent"}

    # --- Activity ---

    async def activity(self, request: Request) -> JsonValue:
        workspace, asked = self._own(request), request.query_params
        since_id, source, peer_id = asked.get("since_id"), asked.get("source"), asked.get("peer_id")
        if source not in (None, "", "canvas", "agent"):
            raise Refusal(400, "source must be 'canvas' or 'agent'")
        if peer_id and not _is_uuid(peer_id):
            raise Refusal(400, "peer_id must be a UUID")
        if since_id and self.platform.faults.happens(Fault.PRUNED, request.url.path):
            self.store.prune(workspace.id, [since_id])
        try:
            rows = self.store.page(
                workspace.id,
                self.options.era,
                since_id=since_id or None,
                since_s=_since(asked.get("since_secs")),
                before_us=_before(asked.get("before_ts")),
                kind=asked.get("type") or None,
                source=source or None,
                peer_id=peer_id or None,
                limit=_limit(asked.get("limit")),
            )
        except CursorGone:
            raise Refusal(410, f"since_id cursor not found ({since_id}); omit since_id to reset") from None
        return [self._as_given(row, request.url.path) for row in rows]

    def _as_given(self, row: JsonObject, path: str) -> JsonObject:
        if row.get("request_body") is None or not self.platform.faults.happens(Fault.TEXT_BODY, path):
            return row
        return {**row, "request_body": json.dumps(row["request_body"])}

    async def report(self, request: Request) -> JsonValue:
        workspace = self._own(request)
        body = await _body(request)
        kind, source = _text(body, "activity_type") or _text(body, "type"), _text(body, "source_id")
        if kind not in SELF_REPORTED:
            raise Refusal(400, "unknown activity_type")
        if source not in ("", workspace.id):
            raise Refusal(403, "source_id must be the workspace itself")
        duration = body.get("duration_ms")
        self.delivery.write(
            NewRow(
                *(workspace.id, kind, workspace.id, _text(body, "target_id") or None, _text(body, "method") or None),
                summary=_text(body, "summary"),
                request=body.get("request_body"),
                response=body.get("response_body"),
                duration_ms=duration if isinstance(duration, int) else None,
                status=_text(body, "status") or "ok",
                error=_text(body, "error_detail") or None,
            )
        )
        return {"status": "logged"}

    async def acknowledge(self, request: Request) -> JsonValue:
        workspace = self._own(request)
        seq = (await _body(request)).get("acked_seq")
        if not isinstance(seq, int) or seq < 0:
            raise Refusal(400, "acked_seq must be a non-negative number")
        return {"last_acked_seq": self.store.acknowledge(workspace.id, seq)}

    # --- Work, memories, files ---

    async def delegate(self, request: Request) -> Said:
        workspace = self._own(request)
        body = await _body(request)
        target_id, task = _text(body, "target_id"), _text(body, "task")
        if not _is_uuid(target_id) or not task:
            raise Refusal(400, "target_id (a UUID) and task are required")
        target = self.store.workspace(target_id)
        if target is None:
            raise Refusal(404, "target workspace not found")
        if not self._may_talk(workspace, target):
            raise Refusal(403, "access denied: workspaces cannot communicate per hierarchy rules")
        delegation_id, known = self.store.delegate(
            workspace.id, target_id, task, _text(body, "idempotency_key") or None
        )
        said: JsonObject = {"delegation_id": delegation_id, "status": "delegated", "target_id": target_id}
        if known:
            return {**said, "idempotent_hit": True}
        self.delivery.tasks.start_soon(self.delivery.delegate, delegation_id)
        return JSONResponse(said, 202)

    async def delegations(self, request: Request) -> JsonValue:
        workspace = self._own(request)
        given = self.store.delegations(workspace.id if self.options.era == "may" else None)
        mine = [each for each in given if workspace.id in (each.source_id, each.target_id)]
        return [_told(each, workspace.id) for each in mine[:MOST_LISTED]]

    async def remember(self, request: Request) -> Response:
        workspace = self._own(request)
        body = await _body(request)
        content, scope = _text(body, "content"), _text(body, "scope")
        if not content or scope not in ("LOCAL", "TEAM", "GLOBAL"):
            raise Refusal(400, "content and scope (LOCAL, TEAM or GLOBAL) are required")
        memory_id = self.store.remember(workspace.id, scope, content)
        return JSONResponse({"id": memory_id, "scope": scope, "namespace": "general"}, 201)

    async def memories(self, request: Request) -> JsonValue:
        workspace, asked = self._own(request), request.query_params
        return [*self.store.memories(workspace.id, asked.get("scope", ""), asked.get("q", ""))]

    async def uploaded(self, request: Request) -> Response:
        content = self.store.uploaded(self._own(request).id, request.path_params["file_id"])
        if content is None:
            raise Refusal(404, "pending upload not found")
        return Response(content, media_type="application/octet-stream")

    async def fetched(self, request: Request) -> JsonValue:
        self.store.fetched(self._own(request).id, request.path_params["file_id"])
        return {"acked": True}

    async def shown(self, request: Request) -> JsonValue:
        workspace = self._known(request.path_params["id"])
        return [{"how": how, "text": text} for how, text in self.store.shown(workspace.id)]

    # --- Who may ---

    def _known(self, workspace_id: str) -> Workspace:
        workspace = self.store.workspace(workspace_id)
        if workspace is None:
            raise Refusal(404, "workspace not found")
        return workspace

    def _own(self, request: Request) -> Workspace:
        """Return the workspace whose path it is, and whose token was shown."""
        workspace_id: str = request.path_params["id"]
        self._require_token(request, workspace_id)
        return self._known(workspace_id)

    def _owner_of_token(self, request: Request) -> str | None:
        token = _token(request)
        return None if token is None else self.store.owner_of(token)

    def _require_token(self, request: Request, workspace_id: str) -> None:
        token = _token(request)
        if token is None:
            raise Refusal(401, "missing workspace auth token")
        if self.store.owner_of(token) != workspace_id:
            raise Refusal(401, "invalid workspace auth token")

    def _may_talk(self, one: Workspace, other: Workspace) -> bool:
        """Tell whether two may talk: oneself, children of the same parent, and those above and below."""
        if one.id == other.id or one.parent_id == other.parent_id:
            return True
        return one.id in self._above(other) or other.id in self._above(one)

    def _above(self, workspace: Workspace) -> set[str]:
        found: set[str] = set()
        parent_id = workspace.parent_id
        while parent_id is not None and parent_id not in found:
            found.add(parent_id)
            parent = self.store.workspace(parent_id)
            parent_id = None if parent is None else parent.parent_id
        return found


def _removed(workspace: Workspace) -> Refusal:
    hint = "this workspace was deleted; create another"
    return Refusal(410, "workspace removed", id=workspace.id, removed_at=workspace.removed_at, hint=hint)


def _listed(workspace: Workspace) -> JsonObject:
    return {
        "id": workspace.id,
        "name": workspace.name,
        "role": workspace.role,
        "tier": 2,
        "status": workspace.status,
        "agent_card": workspace.card,
        "url": workspace.url,
        "parent_id": workspace.parent_id,
        "active_tasks": workspace.active_tasks,
    }


def _told(given: Given, workspace_id: str) -> JsonObject:
    said: JsonObject = {
        "delegation_id": given.id,
        "source_id": given.source_id,
        "target_id": given.target_id,
        "direction": "sent" if given.source_id == workspace_id else "received",
        "summary": given.task[:200],
        "status": given.status,
        "created_at": given.created_at,
    }
    if given.result:
        said["response_preview"] = given.result.encode()[:MAX_PREVIEW_BYTES].decode("utf-8", "ignore")
    if given.error:
        said["error"] = given.error
    return said


async def _body(request: Request) -> JsonObject:
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_REQUEST_BYTES:
            # It reads no further, and what it has read is no JSON.
            raise Refusal(400, "invalid JSON")
    try:
        parsed: JsonValue = json.loads(content)
    except (ValueError, RecursionError):
        raise Refusal(400, "invalid JSON") from None
    if not isinstance(parsed, dict):
        raise Refusal(400, "invalid JSON")
    return parsed


def _normal(body: JsonObject) -> JsonObject:
    """Return a request with what is missing of JSON-RPC and of the message put in."""
    whole: JsonObject = {"jsonrpc": "2.0", "id": str(uuid.uuid4()), **body}
    message = _inside(whole, "message")
    params = whole.get("params")
    if message and not message.get("messageId") and isinstance(params, dict):
        whole["params"] = {**params, "message": {**message, "messageId": str(uuid.uuid4())}}
    return whole


def _inside(request: JsonObject, key: str) -> JsonObject:
    params = request.get("params")
    found = params.get(key) if isinstance(params, dict) else None
    return found if isinstance(found, dict) else {}


def _token(request: Request) -> str | None:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" and token else None


def _since(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise Refusal(400, "since_secs must be a positive integer")
    return min(int(text), LONGEST_SINCE_S)


def _before(text: str | None) -> int | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise Refusal(400, "before_ts must be an RFC3339 time")
    return round(moment.timestamp() * 1_000_000)


def _limit(text: str | None) -> int:
    if not text or not text.isdecimal() or int(text) == 0:
        return USUAL_PAGE
    return min(int(text), MAX_PAGE)


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdecimal() and int(text) > 0 else None


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _text(holder: Mapping[str, JsonValue], key: str) -> str:
    value = holder.get(key)
    return value if isinstance(value, str) else ""


def _write_secret(file: Path, text: str) -> None:
    new = file.with_name(f"{file.name}.new")
    with os.fdopen(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as out:
        out.write(text)
    new.replace(file)


# --- The line, and what goes wrong on it ---


@dataclass(slots=True)
class _Rate:
    """How many requests each workspace has sent in the minute that runs."""

    per_minute: int
    began: float = field(default_factory=time.monotonic)
    counted: Counter[str] = field(default_factory=Counter)

    def wait_s(self, workspace_id: str) -> int:
        """Count a request; return in how many seconds there is room again, 0 where there is now."""
        now = time.monotonic()
        if now - self.began >= MINUTE_S:
            self.began = now
            self.counted.clear()
        self.counted[workspace_id] += 1
        return 0 if self.counted[workspace_id] <= self.per_minute else int(self.began + MINUTE_S - now) + 1


class _Line:
    """Stands before the endpoints: counts requests, keeps which there were, and does wrong what is to go wrong.

    Requests of the user, who shows no token and names no workspace, go through as they are.
    """

    def __init__(self, app: ASGIApp, platform: StandIn, rate_per_minute: int) -> None:
        self._app = app
        self._platform = platform
        self._rate = _Rate(rate_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        token = _token(request)
        workspace_id = request.headers.get("x-workspace-id") or (token and self._platform.store.owner_of(token))
        if workspace_id is None and token is None:
            await self._app(scope, receive, send)
            return
        caller = _Caller(self._platform, workspace_id or "", request, send)
        refused = await self._refusal(caller)
        if refused is not None:
            await refused(scope, receive, caller.sent)
        elif self._platform.faults.happens(Fault.LOST, caller.path):
            await self._app(scope, receive, caller.swallowed)
            await caller.lose()
        else:
            await self._app(scope, receive, caller.sent)

    async def _refusal(self, caller: "_Caller") -> Response | None:
        faults = self._platform.faults
        if faults.happens(Fault.LATE, caller.path):
            await anyio.sleep(faults.random.uniform(0.1, 1) * faults.late_s)
        wait_s = self._rate.wait_s(caller.workspace_id)
        if faults.happens(Fault.TOO_MANY, caller.path):
            wait_s = faults.retry_after_s
        if wait_s:
            headers = {
                "Retry-After": str(wait_s),
                "X-RateLimit-Limit": str(self._rate.per_minute),
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": str(wait_s),
            }
            return JSONResponse({"error": "rate limit exceeded", "retry_after": wait_s}, 429, headers)
        if faults.happens(Fault.FAILING, caller.path):
            return _failing(faults.random.choice((500, 502, 503)))
        if faults.happens(Fault.UNAUTHORIZED, caller.path):
            return JSONResponse({"error": "invalid workspace auth token"}, 401)
        known = self._platform.store.workspace(caller.workspace_id)
        has_file = known is not None and known.token_file is not None and known.status != "removed"
        if has_file and faults.happens(Fault.ROTATED, caller.path):
            self._platform.rotate_token(caller.workspace_id)
        return None


def _failing(status: int) -> Response:
    match status:
        case 503:
            return JSONResponse({"error": "platform unavailable", "code": "platform_unavailable"}, 503)
        case 502:
            return Response("<html>502 Bad Gateway</html>", 502, media_type="text/html")
        case _:
            return JSONResponse({"error": "internal error"}, status)


@dataclass(slots=True)
class _Caller:
    """A request of a workspace; takes note of its answer."""

    platform: StandIn
    workspace_id: str
    request: Request
    send: Send

    @property
    def path(self) -> str:
        return self.request.url.path

    async def sent(self, message: Message) -> None:
        self._note(message)
        await self.send(message)

    async def swallowed(self, message: Message) -> None:
        self._note(message)

    async def lose(self) -> None:
        """End the connection: uvicorn closes one whose answer is announced and does not come."""
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]}
        await self.send(head)

    def _note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            asked = Asked(self.workspace_id, self.request.method, self.path, message["status"], time.monotonic())
            self.platform.requests.append(asked)
            self.platform.notice()


# --- The command line ---


async def play(host: str, port: int, file: Path | None, mode: Mode, faults: str) -> int:
    """Run a platform until SIGTERM or SIGINT; print its address, and what the user is shown as it comes.

    Raises:
        ConfigError: a fault is unknown, or the port is taken.
    """
    shares = read_faults(faults)
    logging.getLogger("uvicorn.error").addFilter(_is_no_lost_answer)
    options = Options(mode=mode, private_urls=True)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with (
            running_stand_in(file, host=host, port=port, options=options, faults=Faults(shares)) as platform,
            plain_task_group() as tasks,
        ):
            _say(f"platform at {platform.url}")
            tasks.start_soon(_show, platform)
            async for _ in signals:
                break
            tasks.cancel_scope.cancel()
    return 0


def _is_no_lost_answer(record: logging.LogRecord) -> bool:
    """Tell whether it is worth a line; that answers are lost where they are to be lost is not."""
    return "without completing response" not in record.getMessage()


async def _show(platform: StandIn) -> None:
    """Print what the user is shown from now on."""
    seen = Counter({each.id: len(platform.shown(each.id)) for each in platform.store.workspaces()})

    def new() -> list[str]:
        lines = []
        for each in platform.store.workspaces():
            texts = platform.shown(each.id)
            lines += [f"{each.name}: {text}" for text in texts[seen[each.id] :]]
        return lines

    while True:
        await platform.until(lambda: bool(new()))
        for line in new():
            _say(line)
        seen.update({each.id: len(platform.shown(each.id)) - seen[each.id] for each in platform.store.workspaces()})


def _say(line: str) -> None:
    sys.stdout.write(f"{clean(line)}\n")
    sys.stdout.flush()
