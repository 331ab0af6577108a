"""The conversation log (the ended tasks of a context) and the memories that the model stores."""

import re
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from a2a.types import Part, Role, Task, TaskState

from codex_workspace.common.a2a_terms import ANSWER
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.database import Connection, Database, retry_until_stored
from codex_workspace.storage.schema import HAS_ENDED


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
    """The exchanges of all owners. `flush` writes the ended tasks that the task store holds back."""

    def __init__(self, database: Database, flush: Callable[[], Awaitable[None]]) -> None:
        self._database = database
        self._flush = flush

    async def newest(self, owner: str, context_id: str, limit: int) -> list[Exchange]:
        """Return the newest `limit` exchanges of a context, oldest first."""
        query = f"select body from tasks where owner = ? and context_id = ? and {HAS_ENDED}"
        newest_first = f"{query} order by updated_at desc, id desc limit ?"

        def select(connection: Connection) -> list[Task]:
            return connection.all(Task.FromString, newest_first, owner, context_id, limit)

        # While the disk is full, what is stored can still be read.
        with suppress(StoreUnavailable):
            await self._flush()
        return [_exchange(task) for task in reversed(await self._database.read(select))]


def _exchange(task: Task) -> Exchange:
    status = task.status
    answers = "\n".join(_text(each.parts) for each in task.artifacts if each.artifact_id == ANSWER)
    has_time = status.HasField("timestamp")
    return Exchange(
        request="\n".join(_text(message.parts) for message in task.history if message.role == Role.ROLE_USER),
        reply=answers or _text(status.message.parts),
        state=TaskState.Name(status.state),
        ended_at=f"{status.timestamp.ToDatetime().isoformat(timespec='seconds')}Z" if has_time else "",
    )


def _text(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts)


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

    def __init__(self, database: Database) -> None:
        self._database = database

    @retry_until_stored
    async def commit(self, owner: str, content: str) -> None:
        """Store `content` durably. A text that is stored already becomes the newest memory."""

        def store(connection: Connection) -> None:
            connection.change("delete from memories where owner = ? and content = ?", owner, content)
            inserted = "insert into memories (owner, content, created_at) values (?, ?, ?)"
            connection.change(inserted, owner, content, time.time())
            newest_surplus = "select id from memories where owner = ? order by id desc limit 1 offset ?"
            surplus = f"delete from memories where owner = ? and id <= ({newest_surplus})"
            connection.change(surplus, owner, owner, MAX_MEMORIES)

        await self._database.write(store)

    async def recall(self, owner: str, query: str, limit: int) -> list[Memory]:
        """Return at most `limit` memories that contain a word of `query`, best match first, then newest first.

        An empty query returns the newest ones.
        """
        rows = "select content, created_at from memories where owner = ? order by id desc"
        newest_first = await self._database.read(lambda connection: connection.all(Memory, rows, owner))
        wanted = _words(query)
        found = [(_matches(wanted, memory.content), memory) for memory in newest_first]
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
