"""What the two kinds of databases have in common: how connections are opened, and what errors mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from codex_workspace.storage.database import Connection


@dataclass(frozen=True, slots=True)
class Failure:
    """What an error of the driver means.

    reason: why the database cannot store anything now; None if the statement itself failed.
    is_lost: whether the connection is gone. is_damaged: whether the data is damaged, so that nothing more is written.
    """

    reason: str | None = None
    is_lost: bool = False
    is_damaged: bool = False


class Engine(Protocol):
    """A kind of database."""

    @property
    def name(self) -> str:
        """The database's name for messages, without a password."""

    @property
    def is_shared(self) -> bool:
        """Whether agents on other machines can use the database, so that the connection that writes locks it."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions of the driver, and of `connect_for_writing`."""

    @property
    def types(self) -> Mapping[str, str]:
        """The database's names of the types `blob` and `serial` (a number that the database assigns)."""

    @property
    def table_names(self) -> str:
        """A query for the names of the tables."""

    def connect(self) -> "Connection":
        """Open a connection for a thread of its own."""

    def connect_for_writing(self) -> "Connection":
        """Open a connection that keeps other agents out while it is open; raises DatabaseTaken if there is one."""

    def claim(self, connection: "Connection") -> None:
        """Record that this agent uses the database, so that an earlier one notices it."""

    def holder(self) -> str | None:
        """Return a description of the agent that keeps others out; None if there is none."""

    def connect_for_lookups(self) -> "Connection | None":
        """Open a connection for look-ups by the event loop; None if they would have to wait for a server."""

    def judge(self, error: Exception) -> Failure:
        """Tell what an error of the driver means."""
