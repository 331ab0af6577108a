"""Our own host on the platform: registered, seen by its heartbeat, gone when it is removed; with its inbox and replies.

Whatever the platform does, the agent answers its other callers as before. Only a removal ends it: `stop` is set then.
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
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import RequestHandler

from codex_workspace.common.concurrency import backoff, task_group
from codex_workspace.common.metrics import TaskOutcome
from codex_workspace.common.values import JsonObject
from codex_workspace.config.environment import Secret
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.client_types import (
    DeliveryMode,
    HeartbeatReport,
    PlatformBusy,
    PlatformError,
    PlatformRejected,
    PlatformUnauthorized,
    PlatformUnreachable,
    Registration,
    WorkspaceRemoved,
)
from codex_workspace.platform.deadline_reply import PushDelivery
from codex_workspace.platform.dispatcher import Dispatcher
from codex_workspace.platform.inbox import Inbox
from codex_workspace.platform.reply_sender import ReplySender
from codex_workspace.storage.outbox import Outbox, delete_expired

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Before a second try to register, and at the most; in between it doubles."""

SHORTEST_BEAT_S: Final = 1.0
"""A change of what is at work is told at once, but not more often than this."""

ERROR_WINDOW_S: Final = 300.0
"""The error rate is that of the tasks that have ended in so many seconds."""

MAX_TASK_CHARS: Final = 200

CAPABILITIES: Final[Mapping[str, bool]] = dict.fromkeys(
    (
        "heartbeat",
        "scheduler",
        "session",
        "status_mgmt",
        "retry",
        "activity_decoration",
        "channel_dispatch",
    ),
    False,
)
"""What of the platform's work we do ourselves: nothing. `session` would have it refuse, rather than keep, what comes
while a turn runs."""


@dataclass(frozen=True, slots=True)
class RegistrationOptions:
    """How we are on the platform.

    url: where it reaches us. delivery: what we want; `auto` takes what the platform has, and what is possible.
    heartbeat_s: between two beats at the most. at_once: messages of the inbox that are worked on at a time.
    """

    url: str
    card: JsonObject
    delivery: Literal["push", "poll", "auto"] = "auto"
    heartbeat_s: float = 30.0
    at_once: int = 25


class TrackedExecutor(AgentExecutor):
    """An executor that is watched: what is at work in it, for the heartbeat."""

    def __init__(self, executor: AgentExecutor) -> None:
        self._executor = executor
        self._at_work: dict[object, str] = {}
        self.changed = anyio.Event()

    @property
    def active(self) -> int:
        """How many messages are at work."""
        return len(self._at_work)

    @property
    def current_task(self) -> str:
        """What the oldest of them is about."""
        return next(iter(self._at_work.values()), "")

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Do it, and be seen."""
        key = object()
        self._at_work[key] = " ".join(context.get_user_input().split())[:MAX_TASK_CHARS] or "a message"
        self._tell()
        try:
            await self._executor.execute(context, event_queue)
        finally:
            del self._at_work[key]
            self._tell()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Do it."""
        await self._executor.cancel(context, event_queue)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


@dataclass(frozen=True, slots=True)
class HealthSource:
    """Where the heartbeat looks: what is at work, how tasks have ended so far, and what is wrong for longer.

    running: gives how many turns run; None: that is what is at work, where nothing waits for its turn.
    """

    pulse: TrackedExecutor
    ended: Callable[[], Mapping[TaskOutcome, int]]
    problem: Callable[[], Awaitable[str | None]]
    running: Callable[[], int] | None = None

    @property
    def active(self) -> int:
        """How many turns run."""
        return self.pulse.active if self.running is None else self.running()


