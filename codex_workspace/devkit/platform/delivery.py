"""How the stand-in of the platform brings messages to agents: into the inbox, or by a plain POST to their address.

A POST waits so long for an answer and no longer; the same body then waits for a heartbeat that tells of an idle agent.
What an agent sees of it, and what its caller is told, is as in the platform of May 2026. One thing of it is a fault
there: a message whose second delivery takes too long as well counts as delivered, and its answer is lost.
"""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import anyio
import httpx
from anyio.abc import TaskGroup

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.devkit.platform.faults import Fault, Faults
from codex_workspace.devkit.platform.records import NewRow, Queued, Workspace
from codex_workspace.devkit.platform.store import PlatformStore
from codex_workspace.platform.client_types import text_of_parts

MAX_ANSWER_BYTES: Final = 10 << 20
DIAL_S: Final = 10.0
MAX_ATTEMPTS: Final = 5
NOT_REACHED: Final = 502
BUSY_RETRY_S: Final = 30

ANSWER: Final = "answer"
NOTIFICATION: Final = "notification"


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """What a caller is told of its message.

    busy: the agent did not answer in time, or broke off. failed: the message did not get an answer, whatever `status`
    says. answer: the agent's own body, where `body` is the platform's word on it.
    """

    status: int
    body: JsonValue
    busy: bool = False
    failed: bool = False
    answer: JsonValue = None

    @property
    def result(self) -> JsonObject | None:
        """Return the JSON-RPC result, where the agent has answered with one."""
        found = self.body.get("result") if isinstance(self.body, dict) else None
        return found if self.status < 300 and isinstance(found, dict) else None


@dataclass(frozen=True, slots=True)
class PushedMessage:
    """One POST to an agent: the bytes that were sent, and what came of it."""

    workspace_id: str
    body: bytes
    status: int
    busy: bool


