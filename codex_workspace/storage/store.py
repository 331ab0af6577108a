"""The store: opens the database and holds the contexts' thread IDs, the A2A tasks, and the other tables.

SQLite by default (a file in the state folder, WAL mode), or another database by its URL. Each row belongs to a
principal (`owner`), who sees only their own rows.
"""

import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import anyio
from a2a.server.context import ServerCallContext
from a2a.server.models import TaskModel
from a2a.server.owner_resolver import resolve_user_scope
from a2a.server.tasks import DatabaseTaskStore, TaskStore
from a2a.types import ListTasksRequest, ListTasksResponse, Message, Part, Role, Task, TaskState, TaskStatus
from google.protobuf.json_format import MessageToDict
from sqlalchemy import Column, ColumnElement, and_, event, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from codex_workspace.common.a2a_terms import ANSWER, TERMINAL, WORKING, state_names
from codex_workspace.common.errors import ConfigError, StoreUnavailable
from codex_workspace.storage.database import WriteHealth, require_intact, retry_until_stored, sqlite_file
from codex_workspace.storage.deliveries import Deliveries, acknowledgement
from codex_workspace.storage.memories import ConversationLog, Memories
from codex_workspace.storage.outbox import Outbox
from codex_workspace.storage.push_configs import PushConfigs
from codex_workspace.storage.retention import Retention
from codex_workspace.storage.schema import contexts as _contexts
from codex_workspace.storage.schema import create_schema, require_known_version, version_of
from codex_workspace.storage.schema import main_contexts as _main_contexts

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S: Final = 1.0
"""A working task is written at most this often; a change of its state is written at once."""

BUSY_TIMEOUT_S: Final = 10.0

MAX_LOG_BYTES: Final = 16 << 20
"""The size to which SQLite truncates its write-ahead log after a burst."""

MAX_NEW_IDS: Final = 1000
"""How many IDs of unsaved tasks are remembered; those of failed requests would stay otherwise."""


class Store:
    """The persistent state of one agent."""

    def __init__(self, engine: AsyncEngine, lookups: AsyncEngine | None = None) -> None:
        self._engine = engine
        self._lookups = lookups or engine
        self.tasks: Final = DebouncedTaskStore(DatabaseTaskStore(engine, create_table=False))
        self.deliveries: Final = Deliveries(engine, lookups)
        self.push_configs: Final = PushConfigs(engine, self.tasks)
        self.memories: Final = Memories(engine)
        self.conversations: Final = ConversationLog(lookups or engine)
        self.outbox: Final = Outbox(engine)
        self._health = WriteHealth(engine, *([lookups] if lookups not in (None, engine) else []))

    async def main_context(self, owner: str) -> str:
        """Return the owner's main context; the first call creates it."""
        known = select(_main_contexts.c.context_id).where(_main_contexts.c.owner == owner)
        async with self._lookups.connect() as connection:
            context_id = (await connection.execute(known)).scalar_one_or_none()
        if context_id is not None:
            return str(context_id)
        try:
            async with self._engine.begin() as connection:
                made = str(uuid.uuid4())
                await connection.execute(insert(_main_contexts).values(owner=owner, context_id=made))
                return made
        except IntegrityError:
            # Another message of the same owner created it first.
            async with self._engine.connect() as connection:
                return str((await connection.execute(known)).scalar_one())

    def context_thread(self, owner: str, context_id: str) -> "ContextThreadId":
        """Return access to the thread ID of a context."""
        return ContextThreadId(self._engine, owner, context_id)

    async def initialize(self) -> None:
        """Create the schema in an empty database.

        Raises:
            ConfigError: the database has another schema version.
        """
        async with self._engine.connect() as connection:
            version = await connection.run_sync(version_of)
        require_known_version(version, self._engine.url.render_as_string(hide_password=True))
        if version == 0:
            async with self._engine.begin() as connection:
                await connection.run_sync(create_schema)

    def retention(self, keep_days: float, keep_tasks: int) -> Retention:
        """Return the retention of old tasks."""
        return Retention(self._engine, keep_days, keep_tasks)

    async def write_problem(self) -> str | None:
        """Return why the database cannot be written to; None if no problem is known. Probes the database again."""
        return await self._health.problem()

    @retry_until_stored
    async def fail_unfinished(self, sentence: str, excluded: Collection[str] = ()) -> int:
        """Mark the tasks that an earlier process left unfinished as failed, except `excluded`; return how many."""
        unfinished = TaskModel.status["state"].as_string().in_(state_names(WORKING))
        async with self._engine.begin() as connection:
            rows = await connection.execute(select(TaskModel.id, TaskModel.context_id).where(unfinished))
            left = [row for row in rows if row.id not in excluded]
            for task_id, context_id in left:
                status = _failed(task_id, context_id, sentence)
                changed = {"status": MessageToDict(status), "last_updated": status.timestamp.ToDatetime()}
                await connection.execute(update(TaskModel).where(TaskModel.id == task_id).values(changed))
        return len(left)


