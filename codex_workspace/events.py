"""What codex's notifications mean: the typed events of one turn.

Here are the names of codex's notifications and items. The `codex/event/*` dialect of codex 0.72 is left to `events_v1`,
a turn's deadlines and open items to the conversation. Shapes: recordings 0.72 to 0.169.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from codex_workspace.wire import JsonObject, JsonValue, Notification

Phase: TypeAlias = Literal["commentary", "final_answer"] | None
"""What the model said a message is for; None where it said nothing, which is common."""

TurnStatus: TypeAlias = Literal["completed", "interrupted", "failed"]


class ItemStatus(StrEnum):
    """How far an item is; a word of codex's that is not listed here is read as `UNKNOWN`."""

    IN_PROGRESS = "inProgress"
    COMPLETED = "completed"
    FAILED = "failed"
    DECLINED = "declined"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """Codex works on the turn; from now on it accepts an interrupt."""


@dataclass(frozen=True, slots=True)
class MessageStarted:
    """The agent begins the message `item_id`."""

    item_id: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A further piece of the agent's message `item_id`."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """The whole of the agent's message `item_id`; replaces its deltas."""

    item_id: str
    text: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A further piece of section `section` (from 0) of the reasoning `item_id`."""

    item_id: str
    section: int
    text: str


@dataclass(frozen=True, slots=True)
class Reasoned:
    """The whole of the reasoning `item_id`: the sections of its summary, or its raw text where there is no summary."""

    item_id: str
    sections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommandStarted:
    """Codex runs a shell command, or is about to ask whether it may."""

    item_id: str
    command: str
    cwd: str


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """A further piece of a command's output. Codex may send none of them: `CommandFinished.output` is the whole."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class CommandFinished:
    """A command's end; without `exit_code` it did not run to its own end. `output` is at most 1 MiB from codex 0.130 on."""

    item_id: str
    command: str
    cwd: str
    output: str
    exit_code: int | None
    status: ItemStatus
    duration_ms: int | None


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one file; `kind` is add, delete or update.

    `diff` is a unified diff of an updated file, and the whole text of an added or deleted one.
    """

    path: str
    kind: str
    diff: str


@dataclass(frozen=True, slots=True)
class FilesChanging:
    """Codex changes files, or is about to ask whether it may."""

    item_id: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class FilesChanged:
    """The end of a change of files; nothing was changed unless `status` is completed."""

    item_id: str
    changes: tuple[Change, ...]
    status: ItemStatus


@dataclass(frozen=True, slots=True)
class DiffUpdated:
    """All that the turn has changed so far, as one unified diff."""

    diff: str


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """Codex calls a tool of the MCP server (or the namespace of dynamic tools) `server`; None where it is in none."""

    item_id: str
    server: str | None
    tool: str
    arguments: JsonValue


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """A tool's end; `result` is its text, or why it failed."""

    item_id: str
    server: str | None
    tool: str
    arguments: JsonValue
    result: str
    is_error: bool
    status: ItemStatus
    duration_ms: int | None


@dataclass(frozen=True, slots=True)
class WebSearched:
    """Codex searched the web."""

    item_id: str
    query: str


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of the agent's plan; `status` is codex's word: pending, inProgress, completed."""

    text: str
    status: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The agent's plan; replaces the one before."""

    steps: tuple[PlanStep, ...]
    explanation: str | None


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Numbers of tokens; `cached_input` is part of `input`, `reasoning_output` of `output`."""

    total: int = 0
    input: int = 0
    cached_input: int = 0
    output: int = 0
    reasoning_output: int = 0

    def minus(self, other: "TokenCount") -> "TokenCount":
        """Return how many more tokens these are than `other`."""
        return TokenCount(
            self.total - other.total,
            self.input - other.input,
            self.cached_input - other.cached_input,
            self.output - other.output,
            self.reasoning_output - other.reasoning_output,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of the whole thread so far, and how many fit into the model's context.

    `last` is the newest model call alone. It is not for adding up: codex up to 0.130 says the same call twice.
    """

    total: int
    input: int
    cached_input: int
    output: int
    reasoning_output: int
    context_window: int | None
    last: TokenCount = TokenCount()

    @property
    def thread(self) -> TokenCount:
        """The tokens of the whole thread so far, as one value."""
        return TokenCount(self.total, self.input, self.cached_input, self.output, self.reasoning_output)


@dataclass(frozen=True, slots=True)
class TurnFailure:
    """Why a turn failed; `kind` is codex's own word, such as usageLimitExceeded (other where it has none)."""

    message: str
    kind: str
    http_status: int | None
    details: str | None


@dataclass(frozen=True, slots=True)
class Warned:
    """Something went wrong and the turn goes on; with `will_retry` codex asks the model again."""

    message: str
    will_retry: bool


@dataclass(frozen=True, slots=True)
class Erred:
    """Codex gave up; as a rule the failed `TurnEnded` follows. Codex 0.130 leaves it out where the input was empty."""

    failure: TurnFailure


@dataclass(frozen=True, slots=True)
class ThreadIdle:
    """The thread has no running turn (any more). Comes before the turn's first `ThreadActive` too."""

    system_error: bool


@dataclass(frozen=True, slots=True)
class ThreadActive:
    """The thread has a running turn; `waiting` holds codex's words for what it waits for, such as waitingOnApproval."""

    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The turn is over. `last_message` is the agent's last word where codex repeats it here, else None (up to 0.130)."""

    status: TurnStatus
    failure: TurnFailure | None
    last_message: Said | None


@dataclass(frozen=True, slots=True)
class Alive:
    """The turn goes on, and there is nothing to show."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A notification or type of item that is not known here, or is not of the known shape; of this turn."""

    name: str
    payload: JsonObject


TurnEvent: TypeAlias = (
    TurnStarted
    | MessageStarted
    | TextDelta
    | Said
    | ReasoningDelta
    | Reasoned
    | CommandStarted
    | CommandOutput
    | CommandFinished
    | FilesChanging
    | FilesChanged
    | DiffUpdated
    | ToolStarted
    | ToolFinished
    | WebSearched
    | Planned
    | Usage
    | Warned
    | Erred
    | ThreadIdle
    | ThreadActive
    | TurnEnded
    | Alive
    | Unknown
)


class TurnReader:
    """Reads the events of one turn out of all that codex says.

    Both ids are compared: codex 0.72 numbers turns from 0 in every thread.
    """

    def __init__(self, thread_id: str, turn_id: str) -> None:
        self.thread_id: Final = thread_id
        self.turn_id: Final = turn_id
        self.unknown: Final[Counter[str]] = Counter()

    def read(self, notification: Notification) -> tuple[TurnEvent, ...]:
        """Return what a notification says of this turn; nothing where it is about another one. Never raises."""
        raise NotImplementedError


class TurnText:
    """The agent's messages of one turn, put together from its events."""

    def __init__(self) -> None:
        raise NotImplementedError

    def apply(self, event: TurnEvent) -> None:
        """Take note of an event."""
        raise NotImplementedError

    @property
    def answer(self) -> str:
        """The final answer so far."""
        raise NotImplementedError

    @property
    def messages(self) -> tuple[Said, ...]:
        """The messages in their order; one that is not complete has the text that came so far."""
        raise NotImplementedError
