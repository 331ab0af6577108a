"""What to do with a turn that was cut off: by codex's death, or by our own. Pure decisions."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from codex_workspace.protocol.codex_events import TurnCompleted
from codex_workspace.runtimes.backend import CONTINUE_PROMPT, TurnRecord

MAX_DEATHS: Final = 2
"""A message that has taken this many codex processes with it is failed: a third one would fare no better."""

MAX_RESTARTS: Final = 5
"""A message over whose turn so many processes of ours have ended is failed: it may be what ends them. A stop in good
order counts as well, as nobody can tell."""


class RecoveryPolicy(StrEnum):
    """What happens to a turn that was cut off.

    resume: a further turn tells the agent so and has it go on. rerun: the message is sent again. fail: the task fails.
    """

    RESUME = "resume"
    RERUN = "rerun"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """How many codex processes, and how many of ours, have ended over a message's turns."""

    codex: int = 0
    ours: int = 0


@dataclass(frozen=True, slots=True)
class SendAgain:
    """Start a turn with the message itself: codex knows nothing of it, or the operator wants it so."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Start a turn with this text: the message is in the thread's memory."""

    text: str


@dataclass(frozen=True, slots=True)
class AlreadyEnded:
    """The turn had ended before codex did: this is its end."""

    end: TurnCompleted


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the task as failed, for this reason."""

    sentence: str


Step = SendAgain | Continue | AlreadyEnded | GiveUp


def next_step(policy: RecoveryPolicy, found: TurnCompleted | TurnRecord, deaths: FailureCounts, why: str) -> Step:
    """Return how to go on with a message whose turn was cut off.

    Args:
        policy: the operator's word.
        found: the turn's end by codex's own record, or what else that knows.
        deaths: what has ended while it worked on it.
        why: what cut the turn off.
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
