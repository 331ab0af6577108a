"""Tracks which messages are being processed, for the platform's heartbeat."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue

from codex_workspace.storage.deliveries import HANDLED

MAX_TASK_CHARS: Final = 200
"""The length of the text that is shown as the current task."""


class ActiveTasks:
    """The texts of the messages being processed. `changed` is set, and replaced, when one starts or ends."""

    def __init__(self) -> None:
        self._texts: dict[object, str] = {}
        self.changed = anyio.Event()

    @property
    def texts(self) -> list[str]:
        """The texts, oldest first."""
        return list(self._texts.values())

    @contextmanager
    def track(self, text: str) -> Iterator[None]:
        """Count a message while the block runs."""
        key = object()
        self._texts[key] = " ".join(text.split())[:MAX_TASK_CHARS] or "a message"
        self._notify()
        try:
            yield
        finally:
            del self._texts[key]
            self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


class TrackedExecutor(AgentExecutor):
    """An executor whose messages are tracked. `text_of` returns what is shown of a message."""

    def __init__(
        self, executor: AgentExecutor, text_of: Callable[[RequestContext], str] = RequestContext.get_user_input
    ) -> None:
        self.tasks = ActiveTasks()
        self._executor = executor
        self._text_of = text_of

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Execute and track."""
        # Its caller is a handler of this agent, also if the message came from a foreign host.
        context.call_context.state[HANDLED] = True
        with self.tasks.track(self._text_of(context)):
            await self._executor.execute(context, event_queue)

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Cancel."""
        context.call_context.state[HANDLED] = True
        await self._executor.cancel(context, event_queue)
