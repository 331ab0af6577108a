"""A message during a running turn of its context: it is queued, joins the turn, or replaces it."""

from dataclasses import replace

import pytest
from a2a.types import SendMessageRequest, TaskState
from google.protobuf.json_format import ParseDict

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.tasks.replies import SUPERSEDED
from codex_workspace.tasks.request import TURN
from tests.e2e.agent_process import AgentSetup, running_agent
from tests.e2e.client import Peer, Seen, peer, request, script
from tests.e2e.turn_progress import wait_for_text

COMPLETED, CANCELED, REJECTED = (
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_REJECTED,
)
SAY_FINE = script({"say": "Fine."})
"""The model runs the last script if a message quotes an earlier one."""
REPEAT = script({"repeat": True})


def with_overrides(text: str, **overrides: object) -> SendMessageRequest:
    sent = request(text, "ctx")
    ParseDict({TURN: overrides}, sent.message.metadata)
    return sent


async def send(client: Peer, sent: SendMessageRequest) -> Seen:
    seen = Seen()
    async for event in client.streaming.send_message(sent):
        seen.take(event)
    return seen


async def start_turn(client: Peer, text: str) -> Seen:
    """Send a message and return its task as soon as its turn has produced text."""
    seen = await client.begin(text, "ctx")
    await wait_for_text(client, seen)
    return seen


@pytest.mark.versions
async def test_a_steering_message_joins_the_turn_and_both_get_its_answer(
    setup: AgentSetup, model: ScriptedModel
) -> None:
    steering = replace(setup, codex={"mid_turn": "steer"})
    async with running_agent(steering) as agent, peer(agent.url) as client:
        first = await start_turn(client, script({"say": "I begin.", "run": "sleep 1"}, {"say": "never"}))
        second = await client.ask("look here", "ctx")
        done = await client.finished(first.task_id)
        assert (done.state, second.state) == (COMPLETED, COMPLETED)
        assert done.answer == second.answer == "You said: look here"
        history = (await client.ask(REPEAT, "ctx")).answer
        assert history.count("look here") == 2


@pytest.mark.versions
async def test_an_interrupting_message_replaces_the_turn_and_loses_nothing(setup: AgentSetup) -> None:
    interrupting = replace(setup, codex={"mid_turn": "interrupt"})
    async with running_agent(interrupting) as agent, peer(agent.url) as client:
        first = await start_turn(client, script({"say": "I begin.", "stall": True}, text="the first"))
        second = await client.ask(SAY_FINE, "ctx")
        done = await client.get(first.task_id)
        assert (done.state, done.sentence, done.answer) == (CANCELED, SUPERSEDED, "I begin.")
        assert second.state == COMPLETED
        history = (await client.ask(REPEAT, "ctx")).answer
        assert "Your partial answer to it:\n\nI begin." in history


async def test_the_latest_of_several_interrupting_messages_mentions_all(setup: AgentSetup) -> None:
    interrupting = replace(setup, codex={"mid_turn": "interrupt"})
    async with running_agent(interrupting) as agent, peer(agent.url) as client:
        first = await start_turn(client, script({"say": "I begin.", "stall": True}))
        others = [await client.begin(f"number {number} {SAY_FINE}", "ctx") for number in range(3)]
        ended = [await client.finished(each.task_id) for each in (first, *others)]
        assert ended[-1].state == COMPLETED
        assert {each.state for each in ended[:-1]} <= {CANCELED, COMPLETED}
        history = (await client.ask(REPEAT, "ctx")).answer
        assert all(f"number {number}" in history for number in range(3))


async def test_a_message_overrides_the_mid_turn_policy(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        first = await start_turn(client, script({"say": "I begin.", "run": "sleep 1"}, {"say": "never"}))
        second = await send(client, with_overrides("look here", midTurn="steer"))
        assert second.answer == (await client.finished(first.task_id)).answer == "You said: look here"
        first = await start_turn(client, script({"say": "I begin.", "stall": True}))
        assert (await send(client, with_overrides(SAY_FINE, midTurn="interrupt"))).state == COMPLETED
        assert (await client.get(first.task_id)).state == CANCELED


async def test_without_a_running_turn_all_policies_are_equal(client: Peer) -> None:
    for policy in ("queue", "steer", "interrupt"):
        seen = await send(client, with_overrides("hello", midTurn=policy))
        assert (seen.state, seen.answer) == (COMPLETED, "You said: hello")


@pytest.mark.versions
async def test_one_message_overrides_turn_options(setup: AgentSetup, model: ScriptedModel) -> None:
    (setup.root / "workspace" / "services").mkdir(parents=True)
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "additionalProperties": False}
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask("usual", "ctx")
        first_request = model.requests[-1]
        overrides = {"model": "gpt-5.4", "effort": "high", "workingFolder": "services", "outputSchema": schema}
        seen = await send(client, with_overrides(script({"run": "pwd"}, {"say": "ok"}), **overrides))
        assert (seen.state, seen.answer) == (COMPLETED, "ok")
        assert any("workspace/services" in note.status.message.parts[0].text for note in seen.notes)
        overridden_request = model.requests[-1]
        assert (overridden_request.model, overridden_request.effort, overridden_request.output_schema) == (
            "gpt-5.4",
            "high",
            schema,
        )
        await client.ask("usual again", "ctx")
        next_request = model.requests[-1]
        assert (next_request.model, next_request.effort, next_request.output_schema) == (
            first_request.model,
            first_request.effort,
            None,
        )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"colour": "red"}, "'colour' is unknown; valid options: model, effort, workingFolder, outputSchema, midTurn"),
        ({"workingFolder": "../.."}, "inside the workspace"),
        ({"workingFolder": "/etc"}, "inside the workspace"),
        ({"workingFolder": "nowhere"}, "an existing folder"),
        ({"effort": 3}, "a word such as low"),
        ({"midTurn": "later"}, "one of queue, steer, interrupt"),
    ],
)
async def test_an_invalid_turn_option_is_rejected_with_a_reason(
    client: Peer, overrides: dict[str, object], words: str
) -> None:
    seen = await send(client, with_overrides("hello", **overrides))
    assert seen.state == REJECTED
    assert words in seen.sentence
