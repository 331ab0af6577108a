"""Tracing with OpenTelemetry if an exporter is configured, and no-op spans otherwise.

The only module that imports OpenTelemetry, and only if tracing is on. Spans are passed explicitly because a task's work
moves between requests. `docs/observability.md` lists them.
"""

import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeAlias

import anyio

if TYPE_CHECKING:
    from opentelemetry import trace

logger = logging.getLogger(__name__)

FLUSH_S: Final = 2.0
"""How long the export of the last spans may take when the agent stops."""

MAX_ATTRIBUTE_CHARS: Final = 500

REQUEST_SPAN: Final = "codex_workspace.span"
"""Key in a request's call context: its span."""

INSTRUMENT: Final = "codex_workspace"

Attributes: TypeAlias = Mapping[str, str | int | float | bool]


class SpanKind(Enum):
    """Whether a span is a request to this agent, or internal work."""

    SERVER = auto()
    INTERNAL = auto()


class Span:
    """A no-op span; the base class of the exported ones. A context manager that ends the span.

    An exception in the block becomes the span's error. A span can end before its block; a second end is ignored.
    """

    @property
    def trace_id(self) -> str | None:
        """The trace ID, 32 hexadecimal digits; None if tracing is off."""
        return None

    def start_child(self, name: str, attributes: Attributes) -> "Span":
        """Start a child span."""
        del name, attributes
        return self

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    def end(self, error: str | None = None) -> None:
        """End the span, with an error if it failed."""

    def __enter__(self) -> Self:
        """Return the span."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End the span."""
        self.end(type(error).__name__ if isinstance(error, Exception) else None)


class Tracer(Protocol):
    """Starts spans."""

    def start_span(
        self, name: str, kind: SpanKind, attributes: Attributes, headers: Mapping[str, str] | None = None
    ) -> Span:
        """Start a span in the trace that `headers` (lower-case names) propagate, or in a new trace."""


class NoTracer:
    """Starts no-op spans."""

    def start_span(
        self, name: str, kind: SpanKind, attributes: Attributes, headers: Mapping[str, str] | None = None
    ) -> Span:
        """Return the no-op span."""
        del name, kind, attributes, headers
        return NO_SPAN


NO_SPAN: Final = Span()
NO_TRACER: Final = NoTracer()


@asynccontextmanager
async def open_tracing(service: str, headers: str | None, scrub: Callable[[str], str] = str) -> AsyncIterator[Tracer]:
    """Export spans over OTLP/HTTP as the `OTEL_…` variables say; leaving the block flushes them.

    A failing or hanging exporter blocks nothing: spans wait in a bounded queue and are dropped when it is full.

    Args:
        service: the service name if the variables set none.
        headers: the exporter's headers in the format of OTEL_EXPORTER_OTLP_HEADERS; None uses the variable.
        scrub: redacts secrets.
    """
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
    try:
        yield _Tracer(provider.get_tracer(INSTRUMENT), scrub)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_shut_down, provider.shutdown)


def _shut_down(shutdown: Callable[[], None]) -> None:
    # The shutdown can take as long as the exporter's timeout, so its end is not awaited.
    flushing = threading.Thread(target=shutdown, name="last spans", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        logger.warning("the last spans were not exported within %g s and are dropped", FLUSH_S)


class _Tracer:
    """Starts OpenTelemetry spans."""

    def __init__(self, tracer: "trace.Tracer", scrub: Callable[[str], str]) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._scrub = scrub
        self._join = TraceContextTextMapPropagator().extract
        self._nothing = context.Context()
        self._kinds = {SpanKind.SERVER: trace.SpanKind.SERVER, SpanKind.INTERNAL: trace.SpanKind.INTERNAL}

    def start_span(
        self, name: str, kind: SpanKind, attributes: Attributes, headers: Mapping[str, str] | None = None
    ) -> Span:
        parent = self._join(headers or {}, self._nothing)
        return _Span(self._tracer, self._scrub, self._tracer.start_span(name, parent, self._kinds[kind]), attributes)


class _Span(Span):
    """An OpenTelemetry span."""

    def __init__(
        self, tracer: "trace.Tracer", scrub: Callable[[str], str], span: "trace.Span", attributes: Attributes
    ) -> None:
        self._tracer = tracer
        self._scrub = scrub
        self._span = span
        self.set(attributes)

    @property
    def trace_id(self) -> str | None:
        return f"{self._span.get_span_context().trace_id:032x}"

    def start_child(self, name: str, attributes: Attributes) -> Span:
        from opentelemetry import context, trace

        parent = trace.set_span_in_context(self._span, context.Context())
        return _Span(self._tracer, self._scrub, self._tracer.start_span(name, parent), attributes)

    def set(self, attributes: Attributes) -> None:
        for name, value in attributes.items():
            shown = self._scrub(value)[:MAX_ATTRIBUTE_CHARS] if isinstance(value, str) else value
            self._span.set_attribute(name, shown)

    def end(self, error: str | None = None) -> None:
        from opentelemetry.trace import StatusCode

        if not self._span.is_recording():
            return
        if error is not None:
            self._span.set_status(StatusCode.ERROR, self._scrub(error)[:MAX_ATTRIBUTE_CHARS])
        self._span.end()
