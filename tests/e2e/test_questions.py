"""Questions to a person over plain A2A: a task becomes `input-required`, and the next message answers it."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import pytest
from a2a.client import A2AClientError
from a2a.types import Part, TaskState
from a2a.utils.errors import A2AError
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.model_requests import Message, Output
from codex_workspace.tasks.approval_answers import QUESTION_LOST
from tests.e2e.agent_process import AgentProcess, AgentSetup, running_agent
from tests.e2e.client import Peer, Seen, peer, request, script
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow

COMPLETED, CANCELED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_CANCELED
ASKING, WORKING = TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_WORKING


def text(words: str) -> Part:
    return Part(text=words)


def data(**content: object) -> Part:
    return Part(data=ParseDict(content, Value()))


def with_approvals(setup: AgentSetup, **codex: object) -> AgentSetup:
    """Return the setup of an agent whose codex asks for approval before it leaves its sandbox."""
    return replace(setup, codex={"approval_policy": "on-request", **codex})


def outside_file(setup: AgentSetup) -> Path:
    """Return a file that sandboxed commands cannot write."""
    return setup.root / "outside.txt"


def escalation_script(setup: AgentSetup, *, after: str = "It is done.") -> str:
    """Return a message with one command outside the sandbox."""
    return script({"run": f"echo made > {outside_file(setup)}", "escalate": True}, {"say": after})


def model_received(model: ScriptedModel, words: str) -> bool:
    """Whether a user message with these words reached the model."""
    messages = [each for request in model.requests for each in request.input if isinstance(each, Message)]
    return any(each.role == "user" and words in each.text for each in messages)


@asynccontextmanager
async def open_question(
    setup: AgentSetup, message: str, *, streaming: bool
) -> AsyncIterator[tuple[AgentProcess, Peer, Seen]]:
    """Run an agent and send it a message that causes a question."""
    async with running_agent(setup) as agent, peer(agent.url) as client:
        send = client.ask if streaming else client.ask_blocking
        with anyio.fail_after(HANG_S):
            seen = await send(message, "ctx")
        assert seen.state == ASKING, seen
        yield agent, client, seen


@pytest.mark.versions
@pytest.mark.parametrize("streaming", [False, True])
async def test_an_approved_command_runs_outside_the_sandbox(setup: AgentSetup, streaming: bool) -> None:
    async with open_question(with_approvals(setup), escalation_script(setup), streaming=streaming) as (_, client, seen):
        assert f"echo made > {outside_file(setup)}" in seen.sentence
        assert seen.question["kind"] == "command"
        assert "approve" in str(seen.question["choices"])
        assert not outside_file(setup).exists()
        done = await client.answer(seen, text("Yes, please."), streaming=streaming)
        assert (done.state, done.answer) == (COMPLETED, "It is done.")
        assert outside_file(setup).read_text() == "made\n"


@pytest.mark.versions
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_decline_with_a_reason_reaches_the_model(
    setup: AgentSetup, model: ScriptedModel, streaming: bool
) -> None:
    async with open_question(with_approvals(setup), escalation_script(setup), streaming=streaming) as (_, client, seen):
        done = await client.answer(seen, text("No, write it to the workspace instead."), streaming=streaming)
        assert done.state == COMPLETED
        assert not outside_file(setup).exists()
        assert model_received(model, "write it to the workspace instead")


async def test_a_file_does_not_answer_a_question(setup: AgentSetup) -> None:
    async with open_question(with_approvals(setup), escalation_script(setup), streaming=False) as (_, client, seen):
        again = await client.answer(seen, Part(raw=b"yes", media_type="text/plain", filename="answer.txt"))
        assert (again.state, "A file cannot be an answer" in again.sentence) == (ASKING, True)
        assert (await client.answer(again, text("no"))).state == COMPLETED


async def test_a_data_part_answers_a_question(setup: AgentSetup) -> None:
    async with open_question(with_approvals(setup), escalation_script(setup), streaming=False) as (_, client, seen):
        wrong = await client.answer(seen, data(decision="approve", questionId="another"))
        assert (wrong.state, "another question" in wrong.sentence) == (ASKING, True)
        done = await client.answer(wrong, data(decision="approve", questionId=wrong.question["questionId"]))
        assert done.state == COMPLETED
        assert outside_file(setup).exists()


async def test_an_unclear_answer_is_asked_again(setup: AgentSetup) -> None:
    async with open_question(with_approvals(setup), escalation_script(setup), streaming=False) as (_, client, seen):
        again = await client.answer(seen, text("What would that change?"))
        assert again.state == ASKING
        assert again.question == seen.question
        assert not outside_file(setup).exists()
        assert (await client.answer(again, text("no"))).state == COMPLETED
        assert not outside_file(setup).exists()


async def test_an_unanswered_question_is_declined_after_its_time_out(setup: AgentSetup) -> None:
    quick = with_approvals(setup, question_timeout_s=1)
    async with open_question(quick, escalation_script(setup), streaming=False) as (_, client, seen):
        done = await client.finished(seen.task_id)
        assert (done.state, outside_file(setup).exists()) == (COMPLETED, False)


@pytest.mark.parametrize("streaming", [False, True])
async def test_canceling_a_waiting_task_frees_its_context(setup: AgentSetup, streaming: bool) -> None:
    async with open_question(with_approvals(setup), escalation_script(setup), streaming=streaming) as (_, client, seen):
        assert (await client.cancel(seen.task_id)).state == CANCELED
        assert not outside_file(setup).exists()
        assert (await client.ask("and now", "ctx")).answer == "You said: and now"


PATCH = "*** Begin Patch\n*** Add File: new.txt\n+made by a patch\n*** End Patch"


@pytest.mark.versions
@pytest.mark.parametrize("word", ["approve", "decline"])
async def test_a_patch_is_shown_and_applied_only_if_approved(setup: AgentSetup, word: str) -> None:
    strict = with_approvals(setup, approval_policy="untrusted")
    async with open_question(strict, script({"patch": PATCH}, {"say": "So be it."}), streaming=True) as (
        _,
        client,
        seen,
    ):
        assert seen.question["kind"] == "patch"
        assert "made by a patch" in seen.sentence
        done = await client.answer(seen, text(word), streaming=True)
        assert (done.state, done.answer) == (COMPLETED, "So be it.")
        assert (setup.workspace / "new.txt").exists() == (word == "approve")
        assert ("patch-1" in done.artifacts) == (word == "approve")


async def test_an_approval_for_the_session_is_not_asked_for_again(setup: AgentSetup) -> None:
    strict = with_approvals(setup, approval_policy="untrusted")
    two_escalations_script = script({"run": "touch one"}, {"run": "touch one"}, {"say": "Twice."})
    async with open_question(strict, two_escalations_script, streaming=False) as (_, client, seen):
        done = await client.answer(seen, text("approve for this session"))
        assert (done.state, done.answer) == (COMPLETED, "Twice.")


async def test_several_questions_are_asked_one_at_a_time(setup: AgentSetup) -> None:
    strict = with_approvals(setup, approval_policy="untrusted")
    several = script({"run": ["touch one", "touch two"]}, {"say": "Both."})
    async with open_question(strict, several, streaming=False) as (_, client, seen):
        # The order of the questions is codex's.
        first, other = ("one", "two") if "touch one" in seen.sentence else ("two", "one")
        second = await client.answer(seen, text("yes"))
        assert (second.state, f"touch {other}" in second.sentence) == (ASKING, True)
        assert second.question["questionId"] != seen.question["questionId"]
        done = await client.answer(second, text("no"))
        assert (done.state, done.answer) == (COMPLETED, "Both.")
        assert [path.name for path in setup.workspace.glob("*")] == [first]


async def test_an_open_question_does_not_block_other_contexts(setup: AgentSetup) -> None:
    single_slot = replace(with_approvals(setup), limits={"max_running_turns": 1})
    async with open_question(single_slot, escalation_script(setup), streaming=False) as (_, client, seen):
        assert (await client.ask("hello", "elsewhere")).state == COMPLETED
        assert (await client.answer(seen, text("no"))).state == COMPLETED


@pytest.mark.parametrize("victim", ["codex", "agent", "stopped"])
async def test_a_question_lost_with_its_process_is_asked_again(setup: AgentSetup, victim: str) -> None:
    strict = with_approvals(setup)
    # The scripted model runs the script again for the message that continues the turn.
    async with open_question(strict, escalation_script(setup), streaming=False) as (agent, client, seen):
        if victim == "codex":
            agent.codex().kill()
            assert (await client.finished(seen.task_id)).state == COMPLETED
            return
        if victim == "agent":
            agent.process.kill()
            await agent.ended()
        else:
            assert await agent.stop() == 0
    async with running_agent(strict) as agent, peer(agent.url) as client:
        done = await client.finished(seen.task_id)
        assert done.state == COMPLETED
        history = await client.history(seen.task_id)
        assert QUESTION_LOST in history
        assert not outside_file(setup).exists()


async def test_an_answered_task_resumes_after_the_agent_was_killed(setup: AgentSetup) -> None:
    message = script(
        {"run": f"echo made > {outside_file(setup)}", "escalate": True}, {"run": "sleep 86425"}, {"say": "done"}
    )
    async with open_question(with_approvals(setup), message, streaming=False) as (agent, client, seen):

        async def answer() -> None:
            with suppress(A2AClientError, httpx.HTTPError):
                await client.answer(seen, text("Yes, please."))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer)
            await eventually(lambda: agent.commands("86425"))
            agent.process.kill()
            await agent.ended()
    async with running_agent(with_approvals(setup)) as agent, peer(agent.url) as client:
        assert (await client.finished(seen.task_id)).state == COMPLETED


# --- Other kinds of questions ---

PICK = {
    "name": "request_user_input",
    "arguments": {
        "questions": [
            {
                "id": "colour",
                "header": "Colour",
                "question": "Which colour?",
                "options": [
                    {"label": "Red", "description": "like a rose"},
                    {"label": "Blue", "description": "like the sky"},
                ],
            }
        ]
    },
}
NETWORK = {
    "name": "request_permissions",
    "arguments": {"reason": "to look it up", "permissions": {"network": {"enabled": True}}},
}


@pytest.mark.versions
@pytest.mark.parametrize("answer", [text("2"), text("Blue"), data(answers={"colour": "Blue"})], ids=str)
async def test_the_model_s_own_question_is_answered(setup: AgentSetup, model: ScriptedModel, answer: Part) -> None:
    async with open_question(with_approvals(setup), script({"tool": PICK}, {"say": "So be it."}), streaming=False) as (
        _,
        client,
        seen,
    ):
        assert seen.question["kind"] == "question"
        assert all(word in seen.sentence for word in ("Which colour?", "Red", "Blue", "like the sky"))
        assert "nder-development" not in await client.history(seen.task_id)
        done = await client.answer(seen, answer)
        assert (done.state, done.answer) == (COMPLETED, "So be it.")
        outputs = [item.text for item in model.requests[-1].input if isinstance(item, Output)]
        assert any("Blue" in each and "Red" not in each for each in outputs), outputs


@pytest.mark.versions
@pytest.mark.parametrize("word", ["yes", "no"])
async def test_permissions_are_granted_as_far_as_they_are_approved(
    setup: AgentSetup, model: ScriptedModel, word: str
) -> None:
    async with open_question(with_approvals(setup), script({"tool": NETWORK}, {"say": "Well."}), streaming=False) as (
        _,
        client,
        seen,
    ):
        assert seen.question["kind"] == "permission"
        assert "to look it up" in seen.sentence
        done = await client.answer(seen, text(word))
        assert (done.state, done.answer) == (COMPLETED, "Well.")
        (output,) = [item.text for item in model.requests[-1].input if isinstance(item, Output)]
        assert ('"enabled":true' in output.replace(" ", "")) == (word == "yes"), output


@pytest.mark.versions
async def test_the_policy_never_asks_no_question(setup: AgentSetup, model: ScriptedModel) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        with anyio.fail_after(HANG_S):
            seen = await client.ask(script({"tool": [PICK, NETWORK]}, {"say": "Alone."}), "ctx")
        assert (seen.state, seen.answer) == (COMPLETED, "Alone.")


# --- Concurrent answers ---


def two_escalations_script(setup: AgentSetup) -> str:
    """Return a message with two commands outside the sandbox, the second after a second."""
    first, second = (setup.root / name for name in ("first", "second"))
    touch = [{"run": f"touch {file}; sleep 1", "escalate": True} for file in (first, second)]
    return script(*touch, {"say": "Both are there."})


def note_texts(seen: Seen) -> list[str]:
    """Return the texts of a task's notes."""
    return ["".join(part.text for part in note.status.message.parts) for note in seen.notes]


