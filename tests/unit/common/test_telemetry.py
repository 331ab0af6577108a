"""Logs, metrics and spans. Covers `tasks.telemetry` and `server.views`."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
from a2a.types import Message, SendMessageRequest
from opentelemetry.trace import INVALID_SPAN
from prometheus_client.parser import text_string_to_metric_families

from codex_workspace.common.files import WatchedPaths
from codex_workspace.common.telemetry import (
    MAX_ATTRIBUTE_CHARS,
    NO_TRACER,
    Attributes,
    Metrics,
    Span,
    SpanKind,
    TaskOutcome,
    TokenTotals,
    Tracer,
    TurnOutcome,
    open_tracing,
)
from codex_workspace.protocol.codex_events import TokenUsage, TurnCompleted
from codex_workspace.runtimes.events import BASH, COMMAND, SEARCH, WEB_SEARCH, AgentMessage, Text, ToolResult, ToolUse
from codex_workspace.server.views import COUNTED_S, GaugeCollector
from codex_workspace.storage.database import Database
from codex_workspace.storage.deliveries import Deliveries, DeliveryKey, message_digest
from codex_workspace.storage.sqlite import SqliteEngine
from codex_workspace.storage.store import Store, open_store
from codex_workspace.tasks.telemetry import Telemetry
from tests.e2e.otlp_receiver import Receiver, otlp_receiver

# --- Logs ---


SECRETS = ["sk-1", "sk-1-longer", 'with "quotes" and \\', "ümlaut", "", "of two\nlines"]

PROGRAM = """
import logging, sys
from codex_workspace.common.telemetry import set_up_logging
from codex_workspace.common.redact import Redactor

secrets = {secrets!r}
set_up_logging(as_json={as_json}, level={level!r}, scrub=Redactor(secrets))
logger = logging.getLogger("ours")
logger.debug("not at this level")
logger.info("secret %s and %s", secrets[0], secrets[1])
logger.warning('quoted: %s; %r', secrets[2], secrets[3])
try:
    raise ValueError("cannot use " + secrets[2] + " or " + secrets[1])
except ValueError:
    logger.exception("failed with two\\nlines")
logger.warning("a peer says: hello\\n12:00:00 ERROR   ours: forged, and %s", secrets[5])
for chatty in ("httpx", "a2a.server", "uvicorn.error"):
    logging.getLogger(chatty).info("chatter")
    logging.getLogger(chatty).warning("%s warns", chatty)
"""


def log_of(*, as_json: bool, level: str = "INFO") -> str:
    """Return what a process writes on stderr."""
    program = PROGRAM.format(secrets=SECRETS, as_json=as_json, level=level)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == ""
    return done.stderr


def assert_clean(log: str) -> None:
    for secret in SECRETS:
        if secret:
            assert secret not in log
            assert json.dumps(secret, ensure_ascii=False)[1:-1] not in log
            assert json.dumps(secret)[1:-1] not in log


def test_the_log_for_people_shows_no_secret() -> None:
    log = log_of(as_json=False)
    assert_clean(log)
    assert "INFO    ours: secret *** and ***" in log
    assert "ValueError: cannot use *** or ***" in log
    assert "not at this level" not in log


def test_a_message_of_several_lines_is_one_record_for_people_too() -> None:
    (line,) = [line for line in log_of(as_json=False).splitlines() if "forged" in line]
    assert line.endswith(r"WARNING ours: a peer says: hello\n12:00:00 ERROR   ours: forged, and ***")


def test_the_log_for_machines_is_one_object_a_line_and_shows_no_secret() -> None:
    log = log_of(as_json=True)
    assert_clean(log)
    lines = [json.loads(line) for line in log.splitlines()]
    assert lines[0]["message"] == "secret *** and ***"
    assert (lines[0]["level"], lines[0]["logger"]) == ("info", "ours")
    assert lines[0]["time"].endswith("Z")
    assert lines[1]["message"] == "quoted: ***; '***'"
    assert lines[2]["message"] == "failed with two\nlines"
    assert lines[2]["traceback"].startswith("Traceback")
    assert "ValueError: cannot use *** or ***" in lines[2]["traceback"]


@pytest.mark.parametrize(("level", "warns"), [("DEBUG", True), ("INFO", True), ("ERROR", False)])
def test_warnings_of_libraries_are_logged(level: str, warns: bool) -> None:
    log = log_of(as_json=False, level=level)
    assert "chatter" not in log
    assert ("a2a.server warns" in log) is warns


OF_WORK = """
import anyio, logging
from codex_workspace.common.telemetry import log_context, set_up_logging
from codex_workspace.common.redact import Redactor

