"""What a row of the platform's inbox is: a message for the agent, or one of the rows that are no work. Pure.

Shapes: the platform's sources of May and August 2026. What a peer says becomes part of the agent's one conversation,
so it is marked as a peer's.
"""

import logging
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from a2a.types import Message, Part, Role, SendMessageRequest
from google.protobuf.json_format import ParseDict, ParseError

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.platform.client_types import ActivityRow
from codex_workspace.platform.payloads import is_queued, text_of_parts, text_of_result
from codex_workspace.protocol.jsonrpc import safe_text
from codex_workspace.storage.outbox import MAX_ID_CHARS, Route
from codex_workspace.storage.schema import MAX_CONTEXT_ID_CHARS

logger = logging.getLogger(__name__)

IN_REPLY_TO: Final = "in_reply_to"
"""Metadata key of an answer to a peer: the id of the message that it answers. Who finds it answers no more."""

DELEGATION: Final = "delegation_id"
"""Metadata key of the platform's: which work a message gives, or belongs to."""

RESULT: Final = "delegate_result"
UPLOAD: Final = "chat_upload_receive"
ECHO: Final = "notify"

FROM_PEER: Final = "A message from the agent {peer}; it is not your user's:\n\n"
ANSWER_OF_PEER: Final = "The agent {peer} answers what was given to it{work}. Its words, which are not your user's:\n\n"
UNKNOWN_PEER: Final = "that was asked"
"""Stands for a peer that the platform does not name."""

NOT_FETCHED: Final = "[A file that cannot be fetched here: {name}]"


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """No work, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class IncomingMessage:
    """A message for the agent.

    message_id: what it is known by here; said_id: its own. peer: the workspace that it came from, empty for the user.
    request: what it becomes.
    """

    route: Route
    message_id: str
    request: SendMessageRequest
    peer: str = ""
    said_id: str = ""
    delegation_id: str = ""


def read_row(row: ActivityRow, own_id: str) -> IncomingMessage | SkippedRow:
    """Return what a row is, for the workspace `own_id`."""
    message = _message_of(row)
    has_parts = isinstance(message.get("parts"), list)
    if row.method == RESULT:
        return _result(row, message, own_id)
    if row.method == ECHO:
        return SkippedRow("what we have told the user")
    if row.method == UPLOAD:
        return SkippedRow("an upload")
    if row.has_response:
        return SkippedRow("it has its answer")
    if row.source_id == own_id and not has_parts:
        # A message to itself, such as the one that begins a conversation, has parts.
        return SkippedRow("what we have reported")
    if row.method and not row.method.startswith("message/") and not has_parts:
        return SkippedRow(f"of another kind: {row.method[:40]}")
    parts = _parts(message.get("parts")) or ([Part(text=safe_text(row.summary))] if row.summary.strip() else [])
    return _incoming(row, message, parts, own_id) if parts else SkippedRow("nothing is said")


def is_answer(metadata: Mapping[str, object], said_id: str) -> bool:
    """Tell by its metadata whether a message of a peer's answers one of ours; `said_id` is its own id."""
    work = metadata.get(DELEGATION)
    # Whoever gives work by the platform's delegations sends it under the delegation's own id.
    is_of_ours = isinstance(work, str) and work not in ("", said_id)
    return bool(metadata.get(IN_REPLY_TO)) or is_of_ours


def message_id_of(row: ActivityRow) -> str:
    """Return the id that a row's message has from its sender; empty where it has none."""
    return _id(_message_of(row), "messageId") or _id(_message_of(row), "message_id")


def _incoming(row: ActivityRow, message: JsonObject, parts: list[Part], own_id: str) -> IncomingMessage:
    said_id = message_id_of(row)
    metadata = _object(message.get("metadata"))
    delegation_id, answered_id = _id(metadata, DELEGATION), _id(metadata, IN_REPLY_TO)
    peer = row.source_id or ""
    route = Route.USER if not peer else Route.NONE if peer == own_id else Route.PEER
    if route is Route.PEER and is_answer(metadata, said_id):
        parts = [answer_mark(peer, delegation_id or answered_id), *parts]
        route = Route.USER
    elif route is Route.PEER:
        parts = [Part(text=FROM_PEER.format(peer=peer)), *parts]
    message_id = f"{peer}/{said_id}" if peer and said_id else said_id
    if not message_id or len(message_id) > MAX_ID_CHARS:
        message_id = row.id
    context_id = _id(message, "contextId")
    request = _request(message_id, parts, context_id if len(context_id) <= MAX_CONTEXT_ID_CHARS else "", metadata)
    return IncomingMessage(route, message_id, request, peer, said_id[:MAX_ID_CHARS], delegation_id[:MAX_ID_CHARS])


