"""Deletes old tasks with their deliveries and push configurations."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import anyio

from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.database import Connection, Database, DatabaseFailed, Value, placeholders
from codex_workspace.storage.deliveries import DeliveryState
from codex_workspace.storage.push_configs import delete_configs, delete_orphaned_configs
from codex_workspace.storage.schema import HAS_ENDED

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 3600.0

BATCH: Final = 100
"""Tasks deleted in one transaction, so that a message that arrives meanwhile waits for milliseconds only."""

_ENDED: Final = f"from tasks where {HAS_ENDED} and updated_at > 0"
"""The ended tasks with a known age."""

_NEWEST_SURPLUS: Final = f"select updated_at, id {_ENDED} order by updated_at desc, id desc limit 1 offset ?"

# A delivery that is answered and whose task has ended in the store is finished.
_OLD: Final = f"""
    select id {_ENDED} and (updated_at, id) <= (?, ?)
    and id not in (select task_id from deliveries where state in (?, ?)) limit ?"""

_ORPHANS: Final = """
    select task_id from deliveries where state = ? and changed_at <= ? and task_id not in (select id from tasks)
    limit ?"""


@dataclass(frozen=True, slots=True)
class Retention:
    """Keeps the newest `keep_tasks` ended tasks, none older than `keep_days`, and all unfinished tasks."""

    _database: Database
    _keep_days: float
    _keep_tasks: int

    async def run(self) -> None:
        """Prune every `INTERVAL_S` until cancelled. Errors are logged."""
        while True:
            try:
                pruned = await self.prune()
            except (StoreUnavailable, DatabaseFailed) as error:
                logger.warning("old tasks could not be pruned: %s", error)
            else:
                if pruned:
                    logger.info("pruned %d old tasks", pruned)
            await anyio.sleep(INTERVAL_S)

    async def prune(self) -> int:
        """Delete what is old; return how many tasks were deleted."""
        before = time.time() - self._keep_days * 86_400
        limit = max((int(before * 1e9), ""), await self._newest_surplus())
        pruned = await self._delete(_OLD, *limit, DeliveryState.ACCEPTED, DeliveryState.STARTED)
        await self._delete(_ORPHANS, DeliveryState.ACKNOWLEDGED, before)
        await self._database.write(lambda connection: delete_orphaned_configs(connection, before))
        return pruned

    async def _newest_surplus(self) -> tuple[int, str]:
        """Return the time (ns) and ID of the newest ended task that is one too many; (0, "") if none is."""

        def select(connection: Connection) -> tuple[int, str] | None:
            return connection.first(lambda at, task_id: (int(at), str(task_id)), _NEWEST_SURPLUS, self._keep_tasks)

        return await self._database.read(select) or (0, "")

    async def _delete(self, task_ids: str, *values: Value) -> int:
        """Delete the tasks of a query in batches; return how many."""

        def delete_batch(connection: Connection) -> int:
            batch = connection.all(str, task_ids, *values, BATCH)
            _delete_tasks(connection, batch)
            return len(batch)

        deleted = 0
        while batch := await self._database.write(delete_batch):
            deleted += batch
        return deleted


def _delete_tasks(connection: Connection, task_ids: Sequence[str]) -> None:
    """Delete tasks with their deliveries and push configurations, in the caller's transaction."""
    listed = placeholders(task_ids)
    connection.change(f"delete from tasks where id in ({listed})", *task_ids)
    for table in ("deliveries", "task_restarts"):
        connection.change(f"delete from {table} where task_id in ({listed})", *task_ids)
    delete_configs(connection, task_ids)