@dataclass(slots=True)
class Delivery:
    """Brings messages to agents.

    wait_s: so long an agent's answer is waited for. retry_s: after so long work that did not reach its agent is given
    once more. part_name: what the key is called that says what a part of such work is.
    result_rows: whoever gave work gets a row when it is done. tells_secret: the platform shows agents who it is.
    changed: called when something was kept that somebody may wait for.
    """

    store: PlatformStore
    faults: Faults
    http: httpx.AsyncClient
    tasks: TaskGroup
    changed: Callable[[], None]
    wait_s: float = 180.0
    retry_s: float = 8.0
    part_name: str = "type"
    result_rows: bool = False
    tells_secret: bool = False
    pushes: list[PushedMessage] = field(default_factory=list)

    def write(self, row: NewRow) -> str:
        """Write a row of activity."""
        at_same_time = self.faults.happens(Fault.SAME_TIME, f"/workspaces/{row.workspace_id}/activity")
        row_id = self.store.write(row, at_same_time=at_same_time)
        self.changed()
        return row_id

    async def send(
        self, caller_id: str | None, target: Workspace, request: JsonObject, wait_s: float | None = None
    ) -> DeliveryOutcome:
        """Bring a JSON-RPC request to an agent, by its own way; `caller_id` None: the user."""
        if target.delivery == "poll":
            method = _text(request, "method")
            summary = f"{method} → {target.name} (queued for poll)"
            self.write(NewRow(target.id, "a2a_receive", caller_id, target.id, method, summary, request))
            return DeliveryOutcome(200, {"status": "queued", "delivery_mode": "poll", "method": method})
        if not target.url:
            return DeliveryOutcome(503, {"error": "workspace has no URL", "status": target.status}, failed=True)
        body = json.dumps(request).encode()
        outcome = await self._push(caller_id, target, request, body, wait_s or self.wait_s)
        if not outcome.busy:
            return outcome
        # Its heartbeat may have come in the meantime.
        now = self.store.workspace(target.id) or target
        if now.queues_itself:
            refused: JsonObject = {"error": "workspace agent busy", "busy": True, "native_session": True}
            return DeliveryOutcome(503, {**refused, "retry_after": BUSY_RETRY_S}, failed=True)
        queue_id, depth = self.store.enqueue(target.id, caller_id, message_id_of(request), body)
        self.changed()
        said: JsonObject = {
            "queued": True,
            "queue_id": queue_id,
            "queue_depth": depth,
            "message": "workspace agent busy — request queued",
        }
        return DeliveryOutcome(202, said)

    async def drain(self, workspace_id: str) -> None:
        """Deliver the message that has waited longest for an agent that has time now."""
        target, item = self.store.workspace(workspace_id), self.store.take_queued(workspace_id)
        if item is None or target is None:
            return
        request: JsonObject = json.loads(item.body)
        outcome = await self._push(item.caller_id, target, request, item.body, self.wait_s)
        if outcome.busy or not outcome.failed:
            # As there: busy once more means queued, queued means taken, and that it is the same message is not seen.
            self.store.settle_queued(item.id, "completed", outcome.body)
            if not outcome.busy:
                self._answered_late(request, outcome)
        else:
            self._try_again_later(item, request, outcome)
        self.changed()

    def _try_again_later(self, item: Queued, request: JsonObject, outcome: DeliveryOutcome) -> None:
        if item.attempts < MAX_ATTEMPTS:
            self.store.settle_queued(item.id, "queued", outcome.body)
            return
        self.store.settle_queued(item.id, "failed", outcome.body)
        delegation_id = _delegation_of(request)
        if delegation_id is not None:
            self._settle(delegation_id, "failed", error=_error_of(outcome))

    def _answered_late(self, request: JsonObject, outcome: DeliveryOutcome) -> None:
        delegation_id = _delegation_of(request)
        if delegation_id is not None:
            self._settle(delegation_id, "completed", result=text_for_delegation(outcome.body))

    async def delegate(self, delegation_id: str) -> None:
        """Bring work to whom it was given, and write down what came of it."""
        given = self.store.delegation(delegation_id)
        target = None if given is None else self.store.workspace(given.target_id)
        if given is None or target is None:
            return
        request: JsonObject = {
            "jsonrpc": "2.0",
            "id": str(uuid.uuid4()),
            "method": "message/send",
            "params": {
                "message": {
                    "role": "user",
                    "messageId": delegation_id,
                    "parts": [{self.part_name: "text", "text": given.task}],
                    "metadata": {"delegation_id": delegation_id},
                }
            },
        }
        self._settle(delegation_id, "in_progress")
        outcome = await self.send(given.source_id, target, request)
        if outcome.status == NOT_REACHED:
            await anyio.sleep(self.retry_s)
            outcome = await self.send(given.source_id, self.store.workspace(target.id) or target, request)
        if outcome.failed:
            self._settle(delegation_id, "failed", error=_error_of(outcome))
        elif outcome.status == 202:
            self._settle(delegation_id, "queued")
        else:
            # Of an inbox it is only known that it holds the work; that word is the result.
            self._settle(delegation_id, "completed", result=text_for_delegation(outcome.body))

    def _settle(self, delegation_id: str, status: str, result: str = "", error: str = "") -> None:
        self.store.settle_delegation(delegation_id, status, result, error)
        given = self.store.delegation(delegation_id)
        if given is not None and status in ("completed", "failed", "queued"):
            row = result_row(given.source_id, given.target_id, delegation_id, result, error)
            if status == "queued":
                waits: JsonObject = {"delegation_id": delegation_id, "queued": True}
                row = replace(row, summary="Delegation queued — target at capacity", response=waits)
            self.write(replace(row, activity_type="delegation", request=None, status=status))
            if self.result_rows and status != "queued":
                self.write(row)
        self.changed()

    async def _push(
        self, caller_id: str | None, target: Workspace, request: JsonObject, body: bytes, wait_s: float
    ) -> DeliveryOutcome:
        """POST a body to an agent; the row is written, and the user sees the answer, as the platform does it."""
        started = time.monotonic()
        outcome = await self._post(target, body, wait_s)
        self.pushes.append(PushedMessage(target.id, body, outcome.status, outcome.busy))
        if caller_id is None and not outcome.busy and not outcome.failed:
            text = text_on_canvas(outcome.result)
            if text:
                self.store.show(target.id, ANSWER, text)
        if not outcome.busy:
            method = _text(request, "method")
            self.write(
                NewRow(
                    *(target.id, "a2a_receive", caller_id, target.id, method),
                    summary=f"{method} → {target.name}",
                    request=request,
                    response=outcome.answer if outcome.failed else outcome.body,
                    duration_ms=round((time.monotonic() - started) * 1000),
                    status="error" if outcome.failed else "ok",
                    error=_error_of(outcome) if outcome.failed else None,
                )
            )
        self.changed()
        return outcome

    async def _post(self, target: Workspace, body: bytes, wait_s: float) -> DeliveryOutcome:
        headers = {"Content-Type": "application/json"}
        if self.tells_secret:
            headers["Authorization"] = f"Bearer {target.inbound_secret}"
        timeout = httpx.Timeout(wait_s, connect=DIAL_S)
        try:
            async with self.http.stream("POST", target.url, content=body, headers=headers, timeout=timeout) as response:
                return await _read(response)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, httpx.UnsupportedProtocol):
            return DeliveryOutcome(NOT_REACHED, {"error": "failed to reach workspace agent"}, failed=True)
        except httpx.HTTPError:
            return DeliveryOutcome(503, {"error": "workspace agent busy"}, busy=True)


