"""Stores the A2A tasks; implements the SDK's task store.

The SDK saves a task after each event, and passes the event on when the save returns. What a new process could not
compute again is on the disk by then: a question, a file or a patch, and the end of a task whose end no delivery holds.
All else is written within `DELAY_S`, many tasks in one commit: a growing answer; the beginning of a task whose message
is a stored delivery; and an end that its delivery holds. Readers get the newest state from memory.
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from a2a.server.context import ServerCallContext
from a2a.server.owner_resolver import resolve_user_scope
from a2a.server.tasks.task_store import TaskStore as SdkTaskStore
from a2a.types import Artifact, ListTasksRequest, ListTasksResponse, Message, Part, Role, Task, TaskState, TaskStatus
from a2a.utils.constants import DEFAULT_LIST_TASKS_PAGE_SIZE
from a2a.utils.errors import InvalidParamsError
from a2a.utils.task import ListTasksCursor, decode_list_tasks_cursor, encode_list_tasks_cursor

from codex_workspace.common.a2a_terms import ANSWER, TERMINAL, WORKING
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.database import DELAY_S, Connection, Database, Value, retry_until_stored
from codex_workspace.storage.deliveries import Deliveries, acknowledge
from codex_workspace.storage.schema import IS_WORKING

logger = logging.getLogger(__name__)

MAX_NEW_IDS: Final = 1000
"""How many IDs of unsaved tasks are remembered; those of failed requests would stay otherwise."""

MAX_TIME_NS: Final = (1 << 63) - 1


@dataclass(slots=True)
class _OpenTask:
    """A task that this process works on, or whose newest state is not on the disk.

    task: the SDK's own object, which the SDK changes before it saves it. status: the newest status that readers may
    see. whole: how many artifacts besides the answer are on the disk. is_dirty: the disk lacks the newest state.
    """

    owner: str
    task: Task
    status: TaskStatus
    whole: int = 0
    is_dirty: bool = False

    def show(self, task: Task) -> None:
        """Let readers see a state."""
        self.task = task
        self.status.CopyFrom(task.status)


class TaskStore(SdkTaskStore):
    """The tasks of all owners, who see only their own ones."""

    def __init__(self, database: Database, deliveries: Deliveries, delay_s: float = DELAY_S) -> None:
        self._new_ids: OrderedDict[str, None] = OrderedDict()
        self._database = database
        self._deliveries = deliveries
        self._delay_s = delay_s
        self._open: dict[tuple[str, str], _OpenTask] = {}
        self._storing: dict[str, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None

    def make_id(self) -> str:
        """Return the ID of a new task. The SDK looks it up three times before it saves the task, without a query."""
        task_id = str(uuid.uuid4())
        self._new_ids[task_id] = None
        if len(self._new_ids) > MAX_NEW_IDS:
            self._new_ids.popitem(last=False)
        return task_id

    async def save(self, task: Task, context: ServerCallContext) -> None:
        """Save a task; what could not be computed again is on the disk on return."""
        key = resolve_user_scope(context), task.id
        _arrange(task)
        known = self._open.get(key)
        if self._must_be_stored(task, known):
            await self._store(key, task)
        else:
            self._save_later(key, task)

    def _must_be_stored(self, task: Task, known: _OpenTask | None) -> bool:
        if task.status.state in TERMINAL:
            return task.id not in self._deliveries.answered_tasks
        if task.status.state not in WORKING or _whole(task) > (known.whole if known else 0):
            return True
        return known is None and task.id not in self._deliveries.accepted_tasks

    async def _store(self, key: tuple[str, str], task: Task) -> None:
        """Write a task; readers see its earlier status until it is on the disk."""
        known, stored = self._open.get(key), self._storing.setdefault(task.id, asyncio.Event())
        if known is not None:
            # What was to be written later is part of this write.
            known.is_dirty = False
        try:
            await self._write(_row_of(key[0], task))
            self._new_ids.pop(task.id, None)
            if task.status.state in WORKING:
                known = self._open.setdefault(key, _OpenTask(key[0], task, TaskStatus()))
                known.show(task)
                known.whole = _whole(task)
            else:
                self._close(key, task.status.state)
        except asyncio.CancelledError:
            self._save_later(key, task)
            raise
        finally:
            self._storing.pop(task.id, None)
            stored.set()

    def _save_later(self, key: tuple[str, str], task: Task) -> None:
        known = self._open.setdefault(key, _OpenTask(key[0], task, TaskStatus()))
        known.show(task)
        known.is_dirty = True
        self._new_ids.pop(task.id, None)
        self._write_soon()

    @retry_until_stored
    async def _write(self, row: "_Row") -> None:
        await self._database.write(row.write)

    def _close(self, key: tuple[str, str], state: TaskState) -> None:
        self._open.pop(key, None)
        if state in TERMINAL:
            self._deliveries.forget(key[1])

    async def settled(self, task_id: str) -> None:
        """Wait while a state of a task is being stored: the SDK shows it to some callers before."""
        while task_id in self._storing:
            await self._storing[task_id].wait()

    async def get(self, task_id: str, context: ServerCallContext) -> Task | None:
        """Return a copy of the task's newest state; None if the caller has no such task."""
        owner = resolve_user_scope(context)
        if task_id in self._new_ids:
            return None
        known = self._open.get((owner, task_id))
        if known is None:
            query = "select body from tasks where id = ? and owner = ?"
            return await self._database.lookup(lambda rows: rows.first(Task.FromString, query, task_id, owner))
        copy = Task()
        copy.CopyFrom(known.task)
        copy.status.CopyFrom(known.status)
        return copy

    async def list(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """Return a page of the caller's tasks, in their newest state, those that changed last first."""
        with suppress(StoreUnavailable):
            await self.flush()
        return await self._database.read(partial(_page, resolve_user_scope(context), params))

    async def delete(self, task_id: str, context: ServerCallContext) -> None:
        """Delete the task."""
        owner = resolve_user_scope(context)
        self._open.pop((owner, task_id), None)
        await self._database.write(
            lambda rows: rows.change("delete from tasks where id = ? and owner = ?", task_id, owner)
        )

    async def flush(self) -> None:
        """Write all pending states.

        Raises:
            StoreUnavailable: nothing can be stored now; the states stay pending.
        """
        await asyncio.shield(asyncio.gather(*self._submit()))
        await self._database.flush()

    async def close(self) -> None:
        """Write all pending states, if they can be stored."""
        with suppress(StoreUnavailable):
            await self.flush()
        if self._timer is not None:
            self._timer.cancel()

    def _write_soon(self) -> None:
        """Write all pending states after the delay, unless the database is being closed."""
        if self._timer is None and not self._database.is_closing:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._submit)

    def _submit(self) -> Sequence[asyncio.Future[None]]:
        """Have all pending states written; they share a commit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        submitted: list[asyncio.Future[None]] = []
        for key, known in self._open.items():
            if known.is_dirty and not self._database.is_closing:
                known.is_dirty = False
                write = self._database.submit(_row_of(known.owner, known.task).write)
                write.add_done_callback(partial(self._after_submit, key, known))
                submitted.append(write)
        return submitted

    def _after_submit(self, key: tuple[str, str], known: _OpenTask, submitted: asyncio.Future[None]) -> None:
        error = submitted.exception()
        if error is not None:
            logger.log(
                logging.DEBUG if isinstance(error, StoreUnavailable) else logging.ERROR, "a task waits: %s", error
            )
            known.is_dirty = True
            self._write_soon()
        elif not known.is_dirty and known.status.state not in WORKING:
            self._close(key, known.status.state)

    async def fail_unfinished(self, sentence: str, excluded: Collection[str] = ()) -> int:
        """Mark the tasks that an earlier process left unfinished as failed, except `excluded`; return how many."""
        query = f"select owner, body from tasks where {IS_WORKING}"
        found = await self._database.read(
            lambda rows: rows.all(lambda owner, body: (owner, Task.FromString(body)), query)
        )
        left = [(owner, task) for owner, task in found if task.id not in excluded]
        for owner, task in left:
            task.status.CopyFrom(_failed(task, sentence))
            await self._write(_row_of(owner, task))
        return len(left)


def _arrange(task: Task) -> None:
    """Keep the answer in one part, and the last artifact: some clients show only the last."""
    for index, artifact in enumerate(task.artifacts):
        if artifact.artifact_id == ANSWER:
            join_text(artifact)
            if index + 1 < len(task.artifacts):
                task.artifacts.append(task.artifacts.pop(index))
            return


def join_text(artifact: Artifact) -> None:
    """Join neighbouring parts that are only text, so that an answer that grows stays one part."""
    parts, index = artifact.parts, 1
    while index < len(parts):
        if _is_text(parts[index - 1]) and _is_text(parts[index]):
            parts[index - 1].text += parts[index].text
            del parts[index]
        else:
            index += 1


def _is_text(part: Part) -> bool:
    return part.HasField("text") and not (part.metadata.fields or part.filename or part.media_type)


def _whole(task: Task) -> int:
    """Return the number of artifacts other than the answer."""
    return sum(artifact.artifact_id != ANSWER for artifact in task.artifacts)


@dataclass(frozen=True, slots=True)
class _Row:
    """A task as it is written."""

    owner: str
    id: str
    context_id: str
    state: str
    updated_at: int
    body: bytes
    has_ended: bool

    def write(self, rows: Connection) -> None:
        """Insert or replace the row; acknowledge the task's deliveries if it has ended."""
        rows.change(
            "insert into tasks (id, owner, context_id, state, updated_at, body) values (?, ?, ?, ?, ?, ?) "
            "on conflict (id) do update set context_id = excluded.context_id, state = excluded.state, "
            "updated_at = excluded.updated_at, body = excluded.body where tasks.owner = excluded.owner",
            *(self.id, self.owner, self.context_id, self.state, self.updated_at, self.body),
        )
        if self.has_ended:
            acknowledge(rows, self.id)


