"""The memory tool on the agent's own database."""

from collections.abc import Sequence
from dataclasses import dataclass

from codex_workspace.runtimes.backend import ToolCaller
from codex_workspace.storage.memories import ConversationLog, Exchange, Memories, Memory


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """Implements `MemoryTool`: memories belong to an owner, the conversation log to a context."""

    memories: Memories
    exchanges: ConversationLog

    async def commit(self, caller: ToolCaller, content: str) -> None:
        """Store a text; it is durable on return."""
        await self.memories.commit(caller.owner, content)

    async def recall(self, caller: ToolCaller, query: str, limit: int) -> Sequence[Memory]:
        """Return the memories that match `query`, best match first."""
        return await self.memories.recall(caller.owner, query, limit)

    async def history(self, caller: ToolCaller, limit: int) -> Sequence[Exchange]:
        """Return the context's latest messages and answers, oldest first."""
        return await self.exchanges.newest(caller.owner, caller.context_id, limit)
