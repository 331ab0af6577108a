"""The `Backend` protocol: what a task needs of a coding agent.

`codex` implements it with one long-lived `codex app-server`, `backends.codex_exec` with one `codex exec` per turn. A
thread is one conversation; a lease is exclusive access to it; a turn answers one message.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

from codex_workspace.common.values import JsonObject, JsonValue, Version
from codex_workspace.protocol.codex_events import TokenUsage, TurnCompleted
from codex_workspace.protocol.jsonrpc import Request
from codex_workspace.protocol.server_requests import Question
from codex_workspace.runtimes.events import AgentEvent

CONTINUE_PROMPT: Final = (
    "Your work on the last message was interrupted because your process ended. Check what is already done, then "
    "continue and finish the rest. Do not repeat completed work."
)
"""The input that resumes an interrupted turn; the message itself is in the thread's history."""

MAX_THREADS: Final = 1000
"""Threads that a registry keeps, a few hundred bytes each."""

TurnInput: TypeAlias = Sequence[JsonObject]
"""The items of `turn/start` and `turn/steer`: texts and images."""


def text_input(text: str) -> TurnInput:
    """Return the turn input that consists of one text."""
    return [{"type": "text", "text": text}]


def input_texts(items: TurnInput) -> list[str]:
    """Return the texts of a turn input, without its images."""
    return [text for item in items if isinstance(text := item.get("text"), str)]


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """Options of one turn; None means the thread's own. `output_schema` is a JSON Schema of the answer."""

    model: str | None = None
    effort: str | None = None
    cwd: Path | None = None
    output_schema: JsonObject | None = None

    def params(self) -> JsonObject:
        """Return the fields of `turn/start`."""
        cwd = None if self.cwd is None else str(self.cwd)
        own: JsonObject = {"model": self.model, "effort": self.effort, "cwd": cwd, "outputSchema": self.output_schema}
        return {name: value for name, value in own.items() if value is not None}


HANDOVER_TOOL: Final = "hand_over_file"
"""The name of the tool that hands a file of the workspace to the sender of the message."""


@dataclass(frozen=True, slots=True)
class DynamicToolCall:
    """A call by the model of a tool that this agent provides."""

    tool: str
    arguments: JsonValue


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request of codex that must be answered before its turn continues."""

    id: str
    subject: Question | DynamicToolCall
    request: Request


class TurnRecord(Enum):
    """What codex's history says about a turn that has no recorded end."""

    INTERRUPTED = auto()
    """The thread's history holds the message, but its turn did not end."""
    MISSING = auto()
    """The thread's history does not hold the message."""


MAX_DEATHS: Final = 2
"""A message fails if this many codex processes died during its turns."""

MAX_RESTARTS: Final = 5
"""A message fails if this many agent processes ended during its turns, because it may be the cause. Regular stops count
too, because they cannot be told apart."""


class RecoveryPolicy(StrEnum):
    """What happens with an interrupted turn.

    resume: a further turn tells the model to continue. rerun: the message is sent again. fail: the task fails.
    """

    RESUME = "resume"
    RERUN = "rerun"
    FAIL = "fail"


def next_step(
    policy: RecoveryPolicy,
    found: TurnCompleted | TurnRecord,
    turn_input: TurnInput,
    deaths: int,
    restarts: int,
    why: str,
) -> TurnInput | TurnCompleted | str:
    """Return how to continue with a message whose turn was interrupted.

    Args:
        policy: the configured policy.
        found: the turn's end in codex's record, or the state of the message there.
        turn_input: the message.
        deaths: how many codex processes ended during the message's turns.
        restarts: how many agent processes ended during them.
        why: the reason of the interruption.

    Returns:
        The input of a further turn; the end of the turn, if it had ended; or a sentence: why the task fails.
    """
    if isinstance(found, TurnCompleted):
        return found
    if deaths >= MAX_DEATHS:
        return f"Codex ended {deaths} times while it worked on this message, most recently: {why}."
    if restarts >= MAX_RESTARTS:
        return f"The agent ended {restarts} times while it worked on this message; the message is not retried."
    if found is TurnRecord.MISSING or policy is RecoveryPolicy.RERUN:
        return turn_input
    if policy is RecoveryPolicy.RESUME:
        return text_input(CONTINUE_PROMPT)
    return f"The turn was interrupted: {why}. Send the message again to continue."


@dataclass(frozen=True, slots=True)
class BackendStats:
    """How many processes were started and how many died; the threads and memory in bytes of the running one."""

    starts: int
    deaths: int
    is_up: bool
    threads: int
    resident_bytes: int


class TurnInfo(Protocol):
    """What telemetry reads of a running turn."""

    @property
    def thread_id(self) -> str:
        """The thread's id."""

    @property
    def turn_id(self) -> str:
        """The turn's own id, at most 64 characters."""

    @property
    def ended(self) -> TurnCompleted | None:
        """How the turn ended; None while it runs."""

    @property
    def usage(self) -> TokenUsage | None:
        """The turn's tokens so far; None while they are unknown."""


