"""Replays recordings of the real codex through the real parser. See `recordings/README.md` for the file format."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.app_server_reader import TurnReader
from codex_workspace.protocol.codex_events import (
    Activity,
    CommandCompleted,
    CommandOutput,
    CommandStarted,
    DiffUpdated,
    ErrorReported,
    ItemStatus,
    MessageCompleted,
    MessageDelta,
    PatchCompleted,
    ReasoningCompleted,
    ReasoningDelta,
    ThreadIdle,
    TokensUpdated,
    ToolCallCompleted,
    TurnCompleted,
    TurnEvent,
    TurnStarted,
    UnknownEvent,
    WarningReported,
)
from codex_workspace.protocol.jsonrpc import (
    LineSplitter,
    Message,
    Notification,
    Request,
    Result,
    Skipped,
    decode,
)
from codex_workspace.runtimes.convert import EventConverter
from tests.support.paths import ROOT

FOLDER: Final = ROOT / "tests" / "recordings"
REQUIRED_VERSIONS: Final = ("0.163.0", "0.169.0")
VERSIONS: Final = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "exec")
RECORDINGS: Final = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.ndjson"))

TRIMMED: Final = " chars]..."
"""Marks the end of a string that was shortened in the recording."""

UNKNOWN: Final[dict[str, str]] = {}
"""Unknown names that a recording may contain, each with the reason; these versions have none."""

WITHOUT_DELTAS: Final = {
    "compaction_review": "the result of a review is said once as a whole, by codex and not by the model",
}
"""Recordings with messages without deltas, each with the reason."""


@dataclass(frozen=True, slots=True)
class Line:
    """One message of a recording; `sent` is true if the client sent it."""

    sent: bool
    message: JsonObject


@dataclass(frozen=True, slots=True)
class Replay:
    """One turn of a recording, as parsed."""

    thread_id: str
    turn_id: str
    events: tuple[TurnEvent, ...]

    @property
    def answer(self) -> str:
        converter = EventConverter()
        for event in self.events:
            converter.convert(event)
        return converter.answer

    @property
    def messages(self) -> list[MessageCompleted]:
        return [event for event in self.events if isinstance(event, MessageCompleted)]

    @property
    def ends(self) -> list[TurnCompleted]:
        return [event for event in self.events if isinstance(event, TurnCompleted)]


@cache
def lines_of(recording: str) -> tuple[Line, ...]:
    records = [json.loads(line) for line in (FOLDER / f"{recording}.ndjson").read_bytes().split(b"\n") if line]
    return tuple(Line(record["dir"] == ">", record["msg"]) for record in records if record.get("dir") in {"<", ">"})


def stdout_of(lines: tuple[Line, ...]) -> bytes:
    """Return the bytes that codex wrote."""
    messages = (json.dumps(line.message, separators=(",", ":"), ensure_ascii=False) for line in lines if not line.sent)
    return "".join(f"{line}\n" for line in messages).encode()


def messages_of(stdout: bytes, sizes: Iterator[int]) -> list[Message]:
    """Return codex's messages, parsed from pieces of these sizes, which repeat."""
    splitter, messages, start = LineSplitter(), list[bytes | Skipped](), 0
    while start < len(stdout):
        size = next(sizes)
        messages += splitter.feed(stdout[start : start + size])
        start += size
    assert splitter.finish() == []
    return [decode(line) for line in messages if isinstance(line, bytes)]


def random_sizes(seed: str) -> Iterator[int]:
    """Return sizes from single bytes to a whole pipe buffer."""
    sizes = random.Random(seed)
    while True:
        yield int(2 ** sizes.uniform(0, 16))


@cache
def decoded(recording: str) -> tuple[Message, ...]:
    return tuple(messages_of(stdout_of(lines_of(recording)), random_sizes(recording)))


def string_at(message: JsonObject, *path: str) -> str:
    """Return the string at a path of keys, or ""."""
    value: object = message
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class Span:
    """The range of codex's messages during which a client is subscribed to one turn."""

    thread_id: str
    turn_id: str
    start: int
    end: int | None


def spans_of(recording: str) -> list[Span]:
    """Return the turns of a recording.

    A client subscribes before it sends `turn/start`. A turn that it did not start begins with its
    first message.
    """
    requested: dict[str, int] = {}
    starts: dict[tuple[str, str], list[int]] = {}
    ended: set[tuple[str, str]] = set()
    position = 0
    for line in lines_of(recording):
        message, thread, turn = line.message, string_at(line.message, "params", "threadId"), ""
        match string_at(message, "method"):
            case "turn/start" if line.sent:
                requested[thread] = position
            case "turn/started":
                turn = string_at(message, "params", "turn", "id")
            case "turn/completed":
                ended.add((thread, string_at(message, "params", "turn", "id")))
            case _:
                pass
        if turn and ((thread, turn) not in starts or (thread, turn) in ended):
            starts.setdefault((thread, turn), []).append(requested.pop(thread, position))
            ended.discard((thread, turn))
        position += not line.sent
    return [
        Span(*ids, start, end)
        for ids, starts_of_turn in starts.items()
        for start, end in zip(starts_of_turn, [*starts_of_turn[1:], None], strict=True)
    ]


