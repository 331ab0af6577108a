"""Say why a turn failed, and what helps: in a sentence that a peer may read, and by a code for programs."""

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
"""The kind of failure of a turn whose codex ended before it did."""

UNKNOWN_END: Final = "unsettled"
"""The kind of failure of a turn whose end codex did not report."""

_TIMED_OUT: Final = "watchdogTimeout"
OWN_KINDS: Final = frozenset({_TIMED_OUT, UNKNOWN_END})
"""The kinds that the agent assigns itself; their messages are sentences."""

_STATUS: Final = re.compile(r"unexpected status (\d{3})")
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)


def inactivity_error(inactivity_s: float) -> TurnError:
    """Return why a turn was stopped of which nothing was heard for so many seconds."""
    return TurnError(f"The turn was silent for {inactivity_s:g} s and was stopped.", _TIMED_OUT, None, None)


def duration_error(total_s: float) -> TurnError:
    """Return why a turn was stopped that took more than so many seconds."""
    return TurnError(f"The turn took longer than {total_s:g} s and was stopped.", _TIMED_OUT, None, None)


def process_exit_error(exit_code: int | None) -> TurnError:
    """Return why a turn failed whose codex ended before it did; `exit_code`: None where it is not known."""
    how = "" if exit_code is None else f" with exit code {exit_code}"
    return TurnError(f"codex ended{how} before its turn was over", PROCESS_EXITED, None, None)


def describe_failure(failure: TurnError) -> str:
    """Return the sentence: our own words where the kind of failure is known, else codex's, without addresses."""
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
    """Return what programs are told: a `code`, and `httpStatus` where the model's endpoint gave one.

    A refused credential has one code, whichever way codex came to know of it.
    """
    status = _status_of(failure)
    if status is None:
        return {"code": failure.kind}
    return {"code": "unauthorized" if status == 401 else failure.kind, "httpStatus": status}


def _status_of(failure: TurnError) -> int | None:
    return failure.http_status or _status_in(failure.message)


def _status_in(message: str) -> int | None:
    # 0.130 tells the status in words only.
    found = _STATUS.search(message)
    return int(found.group(1)) if found else None


def _quoted(message: str) -> str:
    line = _URL.sub("[address]", " ".join(message.split()))
    return line if len(line) <= MAX_QUOTED_CHARS else f"{line[:MAX_QUOTED_CHARS]}…"


LOST_THREAD: Final = re.compile(
    r"rollout|session file|active writer|invalid (thread|session) id|not found", re.IGNORECASE
)
"""How codex says that a thread is not to be had: no rollout or a broken one, another process's, no id of a thread's.
Any other refusal leaves the thread where it is, for the next message to find."""
