"""Spans for whoever exports them: OpenTelemetry where an exporter is configured, nothing at all elsewhere.

The one module that knows OpenTelemetry, and it imports it only where it is used. Spans are handed from hand to hand, as
a task's work changes hands between requests; there is no current one. `docs/observability.md` names them.
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
"""What is left of the spans may take so long to leave when the agent stops."""

MAX_ATTRIBUTE_CHARS: Final = 500

REQUEST_SPAN: Final = "codex_workspace.span"
"""Where a request's call context holds its span."""

INSTRUMENT: Final = "codex_workspace"

Attributes: TypeAlias = Mapping[str, str | int | float | bool]


class SpanKind(Enum):
    """Whether a span answers somebody's request, or is a part of one that does."""

    SERVER = auto()
    INTERNAL = auto()


class Span:
    """Something that takes time, as long as its block is open; this one is nobody's, and tells nobody.

    An exception of the block is its error. It may end before the block: a second end is passed over.
    """

    @property
    def trace_id(self) -> str | None:
        """The id of the trace, 32 hexadecimal digits; None where nobody traces."""
        return None

    def start_child(self, name: str, attributes: Attributes) -> "Span":
        """Begin a part of it."""
        del name, attributes
        return self

    def set(self, attributes: Attributes) -> None:
        """Say more of it."""

    def end(self, error: str | None = None) -> None:
        """It is over now; with `error`, it went wrong."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End it."""
        self.end(type(error).__name__ if isinstance(error, Exception) else None)


class Tracer(Protocol):
    """What begins traces, and joins those of callers."""

    def start_span(
        self, name: str, kind: SpanKind, attributes: Attributes, headers: Mapping[str, str] | None = None
    ) -> Span:
        """Begin a span: a part of the trace that `headers` (names in lower case) tell of, else a trace of its own."""


class NoTracer:
    """Begins nothing."""

    def start_span(
        self, name: str, kind: SpanKind, attributes: Attributes, headers: Mapping[str, str] | None = None
    ) -> Span:
        """Return what costs nothing."""
        del name, kind, attributes, headers
        return NO_SPAN


NO_SPAN: Final = Span()
NO_TRACER: Final = NoTracer()


@asynccontextmanager
async def open_tracing(service: str, headers: str | None, scrub: Callable[[str], str] = str) -> AsyncIterator[Tracer]:
    """Send spans by OTLP over HTTP, as the `OTEL_…` variables of this process say; what is left is sent at the end.

    An exporter that fails, or stands still, holds up nothing: spans wait in memory, bounded, and are dropped then.

    Args:
        service: the service's name, where the variables give none.
        headers: what the exporter shows, as OTEL_EXPORTER_OTLP_HEADERS has it; None leaves it to the variables.
        scrub: takes secrets out of a text.
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
    # At exit it would wait for an exporter that stands still.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(headers=shown)))
    try:
        yield _Tracer(provider.get_tracer(INSTRUMENT), scrub)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_shut_down, provider.shutdown)


def _shut_down(shutdown: Callable[[], None]) -> None:
    # It takes as long as the exporter's own timeout, so nobody waits for its end.
    flushing = threading.Thread(target=shutdown, name="last spans", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        logger.warning("the last spans have not left within %g s and are given up", FLUSH_S)


class _Tracer:
    """Begins spans of OpenTelemetry."""

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
    """A span of OpenTelemetry."""

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
