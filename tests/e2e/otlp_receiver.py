"""An OpenTelemetry collector that receives spans by OTLP over HTTP and stores them."""

import http.server
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.waiting import eventually

PATH: Final = "/v1/traces"


@dataclass(frozen=True)
class ExportedSpan:
    """A received span; IDs are hexadecimal, `parent` is empty for a root span."""

    name: str
    trace: str
    id: str
    parent: str
    is_server: bool
    error: str | None
    attributes: dict[str, object]
    service: str
    seconds: float


@dataclass
class Receiver:
    """A running receiver."""

    url: str = ""
    spans: list[ExportedSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def named(self, name: str) -> list[ExportedSpan]:
        return [span for span in self.spans if span.name == name]

    async def wait_for(self, name: str, number: int = 1) -> list[ExportedSpan]:
        """Wait for `number` spans of this name and return them."""
        await eventually(lambda: len(self.named(name)) >= number)
        return self.named(name)


@contextmanager
def otlp_receiver(*, unresponsive: bool = False) -> Iterator[Receiver]:
    """Receive spans while the block is open; an unresponsive receiver accepts connections but never answers."""
    receiver, released = Receiver(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if unresponsive:
                released.wait()
                return
            if self.path == PATH:
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                receiver.spans += _spans_in(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == PATH else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield receiver
        finally:
            released.set()
            server.shutdown()
            thread.join()


def _spans_in(request: ExportTraceServiceRequest) -> Iterator[ExportedSpan]:
    for resource in request.resource_spans:
        service = str(_values(resource.resource.attributes).get("service.name"))
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ExportedSpan(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    is_server=span.kind == Span.SpanKind.SPAN_KIND_SERVER,
                    error=span.status.message if span.status.code == Status.StatusCode.STATUS_CODE_ERROR else None,
                    attributes=_values(span.attributes),
                    service=service,
                    seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                )


def _values(attributes: Iterable[KeyValue]) -> dict[str, object]:
    found: dict[str, object] = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind) if kind else None
    return found