def _failed(task_id: str, context_id: str, sentence: str) -> TaskStatus:
    status = TaskStatus(state=TaskState.TASK_STATE_FAILED)
    status.timestamp.GetCurrentTime()
    said = Message(
        role=Role.ROLE_AGENT,
        message_id=str(uuid.uuid4()),
        task_id=task_id,
        context_id=context_id,
        parts=[Part(text=sentence)],
    )
    status.message.CopyFrom(said)
    return status


@dataclass(frozen=True, slots=True)
class ContextThreadId:
    """The thread ID of a context, and the digest of the instructions that the thread received last."""

    engine: AsyncEngine
    owner: str
    context_id: str

    async def load(self) -> str | None:
        """Return the thread ID; None if the context has none yet."""
        return await self._load(_contexts.c.thread_id)

    async def instructions(self) -> str | None:
        """Return the digest of the instructions that the thread received last; None if it received none."""
        return await self._load(_contexts.c.instructions)

    async def _load(self, column: Column[str]) -> str | None:
        async with self.engine.connect() as connection:
            found: str | None = (await connection.execute(select(column).where(self._key()))).scalar_one_or_none()
            return found

    @retry_until_stored
    async def save(self, thread_id: str, instructions: str | None = None) -> None:
        """Store the thread ID and the digest of its instructions durably."""
        kept = {"thread_id": thread_id, "instructions": instructions}
        async with self.engine.begin() as connection:
            changed = await connection.execute(update(_contexts).where(self._key()).values(kept))
            if changed.rowcount == 0:
                row = {"owner": self.owner, "context_id": self.context_id, "created_at": time.time()}
                await connection.execute(insert(_contexts).values(kept | row))

    def _key(self) -> ColumnElement[bool]:
        return and_(_contexts.c.owner == self.owner, _contexts.c.context_id == self.context_id)


class TaskIdFactory:
    """Generates the IDs of new tasks, and remembers those that have not been saved.

    The SDK looks up a task that it has just created three times; each lookup would be a query.
    """

    def __init__(self) -> None:
        self._made: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, task_id: str) -> bool:
        """Whether the ID was generated here and its task has not been saved."""
        return task_id in self._made

    def make(self) -> str:
        """Return a new ID."""
        task_id = str(uuid.uuid4())
        self._made[task_id] = None
        if len(self._made) > MAX_NEW_IDS:
            self._made.popitem(last=False)
        return task_id

    def forget(self, task_id: str) -> None:
        """Record that the task was saved."""
        self._made.pop(task_id, None)


