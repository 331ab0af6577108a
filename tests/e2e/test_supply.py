"""A codex that keeps dying, hangs, or grows: what clients, probes and the operator observe."""

import signal
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from subprocess import DEVNULL, run

import anyio
import httpx
import psutil
import pytest
from a2a.types import TaskState

from codex_workspace.config.loading import load_settings
from tests.e2e.agent_process import REPOSITORY, AgentProcess, AgentSetup, running_agent
from tests.e2e.client import Peer, Seen, peer, script
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow

COMPLETED, FAILED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_FAILED
REPEAT = script({"repeat": True})

CRASHING_CODEX = """
import os, pathlib, sys
left = pathlib.Path({left!r})
number = int(left.read_text())
if number:
    left.write_text(str(number - 1))
    sys.exit("no more room in the attic")
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""
"""A wrapper of codex that exits at once as often as the number in a file says."""


class CrashingCodex:
    """A wrapper of codex that exits at once a given number of times."""

    def __init__(self, setup: AgentSetup) -> None:
        real = load_settings(setup.prepare()).codex_bin
        assert real is not None
        self._crashes_left = setup.root / "deaths"
        self.set_crashes(0)
        self.program = setup.root / "mortal-codex"
        self.program.write_text(
            f"#!{sys.executable}\n{CRASHING_CODEX.format(left=str(self._crashes_left), real=str(real))}"
        )
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)

    def set_crashes(self, times: int) -> None:
        self._crashes_left.write_text(str(times))


def with_crashing_codex(setup: AgentSetup, **codex: object) -> tuple[CrashingCodex, AgentSetup]:
    program = CrashingCodex(setup)
    return program, replace(setup, codex=codex, environment={"CODEX_BIN": str(program.program)})


async def kill(codex: psutil.Process) -> None:
    codex.kill()
    await anyio.to_thread.run_sync(codex.wait, 5)


# --- Crashes ---


@pytest.mark.alone
async def test_a_message_waits_through_crashes_and_is_answered_by_the_next_codex(setup: AgentSetup) -> None:
    program, other = with_crashing_codex(setup)
    async with running_agent(other) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        program.set_crashes(3)
        await kill(agent.codex())
        started = time.monotonic()
        seen = await client.ask(REPEAT, "ctx")
        assert seen.state == COMPLETED
        assert "the word is apple" in seen.answer
        # Delays of at most 0, 0.5, 1 and 2 s: the killed codex counts as a failure, because it had just started.
        assert 0.75 * 3.5 <= time.monotonic() - started < 8


@pytest.mark.alone
async def test_readiness_the_log_and_the_doctor_say_why_codex_is_broken(setup: AgentSetup) -> None:
    program, other = with_crashing_codex(setup, max_restarts=3)
    async with running_agent(other) as agent, httpx.AsyncClient(base_url=agent.url) as http, peer(agent.url) as client:
        program.set_crashes(10**6)
        await kill(agent.codex())
        waiting = await client.begin("hello", "ctx")
        await eventually(lambda: "codex is broken after" in agent.log.read_text())
        asked = time.monotonic()
        answer = await http.get("/readyz")
        assert time.monotonic() - asked < 0.5
        assert answer.status_code == 503
        reason = answer.json()["reason"]
        assert reason.startswith("codex cannot start: it ended with exit code 1; 3 failures in a row, next attempt in ")
        assert (await http.get("/healthz")).status_code == 200
        log = agent.log.read_text()
        assert log.count("codex is broken after") == 1
        assert "no more room in the attic" in log
        found = await anyio.to_thread.run_sync(doctor, other, agent.url)
        assert "but is not ready: codex cannot start: it ended with exit code 1; 3 failures in a row" in found
        assert (await client.get(waiting.task_id)).state not in (COMPLETED, FAILED)


def doctor(setup: AgentSetup, url: str) -> str:
    port = url.rstrip("/").rsplit(":", 1)[1]
    command = [sys.executable, "-m", "codex_workspace", "doctor"]
    env = setup.prepare() | {"A2A_PORT": port}
    return run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, stdin=DEVNULL, check=False).stdout


async def test_a_message_stops_waiting_for_codex_with_a_reason(setup: AgentSetup) -> None:
    program, other = with_crashing_codex(setup, restart_wait_s=2)
    async with running_agent(other) as agent, peer(agent.url) as client:
        program.set_crashes(10**6)
        await kill(agent.codex())
        with anyio.fail_after(8):
            seen = await client.ask("hello", "ctx")
        assert seen.state == FAILED
        assert seen.sentence == "codex cannot start: it ended with exit code 1; gave up after 4 failures in a row"


@pytest.mark.alone
async def test_a_message_waiting_for_codex_can_be_canceled_and_delays_no_stop(setup: AgentSetup) -> None:
    program, other = with_crashing_codex(setup)
    async with running_agent(other) as agent, peer(agent.url) as client:
        program.set_crashes(10**6)
        await kill(agent.codex())
        first, second = await client.begin("hello", "one"), await client.begin("hello", "two")
        await anyio.sleep(1)
        asked = time.monotonic()
        assert (await client.cancel(first.task_id)).state == TaskState.TASK_STATE_CANCELED
        assert time.monotonic() - asked < 1
        assert (await client.get(second.task_id)).state not in (COMPLETED, FAILED)
        assert await agent.stop() == 0


# --- Hangs ---


async def test_a_codex_frozen_between_turns_is_replaced_and_the_message_answered(setup: AgentSetup) -> None:
    quick = replace(setup, codex={"request_timeout_s": 1})
    async with running_agent(quick) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        stopped = agent.codex()
        stopped.send_signal(signal.SIGSTOP)
        with anyio.fail_after(8):
            seen = await client.ask(REPEAT, "ctx")
        assert seen.state == COMPLETED
        assert "the word is apple" in seen.answer
        await anyio.to_thread.run_sync(stopped.wait, 3)


async def test_a_codex_frozen_in_a_turn_is_replaced_and_the_context_continues(setup: AgentSetup) -> None:
    quick = replace(setup, codex={"turn_inactivity_timeout_s": 2})
    async with running_agent(quick) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        stopped = agent.codex()
        seen = Seen()
        with anyio.fail_after(HANG_S):
            async for event in client.stream(script({"chunks": 1000, "delay_ms": 50}), "ctx"):
                seen.take(event)
                if len(seen.answer_updates) == 1:
                    stopped.send_signal(signal.SIGSTOP)
        assert seen.state == FAILED
        assert seen.sentence == "The turn was silent for 2 s and was stopped."
        await anyio.to_thread.run_sync(stopped.wait, 3)
        assert "the word is apple" in (await client.ask(REPEAT, "ctx")).answer


async def test_a_frozen_codex_is_not_ready(agent: AgentProcess) -> None:
    async with httpx.AsyncClient(base_url=agent.url) as http:
        assert (await http.get("/readyz")).status_code == 200
        agent.codex().send_signal(signal.SIGSTOP)
        answer = await http.get("/readyz")
        assert (answer.status_code, answer.json()["reason"]) == (503, "codex has not responded for 3 s")
        agent.codex().send_signal(signal.SIGCONT)
        assert (await http.get("/readyz")).status_code == 200


async def test_a_frozen_codex_of_a_killed_agent_blocks_no_thread(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        left = agent.codex()
        left.send_signal(signal.SIGSTOP)
        agent.process.kill()
        await agent.ended()
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert not psutil.pid_exists(left.pid) or left.status() == psutil.STATUS_ZOMBIE
        assert "the word is apple" in (await client.ask(REPEAT, "ctx")).answer


async def test_a_frozen_codex_does_not_delay_the_stop(agent: AgentProcess, client: Peer) -> None:
    await client.ask("hello", "ctx")
    agent.codex().send_signal(signal.SIGSTOP)
    assert await agent.stop() == 0


# --- Growth ---


@pytest.mark.alone
async def test_codex_is_replaced_when_it_holds_many_threads_and_memory_stays_level(setup: AgentSetup) -> None:
    low = replace(setup, limits={"codex_threads": 20})
    async with running_agent(low) as agent, peer(agent.url) as client:
        seen = await ask_in_contexts(client, 60, at_a_time=10)
        before = resource_usage(agent)
        seen += await ask_in_contexts(client, 60, at_a_time=10, first=60)
        after = resource_usage(agent)
        assert [each.answer for each in seen] == [f"You said: my number is {number}" for number in range(120)]
        assert {each.state for each in seen} == {COMPLETED}
        assert agent.log.read_text().count("replacing it between turns") >= 4
        for number in (0, 119):
            assert f"my number is {number}" in (await client.ask(REPEAT, f"ctx-{number}")).answer
    assert after["our files"] <= before["our files"] + 10
    assert after["our MiB"] <= before["our MiB"] + 15
    # A codex that approaches twenty threads, and the ten further ones that had been accepted.
    assert after["codex files"] < 150
    assert after["codex MiB"] < 350


async def ask_in_contexts(client: Peer, count: int, *, at_a_time: int, first: int = 0) -> list[Seen]:
    """Send a message in each of `count` contexts."""
    seen: dict[int, Seen] = {}
    numbers = iter(range(first, first + count))

    async def worker() -> None:
        for number in numbers:
            seen[number] = await client.ask(f"my number is {number}", f"ctx-{number}")

    async with anyio.create_task_group() as tasks:
        for _ in range(at_a_time):
            tasks.start_soon(worker)
    return [seen[number] for number in sorted(seen)]


def resource_usage(agent: AgentProcess) -> Mapping[str, int]:
    """Return the memory and open files of the agent and its codex; zero for a codex that is being replaced."""
    usage = {"our MiB": agent.process.memory_info().rss >> 20, "our files": agent.process.num_fds()}
    codex_mib = codex_files = 0
    for codex in agent.codexes():
        with suppress(psutil.NoSuchProcess):
            codex_mib += codex.memory_info().rss >> 20
            codex_files += codex.num_fds()
    return usage | {"codex MiB": codex_mib, "codex files": codex_files}
