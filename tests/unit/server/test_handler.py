"""Snapshots of subscribers, and answered questions. Covers `common.a2a_terms`."""

import pytest
from a2a.server.context import ServerCallContext
from a2a.server.tasks import InMemoryTaskStore, TaskManager
from a2a.types import (
    Artifact,
    Message,
    Part,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.a2a_terms import OFFSET
from codex_workspace.server.handler import MAX_REMEMBERED_TASKS, AnsweredQuestions, Snapshot


def piece(text: str, offset: int | None = None) -> TaskArtifactUpdateEvent:
    """An update that begins the answer, or goes on after `offset` characters."""
    artifact = Artifact(artifact_id="answer", parts=[Part(text=text)])
    event = TaskArtifactUpdateEvent(artifact=artifact, append=offset is not None)
    if offset is not None:
        event.metadata[OFFSET] = offset
    return event


def note(message_id: str) -> TaskStatusUpdateEvent:
    return TaskStatusUpdateEvent(status=TaskStatus(message=Message(message_id=message_id)))


def told(*pieces: str) -> Task:
    """A task whose answer consists of some parts."""
    return Task(artifacts=[Artifact(artifact_id="answer", parts=[Part(text=piece) for piece in pieces])])


@given(st.lists(st.text(min_size=1), min_size=1), st.data())
def test_a_text_is_complete_wherever_a_reader_joins(pieces: list[str], data: st.DataObject) -> None:
    known = data.draw(st.integers(0, len(pieces)))
    since = data.draw(st.integers(0, known))
    snapshot, text = Snapshot(told(*pieces[:known])), "".join(pieces[:known])
    for number in range(since, len(pieces)):
        event = piece(pieces[number], len("".join(pieces[:number])) if number else None)
        if not snapshot.contains(event):
            text = text + pieces[number] if event.append else pieces[number]
    assert text == "".join(pieces)


def test_a_restarted_artifact_continues_from_its_new_start() -> None:
    snapshot = Snapshot(told("a long remark"))
    assert not snapshot.contains(piece("short"))
    assert not snapshot.contains(piece(" answer", 5))
    assert snapshot.contains(piece(" answer", 5))


@pytest.mark.parametrize("where", ["history", "status"])
def test_a_note_is_sent_once(where: str) -> None:
    said = Message(message_id="said")
    snapshot = Snapshot(Task(history=[said]) if where == "history" else Task(status=TaskStatus(message=said)))
    assert snapshot.contains(note("said"))
    assert not snapshot.contains(note("new"))
    assert snapshot.contains(note("new"))


def test_events_without_a_sequence_number_pass() -> None:
    snapshot = Snapshot(told("some"))
    assert not snapshot.contains(TaskStatusUpdateEvent(status=TaskStatus()))
    assert not snapshot.contains(TaskStatusUpdateEvent(status=TaskStatus()))
    unmarked = TaskArtifactUpdateEvent(artifact=Artifact(artifact_id="answer", parts=[Part(text="x")]), append=True)
    assert not snapshot.contains(unmarked)


# --- Answered questions ---

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
