"""What became of a turn whose process is gone: read from the file in which codex keeps its session.

`codex exec` keeps no id of ours in it, so a turn is known by where in the file it began: the file's length before it.
Shape: sessions of 0.136 to 0.163.
"""

import json
import logging
import re
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from codex_workspace.common.values import THREAD_ID_PATTERN, JsonObject, nested_or_empty, text_or_none
from codex_workspace.protocol.codex_events import MessageCompleted, TokenUsage, TurnCompleted, TurnError
from codex_workspace.protocol.exec_reader import token_count
from codex_workspace.runtimes.backend import TurnRecord

logger = logging.getLogger(__name__)

_PLACE: Final = re.compile(r"exec-([0-9]{1,18})-")
_WORDS: Final = ('"task_started"', '"task_complete"', '"user"')


def size_of(codex_home: Path, session_id: str) -> int:
    """Return how long a session's file is, 0 where there is none: where the next turn begins in it."""
    file = file_of(codex_home, session_id)
    return 0 if file is None else file.stat().st_size


def file_of(codex_home: Path, session_id: str) -> Path | None:
    """Return the file of a session; None where there is none."""
    if not THREAD_ID_PATTERN.fullmatch(session_id):
        return None
    return next(codex_home.glob(f"sessions/**/rollout-*{session_id}.jsonl"), None)


def tokens_of(codex_home: Path, session_id: str) -> TokenUsage | None:
    """Return the tokens of a session by its file; None where that does not tell them."""
    file = file_of(codex_home, session_id)
    if file is None:
        return None
    told: JsonObject = {}
    try:
        with file.open("rb") as lines:
            for line in lines:
                if b'"token_count"' in line:
                    payload = nested_or_empty(_object_in(line.decode("utf-8", "replace")), "payload")
                    told = nested_or_empty(nested_or_empty(payload, "info"), "total_token_usage") or told
    except OSError as error:
        logger.warning("%s cannot be read: %s", file, error.strerror)
        return None
    return token_count(told) if told else None


def new_turn_id(place: int) -> str:
    """Return an id for a turn that begins at `place` of its session's file."""
    return f"exec-{place}-{uuid.uuid4()}"


def place_in(turn_id: str) -> int | None:
    """Return where the turn with this id began in its session's file; None for an id of another
    backend's."""
    found = _PLACE.match(turn_id)
    return int(found[1]) if found is not None else None


def turn_outcome(file: Path, place: int, texts: Collection[str]) -> TurnCompleted | TurnRecord:
    """Return how the last turn behind `place` ended, or its trace. A file that cannot be read holds none.

    `texts`: what was said in it, one of them at the end of codex's input; where none is found, codex has not heard it.
    """
    try:
        with file.open("rb") as lines:
            lines.seek(place)
            return _read(lines, texts)
    except OSError as error:
        logger.warning("%s cannot be read: %s", file, error.strerror)
        return TurnRecord.MISSING


def _read(lines: Iterable[bytes], texts: Collection[str]) -> TurnCompleted | TurnRecord:
    is_heard = False
    ended: TurnCompleted | None = None
    for line in lines:
        match _decoded(line.decode("utf-8", "replace")):
            case {"type": "event_msg", "payload": {"type": "task_started"}}:
                ended = None
            case {"type": "event_msg", "payload": {"type": "task_complete"}} as line_of_end:
                ended = _end_of(nested_or_empty(line_of_end, "payload"))
            case {"type": "response_item", "payload": {"type": "message", "role": "user", "content": list(content)}}:
                is_heard = is_heard or any(_says(part, texts) for part in content)
            case _:
                pass
    if not is_heard:
        return TurnRecord.MISSING
    return TurnRecord.INTERRUPTED if ended is None else ended


def _says(part: object, texts: Collection[str]) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and any(text.rstrip().endswith(each.strip()) for each in texts)


def _decoded(line: str) -> JsonObject:
    # Most lines of a long session are none of these, and long.
    return _object_in(line) if any(word in line for word in _WORDS) else {}


def _object_in(line: str) -> JsonObject:
    try:
        decoded = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _end_of(payload: JsonObject) -> TurnCompleted | None:
    """Return a turn's end; None for one without any word, which was cut off, or failed in an older codex."""
    failure = text_or_none(nested_or_empty(payload, "error"), "message")
    if failure is not None:
        return TurnCompleted("failed", TurnError(failure, "other", None, None), None)
    answer = text_or_none(payload, "last_agent_message")
    return None if answer is None else TurnCompleted("completed", None, MessageCompleted("recorded", answer, None))
