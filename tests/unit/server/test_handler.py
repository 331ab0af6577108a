"""Snapshots of subscribers. Covers `common.a2a_terms`."""

import pytest
from a2a.types import (
    Artifact,
    Message,
    Part,
    Task,
    TaskArtifactUpdateEvent,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.a2a_terms import OFFSET
from codex_workspace.server.handler import Snapshot


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
