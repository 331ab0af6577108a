"""Messages without a task ID while a task of their context asks: nothing hangs, and only a clear answer answers."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import anyio
import httpx
import pytest
from a2a.types import Message, Part, Role, SendMessageConfiguration, SendMessageRequest, TaskState
from a2a.utils.constants import TransportProtocol
from a2a.utils.errors import InvalidParamsError
from google.protobuf.json_format import ParseDict

from codex_workspace.tasks.replies import FAILURE
from codex_workspace.tasks.request import TURN
from tests.e2e.agent_process import AgentProcess, AgentSetup, running_agent
from tests.e2e.client import Peer, Seen, peer, plain, request, script
from tests.matrix.clients import OwnClient, own_client
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow

COMPLETED, CANCELED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_CANCELED
ASKING, REJECTED = TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_REJECTED
SUBMITTED = TaskState.TASK_STATE_SUBMITTED

OPERATOR: Final = "operator-0123456789abcdef"
BOB: Final = "bob-0123456789abcdef"


def outside_file(setup: AgentSetup) -> Path:
    """Return a file that sandboxed commands cannot write."""
    return setup.root / "outside.txt"


def wish(setup: AgentSetup, *before: dict[str, object]) -> str:
    """Return a message that makes codex ask for a command outside the sandbox."""
    command = {"run": f"echo made > {outside_file(setup)}", "escalate": True}
    return script(*before, command, {"say": "It is done."})


@asynccontextmanager
async def asking_agent(setup: AgentSetup, *, tokens: bool = True, **codex: object) -> AsyncIterator[AgentProcess]:
    """Run an agent whose codex asks, with two principals or none."""
    environment = {"A2A_GRPC_PORT": "0", **({"A2A_TOKEN": OPERATOR, "BOB_TOKEN": BOB} if tokens else {})}
    principals = [{"name": "bob", "token_env": "BOB_TOKEN"}] if tokens else []
    asks = {"approval_policy": "on-request", **codex}
    async with running_agent(
        replace(setup, codex=asks, config={"principals": principals}, environment=environment)
    ) as agent:
        yield agent


async def sent(client: OwnClient | Peer, message: SendMessageRequest, *, streaming: bool = False) -> Seen:
    """Send a message and return what its task said last."""
    seen = Seen()
    used = client.streaming if streaming else client.blocking
    with anyio.fail_after(HANG_S):
        async for event in used.send_message(message):
            seen.take(event)
    return seen


def polled(text: str, context_id: str = "") -> SendMessageRequest:
    """Return a request whose sender does not wait."""
    message = request(text, context_id)
    message.configuration.CopyFrom(SendMessageConfiguration(return_immediately=True))
    return message


def answer_to(asked: Seen, words: str) -> SendMessageRequest:
    parts = [Part(text=words)]
    message = Message(role=Role.ROLE_USER, message_id=str(uuid.uuid4()), task_id=asked.task_id, parts=parts)
    return SendMessageRequest(message=message)


def assert_refused(seen: Seen, asked: Seen, state: int = REJECTED) -> None:
    """Check that a message was refused because of an open question, and that its status tells how to answer."""
    assert (seen.state, plain(seen.metadata[FAILURE])["code"]) == (state, "questionOpen")
    assert seen.task_id != asked.task_id
    assert f"taskId {asked.task_id}" in seen.sentence
    assert "Answer `yes`" in seen.sentence


# --- Which message is an answer ---


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("transport", [each.value for each in TransportProtocol])
async def test_a_word_in_the_named_context_answers_and_any_other_message_returns(
    setup: AgentSetup, transport: str, streaming: bool
) -> None:
    async with asking_agent(setup) as agent, own_client(transport, agent.url, OPERATOR) as client:
        asked = await sent(client, request(wish(setup), "ctx"), streaming=streaming)
        assert asked.state == ASKING
        refused = await sent(client, request("yes, and what is the time?", "ctx"), streaming=streaming)
        assert_refused(refused, asked)
        assert not outside_file(setup).exists()
        assert (await sent(client, request("yes", "ctx"), streaming=streaming)).state == COMPLETED
        assert outside_file(setup).exists()
        assert {each.id for each in await client.list("ctx")} == {asked.task_id, refused.task_id}


async def test_a_word_without_a_context_is_refused_and_can_be_sent_later(setup: AgentSetup) -> None:
    async with asking_agent(setup) as agent, peer(agent.url, OPERATOR) as client:
        asked = await sent(client, request(wish(setup)))
        bare = request("yes")
        for message in (bare, bare, request("hello")):
            assert_refused(await sent(client, message), asked)
        assert not outside_file(setup).exists()
        assert (await sent(client, answer_to(asked, "no"))).state == COMPLETED
        assert_refused(await sent(client, bare), asked)
        assert (await sent(client, request("yes"))).answer == "You said: yes"
        assert not outside_file(setup).exists()


async def test_a_word_of_another_principal_is_a_message_in_its_own_context(setup: AgentSetup) -> None:
    async with (
        asking_agent(setup) as agent,
        peer(agent.url, OPERATOR) as client,
        peer(agent.url, BOB) as bob,
    ):
        asked = await sent(client, request(wish(setup), "ctx"))
        assert (await sent(bob, request("yes", "ctx"))).answer == "You said: yes"
        assert (await client.get(asked.task_id)).state == ASKING
        assert not outside_file(setup).exists()


async def test_a_word_of_an_unknown_caller_needs_the_task_id(setup: AgentSetup) -> None:
    async with asking_agent(setup, tokens=False) as agent, peer(agent.url) as client:
        asked = await sent(client, request(wish(setup), "ctx"))
        assert_refused(await sent(client, request("yes", "ctx")), asked)
        assert not outside_file(setup).exists()
        assert (await sent(client, answer_to(asked, "yes"))).state == COMPLETED
        assert outside_file(setup).exists()


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_same_holds_in_a2a_0_3(setup: AgentSetup, streaming: bool) -> None:
    async with (
        asking_agent(setup) as agent,
        httpx.AsyncClient(base_url=agent.url, timeout=HANG_S, headers={"Authorization": f"Bearer {OPERATOR}"}) as http,
    ):

        async def say(text: str, **ids: str) -> str:
            message = {"kind": "message", "role": "user", "messageId": str(uuid.uuid4()), **ids}
            params = {"message": {**message, "parts": [{"kind": "text", "text": text}]}}
            method = "message/stream" if streaming else "message/send"
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return (await http.post("/", json=body)).text

        assert '"state":"input-required"' in (await say(wish(setup), contextId="ctx")).replace(" ", "")
        refused = await say("what is the time?", contextId="ctx")
        assert '"state":"rejected"' in refused.replace(" ", "")
        assert "send a message with taskId" in refused
        assert not outside_file(setup).exists()
        assert '"state":"completed"' in (await say("yes", contextId="ctx")).replace(" ", "")
        assert outside_file(setup).exists()


async def test_a_repeated_word_gets_the_result_of_the_first(setup: AgentSetup) -> None:
    async with asking_agent(setup) as agent, peer(agent.url, OPERATOR) as client:
        asked = await sent(client, request(wish(setup), "ctx"))
        word, states = request("yes", "ctx"), list[tuple[str, int]]()

        async def say() -> None:
            seen = await sent(client, word)
            states.append((seen.task_id, seen.state))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(say)
            tasks.start_soon(say)
        await say()
        assert states == [(asked.task_id, COMPLETED)] * 3
        word.message.parts[0].text = "no"
        with pytest.raises(InvalidParamsError, match="was used for another message"):
            await sent(client, word)


async def test_a_word_after_the_question_has_expired_is_a_message(setup: AgentSetup) -> None:
    async with asking_agent(setup, question_timeout_s=1) as agent, peer(agent.url, OPERATOR) as client:
        asked = await sent(client, request(wish(setup), "ctx"))
        assert (await client.finished(asked.task_id)).state == COMPLETED
        assert (await sent(client, request("yes", "ctx"))).answer == "You said: yes"
        assert not outside_file(setup).exists()


# --- Messages that wait when the question is asked ---


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_queued_message_returns_when_the_turn_asks(setup: AgentSetup, streaming: bool) -> None:
    async with asking_agent(setup) as agent, peer(agent.url, OPERATOR) as client:
        first = await sent(client, polled(wish(setup, {"say": "I begin.", "run": "sleep 1"}), "ctx"))
        # Its sender waits, so that it would hang until somebody answers.
        waiting = await sent(client, request("yes", "ctx"), streaming=streaming)
        asked = await client.get(first.task_id)
        assert asked.state == ASKING
        assert_refused(waiting, asked)
        assert not outside_file(setup).exists()


async def test_a_polled_message_keeps_its_place_and_says_what_it_waits_for(setup: AgentSetup) -> None:
    async with asking_agent(setup) as agent, peer(agent.url, OPERATOR) as client:
        first = await sent(client, polled(wish(setup, {"say": "I begin.", "run": "sleep 1"}), "ctx"))
        queued = await sent(client, polled("one", "ctx"))
        asked = await eventually_asking(client, first)
        later = await sent(client, polled("two", "ctx"))
        for each in (await client.get(queued.task_id), later):
            assert each.state == SUBMITTED
            assert f"taskId {asked.task_id}" in each.sentence
            assert "Answer `yes`" in each.sentence
        assert (await sent(client, request("no", "ctx"))).state == COMPLETED
        ended = [await client.finished(each.task_id) for each in (queued, later)]
        assert [each.answer for each in ended] == ["You said: one", "You said: two"]


async def eventually_asking(client: Peer, begun: Seen) -> Seen:
    """Return a task when it asks a question."""

    async def asking() -> Seen | None:
        seen = await client.get(begun.task_id)
        return seen if seen.state == ASKING else None

    return await eventually(asking)


async def test_a_message_that_joined_the_turn_returns_when_it_asks(setup: AgentSetup) -> None:
    async with asking_agent(setup, mid_turn="steer") as agent, peer(agent.url, OPERATOR) as client:
        first = await sent(client, polled(script({"say": "I begin.", "run": "sleep 1"}, {"say": "Not this."}), "ctx"))
        await eventually(lambda: agent.commands("1"))
        follower = await sent(client, polled("and this", "ctx"))
        joined = await sent(client, request(wish(setup), "ctx"), streaming=True)
        asked = await client.get(first.task_id)
        assert_refused(joined, asked, CANCELED)
        assert f"Task {asked.task_id} already received its text" in joined.sentence
        assert f"taskId {asked.task_id}" in (await client.get(follower.task_id)).sentence
        assert (await sent(client, request("yes", "ctx"))).state == COMPLETED
        assert (await client.finished(follower.task_id)).answer == "It is done."
        assert outside_file(setup).exists()


async def test_only_an_interrupting_message_replaces_the_question(setup: AgentSetup) -> None:
    async with asking_agent(setup) as agent, peer(agent.url, OPERATOR) as client:
        asked = await sent(client, request(wish(setup), "ctx"))
        for mode in ("queue", "steer"):
            # A message with options for its own turn is no answer.
            assert_refused(await sent(client, with_mid_turn("yes", mode)), asked)
        # The model runs the last script that it finds in the message.
        replacing = await sent(client, with_mid_turn(script({"say": "Fine."}), "interrupt"))
        assert (replacing.state, (await client.get(asked.task_id)).state) == (COMPLETED, CANCELED)
        assert not outside_file(setup).exists()


def with_mid_turn(text: str, mode: str) -> SendMessageRequest:
    """Return a message that chooses what happens if another turn runs."""
    message = request(text, "ctx")
    ParseDict({TURN: {"midTurn": mode}}, message.message.metadata)
    return message
