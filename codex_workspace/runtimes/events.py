"""The public events of one run, the same for every backend, and their JSON. docs/events.md explains them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Final, Literal, TypeAlias, get_args

from codex_workspace.common.values import JsonObject, JsonValue

BASH: Final = "Bash"
EDIT: Final = "Edit"
WRITE: Final = "Write"
WEB_SEARCH: Final = "WebSearch"
TODO_WRITE: Final = "TodoWrite"

COMMAND: Final = "command_execution"
FILES: Final = "file_change"
SEARCH: Final = "web_search"


def name_of_change(kinds: Iterable[str]) -> str:
    """Return the tool's name for a change of files: Write if all files are new, otherwise Edit."""
    kinds = tuple(kinds)
    return WRITE if kinds and all(kind == "add" for kind in kinds) else EDIT


StopReason: TypeAlias = Literal["completed", "failed", "interrupted"]
MessagePhase: TypeAlias = Literal["commentary", "final_answer"]
ToolKind: TypeAlias = Literal["command", "patch", "search", "tool"]
_TOOL_KINDS: Final[Mapping[str, ToolKind]] = {COMMAND: "command", FILES: "patch", SEARCH: "search"}


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the agent's message `item_id`; if `replaces`, it replaces the message's earlier text.

    `phase` is what the model says the message is for: commentary, final_answer, or None if it does not say.
    """

    TYPE: ClassVar[str] = "text"

    item_id: str
    text: str
    replaces: bool = False
    phase: MessagePhase | None = None


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """The agent's message `item_id` is complete; `text` is the whole, its pieces came as `Text`."""

    TYPE: ClassVar[str] = "message"

    item_id: str
    text: str
    phase: MessagePhase | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning; an empty line separates the sections of one `item_id`."""

    TYPE: ClassVar[str] = "reasoning"

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningSummary:
    """The reasoning `item_id` is complete; its pieces came as `Reasoning`."""

    TYPE: ClassVar[str] = "reasoning_summary"

    item_id: str
    sections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call starts; exactly one `ToolResult` with the same id follows before the `Done`.

    `name` is the common name, such as Bash; `tool` is the CLI's name: command_execution, file_change, web_search, or
    the tool's name on its `server`. `input` contains the arguments.
    """

    TYPE: ClassVar[str] = "tool_use"

    id: str
    name: str
    tool: str
    input: JsonObject
    server: str | None = None

    @property
    def kind(self) -> ToolKind:
        """What kind of tool is called."""
        return _TOOL_KINDS.get(self.tool, "tool") if self.server is None else "tool"


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A piece of the output of the running command `id`; `ToolResult.output` is the whole."""

    TYPE: ClassVar[str] = "tool_output"

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool call's result, or why it failed; `output` is empty for changed files (see `FileChange`) and searches.

    `exit_code` is set if a command ran to its own end. `status` is completed, failed, declined or unknown.
    """

    TYPE: ClassVar[str] = "tool_result"

    id: str
    output: str
    is_error: bool
    exit_code: int | None = None
    duration_ms: int | None = None
    status: str = "completed"


@dataclass(frozen=True, slots=True)
class FileDiff:
    """A changed file; `kind` is add, delete or update; `diff` is empty if the CLI reports none.

    `diff` contains the hunks of an updated file, and the whole text of an added or deleted one.
    """

    path: str
    kind: str
    diff: str = ""


@dataclass(frozen=True, slots=True)
class FileChange:
    """The tool call `item_id` changed files; comes before its result."""

    TYPE: ClassVar[str] = "file_change"

    item_id: str
    changes: tuple[FileDiff, ...]


@dataclass(frozen=True, slots=True)
class RunDiff:
    """All changes of the run so far, as one unified diff; replaces the previous one."""

    TYPE: ClassVar[str] = "diff"

    diff: str


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of a plan; `status` is pending, in_progress or completed."""

    text: str
    status: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The agent's whole plan; replaces the previous one."""

    TYPE: ClassVar[str] = "plan"

    steps: tuple[PlanStep, ...]
    explanation: str | None = None
    name: str = TODO_WRITE


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Numbers of tokens; `cached_input` is part of `input`, `reasoning_output` of `output`."""

    input: int
    cached_input: int
    output: int
    reasoning_output: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens so far, of this run and of its session; `run` is None if the session's earlier tokens are unknown."""

    TYPE: ClassVar[str] = "usage"

    run: TokenCounts | None
    session: TokenCounts


@dataclass(frozen=True, slots=True)
class Approval:
    """The CLI asks a person; `about` is the question as JSON."""

    TYPE: ClassVar[str] = "approval"

    id: str
    about: JsonObject


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A problem that does not end the run.

    If `will_retry`, the CLI repeats its last request to the model, and incomplete text becomes void.
    """

    TYPE: ClassVar[str] = "warning"

    message: str
    will_retry: bool = False


@dataclass(frozen=True, slots=True)
class Error:
    """Why the run fails; only the first error of a run is `fatal`. `code` is a word in capitals."""

    TYPE: ClassVar[str] = "error"

    message: str
    code: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class UnmappedEvent:
    """An event of the CLI that has no type here, unchanged."""

    TYPE: ClassVar[str] = "other"

    name: str
    payload: JsonObject


@dataclass(frozen=True, slots=True)
class Done:
    """The end of the run: always the last event, and the only one of its type.

    `text` is the agent's answer. `session_id` and `usage` (the run's tokens) are None if the CLI reported none. `error`
    is set if and only if `stop_reason` is failed.
    """

    TYPE: ClassVar[str] = "done"

    text: str
    session_id: str | None
    duration_ms: int
    usage: TokenCounts | None
    stop_reason: StopReason
    error: Error | None = None


AgentEvent: TypeAlias = (
    Text
    | AgentMessage
    | Reasoning
    | ReasoningSummary
    | ToolUse
    | ToolOutput
    | ToolResult
    | FileChange
    | RunDiff
    | Plan
    | Usage
    | Approval
    | RunWarning
    | Error
    | UnmappedEvent
    | Done
)

EVENT_TYPES: Final = tuple(kind.TYPE for kind in get_args(AgentEvent))


def as_json(event: AgentEvent) -> JsonObject:
    """Return the event as JSON: its `type`, then its fields without those that are None."""
    return {"type": event.TYPE, **_fields(event)}


_Inner: TypeAlias = TokenCounts | FileDiff | PlanStep


def _fields(value: AgentEvent | _Inner) -> JsonObject:
    values = {each.name: _json(getattr(value, each.name)) for each in fields(value)}
    return {name: each for name, each in values.items() if each is not None}


def _json(value: "JsonValue | Error | _Inner | tuple[_Inner | str, ...]") -> JsonValue:
    match value:
        case tuple():
            return [_json(each) for each in value]
        case Error():
            return as_json(value)
        case TokenCounts() | FileDiff() | PlanStep():
            return _fields(value)
        case None | bool() | int() | float() | str() | list() | dict():
            return value
        case _:
            raise TypeError(f"{type(value).__name__} is not part of an event")
