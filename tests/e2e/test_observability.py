"""What operators can observe of a running agent: metrics, traces, codex's transcript, and IDs in the log."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import anyio
import grpc.aio
import httpx
import pytest
from a2a.types import Message, Part, Role, SendMessageRequest, TaskState, a2a_pb2_grpc
from google.protobuf.json_format import MessageToDict
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.test_docs import names_in, table
from tests.e2e.agent_process import REPOSITORY, SECRET, AgentProcess, AgentSetup, running_agent
from tests.e2e.client import Peer, peer, request, script
from tests.e2e.otlp_receiver import ExportedSpan, otlp_receiver
from tests.e2e.turn_progress import wait_for_text
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

DOCUMENT: Final = REPOSITORY / "docs" / "observability.md"

OPERATOR: Final = "operator-0123456789"
PARTNER: Final = "partner-0123456789"
SCRAPER: Final = "scraper-0123456789"

CALLER: Final = "00-11111111111111111111111111111111-2222222222222222-01"

Numbers = Mapping[tuple[str, str], float]
"""The values of a scrape by metric name and label value."""


@asynccontextmanager
async def observed_agent(
    setup: AgentSetup, **environment: str
) -> AsyncIterator[tuple[AgentProcess, Peer, httpx.AsyncClient]]:
    """Run an agent with all tokens; yield it, a peer with the operator's token, and an HTTP client without a token."""
    principals = {"principals": [{"name": "partner", "token_env": "PARTNER_TOKEN"}]}
    tokens = {"A2A_TOKEN": OPERATOR, "PARTNER_TOKEN": PARTNER, "METRICS_TOKEN": SCRAPER}
    setup = replace(setup, config=principals, environment={**tokens, **environment})
    async with (
        running_agent(setup) as agent,
        peer(agent.url, OPERATOR) as client,
        httpx.AsyncClient(base_url=agent.url) as http,
    ):
        yield agent, client, http


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def scrape(http: httpx.AsyncClient) -> str:
    answer = await http.get("/metrics", headers=bearer(SCRAPER))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return answer.text


def metrics_of(scraped: str) -> Numbers:
    samples = [sample for family in text_string_to_metric_families(scraped) for sample in family.samples]
    return {(each.name, next(iter(each.labels.values()), "")): each.value for each in samples}


# --- Metrics ---


def documented_metrics() -> dict[str, tuple[str, frozenset[str]]]:
    """Return the type and the label values of each documented metric."""
    rows = table(DOCUMENT, "metrics")
    return {names_in(name)[0]: (kind, frozenset(names_in(labels)[1:])) for name, kind, labels, _ in rows}


def exported_metrics(scraped: str) -> dict[str, tuple[str, frozenset[str]]]:
    shown: dict[str, tuple[str, frozenset[str]]] = {}
    for family in text_string_to_metric_families(scraped):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        values = {value for sample in family.samples for label, value in sample.labels.items() if label != "le"}
        shown[name] = family.type, frozenset(values)
    return shown


async def test_every_documented_metric_exists_and_counts(setup: AgentSetup) -> None:
    usage = {"input_tokens": 100, "cached_tokens": 40, "output_tokens": 30, "reasoning_tokens": 10}
    async with observed_agent(setup) as (agent, client, http):
        await client.ask(script({"say": "Well.", "usage": usage}), "one")
        await client.ask(script({"fail": 401}), "two")
        await client.ask("", "one")
        started = await client.begin(script({"say": "At work.", "stall": True}), "three")
        await client.begin("next", "three")
        during = await wait_for_metrics(http, turns_running=1, messages_waiting=1)
        # An answered message is acknowledged with the next write of its task.
        assert sum(during["codex_workspace_deliveries", state] for state in ("answered", "acknowledged")) == 3
        await wait_for_text(client, started, "At work.")
        await client.cancel(started.task_id)
        killed = await client.begin(script({"say": "Before.", "stall": True, "times": 1}, {"say": "After."}), "four")
        await wait_for_text(client, killed, "Before.")
        agent.codex().kill()
        await client.finished(killed.task_id)
        scraped = await scrape(http)
    assert exported_metrics(scraped) == documented_metrics()
    numbers = metrics_of(scraped)
    turns = {
        outcome: numbers["codex_workspace_turns_total", outcome] for outcome in documented_label_values("turns_total")
    }
    assert turns == {"completed": 3, "failed": 1, "interrupted": 1, "cut_off": 1, "not_begun": 0}
    tasks = {state: numbers["codex_workspace_tasks_total", state] for state in documented_label_values("tasks_total")}
    assert tasks == {"completed": 3, "failed": 1, "canceled": 1, "rejected": 1}
    assert numbers["codex_workspace_tokens_total", "cached_input"] >= 40
    assert numbers["codex_workspace_tokens_total", "reasoning_output"] == 10
    assert numbers["codex_workspace_turn_seconds_count", ""] == 6
    assert numbers["codex_workspace_turn_first_text_seconds_count", ""] == 5
    assert numbers["codex_workspace_message_wait_seconds_count", ""] == 5
    assert numbers["codex_workspace_codex_restarts_total", ""] == 1
    assert numbers["codex_workspace_codex_deaths_total", ""] == 1
    assert numbers["codex_workspace_codex_up", ""] == 1
    assert numbers["codex_workspace_codex_resident_memory_bytes", ""] > 10 << 20
    assert numbers["process_resident_memory_bytes", ""] > 10 << 20


