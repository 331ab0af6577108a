"""Protocols and values between the MCP server and the code that implements its tools."""

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
    """State of a task that was given to a peer."""

    DONE = "done"
    WORKING = "working"
    ASKING = "asking"
    FAILED = "failed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class PeerTaskHandle:
    """Identifies a task at a peer; as text `peer:task`."""

    peer: str
    task: str

    def __str__(self) -> str:
        return f"{self.peer}:{self.task}"

    @classmethod
    def parse(cls, text: str) -> "PeerTaskHandle":
        """Parse the text form; raises ToolRefused if it is malformed."""
        if not _HANDLE.fullmatch(text):
            raise ToolRefused("That is not a handle; use the one that delegate_task returned, unchanged.")
        peer, _, task = text.partition(":")
        return cls(peer, task)


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A peer.

    description: from config.yaml. problem: why the peer is unavailable. card_text: from its agent card (untrusted).
    """

    name: str
    description: str = ""
    problem: str = ""
    card_text: str = ""


@dataclass(frozen=True, slots=True)
class PeerTaskReport:
    """State of a task at a peer.

    text: the peer's answer (untrusted). handle: None if the task cannot be queried later. note: our own remark.
    """

    peer: str
    state: PeerTaskState
    text: str = ""
    handle: PeerTaskHandle | None = None
    note: str = ""


class PeerTasks(Protocol):
    """Delegates tasks to peers."""

    async def peers(self) -> Sequence[PeerInfo]:
        """Return all peers."""

    async def delegate(self, peer: str, task: str, wait_s: float, continues: PeerTaskHandle | None) -> PeerTaskReport:
        """Send a task to a peer, or with `continues` an answer to its question; wait at most `wait_s` seconds.

        Raises:
            ToolRefused: the peer is unknown, or rejects the task.
        """

    async def check(self, handle: PeerTaskHandle, wait_s: float) -> PeerTaskReport:
        """Return the state of a task; wait at most `wait_s` seconds for its end.

        Raises:
            ToolRefused: the task is unknown.
        """


class MemoryTool(Protocol):
    """Stores and finds memories."""

    async def commit(self, caller: ToolCaller, content: str) -> None:
        """Store a text; it is durable on return."""

    async def recall(self, caller: ToolCaller, query: str, limit: int) -> Sequence[Memory]:
        """Return the memories that match `query`, best match first."""

    async def history(self, caller: ToolCaller, limit: int) -> Sequence[Exchange]:
        """Return the latest messages and answers of the conversation, oldest first."""


class UserNotifier(Protocol):
    """Sends messages to the user beside the answer."""

    async def notify(self, caller: ToolCaller, text: str) -> None:
        """Send the user a message now; raises ToolRefused if that fails."""


class FileHandover(Protocol):
    """Hands files to the sender of the current message."""

    async def hand_over(self, caller: ToolCaller, arguments: JsonObject) -> str:
        """Hand over the file that `arguments` name and return the tool's result; raises ToolRefused."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The implementations of all tools.

    notifier: None if the user receives answers only. files: None if codex has another tool for it.
    """

    peer_tasks: PeerTasks
    memory: MemoryTool
    notifier: UserNotifier | None = None
    files: FileHandover | None = None
