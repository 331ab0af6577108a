"""What our own tools remember without a platform: the store's memories and exchanges, of the caller's owner only."""

from collections.abc import Sequence
from dataclasses import dataclass

from codex_workspace.runtimes.backend import ToolCaller
from codex_workspace.storage.memories import ConversationLog, Exchange, Memories, Memory


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """`toolbox.Recollection` out of the store: memories are an owner's, what was said is a context's."""

    memories: Memories
    exchanges: ConversationLog

    async def commit(self, caller: ToolCaller, content: str) -> None:
        """Keep a text; it is durable on return."""
        await self.memories.commit(caller.owner, content)

    async def recall(self, caller: ToolCaller, query: str, limit: int) -> Sequence[Memory]:
        """Return what is remembered of `query`, the best first."""
        return await self.memories.recall(caller.owner, query, limit)

    async def history(self, caller: ToolCaller, limit: int) -> Sequence[Exchange]:
        """Return what was said in the caller's context lately, oldest first."""
        return await self.exchanges.newest(caller.owner, caller.context_id, limit)
