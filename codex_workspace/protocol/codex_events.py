"""The typed events of one codex turn, and the description of its failure: a sentence for people, a code for programs.

`app_server_reader` and `exec_reader` read them from codex's lines.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.jsonrpc import text_or_none

Phase: TypeAlias = Literal["commentary", "final_answer"] | None
"""The purpose of a message as the model stated it; None if it stated none, which is common."""

TurnStatus: TypeAlias = Literal["completed", "interrupted", "failed"]


class ItemStatus(StrEnum):
    """The status of an item; a value that is not listed here is read as `UNKNOWN`."""

    COMPLETED = "completed"
    FAILED = "failed"
    DECLINED = "declined"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> "ItemStatus":
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """Codex works on the turn and accepts an interrupt from now on."""


@dataclass(frozen=True, slots=True)
class MessageStarted:
    """The agent begins the message `item_id`."""

    item_id: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """The next part of the agent's message `item_id`."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class MessageCompleted:
    """The full text of the agent's message `item_id`; replaces its deltas."""

    item_id: str
    text: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next part of section `section` (from 0) of the reasoning `item_id`."""

    item_id: str
    section: int
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningCompleted:
    """The full reasoning `item_id`: the sections of its summary, or its raw text if there is no summary."""

    item_id: str
    sections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommandStarted:
    """Codex runs a shell command, or is about to request approval for it."""

    item_id: str
    command: str
    cwd: str


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """The next part of a command's output. Codex may send none; `CommandCompleted.output` is the full output."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class CommandCompleted:
    """The end of a command. Without `exit_code` it was stopped. `output` is the full output, at most 1 MiB."""

    item_id: str
    command: str
    cwd: str
    output: str
    exit_code: int | None
    status: ItemStatus
    duration_ms: int | None


@dataclass(frozen=True, slots=True)
class FilePatch:
    """A change to one file; `kind` is add, delete or update.

    `diff` is a unified diff of an updated file, and the full text of an added or deleted one.
    """

    path: str
    kind: str
    diff: str


@dataclass(frozen=True, slots=True)
class PatchStarted:
    """Codex changes files, or is about to request approval for it."""

    item_id: str
    changes: tuple[FilePatch, ...]


@dataclass(frozen=True, slots=True)
class PatchCompleted:
    """The end of a change to files; the files are unchanged unless `status` is completed."""

    item_id: str
    changes: tuple[FilePatch, ...]
    status: ItemStatus


@dataclass(frozen=True, slots=True)
class DiffUpdated:
    """All changes of the turn so far, as one unified diff."""

    diff: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """Codex calls a tool. `server` is its MCP server or its namespace of dynamic tools; None if it has neither."""

    item_id: str
    server: str | None
    tool: str
    arguments: JsonValue


@dataclass(frozen=True, slots=True)
class ToolCallCompleted:
    """The end of a tool call; `result` is the tool's text, or the reason for its failure."""

    item_id: str
    server: str | None
    tool: str
    arguments: JsonValue
    result: str
    is_error: bool
    status: ItemStatus
    duration_ms: int | None


@dataclass(frozen=True, slots=True)
class WebSearchCompleted:
    """Codex searched the web."""

    item_id: str
    query: str


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One step of the agent's plan; `status` is pending, inProgress or completed."""

    text: str
    status: str


@dataclass(frozen=True, slots=True)
class PlanUpdated:
    """The agent's plan; replaces the previous one."""

    steps: tuple[PlanItem, ...]
    explanation: str | None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts; `cached_input` is part of `input`, and `reasoning_output` of `output`."""

    total: int = 0
    input: int = 0
    cached_input: int = 0
    output: int = 0
    reasoning_output: int = 0


@dataclass(frozen=True, slots=True)
class TokensUpdated:
    """The tokens of the whole thread so far; `last` is the most recent model call alone, if codex reports it."""

    thread: TokenUsage
    last: TokenUsage = TokenUsage()


@dataclass(frozen=True, slots=True)
class TurnError:
    """Why a turn failed; `kind` is codex's code, such as usageLimitExceeded, or other if it gives none."""

    message: str
    kind: str
    http_status: int | None = None
    details: str | None = None


@dataclass(frozen=True, slots=True)
class WarningReported:
    """Something went wrong and the turn goes on; with `will_retry` codex repeats the model call."""

    message: str
    will_retry: bool


