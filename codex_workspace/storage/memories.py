"""The conversation log (the ended tasks of a context, from the SDK's table) and the memories that the model stores."""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from a2a.server.models import TaskModel
from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from codex_workspace.common.a2a_terms import ANSWER
from codex_workspace.storage.database import retry_until_stored
from codex_workspace.storage.schema import has_ended
from codex_workspace.storage.schema import memories as _memories

_USER: Final = "ROLE_USER"
_tasks: Final = TaskModel.metadata.tables["tasks"].c


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message and the text of its reply; `state` is the task's, such as TASK_STATE_COMPLETED.

    ended_at: when the task ended (ISO 8601, UTC); empty if unknown.
    """

    request: str
    reply: str
    state: str
    ended_at: str


class ConversationLog:
    """The exchanges of all owners."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def newest(self, owner: str, context_id: str, limit: int) -> list[Exchange]:
        """Return the newest `limit` exchanges of a context, oldest first."""
        of_context = (_tasks.owner == owner, _tasks.context_id == context_id)
        rows = (
            select(_tasks.status, _tasks.artifacts, _tasks.history, _tasks.last_updated)
            .where(*of_context, has_ended())
            .order_by(_tasks.last_updated.desc())
            .limit(limit)
        )
        async with self._engine.connect() as connection:
            found = (await connection.execute(rows)).all()
        return [
            Exchange(
                request="\n".join(_text(message) for message in history or () if message.get("role") == _USER),
                reply="\n".join(_text(each) for each in artifacts or () if each.get("artifactId") == ANSWER)
                or _text(status.get("message") or {}),
                state=str(status.get("state", "")),
                ended_at="" if updated is None else f"{updated.isoformat(timespec='seconds')}Z",
            )
            for status, artifacts, history, updated in reversed(found)
        ]


def _text(holder: Mapping[str, object]) -> str:
    """Return the text of the parts of a message or artifact in protobuf's JSON."""
    parts = holder.get("parts")
    texts: Iterable[object] = parts if isinstance(parts, list) else ()
    return "".join(part["text"] for part in texts if isinstance(part, dict) and isinstance(part.get("text"), str))


MAX_MEMORY_CHARS: Final = 4000
"""The length of one memory: a page. Longer texts belong in a file of the workspace."""

MAX_MEMORIES: Final = 1000
"""Per owner; older ones are deleted. Each recall searches all of them."""

_WORD: Final = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Memory:
    """A text, and when it was stored (Unix seconds)."""

    content: str
    created_at: float


class Memories:
    """The memories of all owners."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @retry_until_stored
    async def commit(self, owner: str, content: str) -> None:
        """Store `content` durably. A text that is stored already becomes the newest memory."""
        of_owner = _memories.c.owner == owner
        kept = select(_memories.c.id).where(of_owner).order_by(_memories.c.id.desc()).limit(MAX_MEMORIES)
        async with self._engine.begin() as connection:
            await connection.execute(delete(_memories).where(of_owner, _memories.c.content == content))
            row = {"owner": owner, "content": content, "created_at": time.time()}
            await connection.execute(insert(_memories).values(row))
            oldest = min((await connection.execute(kept)).scalars())
            await connection.execute(delete(_memories).where(of_owner, _memories.c.id < oldest))

    async def recall(self, owner: str, query: str, limit: int) -> list[Memory]:
        """Return at most `limit` memories that contain a word of `query`, best match first, then newest first.

        An empty query returns the newest ones.
        """
        wanted = _words(query)
        rows = select(_memories.c.content, _memories.c.created_at).where(_memories.c.owner == owner)
        async with self._engine.connect() as connection:
            newest_first = (await connection.execute(rows.order_by(_memories.c.id.desc()))).all()
        found = [(_matches(wanted, content), Memory(content, created_at)) for content, created_at in newest_first]
        if wanted:
            found = [each for each in found if each[0]]
        # The sort is stable: among equal matches the newest stays first.
        found.sort(key=lambda each: each[0], reverse=True)
        return [memory for _, memory in found[:limit]]


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.casefold()))


def _matches(wanted: frozenset[str], content: str) -> int:
    """Return how many of the wanted words are the start of a word of `content`: "deploy" finds "deployment"."""
    words = _words(content)
    return sum(any(word.startswith(each) for word in words) for each in wanted)
