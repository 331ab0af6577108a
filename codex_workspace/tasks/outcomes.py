"""How tasks end: states, sentences for people, and metadata for programs."""

import logging
from dataclasses import dataclass, field
from typing import Final

from a2a.types import TaskState

from codex_workspace.common.redact import Redactor
from codex_workspace.common.telemetry import TaskOutcome
from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.codex_events import TokenUsage, TurnCompleted, TurnError
from codex_workspace.protocol.failures import describe_failure, error_metadata

logger = logging.getLogger(__name__)

STOPPED: Final = "The agent stopped before the turn was done. The text so far is kept; send the message again to go on."
NOT_BEGUN: Final = "The agent stopped before it started on this message; send it again."
STOPPING: Final = "The agent is stopping and accepts no new messages."
SUPERSEDED: Final = "A newer message in this context replaced this one."
INTERNAL_ERROR: Final = "Internal error; see the agent's log."

USAGE: Final = "urn:codex-workspace:usage"
"""Metadata key of the terminal status: the tokens of the turn and of the thread."""

FAILURE: Final = "urn:codex-workspace:failure"
"""Metadata key of a failed task's terminal status: `code`, and `httpStatus` if a model endpoint returned one."""

MAX_LOGGED_CHARS: Final = 2000
"""At most this much of a model endpoint's failure is logged; some send whole pages."""

TASK_OUTCOMES: Final = {
    TaskState.TASK_STATE_COMPLETED: TaskOutcome.COMPLETED,
    TaskState.TASK_STATE_FAILED: TaskOutcome.FAILED,
    TaskState.TASK_STATE_CANCELED: TaskOutcome.CANCELED,
    TaskState.TASK_STATE_REJECTED: TaskOutcome.REJECTED,
}
"""The metrics' outcome of each terminal state."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ends: its state, a sentence for people, and metadata for programs."""

    state: TaskState
    sentence: str = ""
    metadata: JsonObject = field(default_factory=dict)


def turn_outcome(ended: TurnCompleted | None, redactor: Redactor) -> Outcome:
    """Return the outcome of a turn that ended."""
    match ended:
        case TurnCompleted(status="completed"):
            return Outcome(TaskState.TASK_STATE_COMPLETED)
        case TurnCompleted(status="interrupted"):
            return failed_outcome("The turn was interrupted from outside.", "interrupted")
        case TurnCompleted(failure=TurnError() as failure):
            logger.warning("turn failed (%s): %s", failure.kind, redactor(failure.message)[:MAX_LOGGED_CHARS])
            metadata: JsonObject = {FAILURE: error_metadata(failure)}
            return Outcome(TaskState.TASK_STATE_FAILED, redactor(describe_failure(failure)), metadata)
        case _:
            return failed_outcome("Codex reported a failed turn without a reason.", "unknown")


def failed_outcome(sentence: str, reason: str) -> Outcome:
    """Return the outcome of a failed task; `reason` is the code for programs."""
    return Outcome(TaskState.TASK_STATE_FAILED, sentence, code(reason))


def canceled_outcome() -> Outcome:
    """Return the outcome of a canceled task."""
    return Outcome(TaskState.TASK_STATE_CANCELED, "Canceled.")


def code(reason: str) -> JsonObject:
    """Return the metadata that tells programs why a task did not complete."""
    return {FAILURE: {"code": reason}}


def usage_metadata(turn: TokenUsage | None, thread: TokenUsage | None) -> JsonObject:
    """Return the token counts for the terminal status's metadata, as far as codex reported them."""
    counts: JsonObject = _counts(turn) if turn is not None else {}
    if thread is not None:
        counts["thread"] = _counts(thread)
    return {USAGE: counts} if counts else {}


def _counts(count: TokenUsage) -> JsonObject:
    return {
        "totalTokens": count.total,
        "inputTokens": count.input,
        "cachedInputTokens": count.cached_input,
        "outputTokens": count.output,
        "reasoningOutputTokens": count.reasoning_output,
    }
