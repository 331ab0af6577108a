"""Tests `EventRedactor` (`runtimes/convert.py`): secrets in the pieces of a text, and in every other event."""

import pytest

from codex_workspace.common.redact import Redactor, redact_value
from codex_workspace.runtimes.convert import EventRedactor
from codex_workspace.runtimes.events import (
    BASH,
    COMMAND,
    AgentEvent,
    AgentMessage,
    Done,
    Error,
    FileChange,
    FileDiff,
    Plan,
    PlanStep,
    Reasoning,
    RunWarning,
    Text,
    ToolOutput,
    ToolResult,
    ToolUse,
    UnmappedEvent,
)

KEY = "sk-secret-1"
DONE = Done("", None, 1, None, "interrupted")


def redacted(*events: AgentEvent) -> list[AgentEvent]:
    redactor = EventRedactor(Redactor([KEY]))
    return [each for event in events for each in redactor.redact(event)]


def test_a_secret_that_is_split_between_two_pieces_is_redacted() -> None:
    assert redacted(Text("a", "it is sk-se"), Text("a", "cret-1."), AgentMessage("a", f"it is {KEY}.")) == [
        Text("a", "it is "),
        Text("a", "***."),
        AgentMessage("a", "it is ***."),
    ]


def test_each_item_has_its_own_stream() -> None:
    assert redacted(Text("a", "sk-se"), Text("b", "cret-1"), Reasoning("a", "cret-1"), Text("a", "cret-1")) == [
        Text("b", "cret-1"),
        Reasoning("a", "cret-1"),
        Text("a", "***"),
    ]


def test_the_output_of_a_command_is_redacted() -> None:
    assert redacted(ToolOutput("a", "KEY=sk-"), ToolOutput("a", "secret-1\nX=1")) == [
        ToolOutput("a", "KEY="),
        ToolOutput("a", "***\nX=1"),
    ]


def test_text_that_is_held_back_is_sent_at_the_end_of_its_message_or_of_the_turn() -> None:
    assert redacted(Text("a", "the end: "), Text("a", "s"), AgentMessage("a", "the end: s", "final_answer")) == [
        Text("a", "the end: "),
        Text("a", "s", phase="final_answer"),
        AgentMessage("a", "the end: s", "final_answer"),
    ]
    assert redacted(Text("a", "s"), DONE) == [Text("a", "s"), DONE]
    assert redacted(Text("a", "sk-secret"), DONE) == [Text("a", "***"), DONE]


def test_text_that_is_held_back_is_dropped_if_its_message_is_replaced_or_repeated() -> None:
    again = RunWarning("Reconnecting", will_retry=True)
    assert redacted(Text("a", "x s"), again, Text("b", "k")) == [Text("a", "x "), again, Text("b", "k")]
    assert redacted(Text("a", "x s"), Text("a", f"y {KEY}", replaces=True), AgentMessage("a", f"y {KEY}")) == [
        Text("a", "x "),
        Text("a", "y ***", replaces=True),
        AgentMessage("a", "y ***"),
    ]


@pytest.mark.parametrize(
    "event",
    [
        ToolUse("a", BASH, COMMAND, {"command": f"curl -H {KEY}", "cwd": f"/{KEY}"}),
        ToolUse("a", "tool", "tool", {"deep": [{KEY: KEY}, 1, None, True]}, "server"),
        ToolResult("a", f"x{KEY}", is_error=False),
        FileChange("a", (FileDiff("x", "add", "nothing"), FileDiff(f"/{KEY}", "add", f"{KEY}\n"))),
        Plan((PlanStep(f"use {KEY}", "pending"),), KEY),
        Done(KEY, None, 1, None, "failed", Error(f"bad key {KEY}", "OTHER", fatal=True)),
        UnmappedEvent("x", {"y": KEY}),
    ],
)
def test_every_text_of_an_event_is_redacted(event: AgentEvent) -> None:
    (shown,) = redacted(event)
    assert KEY not in repr(shown)
    assert "***" in repr(shown)
    assert type(shown) is type(event)


def test_an_event_without_a_secret_is_not_copied() -> None:
    event = ToolUse("a", BASH, COMMAND, {"command": "ls"})
    assert redacted(event)[0] is event
    assert redact_value(event, Redactor([KEY])) is event
    text = Text("a", KEY)
    assert EventRedactor(Redactor()).redact(text)[0] is text
