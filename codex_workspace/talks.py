"""What a job needs of codex, however codex is run: a conversation, the word in it, a turn; and how codex stands.

`conversation` has it by the app-server, `exec_conversation` by `codex exec`.
"""

import math
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from codex_workspace.conversation import Conversations, TurnOptions
from codex_workspace.events import TokenCount, TurnEnded, TurnEvent
from codex_workspace.history import Trace
from codex_workspace.supply import SupplyFigures
from codex_workspace.telemetry import Turn
from codex_workspace.turn import Asked, Input
from codex_workspace.versions import Version
from codex_workspace.wire import JsonObject


class RunningTurn(Turn, Protocol):
    """A running turn: its events as they come, what it asks, and the ways to join in and to stop it."""

    @property
    def thread_usage(self) -> TokenCount | None:
        """Those of the whole thread."""

    @property
    def asked(self) -> Asked | None:
        """What codex wants to know, the oldest question first."""

    def answer(self, asked: Asked, result: JsonObject) -> None:
        """Tell codex what it has asked for."""

    def wake(self) -> None:
        """Let `receive` return, if need be with nothing."""

    async def steer(self, said: Input, mark: str | None = None) -> bool:
        """Say something into the running turn; False where it takes nothing."""

    def interrupt(self) -> None:
        """Have the turn stopped; `receive` goes on until it has ended."""

    async def receive(self, by: float = math.inf) -> list[TurnEvent]:
        """Wait for something and return the events since; nothing once `ended` is set, or at the time `by`.

        Raises:
            CodexGone: codex died; the turn will not end.
        """

    def kill(self) -> None:
        """End the codex that runs it."""


class BegunTurn(Protocol):
    """A turn that has begun, and what its reader has to be told first."""

    @property
    def turn(self) -> RunningTurn:
        """The turn."""

    @property
    def note(self) -> str | None:
        """What its reader has to be told, such as that the thread's memory is lost."""


class Word(Protocol):
    """The word in one context: whoever holds it may speak as often as is needed."""

    def turn(
        self, said: Input, mark: str | None = None, options: TurnOptions | None = None
    ) -> AbstractAsyncContextManager[BegunTurn]:
        """Start a turn, and stop it if it still runs when the block is left."""

    async def recorded(self, mark: str, said: Input, turn_id: str | None = None) -> TurnEnded | Trace:
        """Return how an earlier turn with `said` ended by codex's own record, or its trace.

        Args:
            mark: how the ids begin that the turns with this message were started with.
            said: what was said in it.
            turn_id: the last one's id, where it is known.
        """


class Talk(Protocol):
    """One context: its thread, and the queue before it."""

    @property
    def busy(self) -> bool:
        """Whether a turn runs or waits."""

    def check(self, said: Input) -> None:
        """Refuse what codex would refuse; raises InputRefused."""

    def floor(self) -> AbstractAsyncContextManager[Word]:
        """Wait until nobody else speaks in this context; while the block is open, nobody else does."""


class Started(Protocol):
    """A codex that can be used."""

    @property
    def version(self) -> Version:
        """Its version."""


class Standing(Protocol):
    """How codex stands, for whoever runs the agent."""

    async def start(self) -> Started:
        """Have codex ready, without patience; raises CodexCannotStart where it cannot be."""

    @property
    def broken(self) -> str | None:
        """Why codex counts as broken; None while it does not."""

    async def not_ready(self, within_s: float) -> str | None:
        """Return why no turn could be begun, None when one could; takes up to `within_s` seconds or twice as long."""

    def figures(self) -> SupplyFigures:
        """Return what there is of codex at this moment."""

    async def close(self) -> None:
        """End codex; nothing is given out any more."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run codex. `steers`: whether a message can join a running turn."""

    codex: Standing
    conversations: Conversations[Talk]
    steers: bool
