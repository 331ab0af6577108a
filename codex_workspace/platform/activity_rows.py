"""Reads a row of the platform's inbox: a message for the agent, or a row to skip. Pure.

Shapes: the platform's sources of May and August 2026. A peer's message becomes part of the agent's one conversation, so
it gets a heading that names the peer.
"""

import hashlib
import logging
from base64 import b64decode
from collections.abc import Mapping
from typing import Final

from a2a.types import Message, Part, Role, SendMessageRequest
from google.protobuf.json_format import ParseDict, ParseError

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.platform.client_types import (
    ActivityRow,
    as_object,
    as_objects,
    is_queued,
    text_field,
    text_of_parts,
    text_of_result,
)
from codex_workspace.protocol.jsonrpc import nested_or_empty, safe_text
from codex_workspace.storage.outbox import OutboxMessage, Route
from codex_workspace.storage.schema import MAX_CONTEXT_ID_CHARS, MAX_ID_CHARS

logger = logging.getLogger(__name__)

IN_REPLY_TO: Final = "in_reply_to"
"""Metadata key of an answer to a peer: the id of the message it answers. A message with it is not answered."""

DELEGATION: Final = "delegation_id"
"""The platform's metadata key for the delegation that a message starts or belongs to."""

RESULT: Final = "delegate_result"
ECHO: Final = "notify"

FROM_PEER: Final = "A message from the agent {peer}; it is not from your user:\n\n"
FROM_ANSWERING_PEER: Final = (
    "The agent {peer} answers the task that you delegated to it{work}. It is not your user:\n\n"
)
UNKNOWN_PEER: Final = "without a known ID"
"""Replaces the id of a peer that the platform does not name."""

NOT_FETCHED: Final = "[A file that cannot be fetched here: {name}]"

_INVALID = (ParseError, ValueError, OverflowError, RecursionError)


class SkippedRow(Exception):
    """A row that is not a message for the agent, and why."""


def read_row(row: ActivityRow, own_id: str, owner: str) -> OutboxMessage:
    """Return the message for the agent, of the principal `owner`, that a row of the workspace `own_id` holds.

    Raises:
        SkippedRow: it holds none.
    """
    message = _message_of(row)
    has_parts = isinstance(message.get("parts"), list)
    if row.method == RESULT:
        return _result(row, message, own_id, owner)
    if row.has_response:
        raise SkippedRow("it already has a response")
    if row.source_id == own_id and not has_parts:
        # A prompt that the workspace sends to itself has parts.
        raise SkippedRow("a report that this agent sent")
    if row.method and not row.method.startswith("message/") and not has_parts:
        # Among them are uploads and the user's notifications.
        raise SkippedRow(f"unknown method {row.method[:40]}")
    parts = _parts(message.get("parts")) or ([Part(text=safe_text(row.summary))] if row.summary.strip() else [])
    if not parts:
        raise SkippedRow("no content")
    return _incoming(row, message, parts, own_id, owner)


def is_answer(metadata: Mapping[str, object], message_id: str) -> bool:
    """Tell by its metadata whether a peer's message answers one of the agent's."""
    work = metadata.get(DELEGATION)
    # A delegation's first message has the delegation's own id.
    is_of_delegation = isinstance(work, str) and work not in ("", message_id)
    return bool(metadata.get(IN_REPLY_TO)) or is_of_delegation


def message_id_of(row: ActivityRow) -> str:
    """Return the id that a row's message has from its sender; empty if it has none."""
    return _id(_message_of(row), "messageId") or _id(_message_of(row), "message_id")


def answer_heading(peer: str, work: str) -> Part:
    """Return the heading of a peer's answer to the task `work`."""
    named = f" ({safe_text(work)[:80]})" if work else ""
    return Part(text=FROM_ANSWERING_PEER.format(peer=safe_text(peer), work=named))


