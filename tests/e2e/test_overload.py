"""More clients than slots: accepted messages are answered, the others are rejected at once, memory stays level."""

import json
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import anyio
import httpx
import pytest

from tests.e2e.agent_process import REPOSITORY, AgentProcess, AgentSetup, running_agent
from tests.e2e.client import script
from tests.e2e.load_generator import METHODS, CallResult, ask, call, unlimited_client
from tests.support.ports import free_port
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow

CLIENTS = 200
EVERY_S = 0.02
LIMITS = {"max_waiting_per_context": 5, "max_waiting": 30, "max_running_turns": 8}

REFUSED_WITHIN_S = 0.1
GROWTH_BYTES = 40_000_000
"""The agent's memory limit for 200 clients; a message and its task take a few kilobytes, 38 wait or run at a time."""

SLOW_SCRIPT = script({"say": "one two three four", "delay_ms": 100})


BUSY_MESSAGE = "The agent is busy: the queue of this context is full (1 messages). Try again in 10 s."
BUSY_ERROR_0_3 = {"code": -32000, "message": BUSY_MESSAGE, "data": {"retryAfterSeconds": 10}}
BUSY_ERROR_1_0 = {
    "code": -32000,
    "message": BUSY_MESSAGE,
    "data": [
        {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "BUSY",
            "domain": "codex-workspace",
            "metadata": {"retryAfterSeconds": "10"},
        }
    ],
}


async def busy_error(http: httpx.AsyncClient, method: str) -> object:
    """Send a message that exceeds the limit, and return the JSON-RPC error."""
    result = await ask(http, call(method, "no place", "ctx"))
    assert (result.status, result.retry_after) == (429, "10")
    return json.loads(result.body)["error"]


@pytest.fixture
async def agent(setup: AgentSetup) -> AsyncIterator[AgentProcess]:
    async with running_agent(replace(setup, limits=LIMITS)) as agent:
        yield agent


async def run_load(agent: AgentProcess) -> list[CallResult]:
    """Let 200 clients send messages, from a separate process."""
    command = [
        sys.executable,
        "-m",
        "tests.e2e.load_generator",
        agent.url,
        str(agent.process.pid),
        str(CLIENTS),
        str(EVERY_S),
        SLOW_SCRIPT,
    ]
    with anyio.fail_after(HANG_S):
        ended = await anyio.run_process(command, cwd=REPOSITORY, stderr=None)
    return [CallResult(**json.loads(line)) for line in ended.stdout.splitlines()]


@pytest.mark.alone
async def test_accepted_messages_are_answered_and_the_rest_is_rejected_at_once(agent: AgentProcess) -> None:
    async with unlimited_client(agent.url) as http:
        assert (await ask(http, call("SendMessage", "hello", "warm"))).completed
        before = agent.process.memory_info().rss
        results = await run_load(agent)
        growth = agent.process.memory_info().rss - before
        accepted = [each for each in results if each.status == 200]
        rejected = [each for each in results if each.status == 429]
        assert len(accepted) + len(rejected) == len(results) == CLIENTS
        assert not [each for each in accepted if not each.completed]
        assert {each.method for each in accepted} == {each.method for each in rejected} == set(METHODS)
        assert not [each for each in rejected if not 1 <= int(each.retry_after or "0") <= 60]
        assert {json.loads(each.body)["id"] == each.message_id for each in rejected} == {True}
        too_late = [each for each in rejected if each.seconds - each.stolen_s >= REFUSED_WITHIN_S]
        assert not too_late
        assert growth < GROWTH_BYTES
        # A last_rejected message is not stored, so sending it again starts it.
        last_rejected = rejected[-1]
        assert (await ask(http, call(last_rejected.method, "later", "crowded", last_rejected.message_id))).completed


def stored_deliveries(setup: AgentSetup) -> int:
    with closing(sqlite3.connect(setup.root / "state" / "workspace.sqlite3")) as connection:
        return int(connection.execute("select count(*) from deliveries").fetchone()[0])


async def test_a_known_message_joins_even_when_the_queue_is_full(setup: AgentSetup) -> None:
    limits = {"max_waiting_per_context": 1, "max_running_turns": 1}
    async with running_agent(replace(setup, limits=limits)) as agent, unlimited_client(agent.url) as http:
        answers: list[CallResult] = []

        async def send(message_id: str, text: str = script({"say": "one two three", "delay_ms": 300})) -> None:
            answers.append(await ask(http, call("SendMessage", text, "ctx", message_id)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, "runs")
            await eventually(lambda: stored_deliveries(setup) == 1)
            tasks.start_soon(send, "waits")
            await eventually(lambda: stored_deliveries(setup) == 2)
            assert [await busy_error(http, method) for method in METHODS] == [
                BUSY_ERROR_1_0,
                BUSY_ERROR_1_0,
                BUSY_ERROR_0_3,
                BUSY_ERROR_0_3,
            ]
            for message_id in ("runs", "waits"):
                tasks.start_soon(send, message_id)
        assert [each.completed for each in answers] == [True] * 4
        tasks_of: dict[str, set[str]] = {each.message_id: set() for each in answers}
        for each in answers:
            tasks_of[each.message_id].add(json.loads(each.body)["result"]["task"]["id"])
        assert [len(ids) for ids in tasks_of.values()] == [1, 1]


@contextmanager
def half_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open connections on which nothing but the beginning of an HTTP request arrives."""
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]
        for each in opened:
            with suppress(OSError):
                each.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n")
        yield opened


async def test_half_connections_take_no_file_handle_that_the_agent_needs(setup: AgentSetup) -> None:
    grpc_port, half_heads = free_port(), 400
    setup = replace(setup, environment={**setup.environment, "A2A_GRPC_PORT": str(grpc_port)})
    async with running_agent(setup, ("tests.e2e.few_handles", "200")) as agent, unlimited_client(agent.url) as http:
        assert (await ask(http, call("SendMessage", "hello", "before"))).completed
        http_port = int(agent.url.rstrip("/").rpartition(":")[2])
        with half_connections(http_port, half_heads), half_connections(grpc_port, half_heads):
            answers = [await ask(http, call("SendMessage", "hello", f"during-{number}")) for number in range(3)]
            assert [each.completed for each in answers] == [True] * 3
            agent.codex().kill()
            # The new codex needs file handles for its pipes.
            assert (await ask(http, call("SendMessage", "hello", "new codex"))).completed
            assert max(each.seconds for each in answers) < 10

        async def is_answered() -> bool:
            async with unlimited_client(agent.url) as new:
                try:
                    return (await ask(new, call("SendMessage", "hello", "after"))).completed
                except httpx.TransportError:
                    return False

        await eventually(is_answered)
        log = setup.log.read_text()
        assert ("Traceback" in log, log.count("because too many are open")) == (False, 1)
        assert len(log) < 10_000
