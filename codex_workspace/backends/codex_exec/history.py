"""Reads from a session's file how a turn ended whose process is gone.

`codex exec` stores no client message id, so a turn is identified by the offset in the file at which it starts. Shape:
sessions of codex 0.158 to 0.169.
"""

import json
import logging
import re
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from codex_workspace.common.values import THREAD_ID_PATTERN, JsonObject
from codex_workspace.protocol.codex_events import MessageCompleted, TokenUsage, TurnCompleted, TurnError
from codex_workspace.protocol.exec_reader import token_count
from codex_workspace.protocol.jsonrpc import nested_or_empty, text_or_none
from codex_workspace.runtimes.backend import TurnRecord

logger = logging.getLogger(__name__)

_TURN_ID: Final = re.compile(r"exec-([0-9]{1,18})-")
_EVENT_TYPES: Final = ('"task_started"', '"task_complete"', '"user"')


def session_size(codex_home: Path, session_id: str) -> int:
    """Return the size of a session's file, at which the next turn starts; 0 if the file is missing."""
    file = session_file(codex_home, session_id)
    return 0 if file is None else file.stat().st_size


def session_file(codex_home: Path, session_id: str) -> Path | None:
    """Return the file of a session; None if it is missing."""
    if not THREAD_ID_PATTERN.fullmatch(session_id):
        return None
    return next(codex_home.glob(f"sessions/**/rollout-*{session_id}.jsonl"), None)


def session_tokens(codex_home: Path, session_id: str) -> TokenUsage | None:
    """Return the tokens of a session; None if its file does not contain them."""
    file = session_file(codex_home, session_id)
    if file is None:
        return None
    usage: JsonObject = {}
    try:
        with file.open("rb") as lines:
            for line in lines:
                if b'"token_count"' in line:
                    payload = nested_or_empty(_object_in(line.decode("utf-8", "replace")), "payload")
                    usage = nested_or_empty(nested_or_empty(payload, "info"), "total_token_usage") or usage
    except OSError as error:
        logger.warning("%s cannot be read: %s", file, error.strerror)
        return None
    return token_count(usage) if usage else None


def new_turn_id(offset: int) -> str:
    """Return an id for a turn that starts at `offset` of its session's file."""
    return f"exec-{offset}-{uuid.uuid4()}"


def offset_in(turn_id: str) -> int | None:
    """Return the offset of a turn in its session's file; None for an id of another backend."""
    found = _TURN_ID.match(turn_id)
    return int(found[1]) if found is not None else None


def turn_outcome(file: Path, offset: int, texts: Collection[str]) -> TurnCompleted | TurnRecord:
    """Return how the last turn after `offset` ended, or that it has no end; MISSING if the file cannot be read.

    `texts`: possible ends of the turn's input; without one of them, the session does not contain the message.
    """
    try:
        with file.open("rb") as lines:
            lines.seek(offset)
            return _read(lines, texts)
    except OSError as error:
        logger.warning("%s cannot be read: %s", file, error.strerror)
        return TurnRecord.MISSING


def _read(lines: Iterable[bytes], texts: Collection[str]) -> TurnCompleted | TurnRecord:
    has_input = False
    ended: TurnCompleted | None = None
    for line in lines:
        match _decoded(line.decode("utf-8", "replace")):
            case {"type": "event_msg", "payload": {"type": "task_started"}}:
                ended = None
            case {"type": "event_msg", "payload": {"type": "task_complete"}} as end:
                ended = _end_of(nested_or_empty(end, "payload"))
            case {"type": "response_item", "payload": {"type": "message", "role": "user", "content": list(content)}}:
                has_input = has_input or any(_says(part, texts) for part in content)
            case _:
                pass
    if not has_input:
        return TurnRecord.MISSING
    return TurnRecord.INTERRUPTED if ended is None else ended


def _says(part: object, texts: Collection[str]) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and any(text.rstrip().endswith(each.strip()) for each in texts)


def _decoded(line: str) -> JsonObject:
    # Skips the many long lines of other types.
    return _object_in(line) if any(word in line for word in _EVENT_TYPES) else {}


def _object_in(line: str) -> JsonObject:
    try:
        decoded = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _end_of(payload: JsonObject) -> TurnCompleted | None:
    """Return a turn's end; None for one without an answer and an error: it was interrupted."""
    failure = text_or_none(nested_or_empty(payload, "error"), "message")
    if failure is not None:
        return TurnCompleted("failed", TurnError(failure, "other"))
    answer = text_or_none(payload, "last_agent_message")
    return None if answer is None else TurnCompleted("completed", None, MessageCompleted("recorded", answer, None))
