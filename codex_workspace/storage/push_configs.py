"""Stores push configurations (the SDK's table), and which webhooks have not received the end of their task yet.

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
from a2a.server.models import PushNotificationConfigModel, TaskModel
from a2a.server.owner_resolver import resolve_user_scope
from a2a.server.tasks import DatabasePushNotificationConfigStore
from a2a.server.tasks.push_notification_config_store import normalize_push_notification_config
from a2a.server.tasks.task_store import TaskStore
from a2a.types import Task, TaskPushNotificationConfig, TaskStatus, TaskStatusUpdateEvent
from a2a.utils.errors import InternalError, InvalidParamsError
from google.protobuf.json_format import ParseDict
from sqlalchemy import ColumnElement, and_, delete, insert, select
from sqlalchemy.engine import Row
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from codex_workspace.common.a2a_terms import AuthenticatedUser, is_protocol_0_3
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.database import retry_until_stored
from codex_workspace.storage.schema import MAX_ID_CHARS, has_ended, push_due
from codex_workspace.storage.schema import push_0_3_configs as _0_3_configs

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


_END: Final = (TaskModel.context_id, TaskModel.status, TaskModel.task_metadata.label("task_metadata"))
"""The columns of a task that `_end` reads."""


class PushConfigs(DatabasePushNotificationConfigStore):
    """The push configurations of all tasks. Rows belong to a principal.

    `watched` are the due configurations of all principals by task and ID.

    Tokens and credentials are stored unencrypted, beside the conversations.
    """

    def __init__(self, engine: AsyncEngine, tasks: TaskStore) -> None:
        super().__init__(engine, create_table=False)
        self._tasks = tasks
        self.watched: Final[dict[str, dict[str, TaskPushNotificationConfig]]] = {}
        self._0_3_owners: dict[tuple[str, str], str] = {}
        self._on_end_due: Callable[[UndeliveredEnd], None] | None = None

    def on_end_due(self, deliver: Callable[[UndeliveredEnd], None]) -> None:
        """Call `deliver` when a webhook is registered for a task that has ended."""
        self._on_end_due = deliver

    async def load(self) -> None:
        """Load the due configurations; call this first."""
        model = PushNotificationConfigModel
        is_due = and_(push_due.c.task_id == model.task_id, push_due.c.config_id == model.config_id)
        for config in await self._select_configs(select(push_due.c.task_id).where(is_due).exists()):
            self.watched.setdefault(config.task_id, {})[config.id] = config
        async with self.engine.connect() as connection:
            rows = await connection.execute(select(_0_3_configs))
            self._0_3_owners = {(row.task_id, row.config_id): row.owner for row in rows}

    def expects_whole_task(self, task_id: str, config_id: str) -> bool:
        """Whether a webhook was registered over A2A 0.3, which notifies with the whole task."""
        return (task_id, config_id) in self._0_3_owners

    async def task_for(self, task_id: str, config_id: str) -> Task | None:
        """Return the current state of a task; None if the task or the configuration is gone."""
        owner = self._0_3_owners.get((task_id, config_id))
        if owner is None:
            return None
        # A cancelled query would invalidate its connection.
        with anyio.CancelScope(shield=True):
            task: Task | None = await self._tasks.get(task_id, ServerCallContext(user=AuthenticatedUser(owner)))
        return task

    async def set_info(
        self, task_id: str, notification_config: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Store a configuration and return it as stored; one without an ID gets the task's ID.

        If the task has ended already, its end is delivered at once.

        Raises:
            InvalidParamsError: the configuration is invalid, or the task has too many.
            InternalError: the database cannot be written to.
        """
        config = normalize_push_notification_config(task_id, notification_config)
        _require_sendable(config)
        others = [each for each in await self.get_info(task_id, context) if each.id != config.id]
        if len(others) >= MAX_CONFIGS_PER_TASK:
            raise InvalidParamsError(message=f"a task takes at most {MAX_CONFIGS_PER_TASK} push configurations")
        before = self.watched.get(task_id, {}).get(config.id)
        # First, so that the end of the task is delivered if it comes while this is stored.
        self._watch(task_id, config.id, config)
        stays = False
        try:
            with anyio.CancelScope(shield=True):
                end = await self._store_due(config)
                await self._store_0_3_owner(config, resolve_user_scope(context) if is_protocol_0_3(context) else None)
                stored: TaskPushNotificationConfig = await super().set_info(task_id, config, context)
            stays = True
        except StoreUnavailable as error:
            raise InternalError(message=error.public) from error
        finally:
            if not stays:
                self._watch(task_id, config.id, before)
        if end is not None and self._on_end_due is not None:
            self._on_end_due(end)
        return stored

    async def get_info(self, task_id: str, context: ServerCallContext) -> list[TaskPushNotificationConfig]:
        """Return the caller's configurations for a task, ordered by ID."""
        with anyio.CancelScope(shield=True):
            found: list[TaskPushNotificationConfig] = await super().get_info(task_id, context)
        return sorted(found, key=lambda config: config.id)

    async def delete_info(self, task_id: str, context: ServerCallContext, config_id: str | None = None) -> None:
        """Delete one of the caller's configurations for a task, or all; queued notifications are not sent.

        Raises:
            InternalError: the database cannot be written to.
        """
        gone = [each.id for each in await self.get_info(task_id, context) if config_id in (None, each.id)]
        try:
            with anyio.CancelScope(shield=True):
                await super().delete_info(task_id, context, config_id)
                async with self.engine.begin() as connection:
                    for table in (push_due, _0_3_configs):
                        of_these = and_(table.c.task_id == task_id, table.c.config_id.in_(gone))
                        await connection.execute(delete(table).where(of_these))
        except StoreUnavailable as error:
            raise InternalError(message=error.public) from error
        for each in gone:
            self._watch(task_id, each, None)
            self._0_3_owners.pop((task_id, each), None)

    async def mark_delivered(self, task_id: str, config_id: str) -> None:
        """Record that a webhook received the end. If that fails, the end is delivered again after the next start."""
        self._watch(task_id, config_id, None)
        try:
            await self._delete_due(task_id, config_id)
        except (SQLAlchemyError, OSError) as error:
            logger.warning("task %s: cannot record that its end was delivered: %s", task_id, error)

    async def undelivered_ends(self) -> list[UndeliveredEnd]:
        """Return the ends that webhooks have not received, oldest first."""
        both = push_due.join(TaskModel.__table__, push_due.c.task_id == TaskModel.id)
        query = select(push_due, *_END).select_from(both).where(has_ended()).order_by(TaskModel.last_updated)
        async with self.engine.connect() as connection:
            rows = (await connection.execute(query)).all()
        return [
            UndeliveredEnd(row.task_id, row.config_id, _end(row))
            for row in rows
            if row.config_id in self.watched.get(row.task_id, {})
        ]

    def _watch(self, task_id: str, config_id: str, config: TaskPushNotificationConfig | None) -> None:
        """Add or replace a configuration in memory; None removes it."""
        if config is not None:
            self.watched.setdefault(task_id, {})[config_id] = config
            return
        configs = self.watched.get(task_id, {})
        configs.pop(config_id, None)
        if not configs:
            self.watched.pop(task_id, None)

    async def _store_due(self, config: TaskPushNotificationConfig) -> UndeliveredEnd | None:
        """Store that the end of the task is due; return the end if the task has ended already."""
        row = {"task_id": config.task_id, "config_id": config.id}
        known = select(push_due).where(_is(config.task_id, config.id))
        columns = (TaskModel.id.label("task_id"), *_END)
        ended = select(*columns).where(TaskModel.id == config.task_id, has_ended())
        end: UndeliveredEnd | None = None
        try:
            async with self.engine.begin() as connection:
                found = (await connection.execute(ended)).one_or_none()
                end = None if found is None else UndeliveredEnd(config.task_id, config.id, _end(found))
                if (await connection.execute(known)).one_or_none() is None:
                    await connection.execute(insert(push_due).values(registered_at=time.time(), **row))
        except IntegrityError:
            logger.debug("the same configuration was registered twice at the same time")
        return end

    async def _store_0_3_owner(self, config: TaskPushNotificationConfig, owner: str | None) -> None:
        """Store the owner of a configuration that was registered over A2A 0.3; None: over a newer version."""
        key = config.task_id, config.id
        if self._0_3_owners.get(key) == owner:
            return
        async with self.engine.begin() as connection:
            is_this = and_(_0_3_configs.c.task_id == config.task_id, _0_3_configs.c.config_id == config.id)
            await connection.execute(delete(_0_3_configs).where(is_this))
            if owner is not None:
                row = {"task_id": config.task_id, "config_id": config.id, "owner": owner}
                await connection.execute(insert(_0_3_configs).values(row))
        if owner is None:
            self._0_3_owners.pop(key, None)
        else:
            self._0_3_owners[key] = owner

    @retry_until_stored
    async def _delete_due(self, task_id: str, config_id: str) -> None:
        with anyio.CancelScope(shield=True):
            async with self.engine.begin() as connection:
                await connection.execute(delete(push_due).where(_is(task_id, config_id)))


