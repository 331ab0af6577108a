"""Every accepted message gets exactly one answer, even if it is sent again and wherever the process dies."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace

import anyio
import httpx
import psutil
import pytest
from a2a.client import A2AClientError
from a2a.types import SendMessageRequest, SubscribeToTaskRequest, Task, TaskState
from a2a.utils.errors import InvalidParamsError, UnsupportedOperationError

from codex_workspace.common.a2a_terms import ANSWER, WORKING
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.script import numbered_text
from codex_workspace.runtimes.backend import CONTINUE_PROMPT
from tests.e2e.agent_process import AgentProcess, AgentSetup, Backend, running_agent
from tests.e2e.client import Peer, Seen, peer, request, script
from tests.e2e.faulty_agent import STEPS
from tests.e2e.turn_progress import model_calls, wait_for_model_calls, wait_for_running_turn
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

COMPLETED, FAILED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_FAILED
REPEAT = script({"repeat": True})


async def send(client: Peer, sent: SendMessageRequest, *, streaming: bool = True) -> Seen:
    """Send a request unchanged, so that it can be sent again."""
    copy = SendMessageRequest()
    copy.CopyFrom(sent)
    seen = Seen()
    async for event in (client.streaming if streaming else client.blocking).send_message(copy):
        seen.take(event)
    return seen


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_repeated_message_gets_the_stored_answer(client: Peer, model: ScriptedModel, streaming: bool) -> None:
    sent = request("hello", "ctx")
    first = await send(client, sent)
    again = await send(client, sent, streaming=streaming)
    assert (again.task_id, again.answer, again.state) == (first.task_id, "You said: hello", COMPLETED)
    assert model_calls(model) == 1


async def test_a_repeated_message_joins_the_running_turn(client: Peer, model: ScriptedModel) -> None:
    sent = request(script({"chunks": 10, "delay_ms": 50}), "ctx")
    seen: list[Seen] = []

    async def post(streaming: bool) -> None:
        seen.append(await send(client, sent, streaming=streaming))

    async with anyio.create_task_group() as tasks:
        for streaming in (True, False, True, False, True):
            tasks.start_soon(post, streaming)
    assert {(each.answer, each.state) for each in seen} == {(numbered_text(100), COMPLETED)}
    assert len({each.task_id for each in seen}) == 1
    assert model_calls(model) == 1


async def test_a_repeated_message_joins_over_a2a_0_3(agent: AgentProcess, client: Peer, model: ScriptedModel) -> None:
    """The same message over 1.0 and 0.3 is one delivery."""
    sent = request("hello")
    first = await send(client, sent)
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "message/send",
        "params": {
            "message": {
                "role": "user",
                "messageId": sent.message.message_id,
                "parts": [{"kind": "text", "text": "hello"}],
            }
        },
    }
    async with httpx.AsyncClient(base_url=agent.url) as http:
        answer = (await http.post("/", json=body)).json()
    assert answer["result"]["id"] == first.task_id
    assert model_calls(model) == 1


async def test_a_reused_message_id_is_rejected(client: Peer) -> None:
    sent = request("hello", "ctx")
    await send(client, sent)
    sent.message.parts[0].text = "something else"
    with pytest.raises(InvalidParamsError, match="was used for another message"):
        await send(client, sent)


BEFORE_CODEX = ("before accepting", "after accepting", "before the turn request")
"""At these steps codex has not received the message, so it is started normally."""

AMBIGUOUS = ("exec", "after the turn start")
"""Here codex's record does not show whether it received the message: `codex exec` stores no message ID."""


BACKEND_STEPS = ("before the turn request", "after the turn start", "after storing the turn")
"""At these steps the backends differ."""


@pytest.mark.parametrize(
    ("backend", "step"),
    [
        *(("app-server", step) for step in STEPS),
        *(pytest.param("exec", step, marks=pytest.mark.with_exec) for step in BACKEND_STEPS),
    ],
)
async def test_a_message_is_answered_once_wherever_the_agent_dies(
    setup: AgentSetup, backend: Backend, step: str
) -> None:
    sent = request("the word is apple", "ctx")
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask("before", "ctx")
    async with running_agent(setup, module=("tests.e2e.faulty_agent", step)) as agent, peer(agent.url) as client:
        # The connection breaks, or the answer arrives before the process is killed.
        with suppress(A2AClientError, httpx.HTTPError):
            await send(client, sent)
        assert await agent.ended() == -9
    async with running_agent(setup) as agent, peer(agent.url) as client:
        again = await send(client, sent)
        # If the turn was cut off, the answer is the one to the continuation.
        assert again.state == COMPLETED
        answers = ["You said: the word is apple", f"You said: {CONTINUE_PROMPT}"]
        assert again.answer in (answers[:1] if step in BEFORE_CODEX else answers)
        history = (await client.ask(REPEAT, "ctx")).answer
        repeated = await send(client, sent)
        assert (repeated.task_id, repeated.answer) == (again.task_id, again.answer)
    # One for each of the three messages.
    tasks = stored_tasks(setup)
    answered = [task for task in tasks if any(each.artifact_id == ANSWER for each in task.artifacts)]
    assert len(tasks) == len(answered) == 3
    at_most = 2 if (backend, step) == AMBIGUOUS else 1
    assert 1 <= history.count("user: the word is apple") <= at_most, history
    assert not [task for task in tasks if task.status.state in WORKING]


def stored_tasks(setup: AgentSetup) -> list[Task]:
    """Return the tasks in the database."""
    with closing(sqlite3.connect(setup.root / "state" / "workspace.sqlite3")) as database:
        return [Task.FromString(body) for (body,) in database.execute("select body from tasks")]


