"""Sends push notifications: queued, in order, with retries, and across restarts.

A notification is sent for each change of a task's state, each complete artifact, and the task's end. Every webhook of
every task has its own queue and worker. A failed notification is retried for `retry_for_s` seconds and then dropped.
The end is dropped last, and `push_configs` stores that it was not delivered: it can be delivered twice, and is lost
only if the webhook fails for longer than that.
"""

import itertools
import json
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, assert_never
from weakref import WeakValueDictionary

import anyio
from a2a.compat.v0_3.conversions import to_compat_task
from a2a.server.tasks import PushNotificationEvent, PushNotificationSender
from a2a.types import (
    StreamResponse,
    Task,
    TaskArtifactUpdateEvent,
    TaskPushNotificationConfig,
    TaskState,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import InvalidParamsError
from a2a.utils.proto_utils import to_stream_response
from anyio.abc import TaskGroup
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.a2a_terms import TERMINAL, WORKING
from codex_workspace.common.concurrency import backoff, task_group
from codex_workspace.common.safe_http import (
    AddressGuard,
    AllowList,
    RequestFailed,
    RequestOutcome,
    Resolve,
    ResponseAccepted,
    ResponseRejected,
    SafeHttpClient,
    TargetRefused,
    parse_target,
    resolve_host,
)
from codex_workspace.storage.push_configs import PushConfigs, UndeliveredEnd

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""The delays before the second try and at most; they double in between."""

LONGEST_RETRY_AFTER_S: Final = 300.0
"""The limit for a webhook's Retry-After."""

HOST_SHARE: Final = 4
"""One host gets at most this part (1/n) of the parallel requests, so that a slow host does not block others."""

MAX_WAITING_BYTES: Final = 64 << 20
"""The size of all queued notifications; artifacts can be large."""

CLOSE_GRACE_S: Final = 1.0
"""How long notifications may take when the agent stops; the rest is sent after the next start."""


@dataclass(frozen=True, slots=True)
class PushOptions:
    """The keys of `push:` in config.yaml."""

    allow: tuple[str, ...] = ()
    timeout_s: float = 10.0
    retry_for_s: float = 900.0
    max_waiting: int = 1000
    max_parallel: int = 32


Post = Callable[[str, Mapping[str, str], bytes], Awaitable[RequestOutcome]]
"""Posts a body with headers to a URL; does not raise."""


class SubscriptionSource(Protocol):
    """The webhooks of tasks, implemented by `PushConfigs`."""

    def for_task(self, task_id: str) -> Mapping[str, TaskPushNotificationConfig]:
        """Return the push configurations of a task by their IDs."""

    async def mark_delivered(self, task_id: str, config_id: str) -> None:
        """Record that the end was delivered or dropped."""

    def expects_whole_task(self, task_id: str, config_id: str) -> bool:
        """Whether a webhook was registered over A2A 0.3, which notifies with the whole task."""

    async def task_for(self, task_id: str, config_id: str) -> Task | None:
        """Return the current state of a task; None if the task or the configuration is gone."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Identifies a push configuration."""

    task_id: str
    config_id: str


@dataclass(frozen=True, slots=True)
class Notification:
    """A queued notification. `is_end`: it is the task's last; `size`: its approximate size in memory."""

    payload: StreamResponse
    is_end: bool
    size: int

    @classmethod
    def of(cls, event: PushNotificationEvent) -> "Notification":
        """Copy an event, which may change afterwards."""
        payload = to_stream_response(event)
        is_end = not isinstance(event, TaskArtifactUpdateEvent) and event.status.state in TERMINAL
        return cls(payload, is_end, payload.ByteSize())

    def body(self) -> bytes:
        """Return the JSON body."""
        return json.dumps(MessageToDict(self.payload), ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(slots=True)
class _Queue:
    """The queued notifications of one webhook."""

    waiting: deque[Notification] = field(default_factory=deque)
    dropped: int = 0

    def drop_oldest(self) -> Notification | None:
        """Remove and return the oldest notification that is not an end; None if there is none."""
        for notification in self.waiting:
            if not notification.is_end:
                self.waiting.remove(notification)
                self.dropped += 1
                return notification
        return None


class QueuedSender(PushNotificationSender):
    """The SDK's push sender: queues events, which workers send."""

    def __init__(
        self,
        subscriptions: SubscriptionSource,
        post: Post,
        options: PushOptions,
        workers: TaskGroup,
        jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.0),
    ) -> None:
        self._subscriptions = subscriptions
        self._post = post
        self._options = options
        self._workers = workers
        self._jitter = jitter
        self._slots = _Slots(options.max_parallel)
        self._queues: dict[Webhook, _Queue] = {}
        self._last_states: dict[str, TaskState] = {}
        self._count = 0
        self._bytes = 0
        self._busy = 0
        self._idle = anyio.Event()

    @property
    def waiting(self) -> int:
        """The number of queued notifications."""
        return self._count

    async def send_notification(self, task_id: str, event: PushNotificationEvent) -> None:
        """Queue an event for all webhooks of the task, without waiting."""
        configs = self._subscriptions.for_task(task_id)
        if not configs:
            self._last_states.pop(task_id, None)
            return
        if self._is_news(task_id, event):
            notification = Notification.of(event)
            for config_id in configs:
                if not (
                    isinstance(event, TaskArtifactUpdateEvent)
                    and self._subscriptions.expects_whole_task(task_id, config_id)
                ):
                    self._put(Webhook(task_id, config_id), notification)

    def enqueue_end(self, due: UndeliveredEnd) -> None:
        """Queue the end of a task that ended before this process started, or before the webhook was registered."""
        webhook = Webhook(due.task_id, due.config_id)
        if webhook not in self._queues:
            self._put(webhook, Notification.of(due.event))

    async def wait_idle(self) -> None:
        """Wait until no request is running: each notification is sent, or waits for a retry."""
        while self._busy:
            await self._idle.wait()

    def _is_news(self, task_id: str, event: PushNotificationEvent) -> bool:
        match event:
            case TaskArtifactUpdateEvent():
                return event.last_chunk
            case Task() | TaskStatusUpdateEvent():
                before, now = self._last_states.get(task_id), event.status.state
                if now in TERMINAL:
                    self._last_states.pop(task_id, None)
                else:
                    self._last_states[task_id] = now
                # A working status without a change is only a note; every question is new.
                return now != before or now not in WORKING
            case _:
                assert_never(event)

    def _put(self, webhook: Webhook, notification: Notification) -> None:
        queue = self._queues.get(webhook)
        while queue is not None and self._is_full(notification):
            dropped = queue.drop_oldest()
            if dropped is None:
                break
            self._uncount(dropped)
        if self._is_full(notification) and not notification.is_end:
            logger.warning("task %s: too many notifications are queued; dropping one", webhook.task_id)
            return
        self._count += 1
        self._bytes += notification.size
        if queue is None:
            queue = self._queues[webhook] = _Queue()
            self._workers.start_soon(self._work, webhook, queue)
            self._busy += 1
        queue.waiting.append(notification)

    def _is_full(self, further: Notification) -> bool:
        return self._count >= self._options.max_waiting or self._bytes + further.size > MAX_WAITING_BYTES

    def _uncount(self, notification: Notification) -> None:
        self._count -= 1
        self._bytes -= notification.size

    async def _work(self, webhook: Webhook, queue: _Queue) -> None:
        """Send the queued notifications of one webhook."""
        try:
            while queue.waiting:
                notification = queue.waiting.popleft()
                try:
                    await self._tell(webhook, notification)
                finally:
                    self._uncount(notification)
        except Exception:
            # An error must not end the agent; an undelivered end is sent after the next start.
            logger.exception("task %s: dropping a webhook's notifications", webhook.task_id)
        finally:
            for left in queue.waiting:
                self._uncount(left)
            if queue.dropped:
                logger.warning("task %s: %d notifications were dropped for a webhook", webhook.task_id, queue.dropped)
            del self._queues[webhook]
            self._decrement_busy()

    async def _tell(self, webhook: Webhook, notification: Notification) -> None:
        """Send a notification until it is accepted, rejected, timed out, or its webhook is deleted."""
        until = anyio.current_time() + self._options.retry_for_s
        body = await self._body(webhook, notification)
        for tries in itertools.count():
            config = self._subscriptions.for_task(webhook.task_id).get(webhook.config_id)
            if config is None:
                return
            origin = _origin(config.url)
            async with self._slots.taken(origin):
                answer = await self._post(config.url, _headers(config), body)
            match answer:
                case ResponseAccepted():
                    logger.debug("task %s: webhook %s accepted a notification", webhook.task_id, origin)
                    break
                case ResponseRejected(reason):
                    logger.warning("task %s: webhook %s rejected a notification: %s", webhook.task_id, origin, reason)
                    break
                case RequestFailed(reason, retry_after_s):
                    pause = self._pause_after(tries, retry_after_s)
                    if anyio.current_time() + pause > until:
                        logger.warning(
                            "task %s: dropping a notification of webhook %s after %d tries: %s",
                            *(webhook.task_id, origin, tries + 1, reason),
                        )
                        break
                    logger.info("task %s: webhook %s: %s; retrying in %.0f s", webhook.task_id, origin, reason, pause)
                    with self._waiting_to_retry():
                        await anyio.sleep(pause)
                case _:
                    assert_never(answer)
        if notification.is_end:
            await self._subscriptions.mark_delivered(webhook.task_id, webhook.config_id)

    async def _body(self, webhook: Webhook, notification: Notification) -> bytes:
        if self._subscriptions.expects_whole_task(webhook.task_id, webhook.config_id):
            task = await self._subscriptions.task_for(webhook.task_id, webhook.config_id)
            if task is not None:
                return to_compat_task(task).model_dump_json(by_alias=True, exclude_none=True).encode()
        return notification.body()

    def _pause_after(self, tries: int, retry_after_s: float | None) -> float:
        pause = retry_delay(tries) * self._jitter()
        return max(pause, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))

    @contextmanager
    def _waiting_to_retry(self) -> Iterator[None]:
        self._decrement_busy()
        try:
            yield
        finally:
            self._busy += 1

    def _decrement_busy(self) -> None:
        self._busy -= 1
        if self._busy == 0:
            self._idle.set()
            self._idle = anyio.Event()


