"""Deletes old tasks with their deliveries and push configurations."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import anyio
from a2a.server.models import TaskModel
from sqlalchemy import Select, delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.deliveries import DeliveryState
from codex_workspace.storage.push_configs import delete_configs, delete_orphaned_configs
from codex_workspace.storage.schema import deliveries, has_ended, task_restarts

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 3600.0

BATCH: Final = 100
"""Tasks deleted in one transaction, so that a message that arrives meanwhile waits for milliseconds only."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Keeps the newest `keep_tasks` ended tasks, none older than `keep_days`, and all unfinished tasks."""

    _engine: AsyncEngine
    _keep_days: float
    _keep_tasks: int

    async def run(self) -> None:
        """Prune every `INTERVAL_S` until cancelled. Errors are logged."""
        while True:
            try:
                # A database call that is cancelled half-way leaves a connection that never closes.
                with anyio.CancelScope(shield=True):
                    pruned = await self.prune()
            except (StoreUnavailable, SQLAlchemyError, OSError) as error:
                logger.warning("old tasks could not be pruned: %s", error)
            else:
                if pruned:
                    logger.info("pruned %d old tasks", pruned)
            await anyio.sleep(INTERVAL_S)

    async def prune(self) -> int:
        """Delete what is old; return how many tasks were deleted."""
        by_age, by_count = await self._limits()
        # A delivery that is answered and whose task has ended in the store is finished.
        unfinished = (DeliveryState.ACCEPTED, DeliveryState.STARTED)
        at_work = select(deliveries.c.task_id).where(deliveries.c.state.in_(unfinished))
        old = select(TaskModel.id).where(TaskModel.last_updated <= by_count, has_ended(), TaskModel.id.not_in(at_work))
        registered_before = by_age.replace(tzinfo=UTC).timestamp()
        orphans = select(deliveries.c.task_id).where(
            deliveries.c.state == DeliveryState.ACKNOWLEDGED,
            deliveries.c.changed_at <= registered_before,
            deliveries.c.task_id.not_in(select(TaskModel.id)),
        )
        pruned = 0
        while batch := await self._delete_batch(old):
            pruned += batch
        while await self._delete_batch(orphans):
            pass
        with anyio.CancelScope(shield=True):
            async with self._engine.begin() as connection:
                await delete_orphaned_configs(connection, registered_before)
        return pruned

    async def _limits(self) -> tuple[datetime, datetime]:
        """Return the times up to which ended tasks are deleted: by age, and by age or count."""
        # The SDK stores the time in UTC, without a time zone.
        by_age = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=self._keep_days)
        ended = select(TaskModel.last_updated).where(has_ended(), TaskModel.last_updated.is_not(None))
        first_too_many = ended.order_by(TaskModel.last_updated.desc()).offset(self._keep_tasks).limit(1)
        async with self._engine.connect() as connection:
            by_count = (await connection.execute(first_too_many)).scalar_one_or_none()
        return by_age, by_age if by_count is None else max(by_age, by_count)

    async def _delete_batch(self, task_ids: Select[str]) -> int:
        """Delete the first tasks of a query; return how many."""
        # The transaction is short; a cancelled caller waits for its end.
        with anyio.CancelScope(shield=True):
            async with self._engine.begin() as connection:
                ids = (await connection.execute(task_ids.limit(BATCH))).scalars().all()
                await _delete_tasks(connection, ids)
        await anyio.lowlevel.checkpoint()
        return len(ids)


async def _delete_tasks(connection: AsyncConnection, task_ids: Sequence[str]) -> None:
    """Delete tasks with their deliveries and push configurations, in the caller's transaction."""
    if task_ids:
        await connection.execute(delete(TaskModel).where(TaskModel.id.in_(task_ids)))
        for table in (deliveries, task_restarts):
            await connection.execute(delete(table).where(table.c.task_id.in_(task_ids)))
        await delete_configs(connection, task_ids)
