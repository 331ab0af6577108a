"""Forget tasks that ended long ago, or too many tasks back, and their deliveries and push configurations with them."""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import anyio
from a2a.server.models import TaskModel
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from codex_workspace.common.a2a_terms import TERMINAL, state_names
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.deliveries import DeliveryState
from codex_workspace.storage.push_configs import delete_configs, delete_orphaned_configs
from codex_workspace.storage.schema import tables

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 3600.0

BATCH: Final = 100
"""Tasks of one transaction: a message that comes meanwhile waits for milliseconds."""


class Retention:
    """Keeps the newest `keep_tasks` ended tasks, none older than `keep_days`; unfinished ones always."""

    def __init__(self, engine: AsyncEngine, keep_days: float, keep_tasks: int) -> None:
        self._engine = engine
        self._keep_days = keep_days
        self._keep_tasks = keep_tasks

    async def run(self) -> None:
        """Prune now and then every `INTERVAL_S`, until cancelled. What fails is logged and tried the next time."""
        while True:
            try:
                # A database call that is cancelled half-way leaves a connection that never closes.
                with anyio.CancelScope(shield=True):
                    pruned = await self.prune()
            except (StoreUnavailable, SQLAlchemyError, OSError) as error:
                logger.warning("old tasks could not be pruned: %s", error)
            else:
                if pruned:
                    logger.info("%d old tasks were pruned", pruned)
            await anyio.sleep(INTERVAL_S)

    async def prune(self) -> int:
        """Forget what is old; return how many tasks that were."""
        limits = await self._limits()
        pruned = 0
        while batch := await self._batch(limits):
            pruned += batch
        while await self._orphans(limits[0]):
            pass
        with anyio.CancelScope(shield=True):
            async with self._engine.begin() as connection:
                await delete_orphaned_configs(connection, limits[0].replace(tzinfo=UTC).timestamp())
        return pruned

    async def _limits(self) -> tuple[datetime, datetime]:
        """Return the times up to which ended tasks go: by age, and by age or count."""
        # The SDK keeps the time in UTC, without saying so.
        by_age = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=self._keep_days)
        ended = select(TaskModel.last_updated).where(_ended(), TaskModel.last_updated.is_not(None))
        first_too_many = ended.order_by(TaskModel.last_updated.desc()).offset(self._keep_tasks).limit(1)
        async with self._engine.connect() as connection:
            by_count = (await connection.execute(first_too_many)).scalar_one_or_none()
        return by_age, by_age if by_count is None else max(by_age, by_count)

    async def _batch(self, limits: tuple[datetime, datetime]) -> int:
        deliveries = tables.tables["deliveries"]
        # A task's end in the store is its answer's way to the peer: what is answered and ended is finished.
        begun = (DeliveryState.ACCEPTED, DeliveryState.STARTED)
        at_work = select(deliveries.c.task_id).where(deliveries.c.state.in_(begun))
        old = select(TaskModel.id).where(TaskModel.last_updated <= limits[1], _ended(), TaskModel.id.not_in(at_work))
        # Whoever is cancelled here lets the transaction end first: it is short.
        with anyio.CancelScope(shield=True):
            async with self._engine.begin() as connection:
                ids = (await connection.execute(old.limit(BATCH))).scalars().all()
                await _forget(connection, ids)
        await anyio.lowlevel.checkpoint()
        return len(ids)

    async def _orphans(self, by_age: datetime) -> int:
        """Forget finished deliveries that have no task any more: their client could not be told anything of it."""
        deliveries = tables.tables["deliveries"]
        lonely = select(deliveries.c.task_id).where(
            deliveries.c.state == DeliveryState.ACKNOWLEDGED,
            deliveries.c.changed_at <= by_age.replace(tzinfo=UTC).timestamp(),
            deliveries.c.task_id.not_in(select(TaskModel.id)),
        )
        with anyio.CancelScope(shield=True):
            async with self._engine.begin() as connection:
                ids = (await connection.execute(lonely.limit(BATCH))).scalars().all()
                await _forget(connection, ids)
        await anyio.lowlevel.checkpoint()
        return len(ids)


def _ended() -> ColumnElement[bool]:
    ended: ColumnElement[bool] = TaskModel.status["state"].as_string().in_(state_names(TERMINAL))
    return ended


async def _forget(connection: AsyncConnection, task_ids: Sequence[str]) -> None:
    """Take tasks away with their deliveries, in the caller's transaction."""
    if task_ids:
        await connection.execute(delete(TaskModel).where(TaskModel.id.in_(task_ids)))
        for name in ("deliveries", "cut_off_tasks"):
            table = tables.tables[name]
            await connection.execute(delete(table).where(table.c.task_id.in_(task_ids)))
        await delete_configs(connection, task_ids)
