"""Describes why a turn failed: a sentence with the remedy that a peer may read, and a code for programs."""

import re
from typing import Final

from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.codex_events import TurnError

MAX_QUOTED_CHARS: Final = 500

_BY_STATUS: Final = {
    401: "The model provider refused the credential (HTTP 401); the operator has to renew it.",
    402: "The model provider wants payment (HTTP 402); the operator has to look at the account.",
    403: "The model provider does not allow this (HTTP 403); the operator has to check the credential's rights.",
    404: "The model provider does not know the model or the address (HTTP 404); the operator has to check both.",
    429: "The model provider limits the rate (HTTP 429); try again later.",
}
_BY_KIND: Final = {
    "usageLimitExceeded": "The model account's usage limit is reached; try again after it was renewed.",
    "rateLimitExceeded": "The model provider limits the rate; try again later.",
    "serverOverloaded": "The model provider is overloaded; try again later.",
    "internalServerError": "The model provider had an internal error (HTTP 500); try again later.",
    "contextWindowExceeded": "The conversation has outgrown the model's context window; begin a new context.",
    "modelNotFound": "The model provider does not know the model; the operator has to check its name.",
    "unauthorized": "The model provider refused the credential; the operator has to renew it.",
}
NO_SESSION: Final = "sessionNotFound"
"""The kind of failure of a run whose session does not exist."""

PROCESS_EXITED: Final = "processExited"
"""The kind of failure of a turn whose codex exited before the turn had ended."""

UNKNOWN_END: Final = "unsettled"
"""The kind of failure of a turn whose end codex did not report."""

_TIMED_OUT: Final = "watchdogTimeout"
OWN_KINDS: Final = frozenset({_TIMED_OUT, UNKNOWN_END})
"""The kinds that the agent assigns itself; their messages are sentences."""

_STATUS: Final = re.compile(r"unexpected status (\d{3})")
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)


def inactivity_error(inactivity_s: float) -> TurnError:
    """Return the failure of a turn that had no events for so many seconds and was stopped."""
    return TurnError(f"The turn was silent for {inactivity_s:g} s and was stopped.", _TIMED_OUT, None, None)


def duration_error(total_s: float) -> TurnError:
    """Return the failure of a turn that took longer than so many seconds and was stopped."""
    return TurnError(f"The turn took longer than {total_s:g} s and was stopped.", _TIMED_OUT, None, None)


def process_exit_error(exit_code: int | None) -> TurnError:
    """Return the failure of a turn whose codex exited, with its exit code if that is known."""
    how = "" if exit_code is None else f" with exit code {exit_code}"
    return TurnError(f"codex ended{how} before its turn was over", PROCESS_EXITED, None, None)


def describe_failure(failure: TurnError) -> str:
    """Return the sentence about a failure: this module's for a known kind, else codex's message without URLs."""
    if failure.kind in OWN_KINDS:
        return failure.message
    status = _status_of(failure)
    if failure.kind in _BY_KIND:
        return _BY_KIND[failure.kind]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status is not None and status >= 500:
        return f"The model provider had an error (HTTP {status}); try again later."
    return f"The turn failed: {_quoted(failure.message)}"


def error_metadata(failure: TurnError) -> JsonObject:
    """Return the metadata for programs: `code`, and `httpStatus` if the model's endpoint returned one.

    A rejected credential always has the same code.
    """
    status = _status_of(failure)
    if status is None:
        return {"code": failure.kind}
    return {"code": "unauthorized" if status == 401 else failure.kind, "httpStatus": status}


def _status_of(failure: TurnError) -> int | None:
    if failure.http_status is not None:
        return failure.http_status
    found = _STATUS.search(failure.message)
    return int(found.group(1)) if found else None


def _quoted(message: str) -> str:
    line = _URL.sub("[address]", " ".join(message.split()))
    return line if len(line) <= MAX_QUOTED_CHARS else f"{line[:MAX_QUOTED_CHARS]}…"


LOST_THREAD: Final = re.compile(
    r"rollout|session file|active writer|invalid (thread|session) id|not found", re.IGNORECASE
)
"""The errors of a thread that cannot be resumed: its rollout is missing, broken, or locked by another process, or its
id is invalid. After any other error, the next message tries to resume the thread again."""
