"""Read a turn's end out of codex's own record of the thread (`thread/read`)."""

from codex_workspace.events import Said, TurnEnded, TurnFailure
from codex_workspace.wire import JsonObject, JsonValue


def ended_in(read: JsonValue, turn_id: str) -> TurnEnded | None:
    """Return how the turn ended, by the answer to `thread/read` with turns; None while it is in progress.

    A turn that the record does not hold counts as failed. Codex 0.130 records failed turns as completed, so a failure
    that was heard of weighs more than what is found here. Shape: recordings 0.130 to 0.169, `turns_list`, `persist_1`.
    """
    turn = next((turn for turn in _turns(read) if turn.get("id") == turn_id), None)
    if turn is None:
        return TurnEnded("failed", TurnFailure("Codex kept no record of the turn.", "unsettled", None, None), None)
    match turn.get("status"):
        case "inProgress":
            return None
        case "completed":
            return TurnEnded("completed", None, _last_message(turn))
        case "interrupted":
            return TurnEnded("interrupted", None, _last_message(turn))
        case _:
            return TurnEnded("failed", TurnFailure(_error_of(turn), "unsettled", None, None), _last_message(turn))


def _turns(read: JsonValue) -> list[JsonObject]:
    thread = read.get("thread") if isinstance(read, dict) else None
    turns = thread.get("turns") if isinstance(thread, dict) else None
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def _error_of(turn: JsonObject) -> str:
    error = turn.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else "Codex says that the turn failed, and not why."


def _last_message(turn: JsonObject) -> Said | None:
    items = turn.get("items")
    for item in reversed(items if isinstance(items, list) else []):
        if isinstance(item, dict) and item.get("type") == "agentMessage" and isinstance(text := item.get("text"), str):
            return Said(str(item.get("id")), text, None)
    return None
