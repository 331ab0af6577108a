"""What the agent's tools are called for everybody: names that agents of several makers share, beside codex's own.

The public stream of events of one run of the agent, the same for every backend. docs/events.md explains it.

Here are the values and their JSON. How codex's own events become them is left to `agent_stream`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import ClassVar, Final, Literal, TypeAlias

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
    """Return the name for a change of files: Write where all of them are new, else Edit."""
    kinds = tuple(kinds)
    return WRITE if kinds and all(kind == "add" for kind in kinds) else EDIT


StopReason: TypeAlias = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """What every event has.

    `extra` are the fields that codex has said with it and this model has no name for; as a rule there are none.
    """

    TYPE: ClassVar[str]

    extra: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Text(_Event):
    """A further piece of the agent's message `item_id`; with `replaces`, `text` takes the place of all before it."""

    TYPE: ClassVar[str] = "text"

    item_id: str
    text: str
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Reasoning(_Event):
    """A further piece of what the model has thought; sections of one `item_id` are parted by an empty line."""

    TYPE: ClassVar[str] = "reasoning"

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolUse(_Event):
    """The agent begins to use a tool; exactly one `ToolResult` of the same id follows, before the `Done`.

    `name` is the normalized name, such as Bash, `tool` codex's own: command_execution, file_change, web_search, or the
    tool's own name on its `server`. `input` is what the tool is given.
    """

    TYPE: ClassVar[str] = "tool_use"

    id: str
    name: str
    tool: str
    input: JsonObject
    server: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult(_Event):
    """What a tool has come to: its text, or why it failed. `exit_code` is a command's that ran to its own end.

    Of changed files, which a `FileChange` tells, and of a search `output` is empty.
    """

    TYPE: ClassVar[str] = "tool_result"

    id: str
    output: str
    is_error: bool
    exit_code: int | None = None
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class FileDiff:
    """One file that was changed; `kind` is add, delete or update, `diff` "" where codex does not tell it."""

    path: str
    kind: str
    diff: str = ""


@dataclass(frozen=True, slots=True)
class FileChange(_Event):
    """Files were changed, by the tool `item_id`; comes before that tool's result."""

    TYPE: ClassVar[str] = "file_change"

    item_id: str
    changes: tuple[FileDiff, ...]


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of a plan; `status` is pending, in_progress or completed."""

    text: str
    status: str


@dataclass(frozen=True, slots=True)
class Plan(_Event):
    """The agent's plan; replaces the one before."""

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
class Usage(_Event):
    """The tokens so far: of this run, and of its whole session.

    `run` is None where a session was resumed of which it is not known what it had used before.
    """

    TYPE: ClassVar[str] = "usage"

    run: TokenCounts | None
    session: TokenCounts


@dataclass(frozen=True, slots=True)
class Approval(_Event):
    """The agent asks a person; `about` is what a program reads of the question. Only of app-servers."""

    TYPE: ClassVar[str] = "approval"

    id: str
    about: JsonObject


@dataclass(frozen=True, slots=True)
class Error(_Event):
    """Something went wrong; the run goes on unless it is `fatal`. `code` is a word in capitals."""

    TYPE: ClassVar[str] = "error"

    message: str
    code: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class UnmappedEvent(_Event):
    """Something that codex has said and that this model has no event for, as it came."""

    TYPE: ClassVar[str] = "other"

    name: str
    payload: JsonObject


@dataclass(frozen=True, slots=True)
class Done(_Event):
    """The run is over: always the last event, and never two of them.

    `text` is the agent's answer: its final message. `session_id` is None where codex never named its thread, `usage` is
    the run's, None where codex told none. `error` is there exactly where `stop_reason` is failed.
    """

    TYPE: ClassVar[str] = "done"

    text: str
    session_id: str | None
    duration_ms: int
    usage: TokenCounts | None
    stop_reason: StopReason
    error: Error | None = None


AgentEvent: TypeAlias = (
    Text | Reasoning | ToolUse | ToolResult | FileChange | Plan | Usage | Approval | Error | UnmappedEvent | Done
)

EVENT_TYPES: Final = tuple(
    kind.TYPE
    for kind in (Text, Reasoning, ToolUse, ToolResult, FileChange, Plan, Usage, Approval, Error, UnmappedEvent, Done)
)


def as_json(event: AgentEvent) -> JsonObject:
    """Return the event as JSON: its `type`, then its fields, without those that say nothing (None, no `extra`)."""
    return {"type": event.TYPE, **_said(event)}


_Inner: TypeAlias = TokenCounts | FileDiff | PlanStep


def _said(value: AgentEvent | _Inner) -> JsonObject:
    told = {each.name: _json(getattr(value, each.name)) for each in fields(value)}
    return {name: each for name, each in told.items() if each is not None and not (name == "extra" and not each)}


def _json(value: "JsonValue | AgentEvent | tuple[_Inner, ...] | _Inner") -> JsonValue:
    match value:
        case tuple():
            return [_said(each) for each in value]
        case Error():
            return as_json(value)
        case TokenCounts() | FileDiff() | PlanStep():
            return _said(value)
        case None | bool() | int() | float() | str() | list() | dict():
            return value
        case _:
            raise TypeError(f"{type(value).__name__} is not part of an event")