@dataclass(frozen=True, slots=True)
class ErrorReported:
    """Codex gave up; the failed `TurnCompleted` usually follows."""

    failure: TurnError


@dataclass(frozen=True, slots=True)
class ThreadIdle:
    """The thread has no running turn. Also sent before a turn starts."""


@dataclass(frozen=True, slots=True)
class TurnCompleted:
    """The turn is over. `last_message` is the agent's last message if codex repeats it here."""

    status: TurnStatus
    failure: TurnError | None = None
    last_message: MessageCompleted | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """The turn goes on; there is nothing to show."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A notification or item of this turn whose name is unknown or whose shape is invalid."""

    name: str
    payload: JsonObject


TurnEvent: TypeAlias = (
    TurnStarted
    | MessageStarted
    | MessageDelta
    | MessageCompleted
    | ReasoningDelta
    | ReasoningCompleted
    | CommandStarted
    | CommandOutput
    | CommandCompleted
    | PatchStarted
    | PatchCompleted
    | DiffUpdated
    | ToolCallStarted
    | ToolCallCompleted
    | WebSearchCompleted
    | PlanUpdated
    | TokensUpdated
    | WarningReported
    | ErrorReported
    | ThreadIdle
    | TurnCompleted
    | Activity
    | UnknownEvent
)


def content_text(parts: list[JsonObject]) -> str:
    """Return the text of a tool's content, one part per line; a part without text is named by its type."""
    return "\n".join(_part_text(part) for part in parts)


def _part_text(part: JsonObject) -> str:
    shown = text_or_none(part, "text")
    return shown if shown is not None else f"[{text_or_none(part, 'type') or 'unknown'}]"


MAX_QUOTED_CHARS: Final = 500

_BY_STATUS: Final = {
    401: "The model provider rejected the credential (HTTP 401); the operator must renew it.",
    402: "The model provider requires payment (HTTP 402); the operator has to look at the account.",
    403: "The model provider does not allow the request (HTTP 403); the operator must check the credential's rights.",
    404: "The model provider does not know the model or the URL (HTTP 404); the operator must check both.",
    429: "The model provider's rate limit is reached (HTTP 429); try again later.",
}
_BY_KIND: Final = {
    "usageLimitExceeded": "The model account's usage limit is reached; try again after it is reset.",
    "rateLimitExceeded": "The model provider's rate limit is reached; try again later.",
    "serverOverloaded": "The model provider is overloaded; try again later.",
    "internalServerError": "The model provider had an internal error (HTTP 500); try again later.",
    "contextWindowExceeded": "The conversation is longer than the model's context window; start a new context.",
    "modelNotFound": "The model provider does not know the model; the operator must check its name.",
    "unauthorized": "The model provider rejected the credential; the operator must renew it.",
}

MODEL_UNKNOWN: Final = re.compile(r"Model metadata for `(.*)` not found")
"""The notice of every turn whose model codex does not know; it then uses general assumptions."""

NO_SESSION: Final = "sessionNotFound"
"""The kind of failure of a run whose session does not exist."""

PROCESS_EXITED: Final = "processExited"
"""The kind of failure of a turn whose codex exited before the turn had ended."""

UNKNOWN_END: Final = "unsettled"
"""The kind of failure of a turn whose end codex did not report."""

_TIMED_OUT: Final = "watchdogTimeout"

_STATUS: Final = re.compile(r"unexpected status (\d{3})")
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)


def inactivity_error(inactivity_s: float) -> TurnError:
    """Return the failure of a turn that had no events for so many seconds and was stopped."""
    return TurnError(f"The turn was silent for {inactivity_s:g} s and was stopped.", _TIMED_OUT)


def duration_error(total_s: float) -> TurnError:
    """Return the failure of a turn that took longer than so many seconds and was stopped."""
    return TurnError(f"The turn took longer than {total_s:g} s and was stopped.", _TIMED_OUT)


def process_exit_error(exit_code: int | None) -> TurnError:
    """Return the failure of a turn whose codex exited, with its exit code if that is known."""
    how = "" if exit_code is None else f" with exit code {exit_code}"
    return TurnError(f"codex ended{how} before its turn ended", PROCESS_EXITED)


def describe_failure(failure: TurnError) -> str:
    """Return the sentence about a failure: this module's for a known kind, else codex's message without URLs."""
    if failure.kind in (_TIMED_OUT, UNKNOWN_END):
        # The agent's own sentence.
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
