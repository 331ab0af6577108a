"""Our own host on the platform: registration, heartbeat, delivery mode and removal.

Other callers are served whatever the platform does. If the platform removes the workspace, `stop` is set.
"""

import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal

import anyio
from a2a.server.request_handlers import RequestHandler

from codex_workspace.common.concurrency import backoff, task_group
from codex_workspace.common.telemetry import TaskOutcome
from codex_workspace.common.values import JsonObject
from codex_workspace.config.environment import Secret
from codex_workspace.platform.active_tasks import ActiveTasks
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.client_types import (
    DeliveryMode,
    PlatformBusy,
    PlatformError,
    PlatformRejected,
    WorkspaceRemoved,
)
from codex_workspace.platform.deadline_reply import DeferredReplies, PushDelivery
from codex_workspace.platform.dispatcher import Dispatcher, open_dispatcher
from codex_workspace.platform.inbox import Inbox
from codex_workspace.storage.outbox import Outbox

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0

SHORTEST_HEARTBEAT_S: Final = 1.0
"""A change is reported at once, but not more often than this."""

ERROR_WINDOW_S: Final = 300.0
"""The error rate is that of the tasks that ended within this time."""

CAPABILITIES: Final = (
    *("heartbeat", "scheduler", "session", "status_mgmt", "retry", "activity_decoration", "channel_dispatch"),
)
"""None of the platform's services is replaced. With `session` the platform would reject messages during a turn."""


@dataclass(frozen=True, slots=True)
class RegistrationOptions:
    """How the agent registers.

    url: where the platform reaches it. delivery: `auto` accepts the platform's mode, and polls if it cannot push.
    heartbeat_s: the longest interval between heartbeats. slots: messages of the inbox that are active at a time.
    """

    url: str
    card: JsonObject
    delivery: Literal["push", "poll", "auto"] = "auto"
    heartbeat_s: float = 30.0
    slots: int = 25


@dataclass(frozen=True, slots=True)
class HealthSource:
    """What the heartbeat reports.

    active_tasks: the messages being processed. task_counts: how tasks have ended so far. problem: why no message can be
    answered, for a lasting reason. running: the number of running turns; None: that of the messages.
    """

    active_tasks: ActiveTasks
    task_counts: Callable[[], Mapping[TaskOutcome, int]]
    problem: Callable[[], Awaitable[str | None]]
    running: Callable[[], int] | None = None

    @property
    def active(self) -> int:
        """How many turns run."""
        return len(self.active_tasks.texts) if self.running is None else self.running()


