"""Read a turn's end out of codex's own record of the thread (`thread/read`), and out of its file where that is torn."""

import json
from collections.abc import Iterable
from pathlib import Path

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import MessageCompleted, TurnCompleted, TurnError
from codex_workspace.runtimes.backend import TurnRecord


def turn_end(read: JsonValue, turn_id: str) -> TurnCompleted | None:
    """Return how the turn ended, by codex's record (`turn.last_turns`); None while it is in progress.

    A turn that the record does not hold counts as failed. Codex 0.130 records failed turns as completed, so a failure
    that was heard of weighs more than what is found here. Shape: recordings 0.130 to 0.169, `turns_list`, `persist_1`.
    """
    turn = next((turn for turn in _turns(read) if turn.get("id") == turn_id), None)
    if turn is None:
        return TurnCompleted("failed", TurnError("Codex kept no record of the turn.", "unsettled", None, None), None)
    return _end_of(turn)


def _end_of(turn: JsonObject) -> TurnCompleted | None:
    match turn.get("status"):
        case "inProgress":
            return None
        case "completed":
            return TurnCompleted("completed", None, _last_message(turn))
        case "interrupted":
            return TurnCompleted("interrupted", None, _last_message(turn))
        case _:
            return TurnCompleted("failed", TurnError(_error_of(turn), "unsettled", None, None), _last_message(turn))


def turn_record(read: JsonValue, client_message_id: str) -> TurnCompleted | TurnRecord:
    """Return how the last turn ended whose message has a client id that begins with `client_message_id`.

    By the record (`turn.last_turns`) of a codex that has taken over from the one that ran them. Codex records
    a turn that died with its process as interrupted, and within the first milliseconds without its message: whether
    that is in the thread's history is read from its file (`is_in_rollout`). 0.130 records failed turns as completed, so
    one without a message of the agent's counts as cut off too.
    """
    turns = [turn for turn in _turns(read) if any(_is_sent_as(item, client_message_id) for item in _items(turn))]
    if not turns:
        return TurnRecord.MISSING
    ended = _end_of(turns[-1])
    if ended is None or ended.status == "interrupted":
        return TurnRecord.INTERRUPTED
    return TurnRecord.INTERRUPTED if ended.status == "completed" and ended.last_message is None else ended


def rollout_path(read: JsonValue) -> Path | None:
    """Return the file that codex keeps a thread in, by any answer that tells of the thread."""
    thread = read.get("thread") if isinstance(read, dict) else None
    path = thread.get("path") if isinstance(thread, dict) else None
    return Path(path) if isinstance(path, str) else None


def is_in_rollout(rollout: Iterable[str], text: str) -> bool:
    """Tell whether a thread's file ends with a turn that has `text` in the model's memory and not in the record.

    Codex writes a user message as two lines: what the model remembers, and a millisecond or two later what the record
    shows; it may die in between. A message that has both is the record's to tell of. What is no whole line, or of
    another shape, says nothing. Shape: rollouts of 0.136, 0.149 (`user_message`), 0.153, 0.163 (`item_completed`).
    """
    is_said = False
    for line in rollout:
        match _decoded(line):
            case {"type": "event_msg", "payload": {"type": "task_started" | "user_message"}}:
                is_said = False
            case {"type": "event_msg", "payload": {"type": "item_completed", "item": {"type": "UserMessage"}}}:
                is_said = False
            case {"type": "response_item", "payload": {"type": "message", "role": "user", "content": list(content)}}:
                is_said = is_said or any(isinstance(part, dict) and part.get("text") == text for part in content)
            case _:
                pass
    return is_said


def _decoded(line: str) -> JsonValue:
    # Most lines of a long thread are none of these, and long.
    if not any(word in line for word in ('"task_started"', '"user"', '"user_message"', '"UserMessage"')):
        return None
    try:
        decoded: JsonValue = json.loads(line)
    except ValueError:
        return None
    return decoded


def _is_sent_as(item: JsonObject, client_message_id: str) -> bool:
    client_id = item.get("clientId")
    return item.get("type") == "userMessage" and isinstance(client_id, str) and client_id.startswith(client_message_id)


def _turns(read: JsonValue) -> list[JsonObject]:
    thread = read.get("thread") if isinstance(read, dict) else None
    turns = thread.get("turns") if isinstance(thread, dict) else None
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def _error_of(turn: JsonObject) -> str:
    error = turn.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else "Codex says that the turn failed, and not why."


def _items(turn: JsonObject) -> list[JsonObject]:
    items = turn.get("items")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _last_message(turn: JsonObject) -> MessageCompleted | None:
    for item in reversed(_items(turn)):
        if item.get("type") == "agentMessage" and isinstance(text := item.get("text"), str):
            return MessageCompleted(str(item.get("id")), text, None)
    return None
