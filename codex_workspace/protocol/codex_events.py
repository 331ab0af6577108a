"""The typed events of one codex turn.

`app_server_reader` and `exec_reader` read them from codex's lines.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.jsonrpc import text_or_none

Phase: TypeAlias = Literal["commentary", "final_answer"] | None
"""The purpose of a message as the model stated it; None if it stated none, which is common."""

TurnStatus: TypeAlias = Literal["completed", "interrupted", "failed"]


class ItemStatus(StrEnum):
    """The status of an item; a value that is not listed here is read as `UNKNOWN`."""

    IN_PROGRESS = "inProgress"
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
    http_status: int | None
    details: str | None


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

    system_error: bool


@dataclass(frozen=True, slots=True)
class TurnCompleted:
    """The turn is over. `last_message` is the agent's last message if codex repeats it here."""

    status: TurnStatus
    failure: TurnError | None
    last_message: MessageCompleted | None


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
