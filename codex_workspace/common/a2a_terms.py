"""Terms of A2A that several packages share: task states, artifact names, the authenticated user, protocol versions."""

from collections.abc import Callable
from typing import Final

from a2a.auth.user import User
from a2a.server.context import ServerCallContext
from a2a.types import TaskState
from a2a.utils.constants import PROTOCOL_VERSION_0_3, VERSION_HEADER

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

WORKING: Final = frozenset({TaskState.TASK_STATE_SUBMITTED, TaskState.TASK_STATE_WORKING})
"""The agent is about to do something."""


AWAITING_INPUT: Final = frozenset({TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_AUTH_REQUIRED})
"""Somebody has to say something first."""


def state_names(states: frozenset[TaskState]) -> list[str]:
    """Return the states as the database has them."""
    return sorted(TaskState.Name(state) for state in states)


HEADERS: Final = "headers"
"""Where the SDK's call context holds the request's headers, by their names in lower case."""


class AuthenticatedUser(User):
    """A principal, as the SDK wants to see it."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        """Always: who is not let in does not become a caller."""
        return True

    @property
    def user_name(self) -> str:
        """The owner of what this caller makes."""
        return self._name


def is_protocol_0_3(context: ServerCallContext) -> bool:
    """Tell whether a call came in A2A 0.3, which is what is spoken where no version is named."""
    headers = context.state.get(HEADERS)
    if not isinstance(headers, dict):
        return False
    return serves_major(0)(str(headers.get(VERSION_HEADER.lower()) or PROTOCOL_VERSION_0_3))


def serves_major(major: int) -> Callable[[str], bool]:
    """Return whether a version has this major number; 1.7 is spoken by who speaks 1.0."""
    return lambda version: version.strip().partition(".")[0] == str(major)


OPERATOR: Final = "operator"
"""Whose everything is that is asked for with A2A_TOKEN, or without any token where none is needed."""