async def _read(response: httpx.Response) -> DeliveryOutcome:
    content = bytearray()
    try:
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > MAX_ANSWER_BYTES:
                return DeliveryOutcome(
                    502, {"error": "agent response too large", "delivery_confirmed": True}, failed=True
                )
    except httpx.HTTPError:
        delivered = response.status_code < 300
        return DeliveryOutcome(
            502, {"error": "failed to read agent response", "delivery_confirmed": delivered}, failed=True
        )
    answer = _parsed(bytes(content))
    if response.status_code >= 300:
        error = _text(_object(answer), "error") or response.reason_phrase
        return DeliveryOutcome(response.status_code, {"error": error}, failed=True, answer=answer)
    if not content:
        return DeliveryOutcome(response.status_code, {"error": "agent returned empty response body"}, failed=True)
    return DeliveryOutcome(response.status_code, answer)


def _parsed(content: bytes) -> JsonValue:
    """Return an answer's JSON, or its text where it is none."""
    try:
        parsed: JsonValue = json.loads(content)
    except (ValueError, RecursionError):
        return content.decode("utf-8", "replace")
    return parsed


def result_row(source_id: str, target_id: str, delegation_id: str, result: str, error: str = "") -> NewRow:
    """Return the row by which whoever gave work hears of its end: from itself, without a message, with an answer."""
    return NewRow(
        source_id,
        "a2a_receive",
        source_id,
        target_id,
        "delegate_result",
        summary="Delegation failed" if error else "Delegation result delivered",
        request={"delegation_id": delegation_id},
        response={"text": result, "delegation_id": delegation_id},
        status="error" if error else "ok",
        error=error or None,
    )


def message_id_of(request: JsonObject) -> str | None:
    """Return the messageId of a JSON-RPC request."""
    return _text(_object(_object(request.get("params")).get("message")), "messageId") or None


def _delegation_of(request: JsonObject) -> str | None:
    message = _object(_object(request.get("params")).get("message"))
    return _text(_object(message.get("metadata")), "delegation_id") or None


def text_for_delegation(body: JsonValue) -> str:
    """Return what the platform takes from an answer as the result of work: the first text, else all of it as JSON."""
    result = _object(_object(body).get("result"))
    for parts in (result.get("parts"), *_artifacts(result)):
        for part in parts if isinstance(parts, list) else []:
            if _object(part).get("kind") == "text" and _text(_object(part), "text"):
                return _text(_object(part), "text")
    return body if isinstance(body, str) else json.dumps(body)


def text_on_canvas(result: JsonObject | None) -> str:
    """Return what the canvas shows of an answer: parts and artifacts, nothing of a task's status."""
    if result is None:
        return ""
    found = [text_of_parts(parts) for parts in (result.get("parts"), *_artifacts(result))]
    return "\n".join(text for text in found if text)


def _artifacts(result: JsonObject) -> list[JsonValue]:
    artifacts = result.get("artifacts")
    return [_object(each).get("parts") for each in (artifacts if isinstance(artifacts, list) else [])]


def _error_of(outcome: DeliveryOutcome) -> str:
    return _text(_object(outcome.body), "error") or f"HTTP {outcome.status}"


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _text(holder: JsonObject, key: str) -> str:
    value = holder.get(key)
    return value if isinstance(value, str) else ""
