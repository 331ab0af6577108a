"""The verdict of a chaos run reports each kind of fault, and passes a run without losses."""

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from codex_workspace.common.values import JsonObject
from tests.chaos.plan import MessageKind, Plan, make_plan
from tests.chaos.strikes import StrikeRecord
from tests.chaos.task_responses import Answer, ProtocolFault, TaskReader, Unavailable
from tests.chaos.verdict import RESUMED_ANSWER, judge, judge_database, judge_exits, judge_list, judge_log, judge_strikes

PLAN = make_plan(1, 6, 0)
FAILED = Answer("task", "failed", "", "The model refused.", "badRequest")


def answers_to(plan: Plan) -> dict[int, Sequence[Answer]]:
    """Return the expected answers, each twice."""
    ends = [
        FAILED if message.answer is None else Answer(f"task-{message.number}", "completed", message.answer, "", "")
        for message in plan.messages
    ]
    return {number: [end, end] for number, end in enumerate(ends)}


def memories_of(plan: Plan) -> dict[str, str]:
    """Return the expected histories of the threads."""
    return {
        context: "\n".join(f"user: {message.text}" for message in plan.messages if message.context_id == context)
        for context in plan.contexts
    }


def wrong(answers: dict[int, Sequence[Answer]], memories: dict[str, str] | None = None) -> list[str]:
    return list(judge(PLAN, answers, memories_of(PLAN) if memories is None else memories))


def test_a_run_without_losses_passes() -> None:
    assert wrong(answers_to(PLAN)) == []


def test_a_resumed_turn_passes() -> None:
    resumed = Answer("task", "completed", RESUMED_ANSWER, "", "")
    assert wrong(answers_to(PLAN) | {0: [resumed, resumed]}) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"task_id": "another"},
        {"text": "another"},
        {"state": "failed", "failure": "cutOff"},
    ],
)
def test_two_different_answers_are_reported(changed: dict[str, str]) -> None:
    answers = answers_to(PLAN)
    (message,) = [each for each in PLAN.messages if each.kind is not MessageKind.REFUSED][:1]
    first = answers[message.number][0]
    (finding,) = wrong(answers | {message.number: [first, replace(first, **changed)]})
    assert message.name in finding
    assert "2 different answers" in finding


def test_a_message_without_an_answer_is_reported() -> None:
    answers = answers_to(PLAN)
    del answers[3]
    (finding,) = wrong(answers)
    assert "message 0003." in finding


def test_a_message_that_was_not_sent_again_is_reported() -> None:
    answers = answers_to(PLAN)
    (finding,) = wrong(answers | {0: answers[0][:1]})
    assert "1 answers" in finding


def test_a_strike_that_did_not_happen_is_reported() -> None:
    plan = make_plan(1, 6, 2)
    done = [StrikeRecord(1.0, strike, "") for strike in plan.strikes]
    assert list(judge_strikes(plan, done)) == []
    assert list(judge_strikes(plan, done[1:])) == ["1 of 2 strikes happened"]


@pytest.mark.parametrize(
    "end",
    [
        Answer("task", "completed", "answer 0009.", "", ""),
        Answer("task", "failed", "", "A mistake.", "internal"),
        Answer("task", "canceled", "", "", ""),
    ],
)
def test_an_unexpected_final_state_is_reported(end: Answer) -> None:
    assert len(wrong(answers_to(PLAN) | {0: [end, end]})) == 1


def test_a_message_missing_doubled_or_misplaced_in_a_thread_is_reported() -> None:
    memories = memories_of(PLAN)
    first = next(message for message in PLAN.messages if message.kind is not MessageKind.REFUSED)
    context, line = first.context_id, f"user: {first.text}"
    other = next(each for each in PLAN.contexts if each != context)
    for changed in (
        {context: f"{memories[context]}\n{line}"},
        {context: memories[context].replace(line, "")},
        {other: f"{memories[other]}\n{line}"},
    ):
        (finding,) = wrong(answers_to(PLAN), memories | changed)
        assert first.name in finding


def test_an_open_delivery_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite3"
    with sqlite3.connect(file) as database:
        database.execute("create table deliveries (message_id text, state text, task_id text)")
        database.execute("create table tasks (id text, state text)")
        for message in PLAN.messages:
            row = (message.message_id, "acknowledged", f"task-{message.number}")
            database.execute("insert into deliveries values (?, ?, ?)", row)
            database.execute("insert into tasks values (?, 'TASK_STATE_COMPLETED')", (f"task-{message.number}",))
    assert list(judge_database(file, PLAN)) == []
    with sqlite3.connect(file) as database:
        database.execute("update tasks set state = 'TASK_STATE_WORKING' where id = 'task-0'")
        database.execute("update deliveries set state = 'started' where task_id = 'task-1'")
        database.execute("delete from deliveries where task_id = 'task-2'")
    assert len(list(judge_database(file, PLAN))) == 4
    database.close()


def test_an_agent_that_crashes_is_reported() -> None:
    assert list(judge_exits([-9, 3, -9, 0])) == []
    assert len(list(judge_exits([-9, 1, -9]))) == 2
    assert len(list(judge_exits([-9, 2, 0]))) == 1
    assert list(judge_exits([-9, 2, 0], postgresql=True)) == []
    assert list(judge_log("all is well")) == []
    assert len(list(judge_log("Traceback (most recent call last)"))) == 1


def test_a_task_that_is_missing_doubled_or_too_many_in_the_list_is_reported() -> None:
    expected = [f"task-{number}" for number in range(len(PLAN.messages) + len(PLAN.reviews))]
    assert list(judge_list(PLAN, expected)) == []
    for listed in (expected[1:], [*expected, "another"], [*expected[1:], expected[1]]):
        assert len(list(judge_list(PLAN, listed))) == 1


TASK: JsonObject = {"id": "t", "status": {"state": "TASK_STATE_WORKING"}}
OLD_TASK: JsonObject = {"kind": "task", "id": "t", "status": {"state": "working"}}
PIECE: JsonObject = {"artifact": {"artifactId": "answer", "parts": [{"text": "one "}]}}
MORE: JsonObject = {"artifact": {"artifactId": "answer", "parts": [{"text": "two"}]}, "append": True}
END: JsonObject = {"status": {"state": "TASK_STATE_COMPLETED"}}
OLD_END: JsonObject = {"kind": "status-update", "status": {"state": "completed"}}
NEW_EVENTS: list[JsonObject] = [
    {"task": TASK},
    {"artifactUpdate": PIECE},
    {"artifactUpdate": MORE},
    {"statusUpdate": END},
]
OLD_EVENTS: list[JsonObject] = [
    OLD_TASK,
    {"kind": "artifact-update", **PIECE},
    {"kind": "artifact-update", **MORE},
    OLD_END,
]


def test_events_without_an_envelope_are_read_too() -> None:
    reader = TaskReader()
    for event in NEW_EVENTS:
        reader.take_event(event)
    assert reader.answer == Answer("t", "completed", "one two", "", "")
    for code, raised in ((500, Unavailable), (400, ProtocolFault)):
        with pytest.raises(raised):
            TaskReader().take_event({"error": {"code": code}})


@pytest.mark.parametrize("events", [NEW_EVENTS, OLD_EVENTS])
def test_events_of_both_versions_give_the_same_answer(events: list[JsonObject]) -> None:
    reader = TaskReader()
    for event in events:
        assert reader.answer is None
        reader.take({"result": event})
    assert reader.answer == Answer("t", "completed", "one two", "", "")
    with pytest.raises(ProtocolFault, match="behind the end"):
        reader.take({"result": events[1]})
