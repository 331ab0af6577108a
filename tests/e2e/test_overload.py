"""More clients than there are places: who is let in is answered, who is not hears it at once, memory stays level."""

import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import httpx
import pytest

from tests.e2e.agent_process import REPOSITORY, AgentProcess, AgentSetup, running_agent
from tests.e2e.client import script
from tests.e2e.load_generator import METHODS, CallResult, ask, call, unlimited_client
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.slow

CLIENTS = 200
EVERY_S = 0.02
LIMITS = {"max_waiting_per_context": 5, "max_waiting": 30, "max_running_turns": 8}

REFUSED_WITHIN_S = 0.1
GROWTH_BYTES = 40_000_000
"""What the agent may take for 200 clients; a message and its task are a few kilobytes, 38 wait or run at a time."""

SLOWLY = script({"say": "one two three four", "delay_ms": 100})


SENTENCE = "The agent is busy: the queue of this context is full (1 messages). Try again in 10 s."
OLD_STYLE = {"code": -32000, "message": SENTENCE, "data": {"retryAfterSeconds": 10}}
NEW_STYLE = {
    "code": -32000,
    "message": SENTENCE,
    "data": [
        {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "BUSY",
            "domain": "codex-workspace",
            "metadata": {"retryAfterSeconds": "10"},
        }
    ],
}


async def refusal(http: httpx.AsyncClient, method: str) -> object:
    """Send a message for which there is no place and return the JSON-RPC error."""
    result = await ask(http, call(method, "no place", "ctx"))
    assert (result.status, result.retry_after) == (429, "10")
    return json.loads(result.body)["error"]


@pytest.fixture
async def agent(setup: AgentSetup) -> AsyncIterator[AgentProcess]:
    async with running_agent(replace(setup, limits=LIMITS)) as agent:
        yield agent


async def run_load(agent: AgentProcess) -> list[CallResult]:
    """Let 200 clients send, from a process of their own."""
    command = [
        sys.executable,
        "-m",
        "tests.e2e.load_generator",
        agent.url,
        str(agent.process.pid),
        str(CLIENTS),
        str(EVERY_S),
        SLOWLY,
    ]
    with anyio.fail_after(HANG_S):
        ended = await anyio.run_process(command, cwd=REPOSITORY, stderr=None)
    return [CallResult(**json.loads(line)) for line in ended.stdout.splitlines()]


@pytest.mark.alone
async def test_accepted_messages_are_answered_and_the_rest_is_rejected_at_once(agent: AgentProcess) -> None:
    async with unlimited_client(agent.url) as http:
        assert (await ask(http, call("SendMessage", "hello", "warm"))).completed
        before = agent.process.memory_info().rss
        result = await run_load(agent)
        grown = agent.process.memory_info().rss - before
        accepted = [each for each in result if each.status == 200]
        refused = [each for each in result if each.status == 429]
        assert len(accepted) + len(refused) == len(result) == CLIENTS
        assert not [each for each in accepted if not each.completed]
        assert {each.method for each in accepted} == {each.method for each in refused} == set(METHODS)
        assert not [each for each in refused if not 1 <= int(each.retry_after or "0") <= 60]
        assert {json.loads(each.body)["id"] == each.message_id for each in refused} == {True}
        too_late = [each for each in refused if each.seconds - each.stolen_s >= REFUSED_WITHIN_S]
        assert not too_late
        assert grown < GROWTH_BYTES
        # Nothing of a refusal is left: the message is new when it comes again, and so it is answered.
        again = refused[-1]
        assert (await ask(http, call(again.method, "later", "crowded", again.message_id))).completed


async def test_a_known_message_joins_even_when_the_queue_is_full(setup: AgentSetup) -> None:
    limits = {"max_waiting_per_context": 1, "max_running_turns": 1}
    async with running_agent(replace(setup, limits=limits)) as agent, unlimited_client(agent.url) as http:
        answers: list[CallResult] = []

        async def send(message_id: str, text: str = script({"say": "one two three", "delay_ms": 300})) -> None:
            answers.append(await ask(http, call("SendMessage", text, "ctx", message_id)))

        async with anyio.create_task_group() as tasks:
            for message_id in ("runs", "waits"):
                tasks.start_soon(send, message_id)
                await anyio.sleep(0.3)
            assert [await refusal(http, method) for method in METHODS] == [NEW_STYLE, NEW_STYLE, OLD_STYLE, OLD_STYLE]
            for message_id in ("runs", "waits"):
                tasks.start_soon(send, message_id)
        assert [each.completed for each in answers] == [True] * 4
        tasks_of: dict[str, set[str]] = {each.message_id: set() for each in answers}
        for each in answers:
            tasks_of[each.message_id].add(json.loads(each.body)["result"]["task"]["id"])
        assert [len(ids) for ids in tasks_of.values()] == [1, 1]
