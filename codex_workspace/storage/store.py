"""What outlives the process: which thread a context is, and the A2A tasks. One SQLAlchemy engine holds it all.

SQLite by default (a file in the state folder, WAL mode); another database by its URL. Rows belong to a principal, named
by its `owner` string: nobody sees another's.
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
from sqlalchemy import Column, ColumnElement, Float, String, Table, and_, event, insert, select, update
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
from codex_workspace.storage.migrations import NEWEST, back_up, migrate, refuse_newer, version_of
from codex_workspace.storage.outbox import Outbox
from codex_workspace.storage.push_configs import PushConfigs
from codex_workspace.storage.retention import Retention
from codex_workspace.storage.schema import MAX_CONTEXT_ID_CHARS, tables

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S: Final = 1.0
"""A task that goes on working is written at most this often; each change of its state is written at once."""

BUSY_TIMEOUT_S: Final = 10.0

MAX_LOG_BYTES: Final = 16 << 20
"""What SQLite's write-ahead log may keep of the disk after a burst."""

MAX_NEW_IDS: Final = 1000
"""Ids of tasks to come that are kept: those of requests that failed before their task was saved would stay for ever."""

_contexts = Table(
    "contexts",
    tables,
    Column("owner", String(255), primary_key=True),
    Column("context_id", String(MAX_CONTEXT_ID_CHARS), primary_key=True),
    Column("thread_id", String(64), nullable=True),
    Column("created_at", Float, nullable=False),
    Column("instructions", String(64), nullable=True),
)
_main_contexts = Table(
    "main_contexts",
    tables,
    Column("owner", String(255), primary_key=True),
    Column("context_id", String(MAX_CONTEXT_ID_CHARS), nullable=False),
)


class Store:
    """Contexts and tasks of one agent."""

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
        """Return the owner's main context, made up at the first call."""
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
            # Another message of the same owner was first.
            async with self._engine.connect() as connection:
                return str((await connection.execute(known)).scalar_one())

    def context_thread(self, owner: str, context_id: str) -> "ContextThreadId":
        """Return the place of a context's thread id."""
        return ContextThreadId(self._engine, owner, context_id)

    async def initialize(self) -> None:
        """Bring the schema to the newest version; of a SQLite file that has an older one, a copy is kept.

        Raises:
            ConfigError: the schema is newer than this program, or there is no room for the copy.
        """
        url = self._engine.url
        file = sqlite_file(url.render_as_string(hide_password=False))
        async with self._engine.connect() as connection:
            version = await connection.run_sync(version_of)
        refuse_newer(version, url.render_as_string(hide_password=True), file)
        if version == NEWEST:
            return
        if version > 0 and file is not None:
            copy = await anyio.to_thread.run_sync(back_up, file, version)
            logger.info("the database goes from schema version %d to %d; what it was is in %s", version, NEWEST, copy)
        async with self._engine.begin() as connection:
            await connection.run_sync(migrate)

    def retention(self, keep_days: float, keep_tasks: int) -> Retention:
        """Return what forgets old tasks."""
        return Retention(self._engine, keep_days, keep_tasks)

    async def write_problem(self) -> str | None:
        """Return why nothing can be written, None where nothing is known to be wrong; asks the disk again by and by."""
        return await self._health.problem()

    @retry_until_stored
    async def fail_unfinished(self, sentence: str, spared: Collection[str] = ()) -> int:
        """End the tasks that an earlier process left unfinished as failed, `spared` ones excepted; return how many."""
        unfinished = TaskModel.status["state"].as_string().in_(state_names(WORKING))
        async with self._engine.begin() as connection:
            rows = await connection.execute(select(TaskModel.id, TaskModel.context_id).where(unfinished))
            left = [row for row in rows if row.id not in spared]
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
    """The thread of one context of one owner, and which instructions it was told last."""

    engine: AsyncEngine
    owner: str
    context_id: str

    async def load(self) -> str | None:
        """Return the thread id, None where the context has none yet."""
        async with self.engine.connect() as connection:
            found = await connection.execute(select(_contexts.c.thread_id).where(self._key()))
            thread_id: str | None = found.scalar_one_or_none()
            return thread_id

    async def instructions(self) -> str | None:
        """Return the digest of the instructions that the thread was told last, None where it was told none."""
        async with self.engine.connect() as connection:
            found = await connection.execute(select(_contexts.c.instructions).where(self._key()))
            digest: str | None = found.scalar_one_or_none()
            return digest

    @retry_until_stored
    async def save(self, thread_id: str, instructions: str | None = None) -> None:
        """Keep the thread id and the digest of the instructions that it was told; both are committed on return."""
        kept = {"thread_id": thread_id, "instructions": instructions}
        async with self.engine.begin() as connection:
            changed = await connection.execute(update(_contexts).where(self._key()).values(kept))
            if changed.rowcount == 0:
                row = {"owner": self.owner, "context_id": self.context_id, "created_at": time.time()}
                await connection.execute(insert(_contexts).values(kept | row))

    def _key(self) -> ColumnElement[bool]:
        return and_(_contexts.c.owner == self.owner, _contexts.c.context_id == self.context_id)


