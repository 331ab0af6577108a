"""Sends push notifications: queued, in order, with retries, and across restarts.

A notification is sent for each change of a task's state, each complete artifact, and the task's end. Every webhook of
every task has its own queue and worker. A failed notification is retried for `retry_for_s` seconds and then dropped.
The end is dropped last, and `push_configs` stores that it was not delivered: it can be delivered twice, and is lost
only if the webhook fails for longer than that.
"""

import itertools
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never
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
from google.protobuf.json_format import MessageToJson

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
from codex_workspace.config.settings import PushConfig
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
"""The size of all notifications that are queued or in delivery; artifacts can be large."""

CLOSE_GRACE_S: Final = 1.0
"""How long notifications may take when the agent stops; the rest is sent after the next start."""

Post = Callable[[str, Mapping[str, str], bytes], Awaitable[RequestOutcome]]
"""Posts a body with headers to a URL; does not raise."""

Webhook: TypeAlias = tuple[str, str]
"""A task's ID and the ID of one of its configurations."""


@dataclass(frozen=True, slots=True, eq=False)
class Notification:
    """A queued notification. `is_end`: it is the task's last; `size`: its approximate size in memory."""

    payload: StreamResponse
    is_end: bool
    size: int


class PushService(PushNotificationSender):
    """The SDK's push sender: queues events, which workers send; see `open_push`.

    Args:
        post: sends a request.
        workers: runs a task for each webhook that has queued notifications.
        jitter: returns the factor of a pause.
    """

    def __init__(
        self,
        configs: PushConfigs,
        guard: AddressGuard,
        post: Post,
        options: PushConfig,
        workers: TaskGroup,
        jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.0),
    ) -> None:
        self.configs: Final = configs
        self._guard = guard
        self._post = post
        self._options = options
        self._workers = workers
        self._jitter = jitter
        self._slots = anyio.Semaphore(options.max_parallel)
        self._host_slots: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()
        self._queues: dict[Webhook, deque[Notification]] = {}
        self._in_delivery: dict[Webhook, Notification] = {}
        self._last_states: dict[str, TaskState] = {}

    @property
    def waiting(self) -> int:
        """The number of notifications that are queued or in delivery."""
        return len(self._undelivered())

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
            self.enqueue_end(each)
        if due:
            logger.info("sending %d final task states that were not delivered to their webhooks", len(due))
        return len(due)

    async def send_notification(self, task_id: str, event: PushNotificationEvent) -> None:
        """Queue an event for all webhooks of the task, without waiting."""
        configs = self.configs.watched.get(task_id)
        if not configs:
            self._last_states.pop(task_id, None)
        elif self._is_news(task_id, event):
            notification = _notification(event)
            is_artifact = isinstance(event, TaskArtifactUpdateEvent)
            for config_id in configs:
                if not (is_artifact and self.configs.expects_whole_task(task_id, config_id)):
                    self._put((task_id, config_id), notification)

    def enqueue_end(self, due: UndeliveredEnd) -> None:
        """Queue the end of a task that ended before this process started, or before the webhook was registered."""
        webhook = due.task_id, due.config_id
        if webhook not in self._queues:
            self._put(webhook, _notification(due.event))

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
        if queue is None:
            queue = self._queues[webhook] = deque()
            self._workers.start_soon(self._work, webhook, queue)
        queue.append(notification)
        while self._is_full() and (oldest := next((each for each in queue if not each.is_end), None)) is not None:
            logger.warning("task %s: too many notifications are queued; dropping one", webhook[0])
            queue.remove(oldest)

    def _is_full(self) -> bool:
        size = sum(each.size for each in self._undelivered())
        return self.waiting > self._options.max_waiting or size > MAX_WAITING_BYTES

    def _undelivered(self) -> list[Notification]:
        return [*self._in_delivery.values(), *itertools.chain.from_iterable(self._queues.values())]

    async def _work(self, webhook: Webhook, queue: deque[Notification]) -> None:
        """Send the queued notifications of one webhook."""
        try:
            while queue:
                self._in_delivery[webhook] = notification = queue.popleft()
                await self._send(webhook, notification)
        except Exception:
            # An error must not end the agent; an undelivered end is sent after the next start.
            logger.exception("task %s: dropping a webhook's notifications", webhook[0])
        finally:
            del self._queues[webhook]
            self._in_delivery.pop(webhook, None)

    async def _send(self, webhook: Webhook, notification: Notification) -> None:
        """Send a notification until it is accepted, rejected, timed out, or its webhook is deleted."""
        task_id, config_id = webhook
        until = anyio.current_time() + self._options.retry_for_s
        body = await self._body(webhook, notification)
        for tries in itertools.count():
            config = self.configs.watched.get(task_id, {}).get(config_id)
            if config is None:
                return
            origin = _origin(config.url)
            async with self._host_slot(origin), self._slots:
                answer = await self._post(config.url, _headers(config), body)
            match answer:
                case ResponseAccepted():
                    logger.debug("task %s: webhook %s accepted a notification", task_id, origin)
                    break
                case ResponseRejected(reason):
                    logger.warning("task %s: webhook %s rejected a notification: %s", task_id, origin, reason)
                    break
                case RequestFailed(reason, retry_after_s):
                    pause = self._pause(tries, retry_after_s)
                    if anyio.current_time() + pause > until:
                        logger.warning(
                            "task %s: dropping a notification of webhook %s after %d tries: %s",
                            *(task_id, origin, tries + 1, reason),
                        )
                        break
                    logger.info("task %s: webhook %s: %s; retrying in %.0f s", task_id, origin, reason, pause)
                    await anyio.sleep(pause)
                case _:
                    assert_never(answer)
        if notification.is_end:
            await self.configs.mark_delivered(task_id, config_id)

    def _pause(self, tries: int, retry_after_s: float | None) -> float:
        pause = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, tries) * self._jitter()
        return max(pause, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))

    def _host_slot(self, origin: str) -> anyio.Semaphore:
        free = max(1, self._options.max_parallel // HOST_SHARE)
        return self._host_slots.setdefault(origin, self._host_slots.get(origin) or anyio.Semaphore(free))

    async def _body(self, webhook: Webhook, notification: Notification) -> bytes:
        task = await self.configs.task_for(*webhook) if self.configs.expects_whole_task(*webhook) else None
        if task is None:
            return MessageToJson(notification.payload, indent=None, ensure_ascii=False).encode()
        return to_compat_task(task).model_dump_json(by_alias=True, exclude_none=True).encode()


@asynccontextmanager
async def open_push(
    options: PushConfig, configs: PushConfigs, resolve: Resolve = resolve_host
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
        push = PushService(configs, guard, webhooks.post, options, workers)
        configs.on_end_due(push.enqueue_end)
        yield push
        workers.cancel_scope.deadline = anyio.current_time() + CLOSE_GRACE_S


def _notification(event: PushNotificationEvent) -> Notification:
    """Copy an event, which may change afterwards."""
    payload = to_stream_response(event)
    is_end = not isinstance(event, TaskArtifactUpdateEvent) and event.status.state in TERMINAL
    return Notification(payload, is_end, payload.ByteSize())


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
