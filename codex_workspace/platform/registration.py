"""Keeps the agent registered on the platform: registration, heartbeats, delivery mode and removal.

Other callers are served even if the platform fails. If the platform removes the workspace, the agent stops.
"""

import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
from a2a.server.request_handlers import RequestHandler

from codex_workspace.common.concurrency import task_group
from codex_workspace.common.telemetry import TaskOutcome
from codex_workspace.common.values import JsonObject
from codex_workspace.config.environment import Secret
from codex_workspace.config.settings import PlatformConfig
from codex_workspace.platform.active_tasks import ActiveTasks
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.client_types import DeliveryMode, PlatformError, PlatformRejected, WorkspaceRemoved
from codex_workspace.platform.deadline_reply import DeadlineReplyHandler
from codex_workspace.platform.dispatcher import Dispatcher, open_dispatcher
from codex_workspace.platform.inbox import Inbox
from codex_workspace.storage.outbox import Outbox

logger = logging.getLogger(__name__)

RETRY_S: Final = 5.0
"""The longest pause after an error, if the platform does not ask for a longer one."""

SHORTEST_HEARTBEAT_S: Final = 1.0
"""Changes are reported at once, but two heartbeats are at least this far apart."""

ERROR_WINDOW_S: Final = 300.0
"""The error rate covers the tasks that ended within this time."""

CAPABILITIES: Final = (
    *("heartbeat", "scheduler", "session", "status_mgmt", "retry", "activity_decoration", "channel_dispatch"),
)
"""All reported as false: the agent replaces no service of the platform. `session` would block messages in a turn."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The agent's registration on the platform, and the values of its heartbeats.

    url: the agent's address for the platform. senders: the principals whose messages may come from the platform.
    on_inbound_secret: receives the token that the platform sends with its requests.

    For heartbeats: active_tasks: the messages being processed. task_counts: the number of ended tasks by outcome.
    problem: returns the lasting problem that prevents answers. running: returns the number of running turns.
    """

    config: PlatformConfig
    url: str
    card: JsonObject
    slots: int
    senders: frozenset[str]
    on_inbound_secret: Callable[[Secret], None]
    active_tasks: ActiveTasks
    task_counts: Callable[[], Mapping[TaskOutcome, int]]
    problem: Callable[[], Awaitable[str | None]]
    running: Callable[[], int]


