"""Logs with redacted secrets, metrics for Prometheus, and spans for OpenTelemetry.

`docs/observability.md` lists the metrics and spans. Spans are passed explicitly, because a task's work moves between
requests. The libraries for metrics and spans are imported when they are used: OpenTelemetry only if an exporter is
configured.
"""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

import anyio

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client import Counter, Histogram

logger = logging.getLogger(__name__)

# --- Logs ---

IdName: TypeAlias = Literal["task", "context", "thread", "turn", "trace"]

_PLAIN: Final = re.compile(r"[\w.:/-]{1,64}", re.ASCII)
"""IDs that a text line shows unquoted; clients choose some of the IDs."""

_LINE_BREAKS: Final = str.maketrans({"\n": "\\n", "\r": "\\r"})
"""Escapes for messages with several lines, which must not look like several records."""

_QUIET: Final = ("httpx", "httpcore", "asyncio", "sse_starlette", "uvicorn", "a2a")
"""Libraries of which only warnings and errors are logged."""

_INVALID_REQUESTS: Final = ("Failed to validate base JSON-RPC request", "Failed to parse request params")

_ids: ContextVar[Mapping[IdName, str]] = ContextVar("ids")


@contextmanager
def log_context(ids: Mapping[IdName, str]) -> Iterator[None]:
    """Add these IDs, and those of the enclosing blocks, to every line logged in the block and its tasks."""
    token = _ids.set({**_ids.get({}), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def set_up_logging(*, as_json: bool, level: str, scrub: Callable[[str], str]) -> None:
    """Send the process's log to stderr, at `level` (a level name of the logging module)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(scrub) if as_json else _Text(scrub))
    # The SDK's tracebacks of invalid requests: the client gets the error, and could flood the log.
    handler.addFilter(lambda record: not str(record.msg).startswith(_INVALID_REQUESTS))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))


def json_line(level: str, logger: str, message: str) -> str:
    """Return a JSON log line, for use before logging is set up; `message` must not contain secrets."""
    record = logging.LogRecord(logger, logging.getLevelNamesMapping()[level.upper()], "", 0, message, None, None)
    return _Json(str).format(record)


class _Text(logging.Formatter):
    """Text lines: time, level, logger, message, and the IDs as `name=id`."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
        self._scrub = scrub

    def format(self, record: logging.LogRecord) -> str:
        return self._scrub(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the message as one line; a traceback may follow it."""
        # Redacted first: a secret with line breaks would not be recognized afterwards.
        line = self._scrub(super().formatMessage(record)).translate(_LINE_BREAKS)
        ids = _ids.get({}).items()
        return " ".join([line, *(f"{name}={id_ if _PLAIN.fullmatch(id_) else json.dumps(id_)}" for name, id_ in ids)])


class _Json(logging.Formatter):
    """JSON lines: time (RFC 3339, UTC), level, logger, message, IDs and traceback."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        super().__init__()
        self._scrub = scrub

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, str] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._scrub(record.getMessage()),
            **{name: self._scrub(id_) for name, id_ in _ids.get({}).items()},
        }
        if record.exc_info:
            line["traceback"] = self._scrub(self.formatException(record.exc_info))
        # Redacted first: JSON escapes quotes and backslashes of a secret.
        return json.dumps(line, ensure_ascii=False)


# --- Metrics ---

PREFIX: Final = "codex_workspace_"

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"

WAIT_S: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
FIRST_TEXT_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
TURN_S: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""The histograms' bucket bounds, in seconds."""

GAUGES: Final = {
    "messages_waiting": "Messages that wait for their turn.",
    "turns_running": "Running turns.",
    "questions_open": "Turns that wait for a user's answer.",
    "streams_open": "Open streams.",
    "push_notifications_waiting": "Queued push notifications.",
    "codex_up": "Whether codex runs.",
    "codex_threads": "Threads loaded in codex.",
    "codex_resident_memory_bytes": "Resident memory of the codex process, without its commands.",
}
CODEX_COUNTERS: Final = {
    "codex_restarts": "Restarts of codex.",
    "codex_deaths": "Codex processes that ended unexpectedly.",
}
"""The current values and counts that `Metrics.scrape` receives, with their descriptions."""


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


class Metrics:
    """Counters and histograms; `scrape` returns them together with current values. `task_counts`: the ended tasks."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

        # The creation times of series are left out; the start time of the process is enough.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.task_counts: Final = dict.fromkeys(TaskOutcome, 0)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._turns = self._counter("turns", "Turns by outcome.", "outcome", TurnOutcome)
        self._tasks = self._counter("tasks", "Tasks by final state.", "state", TaskOutcome)
        kinds = TokenTotals.__dataclass_fields__
        self._tokens = self._counter("tokens", "Tokens by kind; no kind includes another.", "kind", kinds)
        self.wait: Final = self._histogram(
            "message_wait_seconds", "Time from a message's acceptance to the start of its turn.", WAIT_S
        )
        self.first_text: Final = self._histogram(
            "turn_first_text_seconds", "Time from a turn's start to the first text of its answer.", FIRST_TEXT_S
        )
        self._turn = self._histogram("turn_seconds", "Time from a turn's start to its end.", TURN_S)

    def count_turn(self, outcome: TurnOutcome, seconds: float, tokens: TokenTotals) -> None:
        """Count a turn that ended, and its tokens."""
        self._turns.labels(outcome).inc()
        self._turn.observe(seconds)
        for kind in TokenTotals.__dataclass_fields__:
            self._tokens.labels(kind).inc(max(0, getattr(tokens, kind)))

    def count_task(self, outcome: TaskOutcome) -> None:
        """Count a task that ended."""
        self.task_counts[outcome] += 1
        self._tasks.labels(outcome).inc()

    def scrape(self, values: Mapping[str, float], deliveries: Mapping[str, int] | None) -> bytes:
        """Return all metrics in Prometheus' text format, as `CONTENT_TYPE`.

        `values` are some of `GAUGES` and `CODEX_COUNTERS`; `deliveries` are the stored messages by state, if known.
        """
        from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

        current = CollectorRegistry()
        for name, value in values.items():
            if name in GAUGES:
                Gauge(PREFIX + name, GAUGES[name], registry=current).set(value)
            else:
                Counter(PREFIX + name, CODEX_COUNTERS[name], registry=current).inc(value)
        if deliveries is not None:
            states = Gauge(f"{PREFIX}deliveries", "Stored messages by state.", ["state"], registry=current)
            for state, count in deliveries.items():
                states.labels(state).set(count)
        return generate_latest(self._registry) + generate_latest(current)

    def _counter(self, name: str, help_: str, label: str, values: Iterable[str]) -> "Counter":
        """Return a counter whose series start at 0, so that they show their first increase."""
        from prometheus_client import Counter

        counter = Counter(PREFIX + name, help_, [label], registry=self._registry)
        for value in values:
            counter.labels(str(value))
        return counter

    def _histogram(self, name: str, help_: str, bounds: tuple[float, ...]) -> "Histogram":
        from prometheus_client import Histogram

        return Histogram(PREFIX + name, help_, buckets=bounds, registry=self._registry)


# --- Spans ---

FLUSH_S: Final = 2.0
"""How long the export of the last spans may take when the agent stops."""

MAX_ATTRIBUTE_CHARS: Final = 500

REQUEST_SPAN: Final = "codex_workspace.span"
"""Key in a request's call context: its span."""

INSTRUMENT: Final = "codex_workspace"


class SpanKind(Enum):
    """The kinds of spans that the agent starts, named as in OpenTelemetry."""

    INTERNAL = auto()
    SERVER = auto()


Attributes: TypeAlias = Mapping[str, str | int | float | bool]


class Tracer:
    """Starts spans, whose texts `scrub` redacts; without a `tracer`, spans that are not recorded."""

    def __init__(self, tracer: "trace.Tracer | None" = None, scrub: Callable[[str], str] = str) -> None:
        self._tracer = tracer
        self.scrub: Final = scrub

    def start_span(
        self, name: str, kind: SpanKind, attributes: Attributes, headers: Mapping[str, str] | None = None
    ) -> "Span":
        """Start a span in the trace that `headers` (lower-case names) propagate, or in a new trace."""
        if self._tracer is None:
            return Span(self, None, attributes)
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers or {}, Context())
        return self._start_in(self._tracer, parent, name, attributes, kind)

    def start_child(self, parent: "trace.Span | None", name: str, attributes: Attributes) -> "Span":
        """Start a child span."""
        if self._tracer is None or parent is None:
            return Span(self, None, attributes)
        from opentelemetry import trace
        from opentelemetry.context import Context

        context = trace.set_span_in_context(parent, Context())
        return self._start_in(self._tracer, context, name, attributes, SpanKind.INTERNAL)

    def _start_in(
        self, tracer: "trace.Tracer", parent: "Context", name: str, attributes: Attributes, kind: SpanKind
    ) -> "Span":
        from opentelemetry import trace

        return Span(self, tracer.start_span(name, parent, trace.SpanKind[kind.name]), attributes)