def _incoming(row: ActivityRow, message: JsonObject, parts: list[Part], own_id: str, owner: str) -> OutboxMessage:
    source_id = message_id_of(row)
    metadata = nested_or_empty(message, "metadata")
    delegation_id, answered_id = _id(metadata, DELEGATION), _id(metadata, IN_REPLY_TO)
    peer = row.source_id or ""
    route = Route.USER if not peer else Route.NONE if peer == own_id else Route.PEER
    if route is Route.PEER and is_answer(metadata, source_id):
        parts = [answer_heading(peer, delegation_id or answered_id), *parts]
        route = Route.USER
    elif route is Route.PEER:
        parts = [Part(text=FROM_PEER.format(peer=peer)), *parts]
    message_id = f"{peer}/{source_id}" if peer and source_id else source_id
    if not message_id or len(message_id) > MAX_ID_CHARS:
        message_id = row.id
    context_id = _id(message, "contextId")
    request = _request(message_id, parts, context_id if len(context_id) <= MAX_CONTEXT_ID_CHARS else "", metadata)
    return _outbox_message(row, owner, request, route, peer, source_id, delegation_id)


def _result(row: ActivityRow, message: JsonObject, own_id: str, owner: str) -> OutboxMessage:
    """Read the result of one of the agent's delegations; the user gets the answer to it."""
    response = as_object(row.response)
    text = (
        text_of_parts(message.get("parts"))
        or text_of_result(nested_or_empty(response, "result"))
        or _text(response, "result")
        or _text(response, "text")
        or row.summary
    )
    if not text.strip():
        raise SkippedRow("no content")
    if is_queued(text):
        raise SkippedRow("the task is in the peer's inbox; the peer answers with a separate message")
    held = (row.request or {}, nested_or_empty(message, "metadata"), response)
    delegation_id = next((found for each in held if (found := _id(each, DELEGATION))), "")
    peer = next((each for each in (row.source_id, row.target_id) if each and each != own_id), "")
    parts = [answer_heading(peer or UNKNOWN_PEER, delegation_id), Part(text=safe_text(text))]
    return _outbox_message(row, owner, _request(row.id, parts, "", {}), Route.USER, peer, "", delegation_id)


def _outbox_message(
    row: ActivityRow,
    owner: str,
    request: SendMessageRequest,
    route: Route,
    peer: str,
    source_id: str,
    delegation_id: str,
) -> OutboxMessage:
    content = request.SerializeToString(deterministic=True)
    return OutboxMessage(
        row.id,
        owner,
        request.message.message_id,
        route,
        peer,
        source_id[:MAX_ID_CHARS],
        delegation_id[:MAX_ID_CHARS],
        row.created_at,
        hashlib.sha256(content).digest(),
        content,
    )


def _request(message_id: str, parts: list[Part], context_id: str, metadata: JsonObject) -> SendMessageRequest:
    message = Message(role=Role.ROLE_USER, message_id=message_id, context_id=context_id, parts=parts)
    if metadata:
        try:
            ParseDict(metadata, message.metadata)
        except _INVALID:
            message.ClearField("metadata")
    return SendMessageRequest(message=message)


def _message_of(row: ActivityRow) -> JsonObject:
    """Return the message of a row's request, which may lack the enclosing JSON-RPC objects."""
    request = row.request or {}
    params = nested_or_empty(request, "params")
    message = nested_or_empty(params, "message")
    return next((each for each in (message, params, request) if isinstance(each.get("parts"), list)), message)


def _parts(parts: JsonValue) -> list[Part]:
    return [part for each in as_objects(parts) if (part := _part(each)) is not None]


def _part(part: JsonObject) -> Part | None:
    """Convert an A2A 0.3 part, whose kind is named `kind` or `type`."""
    match part.get("kind") or part.get("type"):
        case "text":
            text = _text(part, "text")
            return Part(text=text) if text else None
        case "file":
            return _file(nested_or_empty(part, "file"))
        case "data":
            try:
                return ParseDict({"data": part.get("data")}, Part())
            except _INVALID:
                return None
        case _:
            return None


def _file(file: JsonObject) -> Part:
    name, media_type = _text(file, "name"), _text(file, "mimeType")
    uri, content = _text(file, "uri"), _text(file, "bytes")
    try:
        if content:
            return Part(raw=b64decode(content, validate=True), filename=name, media_type=media_type)
    except ValueError:
        logger.debug("a file of a row is not valid base64")
    if not content and uri.startswith(("http://", "https://")):
        return Part(url=uri, filename=name, media_type=media_type)
    return Part(text=NOT_FETCHED.format(name=name or "without a name"))


def _id(fields: JsonObject, key: str) -> str:
    """Return an id of printable characters; empty for anything else."""
    found = _text(fields, key)
    return found if found.isprintable() else ""


def _text(fields: JsonObject, key: str) -> str:
    return safe_text(text_field(fields, key))
