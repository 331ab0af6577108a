"""Numbers: what is counted of a message's way, and what a scrape shows of it."""

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from a2a.types import Message, SendMessageRequest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.ext.asyncio import create_async_engine

from codex_workspace.common.metrics import CodexGauges, Gauges, Metrics, TaskOutcome, TokenTotals, TurnOutcome
from codex_workspace.common.tracing import Attributes, Span, SpanKind
from codex_workspace.protocol.codex_events import (
    CommandCompleted,
    CommandStarted,
    ItemStatus,
    MessageCompleted,
    MessageDelta,
    TokenUsage,
    ToolCallCompleted,
    ToolCallStarted,
    TurnCompleted,
    WebSearchCompleted,
)
from codex_workspace.server.views import COUNTED_S, GaugeCollector
from codex_workspace.storage.deliveries import Deliveries, DeliveryKey, message_digest
from codex_workspace.storage.store import Store, open_store
from codex_workspace.tasks.telemetry import Telemetry


def numbers(metrics: Metrics, levels: Gauges | None = None) -> dict[str, float]:
    """Return the values of a scrape, by name and label."""
    scraped = metrics.scrape(levels or Gauges()).decode()
    samples = [sample for family in text_string_to_metric_families(scraped) for sample in family.samples]
    return {
        " ".join([each.name.removeprefix("codex_workspace_"), *each.labels.values()]): each.value for each in samples
    }


@dataclass
class Ended:
    """A turn that has ended so."""

    ended: TurnCompleted | None
    usage: TokenUsage | None = None
    thread_id: str = "thread"
    turn_id: str = "turn"


def test_what_has_not_happened_yet_is_there_as_zero() -> None:
    shown = numbers(Metrics())
    for outcome in TurnOutcome:
        assert shown[f"turns_total {outcome}"] == 0
    for state in TaskOutcome:
        assert shown[f"tasks_total {state}"] == 0
    assert shown["tokens_total cached_input"] == 0
    assert not [name for name in shown if "_created" in name]


def test_what_is_not_known_is_not_there() -> None:
    shown = numbers(Metrics(), Gauges(codex=None, deliveries=None, push_waiting=None))
    assert not [name for name in shown if name.startswith(("codex_", "deliveries", "push_"))]
    levels = Gauges(codex=CodexGauges(True, 3, 5, 0, 0), deliveries={"started": 2}, push_waiting=4)
    shown = numbers(Metrics(), levels)
    assert (shown["deliveries started"], shown["push_notifications_waiting"], shown["codex_restarts_total"]) == (
        2,
        4,
        0,
    )


def test_a_turn_is_counted_with_its_times_and_tokens() -> None:
    now = [10.0]
    telemetry = Telemetry(clock=lambda: now[0])
    with telemetry.message("task", "context", {}) as message:
        with message.waiting():
            now[0] += 2
        with message.turn() as turn:
            now[0] += 1
            turn.began(Ended(TurnCompleted("completed", None, None), TokenUsage(10, 6, 4, 4, 1)))
            turn.see(CommandStarted("c", "ls", "/"))
            now[0] += 1
            turn.see(MessageDelta("m", "He"))
            turn.see(MessageDelta("m", "llo"))
            turn.see(MessageCompleted("m", "Hello", None))
            now[0] += 1
        message.ended(TaskOutcome.COMPLETED)
    shown = numbers(telemetry.metrics)
    assert (shown["message_wait_seconds_sum"], shown["message_wait_seconds_count"]) == (2, 1)
    assert (shown["turn_first_text_seconds_sum"], shown["turn_first_text_seconds_count"]) == (2, 1)
    assert (shown["turn_seconds_sum"], shown["turn_seconds_count"]) == (3, 1)
    assert (shown["turns_total completed"], shown["tasks_total completed"]) == (1, 1)
    kinds = {kind: shown[f"tokens_total {kind}"] for kind in TokenTotals.__dataclass_fields__}
    assert kinds == {"input": 2, "cached_input": 4, "output": 3, "reasoning_output": 1}


@pytest.mark.parametrize(
    ("turn", "outcome"),
    [
        (None, "not_begun"),
        (Ended(None), "cut_off"),
        (Ended(TurnCompleted("interrupted", None, None)), "interrupted"),
        (Ended(TurnCompleted("failed", None, None)), "failed"),
    ],
)
def test_a_turn_counts_once_however_it_is_left(turn: Ended | None, outcome: str) -> None:
    telemetry = Telemetry(clock=lambda: 0.0)
    with suppress(ConnectionError), telemetry.message("task", "context", {}) as message, message.turn() as watch:
        if turn is not None:
            watch.began(turn)
        raise ConnectionError
    shown = numbers(telemetry.metrics)
    assert {name: value for name, value in shown.items() if name.startswith("turns_total") and value} == {
        f"turns_total {outcome}": 1
    }


