"""Tests `EventConverter` (`runtimes/convert.py`) with recordings of the app-server and with single events."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from codex_workspace.protocol.codex_events import (
    CommandOutput,
    CommandStarted,
    DiffUpdated,
    ErrorReported,
    MessageCompleted,
    MessageDelta,
    MessageStarted,
    PlanUpdated,
    ReasoningCompleted,
    ReasoningDelta,
    TokenUsage,
    ToolCallCompleted,
    ToolCallStarted,
    TurnCompleted,
    TurnError,
    TurnEvent,
    TurnStarted,
    UnknownEvent,
    WarningReported,
)
from codex_workspace.protocol.codex_events import ItemStatus as Status
from codex_workspace.protocol.codex_events import PlanItem as CodexStep
from codex_workspace.protocol.codex_events import TokensUpdated as CodexUsage
from codex_workspace.runtimes.convert import NO_RESULT, NONE_USED, EventConverter
from codex_workspace.runtimes.events import (
    AgentMessage,
    Done,
    Error,
    Plan,
    PlanStep,
    Reasoning,
    ReasoningSummary,
    RunDiff,
    RunWarning,
    Text,
    TokenCounts,
    ToolOutput,
    ToolResult,
    ToolUse,
    UnmappedEvent,
    Usage,
)
from tests.integration.test_recordings import RECORDINGS, TRIMMED, replays_of
from tests.unit.runtimes.test_convert import check_balance, done, texts_of

COMPLETED = TurnCompleted("completed", None, None)
FULL = TurnError("limit", "usageLimitExceeded", None, None)


@pytest.mark.parametrize("recording", RECORDINGS)
def test_recordings_of_the_app_server_become_balanced_streams(recording: str) -> None:
    for turn in replays_of(recording):
        stream = EventConverter()
        events = [said for event in turn.events for said in stream.convert(event)] + stream.finish()
        check_balance(events)
        assert not [event for event in events if isinstance(event, UnmappedEvent)]
        end = done(events)
        assert end.text == turn.answer
        if turn.ends:
            assert end.stop_reason == turn.ends[-1].status
        whole = {said.item_id: said.text for said in turn.events if isinstance(said, MessageCompleted)}
        texts = texts_of(events)
        for item, text in whole.items():
            assert texts.get(item, "") == text or TRIMMED in text + texts[item]


def said_of(*events: TurnEvent, used_before: TokenUsage | None = NONE_USED) -> Sequence[object]:
    stream = EventConverter(used_before, clock=lambda: 0.0)
    return [said for event in events for said in stream.convert(event)] + list(stream.finish())


def end(text: str = "") -> Done:
    return Done(text, None, 0, None, "completed")


def test_streamed_text_is_not_repeated() -> None:
    said = said_of(MessageDelta("m", "Hel"), MessageCompleted("m", "Hello", None), MessageDelta("m", "late"), COMPLETED)
    assert said == [Text("m", "Hel"), Text("m", "lo"), AgentMessage("m", "Hello"), end("Hello")]


def test_sections_of_reasoning_are_separated_and_not_repeated() -> None:
    said = said_of(
        ReasoningDelta("r", 0, "a"),
        ReasoningDelta("r", 0, "b"),
        ReasoningDelta("r", 1, "c"),
        ReasoningCompleted("r", ("ab", "c")),
        ReasoningCompleted("s", ("once",)),
        COMPLETED,
    )
    texts = ["a", "b", "\n\nc"]
    assert said == [
        *(Reasoning("r", text) for text in texts),
        ReasoningSummary("r", ("ab", "c")),
        Reasoning("s", "once"),
        ReasoningSummary("s", ("once",)),
        end(),
    ]


def test_a_failure_is_emitted_once() -> None:
    error = Error("limit", "USAGE_LIMIT_EXCEEDED", fatal=True)
    failed = Done("", None, 0, None, "failed", error)
    assert said_of(ErrorReported(FULL), TurnCompleted("failed", FULL, None)) == [error, failed]
    assert said_of(TurnCompleted("failed", FULL, None)) == [error, failed]
    assert said_of(ErrorReported(FULL)) == [error, failed]


def test_a_missing_end_is_a_failure() -> None:
    *_, last = said_of(CommandStarted("c", "ls", ""))
    assert isinstance(last, Done)
    assert last.error is not None
    assert (last.stop_reason, last.error.code) == ("failed", "NO_END")


def test_an_interrupted_turn_closes_its_tools() -> None:
    said = said_of(ToolCallStarted("t", "srv", "echo", "words"), TurnCompleted("interrupted", None, None))
    assert said == [
        ToolUse("t", "echo", "echo", {"arguments": "words"}, "srv"),
        ToolResult("t", NO_RESULT, is_error=True, status="failed"),
        Done("", None, 0, None, "interrupted"),
    ]


def test_a_further_turn_of_the_run_counts() -> None:
    *_, last = said_of(COMPLETED, TurnStarted(), TurnCompleted("interrupted", None, None))
    assert isinstance(last, Done)
    assert last.stop_reason == "interrupted"


def test_other_events_are_converted() -> None:
    finished = ToolCallCompleted("t", None, "look", None, "no", True, Status.FAILED, 5)
    said = said_of(
        PlanUpdated((CodexStep("a", "inProgress"),), "why"),
        WarningReported("careful", will_retry=False),
        finished,
        UnknownEvent("x/y", {"a": 1}),
        COMPLETED,
    )
    assert said == [
        Plan((PlanStep("a", "in_progress"),), "why"),
        RunWarning("careful"),
        ToolUse("t", "look", "look", {}),
        ToolResult("t", "no", is_error=True, duration_ms=5, status="failed"),
        UnmappedEvent("x/y", {"a": 1}),
        end(),
    ]


def test_a_message_has_its_phase_from_its_start() -> None:
    said = said_of(
        MessageStarted("m", "commentary"), MessageDelta("m", "I"), MessageCompleted("m", "I", None), COMPLETED
    )
    assert said[:2] == [Text("m", "I", phase="commentary"), AgentMessage("m", "I", "commentary")]


def test_output_and_diffs_are_sent_as_they_grow() -> None:
    said = said_of(CommandStarted("c", "ls", ""), CommandOutput("c", "a\n"), DiffUpdated("+x"), COMPLETED)
    assert said[1:3] == [ToolOutput("c", "a\n"), RunDiff("+x")]


def test_a_resumed_sessions_tokens_are_those_of_its_newest_call() -> None:
    count = TokenUsage(120, 100, 10, 20, 5)
    used = CodexUsage(count, TokenUsage(12, 10, 1, 2, 0))
    session = TokenCounts(100, 10, 20, 5)
    assert said_of(used)[0] == Usage(session, session)
    assert said_of(used, used_before=None)[0] == Usage(TokenCounts(10, 1, 2, 0), session)
    assert said_of(used, used_before=replace(count))[0] == Usage(TokenCounts(0, 0, 0, 0), session)
    untold = CodexUsage(count)
    assert said_of(untold, used_before=None)[0] == Usage(None, session)


@pytest.mark.parametrize(
    ("events", "answer"),
    [
        ([], ""),
        ([MessageDelta("a", "he"), MessageDelta("a", "llo")], "hello"),
        ([MessageStarted("a", None), MessageDelta("a", "hel"), MessageCompleted("a", "hello", None)], "hello"),
        ([MessageCompleted("a", "hello", None), MessageDelta("a", "late")], "hello"),
        ([MessageCompleted("a", "first", None), MessageCompleted("b", "second", None)], "second"),
        (
            [MessageCompleted("a", "answer", "final_answer"), MessageCompleted("b", "by the way", "commentary")],
            "answer",
        ),
        ([MessageCompleted("a", "looking", "commentary"), MessageStarted("b", None)], "looking"),
        ([MessageCompleted("a", "looking", None), MessageStarted("b", None), MessageDelta("b", "do")], "do"),
        ([MessageCompleted("a", "hello", None), MessageCompleted("b", "", None)], "hello"),
        ([MessageDelta("a", "hal"), WarningReported("again", will_retry=True)], ""),
        (
            [MessageCompleted("a", "one", None), MessageDelta("b", "hal"), WarningReported("again", will_retry=True)],
            "one",
        ),
        ([TurnCompleted("completed", None, MessageCompleted("a", "hello", None))], "hello"),
        (
            [
                MessageCompleted("a", "hello", None),
                TurnCompleted("completed", None, MessageCompleted("a", "hello", None)),
            ],
            "hello",
        ),
    ],
)
def test_the_answer_so_far(events: list[TurnEvent], answer: str) -> None:
    stream = EventConverter()
    for event in events:
        stream.convert(event)
    assert stream.answer == answer