class ErrorRate:
    """What share of the tasks of the last minutes has failed."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, Mapping[TaskOutcome, int]]] = deque()

    def failed_of(self, ended: Mapping[TaskOutcome, int], now: float) -> tuple[int, int]:
        """Take note of how tasks have ended until now; return how many of the latest have failed, and of how many."""
        self._counts.append((now, ended))
        while len(self._counts) > 1 and self._counts[1][0] <= now - ERROR_WINDOW_S:
            self._counts.popleft()
        before = self._counts[0][1]
        news = {outcome: count - before.get(outcome, 0) for outcome, count in ended.items()}
        return news.get(TaskOutcome.FAILED, 0), sum(news.values())


class PlatformHost:
    """The agent's side of its place on the platform; from `join_platform`."""

    def __init__(
        self,
        options: RegistrationOptions,
        api: PlatformClient,
        vitals: HealthSource,
        clerk: Dispatcher,
        inbox: Inbox,
        pushing: PushDelivery,
        let_in: Callable[[Secret], None],
        stop: anyio.Event,
    ) -> None:
        self._let_in = let_in
        self._options = options
        self._api = api
        self._vitals = vitals
        self._clerk = clerk
        self._inbox = inbox
        self._pushing = pushing
        self._stop = stop
        self._mode: DeliveryMode | None = None
        self._switched = anyio.Event()
        self._began = time.monotonic()
        self._errors = ErrorRate()

    async def run(self) -> None:
        """Go on with what an earlier process has left, and be there until removed or cancelled."""
        await self._clerk.resume()
        await self._until_removed(self._register)
        if self._mode is not None:
            async with task_group() as tasks:
                tasks.start_soon(self._until_removed, self._beat)
                tasks.start_soon(self._until_removed, self._poll)

    async def _until_removed(self, do: Callable[[], Awaitable[None]]) -> None:
        try:
            await do()
        except WorkspaceRemoved:
            self.removed()

    def removed(self) -> None:
        """Have the agent stop: the platform has removed its workspace."""
        if not self._stop.is_set():
            logger.warning("the workspace was removed from the platform; the agent stops")
        self._stop.set()

    async def _register(self) -> None:
        """Register, however long it takes.

        Raises:
            Removed: there is nothing to register any more.
        """
        tries = 0
        while True:
            try:
                registered = await self._ask()
                break
            except WorkspaceRemoved:
                raise
            except PlatformError as error:
                grown_s = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, tries) * random.uniform(0.75, 1.0)
                pause_s = max(grown_s, error.retry_after_s)
                if await self._api.is_removed():
                    raise WorkspaceRemoved("The workspace was removed from the platform.") from error
                logger.warning("not registered with the platform: %s Tried again in %.1f s", error, pause_s)
                tries += 1
                await anyio.sleep(pause_s)
        self._take(registered)

    async def _ask(self) -> Registration:
        options = self._options
        wanted: DeliveryMode | None = None if options.delivery == "auto" else options.delivery
        try:
            return await self._api.register(options.card, options.url, wanted)
        except PlatformRejected as refused:
            if options.delivery != "auto" or refused.status != 400:
                raise
            logger.info("the platform cannot push to %s (%s); its inbox is polled", options.url, refused)
            return await self._api.register(options.card, options.url, "poll")

    def _take(self, registered: Registration) -> None:
        if registered.inbound_secret is not None:
            self._let_in(registered.inbound_secret)
        if registered.delivery != self._mode:
            logger.info("registered with the platform, delivery by %s", registered.delivery)
            self._mode = registered.delivery
            self._switched.set()
            self._switched = anyio.Event()
        self._pushing.is_on = registered.delivery == "push"

    async def _poll(self) -> None:
        """Read the inbox: all of it while the platform delivers there, else the results of our delegations."""
        while True:
            switched = self._switched
            await self._inbox.run(switched, only_results=self._mode != "poll")

    async def _beat(self) -> None:
        """Say how we are, at least every `heartbeat_s` seconds; register anew where the platform was away."""
        was_away = False
        while True:
            changed, active, pause_s = self._vitals.pulse.changed, self._vitals.active, SHORTEST_BEAT_S
            try:
                if was_away:
                    self._take(await self._ask())
                    was_away = False
                inbound_secret = await self._api.heartbeat(await self._now())
                if inbound_secret is not None:
                    self._let_in(inbound_secret)
            except WorkspaceRemoved:
                raise
            except PlatformBusy as busy:
                pause_s = max(pause_s, busy.retry_after_s)
            except (PlatformUnreachable, PlatformUnauthorized, PlatformRejected) as error:
                if not was_away:
                    logger.warning("the platform does not take the heartbeat: %s", error)
                was_away = True
                pause_s = self._pause_s()
                if await self._api.is_removed():
                    raise WorkspaceRemoved("The workspace was removed from the platform.") from error
            await anyio.sleep(pause_s)
            if not was_away:
                with anyio.move_on_after(self._options.heartbeat_s - pause_s):
                    await self._until_changed(changed, active)

    async def _until_changed(self, changed: anyio.Event, active: int) -> None:
        """Wait until a message begins or ends, or a turn: between them a message may wait for its turn."""
        while not changed.is_set() and self._vitals.active == active:
            with anyio.move_on_after(SHORTEST_BEAT_S):
                await changed.wait()

    def _pause_s(self) -> float:
        return min(self._options.heartbeat_s, 5.0) * random.uniform(0.5, 1.0)

    async def _now(self) -> HeartbeatReport:
        failed, all_ = self._errors.failed_of(self._vitals.ended(), time.monotonic())
        problem = await self._vitals.problem()
        return HeartbeatReport(
            active_tasks=self._vitals.active,
            current_task=self._vitals.pulse.current_task,
            error_rate=round(failed / all_, 3) if all_ else 0.0,
            sample_error=problem or ("A task has failed; the agent's log says more." if failed else ""),
            uptime_s=int(time.monotonic() - self._began),
            wedged=problem is not None,
            capabilities=CAPABILITIES,
        )


@asynccontextmanager
async def join_platform(
    options: RegistrationOptions,
    api: PlatformClient,
    mail: Outbox,
    handler: RequestHandler,
    vitals: HealthSource,
    pushing: PushDelivery,
    let_in: Callable[[Secret], None],
    stop: anyio.Event,
) -> AsyncIterator[None]:
    """Be on the platform while the block is open; what an earlier process has left is gone on with first.

    `let_in` is told the secret that the platform shows when it calls us; `stop` is set when it removes us.
    """
    async with task_group() as tasks:
        postman = ReplySender(api, mail, tasks)
        clerk = Dispatcher(handler, mail, api, tasks, postman)
        inbox = Inbox(api, mail, clerk, options.at_once)
        host = PlatformHost(options, api, vitals, clerk, inbox, pushing, let_in, stop)
        postman.tell(clerk.sent, host.removed)
        pushing.follow, pushing.asks_in = clerk.follow, clerk.asks_in
        tasks.start_soon(host.run)
        tasks.start_soon(delete_expired, mail)
        try:
            yield
        finally:
            pushing.is_on = False
            pushing.follow = None
            tasks.cancel_scope.cancel()
