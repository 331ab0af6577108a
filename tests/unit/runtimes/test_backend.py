"""How an interrupted turn continues: all policies, all states of codex's record, all counts of deaths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.protocol.codex_events import MessageCompleted, TurnCompleted, TurnError
from codex_workspace.runtimes.backend import (
    CONTINUE_PROMPT,
    MAX_DEATHS,
    MAX_RESTARTS,
    RecoveryPolicy,
    TurnInput,
    TurnRecord,
    next_step,
    text_input,
)

WHY = "codex exited with code 137"
RESUME, RERUN, FAIL = RecoveryPolicy.RESUME, RecoveryPolicy.RERUN, RecoveryPolicy.FAIL

ENDS = [
    TurnCompleted("completed", None, MessageCompleted("item-1", "Done.", "final_answer")),
    TurnCompleted("completed", None, None),
    TurnCompleted("interrupted", None, None),
    TurnCompleted("failed", TurnError("It broke.", "unsettled", None, None), None),
]

FEW, ONE_TOO_MANY = range(MAX_DEATHS), range(MAX_DEATHS, MAX_DEATHS + 3)

INPUT = text_input("the message")

TABLE: list[tuple[RecoveryPolicy, TurnRecord, TurnInput | str]] = [
    (RESUME, TurnRecord.INTERRUPTED, text_input(CONTINUE_PROMPT)),
    (RESUME, TurnRecord.MISSING, INPUT),
    (RERUN, TurnRecord.INTERRUPTED, INPUT),
    (RERUN, TurnRecord.MISSING, INPUT),
    (FAIL, TurnRecord.INTERRUPTED, f"The turn was interrupted: {WHY}. Send the message again to continue."),
    (FAIL, TurnRecord.MISSING, INPUT),
]


def test_the_table_is_complete() -> None:
    assert {row[:2] for row in TABLE} == {(policy, found) for policy in RecoveryPolicy for found in TurnRecord}
    assert len(TABLE) == len(RecoveryPolicy) * len(TurnRecord)


@pytest.mark.parametrize("deaths", FEW)
@pytest.mark.parametrize(("policy", "found", "step"), TABLE)
def test_a_turn_without_an_end_continues_as_configured(
    policy: RecoveryPolicy, found: TurnRecord, step: TurnInput | str, deaths: int
) -> None:
    assert next_step(policy, found, INPUT, deaths, 0, WHY) == step


@pytest.mark.parametrize("deaths", ONE_TOO_MANY)
@pytest.mark.parametrize("found", TurnRecord)
@pytest.mark.parametrize("policy", RecoveryPolicy)
def test_a_message_fails_after_too_many_deaths_of_codex(policy: RecoveryPolicy, found: TurnRecord, deaths: int) -> None:
    sentence = f"Codex ended {deaths} times while it worked on this message, most recently: {WHY}."
    assert next_step(policy, found, INPUT, deaths, 0, WHY) == sentence


@pytest.mark.parametrize("deaths", [*FEW, *ONE_TOO_MANY])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("policy", RecoveryPolicy)
def test_a_recorded_end_is_used(policy: RecoveryPolicy, end: TurnCompleted, deaths: int) -> None:
    assert next_step(policy, end, INPUT, deaths, 0, WHY) == end


@given(
    st.sampled_from(RecoveryPolicy), st.lists(st.sampled_from(TurnRecord), min_size=MAX_DEATHS, max_size=MAX_DEATHS + 5)
)
def test_no_message_is_retried_forever(policy: RecoveryPolicy, records: list[TurnRecord]) -> None:
    steps = [next_step(policy, found, INPUT, deaths, 0, WHY) for deaths, found in enumerate(records, start=1)]
    assert len([step for step in steps if not isinstance(step, str)]) < MAX_DEATHS
    assert isinstance(steps[-1], str)


@pytest.mark.parametrize("policy", RecoveryPolicy)
@pytest.mark.parametrize("found", TurnRecord)
def test_a_message_fails_after_too_many_ends_of_the_agent(policy: RecoveryPolicy, found: TurnRecord) -> None:
    before = next_step(policy, found, INPUT, 0, MAX_RESTARTS - 1, WHY)
    assert before == next_step(policy, found, INPUT, 0, 0, WHY)
    sentence = next_step(policy, found, INPUT, 0, MAX_RESTARTS, WHY)
    assert isinstance(sentence, str)
    assert f"The agent ended {MAX_RESTARTS} times" in sentence