class ErrorRate:
    """The share of failed tasks among the tasks of the last minutes."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, Mapping[TaskOutcome, int]]] = deque()

    def update(self, counts: Mapping[TaskOutcome, int], now: float) -> tuple[int, int]:
        """Record the total counts; return how many of the latest tasks failed, and how many ended."""
        self._counts.append((now, counts))
        while len(self._counts) > 1 and self._counts[1][0] <= now - ERROR_WINDOW_S:
            self._counts.popleft()
        before = self._counts[0][1]
        latest = {outcome: count - before.get(outcome, 0) for outcome, count in counts.items()}
        return latest.get(TaskOutcome.FAILED, 0), sum(latest.values())


@dataclass(eq=False)
class PlatformHost:
    """Keeps the agent registered; created by `join_platform`."""

    membership: Membership
    client: PlatformClient
    dispatcher: Dispatcher
    inbox: Inbox
    handler: DeadlineReplyHandler
    stop: anyio.Event
    _mode: DeliveryMode | None = None
    _mode_changed: anyio.Event = field(default_factory=anyio.Event)
    _started_at: float = field(default_factory=time.monotonic)
    _errors: ErrorRate = field(default_factory=ErrorRate)

    async def run(self) -> None:
        """Resume the messages of an earlier process, register, and stay registered until removed or cancelled."""
        try:
            async with task_group() as tasks:
                await self.dispatcher.resume()
                tasks.start_soon(self._send_heartbeats)
                tasks.start_soon(self._poll)
        except WorkspaceRemoved:
            logger.warning("the workspace was removed from the platform; the agent stops")
            self.stop.set()

    async def _register(self) -> None:
        config, url, card = self.membership.config, self.membership.url, self.membership.card
        wanted: DeliveryMode | None = None if config.delivery == "auto" else config.delivery
        try:
            mode, inbound_secret = await self.client.register(card, url, wanted)
        except PlatformRejected as rejected:
            if wanted is not None or rejected.status != 400:
                raise
            logger.info("the platform cannot push to %s (%s); polling the inbox instead", url, rejected)
            mode, inbound_secret = await self.client.register(card, url, "poll")
        if inbound_secret is not None:
            self.membership.on_inbound_secret(inbound_secret)
        if mode != self._mode:
            logger.info("registered with the platform, delivery mode %s", mode)
            self._mode = mode
            self._mode_changed.set()
            self._mode_changed = anyio.Event()
        self.handler.senders = self.membership.senders if mode == "push" else frozenset()

    async def _poll(self) -> None:
        """Read the inbox; if the platform pushes, only the results of delegations, which are not pushed."""
        while True:
            mode_changed = self._mode_changed
            if self._mode is None:
                await mode_changed.wait()
            else:
                await self.inbox.run(mode_changed, only_results=self._mode == "push")

    async def _send_heartbeats(self) -> None:
        """Register, now and after each outage, and send a heartbeat after each change and every `heartbeat_s` seconds.

        Raises:
            WorkspaceRemoved: the workspace was removed from the platform.
        """
        is_registered, problem = False, ""
        while True:
            changed, running = self.membership.active_tasks.changed, self.membership.running()
            pause_s = SHORTEST_HEARTBEAT_S
            try:
                if not is_registered:
                    await self._register()
                inbound_secret = await self.client.heartbeat(await self._report())
                if inbound_secret is not None:
                    self.membership.on_inbound_secret(inbound_secret)
                is_registered, problem = True, ""
            except PlatformError as error:
                if isinstance(error, WorkspaceRemoved) or await self.client.is_removed():
                    raise WorkspaceRemoved("The workspace was removed from the platform.") from error
                if str(error) != problem:
                    logger.warning("cannot register with the platform, or send a heartbeat: %s", error)
                is_registered, problem = False, str(error)
                pause_s = max(
                    min(self.membership.config.heartbeat_s, RETRY_S) * random.uniform(0.5, 1.0), error.retry_after_s
                )
            await anyio.sleep(pause_s)
            if is_registered:
                with anyio.move_on_after(self.membership.config.heartbeat_s - pause_s):
                    await self._wait_for_change(changed, running)

    async def _wait_for_change(self, changed: anyio.Event, running: int) -> None:
        """Wait until a message or a turn starts or ends; a message may wait for its turn."""
        while not changed.is_set() and self.membership.running() == running:
            with anyio.move_on_after(SHORTEST_HEARTBEAT_S):
                await changed.wait()

    async def _report(self) -> JsonObject:
        failed, ended = self._errors.update(self.membership.task_counts(), time.monotonic())
        problem = await self.membership.problem()
        return {
            "active_tasks": self.membership.running(),
            "current_task": next(iter(self.membership.active_tasks.texts), ""),
            "error_rate": round(failed / ended, 3) if ended else 0.0,
            "sample_error": problem or ("A task failed; see the agent's log." if failed else ""),
            "uptime_seconds": int(time.monotonic() - self._started_at),
            "runtime_metadata": {"capabilities": dict.fromkeys(CAPABILITIES, False)},
            **({} if problem is None else {"runtime_state": "wedged"}),
        }


@asynccontextmanager
async def join_platform(
    membership: Membership,
    client: PlatformClient,
    outbox: Outbox,
    front: RequestHandler,
    handler: DeadlineReplyHandler,
    stop: anyio.Event,
) -> AsyncIterator[None]:
    """Keep the agent registered on the platform while the block is open.

    front: answers messages from the inbox. handler: answers pushed messages. stop: set if the workspace is removed.
    """
    async with open_dispatcher(client, outbox, front) as dispatcher, task_group() as tasks:
        inbox = Inbox(client, outbox, dispatcher, membership.slots)
        handler.replies.late, handler.replies.deadline_s = dispatcher, membership.config.answer_within_s
        tasks.start_soon(PlatformHost(membership, client, dispatcher, inbox, handler, stop).run)
        try:
            yield
        finally:
            handler.senders, handler.replies.late = frozenset(), None
            tasks.cancel_scope.cancel()
