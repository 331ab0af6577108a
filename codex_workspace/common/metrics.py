"""The numbers that Prometheus reads, in a registry of their own; the one module that knows `prometheus_client`.

Names and labels are in `docs/observability.md`. Every label has a few fixed values: none grows with contexts, tasks or
people.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PREFIX: Final = "codex_workspace_"

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_1_0_0

WAIT_S: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
FIRST_TEXT_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
TURN_S: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""The histograms' bounds, in seconds."""


class TurnOutcome(StrEnum):
    """What became of a turn; `CUT_OFF`: codex or the agent ended before it, `NOT_BEGUN`: codex never took it on."""

    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CUT_OFF = "cut_off"
    NOT_BEGUN = "not_begun"


class TaskOutcome(StrEnum):
    """The state in which a task ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Tokens by kind. None is part of another: `cached_input` not of `input`, `reasoning_output` not of `output`."""

    input: int = 0
    cached_input: int = 0
    output: int = 0
    reasoning_output: int = 0


@dataclass(frozen=True, slots=True)
class CodexGauges:
    """Codex at this moment: whether one runs, what it holds, how many were started, and how many of them died."""

    is_up: bool
    threads: int
    resident_bytes: int
    starts: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """How much there is of everything at this moment; what is None or empty is not there, or not known.

    deliveries: how many messages are in each state. push_waiting: notifications that webhooks are still to get.
    """

    waiting: int = 0
    running: int = 0
    asking: int = 0
    streams: int = 0
    codex: CodexGauges | None = None
    deliveries: Mapping[str, int] | None = None
    push_waiting: int | None = None


class Metrics:
    """Counts what happens; `scrape` tells it, with the levels of the moment."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._turns = self._counter("turns", "Turns by how they ended.", "outcome", TurnOutcome)
        self._tasks = self._counter("tasks", "Tasks by the state in which they ended.", "state", TaskOutcome)
        kinds = TokenTotals.__dataclass_fields__
        self._tokens = self._counter("tokens", "Tokens by kind; none is part of another.", "kind", kinds)
        self._wait = self._histogram("message_wait_seconds", "From a message's acceptance to its turn.", WAIT_S)
        self._first_text = self._histogram(
            "turn_first_text_seconds", "From a turn's beginning to the first text of its answer.", FIRST_TEXT_S
        )
        self._turn = self._histogram("turn_seconds", "From a turn's beginning to its end.", TURN_S)

    def observe_wait(self, seconds: float) -> None:
        """Count a message that has waited for its turn."""
        self._wait.observe(seconds)

    def observe_first_text(self, seconds: float) -> None:
        """Count a turn that begins to answer."""
        self._first_text.observe(seconds)

    def count_turn(self, outcome: TurnOutcome, seconds: float, tokens: TokenTotals) -> None:
        """Count a turn, and what it has used."""
        self._turns.labels(outcome).inc()
        self._turn.observe(seconds)
        for kind in TokenTotals.__dataclass_fields__:
            self._tokens.labels(kind).inc(max(0, getattr(tokens, kind)))

    def count_task(self, outcome: TaskOutcome) -> None:
        """Count a task."""
        self._tasks.labels(outcome).inc()

    def task_counts(self) -> Mapping[TaskOutcome, int]:
        """Return how many tasks have ended so far, by how."""
        samples = [sample for metric in self._tasks.collect() for sample in metric.samples]
        counts = {sample.labels["state"]: int(sample.value) for sample in samples if sample.name.endswith("_total")}
        return {outcome: counts.get(outcome, 0) for outcome in TaskOutcome}

    def scrape(self, levels: Gauges) -> bytes:
        """Return all of it in Prometheus' text format, whose type is `CONTENT_TYPE`."""
        all_of_it = CollectorRegistry()
        all_of_it.register(_Scrape(self._registry, levels))
        return generate_latest(all_of_it)

    def _counter(self, name: str, help_: str, label: str, values: Iterable[str]) -> Counter:
        counter = Counter(PREFIX + name, help_, [label], registry=self._registry)
        for value in values:
            # A series that begins at 0 shows its first increase.
            counter.labels(str(value))
        return counter

    def _histogram(self, name: str, help_: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, help_, buckets=bounds, registry=self._registry)


class _Scrape(Collector):
    """What was counted on the way, and what is read at the scrape."""

    def __init__(self, counted: CollectorRegistry, levels: Gauges) -> None:
        self._counted = counted
        self._levels = levels

    def collect(self) -> Iterator[Metric]:
        for metric in self._counted.collect():
            # When a series began would be a series of its own; the process's start says it of all.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
        levels = self._levels
        yield _gauge("messages_waiting", "Messages that wait for their turn.", levels.waiting)
        yield _gauge("turns_running", "Turns that run.", levels.running)
        yield _gauge("questions_open", "Turns that wait for a person's answer.", levels.asking)
        yield _gauge("streams_open", "Streams that clients hold open.", levels.streams)
        if levels.push_waiting is not None:
            waiting = "Notifications that webhooks have not got yet."
            yield _gauge("push_notifications_waiting", waiting, levels.push_waiting)
        if levels.deliveries is not None:
            family = GaugeMetricFamily(f"{PREFIX}deliveries", "Messages that are kept, by state.", labels=["state"])
            for state, number in levels.deliveries.items():
                family.add_metric([state], number)
            yield family
        if levels.codex is not None:
            yield from _of_codex(levels.codex)


def _of_codex(codex: CodexGauges) -> Iterator[Metric]:
    yield _gauge("codex_up", "Whether a codex runs.", int(codex.is_up))
    yield _gauge("codex_threads", "Threads that codex holds in memory.", codex.threads)
    held = "Memory of the codex process, without its commands."
    yield _gauge("codex_resident_memory_bytes", held, codex.resident_bytes)
    restarts = max(0, codex.starts - 1)
    yield CounterMetricFamily(f"{PREFIX}codex_restarts", "Starts of codex after the first.", restarts)
    yield CounterMetricFamily(f"{PREFIX}codex_deaths", "Codex processes that ended by themselves.", codex.deaths)


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help_, value)