def _row_of(owner: str, task: Task) -> _Row:
    """Return the row of a task, as it is now."""
    status = task.status
    state, at = TaskState.Name(status.state), status.timestamp.ToNanoseconds()
    return _Row(owner, task.id, task.context_id, state, at, task.SerializeToString(), status.state in TERMINAL)


def _page(owner: str, params: ListTasksRequest, rows: Connection) -> ListTasksResponse:
    conditions, values = ["owner = ?"], list[Value]([owner])
    if params.context_id:
        conditions.append("context_id = ?")
        values.append(params.context_id)
    if params.status:
        conditions.append("state = ?")
        values.append(TaskState.Name(params.status))
    if params.HasField("status_timestamp_after"):
        conditions.append("updated_at >= ?")
        # A column holds the years 1677 to 2262.
        values.append(max(-MAX_TIME_NS, min(params.status_timestamp_after.ToNanoseconds(), MAX_TIME_NS)))
    total = rows.first(int, f"select count(*) from tasks where {' and '.join(conditions)}", *values)
    if params.page_token:
        conditions.append("(updated_at, id) < (?, ?)")
        values += _position(params.page_token)
    size = params.page_size or DEFAULT_LIST_TASKS_PAGE_SIZE
    found = rows.all(
        lambda at, body: (int(at), Task.FromString(body)),
        f"select updated_at, body from tasks where {' and '.join(conditions)} "
        "order by updated_at desc, id desc limit ?",
        *(*values, size + 1),
    )
    page = ListTasksResponse(tasks=[task for _, task in found[:size]], total_size=total, page_size=size)
    if len(found) > size:
        at, task = found[size - 1]
        page.next_page_token = encode_list_tasks_cursor(ListTasksCursor(timestamp_ns=at, task_id=task.id))
    return page


def _position(page_token: str) -> tuple[int, str]:
    """Return the time and ID of the task after which a page begins."""
    cursor = decode_list_tasks_cursor(page_token)
    if cursor is None or not 0 <= (cursor.timestamp_ns or 0) <= MAX_TIME_NS:
        raise InvalidParamsError(message="pageToken: must be the nextPageToken of an earlier response")
    return cursor.timestamp_ns or 0, cursor.task_id


def _failed(task: Task, sentence: str) -> TaskStatus:
    status = TaskStatus(state=TaskState.TASK_STATE_FAILED)
    status.timestamp.GetCurrentTime()
    said = Message(
        role=Role.ROLE_AGENT,
        message_id=str(uuid.uuid4()),
        task_id=task.id,
        context_id=task.context_id,
        parts=[Part(text=sentence)],
    )
    status.message.CopyFrom(said)
    return status
