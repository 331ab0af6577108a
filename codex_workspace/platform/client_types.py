"""Values and errors of the platform's HTTP API, and how its JSON bodies are read. Pure."""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from codex_workspace.common.errors import AgentError
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.jsonrpc import nested_or_empty, objects

DeliveryMode = Literal["push", "poll"]

MAX_DIGITS: Final = 300
MAX_DEPTH: Final = 100
_BRACKETS: Final = re.compile(rb'"(?:\\.|[^"\\])*+"|[][{}]', re.DOTALL)
"""The brackets of JSON, and its strings, so that brackets in strings are skipped."""


class PlatformError(AgentError):
    """A call to the platform failed.

    status: of the HTTP response. retry_after_s: how long the platform wants the agent to wait. outcome_unknown: the
    request may have taken effect.
    """

    def __init__(
        self, sentence: str, *, status: int = 0, retry_after_s: float = 0.0, outcome_unknown: bool = False
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.retry_after_s = retry_after_s
        self.outcome_unknown = outcome_unknown


class PlatformUnauthorized(PlatformError):
    """The platform rejects every token that the agent has."""


class WorkspaceRemoved(PlatformError):
    """The workspace was removed from the platform."""


class CursorLost(PlatformError):
    """The platform does not know the inbox's cursor (any more)."""


class PlatformRejected(PlatformError):
    """The platform rejects this request, and would reject it again."""


class PlatformBusy(PlatformError):
    """The rate limit is reached, or the other agent is busy; the request had no effect."""


class PlatformUnreachable(PlatformError):
    """The platform does not respond, or fails."""


class ResponseTooLarge(PlatformUnreachable):
    """The platform's response is larger than the client reads."""


@dataclass(frozen=True, slots=True)
class ActivityRow:
    """A row of a workspace's activity.

    created_at: the platform's timestamp, by which rows are ordered. source_id: the sender's workspace, None for the
    user. target_id: the workspace that the row is about. request: the JSON-RPC request, None if it is not an object.
    has_response: the row holds a response, so the message was pushed. seq: a growing number, None before August.
    """

    id: str
    created_at: str
    method: str = ""
    source_id: str | None = None
    summary: str = ""
    request: JsonObject | None = None
    response: JsonValue = None
    has_response: bool = False
    seq: int | None = None
    target_id: str | None = None


@dataclass(frozen=True, slots=True)
class PlatformPeer:
    """An agent that this workspace may send messages to; `card_text` describes it (untrusted)."""

    id: str
    name: str
    card_text: str


@dataclass(frozen=True, slots=True)
class Delegation:
    """A task that was given to another agent through the platform."""

    id: str
    target_id: str = ""
    status: str = ""
    result: str = ""
    error: str = ""


def parse_json(content: bytes) -> JsonValue:
    """Parse JSON; None if it is invalid.

    Bodies contain what other agents wrote, and one row must not make a page unreadable: values below `MAX_DEPTH` levels
    become null, and integers lose the digits after `MAX_DIGITS`.
    """
    try:
        parsed: JsonValue = json.loads(content, parse_int=lambda digits: int(digits[:MAX_DIGITS]))
    except RecursionError:
        return parse_json(_without_deep_values(content))
    except ValueError:
        return None
    return parsed


def _without_deep_values(content: bytes) -> bytes:
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


def as_object(value: JsonValue) -> JsonObject:
    """Return a value that is an object; else an empty one."""
    return value if isinstance(value, dict) else {}


def as_objects(value: JsonValue) -> list[JsonObject]:
    """Return the objects of a list; an item that is not an object becomes an empty one."""
    return [as_object(each) for each in value] if isinstance(value, list) else []


def text_field(fields: JsonObject, key: str) -> str:
    """Return a field that is a string; else an empty one."""
    value = fields.get(key)
    return value if isinstance(value, str) else ""


def read_activity_row(value: JsonValue) -> ActivityRow | None:
    """Read one row of the activity; None if it has no id."""
    row = as_object(value)
    request, seq = row.get("request_body"), row.get("seq")
    if isinstance(request, str):
        request = parse_json(request.encode())
    if not text_field(row, "id"):
        return None
    return ActivityRow(
        id=text_field(row, "id"),
        created_at=text_field(row, "created_at"),
        method=text_field(row, "method"),
        source_id=text_field(row, "source_id") or None,
        summary=text_field(row, "summary"),
        request=request if isinstance(request, dict) else None,
        response=row.get("response_body"),
        has_response=row.get("response_body") is not None or row.get("duration_ms") is not None,
        seq=seq if isinstance(seq, int) else None,
        target_id=text_field(row, "target_id") or None,
    )


def text_of_parts(parts: JsonValue) -> str:
    """Return the text of A2A 0.3 parts, whose kind is named `kind` or `type`."""
    return "".join(
        text_field(part, "text") for part in as_objects(parts) if "text" in (part.get("kind"), part.get("type"))
    )


def text_of_result(result: JsonObject) -> str:
    """Return the text of a JSON-RPC result: a message's parts, a task's artifacts, or else its status message."""
    held = [result.get("parts"), *(each.get("parts") for each in objects(result, "artifacts"))]
    texts = [text for parts in held if (text := text_of_parts(parts))]
    return "\n".join(texts) or text_of_parts(nested_or_empty(nested_or_empty(result, "status"), "message").get("parts"))


def is_queued(result: str) -> bool:
    """Tell whether a delegation's result only says that the message is in a polling peer's inbox."""
    fields = as_object(parse_json(result.encode(errors="replace")))
    return fields.get("status") == "queued" and fields.get("delivery_mode") == "poll"


def parse_time(created_at: str) -> float:
    """Return the platform's timestamp in seconds since 1970; 0 if it is invalid."""
    try:
        return datetime.fromisoformat(created_at).timestamp()
    except (ValueError, OverflowError):
        return 0.0
