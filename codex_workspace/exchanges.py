"""What was said and answered lately: the ended tasks of a context, out of the SDK's table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from a2a.server.models import TaskModel
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from codex_workspace.task_states import ANSWER, TERMINAL, names_of

_USER: Final = "ROLE_USER"
_tasks: Final = TaskModel.metadata.tables["tasks"].c


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message and the text of its answer; `state` is the task's, such as TASK_STATE_COMPLETED.

    ended_at: when the task ended, by ISO 8601 in UTC; empty where that is not known.
    """

    asked: str
    answered: str
    state: str
    ended_at: str


class Exchanges:
    """Those of all owners."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def newest(self, owner: str, context_id: str, limit: int) -> list[Exchange]:
        """Return the newest `limit` exchanges of an owner's context, oldest first."""
        of_context = (_tasks.owner == owner, _tasks.context_id == context_id)
        ended = _tasks.status["state"].as_string().in_(names_of(TERMINAL))
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
                asked="\n".join(_text(message) for message in history or () if message.get("role") == _USER),
                answered="\n".join(_text(each) for each in artifacts or () if each.get("artifactId") == ANSWER)
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
