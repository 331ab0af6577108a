"""Reads how a turn ended from codex's record of its thread, or from the thread's rollout file if the record is torn."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from codex_workspace.app_server import Connection
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.app_server_reader import turn_completed
from codex_workspace.protocol.codex_events import UNKNOWN_END, TurnCompleted, TurnError
from codex_workspace.protocol.jsonrpc import nested_or_empty, objects, text_or_none
from codex_workspace.runtimes.backend import TurnRecord

LAST_TURNS: Final = 3
"""How many turns are read to find one that may have ended; the turns of a thread are consecutive."""


async def read_last_turns(codex: Connection, thread_id: str, timeout_s: float) -> list[JsonObject]:
    """Return codex's record of a thread's last turns, the newest last.

    The record of a whole thread could exceed the limit of a line, because it contains images and command output.

    Raises:
        CodexRefused: there is no record; a thread without a turn has none.
        CodexGone: codex died, or did not respond.
    """
    params: JsonObject = {"threadId": thread_id, "limit": LAST_TURNS, "itemsView": "full"}
    listed = await codex.request("thread/turns/list", params, timeout_s)
    return objects(listed, "data")[::-1] if isinstance(listed, dict) else []


def turn_end(turns: list[JsonObject], turn_id: str) -> TurnCompleted | None:
    """Return how a turn ended, or None while it is in progress. A turn that is not recorded counts as failed."""
    turn = next((turn for turn in turns if turn.get("id") == turn_id), None)
    if turn is None:
        return TurnCompleted("failed", TurnError("Codex has no record of the turn.", UNKNOWN_END))
    return None if turn.get("status") == "inProgress" else turn_completed(turn)


def turn_record(turns: list[JsonObject], client_message_id: str) -> TurnCompleted | TurnRecord:
    """Return how the last turn ended whose message has a client id that begins with `client_message_id`.

    Codex records a turn that died with its process as interrupted. If codex died within the first milliseconds, the
    record lacks the message; `is_in_rollout` then tells whether the thread's history holds it.
    """
    sent = [turn for turn in turns if any(_is_sent_as(item, client_message_id) for item in objects(turn, "items"))]
    if not sent:
        return TurnRecord.MISSING
    is_open = sent[-1].get("status") in ("inProgress", "interrupted")
    return TurnRecord.INTERRUPTED if is_open else turn_completed(sent[-1])


def rollout_path(result: JsonValue) -> Path | None:
    """Return the file of a thread, from the result of `thread/start` or `thread/resume`."""
    path = text_or_none(nested_or_empty(result, "thread"), "path") if isinstance(result, dict) else None
    return None if path is None else Path(path)


def is_in_rollout(rollout: Iterable[str], text: str) -> bool:
    """Return whether a rollout ends with a turn whose message `text` is in the model's history but not in the record.

    Codex writes a user message as two lines, first for the model's history and up to two milliseconds later for the
    record, and may die in between. Incomplete lines and lines of another shape are ignored.
    """
    is_in_history = False
    for line in rollout:
        match _decoded(line):
            case {"type": "event_msg", "payload": {"type": "task_started"}}:
                is_in_history = False
            case {"type": "event_msg", "payload": {"type": "item_completed", "item": {"type": "UserMessage"}}}:
                is_in_history = False
            case {"type": "response_item", "payload": {"type": "message", "role": "user", "content": list(content)}}:
                is_in_history |= any(isinstance(part, dict) and part.get("text") == text for part in content)
            case _:
                pass
    return is_in_history


def _decoded(line: str) -> JsonValue:
    # Do not parse the other lines: most lines of a long thread, and long ones.
    if not any(name in line for name in ('"task_started"', '"user"', '"UserMessage"')):
        return None
    try:
        decoded: JsonValue = json.loads(line)
    except ValueError:
        return None
    return decoded


def _is_sent_as(item: JsonObject, client_message_id: str) -> bool:
    return item.get("type") == "userMessage" and (text_or_none(item, "clientId") or "").startswith(client_message_id)
