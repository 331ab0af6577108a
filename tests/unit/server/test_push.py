"""Telling webhooks: in order, again, after a restart; in virtual time, and with the SDK's handler over real sockets."""

import logging
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, cast

import anyio
import pytest
import yaml
from a2a.compat.v0_3 import types as old_types
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    Artifact,
    AuthenticationInfo,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskPushNotificationConfig,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import InvalidParamsError
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.a2a_terms import HEADERS
from codex_workspace.common.database_url import sqlite_url
from codex_workspace.common.errors import ConfigLocation
from codex_workspace.common.safe_http import (
    AddressGuard,
    AllowList,
    RequestFailed,
    RequestOutcome,
    ResponseAccepted,
    ResponseRejected,
)
from codex_workspace.config.settings import TEMPLATE_DIR, PushConfig
from codex_workspace.config.validation import read_section
from codex_workspace.server.push import LONGEST_RETRY_AFTER_S, PushService, open_push
from codex_workspace.storage.store import Store
from tests.support.memory_codex import in_virtual_time
from tests.support.webhook_server import WebhookServer, webhook
from tests.unit.storage.test_store import COMPLETED, ME, WORKING, on_disk, opened, task_of

if TYPE_CHECKING:
    from codex_workspace.storage.push_configs import PushConfigs

OPTIONS = PushConfig(retry_for_s=100.0)
HOOK = "https://hooks.example.com/secret-path?key=secret-query"
STATES = {"submitted": TaskState.TASK_STATE_SUBMITTED, "working": WORKING, "completed": COMPLETED}


# --- Order and patience, in virtual time ---


def status(state: TaskState, text: str = "", task_id: str = "t", context_id: str = "c") -> TaskStatusUpdateEvent:
    message = Message(message_id="m", role=Role.ROLE_AGENT, parts=[Part(text=text)]) if text else None
    told = TaskStatus(state=state, message=message)
    return TaskStatusUpdateEvent(task_id=task_id, context_id=context_id, status=told)


def chunk(text: str, *, last: bool, task_id: str = "t", context_id: str = "c") -> TaskArtifactUpdateEvent:
    artifact = Artifact(artifact_id="answer", parts=[Part(text=text)])
    return TaskArtifactUpdateEvent(task_id=task_id, context_id=context_id, artifact=artifact, last_chunk=last)


