"""Events without secrets: pieces of one secret in several events, and every text of every other event."""

from dataclasses import replace

import pytest

from codex_workspace.common.redact import Redactor
from codex_workspace.protocol.codex_events import (
    CommandCompleted,
    CommandOutput,
    CommandStarted,
    FilePatch,
    ItemStatus,
    MessageCompleted,
    MessageDelta,
    MessageStarted,
    PatchCompleted,
    PlanItem,
    PlanUpdated,
    ReasoningDelta,
    ToolCallStarted,
    TurnCompleted,
    TurnError,
    TurnEvent,
    UnknownEvent,
    WarningReported,
)
from codex_workspace.protocol.redaction import EventRedactor, redact_event

KEY = "sk-secret-1"


def told(*events: TurnEvent) -> list[TurnEvent]:
    redactor = EventRedactor(Redactor([KEY]))
    return [each for event in events for each in redactor.redact(event)]


def test_a_secret_in_two_deltas_is_in_none() -> None:
    assert told(
        MessageDelta("a", "it is sk-se"), MessageDelta("a", "cret-1."), MessageCompleted("a", f"it is {KEY}.", None)
    ) == [
        MessageDelta("a", "it is "),
        MessageDelta("a", "***."),
        MessageCompleted("a", "it is ***.", None),
    ]


def test_items_do_not_mix() -> None:
    assert told(MessageDelta("a", "sk-se"), MessageDelta("b", "cret-1"), MessageDelta("a", "cret-1")) == [
        MessageDelta("b", "cret-1"),
        MessageDelta("a", "***"),
    ]
    assert told(ReasoningDelta("a", 0, "sk-se"), ReasoningDelta("a", 1, "cret-1")) == [ReasoningDelta("a", 1, "cret-1")]


def test_a_command_s_output_in_pieces() -> None:
    assert told(CommandOutput("a", "KEY=sk-"), CommandOutput("a", "secret-1\nX=1")) == [
        CommandOutput("a", "KEY="),
        CommandOutput("a", "***\nX=1"),
    ]


def test_what_was_held_back_is_told_when_the_turn_breaks_off() -> None:
    end = TurnCompleted("interrupted", None, None)
    assert told(MessageDelta("a", "the end: "), MessageDelta("a", "s"), end) == [
        MessageDelta("a", "the end: "),
        MessageDelta("a", "s"),
        end,
    ]
    assert told(MessageDelta("a", "sk-secret"), end) == [MessageDelta("a", "***"), end]


def test_what_is_said_anew_forgets_what_was_held_back() -> None:
    again = WarningReported("Reconnecting", will_retry=True)
    assert told(MessageDelta("a", "x s"), again, MessageDelta("b", "k")) == [
        MessageDelta("a", "x "),
        again,
        MessageDelta("b", "k"),
    ]


@pytest.mark.parametrize(
    "event",
    [
        CommandStarted("a", f"curl -H {KEY}", f"/{KEY}"),
        CommandCompleted("a", f"echo {KEY}", "/", f"x{KEY}", 0, ItemStatus.COMPLETED, 1),
        PatchCompleted(
            "a", (FilePatch("x", "add", "nothing"), FilePatch(f"/{KEY}", "add", f"{KEY}\n")), ItemStatus.COMPLETED
        ),
        ToolCallStarted("a", "server", "tool", {"deep": [{KEY: KEY}, 1, None, True]}),
        PlanUpdated((PlanItem(f"use {KEY}", "pending"),), KEY),
        TurnCompleted("failed", TurnError(f"bad key {KEY}", "other", 401, KEY), MessageCompleted("a", KEY, None)),
        UnknownEvent("x", {"y": KEY}),
    ],
)
def test_every_text_of_an_event_is_scrubbed(event: TurnEvent) -> None:
    (shown,) = told(event)
    assert KEY not in repr(shown)
    assert "***" in repr(shown)
    assert type(shown) is type(event)


def test_what_holds_none_is_not_copied() -> None:
    event = CommandCompleted("a", "echo", "/", "x", 0, ItemStatus.COMPLETED, 1)
    assert told(event)[0] is event
    assert redact_event(event, Redactor([KEY])) is event
    started = MessageStarted("a", "final_answer")
    assert told(started) == [started]
    delta = replace(MessageDelta("a", "x"), text=f"{KEY}")
    assert EventRedactor(Redactor()).redact(delta)[0] is delta