async def collect_answer(client: Peer, seen: Seen, words: str, answers: list[Seen | A2AError]) -> None:
    try:
        answers.append(await client.answer(seen, text(words)))
    except A2AError as error:
        answers.append(error)


@pytest.mark.parametrize("pause_s", [0, 0.02])
async def test_a_second_yes_does_not_answer_an_unseen_question(setup: AgentSetup, pause_s: float) -> None:
    async with open_question(with_approvals(setup), two_escalations_script(setup), streaming=False) as (
        _,
        client,
        seen,
    ):
        answers: list[Seen | A2AError] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect_answer, client, seen, "yes", answers)
            await anyio.sleep(pause_s)
            tasks.start_soon(collect_answer, client, seen, "yes", answers)
        (refused,) = [each for each in answers if isinstance(each, A2AError)]
        (again,) = [each for each in answers if isinstance(each, Seen)]
        # Which one depends on whether the task works again already.
        assert re.search("asks another question|does not wait for input", str(refused))
        assert (again.state, (setup.root / "first").exists(), (setup.root / "second").exists()) == (ASKING, True, False)
        done = await client.answer(again, text("yes"))
        assert (done.state, done.answer) == (COMPLETED, "Both are there.")


async def test_two_answers_to_the_last_question_leave_the_task_completed(setup: AgentSetup) -> None:
    async with open_question(with_approvals(setup), escalation_script(setup), streaming=False) as (_, client, seen):
        answers: list[Seen | A2AError] = []
        async with anyio.create_task_group() as tasks:
            for words in ("yes", "no"):
                tasks.start_soon(collect_answer, client, seen, words, answers)
        assert [each.state for each in answers if isinstance(each, Seen)] == [COMPLETED]
        assert (await client.get(seen.task_id)).state == COMPLETED


async def test_a_repeated_answer_gets_its_result(setup: AgentSetup) -> None:
    async with open_question(with_approvals(setup), escalation_script(setup), streaming=False) as (_, client, seen):
        word = request("yes")
        word.message.task_id = seen.task_id
        states: list[int] = []

        async def say() -> None:
            states.extend([Seen().take(event).state async for event in client.blocking.send_message(word)])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(say)
            tasks.start_soon(say)
        assert states == [COMPLETED, COMPLETED]


async def test_an_answer_to_a_canceled_task_is_rejected_with_a_reason(setup: AgentSetup) -> None:
    async with open_question(with_approvals(setup), escalation_script(setup), streaming=False) as (_, client, seen):
        answers: list[Seen | A2AError] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.cancel, seen.task_id)
            tasks.start_soon(collect_answer, client, seen, "yes", answers)
        (answer,) = answers
        assert "Internal error" not in str(answer)
        assert (await client.get(seen.task_id)).state in (CANCELED, COMPLETED)