class Span:
    """A span with redacted and bounded texts. A context manager that ends the span.

    An exception in the block becomes the span's error. A span can end before its block; a second end is ignored.
    """

    def __init__(self, tracer: Tracer, span: "trace.Span | None", attributes: Attributes) -> None:
        self._tracer = tracer
        self._span = span
        self.set(attributes)

    @property
    def trace_id(self) -> str | None:
        """The trace ID, 32 hexadecimal digits; None if the span is not recorded."""
        recorded = self._recorded()
        return None if recorded is None else f"{recorded.get_span_context().trace_id:032x}"

    def start_child(self, name: str, attributes: Attributes) -> "Span":
        """Start a child span."""
        return self._tracer.start_child(self._span, name, attributes)

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        if (recorded := self._recorded()) is not None:
            for name, value in attributes.items():
                recorded.set_attribute(name, self._shown(value) if isinstance(value, str) else value)

    def end(self, error: str | None = None) -> None:
        """End the span, with an error if it failed."""
        if (recorded := self._recorded()) is not None:
            if error is not None:
                from opentelemetry.trace import StatusCode

                recorded.set_status(StatusCode.ERROR, self._shown(error))
            recorded.end()

    def _recorded(self) -> "trace.Span | None":
        return self._span if self._span is not None and self._span.is_recording() else None

    def __enter__(self) -> Self:
        """Return the span."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End the span."""
        self.end(type(error).__name__ if isinstance(error, Exception) else None)

    def _shown(self, text: str) -> str:
        return self._tracer.scrub(text)[:MAX_ATTRIBUTE_CHARS]


