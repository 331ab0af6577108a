"""Read the platform's JSON bodies and the A2A 0.3 messages in them. Pure."""

import json
import re
from typing import Final

from codex_workspace.common.values import JsonObject, JsonValue, nested_or_empty, objects
from codex_workspace.platform.client_types import ActivityRow, PlatformPeer

MAX_DIGITS: Final = 300
MAX_DEPTH: Final = 100
_BRACKETS: Final = re.compile(rb'"(?:\\.|[^"\\])*+"|[][{}]', re.DOTALL)
"""The brackets of JSON, and its strings, so that brackets in strings are skipped."""


def parse_json(content: bytes) -> JsonValue:
    """Parse JSON; None if it is invalid.

    Bodies contain what other agents wrote, and one row must not make a page unreadable: values below `MAX_DEPTH` levels
    become null, and integers of more than `MAX_DIGITS` digits become strings.
    """
    try:
        parsed: JsonValue = json.loads(content, parse_int=_integer)
    except RecursionError:
        return parse_json(_without_deep_values(content))
    except ValueError:
        return None
    return parsed


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= MAX_DIGITS else digits


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


def read_peer(row: JsonObject) -> PlatformPeer:
    """Read one entry of the list of peers."""
    card = row.get("agent_card")
    return PlatformPeer(
        text_field(row, "id"),
        text_field(row, "name"),
        text_field(row, "role"),
        text_field(row, "status"),
        card if isinstance(card, dict) else None,
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