set_up_logging(as_json={as_json}, level="INFO", scrub=Redactor(["sk-secret"]))
logger = logging.getLogger("deep.below")

async def deep(number):
    with log_context({{"thread": f"thread-{{number}}"}}):
        await anyio.to_thread.run_sync(logger.info, "from a worker thread")

async def work(number):
    with log_context({{"task": f"task-{{number}}", "context": {context!r}}}):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deep, number)
        logger.info("back")

async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work, 1)
        tasks.start_soon(work, 2)
    logger.info("outside all tasks")

anyio.run(main)
"""


def log_of_work(*, as_json: bool, context: str = "ctx") -> str:
    """Return what two pieces of work side by side write on stderr."""
    program = OF_WORK.format(as_json=as_json, context=context)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=20)
    return done.stderr


def test_a_log_line_names_its_task_at_any_depth() -> None:
    lines = [json.loads(line) for line in log_of_work(as_json=True).splitlines()]
    for number in (1, 2):
        own = [line for line in lines if line.get("task") == f"task-{number}"]
        assert [(line["message"], line.get("thread"), line["context"]) for line in own] == [
            ("from a worker thread", f"thread-{number}", "ctx"),
            ("back", None, "ctx"),
        ]
    assert not {"task", "context", "thread"} & set(lines[-1])


def test_people_read_the_ids_behind_the_message() -> None:
    log = log_of_work(as_json=False)
    assert "INFO    deep.below: from a worker thread task=task-1 context=ctx thread=thread-1\n" in log
    assert log.endswith("deep.below: outside all tasks\n")


def test_a_clients_id_cannot_forge_a_log_line_or_contain_a_secret() -> None:
    log = log_of_work(as_json=False, context="a\n12:00:00 ERROR sk-secret")
    assert len(log.splitlines()) == 5
    assert 'context="a\\n12:00:00 ERROR ***"' in log
    assert "sk-secret" not in log_of_work(as_json=True, context="a sk-secret")


# --- Metrics ---


def numbers(
    metrics: Metrics, values: Mapping[str, float] = MappingProxyType({}), deliveries: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Return the values of a scrape, by name and label."""
    scraped = metrics.scrape(values, deliveries).decode()
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


def test_counters_start_at_zero() -> None:
    shown = numbers(Metrics())
    for outcome in TurnOutcome:
        assert shown[f"turns_total {outcome}"] == 0
    for state in TaskOutcome:
        assert shown[f"tasks_total {state}"] == 0
    assert shown["tokens_total cached_input"] == 0
    assert not [name for name in shown if "_created" in name]


def test_a_scrape_shows_the_given_values() -> None:
    shown = numbers(Metrics())
    assert not [name for name in shown if name.startswith(("codex_", "deliveries", "push_"))]
    values = {"codex_up": 1, "push_notifications_waiting": 4, "codex_restarts": 0}
    shown = numbers(Metrics(), values, {"started": 2})
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
            turn.see(ToolUse("c", BASH, COMMAND, {"command": "ls"}))
            now[0] += 1
            turn.see(Text("m", "He"))
            turn.see(Text("m", "llo"))
            turn.see(AgentMessage("m", "Hello"))
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
def test_a_turn_is_counted_once_however_it_ends(turn: Ended | None, outcome: str) -> None:
    telemetry = Telemetry(clock=lambda: 0.0)
    with suppress(ConnectionError), telemetry.message("task", "context", {}) as message, message.turn() as watch:
        if turn is not None:
            watch.began(turn)
        raise ConnectionError
    shown = numbers(telemetry.metrics)
    assert {name: value for name, value in shown.items() if name.startswith("turns_total") and value} == {
        f"turns_total {outcome}": 1
    }


def test_leaving_the_queue_records_no_waiting_time() -> None:
    telemetry = Telemetry(clock=lambda: 0.0)
    with pytest.raises(ConnectionError), telemetry.message("task", "c", {}) as message, message.waiting():
        raise ConnectionError
    assert numbers(telemetry.metrics)["message_wait_seconds_count"] == 0


