"""What was said and answered lately: the ended tasks of a context, out of the SDK's table.

What the agent has chosen to remember, kept in the store: a text each, by owner; nobody sees another's.
"""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from a2a.server.models import TaskModel
from sqlalchemy import Column, Float, Index, Integer, String, Table, Text, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from codex_workspace.common.a2a_terms import ANSWER, TERMINAL, state_names
from codex_workspace.storage.database import retry_until_stored
from codex_workspace.storage.schema import tables

_USER: Final = "ROLE_USER"
_tasks: Final = TaskModel.metadata.tables["tasks"].c


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message and the text of its answer; `state` is the task's, such as TASK_STATE_COMPLETED.

    ended_at: when the task ended, by ISO 8601 in UTC; empty where that is not known.
    """

    request: str
    reply: str
    state: str
    ended_at: str


class ConversationLog:
    """Those of all owners."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def newest(self, owner: str, context_id: str, limit: int) -> list[Exchange]:
        """Return the newest `limit` exchanges of an owner's context, oldest first."""
        of_context = (_tasks.owner == owner, _tasks.context_id == context_id)
        ended = _tasks.status["state"].as_string().in_(state_names(TERMINAL))
        rows = (
            select(_tasks.status, _tasks.artifacts, _tasks.history, _tasks.last_updated)
            .where(*of_context, ended)
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
    """Return the text of a message's or artifact's parts, in the shape of protobuf's JSON."""
    parts = holder.get("parts")
    texts: Iterable[object] = parts if isinstance(parts, list) else ()
    return "".join(part["text"] for part in texts if isinstance(part, dict) and isinstance(part.get("text"), str))


MAX_MEMORY_CHARS: Final = 4000
"""Of one memory: a page. Longer things belong into a file of the workspace."""

MAX_MEMORIES: Final = 1000
"""Of one owner. The oldest ones beyond are forgotten; all of them are looked through at each recall."""

_memories = Table(
    "memories",
    tables,
    Column("id", Integer, primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("content", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("idx_memories_owner", "owner", "id"),
)
_WORD: Final = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Memory:
    """A text, and when it was committed, in seconds since 1970."""

    content: str
    created_at: float


class Memories:
    """The memories of all owners."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @retry_until_stored
    async def commit(self, owner: str, content: str) -> None:
        """Keep `content`; it is durable on return. What is remembered already is not kept twice, it counts as new."""
        of_owner = _memories.c.owner == owner
        kept = select(_memories.c.id).where(of_owner).order_by(_memories.c.id.desc()).limit(MAX_MEMORIES)
        async with self._engine.begin() as connection:
            await connection.execute(delete(_memories).where(of_owner, _memories.c.content == content))
            row = {"owner": owner, "content": content, "created_at": time.time()}
            await connection.execute(insert(_memories).values(row))
            oldest = min((await connection.execute(kept)).scalars())
            await connection.execute(delete(_memories).where(of_owner, _memories.c.id < oldest))

    async def recall(self, owner: str, query: str, limit: int) -> list[Memory]:
        """Return at most `limit` memories that hold a word of `query`: those with most of its words, then the newest.

        An empty query finds the newest ones.
        """
        wanted = _words(query)
        rows = select(_memories.c.content, _memories.c.created_at).where(_memories.c.owner == owner)
        async with self._engine.connect() as connection:
            newest_first = (await connection.execute(rows.order_by(_memories.c.id.desc()))).all()
        found = [(_matches(wanted, content), Memory(content, created_at)) for content, created_at in newest_first]
        if wanted:
            found = [each for each in found if each[0]]
        # Stable: among equals the newest stays first.
        found.sort(key=lambda each: each[0], reverse=True)
        return [memory for _, memory in found[:limit]]


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.casefold()))


def _matches(wanted: frozenset[str], content: str) -> int:
    """Return how many of the wanted words begin a word of `content`: "deploy" finds "deployment"."""
    words = _words(content)
    return sum(any(word.startswith(each) for word in words) for each in wanted)
