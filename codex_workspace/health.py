"""Whether the database takes what is written: heard from its errors, and found out by writing.

An error that says that nothing can be written now becomes `StoreUnavailable`, for every user of the engine.
"""

import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import anyio
from sqlalchemy import Column, Integer, LargeBinary, Table, delete, event, insert
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from codex_workspace.errors import StoreUnavailable
from codex_workspace.tables import tables

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 3.0
"""While something is wrong, whoever asks has a row written at most this often."""

PROBE_BYTES: Final = 1 << 18
"""Room for a few messages, not only for the next bytes of a page that is there already."""

TRY_AGAIN_S: Final = 1.0

_REASONS: Final = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_READONLY: "the database cannot be written",
    sqlite3.SQLITE_CANTOPEN: "the database cannot be opened",
    sqlite3.SQLITE_BUSY: "another program holds the database",
}
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_probe = Table(
    "write_probe",
    tables,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("filler", LargeBinary, nullable=False),
)

P = ParamSpec("P")
T = TypeVar("T")


class Health:
    """What is wrong with an engine's database, from its first error until something can be written again."""

    def __init__(self, engine: AsyncEngine, *others: AsyncEngine) -> None:
        """Hear the errors of the engine that is written to, and of the `others` on the same database."""
        self._engine = engine
        self._reason: str | None = None
        self._lasting = False
        self._probe_at = 0.0
        for each in (engine, *others):
            event.listen(each.sync_engine, "handle_error", self._hear)

    async def problem(self) -> str | None:
        """Return what is wrong; None where nothing is known to be, or is no more."""
        now = time.monotonic()
        if self._reason is not None and not self._lasting and now >= self._probe_at:
            self._probe_at = now + PROBE_INTERVAL_S
            await self._try()
        return self._reason

    async def _try(self) -> None:
        try:
            async with self._engine.begin() as connection:
                await connection.execute(delete(_probe))
                await connection.execute(insert(_probe).values(id=1, filler=bytes(PROBE_BYTES)))
            # Room is shown by a commit only: what is rolled back never reaches the disk.
            async with self._engine.begin() as connection:
                await connection.execute(delete(_probe))
        except (StoreUnavailable, SQLAlchemyError, OSError) as error:
            logger.debug("the database still takes nothing: %s", error)
        else:
            logger.warning("the database takes what is written again (%s before)", self._reason)
            self._reason = None

    def _hear(self, context: ExceptionContext) -> None:
        if not isinstance(context.original_exception, Exception):
            # A caller that was cancelled says nothing of the database.
            return
        code = getattr(context.original_exception, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            self._lasting = True
            self._note("the database is damaged; see `python -m codex_workspace doctor`", context)
            return
        reason = _REASONS.get(code) or _reason_of_a_server(context)
        if reason is not None:
            self._note(reason, context)
            raise StoreUnavailable(
                f"The agent cannot write down anything now ({reason}); nothing was accepted, send it again later."
            ) from context.original_exception

    def _note(self, reason: str, context: ExceptionContext) -> None:
        if self._reason is None:
            logger.error("%s: %s", reason, context.original_exception)
            self._probe_at = time.monotonic() + PROBE_INTERVAL_S
        self._reason = reason


def _reason_of_a_server(context: ExceptionContext) -> str | None:
    if context.is_disconnect:
        return "the database is out of reach"
    # SQL's class 53 is "insufficient resources": disk, memory, connections.
    return "the disk is full" if str(getattr(context.original_exception, "sqlstate", "")).startswith("53") else None


def waits_for_room(write: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[object, object, T]]:
    """Have a write tried again until the database takes it: for what follows from a message that was accepted."""

    @wraps(write)
    async def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return await write(*args, **kwargs)
            except StoreUnavailable:
                await anyio.sleep(TRY_AGAIN_S)

    return waiting
