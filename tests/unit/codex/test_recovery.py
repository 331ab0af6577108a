"""How a cut-off turn goes on: all policies, all that codex can know of the turn, all counts of deaths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.codex.recovery import (
    MAX_DEATHS,
    MAX_RESTARTS,
    AlreadyEnded,
    Continue,
    FailureCounts,
    GiveUp,
    RecoveryPolicy,
    SendAgain,
    Step,
    next_step,
)
from codex_workspace.protocol.codex_events import MessageCompleted, TurnCompleted, TurnError
from codex_workspace.runtimes.backend import CONTINUE_PROMPT, TurnRecord

WHY = "codex exited with code 137"
RESUME, RERUN, FAIL = RecoveryPolicy.RESUME, RecoveryPolicy.RERUN, RecoveryPolicy.FAIL

ENDS = [
    TurnCompleted("completed", None, MessageCompleted("item-1", "Done.", "final_answer")),
    TurnCompleted("completed", None, None),
    TurnCompleted("interrupted", None, None),
    TurnCompleted("failed", TurnError("It broke.", "unsettled", None, None), None),
]

FEW, ONE_TOO_MANY = range(MAX_DEATHS), range(MAX_DEATHS, MAX_DEATHS + 3)

TABLE: list[tuple[RecoveryPolicy, TurnRecord, Step]] = [
    (RESUME, TurnRecord.INTERRUPTED, Continue(CONTINUE_PROMPT)),
    (RESUME, TurnRecord.MISSING, SendAgain()),
    (RERUN, TurnRecord.INTERRUPTED, SendAgain()),
    (RERUN, TurnRecord.MISSING, SendAgain()),
    (FAIL, TurnRecord.INTERRUPTED, GiveUp(f"The turn was cut off: {WHY}. Send the message again to go on.")),
    (FAIL, TurnRecord.MISSING, SendAgain()),
]


def test_the_table_is_whole() -> None:
    assert {row[:2] for row in TABLE} == {(policy, trace) for policy in RecoveryPolicy for trace in TurnRecord}
    assert len(TABLE) == len(RecoveryPolicy) * len(TurnRecord)


@pytest.mark.parametrize("deaths", FEW)
@pytest.mark.parametrize(("policy", "found", "step"), TABLE)
def test_a_turn_without_an_end_goes_on_as_the_operator_wants(
    policy: RecoveryPolicy, found: TurnRecord, step: Step, deaths: int
) -> None:
    assert next_step(policy, found, FailureCounts(deaths), WHY) == step


@pytest.mark.parametrize("deaths", ONE_TOO_MANY)
@pytest.mark.parametrize("found", TurnRecord)
@pytest.mark.parametrize("policy", RecoveryPolicy)
def test_a_message_that_takes_codex_after_codex_with_it_is_given_up(
    policy: RecoveryPolicy, found: TurnRecord, deaths: int
) -> None:
    sentence = f"Codex ended {deaths} times while it worked on this message, the last time so: {WHY}."
    assert next_step(policy, found, FailureCounts(deaths), WHY) == GiveUp(sentence)


@pytest.mark.parametrize("deaths", [*FEW, *ONE_TOO_MANY])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("policy", RecoveryPolicy)
def test_an_end_that_codex_has_recorded_stands_whatever_else_there_is(
    policy: RecoveryPolicy, end: TurnCompleted, deaths: int
) -> None:
    assert next_step(policy, end, FailureCounts(deaths), WHY) == AlreadyEnded(end)


@given(
    st.sampled_from(RecoveryPolicy), st.lists(st.sampled_from(TurnRecord), min_size=MAX_DEATHS, max_size=MAX_DEATHS + 5)
)
def test_no_message_is_retried_forever(policy: RecoveryPolicy, traces: list[TurnRecord]) -> None:
    """Whatever codex remembers after each of its deaths, the last step is to give up."""
    steps = [next_step(policy, trace, FailureCounts(deaths), WHY) for deaths, trace in enumerate(traces, start=1)]
    tries = [step for step in steps if isinstance(step, SendAgain | Continue)]
    assert len(tries) < MAX_DEATHS
    assert isinstance(steps[-1], GiveUp)


@pytest.mark.parametrize("policy", RecoveryPolicy)
@pytest.mark.parametrize("found", TurnRecord)
def test_a_message_that_ends_the_agent_again_and_again_is_given_up(policy: RecoveryPolicy, found: TurnRecord) -> None:
    before = next_step(policy, found, FailureCounts(ours=MAX_RESTARTS - 1), WHY)
    assert before == next_step(policy, found, FailureCounts(), WHY)
    given_up = next_step(policy, found, FailureCounts(ours=MAX_RESTARTS), WHY)
    assert isinstance(given_up, GiveUp)
    assert f"The agent ended {MAX_RESTARTS} times" in given_up.sentence