class RunningTurn(TurnInfo, Protocol):
    """A running turn: its events, its requests, and the ways to steer and to stop it."""

    @property
    def thread_usage(self) -> TokenUsage | None:
        """The tokens of the whole thread."""

    @property
    def pending(self) -> PendingRequest | None:
        """The oldest request that waits for an answer."""

    def answer(self, pending: PendingRequest, result: JsonObject) -> None:
        """Answer a pending request."""

    def wake(self) -> None:
        """Make `receive` return, with no events if there are none."""

    async def steer(self, turn_input: TurnInput, client_message_id: str | None = None) -> bool:
        """Add input to the running turn; return False if the turn does not accept it."""

    def interrupt(self) -> None:
        """Request that the turn stops; `receive` continues until it has ended."""

    async def receive(self, by: float = math.inf, text_by: float = -math.inf) -> list[AgentEvent]:
        """Wait for events and return them; return none once `ended` is set, or at the time `by`.

        Further pieces of a text that has begun need not end the wait before the time `text_by`.

        Raises:
            CodexGone: the process died; the turn will not end.
        """

    def kill(self) -> None:
        """Kill the process that runs the turn."""


T_co = TypeVar("T_co", bound=RunningTurn, covariant=True)


@dataclass(frozen=True, slots=True)
class StartedTurn(Generic[T_co]):
    """A turn that has started; `note` is for the user, for example that the thread's history was lost."""

    turn: T_co
    note: str | None


class ThreadLease(Protocol):
    """Exclusive access to one thread; the holder may run any number of turns."""

    def turn(
        self, turn_input: TurnInput, client_message_id: str | None = None, options: TurnOptions | None = None
    ) -> AbstractAsyncContextManager[StartedTurn[RunningTurn]]:
        """Start a turn; leaving the block stops it if it still runs."""

    async def recorded_end(
        self, client_message_id: str, turn_input: TurnInput, turn_id: str | None = None
    ) -> TurnCompleted | TurnRecord:
        """Return from codex's history how an earlier turn with input `turn_input` ended, or that it has no end.

        Args:
            client_message_id: the prefix of the client message ids that the turns of this message were started with.
            said: the input.
            turn_id: the id of the last of those turns, if it is known.
        """


class Thread(Protocol):
    """One context: its thread, and the queue for it."""

    @property
    def busy(self) -> bool:
        """Whether a turn runs or waits."""

    def lease(self) -> AbstractAsyncContextManager[ThreadLease]:
        """Wait for exclusive access to the thread, and hold it while the block is open."""


class BackendLifecycle(Protocol):
    """Start and readiness of the program behind a backend."""

    async def start(self) -> Version:
        """Start the program without retries, and return its version; raise CodexCannotStart if it fails."""

    @property
    def broken_reason(self) -> str | None:
        """Why the program counts as broken; None if it does not."""

    async def not_ready_reason(self, within_s: float) -> str | None:
        """Return why no turn could start now, or None; takes at most twice `within_s` seconds."""

    def stats(self) -> BackendStats:
        """Return the current process statistics."""


B_co = TypeVar("B_co", bound=Thread, covariant=True)


class ThreadRegistry(Generic[B_co]):
    """The threads of this process, one for each context of each owner; `make` creates the thread of a context."""

    def __init__(self, make: Callable[[str, str], B_co]) -> None:
        self._make = make
        self._known: OrderedDict[tuple[str, str], B_co] = OrderedDict()

    def get(self, owner: str, context_id: str) -> B_co:
        """Return the thread of a context; drop the least recently used idle ones, which are resumed when needed."""
        key = owner, context_id
        thread = self._known.get(key) or self._make(owner, context_id)
        self._known[key] = thread
        self._known.move_to_end(key)
        idle = [known for known, each in self._known.items() if not each.busy and known != key]
        for dropped in idle[: max(0, len(self._known) - MAX_THREADS)]:
            del self._known[dropped]
        return thread


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run the agent's turns. `steers`: whether a message can join a running turn."""

    lifecycle: BackendLifecycle
    threads: ThreadRegistry[Thread]
    steers: bool


class ThreadIdStore(Protocol):
    """Stores the thread id of one context."""

    async def load(self) -> str | None:
        """Return the context's thread id; None if it has no thread yet."""

    async def instructions(self) -> str | None:
        """Return the digest of the instructions that the thread was given last; None if there were none."""

    async def save(self, thread_id: str, instructions: str | None = None) -> None:
        """Store the context's thread id and the digest of its instructions; both are durable on return."""


@dataclass(frozen=True, slots=True)
class ToolCaller:
    """On whose behalf a tool is called: the owner of the conversation, and its context."""

    owner: str
    context_id: str
