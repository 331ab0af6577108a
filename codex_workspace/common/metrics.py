"""The metrics for Prometheus; the only module that imports `prometheus_client`.

`docs/observability.md` lists the names and labels. Every label has a few fixed values.
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
"""The histograms' bucket bounds, in seconds."""


class TurnOutcome(StrEnum):
    """How a turn ended. CUT_OFF: codex or the agent ended during it. NOT_BEGUN: codex did not start it."""

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
    """Tokens by kind; no kind includes another: `input` excludes `cached_input`, `output` excludes
    `reasoning_output`."""

    input: int = 0
    cached_input: int = 0
    output: int = 0
    reasoning_output: int = 0


@dataclass(frozen=True, slots=True)
class CodexGauges:
    """The state of codex: whether it runs, its threads and memory, and how many processes started and died."""

    is_up: bool
    threads: int
    resident_bytes: int
    starts: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """Current values; None if not available.

    deliveries: the number of messages in each state. push_waiting: the number of queued push notifications.
    """

    waiting: int = 0
    running: int = 0
    asking: int = 0
    streams: int = 0
    codex: CodexGauges | None = None
    deliveries: Mapping[str, int] | None = None
    push_waiting: int | None = None


class Metrics:
    """Counters and histograms; `scrape` returns them together with the gauges."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._turns = self._counter("turns", "Turns by outcome.", "outcome", TurnOutcome)
        self._tasks = self._counter("tasks", "Tasks by final state.", "state", TaskOutcome)
        kinds = TokenTotals.__dataclass_fields__
        self._tokens = self._counter("tokens", "Tokens by kind; no kind includes another.", "kind", kinds)
        self._wait = self._histogram(
            "message_wait_seconds", "Time from a message's acceptance to the start of its turn.", WAIT_S
        )
        self._first_text = self._histogram(
            "turn_first_text_seconds", "Time from a turn's start to the first text of its answer.", FIRST_TEXT_S
        )
        self._turn = self._histogram("turn_seconds", "Time from a turn's start to its end.", TURN_S)

    def observe_wait(self, seconds: float) -> None:
        """Record how long a message waited for its turn."""
        self._wait.observe(seconds)

    def observe_first_text(self, seconds: float) -> None:
        """Record the time to the first text of a turn."""
        self._first_text.observe(seconds)

    def count_turn(self, outcome: TurnOutcome, seconds: float, tokens: TokenTotals) -> None:
        """Count a turn that ended, and its tokens."""
        self._turns.labels(outcome).inc()
        self._turn.observe(seconds)
        for kind in TokenTotals.__dataclass_fields__:
            self._tokens.labels(kind).inc(max(0, getattr(tokens, kind)))

    def count_task(self, outcome: TaskOutcome) -> None:
        """Count a task that ended."""
        self._tasks.labels(outcome).inc()

    def task_counts(self) -> Mapping[TaskOutcome, int]:
        """Return how many tasks ended in each state."""
        samples = [sample for metric in self._tasks.collect() for sample in metric.samples]
        counts = {sample.labels["state"]: int(sample.value) for sample in samples if sample.name.endswith("_total")}
        return {outcome: counts.get(outcome, 0) for outcome in TaskOutcome}

    def scrape(self, gauges: Gauges) -> bytes:
        """Return all metrics in Prometheus' text format, as `CONTENT_TYPE`."""
        registry = CollectorRegistry()
        registry.register(_Scrape(self._registry, gauges))
        return generate_latest(registry)

    def _counter(self, name: str, help_: str, label: str, values: Iterable[str]) -> Counter:
        counter = Counter(PREFIX + name, help_, [label], registry=self._registry)
        for value in values:
            # A series that starts at 0 shows its first increase.
            counter.labels(str(value))
        return counter

    def _histogram(self, name: str, help_: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, help_, buckets=bounds, registry=self._registry)


class _Scrape(Collector):
    """The counted metrics and the gauges of one scrape."""

    def __init__(self, counted: CollectorRegistry, gauges: Gauges) -> None:
        self._counted = counted
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        for metric in self._counted.collect():
            # The creation times of series are left out; the start time of the process is enough.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
        gauges = self._gauges
        yield _gauge("messages_waiting", "Messages that wait for their turn.", gauges.waiting)
        yield _gauge("turns_running", "Running turns.", gauges.running)
        yield _gauge("questions_open", "Turns that wait for a user's answer.", gauges.asking)
        yield _gauge("streams_open", "Open streams.", gauges.streams)
        if gauges.push_waiting is not None:
            waiting = "Queued push notifications."
            yield _gauge("push_notifications_waiting", waiting, gauges.push_waiting)
        if gauges.deliveries is not None:
            family = GaugeMetricFamily(f"{PREFIX}deliveries", "Stored messages by state.", labels=["state"])
            for state, number in gauges.deliveries.items():
                family.add_metric([state], number)
            yield family
        if gauges.codex is not None:
            yield from _codex_metrics(gauges.codex)


def _codex_metrics(codex: CodexGauges) -> Iterator[Metric]:
    yield _gauge("codex_up", "Whether codex runs.", int(codex.is_up))
    yield _gauge("codex_threads", "Threads loaded in codex.", codex.threads)
    held = "Resident memory of the codex process, without its commands."
    yield _gauge("codex_resident_memory_bytes", held, codex.resident_bytes)
    restarts = max(0, codex.starts - 1)
    yield CounterMetricFamily(f"{PREFIX}codex_restarts", "Restarts of codex.", restarts)
    yield CounterMetricFamily(f"{PREFIX}codex_deaths", "Codex processes that ended unexpectedly.", codex.deaths)


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help_, value)
