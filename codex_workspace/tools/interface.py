"""What our own tools can do, as values: whoever does it is behind these protocols, whoever shows it to codex in front.

A peer's words are in fields that say so; they are information, and nobody's order.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from codex_workspace.common.errors import ToolRefused
from codex_workspace.common.values import JsonObject
from codex_workspace.runtimes.backend import ToolCaller
from codex_workspace.storage.memories import Exchange, Memory

_HANDLE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}:[A-Za-z0-9._-]{1,128}")


class PeerTaskState(StrEnum):
    """How far a peer is with what it was given."""

    DONE = "done"
    WORKING = "working"
    ASKING = "asking"
    FAILED = "failed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class PeerTaskHandle:
    """One piece of work at a peer; as text `peer:task`."""

    peer: str
    task: str

    def __str__(self) -> str:
        return f"{self.peer}:{self.task}"

    @classmethod
    def parse(cls, text: str) -> "PeerTaskHandle":
        """Read what `str` gave.

        Raises:
            ToolRefused: it is none.
        """
        if not _HANDLE.fullmatch(text):
            raise ToolRefused("That is no handle; take the one that delegate_task gave, as it is.")
        peer, _, task = text.partition(":")
        return cls(peer, task)


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A peer that may be given work.

    name: how the tools name it. described: the operator's words. problem: why it cannot be asked at the moment.
    card_text: what it says of itself.
    """

    name: str
    description: str = ""
    problem: str = ""
    card_text: str = ""


@dataclass(frozen=True, slots=True)
class PeerTaskReport:
    """How far a piece of work is. `said`: the peer's words. `handle`: None where there is nothing to ask about later.

    note: what is to be added in our own words.
    """

    peer: str
    state: PeerTaskState
    text: str = ""
    handle: PeerTaskHandle | None = None
    note: str = ""


class PeerTasks(Protocol):
    """Gives work to peers."""

    async def peers(self) -> Sequence[PeerInfo]:
        """Return the peers that may be given work."""

    async def delegate(self, peer: str, task: str, wait_s: float, continues: PeerTaskHandle | None) -> PeerTaskReport:
        """Give a peer work, or with `continues` say more to it; wait at most `wait_s` seconds for what comes of it.

        Raises:
            ToolRefused: there is no such peer, or it does not take it.
        """

    async def check(self, handle: PeerTaskHandle, wait_s: float) -> PeerTaskReport:
        """Tell how far a piece of work is; wait at most `wait_s` seconds for its end.

        Raises:
            ToolRefused: there is no such work.
        """


class MemoryTool(Protocol):
    """Remembers."""

    async def commit(self, caller: ToolCaller, content: str) -> None:
        """Keep a text; it is durable on return."""

    async def recall(self, caller: ToolCaller, query: str, limit: int) -> Sequence[Memory]:
        """Return what is remembered of `query`, the best first."""

    async def history(self, caller: ToolCaller, limit: int) -> Sequence[Exchange]:
        """Return what was said lately, oldest first."""


class UserNotifier(Protocol):
    """Reaches the user beside the answer."""

    async def notify(self, caller: ToolCaller, text: str) -> None:
        """Send the user a message now.

        Raises:
            ToolRefused: it could not be sent.
        """


class FileHandover(Protocol):
    """Hands files over to whoever sent the message that a caller works on."""

    async def hand_over(self, caller: ToolCaller, arguments: JsonObject) -> str:
        """Hand over the file that `arguments` name; return what the model is told of it.

        Raises:
            ToolRefused: it cannot be handed over.
        """


@dataclass(frozen=True, slots=True)
class Toolbox:
    """All that the tools can do.

    notifier: None where a user can be reached by answers only. handover: None where codex has another tool for it.
    """

    peer_tasks: PeerTasks
    memory: MemoryTool
    notifier: UserNotifier | None = None
    files: FileHandover | None = None
