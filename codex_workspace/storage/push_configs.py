"""Whom to notify of which task: the SDK's store of push configurations, and which of them are still owed the end.

A configuration is *due* from its registration until its webhook has taken the notification of the task's end, or was
given up. Being due is on disk before the registration is answered, so whatever happens to the process, the next one
knows by the task's row and this which ends have still to be told.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
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
from sqlalchemy import Column, ColumnElement, Float, String, Table, and_, delete, insert, select
from sqlalchemy.engine import Row
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from codex_workspace.common.a2a_terms import TERMINAL, AuthenticatedUser, is_protocol_0_3, state_names
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.database import retry_until_stored
from codex_workspace.storage.schema import tables

logger = logging.getLogger(__name__)

MAX_CONFIGS_PER_TASK: Final = 10

MAX_CONFIG_ID_CHARS: Final = 255
"""What the SDK's column takes everywhere."""

MAX_SECRET_CHARS: Final = 8192
"""Of a token or credential; servers take headers of about this size."""

_NOBODY: Final[Mapping[str, TaskPushNotificationConfig]] = MappingProxyType({})

_due = Table(
    "push_due",
    tables,
    Column("task_id", String(36), primary_key=True),
    Column("config_id", String(MAX_CONFIG_ID_CHARS), primary_key=True),
    Column("registered_at", Float, nullable=False),
)


@dataclass(frozen=True, slots=True)
class UndeliveredEnd:
    """A task's end that a webhook has still to be told of."""

    task_id: str
    config_id: str
    event: TaskStatusUpdateEvent


_old_clients = Table(
    "push_to_old_clients",
    tables,
    Column("task_id", String(36), primary_key=True),
    Column("config_id", String(MAX_CONFIG_ID_CHARS), primary_key=True),
    Column("owner", String(255), nullable=False),
)
"""The webhooks that were named in A2A 0.3, and by whom."""


_END: Final = (TaskModel.context_id, TaskModel.status, TaskModel.task_metadata.label("task_metadata"))
"""What `_end` reads of a task's row, beside its id."""


def _later(due: UndeliveredEnd) -> None:
    """Leave an end to the next start, where nobody tells it now."""
    del due