async def delete_configs(connection: AsyncConnection, task_ids: Sequence[str]) -> None:
    """Delete the configurations of tasks, in the caller's transaction."""
    model = PushNotificationConfigModel
    await connection.execute(delete(model).where(model.task_id.in_(task_ids)))
    for table in (push_due, _0_3_configs):
        await connection.execute(delete(table).where(table.c.task_id.in_(task_ids)))


async def delete_orphaned_configs(connection: AsyncConnection, before: float) -> None:
    """Delete the configurations registered before a time (Unix seconds) whose task does not exist."""
    stray = and_(push_due.c.registered_at <= before, push_due.c.task_id.not_in(select(TaskModel.id)))
    ids = (await connection.execute(select(push_due.c.task_id).where(stray).distinct())).scalars().all()
    await delete_configs(connection, ids)


def _is(task_id: str, config_id: str) -> ColumnElement[bool]:
    return and_(push_due.c.task_id == task_id, push_due.c.config_id == config_id)


def _end(row: Row[tuple[object, ...]]) -> TaskStatusUpdateEvent:
    """Rebuild the last event of a task from its row."""
    status = ParseDict(row.status, TaskStatus())
    event = TaskStatusUpdateEvent(task_id=row.task_id, context_id=row.context_id, status=status)
    event.metadata.update(row.task_metadata or {})
    return event


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
