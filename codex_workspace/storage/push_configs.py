"""Stores push configurations, and which webhooks have not received the end of their task yet.

A configuration is *due* from its registration until its webhook accepts the notification of the task's end, or delivery
is given up. This is stored before the registration is answered, so that a new process knows which ends to deliver.
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import anyio
from a2a.server.context import ServerCallContext
from a2a.server.owner_resolver import resolve_user_scope
from a2a.server.tasks import PushNotificationConfigStore
from a2a.server.tasks.push_notification_config_store import normalize_push_notification_config
from a2a.types import Task, TaskPushNotificationConfig, TaskStatusUpdateEvent
from a2a.utils.errors import InternalError, InvalidParamsError

from codex_workspace.common.a2a_terms import AuthenticatedUser, is_protocol_0_3
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.database import Connection, Database, DatabaseFailed, placeholders, retry_until_stored
from codex_workspace.storage.schema import HAS_ENDED, MAX_ID_CHARS
from codex_workspace.storage.tasks import TaskStore

logger = logging.getLogger(__name__)

MAX_CONFIGS_PER_TASK: Final = 10

MAX_SECRET_CHARS: Final = 8192
"""The length of a token or credential; servers accept headers of about this size."""


@dataclass(frozen=True, slots=True)
class UndeliveredEnd:
    """The end of a task that a webhook has not received."""

    task_id: str
    config_id: str
    event: TaskStatusUpdateEvent


# Delivery starts again for a configuration that is registered again; another principal's is not replaced.
_REGISTER: Final = """
    insert into push_configs (task_id, id, owner, body, due_since, is_0_3) values (?, ?, ?, ?, ?, ?)
    on conflict (task_id, id) do update set body = excluded.body, is_0_3 = excluded.is_0_3,
    due_since = coalesce(push_configs.due_since, excluded.due_since) where push_configs.owner = excluded.owner"""


class PushConfigs(PushNotificationConfigStore):
    """The push configurations of all tasks. Rows belong to a principal.

    `watched` are the due configurations of all principals by task and ID.

    Tokens and credentials are stored unencrypted, beside the conversations.
    """

    def __init__(self, database: Database, tasks: TaskStore) -> None:
        self._database = database
        self._tasks = tasks
        self.watched: Final[dict[str, dict[str, TaskPushNotificationConfig]]] = {}
        self._0_3_owners: dict[tuple[str, str], str] = {}
        self._on_end_due: Callable[[UndeliveredEnd], None] | None = None

    def on_end_due(self, deliver: Callable[[UndeliveredEnd], None]) -> None:
        """Call `deliver` when a webhook is registered for a task that has ended."""
        self._on_end_due = deliver

    async def load(self) -> None:
        """Load the due configurations; call this first."""
        due = "select body, owner, is_0_3 from push_configs where due_since is not null"
        for config, owner in await self._database.read(lambda connection: connection.all(_watched, due)):
            self._watch(config.task_id, config.id, config, owner)

    def expects_whole_task(self, task_id: str, config_id: str) -> bool:
        """Whether a due webhook was registered over A2A 0.3, which notifies with the whole task."""
        return (task_id, config_id) in self._0_3_owners

    async def task_for(self, task_id: str, config_id: str) -> Task | None:
        """Return the current state of a task; None if the task or the configuration is gone."""
        owner = self._0_3_owners.get((task_id, config_id))
        if owner is None:
            return None
        return await self._tasks.get(task_id, ServerCallContext(user=AuthenticatedUser(owner)))

    async def set_info(
        self, task_id: str, notification_config: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Store a configuration and return it as stored; one without an ID gets the task's ID.

        If the task has ended already, its end is delivered at once.

        Raises:
            InvalidParamsError: the configuration is invalid, the task has too many, or another principal's has its ID.
            InternalError: the database cannot be written to.
        """
        config = normalize_push_notification_config(task_id, notification_config)
        _require_sendable(config)
        owner, is_0_3 = resolve_user_scope(context), is_protocol_0_3(context)
        before = self.watched.get(task_id, {}).get(config.id), self._0_3_owners.get((task_id, config.id))
        # First, so that the end of the task is delivered if it comes while this is stored.
        self._watch(task_id, config.id, config, owner if is_0_3 else None)
        stays = False
        try:
            # A cancelled caller does not stop the write, and what is watched must agree with it.
            with anyio.CancelScope(shield=True):
                await self._tasks.flush()
                end = await self._database.write(lambda connection: _register(connection, config, owner, is_0_3))
            stays = True
        except StoreUnavailable as error:
            raise InternalError(message=error.public) from error
        finally:
            if not stays:
                self._watch(task_id, config.id, *before)
        if end is not None and self._on_end_due is not None:
            self._on_end_due(end)
        return config

    async def get_info(self, task_id: str, context: ServerCallContext) -> list[TaskPushNotificationConfig]:
        """Return the caller's configurations for a task, ordered by ID."""

        def select(connection: Connection) -> list[TaskPushNotificationConfig]:
            query = "select body from push_configs where task_id = ? and owner = ?"
            return connection.all(TaskPushNotificationConfig.FromString, query, task_id, resolve_user_scope(context))

        return sorted(await self._database.lookup(select), key=lambda config: config.id)

    async def get_info_for_dispatch(self, task_id: str) -> list[TaskPushNotificationConfig]:
        """Return the due configurations of all principals for a task."""
        return list(self.watched.get(task_id, {}).values())

    async def delete_info(self, task_id: str, context: ServerCallContext, config_id: str | None = None) -> None:
        """Delete one of the caller's configurations for a task, or all; queued notifications are not sent.

        Raises:
            InternalError: the database cannot be written to.
        """

        gone = [each.id for each in await self.get_info(task_id, context) if config_id in (None, each.id)]
        row = "delete from push_configs where task_id = ? and owner = ? and id = ?"

        def delete(connection: Connection) -> None:
            for each in gone:
                connection.change(row, task_id, resolve_user_scope(context), each)

        try:
            # A cancelled caller does not stop the write, and what is watched must agree with it.
            with anyio.CancelScope(shield=True):
                await self._database.write(delete)
        except StoreUnavailable as error:
            raise InternalError(message=error.public) from error
        for each in gone:
            self._watch(task_id, each, None)

    async def mark_delivered(self, task_id: str, config_id: str) -> None:
        """Record that a webhook received the end. If that fails, the end is delivered again after the next start."""
        self._watch(task_id, config_id, None)
        try:
            await self._settle(task_id, config_id)
        except DatabaseFailed as error:
            logger.warning("task %s: cannot record that its end was delivered: %s", task_id, error)

    async def undelivered_ends(self) -> list[UndeliveredEnd]:
        """Return the ends that webhooks have not received, oldest first."""
        query = (
            "select push_configs.task_id, push_configs.id, tasks.body from push_configs join tasks "
            f"on tasks.id = push_configs.task_id where due_since is not null and {HAS_ENDED} order by updated_at"
        )
        ends = await self._database.read(lambda connection: connection.all(_undelivered_end, query))
        return [end for end in ends if end.config_id in self.watched.get(end.task_id, {})]

    def _watch(
        self, task_id: str, config_id: str, config: TaskPushNotificationConfig | None, owner_0_3: str | None = None
    ) -> None:
        """Add or replace a configuration in memory, with its owner if it expects the whole task; None removes it."""
        if owner_0_3 is None:
            self._0_3_owners.pop((task_id, config_id), None)
        else:
            self._0_3_owners[task_id, config_id] = owner_0_3
        if config is not None:
            self.watched.setdefault(task_id, {})[config_id] = config
            return
        configs = self.watched.get(task_id, {})
        configs.pop(config_id, None)
        if not configs:
            self.watched.pop(task_id, None)

    @retry_until_stored
    async def _settle(self, task_id: str, config_id: str) -> None:
        settled = "update push_configs set due_since = null where task_id = ? and id = ?"
        await self._database.write(lambda connection: connection.change(settled, task_id, config_id))


