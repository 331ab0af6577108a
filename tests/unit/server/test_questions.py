"""Answered questions, and which messages answer a question. Covers `server.handler`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.server.tasks import InMemoryTaskStore, TaskManager
from a2a.types import Message, Part, Role, SendMessageRequest, Task, TaskState, TaskStatus

from codex_workspace.common.a2a_terms import AuthenticatedUser
from codex_workspace.server.card import agent_card
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.server.questions import MAX_REMEMBERED_TASKS, AnsweredQuestions
from codex_workspace.storage.deliveries import DeliveryKey
from codex_workspace.storage.store import Store, open_store
from tests.unit.server.test_app import OPTIONS, status_of

ASKS = TaskState.TASK_STATE_INPUT_REQUIRED


def asking(at_ms: int, task_id: str = "task") -> Task:
    status = TaskStatus(state=ASKS, message=Message(message_id="question"))
    status.timestamp.FromMilliseconds(at_ms)
    return Task(id=task_id, status=status)


def without_message(task: Task) -> Task:
    """Return the task as the SDK has it between an answer and the executor's next status."""
    copy = Task()
    copy.CopyFrom(task)
    manager = TaskManager(InMemoryTaskStore(), ServerCallContext(), task.id, None, None)
    return manager.update_with_message(Message(), copy)


def test_the_first_message_is_the_answer_until_the_next_question() -> None:
    answered = AnsweredQuestions()
    assert answered.claim(asking(1), "yes-1")
    assert not answered.claim(asking(1), "yes-2")
    assert answered.claim(asking(1), "yes-1"), "the same message again"
    assert answered.claim(asking(2), "yes-2")


def test_a_question_is_answered_with_and_without_its_message() -> None:
    answered = AnsweredQuestions()
    answered.claim(asking(1), "yes")
    assert answered.is_answered("task", asking(1).status)
    assert answered.is_answered("task", without_message(asking(1)).status)
    assert not answered.claim(without_message(asking(1)), "yes-2")
    assert not answered.is_answered("task", asking(2).status)
    assert not answered.is_answered("another", asking(1).status)
    working = asking(1).status
    working.state = TaskState.TASK_STATE_WORKING
    assert not answered.is_answered("task", working)


def test_a_question_without_a_time_accepts_every_answer() -> None:
    answered = AnsweredQuestions()
    task = Task(id="task", status=TaskStatus(state=ASKS))
    assert answered.claim(task, "yes-1")
    assert answered.claim(task, "yes-2")
    assert not answered.is_answered("task", task.status)


def test_a_rejected_message_is_no_answer() -> None:
    answered = AnsweredQuestions()
    answered.claim(asking(1), "rejected")
    answered.release("task", "another")
    assert not answered.claim(asking(1), "next")
    answered.release("task", "rejected")
    assert answered.claim(asking(1), "next")


def test_a_limited_number_of_tasks_is_remembered() -> None:
    answered = AnsweredQuestions()
    for number in range(MAX_REMEMBERED_TASKS + 1):
        assert answered.claim(asking(1, str(number)), "m")
    assert answered.claim(asking(1, "0"), "other"), "forgotten"
    assert not answered.claim(asking(1, str(MAX_REMEMBERED_TASKS)), "other")


# --- Answers without a task ID ---


class Asks(AgentExecutor):
    """Asks about each message, and completes its task when there is an answer."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        state = TaskState.TASK_STATE_COMPLETED
        if context.current_task is None:
            state = ASKS
            await event_queue.enqueue_event(Task(id=context.task_id, context_id=context.context_id))
        await event_queue.enqueue_event(status_of(context, state))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError


@asynccontextmanager
async def asking_handler(path: Path, *, has_tokens: bool) -> AsyncIterator[tuple[IdempotentHandler, Store]]:
    async with open_store(f"sqlite:///{path / 'store.sqlite3'}") as store:
        options = replace(OPTIONS, tokens={"alice": "wonderland"} if has_tokens else {})
        handler = IdempotentHandler(Asks(), store, None, agent_card(options), one_main_context=True)
        yield handler, store
        await handler.aclose()


async def say(handler: IdempotentHandler, words: str, context_id: str = "ctx", **state: dict[str, str]) -> Task:
    message = Message(role=Role.ROLE_USER, message_id=f"{words} {context_id}", context_id=context_id)
    message.parts.append(Part(text=words))
    context = ServerCallContext(user=AuthenticatedUser("alice"), state={**state})
    task = await handler.on_message_send(SendMessageRequest(message=message), context)
    assert isinstance(task, Task)
    return task


async def test_a_word_is_stored_as_the_answer_of_the_task_that_asks(tmp_path: Path) -> None:
    async with asking_handler(tmp_path, has_tokens=True) as (handler, store):
        asking = await say(handler, "hello")
        for _ in range(2):
            done = await say(handler, "yes", headers={})
            assert (done.id, done.status.state) == (asking.id, TaskState.TASK_STATE_COMPLETED)
        stored = await store.deliveries.request(DeliveryKey("alice", "yes ctx"))
        # After a restart, only the task's ID tells an answer from a message with a turn of its own.
        assert stored is not None
        assert stored.message.task_id == asking.id


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_a_word_of_an_unidentified_sender_is_a_new_message(tmp_path: Path, has_tokens: bool) -> None:
    """Without tokens, or from the agent itself: the platform's messages have one principal, but many senders."""
    async with asking_handler(tmp_path, has_tokens=has_tokens) as (handler, _):
        asking = await say(handler, "hello")
        word = await (say(handler, "yes") if has_tokens else say(handler, "yes", headers={}))
        assert word.id != asking.id


async def test_a_word_answers_only_the_one_question_of_its_context(tmp_path: Path) -> None:
    async with asking_handler(tmp_path, has_tokens=True) as (handler, _):
        asking = [await say(handler, "hello", "ctx"), await say(handler, "again", "ctx")]
        elsewhere = await say(handler, "hello", "elsewhere")
        assert (await say(handler, "yes", "ctx", headers={})).id not in [each.id for each in asking]
        assert (await say(handler, "yes", "elsewhere", headers={})).id == elsewhere.id