class PushConfigs(DatabasePushNotificationConfigStore):
    """The push configurations of all tasks. Rows belong to a principal; `of` is for the sender, which serves all.

    Tokens and credentials lie in the database as they came: whoever reads the file has whole conversations too.
    """

    def __init__(self, engine: AsyncEngine, tasks: TaskStore) -> None:
        super().__init__(engine, create_table=False)
        self._tasks = tasks
        self._watching: dict[str, dict[str, TaskPushNotificationConfig]] = {}
        self._old_clients: dict[tuple[str, str], str] = {}
        self._tell: Callable[[UndeliveredEnd], None] = _later

    def on_end_due(self, tell: Callable[[UndeliveredEnd], None]) -> None:
        """Have ends told by `tell` that are due at once: of tasks that had ended when a webhook was named."""
        self._tell = tell

    async def load(self) -> None:
        """Read what is due from the database; before anything else is asked."""
        model = PushNotificationConfigModel
        is_due = and_(_due.c.task_id == model.task_id, _due.c.config_id == model.config_id)
        for config in await self._select_configs(select(_due.c.task_id).where(is_due).exists()):
            self._watching.setdefault(config.task_id, {})[config.id] = config
        async with self.engine.connect() as connection:
            rows = await connection.execute(select(_old_clients))
            self._old_clients = {(row.task_id, row.config_id): row.owner for row in rows}

    def for_task(self, task_id: str) -> Mapping[str, TaskPushNotificationConfig]:
        """Return the configurations that are due for a task, by their ids; without a look at the database."""
        return self._watching.get(task_id, _NOBODY)

    def expects_whole_task(self, task_id: str, config_id: str) -> bool:
        """Tell whether a webhook was named in A2A 0.3, which has it told the whole task."""
        return (task_id, config_id) in self._old_clients

    async def task_for(self, task_id: str, config_id: str) -> Task | None:
        """Return the task as it is now; None where it, or the configuration, is gone."""
        owner = self._old_clients.get((task_id, config_id))
        if owner is None:
            return None
        # A query that is cancelled takes its connection with it.
        with anyio.CancelScope(shield=True):
            task: Task | None = await self._tasks.get(task_id, ServerCallContext(user=AuthenticatedUser(owner)))
        return task

    async def set_info(
        self, task_id: str, notification_config: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Keep a configuration and return it as it is kept; one without an id gets the task's id.

        Of a task that has ended already the end is told at once.

        Raises:
            InvalidParamsError: it cannot be kept or sent, or the task has too many.
            InternalError: it cannot be written down.
        """
        config = normalize_push_notification_config(task_id, notification_config)
        _require_sendable(config)
        others = [each for each in await self.get_info(task_id, context) if each.id != config.id]
        if len(others) >= MAX_CONFIGS_PER_TASK:
            raise InvalidParamsError(message=f"a task takes at most {MAX_CONFIGS_PER_TASK} push configurations")
        before = self.for_task(task_id).get(config.id)
        # First, so that a task's end which comes in the midst of this is told.
        self._watch(task_id, config.id, config)
        stays = False
        try:
            # A query that is cancelled takes its connection with it.
            with anyio.CancelScope(shield=True):
                end = await self._note(config)
                await self._note_dialect(config, resolve_user_scope(context) if is_protocol_0_3(context) else None)
                stored: TaskPushNotificationConfig = await super().set_info(task_id, config, context)
            stays = True
        except StoreUnavailable as error:
            raise InternalError(message=error.public) from error
        finally:
            if not stays:
                self._watch(task_id, config.id, before)
        if end is not None:
            self._tell(end)
        return stored

    async def get_info(self, task_id: str, context: ServerCallContext) -> list[TaskPushNotificationConfig]:
        """Return the caller's configurations for a task, in the order of their ids."""
        with anyio.CancelScope(shield=True):
            found: list[TaskPushNotificationConfig] = await super().get_info(task_id, context)
        return sorted(found, key=lambda config: config.id)

    async def delete_info(self, task_id: str, context: ServerCallContext, config_id: str | None = None) -> None:
        """Forget one of the caller's configurations for a task, or all of them; what still waits is not sent.

        Raises:
            InternalError: it cannot be written down.
        """
        gone = [each.id for each in await self.get_info(task_id, context) if config_id in (None, each.id)]
        try:
            with anyio.CancelScope(shield=True):
                await super().delete_info(task_id, context, config_id)
                async with self.engine.begin() as connection:
                    for table in (_due, _old_clients):
                        of_these = and_(table.c.task_id == task_id, table.c.config_id.in_(gone))
                        await connection.execute(delete(table).where(of_these))
        except StoreUnavailable as error:
            raise InternalError(message=error.public) from error
        for each in gone:
            self._watch(task_id, each, None)
            self._old_clients.pop((task_id, each), None)

    async def mark_delivered(self, task_id: str, config_id: str) -> None:
        """Take note that nothing is owed any more. Where that fails, the end is told again after the next start."""
        self._watch(task_id, config_id, None)
        try:
            await self._settle(task_id, config_id)
        except (SQLAlchemyError, OSError) as error:
            logger.warning("task %s: that its end was told cannot be written down: %s", task_id, error)

    async def undelivered_ends(self) -> list[UndeliveredEnd]:
        """Return the ends that webhooks have still to be told of, oldest first."""
        both = _due.join(TaskModel.__table__, _due.c.task_id == TaskModel.id)
        query = select(_due, *_END).select_from(both).where(_has_ended()).order_by(TaskModel.last_updated)
        async with self.engine.connect() as connection:
            rows = (await connection.execute(query)).all()
        return [
            UndeliveredEnd(row.task_id, row.config_id, _end(row))
            for row in rows
            if row.config_id in self.for_task(row.task_id)
        ]

    def _watch(self, task_id: str, config_id: str, config: TaskPushNotificationConfig | None) -> None:
        """Have it served, or with None served no more."""
        if config is not None:
            self._watching.setdefault(task_id, {})[config_id] = config
            return
        configs = self._watching.get(task_id, {})
        configs.pop(config_id, None)
        if not configs:
            self._watching.pop(task_id, None)

    async def _note(self, config: TaskPushNotificationConfig) -> UndeliveredEnd | None:
        """Write down that the task's end is due; return the end where there is one already."""
        row = {"task_id": config.task_id, "config_id": config.id}
        known = select(_due).where(_is(config.task_id, config.id))
        columns = (TaskModel.id.label("task_id"), *_END)
        ended = select(*columns).where(TaskModel.id == config.task_id, _has_ended())
        end: UndeliveredEnd | None = None
        try:
            async with self.engine.begin() as connection:
                found = (await connection.execute(ended)).one_or_none()
                end = None if found is None else UndeliveredEnd(config.task_id, config.id, _end(found))
                if (await connection.execute(known)).one_or_none() is None:
                    await connection.execute(insert(_due).values(registered_at=time.time(), **row))
        except IntegrityError:
            logger.debug("the same configuration was registered twice at once")
        return end

    async def _note_dialect(self, config: TaskPushNotificationConfig, owner: str | None) -> None:
        """Write down who has named a webhook in A2A 0.3; None: it was named in a newer version."""
        key = config.task_id, config.id
        if self._old_clients.get(key) == owner:
            return
        async with self.engine.begin() as connection:
            is_this = and_(_old_clients.c.task_id == config.task_id, _old_clients.c.config_id == config.id)
            await connection.execute(delete(_old_clients).where(is_this))
            if owner is not None:
                row = {"task_id": config.task_id, "config_id": config.id, "owner": owner}
                await connection.execute(insert(_old_clients).values(row))
        if owner is None:
            self._old_clients.pop(key, None)
        else:
            self._old_clients[key] = owner

    @retry_until_stored
    async def _settle(self, task_id: str, config_id: str) -> None:
        with anyio.CancelScope(shield=True):
            async with self.engine.begin() as connection:
                await connection.execute(delete(_due).where(_is(task_id, config_id)))


async def delete_configs(connection: AsyncConnection, task_ids: Sequence[str]) -> None:
    """Take the configurations of tasks away, in the caller's transaction."""
    model = PushNotificationConfigModel
    await connection.execute(delete(model).where(model.task_id.in_(task_ids)))
    for table in (_due, _old_clients):
        await connection.execute(delete(table).where(table.c.task_id.in_(task_ids)))


async def delete_orphaned_configs(connection: AsyncConnection, before: float) -> None:
    """Take those away that were registered before a time (Unix seconds) and whose task never came."""
    stray = and_(_due.c.registered_at <= before, _due.c.task_id.not_in(select(TaskModel.id)))
    ids = (await connection.execute(select(_due.c.task_id).where(stray).distinct())).scalars().all()
    await delete_configs(connection, ids)


def _is(task_id: str, config_id: str) -> ColumnElement[bool]:
    return and_(_due.c.task_id == task_id, _due.c.config_id == config_id)


def _has_ended() -> ColumnElement[bool]:
    ended: ColumnElement[bool] = TaskModel.status["state"].as_string().in_(state_names(TERMINAL))
    return ended


def _end(row: Row[tuple[object, ...]]) -> TaskStatusUpdateEvent:
    """Return the event that a task ended with, as far as its row tells."""
    status = ParseDict(row.status, TaskStatus())
    event = TaskStatusUpdateEvent(task_id=row.task_id, context_id=row.context_id, status=status)
    event.metadata.update(row.task_metadata or {})
    return event


def _require_sendable(config: TaskPushNotificationConfig) -> None:
    if len(config.id) > MAX_CONFIG_ID_CHARS:
        raise InvalidParamsError(message=f"id: at most {MAX_CONFIG_ID_CHARS} characters")
    scheme, credentials = config.authentication.scheme, config.authentication.credentials
    for name, value in (("token", config.token), ("authentication.credentials", credentials)):
        # What a header can hold; a line break in it would begin another one.
        if len(value) > MAX_SECRET_CHARS or not re.fullmatch(r"([!-~]([ -~]*[!-~])?)?", value):
            raise InvalidParamsError(message=f"{name}: at most {MAX_SECRET_CHARS} printable ASCII characters")
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{0,64}", scheme):
        raise InvalidParamsError(message="authentication.scheme: must be a word such as Bearer")