class TaskIdFactory:
    """Makes the ids of new tasks, and knows those that no task was saved under yet.

    The SDK looks three times for a task whose id it has just made up; each look would be a query.
    """

    def __init__(self) -> None:
        self._made: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, task_id: str) -> bool:
        """Tell whether the id was made here and is not in use; for one that is forgotten the database knows."""
        return task_id in self._made

    def make(self) -> str:
        """Return a new id."""
        task_id = str(uuid.uuid4())
        self._made[task_id] = None
        if len(self._made) > MAX_NEW_IDS:
            self._made.popitem(last=False)
        return task_id

    def forget(self, task_id: str) -> None:
        """Take note that there is a task of this id now."""
        self._made.pop(task_id, None)


class DebouncedTaskStore(TaskStore):
    """The SDK's task store, spared the rewriting of a whole task for every delta of its answer.

    The SDK saves a task after each event. A save that changes the state, or brings a file or a patch, is written at
    once, one that only adds to a working task's answer or notes at most every `SAVE_INTERVAL_S`; readers get the newest
    either way.
    """

    def __init__(self, written: DatabaseTaskStore, interval_s: float = SAVE_INTERVAL_S) -> None:
        self.new_ids: Final = TaskIdFactory()
        self._written = written
        self._interval_s = interval_s
        self._working: dict[tuple[str, str], _Working] = {}

    async def initialize(self) -> None:
        """Create the table if it is missing."""
        await self._written.initialize()

    async def save(self, task: Task, context: ServerCallContext) -> None:
        """Take the task over; it is on disk on return if its state has changed."""
        key = (resolve_user_scope(context), task.id)
        known, now = self._working.get(key), time.monotonic()
        is_fresh = known is not None and now - known.written_at < self._interval_s
        if known is not None and task.status.state == known.state and is_fresh and not known.lacks_some_of(task):
            known.task, known.clean = task, False
            return
        if task.status.state == TaskState.TASK_STATE_WORKING and known is None and task.id not in self.new_ids:
            # Written as submitted a moment ago: unfinished is unfinished.
            self._working[key] = _Working(task, context, task.status.state, now)
            return
        if known is not None and task.status.state == known.state:
            known.task, known.written_at, known.written = task, now, _whole(task)
            await self._write_growth(known)
            return
        if known is not None:
            # What waits is older than this: `flush` must not write it afterwards.
            known.superseded = True
        await self._write(task, context, is_known=known is not None)
        if task.status.state == TaskState.TASK_STATE_WORKING:
            self._working[key] = _Working(task, context, task.status.state, now, clean=True, written=_whole(task))
        else:
            self._working.pop(key, None)

    async def get(self, task_id: str, context: ServerCallContext) -> Task | None:
        """Return a copy of the newest state of the task, None for one that is not the caller's."""
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
        """Forget the task."""
        self._working.pop((resolve_user_scope(context), task_id), None)
        await self._written.delete(task_id, context)

    async def flush(self) -> None:
        """Write what waits."""
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
        """Write a task that goes on; where there is no room its readers get the newest all the same."""
        working.clean = True
        try:
            if not await self._update(working.task, resolve_user_scope(working.context)):
                await self._written.save(working.task, working.context)
        except StoreUnavailable:
            working.clean = False

    async def _update(self, task: Task, owner: str) -> bool:
        """Write what can change of a task that was written before; False where it is gone.

        The SDK's `save` reads the task first, in a session of its own. This stands between a turn's end and the word
        that it has ended, and takes half the time. The columns' content is the SDK's.
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
    """With a task's end its messages' source has the answer."""
    if task.status.state in TERMINAL:
        await connection.execute(acknowledgement(task.id))


@dataclass(slots=True)
class _Working:
    """A task at work: its newest state, when it was last written, and with how many whole artifacts."""

    task: Task
    context: ServerCallContext
    state: int
    written_at: float
    clean: bool = False
    superseded: bool = False
    written: int = 0

    def lacks_some_of(self, task: Task) -> bool:
        """Tell whether an artifact came whole, such as a patch, and is not on disk: it must outlive this process."""
        return _whole(task) > self.written


def _whole(task: Task) -> int:
    """Return how many artifacts a task has beside the one that grows."""
    return sum(artifact.artifact_id != ANSWER for artifact in task.artifacts)


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[Store]:
    """Open the store at a SQLAlchemy database URL; leaving writes what waits and closes it.

    Raises:
        ConfigError: the database cannot be opened, is damaged or another program's, or has a newer schema.
    """
    file = sqlite_file(url)
    if file is not None:
        await anyio.to_thread.run_sync(require_intact, file)
    try:
        engine = _engine(url)
        lookups = engine if file is None else _lookups(url)
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
        # Without this, aiosqlite's threads keep the process alive.
        await lookups.dispose()
        await engine.dispose()


def _engine(url: str) -> AsyncEngine:
    if not make_url(url).drivername.startswith("sqlite"):
        return create_async_engine(url, pool_pre_ping=True, hide_parameters=True)
    # One connection: SQLite has one writer, and waiting in our queue is fairer than its busy loop.
    engine = _sqlite_engine(url)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    return engine


def _lookups(url: str) -> AsyncEngine:
    """Return a connection for what stands between a request and its refusal: no commit is waited for."""
    return _sqlite_engine(url)


def _sqlite_engine(url: str) -> AsyncEngine:
    # Parameters are what people say: an error that is logged must not show them.
    return create_async_engine(
        url, pool_size=1, max_overflow=0, connect_args={"timeout": BUSY_TIMEOUT_S}, hide_parameters=True
    )


def _prepare_sqlite(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    # FULL: a power cut takes no commit. It costs a flush of the disk for each of a message's seven or so.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"journal_size_limit={MAX_LOG_BYTES}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