class RecordingSpan(Span):
    """A span that records its own start, attributes and end, and those of its children."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__(NO_TRACER, INVALID_SPAN, {})
        self._name, self._notes, self._is_over = name, notes, False

    def start_child(self, name: str, attributes: Attributes) -> Span:
        self._notes.append(f"{name} in {self._name}")
        return RecordingSpan(name, self._notes)

    def end(self, error: str | None = None) -> None:
        if not self._is_over:
            self._is_over = True
            self._notes.append(f"{self._name}: {error or 'ended'}")


class Notes(Tracer):
    """A tracer that writes down."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def start_span(self, name: str, kind: SpanKind, attributes: Attributes, headers: object = None) -> Span:
        return RecordingSpan(name, self.notes)


def test_item_spans_belong_to_their_turn_and_end_with_it() -> None:
    notes: list[str] = []
    telemetry = Telemetry(tracer=Notes(notes), clock=lambda: 0.0)
    with telemetry.message("task", "c", {}) as message, message.turn() as turn:
        turn.began(Ended(TurnCompleted("completed", None, None)))
        turn.see(ToolUse("1", BASH, COMMAND, {"command": "ls"}))
        turn.see(ToolUse("2", "find", "find", {}, "srv"))
        turn.see(ToolResult("1", "", is_error=False, exit_code=0))
        turn.see(ToolResult("2", "no", is_error=True))
        turn.see(ToolUse("3", WEB_SEARCH, SEARCH, {"query": "what"}))
        turn.see(ToolResult("3", "", is_error=False))
        turn.see(ToolUse("4", BASH, COMMAND, {"command": "sleep 9"}))
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
    async with open_store(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        yield store


async def accepted(deliveries: Deliveries, message_id: str, context_id: str = "ctx") -> DeliveryKey:
    key = DeliveryKey("operator", message_id)
    request = SendMessageRequest(message=Message(message_id=message_id))
    assert await deliveries.accept(key, request, message_digest(request), f"task-{message_id}", context_id)
    return key


async def test_messages_are_counted_by_state(store: Store) -> None:
    reader = GaugeCollector(store.deliveries, lambda: 7)
    values, counted = await reader.read()
    assert counted == {"accepted": 0, "started": 0, "answered": 0, "acknowledged": 0}
    assert values == {"messages_waiting": 0, "turns_running": 0, "questions_open": 0, "streams_open": 7}
    await accepted(store.deliveries, "1")
    await store.deliveries.mark_started(await accepted(store.deliveries, "2"), "thread", "turn")
    assert (await reader.read())[1] == counted, f"the database is asked once in {COUNTED_S:g} s"
    _values, counted = await GaugeCollector(store.deliveries, lambda: 7).read()
    assert counted == {"accepted": 1, "started": 1, "answered": 0, "acknowledged": 0}


async def test_the_last_active_thread_is_known(store: Store) -> None:
    deliveries = store.deliveries
    assert await deliveries.newest_thread() is None
    first, second = await accepted(deliveries, "1", "one"), await accepted(deliveries, "2", "two")
    await deliveries.mark_started(second, "thread-2", "turn")
    await deliveries.mark_started(first, "thread-1", "turn")
    assert await deliveries.newest_thread() == "thread-1"
    assert await deliveries.newest_thread("two") == "thread-2"
    assert await deliveries.newest_thread("three") is None


async def test_a_failing_database_leaves_the_other_metrics(tmp_path: Path) -> None:
    database = Database(SqliteEngine(tmp_path / "without_tables.sqlite3"), WatchedPaths({}))
    try:
        values, counted = await GaugeCollector(Deliveries(database), lambda: 7).read()
    finally:
        await database.close()
    assert (counted, values["streams_open"]) == (None, 7)


# --- Spans ---


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


def test_disabled_tracing_creates_no_spans() -> None:
    program = (
        "import sys; from codex_workspace.cli import server; from codex_workspace.common import telemetry;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
    span = NO_TRACER.start_span("message", SpanKind.SERVER, {"a": "b"}, CALLER)
    assert span.start_child("turn", {}).trace_id is None


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
async def test_an_invalid_traceparent_starts_a_new_trace(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
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


async def test_the_operators_service_name_and_headers_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine")
    collector = await exported(
        monkeypatch,
        lambda tracer: tracer.start_span("asked", SpanKind.INTERNAL, {}).end(),
        "authorization=Bearer%20k,x-tenant=7",
    )
    assert [span.service for span in collector.spans] == ["mine"]
    (shown,) = collector.headers
    assert (shown["authorization"], shown["x-tenant"]) == ("Bearer k", "7")