@pytest.mark.both_backends
@pytest.mark.parametrize(
    ("policy", "state", "words"),
    [
        ("resume", COMPLETED, ["was interrupted", "went on"]),
        ("rerun", COMPLETED, ["went on"]),
        ("fail", FAILED, ["was interrupted"]),
    ],
)
@pytest.mark.parametrize(
    "victims", [pytest.param(each, marks=pytest.mark.versions) for each in ("codex", "agent")] + ["both"]
)
async def test_an_interrupted_turn_resumes_as_configured(
    setup: AgentSetup, model: ScriptedModel, victims: str, policy: str, state: int, words: Sequence[str]
) -> None:
    configured = replace(setup, codex={"recovery": policy})
    # The scripted model stalls in the first turn only.
    sent = request(script({"say": "At work.", "stall": True, "times": 1}, text="went on "), "ctx")
    async with running_agent(configured) as agent, peer(agent.url) as client:
        first = Seen()
        async with anyio.create_task_group() as tasks:

            async def follow() -> None:
                with suppress(A2AClientError, httpx.HTTPError):
                    async for event in client.streaming.send_message(sent):
                        first.take(event)

            tasks.start_soon(follow)
            await wait_for_running_turn(setup, model)
            codex = agent.codex()
            if victims in ("codex", "both"):
                codex.kill()
            if victims in ("agent", "both"):
                agent.process.kill()
    async with running_agent(configured) as agent, peer(agent.url) as client:
        ended = await client.finished(first.task_id)
        assert ended.state == state, ended.sentence
        assert all(word in ended.answer + ended.sentence for word in words) or policy != "fail"
        assert (await client.ask("and on", "ctx")).state == COMPLETED
        _, alive = psutil.wait_procs([codex], timeout=2)
        assert not alive, "the earlier codex is still running"


@pytest.mark.both_backends
async def test_a_message_that_crashes_codex_twice_fails(setup: AgentSetup, model: ScriptedModel) -> None:
    # When the message is sent again, it kills codex again.
    again = replace(setup, codex={"recovery": "rerun"})
    async with running_agent(again) as agent, peer(agent.url) as client:
        first = await client.begin(script({"say": "At work.", "stall": True}), "ctx")
        for times in (1, 2):
            await wait_for_model_calls(model, times)
            agent.codex().kill()
        seen = await client.finished(first.task_id)
        assert (seen.state, model_calls(model)) == (FAILED, 2)
        assert "2 times" in seen.sentence
        assert (await client.ask("next", "ctx")).state == COMPLETED


@pytest.mark.both_backends
async def test_waiting_messages_keep_their_order_across_a_restart(setup: AgentSetup, model: ScriptedModel) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.begin(script({"say": "At work.", "stall": True, "times": 1}), "ctx")
        await wait_for_running_turn(setup, model)
        waiting = [await client.begin(f"number {number}", "ctx") for number in range(5)]
        agent.process.kill()
        await agent.ended()
    async with running_agent(setup) as agent, peer(agent.url) as client:
        for each in waiting:
            assert (await client.finished(each.task_id)).state == COMPLETED
        history = (await client.ask(REPEAT, "ctx")).answer
    positions = [history.index(f"user: number {number}") for number in range(5)]
    assert positions == sorted(positions)
    assert [history.count(f"user: number {number}") for number in range(5)] == [1] * 5


@pytest.mark.both_backends
async def test_a_subscriber_across_a_restart_receives_the_end(setup: AgentSetup, model: ScriptedModel) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        first = await client.begin(script({"say": "At work.", "stall": True, "times": 1}), "ctx")
        await wait_for_running_turn(setup, model)
        agent.process.kill()
        await agent.ended()
    async with running_agent(setup) as agent, peer(agent.url) as client:
        seen = Seen()
        # If the task has ended already, a subscription is rejected, and its state is in the task.
        with suppress(UnsupportedOperationError):
            async for event in client.streaming.subscribe(SubscribeToTaskRequest(id=first.task_id)):
                seen.take(event)
        seen = await client.get(first.task_id)
    assert seen.state == COMPLETED


@pytest.mark.both_backends
@pytest.mark.versions
async def test_an_undelivered_message_is_sent_although_the_one_before_had_the_same_text(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask("go on", "ctx")
    step = "after accepting"
    async with running_agent(setup, module=("tests.e2e.faulty_agent", step)) as agent, peer(agent.url) as client:
        sent = request("go on", "ctx")
        with suppress(A2AClientError, httpx.HTTPError):
            await send(client, sent)
        assert await agent.ended() == -9
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert (await send(client, sent)).answer == "You said: go on"
        assert (await client.ask(REPEAT, "ctx")).answer.count("user: go on") == 2


@pytest.mark.both_backends
@pytest.mark.versions
async def test_a_resumed_task_keeps_its_earlier_artifacts(setup: AgentSetup, model: ScriptedModel) -> None:
    patch = "*** Begin Patch\n*** Add File: {}.txt\n+made\n*** End Patch"
    change: dict[str, object] = {"patch": patch.format("one.txt")}
    message = script(change, {"say": "At work.", "stall": True, "times": 1})
    async with running_agent(setup) as agent, peer(agent.url) as client:
        seen = await client.begin(message, "ctx")
        await wait_for_model_calls(model, 2)
        # The database has the artifact before the readers have all of its events.
        await eventually(lambda: "one.txt" in str(stored_tasks(setup)))
        agent.process.kill()
        await agent.ended()
    async with running_agent(setup) as agent, peer(agent.url) as client:
        ended = await client.finished(seen.task_id)
        assert (ended.state, ended.answer) == (COMPLETED, f"You said: {CONTINUE_PROMPT}")
        assert "one.txt" in ended.artifacts["patch-1"]
