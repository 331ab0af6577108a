"""Stores the codex thread of each context, and the main context of each principal."""

import time
import uuid
from dataclasses import dataclass

from codex_workspace.storage.database import Connection, Database, retry_until_stored


async def main_context(database: Database, owner: str) -> str:
    """Return the owner's main context; the first call creates it."""
    query = "select context_id from main_contexts where owner = ?"
    known = await database.lookup(lambda rows: rows.first(str, query, owner))
    if known is not None:
        return known
    made = str(uuid.uuid4())

    def insert(rows: Connection) -> str:
        # Another message of the same owner may have created it first.
        rows.change("insert into main_contexts (owner, context_id) values (?, ?) on conflict do nothing", owner, made)
        return rows.first(str, query, owner) or made

    return await database.write(insert)


@dataclass(frozen=True, slots=True)
class ContextThreadId:
    """The thread ID of a context, and the digest of the instructions that the thread received last."""

    database: Database
    owner: str
    context_id: str

    async def load(self) -> str | None:
        """Return the thread ID; None if the context has none yet."""
        return await self._load("thread_id")

    async def instructions(self) -> str | None:
        """Return the digest of the instructions that the thread received last; None if it received none."""
        return await self._load("instructions")

    @retry_until_stored
    async def _load(self, column: str) -> str | None:
        query = f"select {column} from contexts where owner = ? and context_id = ?"
        return await self.database.lookup(
            lambda rows: rows.first(lambda value: value, query, self.owner, self.context_id)
        )

    @retry_until_stored
    async def save(self, thread_id: str, instructions: str | None = None) -> None:
        """Store the thread ID and the digest of its instructions durably."""
        change = (
            "insert into contexts (owner, context_id, thread_id, instructions, created_at) values (?, ?, ?, ?, ?) "
            "on conflict (owner, context_id) "
            "do update set thread_id = excluded.thread_id, instructions = excluded.instructions"
        )
        values = self.owner, self.context_id, thread_id, instructions, time.time()
        await self.database.write(lambda rows: rows.change(change, *values))
