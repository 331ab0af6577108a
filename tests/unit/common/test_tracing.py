"""Spans: joined with callers' traces, bounded, scrubbed, and free of charge where nobody wants them."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from codex_workspace.common.tracing import MAX_ATTRIBUTE_CHARS, NO_TRACER, SpanKind, Tracer, open_tracing
from tests.e2e.otlp_receiver import Receiver, otlp_receiver

CALLER = {"traceparent": "00-11111111111111111111111111111111-2222222222222222-01"}


async def exported(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Tracer], None], headers: str | None = None
) -> Receiver:
    """Return what has arrived of the spans that `work` makes."""
    with otlp_receiver() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with open_tracing("test-agent", headers, lambda text: text.replace("sk-1", "***")) as tracer:
            work(tracer)
    return collector


def test_nobody_pays_for_spans_that_nobody_wants() -> None:
    program = (
        "import sys; from codex_workspace.cli import serve; from codex_workspace.common import tracing;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
    span = NO_TRACER.start_span("message", SpanKind.SERVER, {"a": "b"}, CALLER)
    assert span.start_child("turn", {}) is span
    assert span.trace_id is None


async def test_a_span_is_part_of_its_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def work(tracer: Tracer) -> None:
        with tracer.start_span("asked", SpanKind.SERVER, {"a": 1}, CALLER) as span, span.start_child("part", {}):
            seen.append(span.trace_id)

    spans = (await exported(monkeypatch, work)).spans
    part, asked = spans
    assert (asked.name, asked.trace, asked.parent, asked.is_server) == ("asked", "1" * 32, "2" * 16, True)
    assert (part.name, part.trace, part.parent, part.is_server) == ("part", "1" * 32, asked.id, False)
    assert seen == ["1" * 32]
    assert asked.service == "test-agent"


@pytest.mark.parametrize(
    "told", ["", "00-0-0-01", "00-" + "0" * 32 + "-" + "2" * 16 + "-01", "ff" * 200, "00-" + "z" * 32, "\ud800"]
)
async def test_a_caller_that_tells_nonsense_gets_a_trace_of_its_own(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    def work(tracer: Tracer) -> None:
        tracer.start_span("asked", SpanKind.SERVER, {}, {"traceparent": told}).end()

    (asked,) = (await exported(monkeypatch, work)).spans
    assert asked.parent == ""
    assert len(asked.trace) == 32


async def test_attributes_are_scrubbed_before_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(tracer: Tracer) -> None:
        text = "x" * (MAX_ATTRIBUTE_CHARS - 2) + "sk-1" + "y" * 100
        span = tracer.start_span("asked", SpanKind.INTERNAL, {"text": text, "number": 3})
        span.end("failed with sk-1")
        span.end()
        span.set({"late": "passed over"})

    (asked,) = (await exported(monkeypatch, work)).spans
    assert asked.attributes == {"text": "x" * (MAX_ATTRIBUTE_CHARS - 2) + "**", "number": 3}
    assert asked.error == "failed with ***"


async def test_an_exception_is_its_spans_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(tracer: Tracer) -> None:
        with pytest.raises(KeyError), tracer.start_span("asked", SpanKind.INTERNAL, {}):
            raise KeyError("x")

    (asked,) = (await exported(monkeypatch, work)).spans
    assert asked.error == "KeyError"


async def test_an_operators_own_name_and_headers_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine")
    collector = await exported(
        monkeypatch,
        lambda tracer: tracer.start_span("asked", SpanKind.INTERNAL, {}).end(),
        "authorization=Bearer%20k,x-tenant=7",
    )
    assert [span.service for span in collector.spans] == ["mine"]
    (shown,) = collector.headers
    assert (shown["authorization"], shown["x-tenant"]) == ("Bearer k", "7")