class ErrorRate:
    """The share of failed tasks among those of the last minutes."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, Mapping[TaskOutcome, int]]] = deque()

    def update(self, counts: Mapping[TaskOutcome, int], now: float) -> tuple[int, int]:
        """Record the counts so far; return how many of the latest tasks failed, and how many there were."""
        self._counts.append((now, counts))
        while len(self._counts) > 1 and self._counts[1][0] <= now - ERROR_WINDOW_S:
            self._counts.popleft()
        before = self._counts[0][1]
        latest = {outcome: count - before.get(outcome, 0) for outcome, count in counts.items()}
        return latest.get(TaskOutcome.FAILED, 0), sum(latest.values())


class PlatformHost:
    """Keeps the agent registered; from `join_platform`."""

    def __init__(
        self,
        options: RegistrationOptions,
        client: PlatformClient,
        health: HealthSource,
        dispatcher: Dispatcher,
        inbox: Inbox,
        push: PushDelivery,
        on_inbound_secret: Callable[[Secret], None],
        stop: anyio.Event,
    ) -> None:
        self._options = options
        self._client = client
        self._health = health
        self._dispatcher = dispatcher
        self._inbox = inbox
        self._push = push
        self._on_inbound_secret = on_inbound_secret
        self._stop = stop
        self._mode: DeliveryMode | None = None
        self._switched = anyio.Event()
        self._started_at = time.monotonic()
        self._errors = ErrorRate()

    async def run(self) -> None:
        """Resume the messages of an earlier process, register, and stay registered until removed or cancelled."""
        try:
            await self._dispatcher.resume()
            await self._register()
            async with task_group() as tasks:
                tasks.start_soon(self._send_heartbeats)
                tasks.start_soon(self._poll)
        except WorkspaceRemoved:
            on_removed(self._stop)

    async def _register(self) -> None:
        """Register, however long it takes."""
        tries = 0
        while True:
            try:
                await self._register_once()
                return
            except WorkspaceRemoved:
                raise
            except PlatformError as error:
                pause_s = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, tries) * random.uniform(0.75, 1.0)
                pause_s = max(pause_s, error.retry_after_s)
                await self._raise_if_removed(error)
                logger.warning("cannot register with the platform: %s Retrying in %.1f s", error, pause_s)
                tries += 1
                await anyio.sleep(pause_s)

    async def _raise_if_removed(self, error: PlatformError) -> None:
        if await self._client.is_removed():
            raise WorkspaceRemoved("The workspace was removed from the platform.") from error

    async def _register_once(self) -> None:
        options = self._options
        wanted: DeliveryMode | None = None if options.delivery == "auto" else options.delivery
        try:
            mode, inbound_secret = await self._client.register(options.card, options.url, wanted)
        except PlatformRejected as rejected:
            if options.delivery != "auto" or rejected.status != 400:
                raise
            logger.info("the platform cannot push to %s (%s); polling the inbox instead", options.url, rejected)
            mode, inbound_secret = await self._client.register(options.card, options.url, "poll")
        if inbound_secret is not None:
            self._on_inbound_secret(inbound_secret)
        if mode != self._mode:
            logger.info("registered with the platform, delivery mode %s", mode)
            self._mode = mode
            self._switched.set()
            self._switched = anyio.Event()
        self._push.is_on = mode == "push"

    async def _poll(self) -> None:
        """Read the inbox; if the platform pushes, only the results of delegations, which are not pushed."""
        while True:
            switched = self._switched
            await self._inbox.run(switched, only_results=self._mode != "poll")

    async def _send_heartbeats(self) -> None:
        """Send a heartbeat after each change, at least every `heartbeat_s` seconds; register again after an outage."""
        was_away = False
        while True:
            changed, active, pause_s = self._health.active_tasks.changed, self._health.active, SHORTEST_HEARTBEAT_S
            try:
                if was_away:
                    await self._register_once()
                    was_away = False
                inbound_secret = await self._client.heartbeat(await self._report())
                if inbound_secret is not None:
                    self._on_inbound_secret(inbound_secret)
            except WorkspaceRemoved:
                raise
            except PlatformBusy as busy:
                pause_s = max(pause_s, busy.retry_after_s)
            except PlatformError as error:
                if not was_away:
                    logger.warning("cannot send the heartbeat: %s", error)
                was_away = True
                pause_s = min(self._options.heartbeat_s, 5.0) * random.uniform(0.5, 1.0)
                await self._raise_if_removed(error)
            await anyio.sleep(pause_s)
            if not was_away:
                with anyio.move_on_after(self._options.heartbeat_s - pause_s):
                    await self._wait_for_change(changed, active)

    async def _wait_for_change(self, changed: anyio.Event, active: int) -> None:
        """Wait until a message or a turn starts or ends; a message may wait for its turn."""
        while not changed.is_set() and self._health.active == active:
            with anyio.move_on_after(SHORTEST_HEARTBEAT_S):
                await changed.wait()

    async def _report(self) -> JsonObject:
        failed, ended = self._errors.update(self._health.task_counts(), time.monotonic())
        problem = await self._health.problem()
        return {
            "active_tasks": self._health.active,
            "current_task": next(iter(self._health.active_tasks.texts), ""),
            "error_rate": round(failed / ended, 3) if ended else 0.0,
            "sample_error": problem or ("A task failed; see the agent's log." if failed else ""),
            "uptime_seconds": int(time.monotonic() - self._started_at),
            "runtime_metadata": {"capabilities": dict.fromkeys(CAPABILITIES, False)},
            **({} if problem is None else {"runtime_state": "wedged"}),
        }


def on_removed(stop: anyio.Event) -> None:
    """Stop the agent: the platform has removed its workspace."""
    if not stop.is_set():
        logger.warning("the workspace was removed from the platform; the agent stops")
    stop.set()


@asynccontextmanager
async def join_platform(
    options: RegistrationOptions,
    client: PlatformClient,
    outbox: Outbox,
    handler: RequestHandler,
    health: HealthSource,
    push: PushDelivery,
    on_inbound_secret: Callable[[Secret], None],
    stop: anyio.Event,
) -> AsyncIterator[None]:
    """Be on the platform while the block is open.

    `on_inbound_secret` gets the token of the platform's calls to the agent; `stop` is set on a removal.
    """
    async with (
        open_dispatcher(client, outbox, handler) as dispatcher,
        task_group() as tasks,
    ):
        inbox = Inbox(client, outbox, dispatcher, options.slots)
        host = PlatformHost(options, client, health, dispatcher, inbox, push, on_inbound_secret, stop)
        push.late = DeferredReplies(outbox, push.deadline_s, lambda: dispatcher)
        tasks.start_soon(host.run)
        try:
            yield
        finally:
            push.is_on, push.late = False, None
            tasks.cancel_scope.cancel()