@dataclass(slots=True)
class Peers:
    """Webhooks in memory: who subscribed, what they answer, and what they got at which (virtual) second."""

    configs: dict[str, dict[str, TaskPushNotificationConfig]] = field(default_factory=dict)
    answers: list[RequestOutcome] = field(default_factory=list)
    held: dict[str, anyio.Event] = field(default_factory=dict)
    got: list[tuple[float, str, str]] = field(default_factory=list)
    settled_ends: list[tuple[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    began: float = field(default_factory=anyio.current_time)

    def subscribe(self, task_id: str = "t", url: str = HOOK, config_id: str = "a") -> None:
        config = TaskPushNotificationConfig(task_id=task_id, id=config_id, url=url, token="secret-token")
        self.configs.setdefault(task_id, {})[config_id] = config

    @property
    def watched(self) -> dict[str, dict[str, TaskPushNotificationConfig]]:
        return self.configs

    async def mark_delivered(self, task_id: str, config_id: str) -> None:
        self.settled_ends.append((task_id, config_id))
        del self.configs[task_id][config_id]

    def expects_whole_task(self, task_id: str, config_id: str) -> bool:
        return False

    async def task_for(self, task_id: str, config_id: str) -> Task | None:
        raise AssertionError

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> RequestOutcome:
        assert headers["X-A2A-Notification-Token"] == "secret-token"
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if url in self.held:
            await self.held[url].wait()
        self.at_once -= 1
        self.got.append((anyio.current_time() - self.began, url, body.decode()))
        return self.answers.pop(0) if self.answers else ResponseAccepted()

    @property
    def times(self) -> list[float]:
        return [round(at, 3) for at, _, _ in self.got]

    @property
    def words(self) -> list[str]:
        """What each request held, by its one distinctive word."""
        known = ("SUBMITTED", "WORKING", "INPUT_REQUIRED", "COMPLETED", "chunk-1", "chunk-2", "chunk-3")
        return [word for _, _, body in self.got for word in known if word in body]


@asynccontextmanager
async def sending(peers: Peers, options: PushConfig = OPTIONS) -> AsyncIterator[PushService]:
    """A sender without jitter; at the block's end everything was told or given up."""
    async with anyio.create_task_group() as workers:
        configs, guard = cast("PushConfigs", peers), AddressGuard(AllowList())
        yield PushService(configs, guard, peers.post, options, workers, jitter=lambda: 1.0)


@in_virtual_time
async def test_failures_are_tried_again_with_growing_pauses() -> None:
    peers = Peers(answers=[RequestFailed("down")] * 4)
    peers.subscribe()
    async with sending(peers) as sender:
        await sender.send_notification("t", status(WORKING))
        await sender.send_notification("t", status(COMPLETED))
    assert peers.times == [0, 1, 3, 7, 15, 15]
    assert peers.words == ["WORKING"] * 5 + ["COMPLETED"]
    assert peers.settled_ends == [("t", "a")]


@in_virtual_time
async def test_a_notification_that_is_out_of_time_is_given_up_and_the_next_has_its_turn() -> None:
    peers = Peers(answers=[RequestFailed("down")] * 7)
    peers.subscribe()
    async with sending(peers) as sender:
        await sender.send_notification("t", status(WORKING))
        await sender.send_notification("t", status(COMPLETED))
    assert peers.times == [0, 1, 3, 7, 15, 31, 63, 63], "the next try would come after 123 s of 100"
    assert peers.words[-1] == "COMPLETED"


@in_virtual_time
async def test_a_rejected_final_status_is_given_up_too() -> None:
    peers = Peers(answers=[RequestFailed("down")] * 100)
    peers.subscribe()
    async with sending(peers, OPTIONS.model_copy(update={"retry_for_s": 0.0})) as sender:
        await sender.send_notification("t", status(COMPLETED))
    assert peers.times == [0]
    assert peers.settled_ends == [("t", "a")]


@in_virtual_time
async def test_a_rejected_notification_is_not_sent_again() -> None:
    peers = Peers(answers=[ResponseRejected("HTTP 400"), ResponseRejected("HTTP 302")])
    peers.subscribe()
    async with sending(peers) as sender:
        for event in (status(WORKING), chunk("chunk-1", last=True), status(COMPLETED)):
            await sender.send_notification("t", event)
    assert peers.times == [0, 0, 0]
    assert peers.words == ["WORKING", "chunk-1", "COMPLETED"]


@in_virtual_time
async def test_a_webhooks_retry_after_is_respected() -> None:
    peers = Peers(
        answers=[RequestFailed("HTTP 429", 20.0), RequestFailed("HTTP 503", 0.0), RequestFailed("HTTP 503", 1e9)]
    )
    peers.subscribe()
    async with sending(peers, OPTIONS.model_copy(update={"retry_for_s": 1000.0})) as sender:
        await sender.send_notification("t", status(COMPLETED))
    assert peers.times == [0, 20, 22, 22 + LONGEST_RETRY_AFTER_S]


@in_virtual_time
async def test_the_sender_returns_before_the_webhook_is_called() -> None:
    peers = Peers(held={HOOK: anyio.Event()})
    peers.subscribe()
    async with sending(peers) as sender:
        for event in (status(WORKING), chunk("chunk-1", last=True), status(COMPLETED)):
            await sender.send_notification("t", event)
        assert anyio.current_time() == peers.began
        assert not peers.got
        peers.held[HOOK].set()
    assert peers.words == ["WORKING", "chunk-1", "COMPLETED"]


@in_virtual_time
async def test_a_stalled_webhook_blocks_no_other() -> None:
    slow, quick = "https://slow.example.com/", "https://quick.example.com/"
    peers = Peers(held={slow: anyio.Event()})
    for number in range(40):
        peers.subscribe(f"slow-{number}", slow)
    peers.subscribe("t", slow, "a")
    peers.subscribe("t", quick, "b")
    async with sending(peers) as sender:
        for number in range(40):
            await sender.send_notification(f"slow-{number}", status(COMPLETED))
        await sender.send_notification("t", status(COMPLETED))
        await anyio.sleep(1)
        assert [url for _, url, _ in peers.got] == [quick]
        assert peers.at_once == OPTIONS.max_parallel // 4
        peers.held[slow].set()
    assert len(peers.got) == 42


@in_virtual_time
async def test_the_number_of_concurrent_requests_is_bounded() -> None:
    peers = Peers()
    for number in range(20):
        url = f"https://host-{number}.example.com/"
        peers.held[url] = anyio.Event()
        peers.subscribe(f"task-{number}", url)
    async with sending(peers, OPTIONS.model_copy(update={"max_parallel": 3})) as sender:
        for number in range(20):
            await sender.send_notification(f"task-{number}", status(COMPLETED))
        await anyio.sleep(1)
        for event in peers.held.values():
            event.set()
    assert peers.most_at_once == 3
    assert len(peers.got) == 20


@in_virtual_time
async def test_which_events_are_sent() -> None:
    peers = Peers()
    peers.subscribe()
    asking = TaskState.TASK_STATE_INPUT_REQUIRED
    events: list[Task | TaskStatusUpdateEvent | TaskArtifactUpdateEvent] = [
        Task(id="t", context_id="c", status=TaskStatus(state=STATES["submitted"])),
        status(WORKING),
        status(WORKING, "a remark"),
        chunk("chunk-1", last=False),
        chunk("chunk-2", last=False),
        chunk("chunk-3", last=True),
        status(asking, "first question"),
        status(asking, "second question"),
        status(WORKING),
        status(COMPLETED),
    ]
    async with sending(peers) as sender:
        for event in events:
            await sender.send_notification("t", event)
        await sender.send_notification("somebody-elses", status(COMPLETED, task_id="somebody-elses"))
    asked = ["INPUT_REQUIRED", "INPUT_REQUIRED"]
    assert peers.words == ["SUBMITTED", "WORKING", "chunk-3", *asked, "WORKING", "COMPLETED"]


@in_virtual_time
async def test_an_event_is_sent_as_it_was_when_it_occurred() -> None:
    peers = Peers(held={HOOK: anyio.Event()})
    peers.subscribe()
    task = Task(id="t", context_id="c", status=TaskStatus(state=STATES["submitted"]))
    async with sending(peers) as sender:
        await sender.send_notification("t", task)
        task.status.state = WORKING
        peers.held[HOOK].set()
    assert peers.words == ["SUBMITTED"]


@in_virtual_time
async def test_a_full_queue_drops_the_oldest_but_never_the_final_status() -> None:
    peers = Peers(held={HOOK: anyio.Event()})
    peers.subscribe()
    peers.subscribe("other")
    async with sending(peers, OPTIONS.model_copy(update={"max_waiting": 3})) as sender:
        await sender.send_notification("t", status(WORKING))
        await anyio.wait_all_tasks_blocked()
        for number in (1, 2, 3):
            await sender.send_notification("t", chunk(f"chunk-{number}", last=True))
        await sender.send_notification("other", status(WORKING))
        await sender.send_notification("other", status(COMPLETED))
        await sender.send_notification("t", status(COMPLETED))
        peers.held[HOOK].set()
    assert sorted(peers.words) == ["COMPLETED", "COMPLETED", "WORKING"]
    assert sorted(peers.settled_ends) == [("other", "a"), ("t", "a")]


@in_virtual_time
async def test_notifications_in_delivery_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    size = status(WORKING, "x" * 1000).ByteSize()
    monkeypatch.setattr("codex_workspace.server.push.MAX_WAITING_BYTES", 3 * size + 100)
    peers = Peers(held={HOOK: anyio.Event()})
    async with sending(peers) as sender:
        for number in range(5):
            peers.subscribe(f"task-{number}")
            await sender.send_notification(f"task-{number}", status(WORKING, "x" * 1000))
            await anyio.wait_all_tasks_blocked()
        assert (sender.waiting, peers.at_once) == (3, 3)
        peers.held[HOOK].set()
    assert (sender.waiting, len(peers.got)) == (0, 3)


@in_virtual_time
async def test_notifications_that_wait_for_a_retry_count_as_waiting() -> None:
    peers = Peers(answers=[RequestFailed("down")] * 2)
    peers.subscribe()
    peers.subscribe("other")
    async with sending(peers, OPTIONS.model_copy(update={"max_waiting": 1})) as sender:
        await sender.send_notification("t", status(WORKING))
        await anyio.sleep(0.5)
        await sender.send_notification("other", status(WORKING))
        assert sender.waiting == 1
    assert peers.words == ["WORKING"] * 3


@in_virtual_time
async def test_an_unsubscribed_webhook_gets_nothing_more() -> None:
    peers = Peers(answers=[RequestFailed("down")])
    peers.subscribe()
    async with sending(peers) as sender:
        await sender.send_notification("t", status(WORKING))
        await sender.send_notification("t", status(COMPLETED))
        await anyio.sleep(0.5)
        peers.configs.clear()
    assert peers.times == [0]
    assert not peers.settled_ends


@in_virtual_time
async def test_a_changed_configuration_counts_from_the_next_try_on() -> None:
    peers = Peers(answers=[RequestFailed("down")])
    peers.subscribe()
    async with sending(peers) as sender:
        await sender.send_notification("t", status(COMPLETED))
        await anyio.sleep(0.5)
        peers.subscribe(url="https://new.example.com/")
    assert [url for _, url, _ in peers.got] == [HOOK, "https://new.example.com/"]


def test_no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def run() -> None:
        peers = Peers(answers=[RequestFailed("down"), ResponseRejected("HTTP 400"), *[RequestFailed("down")] * 9])
        peers.subscribe()
        async with sending(peers) as sender:
            await sender.send_notification("t", status(WORKING))
            await sender.send_notification("t", status(COMPLETED))

    with caplog.at_level(logging.DEBUG):
        run()
    assert "task t: webhook https://hooks.example.com rejected a notification: HTTP 400" in caplog.text
    assert "task t: dropping a notification of webhook https://hooks.example.com after 7 tries: down" in caplog.text
    assert "secret" not in caplog.text


@given(
    st.lists(
        st.sampled_from(
            [ResponseAccepted(), RequestFailed("down"), RequestFailed("busy", 3.0), ResponseRejected("no")]
        ),
        max_size=30,
    )
)
def test_the_order_holds_whatever_a_webhook_answers(answers: list[RequestOutcome]) -> None:
    @in_virtual_time
    async def run() -> None:
        peers = Peers(answers=list(answers))
        peers.subscribe()
        async with sending(peers) as sender:
            for event in (status(WORKING), chunk("chunk-1", last=True), chunk("chunk-2", last=True), status(COMPLETED)):
                await sender.send_notification("t", event)
        expected = ["WORKING", "chunk-1", "chunk-2", "COMPLETED"]
        assert list(dict.fromkeys(peers.words)) == expected
        assert peers.words == sorted(peers.words, key=expected.index)
        assert peers.settled_ends == [("t", "a")]

    run()


# --- The SDK's handler, a database, and real sockets ---


class Worker(AgentExecutor):
    """Works on a task for a moment: state, two chunks of an artifact, end."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task_id, context_id = str(context.task_id), str(context.context_id)
        submitted = TaskStatus(state=STATES["submitted"])
        await event_queue.enqueue_event(Task(id=task_id, context_id=context_id, status=submitted))
        await event_queue.enqueue_event(status(WORKING, "", task_id, context_id))
        await event_queue.enqueue_event(chunk("Forty", last=False, task_id=task_id, context_id=context_id))
        await event_queue.enqueue_event(chunk("Forty-two.", last=True, task_id=task_id, context_id=context_id))
        await event_queue.enqueue_event(status(COMPLETED, "", task_id, context_id))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Agent:
    """The SDK's handler with our sender, over a database."""

    handler: DefaultRequestHandler
    push: PushService
    store: Store

    async def work(self, config: TaskPushNotificationConfig, caller: ServerCallContext = ME) -> Task:
        message = Message(message_id="m", role=Role.ROLE_USER, parts=[Part(text="Six by seven?")])
        configuration = SendMessageConfiguration(task_push_notification_config=config)
        answer = await self.handler.on_message_send(
            SendMessageRequest(message=message, configuration=configuration), caller
        )
        assert isinstance(answer, Task)
        assert answer.status.state == COMPLETED
        return answer


LOOPBACK = PushConfig(allow=("127.0.0.1",))


def url_in(folder: Path) -> str:
    return sqlite_url(folder / "store.sqlite3")


@asynccontextmanager
async def agent(folder: Path, options: PushConfig = LOOPBACK) -> AsyncIterator[Agent]:
    card = AgentCard(name="worker", capabilities=AgentCapabilities(push_notifications=True))
    async with opened(url_in(folder)) as store, open_push(options, store.push_configs) as push:
        handler = DefaultRequestHandler(
            Worker(),
            store.tasks,
            card,
            push_config_store=push.configs,
            push_sender=push,
            push_url_validator=push.validate_url,
        )
        try:
            yield Agent(handler, push, store)
        finally:
            await handler.aclose()


def states_of(server: WebhookServer) -> list[object]:
    """Return what each request told: a state, or "artifact"."""
    return [state_of(request.payload) for request in server.received]


def state_of(payload: Mapping[str, dict[str, object]]) -> object:
    ((kind, told),) = payload.items()
    if kind == "artifactUpdate":
        return "artifact"
    assert kind in ("task", "statusUpdate")
    found = told["status"]
    assert isinstance(found, dict)
    return str(found["state"]).removeprefix("TASK_STATE_")


ALL = ["SUBMITTED", "WORKING", "artifact", "COMPLETED"]


def due_on_disk(folder: Path) -> list[object]:
    due = "select id from push_configs where due_since is not null order by id"
    return [config_id for (config_id,) in on_disk(url_in(folder), due)]


async def test_a_webhook_receives_the_events_of_a_task(tmp_path: Path) -> None:
    async with webhook() as server, agent(tmp_path) as working:
        credentials = AuthenticationInfo(scheme="Bearer", credentials="theirs")
        config = TaskPushNotificationConfig(id="a", url=server.url, token="known", authentication=credentials)
        task = await working.work(config)
        await server.heard(4)
        assert states_of(server) == ALL
        for request in server.received:
            assert request.headers["x-a2a-notification-token"] == "known"
            assert request.headers["authorization"] == "Bearer theirs"
            assert request.headers["content-type"] == "application/json"
        ((_, update),) = server.received[2].payload.items()
        assert update == {
            "taskId": task.id,
            "contextId": task.context_id,
            "artifact": {"artifactId": "answer", "parts": [{"text": "Forty-two."}]},
            "lastChunk": True,
        }
    assert due_on_disk(tmp_path) == []


async def test_a_webhook_of_a_0_3_client_receives_0_3_tasks(tmp_path: Path) -> None:
    old = ServerCallContext(user=ME.user, state={HEADERS: {"host": "agent"}})
    config = TaskPushNotificationConfig(id="a", url="", token="known")
    async with webhook() as server:
        config.url = server.url
        async with agent(tmp_path) as working:
            task = await working.work(config, old)
            await server.heard(3)
        told = [old_types.Task.model_validate_json(request.body) for request in server.received]
        assert len(told) == 3
        assert {each.id for each in told} == {task.id}
        assert told[-1].status.state == old_types.TaskState.completed
        assert [artifact.artifact_id for artifact in told[-1].artifacts or []] == ["answer"]
        assert all(b'"kind":"task"' in request.body for request in server.received)


@pytest.mark.alone
async def test_a_slow_webhook_does_not_slow_the_task(tmp_path: Path) -> None:
    async with webhook(takes_s=2.0) as server, agent(tmp_path) as working:
        began = time.monotonic()
        await working.work(TaskPushNotificationConfig(id="a", url=server.url))
        assert time.monotonic() - began < 1.0
        assert len(server.received) <= 1
        await server.heard(2)
    assert states_of(server) == ALL[:2]
    assert due_on_disk(tmp_path) == ["a"]


async def test_a_webhook_that_fails_twice_receives_all_in_order(tmp_path: Path) -> None:
    async with webhook((503, {}), (500, {})) as server, agent(tmp_path) as working:
        await working.work(TaskPushNotificationConfig(id="a", url=server.url))
        await server.heard(6)
        assert states_of(server) == [ALL[0], ALL[0], *ALL]


async def test_an_unsent_final_status_is_sent_after_a_restart(tmp_path: Path) -> None:
    down = [(503, dict[str, str]())] * 4
    async with webhook(*down) as server:
        async with agent(tmp_path) as working:
            task = await working.work(TaskPushNotificationConfig(id="a", url=server.url))
            await server.heard(1)
        assert due_on_disk(tmp_path) == ["a"]
        server.answers.clear()
        server.received.clear()
        async with agent(tmp_path) as again:
            assert await again.push.resume() == 1
            (request,) = await server.heard(1)
        assert due_on_disk(tmp_path) == []
        update = request.payload["statusUpdate"]
        assert (update["taskId"], update["contextId"]) == (task.id, task.context_id)
        assert state_of(request.payload) == "COMPLETED"
        async with agent(tmp_path) as third:
            assert await third.push.resume() == 0


async def test_the_final_status_of_a_killed_processs_task_is_sent(tmp_path: Path) -> None:
    async with webhook() as server:
        async with agent(tmp_path) as working:
            await working.store.tasks.save(task_of(WORKING), ME)
            await working.push.configs.set_info("task-1", TaskPushNotificationConfig(url=server.url, token="known"), ME)
        async with agent(tmp_path) as again:
            assert await again.push.resume() == 0
            await again.store.tasks.fail_unfinished("It was cut off.")
            assert await again.push.resume() == 1
            (request,) = await server.heard(1)
    assert state_of(request.payload) == "FAILED"
    assert "It was cut off." in request.body.decode()
    assert request.headers["x-a2a-notification-token"] == "known"


async def test_a_webhook_set_after_the_end_receives_it_once(tmp_path: Path) -> None:
    """A task may end before its client comes to name the webhook."""
    async with webhook() as server:
        async with agent(tmp_path) as working:
            await working.store.tasks.save(task_of(COMPLETED), ME)
            late = TaskPushNotificationConfig(task_id="task-1", url=server.url, token="known")
            await working.handler.on_create_task_push_notification_config(late, ME)
            (request,) = await server.heard(1)
        assert state_of(request.payload) == "COMPLETED"
        assert request.headers["x-a2a-notification-token"] == "known"
        assert due_on_disk(tmp_path) == []
        async with agent(tmp_path) as again:
            assert await again.push.configs.get_info("task-1", ME)
            assert await again.push.resume() == 0
    assert len(server.received) == 1


async def test_an_unreachable_webhook_set_after_the_end_receives_it_after_a_restart(tmp_path: Path) -> None:
    async with webhook(*[(503, dict[str, str]())] * 4) as server:
        async with agent(tmp_path) as working:
            await working.store.tasks.save(task_of(COMPLETED), ME)
            await working.push.configs.set_info("task-1", TaskPushNotificationConfig(url=server.url), ME)
            await server.heard(1)
        assert due_on_disk(tmp_path) == ["task-1"]
        server.answers.clear()
        server.received.clear()
        async with agent(tmp_path) as again:
            assert await again.push.resume() == 1
            await server.heard(1)
    assert states_of(server) == ["COMPLETED"]


async def test_a_private_webhook_is_refused_when_it_is_named(tmp_path: Path) -> None:
    async with webhook() as server, agent(tmp_path, PushConfig()) as working:
        with pytest.raises(InvalidParamsError) as refused:
            await working.work(TaskPushNotificationConfig(id="a", url=server.url))
        assert "its host is not public" in refused.value.message
    assert not server.received


async def test_a_redirect_to_a_private_address_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with webhook() as inside:
        away = (307, {"Location": inside.url})
        async with webhook(away, away, away, away) as server, agent(tmp_path) as working:
            await working.work(TaskPushNotificationConfig(id="a", url=server.url))
            await server.heard(4)
    assert not inside.received
    assert "HTTP 307: redirects are not followed" in caplog.text


async def test_a_name_that_leads_inside_is_refused_when_connecting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        del host, port
        return ["127.0.0.1"]

    async with (
        webhook() as server,
        opened(url_in(tmp_path)) as store,
        open_push(PushConfig(), store.push_configs, resolve) as push,
    ):
        url = f"http://hooks.example.com:{server.port}/"
        await push.configs.set_info("t", TaskPushNotificationConfig(url=url), ME)
        await push.send_notification("t", status(COMPLETED))
    assert not server.received
    assert "rejected a notification: its host is not public" in caplog.text


def test_the_documented_configuration_is_valid() -> None:
    shown = re.findall(r"```yaml\n(.*?)```", (TEMPLATE_DIR / "docs" / "push.md").read_text(), re.DOTALL)
    (section,) = [read_section(PushConfig, yaml.safe_load(each)["push"], ConfigLocation("push.md")) for each in shown]
    assert AllowList.parse(section.allow).allows("hooks.internal", ip_address("127.0.0.1"))
    assert AllowList.parse(section.allow).allows("other.internal", ip_address("10.20.0.1"))