def documented_label_values(name: str) -> frozenset[str]:
    return documented_metrics()[f"codex_workspace_{name}"][1]


async def wait_for_metrics(http: httpx.AsyncClient, **expected: float) -> Numbers:
    """Scrape until the metrics have these values."""

    async def matching() -> Numbers | None:
        numbers = metrics_of(await scrape(http))
        is_match = all(numbers[f"codex_workspace_{name}", ""] == value for name, value in expected.items())
        return numbers if is_match else None

    return await eventually(matching)


async def test_operator_endpoints_require_the_operator_token(setup: AgentSetup) -> None:
    async with observed_agent(
        setup, PLATFORM_URL="http://127.0.0.1:9", WORKSPACE_ID="w", MOLECULE_WORKSPACE_TOKEN="p-0123"
    ) as (
        _,
        _,
        http,
    ):
        answered = {
            (path, token): (await http.get(path, headers=bearer(token))).status_code
            for path in ("/metrics", "/transcript", "/tasks?A2A-Version=1.0")
            for token in (OPERATOR, PARTNER, SCRAPER, "p-0123", "nobody's")
        }
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/transcript")).status_code == 401
        refused = await http.get("/transcript", headers=bearer(PARTNER))
        assert refused.json()["error"]["message"] == "this endpoint needs the operator's token"
    let_in = {(path, token) for (path, token), status in answered.items() if status not in (401, 403)}
    assert let_in == {
        ("/metrics", OPERATOR),
        ("/metrics", SCRAPER),
        ("/transcript", OPERATOR),
        ("/transcript", "p-0123"),
        ("/tasks?A2A-Version=1.0", OPERATOR),
        ("/tasks?A2A-Version=1.0", PARTNER),
    }


async def test_an_agent_without_tokens_serves_metrics_but_no_log(agent: AgentProcess) -> None:
    async with httpx.AsyncClient(base_url=agent.url) as http:
        assert (await http.get("/metrics")).status_code == 200
        refused = await http.get("/transcript")
        assert refused.status_code == 403
        assert (
            refused.json()["error"]["message"] == "this endpoint needs a token, and the agent has none; set A2A_TOKEN"
        )


# --- Traces ---


async def test_a_trace_leads_from_the_callers_span_to_codexs_command(setup: AgentSetup) -> None:
    patch = "*** Begin Patch\n*** Add File: new.txt\n+hello\n*** End Patch"
    with otlp_receiver() as collector:
        headers = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20collector-0123"}
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100", **headers}
        async with observed_agent(setup, A2A_GRPC_PORT="0", LOG_FORMAT="json", **environment) as (agent, _, http):
            sent = request(script({"run": f"echo {SECRET}; exit 3"}, {"patch": patch}, {"fail": 401}), "ctx")
            body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": MessageToDict(sent)}
            headers = {**bearer(OPERATOR), "A2A-Version": "1.0", "traceparent": CALLER}
            answer = await http.post("/", json=body, headers=headers, timeout=30)
            assert answer.json()["result"]["task"]["status"]["state"] == "TASK_STATE_FAILED"
            await send_by_grpc(agent, "hello")
            await collector.wait_for("message", 2)
        (http_span, grpc_span) = await collector.wait_for("SendMessage", 2)
    task = answer.json()["result"]["task"]["id"]
    for asked in (http_span, grpc_span):
        assert (asked.trace, asked.parent, asked.is_server) == (CALLER[3:35], CALLER[36:52], True)
        assert asked.attributes == {"rpc.system": "a2a", "rpc.method": "SendMessage", "a2a.principal": "operator"}
    message = children_of(collector.spans, http_span)
    assert message["message"].attributes == {"a2a.task.id": task, "a2a.context.id": "ctx", "a2a.task.state": "failed"}
    of_message = children_of(collector.spans, message["message"])
    assert set(of_message) == {"wait", "turn"}
    turn = of_message["turn"]
    assert (turn.error, turn.attributes["codex.turn.outcome"]) == ("failed", "failed")
    items = children_of(collector.spans, turn)
    assert set(items) == {"command", "file change"}
    assert (items["command"].attributes["process.exit.code"], items["command"].error) == (3, "failed")
    assert "echo ***" in str(items["command"].attributes["codex.command"])
    assert (items["file change"].attributes["codex.files"], items["file change"].error) == (1, None)
    assert {span.service for span in collector.spans} == {"test-agent"}
    assert {each["authorization"] for each in collector.headers} == {"Bearer collector-0123"}
    ids = {
        "task": task,
        "context": "ctx",
        "trace": turn.trace,
        "thread": turn.attributes["gen_ai.conversation.id"],
        "turn": turn.attributes["codex.turn.id"],
    }
    (failed,) = [line for line in log_entries(setup) if "turn failed" in line["message"]]
    assert ids.items() <= failed.items()
    assert set(failed) <= {names_in(row[0])[0] for row in table(DOCUMENT, "log")}
    assert documented_spans() >= {span.name for span in collector.spans}