def replayed(recording: str, span: Span) -> Replay:
    reader = TurnReader(span.thread_id, span.turn_id)
    messages = decoded(recording)[span.start : span.end]
    events = [event for each in messages if isinstance(each, Notification) and (event := reader.read(each))]
    return Replay(span.thread_id, span.turn_id, tuple(events))


@cache
def replays_of(recording: str) -> tuple[Replay, ...]:
    return tuple(replayed(recording, span) for span in spans_of(recording))


def answered_turns(recording: str) -> list[Replay]:
    """Return the turns in codex's responses to `turn/start`, even if no event of them follows."""
    requested = {
        line.message["id"]: string_at(line.message, "params", "threadId")
        for line in lines_of(recording)
        if line.sent and string_at(line.message, "method") == "turn/start" and isinstance(line.message.get("id"), int)
    }
    return [
        replayed(
            recording, Span(requested[answer.id], string_at({"value": answer.value}, "value", "turn", "id"), 0, None)
        )
        for answer in decoded(recording)
        if isinstance(answer, Result) and answer.id in requested
    ]


def test_every_version_has_recordings() -> None:
    assert set(REQUIRED_VERSIONS) <= set(VERSIONS)
    assert all(f"{version}/basic_turn" in RECORDINGS for version in VERSIONS)


@pytest.mark.parametrize("recording", RECORDINGS)
def test_every_line_is_parsed(recording: str) -> None:
    assert decoded(recording)


@pytest.mark.parametrize("recording", RECORDINGS)
def test_no_event_is_unknown(recording: str) -> None:
    for turn in replays_of(recording):
        assert {event.name for event in turn.events if isinstance(event, UnknownEvent)} <= set(UNKNOWN)


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_turn_ends_once_with_codexs_status(recording: str) -> None:
    ends = Counter[tuple[str, str, str]]()
    for line in lines_of(recording):
        if string_at(line.message, "method") == "turn/completed":
            thread, turn_id = (
                string_at(line.message, "params", "threadId"),
                string_at(line.message, "params", "turn", "id"),
            )
            ends[thread, turn_id, string_at(line.message, "params", "turn", "status")] += 1
    turns = replays_of(recording)
    assert all(len(turn.ends) <= 1 for turn in turns)
    read = Counter((turn.thread_id, turn.turn_id, end.status) for turn in turns for end in turn.ends)
    # Reviews of codex 0.169 start and end under different IDs: such an end belongs to no turn that started.
    starts_of_turn = {(turn.thread_id, turn.turn_id) for turn in turns}
    assert read == Counter({end: count for end, count in ends.items() if end[:2] in starts_of_turn})


@pytest.mark.parametrize("recording", RECORDINGS)
def test_only_a_failed_turn_has_a_failure(recording: str) -> None:
    for turn in replays_of(recording):
        for end in turn.ends:
            assert (end.failure is not None) == (end.status == "failed")
            assert end.failure is None or end.failure.message


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_message_occurs_once_and_equals_its_deltas(recording: str) -> None:
    for turn in replays_of(recording):
        messages = [event for event in turn.events if isinstance(event, MessageCompleted)]
        assert len({event.item_id for event in messages}) == len(messages)
        deltas: dict[str, str] = {}
        for event in turn.events:
            if isinstance(event, MessageDelta):
                deltas[event.item_id] = deltas.get(event.item_id, "") + event.text
        for event in messages:
            if Path(recording).name in WITHOUT_DELTAS and event.item_id not in deltas:
                continue
            if TRIMMED not in event.text + deltas.get(event.item_id, ""):
                assert deltas.get(event.item_id, "") == event.text


@pytest.mark.parametrize("recording", RECORDINGS)
def test_items_repeated_at_the_end_occurred_before(recording: str) -> None:
    for turn in replays_of(recording):
        for end in turn.ends:
            assert end.last_message is None or end.last_message in turn.messages
            if end.status == "completed" and end.last_message is not None:
                assert turn.answer == end.last_message.text


