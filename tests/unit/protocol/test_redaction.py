"""Events without secrets: pieces of one secret in several events, and every text of every other event."""

from dataclasses import replace

import pytest

from codex_workspace.common.redact import Scrubber
from codex_workspace.protocol.codex_events import (
    Change,
    CommandFinished,
    CommandOutput,
    CommandStarted,
    FilesChanged,
    ItemStatus,
    MessageStarted,
    Planned,
    PlanStep,
    ReasoningDelta,
    Said,
    TextDelta,
    ToolStarted,
    TurnEnded,
    TurnEvent,
    TurnFailure,
    Unknown,
    Warned,
)
from codex_workspace.protocol.redaction import Redactor, redacted

KEY = "sk-secret-1"


def told(*events: TurnEvent) -> list[TurnEvent]:
    redactor = Redactor(Scrubber([KEY]))
    return [each for event in events for each in redactor.take(event)]


def test_a_secret_in_two_deltas_is_in_none() -> None:
    assert told(TextDelta("a", "it is sk-se"), TextDelta("a", "cret-1."), Said("a", f"it is {KEY}.", None)) == [
        TextDelta("a", "it is "),
        TextDelta("a", "***."),
        Said("a", "it is ***.", None),
    ]


def test_items_do_not_mix() -> None:
    assert told(TextDelta("a", "sk-se"), TextDelta("b", "cret-1"), TextDelta("a", "cret-1")) == [
        TextDelta("b", "cret-1"),
        TextDelta("a", "***"),
    ]
    assert told(ReasoningDelta("a", 0, "sk-se"), ReasoningDelta("a", 1, "cret-1")) == [ReasoningDelta("a", 1, "cret-1")]


def test_a_command_s_output_in_pieces() -> None:
    assert told(CommandOutput("a", "KEY=sk-"), CommandOutput("a", "secret-1\nX=1")) == [
        CommandOutput("a", "KEY="),
        CommandOutput("a", "***\nX=1"),
    ]


def test_what_was_held_back_is_told_when_the_turn_breaks_off() -> None:
    end = TurnEnded("interrupted", None, None)
    assert told(TextDelta("a", "the end: "), TextDelta("a", "s"), end) == [
        TextDelta("a", "the end: "),
        TextDelta("a", "s"),
        end,
    ]
    assert told(TextDelta("a", "sk-secret"), end) == [TextDelta("a", "***"), end]


def test_what_is_said_anew_forgets_what_was_held_back() -> None:
    again = Warned("Reconnecting", will_retry=True)
    assert told(TextDelta("a", "x s"), again, TextDelta("b", "k")) == [TextDelta("a", "x "), again, TextDelta("b", "k")]


@pytest.mark.parametrize(
    "event",
    [
        CommandStarted("a", f"curl -H {KEY}", f"/{KEY}"),
        CommandFinished("a", f"echo {KEY}", "/", f"x{KEY}", 0, ItemStatus.COMPLETED, 1),
        FilesChanged("a", (Change("x", "add", "nothing"), Change(f"/{KEY}", "add", f"{KEY}\n")), ItemStatus.COMPLETED),
        ToolStarted("a", "server", "tool", {"deep": [{KEY: KEY}, 1, None, True]}),
        Planned((PlanStep(f"use {KEY}", "pending"),), KEY),
        TurnEnded("failed", TurnFailure(f"bad key {KEY}", "other", 401, KEY), Said("a", KEY, None)),
        Unknown("x", {"y": KEY}),
    ],
)
def test_every_text_of_an_event_is_scrubbed(event: TurnEvent) -> None:
    (shown,) = told(event)
    assert KEY not in repr(shown)
    assert "***" in repr(shown)
    assert type(shown) is type(event)


def test_what_holds_none_is_not_copied() -> None:
    event = CommandFinished("a", "echo", "/", "x", 0, ItemStatus.COMPLETED, 1)
    assert told(event)[0] is event
    assert redacted(event, Scrubber([KEY])) is event
    started = MessageStarted("a", "final_answer")
    assert told(started) == [started]
    delta = replace(TextDelta("a", "x"), text=f"{KEY}")
    assert Redactor(Scrubber()).take(delta)[0] is delta