def test_who_leaves_the_queue_has_not_waited_for_a_turn() -> None:
    telemetry = Telemetry(clock=lambda: 0.0)
    with pytest.raises(ConnectionError), telemetry.message("task", "c", {}) as message, message.waiting():
        raise ConnectionError
    assert numbers(telemetry.metrics)["message_wait_seconds_count"] == 0


class Noted(Span):
    """A span that writes down what becomes of it and its parts."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes, self._is_over = name, notes, False

    def start_child(self, name: str, attributes: Attributes) -> Span:
        self._notes.append(f"{name} in {self._name}")
        return Noted(name, self._notes)

    def end(self, error: str | None = None) -> None:
        if not self._is_over:
            self._is_over = True
            self._notes.append(f"{self._name}: {error or 'ended'}")


@dataclass
class Notes:
    """A tracer that writes down."""

    notes: list[str]

    def start_span(self, name: str, kind: SpanKind, attributes: Attributes, headers: object = None) -> Span:
        return Noted(name, self.notes)


def test_items_are_parts_of_their_turn_and_none_outlives_it() -> None:
    notes: list[str] = []
    telemetry = Telemetry(tracer=Notes(notes), clock=lambda: 0.0)
    with telemetry.message("task", "c", {}) as message, message.turn() as turn:
        turn.began(Ended(TurnCompleted("completed", None, None)))
        turn.see(CommandStarted("1", "ls", "/"))
        turn.see(CommandStarted("1", "ls", "/"))
        turn.see(ToolCallStarted("2", "srv", "find", {}))
        turn.see(CommandCompleted("1", "ls", "/", "", 0, ItemStatus.COMPLETED, 1))
        turn.see(CommandCompleted("1", "ls", "/", "", 0, ItemStatus.COMPLETED, 1))
        turn.see(ToolCallCompleted("2", "srv", "find", {}, "no", True, ItemStatus.COMPLETED, 1))
        turn.see(WebSearchCompleted("3", "what"))
        turn.see(CommandStarted("4", "sleep 9", "/"))
    assert notes == [
        "turn in message",
        "command in turn",
        "tool in turn",
        "command: ended",
        "tool: failed",
        "web search in turn",
        "web search: ended",
        "command in turn",
        "command: the turn ended first",
        "turn: ended",
        "message: ended",
    ]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite+aiosqlite:///{tmp_path / 'store.sqlite3'}") as store:
        yield store


async def accepted(deliveries: Deliveries, message_id: str, context_id: str = "ctx") -> DeliveryKey:
    key = DeliveryKey("operator", message_id)
    request = SendMessageRequest(message=Message(message_id=message_id))
    assert await deliveries.accept(key, request, message_digest(request), f"task-{message_id}", context_id)
    return key


async def test_messages_are_counted_by_state(store: Store) -> None:
    reader = GaugeCollector(store.deliveries, lambda: 7)
    levels = await reader.read()
    assert levels.deliveries == {"accepted": 0, "started": 0, "answered": 0, "acknowledged": 0}
    assert (levels.streams, levels.codex, levels.push_waiting) == (7, None, None)
    await accepted(store.deliveries, "1")
    await store.deliveries.mark_started(await accepted(store.deliveries, "2"), "thread", "turn")
    assert (await reader.read()).deliveries == levels.deliveries, f"the database is asked once in {COUNTED_S:g} s"
    again = await GaugeCollector(store.deliveries, lambda: 7).read()
    assert again.deliveries == {"accepted": 1, "started": 1, "answered": 0, "acknowledged": 0}


async def test_the_thread_that_was_last_at_work_is_known(store: Store) -> None:
    deliveries = store.deliveries
    assert await deliveries.newest_thread() is None
    first, second = await accepted(deliveries, "1", "one"), await accepted(deliveries, "2", "two")
    await deliveries.mark_started(second, "thread-2", "turn")
    await deliveries.mark_started(first, "thread-1", "turn")
    assert await deliveries.newest_thread() == "thread-1"
    assert await deliveries.newest_thread("two") == "thread-2"
    assert await deliveries.newest_thread("three") is None


async def test_a_database_that_does_not_answer_leaves_the_other_numbers(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'without_tables.sqlite3'}")
    try:
        levels = await GaugeCollector(Deliveries(engine), lambda: 7).read()
    finally:
        await engine.dispose()
    assert (levels.deliveries, levels.streams) == (None, 7)
