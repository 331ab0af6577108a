"""Large answers, cancellation, queued messages, and many contexts at once."""

from dataclasses import replace

import anyio
import psutil
import pytest
from a2a.types import TaskState

from codex_workspace.devkit.script import numbered_text
from tests.e2e.agent_process import AgentProcess, AgentSetup, Backend, running_agent
from tests.e2e.client import Peer, Seen, peer, script
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_backends

COMPLETED, CANCELED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_CANCELED


async def test_an_answer_of_one_megabyte_is_complete(client: Peer) -> None:
    seen = await client.ask(script({"megabytes": 1}))
    assert seen.answer == numbered_text(1_000_000)
    assert (await client.get(seen.task_id)).answer == seen.answer


@pytest.mark.versions
async def test_a_command_that_prints_a_line_of_two_megabytes(client: Peer) -> None:
    seen = await client.ask(script({"run": "head -c 2000000 /dev/zero | tr '\\0' x"}, {"say": "printed"}))
    assert (seen.state, seen.answer) == (COMPLETED, "printed")
    output = str(seen.notes[-1].status.message.metadata["output"])
    assert "characters left out" in output
    assert output.endswith("x" * 1000)


async def test_fifty_thousand_deltas_arrive_once_in_the_stream_and_the_store(client: Peer) -> None:
    seen = await client.ask(script({"chunks": 50_000}))
    assert seen.answer == numbered_text(500_000)
    assert (await client.get(seen.task_id)).answer == seen.answer


@pytest.mark.alone
async def test_cancel_stops_the_command_and_keeps_the_thread(agent: AgentProcess, client: Peer) -> None:
    await client.ask("the word is apple", "ctx")
    seen = Seen()
    async with anyio.create_task_group() as tasks:

        async def follow() -> None:
            async for event in client.stream(
                script({"say": "At work.", "run": "sleep 86423"}, {"say": "never"}), "ctx"
            ):
                seen.take(event)

        tasks.start_soon(follow)
        # Codex starts the process shortly before it reports it.
        await eventually(lambda: "command" in seen.kinds())
        commands = await eventually(lambda: agent.commands("86423"))
        # The stream must end too, or the task group would not.
        with anyio.fail_after(1):
            canceled = await client.cancel(seen.task_id)
    assert canceled.state == seen.state == CANCELED
    assert seen.answer == "At work."
    assert seen.kinds() == ["commentary", "command", "command"]
    _, alive = psutil.wait_procs(commands, timeout=1)
    assert not alive
    assert "the word is apple" in (await client.ask(script({"repeat": True}), "ctx")).answer


@pytest.mark.alone
async def test_cancel_at_any_point_of_a_turns_start(agent: AgentProcess, client: Peer) -> None:
    # One app-server, or none: no process of `codex exec` outlives its turn.
    before = agent.codexes()
    for wait_ms in (0, 2, 5, 10, 20, 40, 80):
        started = await client.begin(script({"say": "At work.", "stall": True}), "ctx")
        await anyio.sleep(wait_ms / 1000)
        with anyio.fail_after(2):
            assert (await client.cancel(started.task_id)).state == CANCELED
        assert agent.codexes() == before
        assert (await client.ask("still there?", "ctx")).answer == "You said: still there?"


async def test_a_second_message_is_queued_and_sees_the_first(client: Peer) -> None:
    first = await client.begin(script({"chunks": 10, "delay_ms": 50}), "ctx")
    second = await client.ask(script({"repeat": True}), "ctx")
    assert (await client.get(first.task_id)).answer == numbered_text(100)
    assert numbered_text(100) in second.answer


@pytest.mark.alone
async def test_canceling_a_queued_message_leaves_the_running_one_alone(client: Peer) -> None:
    running = await client.begin(script({"chunks": 10, "delay_ms": 50}), "ctx")
    waiting = await client.begin("never mind", "ctx")
    with anyio.fail_after(1):
        assert (await client.cancel(waiting.task_id)).state == CANCELED
    assert (await client.finished(running.task_id)).answer == numbered_text(100)
    assert "never mind" not in (await client.ask(script({"repeat": True}), "ctx")).answer


@pytest.mark.alone
async def test_eight_contexts_run_concurrently(agent: AgentProcess, client: Peer, backend: Backend) -> None:
    """In one app-server, or in one process per turn."""
    before = agent.codexes()
    assert len(before) == (1 if backend == "app-server" else 0)
    seen: dict[int, Seen] = {}

    async def ask(number: int) -> None:
        text = script({"chunks": 10, "delay_ms": 100}, text=f"number {number} ")
        seen[number] = await client.ask(text, f"context-{number}")

    begin = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(ask, number)
    assert anyio.current_time() - begin < 6, "sequentially they would take 8 s"
    assert {each.answer for each in seen.values()} == {numbered_text(100)}
    assert agent.codexes() == before


@pytest.mark.versions
async def test_a_silent_turn_is_stopped_and_the_next_one_works(setup: AgentSetup) -> None:
    impatient = replace(setup, codex={"turn_inactivity_timeout_s": 1})
    async with running_agent(impatient) as agent, peer(agent.url) as client:
        for silence in (True, "headers"):
            seen = await client.ask(script({"say": "so far", "stall": silence}), "ctx")
            assert seen.state == TaskState.TASK_STATE_FAILED
            assert "silent for 1 s" in seen.sentence
            assert (await client.ask("next", "ctx")).answer == "You said: next"


@pytest.mark.app_server_only(reason="codex exec tells an output when its command has ended")
async def test_a_command_that_keeps_printing_keeps_its_turn_alive(setup: AgentSetup) -> None:
    impatient = replace(setup, codex={"turn_inactivity_timeout_s": 1})
    async with running_agent(impatient) as agent, peer(agent.url) as client:
        ticks = "for i in 1 2 3 4 5 6; do echo tick $i; sleep 0.4; done"
        seen = await client.ask(script({"run": ticks, "yield_ms": 10_000}, {"say": "through"}))
    assert (seen.state, seen.answer) == (COMPLETED, "through")


async def test_a_turn_over_its_time_budget_is_stopped(setup: AgentSetup) -> None:
    hurried = replace(setup, codex={"turn_timeout_s": 1})
    async with running_agent(hurried) as agent, peer(agent.url) as client:
        seen = await client.ask(script({"chunks": 1000, "delay_ms": 20}), "ctx")
        assert seen.state == TaskState.TASK_STATE_FAILED
        assert "longer than 1 s" in seen.sentence
        assert (await client.ask("next", "ctx")).answer == "You said: next"
