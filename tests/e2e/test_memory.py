"""A context is one conversation, across crashes and restarts."""

import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import psutil
import pytest
from a2a.client import A2AClientError
from a2a.types import TaskState

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.runtimes.backend import CONTINUE_PROMPT
from codex_workspace.tasks.replies import STOPPED
from tests.e2e.agent_process import AgentProcess, AgentSetup, running_agent
from tests.e2e.client import Peer, Seen, peer, script
from tests.e2e.turn_progress import wait_for_model_calls
from tests.support.waiting import eventually

pytestmark = pytest.mark.both_backends

COMPLETED, FAILED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_FAILED
REPEAT = script({"repeat": True})


@pytest.mark.versions
async def test_a_second_message_sees_the_first_and_a_third_sees_both_after_a_restart(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        assert "the word is apple" in (await client.ask(REPEAT, "ctx")).answer
        await client.ask("the word is pear", "ctx")
        assert await agent.stop() == 0
    async with running_agent(setup) as agent, peer(agent.url) as client:
        answer = (await client.ask(REPEAT, "ctx")).answer
    assert "the word is apple" in answer
    assert "the word is pear" in answer


async def test_messages_without_context_share_the_senders_main_context(client: Peer) -> None:
    first = await client.ask("the word is apple")
    second = await client.ask(REPEAT)
    assert second.context_id == first.context_id
    assert "the word is apple" in second.answer
    assert "the word is apple" not in (await client.ask(REPEAT, "elsewhere")).answer


async def test_per_context_gives_each_message_without_context_its_own(setup: AgentSetup) -> None:
    separate = replace(setup, codex={"conversations": "per-context"})
    async with running_agent(separate) as agent, peer(agent.url) as client:
        first = await client.ask("the word is apple")
        second = await client.ask(REPEAT)
    assert second.context_id != first.context_id
    assert "apple" not in second.answer


@pytest.mark.alone
@pytest.mark.parametrize("recovery", ["fail", "resume"])
async def test_codex_killed_during_a_turn_fails_or_resumes_it_and_the_context_remembers(
    setup: AgentSetup, recovery: str
) -> None:
    """Without recovery the task fails within a second with a reason; with it, the turn continues after a notice."""
    wanted = replace(setup, codex={"recovery": recovery})
    async with running_agent(wanted) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        seen = Seen()
        stream = client.stream(script({"say": "At work.", "run": "sleep 86421"}, {"say": "never"}), "ctx")
        async for event in stream:
            seen.take(event)
            if seen.kinds()[-1:] == ["command"]:
                break
        commands = await eventually(lambda: agent.commands("86421"))
        agent.codex().kill()
        if recovery == "fail":
            failed = await client.finished(seen.task_id, within_s=1.0)
            assert failed.state == FAILED
            assert "interrupted: codex was ended by signal 9 (SIGKILL)" in failed.sentence
        async for event in stream:
            seen.take(event)
        assert "SIGKILL" in seen.sentence + "".join(note.status.message.parts[0].text for note in seen.notes)
        if recovery == "resume":
            assert (seen.state, seen.answer) == (COMPLETED, f"You said: {CONTINUE_PROMPT}")
        _, alive = psutil.wait_procs(commands, timeout=2)
        assert not alive, "the command of the killed codex is still running"
        assert "the word is apple" in (await client.ask(REPEAT, "ctx")).answer


@pytest.mark.app_server_only(reason="no codex exec runs between turns")
@pytest.mark.versions
async def test_codex_killed_between_turns_is_replaced_silently(agent: AgentProcess, client: Peer) -> None:
    await client.ask("the word is apple", "ctx")
    for _ in range(3):
        agent.codex().kill()
        assert "the word is apple" in (await client.ask(REPEAT, "ctx")).answer


@pytest.mark.alone
@pytest.mark.parametrize("recovery", ["fail", "resume"])
async def test_sigterm_waits_the_grace_period_then_fails_or_keeps_the_turn(
    setup: AgentSetup, model: ScriptedModel, recovery: str
) -> None:
    """The next agent resumes unfinished tasks; without recovery they fail, and the reason is that the agent stopped."""
    quick = replace(setup, codex={"shutdown_grace_s": 1, "recovery": recovery})
    async with running_agent(quick) as agent, peer(agent.url) as client:
        ends_in_time, never_ends = Seen(), Seen()

        async def follow(seen: Seen, text: str, context: str) -> None:
            with suppress(A2AClientError):
                async for event in client.stream(text, context):
                    seen.take(event)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, ends_in_time, script({"chunks": 8, "delay_ms": 80}), "short")
            tasks.start_soon(follow, never_ends, script({"say": "At work.", "stall": True, "times": 1}), "long")
            await wait_for_model_calls(model, 2)
            await eventually(lambda: ends_in_time.task_id and never_ends.task_id)
            with anyio.fail_after(7):
                assert await agent.stop() == 0
        assert ends_in_time.state == COMPLETED
        if recovery == "fail":
            assert (never_ends.state, never_ends.sentence) == (FAILED, STOPPED)
    async with running_agent(quick) as agent, peer(agent.url) as client:
        ended = await client.finished(never_ends.task_id)
        if recovery == "fail":
            assert ended.sentence == STOPPED
        else:
            assert (ended.state, ended.answer) == (COMPLETED, f"You said: {CONTINUE_PROMPT}")
        assert (await client.ask("go on", "long")).state == COMPLETED


@pytest.mark.versions
@pytest.mark.parametrize("damage", ["emptied", "removed"])
async def test_a_lost_thread_is_reported_and_replaced(setup: AgentSetup, damage: str) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        await agent.stop()
    for rollout in list((setup.root / "state" / "codex" / "sessions").rglob("rollout-*.jsonl")):
        _damage(rollout, damage)
    async with running_agent(setup) as agent, peer(agent.url) as client:
        seen = await client.ask(REPEAT, "ctx")
        assert seen.state == COMPLETED
        assert "apple" not in seen.answer
        assert "cannot be resumed" in str(seen.notes[0].status.message.parts[0].text)
        assert "repeat" in (await client.ask(REPEAT, "ctx")).answer


def _damage(rollout: Path, how: str) -> None:
    if how == "emptied":
        rollout.write_text("")
    else:
        rollout.unlink()


@pytest.mark.versions
async def test_no_process_remains_after_the_agent_stops(setup: AgentSetup, model: ScriptedModel) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.begin(script({"run": "sleep 86422"}), "ctx")
        await eventually(lambda: agent.commands("86422"))
        family = [agent.process, *agent.process.children(recursive=True)]
        agent.process.send_signal(signal.SIGTERM)
        _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(family, timeout=8))
    assert not alive
