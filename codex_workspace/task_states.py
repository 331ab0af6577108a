"""A2A's task states by what may still come: work, an answer of somebody's, or nothing; and the artifact that grows."""

from typing import Final

from a2a.types import TaskState

ANSWER: Final = "answer"
"""Id and name of the artifact that holds what the agent says; all others come whole."""

OFFSET: Final = "offset"
"""In the metadata of an update with `append`: how many characters the artifact holds before it."""

TERMINAL: Final = frozenset(
    {
        TaskState.TASK_STATE_COMPLETED,
        TaskState.TASK_STATE_FAILED,
        TaskState.TASK_STATE_CANCELED,
        TaskState.TASK_STATE_REJECTED,
    }
)
"""Nothing comes any more."""

AT_WORK: Final = frozenset({TaskState.TASK_STATE_SUBMITTED, TaskState.TASK_STATE_WORKING})
"""The agent is about to do something."""


ASKING: Final = frozenset({TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_AUTH_REQUIRED})
"""Somebody has to say something first."""


def names_of(states: frozenset[TaskState]) -> list[str]:
    """Return the states as the database has them."""
    return sorted(TaskState.Name(state) for state in states)