NO_TRACER: Final = Tracer()


@asynccontextmanager
async def open_tracing(service: str, headers: str | None, scrub: Callable[[str], str] = str) -> AsyncIterator[Tracer]:
    """Export spans over OTLP/HTTP as the `OTEL_…` variables say; leaving the block flushes them.

    A failing or hanging exporter blocks nothing: spans wait in a bounded queue and are dropped when it is full.

    Args:
        service: the service name if the variables set none.
        headers: the exporter's headers in the format of OTEL_EXPORTER_OTLP_HEADERS; None uses the variable.
        scrub: redacts secrets.
    """
    provider = _span_provider(service, headers)
    try:
        yield Tracer(provider.get_tracer(INSTRUMENT), scrub)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_shut_down, provider.shutdown)


def _span_provider(service: str, headers: str | None) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.util.re import parse_env_headers

    shown = None if headers is None else parse_env_headers(headers, liberal=True)
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    # Otherwise the exit would wait for a hanging exporter.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(headers=shown)))
    return provider


def _shut_down(shutdown: Callable[[], None]) -> None:
    # The shutdown can take as long as the exporter's timeout, so its end is not awaited.
    flushing = threading.Thread(target=shutdown, name="last spans", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        logger.warning("the last spans were not exported within %g s and are dropped", FLUSH_S)
