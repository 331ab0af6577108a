"""Old tasks are deleted with what belongs to them, and no others."""

import time

import pytest
from a2a.server.context import ServerCallContext
from a2a.types import Task, TaskPushNotificationConfig, TaskState

from codex_workspace.common.a2a_terms import AuthenticatedUser
from codex_workspace.storage.database import Database
from codex_workspace.storage.deliveries import Deliveries
from codex_workspace.storage.push_configs import PushConfigs
from codex_workspace.storage.retention import BATCH, Retention
from codex_workspace.storage.tasks import TaskStore
from tests.support.databases import change, column, insert_task

DAY_S = 86_400.0
ME = ServerCallContext(user=AuthenticatedUser("me"))


async def insert(
    database: Database,
    task_id: str,
    *,
    days_ago: float | None,
    state: TaskState = TaskState.TASK_STATE_COMPLETED,
    delivery: str = "",
) -> None:
    """Store a task; None: it has no time."""
    task = Task(id=task_id, context_id="c")
    task.status.state = state
    if days_ago is not None:
        task.status.timestamp.FromNanoseconds(int((time.time() - days_ago * DAY_S) * 1e9))
    await insert_task(database, task)
    if delivery:
        await insert_delivery(database, task_id, delivery, days_ago or 0)


async def insert_delivery(database: Database, task_id: str, state: str, days_ago: float) -> None:
    when = time.time() - days_ago * DAY_S
    await change(
        database,
        "insert into deliveries (owner, message_id, digest, task_id, context_id, state, request, deaths, ending,"
        " accepted_at, changed_at) values ('me', ?, ?, ?, 'c', ?, ?, 0, ?, ?, ?)",
        *(f"message of {task_id}", b"", task_id, state, b"", b"", when, when),
    )
    await change(database, "insert into task_restarts (task_id, restarts) values (?, 1)", task_id)


async def prune(database: Database, keep_days: float = 30, keep_tasks: int = 1000) -> set[object]:
    """Prune and return the IDs of the remaining tasks."""
    before = len(await column(database, "select id from tasks"))
    pruned = await Retention(database, keep_days, keep_tasks).prune()
    remaining = set(await column(database, "select id from tasks"))
    assert len(remaining) == before - pruned
    return remaining


async def of_deliveries(database: Database) -> set[object]:
    found = set(await column(database, "select task_id from deliveries"))
    assert found == set(await column(database, "select task_id from task_restarts"))
    return found


async def test_old_tasks_are_removed_with_their_deliveries(database: Database) -> None:
    await insert(database, "old", days_ago=31, delivery="acknowledged")
    await insert(database, "new", days_ago=29, delivery="acknowledged")
    assert await prune(database) == {"new"} == await of_deliveries(database)


async def test_the_oldest_tasks_over_the_count_are_removed(database: Database) -> None:
    for number in range(5):
        await insert(database, f"task-{number}", days_ago=number, delivery="acknowledged")
    assert await prune(database, keep_tasks=2) == {"task-0", "task-1"} == await of_deliveries(database)
    assert await prune(database, keep_tasks=2) == {"task-0", "task-1"}
    assert await prune(database, keep_tasks=0) == set()


@pytest.mark.parametrize("keep_tasks", [3, 5, 6])
async def test_exactly_the_surplus_of_tasks_with_one_time_is_removed(database: Database, keep_tasks: int) -> None:
    now = time.time_ns()
    for number in range(5):
        task = Task(id=f"task-{number}", context_id="c")
        task.status.state = TaskState.TASK_STATE_COMPLETED
        task.status.timestamp.FromNanoseconds(now)
        await insert_task(database, task)
    newest = {f"task-{number}" for number in range(5)[-keep_tasks:]}
    assert await prune(database, keep_tasks=keep_tasks) == newest
    assert await prune(database, keep_tasks=keep_tasks) == newest


UNFINISHED = [
    TaskState.TASK_STATE_SUBMITTED,
    TaskState.TASK_STATE_WORKING,
    TaskState.TASK_STATE_INPUT_REQUIRED,
    TaskState.TASK_STATE_AUTH_REQUIRED,
]


@pytest.mark.parametrize("state", UNFINISHED)
async def test_an_unfinished_task_is_kept_regardless_of_age(database: Database, state: TaskState) -> None:
    await insert(database, "old", days_ago=400, state=state, delivery="started")
    assert await prune(database, keep_tasks=0) == {"old"} == await of_deliveries(database)


@pytest.mark.parametrize(
    ("state", "remaining"), [("accepted", {"old"}), ("started", {"old"}), ("answered", set()), ("acknowledged", set())]
)
async def test_a_task_is_kept_until_its_delivery_is_finished(
    database: Database, state: str, remaining: set[str]
) -> None:
    await insert(database, "old", days_ago=400, delivery=state)
    assert await prune(database, keep_tasks=0) == remaining == await of_deliveries(database)


@pytest.mark.parametrize(
    "state", [TaskState.TASK_STATE_CANCELED, TaskState.TASK_STATE_FAILED, TaskState.TASK_STATE_REJECTED]
)
async def test_every_terminal_state_counts_as_finished(database: Database, state: TaskState) -> None:
    await insert(database, "old", days_ago=31, state=state)
    assert await prune(database) == set()


async def test_a_task_of_unknown_age_is_kept(database: Database) -> None:
    await insert(database, "timeless", days_ago=None)
    assert await prune(database, keep_tasks=0) == {"timeless"}


async def test_an_old_delivery_without_a_task_is_removed(database: Database) -> None:
    for name, state, days in [("a", "acknowledged", 31), ("b", "acknowledged", 29), ("c", "accepted", 31)]:
        await insert_delivery(database, name, state, days)
    await prune(database)
    assert await of_deliveries(database) == {"b", "c"}


async def test_removal_in_several_transactions_keeps_contexts(database: Database) -> None:
    await change(database, "insert into contexts values ('me', 'c', 'thread', null, 0.0)")
    for number in range(3 * BATCH + 1):
        await insert(database, f"task-{number}", days_ago=31)
    assert await prune(database) == set()
    assert await column(database, "select thread_id from contexts") == ["thread"]


async def test_push_configurations_go_with_their_tasks(database: Database) -> None:
    configs = PushConfigs(database, TaskStore(database, Deliveries(database)))
    for task_id in ("ended", "works", "stray"):
        await configs.set_info(task_id, TaskPushNotificationConfig(id="a", url="https://example.com"), ME)
    await insert(database, "ended", days_ago=0)
    await insert(database, "works", days_ago=0, state=TaskState.TASK_STATE_SUBMITTED)
    assert await prune(database, keep_tasks=0) == {"works"}
    assert set(await column(database, "select task_id from push_configs")) == {"works", "stray"}
    await prune(database, keep_days=0, keep_tasks=0)
    assert await column(database, "select task_id from push_configs") == ["works"]