@pytest.mark.parametrize("version", VERSIONS)
def test_the_recordings_of_a_version_contain_every_event_type(version: str) -> None:
    kinds = {
        type(event)
        for recording in RECORDINGS
        if recording.startswith(f"{version}/")
        for turn in replays_of(recording)
        for event in turn.events
    }
    common = {
        TurnStarted,
        MessageDelta,
        MessageCompleted,
        ReasoningDelta,
        ReasoningCompleted,
        CommandStarted,
        CommandOutput,
        CommandCompleted,
    }
    common |= {
        PatchCompleted,
        DiffUpdated,
        ToolCallCompleted,
        TokensUpdated,
        WarningReported,
        ErrorReported,
        TurnCompleted,
        Activity,
    }
    assert common | {ThreadIdle} <= kinds


ANSWERS: Final = {
    "0.163.0/basic_turn": [("completed", ("working", "done. ok."))],
    "0.169.0/basic_turn": [("completed", ("working", "done. ok."))],
    "0.163.0/conn_refused_0_0": [("interrupted", ())],
    "0.169.0/conn_refused_0_0": [("interrupted", ())],
    "0.169.0/turn_bad_params": [
        ("completed", ("final i=0 users=1 items=3",)),
        ("completed", ("final i=0 users=2 items=5",)),
        ("completed", ("final i=0 users=3 items=7",)),
    ],
    "0.169.0/spawn_agent": [
        ("completed", ("parent done", "final i=2 users=3 items=8")),
        ("completed", ("sub done",)),
    ],
    "0.169.0/steer": [("completed", ("final i=0 users=3 items=5", "final i=0 users=4 items=7"))],
}
"""The turns of the recordings, read by a person: their status and their text."""


@pytest.mark.parametrize(("recording", "turns"), ANSWERS.items(), ids=ANSWERS)
def test_the_answers_are_the_recorded_ones(recording: str, turns: list[tuple[str, tuple[str, ...]]]) -> None:
    read = [
        (end.status, tuple(message.text for message in turn.messages))
        for turn in replays_of(recording)
        for end in turn.ends
    ]
    assert read == turns
    for turn in replays_of(recording):
        assert not turn.messages or turn.answer == turn.messages[-1].text


@pytest.mark.parametrize("version", VERSIONS)
def test_the_basic_turn_runs_a_command_and_changes_a_file(version: str) -> None:
    (turn,) = replays_of(f"{version}/basic_turn")
    commands = [event for event in turn.events if isinstance(event, CommandCompleted)]
    (change,) = [event for event in turn.events if isinstance(event, PatchCompleted)]
    (reasoning,) = [event for event in turn.events if isinstance(event, ReasoningCompleted)]
    usage = [event for event in turn.events if isinstance(event, TokensUpdated)]
    assert [command.output[:3] for command in commands] == ["hi\n"]
    assert all((command.exit_code, command.status) == (0, ItemStatus.COMPLETED) for command in commands)
    assert [Path(each.path).name for each in change.changes] == ["a.txt"]
    assert [(each.kind, each.diff) for each in change.changes] == [("add", "hello\n")]
    assert reasoning.sections == ("think hard now",)
    assert usage[-1].thread.input > usage[0].thread.input


@pytest.mark.parametrize("version", VERSIONS)
def test_a_command_that_outlives_its_turn_is_absent_from_the_next(version: str) -> None:
    turns = replays_of(f"{version}/background_command")
    commands = [{event.item_id for event in turn.events if isinstance(event, CommandCompleted)} for turn in turns]
    assert sum(map(len, commands)) == len(set().union(*commands)) > 0
    after_the_end = [type(event) for turn in turns for event in turn.events[turn.events.index(turn.ends[0]) :]]
    assert CommandCompleted in after_the_end


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cut_at_any_byte_changes_nothing(version: str) -> None:
    stdout = stdout_of(lines_of(f"{version}/conn_refused_0_0"))
    lines = LineSplitter().feed(stdout)
    for cut in range(len(stdout) + 1):
        splitter = LineSplitter()
        assert splitter.feed(stdout[:cut]) + splitter.feed(stdout[cut:]) == lines
        assert splitter.finish() == []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RECORDINGS), st.lists(st.integers(1, 20_000), min_size=1, max_size=50))
def test_any_chunking_gives_the_same_messages(recording: str, sizes: list[int]) -> None:
    def repeated() -> Iterator[int]:
        while True:
            yield from sizes

    stdout = stdout_of(lines_of(recording))
    assert messages_of(stdout, repeated()) == list(decoded(recording))


def test_codex_numbers_its_requests_from_0() -> None:
    for version in VERSIONS:
        requested = [each for each in decoded(f"{version}/approvals_misc") if isinstance(each, Request)]
        assert requested[0].id == 0
