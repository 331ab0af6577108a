"""The application around any executor, over a real socket, with the SDK's own client."""

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path

import anyio
import httpx
import pytest
from a2a.client import Client, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientError
from a2a.compat.v0_3.types import AgentCard as OldCard
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.types import (
    AgentCard,
    AgentExtension,
    Artifact,
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import InvalidParamsError, TaskNotFoundError, UnsupportedOperationError
from google.protobuf.json_format import ParseDict

from codex_workspace.common.a2a_terms import OFFSET
from codex_workspace.common.files import WatchedPaths
from codex_workspace.config.prompts import Skill
from codex_workspace.server.app import ServerOptions, build_app, serving
from codex_workspace.server.card import agent_card
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.server.sockets import bind
from codex_workspace.storage.database import Database
from codex_workspace.storage.deliveries import Deliveries, DeliveryKey, message_digest
from codex_workspace.storage.sqlite import SqliteEngine
from codex_workspace.storage.store import Store, open_store
from codex_workspace.storage.tasks import TaskStore, _Row

OPTIONS = ServerOptions("echo", "Says it again.", "1.2.3", "http://127.0.0.1/", max_body_bytes=100_000)
USAGE = AgentExtension(uri="urn:test:usage")


class Echo(AgentExecutor):
    """Says again what it hears; "wait" is said when `go` is set."""

    def __init__(self) -> None:
        self.go = anyio.Event()
        self.owners: list[str] = []

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.owners.append(context.call_context.user.user_name)
        submitted = status_of(context, TaskState.TASK_STATE_SUBMITTED).status
        await event_queue.enqueue_event(Task(id=context.task_id, context_id=context.context_id, status=submitted))
        await event_queue.enqueue_event(status_of(context, TaskState.TASK_STATE_WORKING))
        text = context.get_user_input()
        if text == "wait":
            await self.go.wait()
        artifact = Artifact(artifact_id="answer", parts=[Part(text=text)])
        update = TaskArtifactUpdateEvent(
            task_id=context.task_id, context_id=context.context_id, artifact=artifact, last_chunk=True
        )
        await event_queue.enqueue_event(update)
        await event_queue.enqueue_event(status_of(context, TaskState.TASK_STATE_COMPLETED))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        await event_queue.enqueue_event(status_of(context, TaskState.TASK_STATE_CANCELED))


def status_of(context: RequestContext, state: TaskState) -> TaskStatusUpdateEvent:
    status = TaskStatus(state=state)
    status.timestamp.GetCurrentTime()
    return TaskStatusUpdateEvent(task_id=context.task_id, context_id=context.context_id, status=status)


@dataclass(slots=True)
class Served:
    """A running server, and ways to talk to it."""

    url: str
    http: httpx.AsyncClient
    executor: Echo
    store: Store
    not_ready: str | None = None
    clients: list[Client] = field(default_factory=list)

    async def client(self, *, streaming: bool = False) -> Client:
        card = agent_card(replace(OPTIONS, url=self.url))
        client = ClientFactory(ClientConfig(streaming=streaming, httpx_client=self.http)).create(card)
        self.clients.append(client)
        return client

    async def send(
        self, text: str, *, streaming: bool = False, wait: bool = True, task_id: str = "", context_id: str = ""
    ) -> Task:
        """Send a message and return the task as it is in the end."""
        message = Message(
            role=Role.ROLE_USER,
            message_id=str(uuid.uuid4()),
            parts=[Part(text=text)],
            task_id=task_id,
            context_id=context_id,
        )
        configuration = SendMessageConfiguration(return_immediately=not wait)
        client = await self.client(streaming=streaming)
        async for event in client.send_message(SendMessageRequest(message=message, configuration=configuration)):
            task_id = event.task.id or event.status_update.task_id or task_id
        return await self.get(task_id)

    async def get(self, task_id: str) -> Task:
        return await (await self.client()).get_task(GetTaskRequest(id=task_id))

    async def until(self, task_id: str, state: TaskState) -> Task:
        while (task := await self.get(task_id)).status.state != state:
            await anyio.sleep(0.005)
        return task


@asynccontextmanager
async def served(folder: Path, options: ServerOptions = OPTIONS, **headers: str) -> AsyncIterator[Served]:
    executor, now = Echo(), None

    async def ready() -> str | None:
        return now.not_ready if now is not None else None

    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        async with (
            open_store(f"sqlite:///{folder / 'store.sqlite3'}") as store,
            build_app(replace(options, url=url), executor, store, ready) as app,
            serving(app.asgi, listener),
            httpx.AsyncClient(base_url=url, headers=headers, timeout=4) as http,
        ):
            now = Served(url, http, executor, store)
            yield now


def answer_of(task: Task) -> str:
    return "".join(part.text for artifact in task.artifacts for part in artifact.parts)


# --- Messages and tasks ---


@pytest.mark.parametrize("streaming", [False, True])
async def test_any_executor_is_served(tmp_path: Path, streaming: bool) -> None:
    async with served(tmp_path) as now:
        task = await now.send("hello", streaming=streaming)
        assert (task.status.state, answer_of(task)) == (TaskState.TASK_STATE_COMPLETED, "hello")


async def test_a_client_may_disconnect_at_once_and_ask_later(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        task = await now.send("wait", wait=False)
        assert task.status.state in (TaskState.TASK_STATE_SUBMITTED, TaskState.TASK_STATE_WORKING)
        now.executor.go.set()
        assert answer_of(await now.until(task.id, TaskState.TASK_STATE_COMPLETED)) == "wait"


async def test_a_task_can_be_canceled(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        task = await now.send("wait", wait=False)
        canceled = await (await now.client()).cancel_task(CancelTaskRequest(id=task.id))
        assert canceled.status.state == TaskState.TASK_STATE_CANCELED


async def test_messages_without_a_context_meet_in_the_main_one(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        one, two = await now.send("one"), await now.send("two", streaming=True)
        assert one.context_id == two.context_id == await now.store.main_context("operator")
        own = str(uuid.uuid4())
        assert (await now.send("three", context_id=own)).context_id == own


async def test_messages_without_context_may_get_one_each(tmp_path: Path) -> None:
    async with served(tmp_path, replace(OPTIONS, one_main_context=False)) as now:
        one, two = await now.send("one"), await now.send("two")
        assert one.context_id != two.context_id


async def test_a_message_for_a_working_task_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        task = await now.send("wait", wait=False)
        await now.until(task.id, TaskState.TASK_STATE_WORKING)
        with pytest.raises(UnsupportedOperationError, match=f"is running.*contextId {task.context_id}"):
            await now.send("more", task_id=task.id)
        now.executor.go.set()
        assert answer_of(await now.until(task.id, TaskState.TASK_STATE_COMPLETED)) == "wait"


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_message_for_a_finished_task_is_rejected_and_not_stored(tmp_path: Path, streaming: bool) -> None:
    async with served(tmp_path) as now:
        task = await now.send("hello")
        with pytest.raises(UnsupportedOperationError, match=f"has ended.*contextId {task.context_id}"):
            await now.send("more", task_id=task.id, streaming=streaming)
        with pytest.raises(TaskNotFoundError):
            await now.send("more", task_id="no-such-task", streaming=streaming)
        assert await now.store.deliveries.unfinished() == []


async def test_a_message_rejected_after_storing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task of a follow-up ends in the moment between the look at it and the handing over."""
    async with served(tmp_path) as now:
        task = await now.send("hello")
        real, looks = now.store.tasks.get, 0

        async def a_moment_ago(task_id: str, context: ServerCallContext) -> Task | None:
            nonlocal looks
            looks += 1
            found = await real(task_id, context)
            if found is not None and looks <= 2:
                found.status.state = TaskState.TASK_STATE_INPUT_REQUIRED
            return found

        monkeypatch.setattr(now.store.tasks, "get", a_moment_ago)
        with pytest.raises(UnsupportedOperationError):
            await now.send("more", task_id=task.id)
        assert looks > 2
        assert await now.store.deliveries.unfinished() == []


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_context_id_that_is_too_long_is_refused(tmp_path: Path, streaming: bool) -> None:
    async with served(tmp_path) as now:
        with pytest.raises(InvalidParamsError, match="at most 36 characters"):
            await now.send("hello", streaming=streaming, context_id="x" * 37)
        assert (await now.send("hello", context_id="x" * 36)).context_id == "x" * 36


async def test_the_older_dialect_is_spoken_too(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        message = {"kind": "message", "role": "user", "messageId": "m-1", "parts": [{"kind": "text", "text": "hello"}]}
        body = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": {"message": message}}
        result = (await now.http.post("/", json=body)).json()["result"]
        assert (result["kind"], result["status"]["state"]) == ("task", "completed")
        assert result["artifacts"][0]["parts"] == [{"kind": "text", "text": "hello"}]


# --- What stands around it ---


async def test_the_card_has_addresses_and_capabilities(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        card = (await now.http.get("/.well-known/agent-card.json")).json()
        assert (card["name"], card["version"], card["capabilities"]["streaming"]) == ("echo", "1.2.3", True)
        assert {(each["url"], each["protocolVersion"]) for each in card["supportedInterfaces"]} == {
            (now.url, "1.0"),
            (now.url, "0.3"),
            (now.url.rstrip("/"), "1.0"),
            (now.url.rstrip("/"), "0.3"),
        }
        assert card["url"] == now.url, "what old clients look for"
        assert "securitySchemes" not in card


async def test_the_card_lists_the_operator_s_skills(tmp_path: Path) -> None:
    mine = (
        Skill(Path("/c/skills/notes"), "release notes", "Writes them"),
        Skill(Path("/c/skills/review"), "r", "Mine"),
    )
    card = agent_card(replace(OPTIONS, skills=mine))
    assert [(each.id, each.name) for each in card.skills] == [
        ("code", "Work on the code"),
        ("explain", "Explain the code"),
        ("notes", "release notes"),
        ("review", "r"),
    ]
    assert list(card.skills[2].examples) == ["Use $release notes."]


CARD = "/.well-known/agent-card.json"
OLD_FIELDS = {"url", "preferredTransport", "protocolVersion", "additionalInterfaces"}
"""The fields that only 0.3 has, and strict clients of 1.0 reject."""


@pytest.mark.parametrize("version", ["1.0", "1.0.1"])
async def test_a_client_of_1_0_gets_a_card_of_1_0_alone(tmp_path: Path, version: str) -> None:
    async with served(tmp_path, replace(OPTIONS, tokens={"operator": "t0ken"}, extensions=(USAGE,))) as now:
        by_header = await now.http.get(CARD, headers={"A2A-Version": version})
        assert by_header.json() == (await now.http.get("/1.0" + CARD)).json()
        assert by_header.json() == (await now.http.get(f"{CARD}?A2A-Version={version}")).json()
        card = ParseDict(by_header.json(), AgentCard())
        assert {each.protocol_version for each in card.supported_interfaces} == {"1.0"}
        assert not OLD_FIELDS & by_header.json().keys()
        assert set(card.security_schemes) == {"bearer", "apiKey"}


async def test_a_client_of_0_3_gets_a_card_of_0_3_alone(tmp_path: Path) -> None:
    async with served(tmp_path, replace(OPTIONS, tokens={"operator": "t0ken"}, extensions=(USAGE,))) as now:
        by_header = await now.http.get(CARD, headers={"A2A-Version": "0.3"})
        assert by_header.json() == (await now.http.get("/0.3" + CARD)).json()
        card = OldCard.model_validate(by_header.json())
        assert (card.url, card.preferred_transport, card.protocol_version) == (now.url, "JSONRPC", "0.3")
        assert [each.url for each in card.additional_interfaces or ()] == [now.url.rstrip("/")]
        assert not {"supportedInterfaces", "securityRequirements"} & by_header.json().keys()
        assert set(card.security_schemes or ()) == {"bearer", "apiKey"}
        assert card.model_dump(exclude_none=True, mode="json") == by_header.json(), "the card has no other fields"


async def test_a_client_of_an_unknown_version_gets_the_card_of_all(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        card = await now.http.get(CARD)
        assert {each["protocolVersion"] for each in card.json()["supportedInterfaces"]} == {"1.0", "0.3"}
        assert card.json().keys() > OLD_FIELDS
        for version in ("", "2.0", "1", "nonsense"):
            assert (await now.http.get(CARD, headers={"A2A-Version": version})).json() == card.json()
    async with served(tmp_path, replace(OPTIONS, versions=("1.0",))) as now:
        cards = [(await now.http.get(CARD, headers={"A2A-Version": version})).json() for version in ("", "0.3", "1.0")]
        assert cards[0] == cards[1] == cards[2]
        assert (await now.http.get("/0.3" + CARD)).status_code == 404


async def test_the_card_may_be_cached(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        etags = set()
        for path, version in ((CARD, ""), (CARD, "1.0"), (CARD, "0.3"), ("/1.0" + CARD, ""), ("/0.3" + CARD, "1.0")):
            of_version = {"A2A-Version": version}
            card = await now.http.get(path, headers=of_version)
            assert card.headers["cache-control"] == "public, max-age=60"
            assert card.headers["vary"] == "A2A-Version"
            since = card.headers["last-modified"]
            assert parsedate_to_datetime(since) <= datetime.now(UTC)
            etag = card.headers["etag"]
            etags.add(etag)
            for condition in (
                {"If-None-Match": etag},
                {"If-None-Match": f'"x", W/{etag}'},
                {"If-Modified-Since": since},
                {"If-Modified-Since": formatdate(usegmt=True)},
            ):
                again = await now.http.get(path, headers=of_version | condition)
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
                assert again.headers["vary"] == "A2A-Version"
            for condition in (
                {"If-None-Match": '"x"'},
                {"If-None-Match": '"x"', "If-Modified-Since": since},
                {"If-Modified-Since": "Thu, 01 Jan 1970 00:00:00 GMT"},
                {"If-Modified-Since": "yesterday"},
            ):
                assert (await now.http.get(path, headers=of_version | condition)).status_code == 200
            assert (await now.http.head(path, headers=of_version)).headers["etag"] == etag
        assert len(etags) == 3


async def test_a_token_is_needed_for_all_but_card_and_probes(tmp_path: Path) -> None:
    async with served(tmp_path, replace(OPTIONS, tokens={"operator": "t0ken"})) as now:
        for path in ("/", "/message:send", "/v1/message:send", "/tenant/message:send", "/nowhere"):
            assert (await now.http.post(path, json={})).status_code == 401
        for path in (CARD, "/1.0" + CARD, "/0.3" + CARD, "/healthz", "/readyz"):
            assert (await now.http.get(path)).status_code == 200
        card = (await now.http.get("/.well-known/agent-card.json")).json()
        assert "bearer" in card["securitySchemes"]
        assert now.executor.owners == []
    async with served(tmp_path, replace(OPTIONS, tokens={"operator": "t0ken"}), Authorization="Bearer t0ken") as now:
        assert answer_of(await now.send("hello")) == "hello"
        assert now.executor.owners == ["operator"]


async def test_readyz_gives_the_reason(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        assert (await now.http.get("/healthz")).json() == {"status": "ok"}
        assert (await now.http.get("/readyz")).json() == {"status": "ready"}
        now.not_ready = "codex did not start"
        not_ready = await now.http.get("/readyz")
        assert (not_ready.status_code, not_ready.json()) == (
            503,
            {"status": "not ready", "reason": "codex did not start"},
        )
        assert (await now.http.get("/healthz")).status_code == 200


async def test_a_body_over_the_limit_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"x": "x" * 100_000}}).encode()

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 10_000):
                yield body[start : start + 10_000]

        headers = {"A2A-Version": "1.0", "Content-Type": "application/json"}
        for content in (body, chunks()):
            refused = await now.http.post("/", content=content, headers=headers)
            assert (refused.status_code, refused.json()["error"]["status"]) == (413, "INVALID_ARGUMENT")
            assert "exceeds the limit of 100000 bytes" in refused.text
        assert answer_of(await now.send("still here")) == "still here"


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"\xff", b'{"jsonrpc":"2.0","id":1,"method":"Nonsense"}'])
async def test_nonsense_is_answered_by_an_error(tmp_path: Path, body: bytes) -> None:
    async with served(tmp_path) as now:
        headers = {"A2A-Version": "1.0", "Content-Type": "application/json"}
        answer = await now.http.post("/", content=body, headers=headers)
        assert "error" in answer.json()
        assert answer_of(await now.send("still here")) == "still here"


@pytest.mark.parametrize("path", ["/", "/message:send", "/v1/message:send"])
async def test_a_client_that_disconnects_within_its_body_logs_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async with served(tmp_path) as now:
        host, port = now.http.base_url.host, now.http.base_url.port or 0
        async with await anyio.connect_tcp(host, port) as stream:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"
            )
            await stream.send(f"{head}A2A-Version: 1.0\r\n\r\n{{".encode())
        assert (await now.http.get("/healthz")).status_code == 200
        await anyio.wait_all_tasks_blocked()
    assert [record for record in caplog.records if record.exc_info] == []


# --- The end ---


async def test_the_server_stops_although_a_stream_is_open(tmp_path: Path) -> None:
    # The client outlives the server: one that hangs up first leaves no stream to be closed.
    async with httpx.AsyncClient(timeout=None) as http, anyio.create_task_group() as tasks:
        async with served(tmp_path) as now:
            client, is_open = await replace(now, http=http).client(streaming=True), anyio.Event()
            message = Message(role=Role.ROLE_USER, message_id=str(uuid.uuid4()), parts=[Part(text="wait")])

            async def listen() -> None:
                async for _ in client.send_message(SendMessageRequest(message=message)):
                    is_open.set()

            async def listen_to_the_end() -> None:
                with pytest.raises(A2AClientError, match="peer closed connection"):
                    await listen()

            tasks.start_soon(listen_to_the_end)
            await is_open.wait()
            began = anyio.current_time()
        assert anyio.current_time() - began < 4


async def test_a_client_that_disconnects_during_acceptance_loses_nothing(tmp_path: Path) -> None:
    """A 0.3 stream that is left cancels its request, wherever it is; here at one time after the other."""
    async with open_store(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        handler = IdempotentHandler(Echo(), store, None, agent_card(OPTIONS), one_main_context=True)
        context = ServerCallContext()

        async def send(message: Message) -> None:
            async for _ in handler.on_message_send_stream(SendMessageRequest(message=message), context):
                pass

        for number in range(60):
            message = Message(role=Role.ROLE_USER, message_id=str(number), parts=[Part(text="hello")])
            with anyio.move_on_after(number * 0.0002):
                await send(message)
            again = await handler.on_message_send(SendMessageRequest(message=message), context)
            assert isinstance(again, Task)
            assert again.status.state == TaskState.TASK_STATE_COMPLETED
        await handler.aclose()


async def test_a_message_that_was_stored_without_confirmation_is_answered_when_it_comes_again(tmp_path: Path) -> None:
    async with served(tmp_path) as now:
        message = Message(role=Role.ROLE_USER, message_id="again", parts=[Part(text="hello")])
        request = SendMessageRequest(message=message)
        key = DeliveryKey("operator", "again")
        # `open_store` would mark the file as its own.
        other = Database(SqliteEngine(tmp_path / "store.sqlite3"), WatchedPaths({}))
        await Deliveries(other).accept(key, request, message_digest(request), "task-1", "context-1")
        await other.close()
        client = await now.client()
        async for event in client.send_message(request):
            assert event.task.id == "task-1"
            assert answer_of(event.task) == "hello"
        assert len(now.executor.owners) == 1


class Writer(AgentExecutor):
    """Says "abc", hands over a file, and says "def"."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        working = status_of(context, TaskState.TASK_STATE_WORKING).status
        await event_queue.enqueue_event(Task(id=context.task_id, context_id=context.context_id, status=working))
        for name, text, append in (("answer", "abc", False), ("file-1", "a file", False), ("answer", "def", True)):
            artifact = Artifact(artifact_id=name, parts=[Part(text=text)])
            update = TaskArtifactUpdateEvent(
                task_id=context.task_id, context_id=context.context_id, artifact=artifact, append=append
            )
            if append:
                update.metadata[OFFSET] = 3
            await event_queue.enqueue_event(update)
        await event_queue.enqueue_event(status_of(context, TaskState.TASK_STATE_COMPLETED))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError


async def test_a_subscriber_receives_text_once_while_a_file_is_being_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storing, go, write = anyio.Event(), anyio.Event(), TaskStore._write

    async def slow(self: TaskStore, row: _Row) -> None:
        storing.set()
        await go.wait()
        await write(self, row)

    async with open_store(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        handler = IdempotentHandler(Writer(), store, None, agent_card(OPTIONS), one_main_context=True)
        context, received = ServerCallContext(), list[str]()
        monkeypatch.setattr(TaskStore, "_write", slow)
        message = Message(role=Role.ROLE_USER, message_id="1", parts=[Part(text="hello")])
        configuration = SendMessageConfiguration(return_immediately=True)
        sent = await handler.on_message_send(SendMessageRequest(message=message, configuration=configuration), context)
        assert isinstance(sent, Task)
        await storing.wait()

        async def subscribe() -> None:
            async for event in handler.on_subscribe_to_task(SubscribeToTaskRequest(id=sent.id), context):
                match event:
                    case Task():
                        artifacts = list(event.artifacts)
                    case TaskArtifactUpdateEvent():
                        artifacts = [event.artifact]
                    case _:
                        artifacts = []
                received.extend(part.text for each in artifacts if each.artifact_id == "answer" for part in each.parts)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(subscribe)
            await anyio.wait_all_tasks_blocked()
            go.set()
        assert "".join(received) == "abcdef"