def children_of(spans: list[ExportedSpan], parent: ExportedSpan) -> dict[str, ExportedSpan]:
    """Return a span's children by name; the names are unique."""
    parts = [span for span in spans if (span.trace, span.parent) == (parent.trace, parent.id)]
    found = {span.name: span for span in parts}
    assert len(found) == len(parts)
    return found


def documented_spans() -> set[str]:
    return {name for row in table(DOCUMENT, "spans") for name in names_in(row[0])}


def log_entries(setup: AgentSetup) -> list[dict[str, str]]:
    return [json.loads(line) for line in setup.log.read_text().splitlines() if line.startswith("{")]


async def send_by_grpc(agent: AgentProcess, text: str) -> None:
    (address,) = [
        line.split("gRPC at ")[1].split(",")[0] for line in agent.log.read_text().splitlines() if "gRPC" in line
    ]
    metadata = (("authorization", f"Bearer {OPERATOR}"), ("a2a-version", "1.0"), ("traceparent", CALLER))
    wait_for_text = Message(role=Role.ROLE_USER, message_id="by-grpc", parts=[Part(text=text)])
    async with grpc.aio.insecure_channel(address) as channel:
        stub = a2a_pb2_grpc.A2AServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.SendMessage(SendMessageRequest(message=wait_for_text), metadata=metadata)
    assert answer.task.status.state == TaskState.TASK_STATE_COMPLETED


async def test_a_stalled_collector_blocks_nothing(setup: AgentSetup) -> None:
    with otlp_receiver(unresponsive=True) as collector:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "10"}
        async with observed_agent(setup, **environment) as (agent, client, _):
            assert (await client.ask("hello")).answer == "You said: hello"
            before = anyio.current_time()
            assert await agent.stop() == 0
            assert anyio.current_time() - before < 5
    assert "the last spans were not exported within 2 s" in setup.log.read_text()


# --- Transcript ---


async def test_the_event_log_continues_from_its_cursor_without_secrets(setup: AgentSetup) -> None:
    async with observed_agent(setup) as (_, client, http):

        async def look(**query: str | int) -> dict[str, object]:
            answer = await http.get("/transcript", params=query, headers=bearer(OPERATOR))
            assert answer.status_code == 200, answer.text
            page: dict[str, object] = answer.json()
            assert set(page) == {names_in(row[0])[0] for row in table(DOCUMENT, "transcript")}
            return page

        nothing = await look()
        assert (nothing["lines"], nothing["cursor"], nothing["more"], nothing["source"]) == ([], 0, False, None)
        await client.ask(f"the key is {SECRET}", "one")
        first = await look()
        assert "the key is ***" in json.dumps(first["lines"])
        assert SECRET not in json.dumps(first)
        assert SECRET in await anyio.Path(str(first["source"])).read_text()
        await client.ask(script({"run": "echo second"}, {"say": "ready"}), "one")
        pages, cursor = [], first["cursor"]
        while True:
            page = await look(since=str(cursor), limit=2)
            assert isinstance(page["lines"], list)
            pages += page["lines"]
            cursor = page["cursor"]
            if not page["more"]:
                break
        assert "echo second" in json.dumps(pages)
        assert "the key is" not in json.dumps(pages)
        assert pages == (await look(since=str(first["cursor"])))["lines"]
        await client.ask("somewhere else", "two")
        other, named = await look(), await look(context="one")
        assert "somewhere else" in json.dumps(other["lines"])
        assert (named["source"], named["cursor"]) == (first["source"], cursor)
        for bad in ("since=-1", "since=x", "limit=0", "limit=1.5", "since=9999999999999"):
            assert (await http.get(f"/transcript?{bad}", headers=bearer(OPERATOR))).status_code == 400
