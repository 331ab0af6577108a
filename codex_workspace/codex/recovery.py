"""Decides how to continue with a turn that was interrupted because codex or the agent died."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from codex_workspace.protocol.codex_events import TurnCompleted
from codex_workspace.runtimes.backend import CONTINUE_PROMPT, TurnRecord

MAX_DEATHS: Final = 2
"""A message fails if this many codex processes died during its turns."""

MAX_RESTARTS: Final = 5
"""A message fails if this many agent processes ended during its turns, because it may be the cause. Regular stops count
too, because they cannot be told apart."""


class RecoveryPolicy(StrEnum):
    """What happens with an interrupted turn.

    resume: a further turn tells the model to continue. rerun: the message is sent again. fail: the task fails.
    """

    RESUME = "resume"
    RERUN = "rerun"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """How many codex processes and agent processes ended during a message's turns."""

    codex: int = 0
    ours: int = 0


@dataclass(frozen=True, slots=True)
class SendAgain:
    """Start a turn with the message itself."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Start a turn with this text; the message is in the thread's history."""

    text: str


@dataclass(frozen=True, slots=True)
class AlreadyEnded:
    """The turn had ended before codex died; this is its end."""

    end: TurnCompleted


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail the task for this reason."""

    sentence: str


Step = SendAgain | Continue | AlreadyEnded | GiveUp


def next_step(policy: RecoveryPolicy, found: TurnCompleted | TurnRecord, deaths: FailureCounts, why: str) -> Step:
    """Return how to continue with a message whose turn was interrupted.

    Args:
        policy: the configured policy.
        found: the turn's end in codex's record, or the state of the message there.
        deaths: the processes that ended during the message's turns.
        why: the reason of the interruption.
    """
    if isinstance(found, TurnCompleted):
        return AlreadyEnded(found)
    if deaths.codex >= MAX_DEATHS:
        return GiveUp(f"Codex ended {deaths.codex} times while it worked on this message, the last time so: {why}.")
    if deaths.ours >= MAX_RESTARTS:
        return GiveUp(f"The agent ended {deaths.ours} times while it worked on this message; it is not tried again.")
    if found is TurnRecord.MISSING:
        return SendAgain()
    match policy:
        case RecoveryPolicy.RESUME:
            return Continue(CONTINUE_PROMPT)
        case RecoveryPolicy.RERUN:
            return SendAgain()
        case RecoveryPolicy.FAIL:
            return GiveUp(f"The turn was cut off: {why}. Send the message again to go on.")
