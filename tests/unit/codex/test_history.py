"""The end of a turn in codex's record. `tests/integration/test_thread.py` covers the statuses."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.codex.history import is_in_rollout, rollout_path, turn_end
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import MessageCompleted
from codex_workspace.protocol.jsonrpc import objects
from tests.support.paths import RECORDINGS

json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def reads() -> Iterator[JsonObject]:
    """Yield codex's recorded answers to `thread/read` that hold turns."""
    for file in sorted(RECORDINGS.glob("*/*.ndjson")):
        asked: set[object] = set()
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            message = entry.get("msg")
            if not isinstance(message, dict):
                continue
            if entry.get("dir") == ">" and message.get("method") == "thread/read":
                asked.add(message["id"])
            elif entry.get("dir") == "<" and message.get("id") in asked and "result" in message:
                yield message["result"]


def test_recorded_turns_end_with_codexs_status() -> None:
    ends = 0
    for read in reads():
        thread = read["thread"]
        assert isinstance(thread, dict)
        turns = thread["turns"]
        assert isinstance(turns, list)
        for turn in turns:
            assert isinstance(turn, dict)
            ended = turn_end(objects(thread, "turns"), str(turn["id"]))
            if turn["status"] == "inProgress":
                assert ended is None
            else:
                assert ended is not None
                assert ended.status == turn["status"]
                assert (ended.failure is not None) == (ended.status == "failed")
                ends += 1
    assert ends >= 4


def test_the_last_message_is_the_turns_last_message() -> None:
    items: list[JsonValue] = [
        {"type": "userMessage", "id": "u"},
        {"type": "agentMessage", "id": "a", "text": "first"},
        {"type": "agentMessage", "id": "b", "text": "last"},
        {"type": "agentMessage", "id": "c"},
        {"type": "commandExecution", "id": "d"},
    ]
    ended = turn_end([{"id": "t", "status": "completed", "items": items}], "t")
    assert ended is not None
    assert ended.last_message == MessageCompleted("b", "last", None)


@given(json_values, json_values, json_values)
def test_an_odd_record_is_no_accident(status: JsonValue, items: JsonValue, error: JsonValue) -> None:
    turn: JsonObject = {"id": "t", "status": status, "items": items, "error": error}
    ended = turn_end([{}, turn], "t")
    assert ended is not None
    assert ended.status == "failed"


def test_a_missing_turn_counts_as_failed() -> None:
    ended = turn_end([], "t")
    assert ended is not None
    assert ended.status == "failed"


# --- A record that is torn ---

STARTED = '{"type": "event_msg", "payload": {"type": "task_started", "turn_id": "t"}}'


SHOWN = '{"type": "event_msg", "payload": {"type": "item_completed", "item": {"type": "UserMessage", "id": "u"}}}'


def said(text: str, role: str = "user") -> str:
    content = [{"type": "input_text", "text": text}]
    return json.dumps({"type": "response_item", "payload": {"type": "message", "role": role, "content": content}})


@pytest.mark.parametrize(
    ("lines", "is_remembered"),
    [
        ([STARTED, said("hello")], True),
        ([STARTED, said("hello"), "{torn"], True),
        ([STARTED, said("hello"), STARTED], False),
        ([STARTED, said("hello"), STARTED, said("hello")], True),
        ([STARTED, said("hello", "assistant")], False),
        ([STARTED, said("hello there")], False),
        ([STARTED, said("hello")[:-2]], False),
        ([STARTED, said("hello"), SHOWN], False),
        ([STARTED, said("first"), SHOWN, said("hello")], True),
        ([], False),
    ],
)
def test_a_message_is_found_in_the_models_history_if_the_record_lacks_it(lines: list[str], is_remembered: bool) -> None:
    assert is_in_rollout(lines, "hello") == is_remembered


@given(st.lists(st.text(max_size=30) | json_values.map(json.dumps), max_size=5))
def test_an_unreadable_file_contains_no_message(lines: list[str]) -> None:
    assert not is_in_rollout(lines, "hello, I am not there")


def test_the_file_is_at_codexs_path() -> None:
    found = [rollout_path(read) for read in reads()]
    assert found
    assert all(path is not None and path.name.startswith("rollout-") for path in found)
    assert rollout_path({"thread": {"path": None}}) is None
