"""The endpoints of the stand-in platform: permissions, requests and responses."""

import contextlib
import ipaddress
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.devkit.platform.delivery import NOTIFICATION, Delivery
from codex_workspace.devkit.platform.faults import Fault, Faults
from codex_workspace.devkit.platform.records import Era, Mode, NewRow, StoredDelegation, Workspace
from codex_workspace.devkit.platform.request_log import token_of
from codex_workspace.devkit.platform.store import CursorGone, PlatformStore

MAX_REQUEST_BYTES: Final = 1 << 20
MAX_PAGE: Final = 500
USUAL_PAGE: Final = 100
LONGEST_SINCE_S: Final = 2_592_000
MOST_LISTED: Final = 50

MAX_PREVIEW_BYTES: Final = 300
"""The length of a listed result; a row of the type `delegation` has all of it."""

SELF_REPORTED: Final = frozenset(
    ("a2a_send", "a2a_receive", "task_update", "agent_log", "skill_promotion", "memory_write", "error")
)


class Refusal(Exception):
    """The request is rejected; `body` says why."""

    def __init__(self, status: int, error: str, /, **more: JsonValue) -> None:
        super().__init__(error)
        self.status = status
        self.body: JsonObject = {"error": error, **more}


Body: TypeAlias = "JsonValue | Response"
Endpoint = Callable[[Request], Awaitable[Body]]


def _answering(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            body = await endpoint(request)
        except Refusal as refusal:
            return JSONResponse(refusal.body, refusal.status)
        return body if isinstance(body, Response) else JSONResponse(body)

    return answer


def routes_of(api: "Api") -> list[Route]:
    """Return the endpoints, with their addresses."""
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
        *([("POST", f"{own}/activity/ack", api.acknowledge)] if api.era == "august" else []),
        ("POST", f"{own}/delegate", api.delegate),
        ("GET", f"{own}/delegations", api.delegations),
        ("POST", f"{own}/memories", api.remember),
        ("GET", f"{own}/memories", api.memories),
        ("GET", f"{own}/pending-uploads/{{file_id}}/content", api.uploaded),
        ("POST", f"{own}/pending-uploads/{{file_id}}/ack", api.fetched),
        ("GET", "/stand-in/shown/{id}", api.shown),
    )
    return [Route(path, _answering(endpoint), methods=[method]) for method, path, endpoint in routes]


@dataclass(slots=True)
class Api:
    """The endpoints.

    mode: the delivery mode of agents that do not choose one. private_urls: accept private addresses of agents.
    """

    store: PlatformStore
    faults: Faults
    delivery: Delivery
    mode: Mode
    era: Era
    private_urls: bool

    # --- Being there ---

    async def register(self, request: Request) -> JsonValue:
        # Like the platform: a removed workspace gets the usual response, with a token that is not valid.
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
        mode: Mode = self.mode if known is None else known.delivery
        if told:
            mode = "poll" if told == "poll" else "push"
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
            if address.is_private and not address.is_loopback and not self.private_urls:
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

    async def proxy(self, request: Request) -> Body:
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
        if since_id and self.faults.happens(Fault.PRUNED, request.url.path):
            self.store.prune(workspace.id, [since_id])
        try:
            rows = self.store.page(
                workspace.id,
                self.era,
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
        if row.get("request_body") is None or not self.faults.happens(Fault.TEXT_BODY, path):
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

    async def delegate(self, request: Request) -> Body:
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
        given = self.store.delegations(workspace.id if self.era == "may" else None)
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
        token = token_of(request)
        return None if token is None else self.store.owner_of(token)

    def _require_token(self, request: Request, workspace_id: str) -> None:
        token = token_of(request)
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


def _told(given: StoredDelegation, workspace_id: str) -> JsonObject:
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