def delete_configs(connection: Connection, task_ids: Sequence[str]) -> None:
    """Delete the configurations of tasks, in the caller's transaction."""
    connection.change(f"delete from push_configs where task_id in ({placeholders(task_ids)})", *task_ids)


def delete_orphaned_configs(connection: Connection, before: float) -> None:
    """Delete the configurations registered before a time (Unix seconds) whose task does not exist."""
    orphans = "due_since <= ? and task_id not in (select id from tasks)"
    connection.change(f"delete from push_configs where {orphans}", before)


def _register(
    connection: Connection, config: TaskPushNotificationConfig, owner: str, is_0_3: bool
) -> UndeliveredEnd | None:
    """Store a configuration as due; return the end of its task if it has ended already."""
    others = "select count(*) from push_configs where task_id = ? and owner = ? and id <> ?"
    if (connection.first(int, others, config.task_id, owner, config.id) or 0) >= MAX_CONFIGS_PER_TASK:
        raise InvalidParamsError(message=f"a task takes at most {MAX_CONFIGS_PER_TASK} push configurations")
    row = (config.task_id, config.id, owner, config.SerializeToString(), time.time(), int(is_0_3))
    if not connection.change(_REGISTER, *row):
        raise InvalidParamsError(message="id: another configuration of the task has it; use another one")
    ended = f"select body from tasks where id = ? and {HAS_ENDED}"
    body = connection.first(bytes, ended, config.task_id)
    return None if body is None else _undelivered_end(config.task_id, config.id, body)


def _watched(body: bytes, owner: str, is_0_3: int) -> tuple[TaskPushNotificationConfig, str | None]:
    return TaskPushNotificationConfig.FromString(body), owner if is_0_3 else None


def _undelivered_end(task_id: str, config_id: str, body: bytes) -> UndeliveredEnd:
    """Rebuild the last event of a task from its row."""
    task = Task.FromString(body)
    event = TaskStatusUpdateEvent(
        task_id=task_id, context_id=task.context_id, status=task.status, metadata=task.metadata or None
    )
    return UndeliveredEnd(task_id, config_id, event)


def _require_sendable(config: TaskPushNotificationConfig) -> None:
    if len(config.id) > MAX_ID_CHARS:
        raise InvalidParamsError(message=f"id: at most {MAX_ID_CHARS} characters")
    scheme, credentials = config.authentication.scheme, config.authentication.credentials
    for name, value in (("token", config.token), ("authentication.credentials", credentials)):
        # Valid characters of a header; a line break would start another header.
        if len(value) > MAX_SECRET_CHARS or not re.fullmatch(r"([!-~]([ -~]*[!-~])?)?", value):
            raise InvalidParamsError(message=f"{name}: at most {MAX_SECRET_CHARS} printable ASCII characters")
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{0,64}", scheme):
        raise InvalidParamsError(message="authentication.scheme: must be a word such as Bearer")