class _Slots:
    """Limits parallel requests, in total and per host."""

    def __init__(self, in_all: int) -> None:
        self._all = anyio.Semaphore(in_all)
        self._of_one = max(1, in_all // HOST_SHARE)
        self._hosts: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def taken(self, origin: str) -> AsyncIterator[None]:
        """Hold a slot for the block."""
        host = self._hosts.setdefault(origin, self._hosts.get(origin) or anyio.Semaphore(self._of_one))
        async with host, self._all:
            yield


class PushService:
    """The push notification service; see `open_push`."""

    def __init__(self, configs: PushConfigs, sender: QueuedSender, guard: AddressGuard) -> None:
        self.configs: Final = configs
        self.sender: Final = sender
        self._guard = guard

    async def validate_url(self, url: str) -> bool:
        """Validate a webhook's URL for the SDK. A host that cannot be resolved now passes; connecting checks again.

        Raises:
            InvalidParamsError: the URL is not allowed.
        """
        try:
            await self._guard.check(url)
        except TargetRefused as error:
            raise InvalidParamsError(message=str(error)) from error
        return True

    async def resume(self) -> int:
        """Queue the ends that an earlier process did not deliver; return how many. Call it after tasks are resumed."""
        due = await self.configs.undelivered_ends()
        for each in due:
            self.sender.enqueue_end(each)
        if due:
            logger.info("sending %d task ends that were not delivered to their webhooks", len(due))
        return len(due)


@asynccontextmanager
async def open_push(
    options: PushOptions, configs: PushConfigs, resolve: Resolve = resolve_host
) -> AsyncIterator[PushService]:
    """Open the push notification service; leaving the block stops it.

    `resolve` returns the addresses of a host.

    Raises:
        ConfigError: `push.allow` is invalid.
    """
    guard = AddressGuard(AllowList.parse(options.allow), resolve)
    webhooks = SafeHttpClient(guard, options.timeout_s)
    await configs.load()
    async with task_group() as workers:
        sender = QueuedSender(configs, webhooks.post, options, workers)
        configs.on_end_due(sender.enqueue_end)
        try:
            yield PushService(configs, sender, guard)
        finally:
            with anyio.move_on_after(CLOSE_GRACE_S, shield=True):
                await sender.wait_idle()
            workers.cancel_scope.cancel()


def retry_delay(tries: int) -> float:
    """Return the delay in seconds after `tries` + 1 failures."""
    return backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, tries)


def _headers(config: TaskPushNotificationConfig) -> dict[str, str]:
    headers = {"X-A2A-Notification-Token": config.token} if config.token else {}
    if config.authentication.scheme and config.authentication.credentials:
        headers["Authorization"] = f"{config.authentication.scheme} {config.authentication.credentials}"
    return headers


def _origin(url: str) -> str:
    try:
        return parse_target(url).origin
    except TargetRefused:
        return "(unreadable)"