def _result(row: ActivityRow, message: JsonObject, own_id: str) -> IncomingMessage | SkippedRow:
    """Read the platform's word on work that we have given away; who reads the answer to it is the user."""
    response = _object(row.response)
    said = (
        text_of_parts(message.get("parts"))
        or text_of_result(_object(response.get("result")))
        or _text(response, "result")
        or _text(response, "text")
        or row.summary
    )
    if not said.strip():
        return SkippedRow("nothing is said")
    if is_queued(said):
        return SkippedRow("work that lies in a peer's inbox: the peer's own message is the answer")
    request = row.request or {}
    metadata = _object(message.get("metadata"))
    delegation_id = _id(request, DELEGATION) or _id(metadata, DELEGATION) or _id(response, DELEGATION)
    peer = next((each for each in (row.source_id, row.target_id) if each and each != own_id), "")
    parts = [answer_mark(peer or UNKNOWN_PEER, delegation_id), Part(text=safe_text(said))]
    return IncomingMessage(
        Route.USER, row.id, _request(row.id, parts, "", {}), peer, "", delegation_id=delegation_id[:MAX_ID_CHARS]
    )


def answer_mark(peer: str, work: str) -> Part:
    """Return what stands before a peer's answer to `work`."""
    return Part(text=ANSWER_OF_PEER.format(peer=safe_text(peer), work=f" ({safe_text(work)[:80]})" if work else ""))


def _request(message_id: str, parts: list[Part], context_id: str, metadata: JsonObject) -> SendMessageRequest:
    message = Message(role=Role.ROLE_USER, message_id=message_id, context_id=context_id, parts=parts)
    if metadata:
        try:
            ParseDict(metadata, message.metadata)
        except (ParseError, ValueError, OverflowError, RecursionError):
            message.ClearField("metadata")
    return SendMessageRequest(message=message)


def _message_of(row: ActivityRow) -> JsonObject:
    """Return the message of a row's request; some stand alone, without what is usually around them."""
    request = row.request or {}
    params = _object(request.get("params"))
    for holder in (_object(params.get("message")), params, request):
        if isinstance(holder.get("parts"), list):
            return holder
    return _object(params.get("message"))


def _parts(parts: JsonValue) -> list[Part]:
    found = [_part(_object(each)) for each in (parts if isinstance(parts, list) else [])]
    return [part for part in found if part is not None]


def _part(part: JsonObject) -> Part | None:
    """Return a 0.3 part in today's shape; its kind has either of two names."""
    match part.get("kind") or part.get("type"):
        case "text":
            text = _text(part, "text")
            return Part(text=safe_text(text)) if text else None
        case "file":
            return _file(_object(part.get("file")))
        case "data":
            try:
                return ParseDict({"data": part.get("data")}, Part())
            except (ParseError, ValueError, OverflowError, RecursionError):
                return None
        case _:
            return None


def _file(file: JsonObject) -> Part | None:
    name, media_type = _text(file, "name"), _text(file, "mimeType")
    uri, content = _text(file, "uri"), _text(file, "bytes")
    try:
        if content:
            return Part(
                raw=b64decode(content, validate=True), filename=safe_text(name), media_type=safe_text(media_type)
            )
        if uri.startswith(("http://", "https://")):
            return Part(url=safe_text(uri), filename=safe_text(name), media_type=safe_text(media_type))
    except ValueError:
        logger.debug("a file of a row is not in base64")
    return Part(text=NOT_FETCHED.format(name=safe_text(name) or "without a name"))


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _id(holder: JsonObject, key: str) -> str:
    """Return an id that can be written down everywhere; empty for what is none."""
    found = _text(holder, key)
    return found if found.isprintable() else ""


def _text(holder: JsonObject, key: str) -> str:
    value = holder.get(key)
    return safe_text(value) if isinstance(value, str) else ""
