"""A2A terms that several packages share: task states, artifact names, the authenticated user, protocol versions."""

import re
from typing import Final

from a2a.auth.user import User
from a2a.server.context import ServerCallContext
from a2a.types import TaskState
from a2a.utils.constants import PROTOCOL_VERSION_0_3, VERSION_HEADER

ANSWER: Final = "answer"
"""ID and name of the artifact with the agent's answer; all other artifacts are sent in one piece."""

OFFSET: Final = "offset"
"""Metadata key of an update with `append`: the number of characters that the artifact has before it."""

HEADERS: Final = "headers"
"""Key in the SDK's call context: the request's headers by their lower-case names."""

TERMINAL: Final = frozenset(
    {
        TaskState.TASK_STATE_COMPLETED,
        TaskState.TASK_STATE_FAILED,
        TaskState.TASK_STATE_CANCELED,
        TaskState.TASK_STATE_REJECTED,
    }
)
"""The states after which the agent sends no event."""

WORKING: Final = frozenset({TaskState.TASK_STATE_SUBMITTED, TaskState.TASK_STATE_WORKING})
"""The states in which the agent will send more events."""

AWAITING_INPUT: Final = frozenset({TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_AUTH_REQUIRED})
"""The task waits for a message."""


def state_names(states: frozenset[TaskState]) -> list[str]:
    """Return the states as the database stores them."""
    return sorted(TaskState.Name(state) for state in states)


class AuthenticatedUser(User):
    """A principal, as the SDK's user."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        """Always true: requests that are not authenticated are rejected earlier."""
        return True

    @property
    def user_name(self) -> str:
        """The owner of what this user creates."""
        return self._name


def is_protocol_0_3(context: ServerCallContext) -> bool:
    """Whether a call uses A2A 0.3, which is also the version of calls that name none."""
    headers = context.state.get(HEADERS)
    return isinstance(headers, dict) and version_of(headers.get(VERSION_HEADER.lower())) == PROTOCOL_VERSION_0_3


def version_of(header: str | None) -> str:
    """Return Major.Minor of the version in a request's header; 0.3 if there is none, the header if it is no version."""
    given = (header or PROTOCOL_VERSION_0_3).strip()
    version = re.fullmatch(r"([0-9]{1,4}\.[0-9]{1,4})(\.[0-9]{1,4})?", given)
    return given if version is None else version[1]
