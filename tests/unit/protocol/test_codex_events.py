"""The text of a turn, assembled from its events."""

import pytest

from codex_workspace.protocol.codex_events import (
    MessageCompleted,
    MessageDelta,
    MessageStarted,
    TokensUpdated,
    TokenUsage,
    TurnCompleted,
    TurnEvent,
    TurnText,
    WarningReported,
)


def text_of(*events: TurnEvent) -> TurnText:
    text = TurnText()
    for event in events:
        text.apply(event)
    return text


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
    assert text_of(*events).answer == answer


def test_the_messages_come_in_the_order_they_began() -> None:
    text = text_of(
        MessageStarted("a", "commentary"), MessageDelta("b", "two"), MessageCompleted("a", "one", "commentary")
    )
    assert text.messages == (MessageCompleted("a", "one", "commentary"), MessageCompleted("b", "two", None))


def test_token_counts_subtract() -> None:
    usage = TokensUpdated(TokenUsage(214, 200, 20, 14, 4), TokenUsage(107, 100, 10, 7, 2))
    assert usage.thread.minus(usage.last) == TokenUsage(107, 100, 10, 7, 2)