class DebouncedTaskStore(TaskStore):
    """The SDK's task store without a database write for every delta.

    The SDK saves a task after each event. A save that changes the state or adds a file or patch is written at once. A
    save that only extends the answer or the history of a working task is written at most every `SAVE_INTERVAL_S`.
    Readers always get the newest state.
    """

    def __init__(self, written: DatabaseTaskStore, interval_s: float = SAVE_INTERVAL_S) -> None:
        self.new_ids: Final = TaskIdFactory()
        self._written = written
        self._interval_s = interval_s
        self._working: dict[tuple[str, str], _Working] = {}

    async def initialize(self) -> None:
        """Initialize the SDK's store."""
        await self._written.initialize()

    async def save(self, task: Task, context: ServerCallContext) -> None:
        """Save a task; a change of its state is on disk on return."""
        key = (resolve_user_scope(context), task.id)
        known, now = self._working.get(key), time.monotonic()
        is_fresh = known is not None and now - known.written_at < self._interval_s
        if known is not None and task.status.state == known.state and is_fresh and not known.lacks_some_of(task):
            known.task, known.clean = task, False
            return
        if task.status.state == TaskState.TASK_STATE_WORKING and known is None and task.id not in self.new_ids:
            # It was written as submitted a moment ago, which is unfinished as well.
            self._working[key] = _Working(task, context, task.status.state, now)
            return
        if known is not None and task.status.state == known.state:
            known.task, known.written_at, known.written = task, now, _whole(task)
            await self._write_growth(known)
            return
        if known is not None:
            # The pending state is older: `flush` must not write it afterwards.
            known.superseded = True
        await self._write(task, context, is_known=known is not None)
        if task.status.state == TaskState.TASK_STATE_WORKING:
            self._working[key] = _Working(task, context, task.status.state, now, clean=True, written=_whole(task))
        else:
            self._working.pop(key, None)

    async def get(self, task_id: str, context: ServerCallContext) -> Task | None:
        """Return a copy of the task's newest state; None if the caller has no such task."""
        if task_id in self.new_ids:
            return None
        working = self._working.get((resolve_user_scope(context), task_id))
        if working is None:
            return await self._written.get(task_id, context)
        copy = Task()
        copy.CopyFrom(working.task)
        return copy

    async def list(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """Return the caller's tasks, in their newest state."""
        await self.flush()
        return await self._written.list(params, context)

    async def delete(self, task_id: str, context: ServerCallContext) -> None:
        """Delete the task."""
        self._working.pop((resolve_user_scope(context), task_id), None)
        await self._written.delete(task_id, context)

    async def flush(self) -> None:
        """Write all pending states."""
        for working in list(self._working.values()):
            if not (working.clean or working.superseded):
                await self._write_growth(working)

    @retry_until_stored
    async def _write(self, task: Task, context: ServerCallContext, *, is_known: bool) -> None:
        if not is_known or not await self._update(task, resolve_user_scope(context)):
            await self._written.save(task, context)
            self.new_ids.forget(task.id)
            async with self._written.engine.begin() as connection:
                await _acknowledge(connection, task)

    async def _write_growth(self, working: "_Working") -> None:
        """Write the state of a working task; if the disk is full, it stays pending."""
        working.clean = True
        try:
            if not await self._update(working.task, resolve_user_scope(working.context)):
                await self._written.save(working.task, working.context)
        except StoreUnavailable:
            working.clean = False

    async def _update(self, task: Task, owner: str) -> bool:
        """Update the row of a task that was written before; return False if it is gone.

        The SDK's `save` reads the task first, which doubles the time between the end of a turn and its last event. The
        columns have the SDK's content.
        """
        changed = {
            TaskModel.status: MessageToDict(task.status),
            TaskModel.artifacts: [MessageToDict(artifact) for artifact in task.artifacts],
            TaskModel.history: [MessageToDict(message) for message in task.history],
            TaskModel.task_metadata: MessageToDict(task.metadata) or None,
            TaskModel.last_updated: task.status.timestamp.ToDatetime() if task.status.HasField("timestamp") else None,
        }
        row = and_(TaskModel.id == task.id, TaskModel.owner == owner)
        async with self._written.engine.begin() as connection:
            done = await connection.execute(update(TaskModel).where(row).values(changed))
            await _acknowledge(connection, task)
        return done.rowcount > 0


async def _acknowledge(connection: AsyncConnection, task: Task) -> None:
    """Acknowledge the deliveries of a task that has ended."""
    if task.status.state in TERMINAL:
        await connection.execute(acknowledgement(task.id))


@dataclass(slots=True)
class _Working:
    """A working task: its newest state, when it was written last, and how many whole artifacts were written."""

    task: Task
    context: ServerCallContext
    state: int
    written_at: float
    clean: bool = False
    superseded: bool = False
    written: int = 0

    def lacks_some_of(self, task: Task) -> bool:
        """Whether a whole artifact, such as a patch, is not on disk yet."""
        return _whole(task) > self.written


def _whole(task: Task) -> int:
    """Return the number of artifacts other than the answer."""
    return sum(artifact.artifact_id != ANSWER for artifact in task.artifacts)


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[Store]:
    """Open the store at a SQLAlchemy database URL; leaving the block writes pending states and closes it.

    Raises:
        ConfigError: the database cannot be opened, is damaged or another program's, or has another schema version.
    """
    file = sqlite_file(url)
    if file is not None:
        await anyio.to_thread.run_sync(require_intact, file)
    try:
        engine = _engine(url)
        lookups = engine if file is None else _sqlite_engine(url)
    except (ImportError, SQLAlchemyError) as error:
        raise ConfigError(
            f"DATABASE_URL: {make_url(url).drivername} cannot be used ({error}); name an asynchronous driver "
            "and install it, such as sqlite+aiosqlite or postgresql+asyncpg"
        ) from error
    try:
        store = Store(engine, lookups)
        try:
            await store.initialize()
        except (SQLAlchemyError, StoreUnavailable, OSError) as error:
            cause = error.__cause__ if isinstance(error, StoreUnavailable) else getattr(error, "orig", None) or error
            shown = engine.url.render_as_string(hide_password=True)
            raise ConfigError(f"DATABASE_URL: the database {shown} cannot be opened: {cause}") from error
        yield store
        await store.tasks.flush()
    finally:
        # Otherwise aiosqlite's threads keep the process alive.
        await lookups.dispose()
        await engine.dispose()


def _engine(url: str) -> AsyncEngine:
    if not make_url(url).drivername.startswith("sqlite"):
        return create_async_engine(url, pool_pre_ping=True, hide_parameters=True)
    # One connection: SQLite has one writer, and waiting for the pool is fairer than its busy loop.
    engine = _sqlite_engine(url)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine


def _sqlite_engine(url: str) -> AsyncEngine:
    # Parameters hold users' messages: a logged error must not show them.
    return create_async_engine(
        url, pool_size=1, max_overflow=0, connect_args={"timeout": BUSY_TIMEOUT_S}, hide_parameters=True
    )


def _prepare_sqlite(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    # FULL: a power failure loses no commit; each commit flushes the disk.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"journal_size_limit={MAX_LOG_BYTES}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
