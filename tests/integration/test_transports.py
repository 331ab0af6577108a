"""All transports over real sockets, with the SDK's own client: their common behavior and their differences.

Covers `server.errors`, `server.grpc_server` and `server.sdk_fixes`.
"""

import json
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import anyio
import grpc.aio
import httpx
import pytest
from a2a.client import Client, ClientCallContext, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientError
from a2a.compat.v0_3 import a2a_v0_3_pb2, a2a_v0_3_pb2_grpc
from a2a.server.agent_execution import AgentExecutor
from a2a.server.routes.jsonrpc_dispatcher import JsonRpcDispatcher
from a2a.types import (
    AgentExtension,
    CancelTaskRequest,
    GetExtendedAgentCardRequest,
    GetTaskRequest,
    ListTasksRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    TaskState,
    a2a_pb2,
    a2a_pb2_grpc,
)
from a2a.utils.errors import (
    A2AError,
    ContentTypeNotSupportedError,
    InvalidParamsError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from google.protobuf.json_format import ParseDict
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.server.app import Application, ServerOptions, build_app, serving
from codex_workspace.server.card import agent_card
from codex_workspace.server.grpc_server import MAX_FIELDS
from codex_workspace.server.limits import MAX_NESTING, MAX_VALUES, StreamLimits
from codex_workspace.server.sockets import bind, bind_grpc
from codex_workspace.server.views import View
from codex_workspace.storage.store import open_store
from tests.support.waiting import HANG_S, eventually
from tests.unit.server.test_app import Echo

TRANSPORTS = ("JSONRPC", "HTTP+JSON", "GRPC")
OPTIONS = ServerOptions("echo", "Says it again.", "1.2.3", "", max_body_bytes=100_000)
USAGE = AgentExtension(uri="urn:test:usage")
VERSION_HEADER = {"A2A-Version": "1.0"}
HUGE: Final = "1" * 5000
"""More digits than Python converts to an integer."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server with all transports, and its clients."""

    options: ServerOptions
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    executor: Echo
    app: Application

    @property
    def grpc(self) -> a2a_pb2_grpc.A2AServiceStub:
        return a2a_pb2_grpc.A2AServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def client(self, transport: str, *, streaming: bool = False) -> Client:
        config = ClientConfig(
            streaming=streaming,
            httpx_client=self.http,
            grpc_channel_factory=lambda _url: self.channel,
            supported_protocol_bindings=[transport],
        )
        return ClientFactory(config).create(agent_card(self.options))


@asynccontextmanager
async def running_server(
    folder: Path,
    options: ServerOptions = OPTIONS,
    other: AgentExecutor | None = None,
    dead_after_s: float = 15,
    *,
    views: Sequence[View] = (),
    url: str | None = None,
) -> AsyncIterator[RunningServer]:
    """Serve an echo executor, or another one; `url` is the public URL, by default the address that it listens on."""

    async def ready() -> str | None:
        return None

    with bind("127.0.0.1", 0) as listener:
        async with bind_grpc("127.0.0.1", 0, options.max_body_bytes, dead_after_s) as grpc_listener:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            options = replace(options, url=url or address, grpc_url=f"127.0.0.1:{grpc_listener.port}")
            executor = Echo()
            async with (
                open_store(f"sqlite:///{folder / 'store.sqlite3'}") as store,
                build_app(options, other or executor, store, ready, views=lambda _front: views) as app,
                app.grpc(grpc_listener),
                serving(app.asgi, listener),
                httpx.AsyncClient(base_url=address, timeout=4) as http,
                grpc.aio.insecure_channel(str(options.grpc_url)) as channel,
            ):
                yield RunningServer(options, http, channel, executor, app)


def request(
    message_id: str, text: str = "hello", *, wait: bool = True, context_id: str = "", task_id: str = ""
) -> SendMessageRequest:
    message = Message(
        role=Role.ROLE_USER, message_id=message_id, parts=[Part(text=text)], context_id=context_id, task_id=task_id
    )
    return SendMessageRequest(message=message, configuration=SendMessageConfiguration(return_immediately=not wait))


def bearer(token: str) -> ClientCallContext:
    return ClientCallContext(service_parameters={"Authorization": f"Bearer {token}"})


async def send(client: Client, message_request: SendMessageRequest, context: ClientCallContext | None = None) -> Task:
    """Send a message and return the task of the first event."""
    task: Task | None = None
    async for event in client.send_message(message_request, context=context):
        task = task or event.task
    assert task is not None
    return task


def states(events: Sequence[StreamResponse]) -> list[str]:
    found = [event.status_update.status.state or event.task.status.state for event in events]
    return [TaskState.Name(state).removeprefix("TASK_STATE_") for state in found if state]


# --- All transports ---


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_messages_are_answered_streamed_fetched_listed_and_canceled(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path) as server:
        client = server.client(transport)
        task = await send(client, request("m-1", context_id="one"))
        assert task.status.state == TaskState.TASK_STATE_COMPLETED
        assert (await client.get_task(GetTaskRequest(id=task.id))).artifacts[0].parts[0].text == "hello"

        streamed = [event async for event in server.client(transport, streaming=True).send_message(request("m-2"))]
        assert states(streamed) == ["SUBMITTED", "WORKING", "COMPLETED"]

        waiting = await send(client, request("m-3", "wait", wait=False, context_id="two"))
        canceled = await client.cancel_task(CancelTaskRequest(id=waiting.id))
        assert canceled.status.state == TaskState.TASK_STATE_CANCELED
        with pytest.raises(TaskNotCancelableError):
            await client.cancel_task(CancelTaskRequest(id=waiting.id))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tasks_are_listed_in_pages_and_by_filter(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path) as server:
        client = server.client(transport)
        task_ids = [
            (await send(client, request(f"m-{number}", context_id=f"c-{number % 2}"))).id for number in range(5)
        ]
        seen: list[str] = []
        token = ""
        while True:
            page = await client.list_tasks(ListTasksRequest(page_size=2, page_token=token))
            assert (page.total_size, len(page.tasks) <= 2) == (5, True)
            assert not any(task.artifacts for task in page.tasks)
            seen += [task.id for task in page.tasks]
            token = page.next_page_token
            if not token:
                break
        assert seen == task_ids[::-1], "tasks must be sorted by age, the newest first"
        filtered = await client.list_tasks(ListTasksRequest(context_id="c-1", include_artifacts=True))
        assert [task.id for task in filtered.tasks] == [task_ids[3], task_ids[1]]
        assert all(task.artifacts for task in filtered.tasks)
        failed = await client.list_tasks(ListTasksRequest(status=TaskState.TASK_STATE_FAILED))
        assert list(failed.tasks) == []
        with pytest.raises(InvalidParamsError):
            await client.list_tasks(ListTasksRequest(page_size=101))
        with pytest.raises(InvalidParamsError):
            await client.list_tasks(ListTasksRequest(page_token="no page"))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_subscriber_gets_the_task_and_its_end(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path) as server:
        client = server.client(transport, streaming=True)
        task = await send(server.client(transport), request("m-1", "wait", wait=False))
        events: list[StreamResponse] = []
        async for event in client.subscribe(SubscribeToTaskRequest(id=task.id)):
            events.append(event)
            server.executor.go.set()
        assert events[0].task.id == task.id
        assert states(events)[-1] == "COMPLETED"
        with pytest.raises(UnsupportedOperationError):
            [event async for event in client.subscribe(SubscribeToTaskRequest(id=task.id))]
        with pytest.raises(TaskNotFoundError):
            [event async for event in client.subscribe(SubscribeToTaskRequest(id="no-such-task"))]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_media_type_missing_from_the_card_is_rejected(tmp_path: Path, transport: str, streaming: bool) -> None:
    message_request = request("m-1")
    message_request.message.parts.append(Part(raw=b"x", media_type="application/x-nothing"))
    async with running_server(tmp_path) as server:
        with pytest.raises(ContentTypeNotSupportedError, match="application/x-nothing is not supported"):
            await send(server.client(transport, streaming=streaming), message_request)
        assert server.executor.owners == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_media_type_matches_regardless_of_parameters_and_case(
    tmp_path: Path, transport: str, streaming: bool
) -> None:
    async with running_server(
        tmp_path, replace(OPTIONS, input_modes=("text/plain", "application/json", "image/jpeg"))
    ) as server:
        for media_type in (
            "TEXT/PLAIN",
            "application/json; charset=utf-8",
            "image/jpg",
            "text/x-csrc",
            "text/x-log;a=b",
        ):
            message_request = request(media_type)
            message_request.message.parts.append(Part(raw=b"x", media_type=media_type))
            assert await send(server.client(transport, streaming=streaming), message_request)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_text_types_are_rejected_if_text_is_not_accepted(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path, replace(OPTIONS, input_modes=("application/json",))) as server:
        message_request = request("m-1")
        message_request.message.parts.append(Part(raw=b"x", media_type="text/x-csrc"))
        with pytest.raises(ContentTypeNotSupportedError, match="text/x-csrc is not supported"):
            await send(server.client(transport), message_request)


NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


def request_with(place: str, value: JsonValue) -> SendMessageRequest:
    """Return a message with a value at some position of its JSON."""
    message_request = request(str(uuid.uuid4()))
    match place:
        case "data":
            ParseDict({"a": [value]}, message_request.message.parts.add().data)
        case "a part's metadata":
            ParseDict({"a": value}, message_request.message.parts[0].metadata)
        case "metadata":
            ParseDict({"a": {"b": value}}, message_request.message.metadata)
        case _:
            ParseDict({"a": value}, message_request.metadata)
    return message_request


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("place", ["data", "a part's metadata", "metadata", "the request's metadata"])
async def test_a_non_json_number_is_rejected_before_it_is_stored(tmp_path: Path, place: str, streaming: bool) -> None:
    """Once stored, it could not be returned, and would be resumed at every start."""
    async with running_server(tmp_path) as server:
        for number in NOT_FINITE:
            message_request = request_with(place, number)
            with pytest.raises(InvalidParamsError, match="a number that JSON does not have"):
                await send(server.client("GRPC", streaming=streaming), message_request)
            message_request.message.parts[0].text = "another message under the id"
            for value in (
                message_request.message.parts[-1].data,
                message_request.message.metadata,
                message_request.metadata,
            ):
                value.Clear()
            message_request.message.parts[0].metadata.Clear()
            del message_request.message.parts[1:]
            assert (await send(server.client("GRPC"), message_request)).id, "the rejected message must not be stored"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_number_that_only_python_parses_is_rejected_over_http(tmp_path: Path, number: str) -> None:
    new: JsonObject = {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"data": {"a": "NUMBER"}}]}
    old: JsonObject = new | {"kind": "message", "role": "user", "parts": [{"kind": "data", "data": {"a": "NUMBER"}}]}
    calls: tuple[tuple[str, JsonObject, dict[str, str]], ...] = (
        ("/", {"jsonrpc": "2.0", "id": 7, "method": "SendMessage", "params": {"message": new}}, VERSION_HEADER),
        ("/", {"jsonrpc": "2.0", "id": 7, "method": "message/send", "params": {"message": old}}, {}),
        ("/message:send", {"message": new}, VERSION_HEADER),
    )
    async with running_server(tmp_path) as server:
        for path, body, headers in calls:
            content = json.dumps(body).replace('"NUMBER"', number)
            answer = await server.http.post(
                path, content=content, headers={**headers, "Content-Type": "application/json"}
            )
            error = answer.json()["error"]
            assert error["code"] in (-32602, 400), (path, error)
            assert "a number that JSON does not have" in error["message"]
        assert server.executor.owners == []


@pytest.mark.parametrize("transport", TRANSPORTS[:2])
@pytest.mark.parametrize("place", ["data", "a part's metadata", "metadata", "the request's metadata"])
async def test_data_nested_too_deeply_is_rejected(tmp_path: Path, transport: str, place: str) -> None:
    """Such a message, and a task with it in its history, cannot be parsed over gRPC."""
    async with running_server(tmp_path) as server:
        task = await send(server.client(transport), request_with(place, nested(MAX_NESTING - 2)))
        assert (await server.client("GRPC").get_task(GetTaskRequest(id=task.id))).id == task.id
        message_request = request_with(place, nested(MAX_NESTING + 1))
        with pytest.raises(InvalidParamsError, match=f"at most {MAX_NESTING} levels"):
            await send(server.client(transport), message_request)


def nested(depth: int) -> JsonValue:
    """Return objects nested `depth` levels deep."""
    return {"a": nested(depth - 1)} if depth else "x"


LARGE: Final[dict[str, JsonObject]] = {
    "parts": {"parts": [{"text": "x"}] * 101},
    "empty parts": {"parts": [{}] * 101},
    "metadata": {"metadata": {"list": [0] * MAX_VALUES}},
    "nested metadata": {"metadata": {"lists": [[0] * 100] * (MAX_VALUES // 100)}},
    "data": {"parts": [{"data": {str(number): 0 for number in range(MAX_VALUES)}}]},
    "tasks": {"referenceTaskIds": ["x"] * MAX_VALUES},
    "extensions": {"extensions": [""] * MAX_VALUES},
}
"""Fields of messages that are too large, in the JSON of 1.0."""


def large_message(content: str) -> JsonObject:
    return {**message_with({"text": "x"}), **LARGE[content]}


def sentence_for(content: str) -> str:
    return "has 101 parts; at most 100" if "parts" in content else f"has more than {MAX_VALUES} values"


@pytest.mark.parametrize("content", LARGE)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_too_many_parts_or_values_are_rejected(tmp_path: Path, transport: str, content: str) -> None:
    message_request = ParseDict({"message": large_message(content)}, SendMessageRequest())
    async with running_server(tmp_path, replace(OPTIONS, max_body_bytes=1_000_000)) as server:
        for streaming in (False, True):
            with pytest.raises(InvalidParamsError, match=sentence_for(content)):
                await send(server.client(transport, streaming=streaming), message_request)
        assert server.executor.owners == []


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_message_of_almost_too_many_values_is_accepted(tmp_path: Path, transport: str) -> None:
    large: JsonObject = {**message_with({"text": "x"}), "metadata": {"list": [0] * (MAX_VALUES - 100)}}
    async with running_server(tmp_path, replace(OPTIONS, max_body_bytes=1_000_000)) as server:
        task = await send(server.client(transport), ParseDict({"message": large}, SendMessageRequest()))
        assert TaskState.Name(task.status.state) == "TASK_STATE_COMPLETED"


@pytest.mark.parametrize("content", LARGE)
async def test_too_many_parts_or_values_are_rejected_in_0_3(tmp_path: Path, content: str) -> None:
    message = large_message(content)
    rest = {name: value for name, value in message.items() if name not in ("parts", "referenceTaskIds")}
    numbers: JsonObject = {str(number): 0 for number in range(MAX_VALUES)}
    rest["content"] = [{"data": {"data": numbers}}] if content == "data" else message["parts"]
    async with running_server(tmp_path, replace(OPTIONS, max_body_bytes=1_000_000)) as server:
        error = (await rpc(server, "message/send", {"message": message}))["error"]
        assert isinstance(error, dict)
        assert (error["code"], sentence_for(content) in error["message"]) == (-32602, True)
        if content != "tasks":
            answer = await server.http.post("/v1/message:send", json={"message": rest})
            assert (answer.status_code, sentence_for(content) in answer.text) == (400, True)
            old = a2a_v0_3_pb2_grpc.A2AServiceStub(server.channel)  # type: ignore[no-untyped-call]
            old_request = ParseDict({"message": rest}, a2a_v0_3_pb2.SendMessageRequest())
            with pytest.raises(grpc.aio.AioRpcError, match=sentence_for(content)) as rejected:
                await old.SendMessage(old_request)
            assert rejected.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError, match=sentence_for(content)):
                await old.SendStreamingMessage(old_request).read()
        assert server.executor.owners == []


@pytest.mark.parametrize("field", ["parts", "metadata", "extensions", "referenceTaskIds"])
async def test_the_rejection_of_a_wrong_value_does_not_repeat_it(tmp_path: Path, field: str) -> None:
    large = "x" * 50_000
    async with running_server(tmp_path) as server:
        params = {"message": {**message_with({"text": "x"}), field: large}}
        for path, content in (
            ("/", {"jsonrpc": "2.0", "id": 7, "method": "SendMessage", "params": params}),
            ("/message:send", params),
        ):
            answer = await server.http.post(path, json=content, headers=VERSION_HEADER)
            assert answer.json()["error"]["code"] == (-32602 if path == "/" else 400)
            assert len(answer.content) < 1000, answer.text[:1000]
        old = {"jsonrpc": "2.0", "id": 7, "method": "message/send", "params": params}
        assert len((await server.http.post("/", json=old)).content) < 1000
        assert len((await server.http.post("/v1/message:send", json=params)).content) < 1000


async def test_a_batch_is_rejected_whatever_its_length(tmp_path: Path) -> None:
    async with running_server(tmp_path, replace(OPTIONS, max_body_bytes=1_000_000)) as server:
        for length, code in ((3, -32600), (MAX_VALUES + 1, -32602)):
            answer = await server.http.post("/", json=[{}] * length, headers=VERSION_HEADER)
            assert (answer.json()["error"]["code"], len(answer.content) < 1000) == (code, True)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_one_principals_tasks_do_not_exist_for_others(tmp_path: Path, transport: str) -> None:
    options = replace(OPTIONS, tokens={"operator": "o-token", "ada": "a-token"})
    async with running_server(tmp_path, options) as server:
        client = server.client(transport)
        adas_task = await send(client, request("m-1", "wait", wait=False, context_id="same"), bearer("a-token"))
        operators_task = await send(client, request("m-1", context_id="same"), bearer("o-token"))
        assert server.executor.owners == ["ada", "operator"]
        assert adas_task.id != operators_task.id
        with pytest.raises(TaskNotFoundError):
            await client.get_task(GetTaskRequest(id=adas_task.id), context=bearer("o-token"))
        with pytest.raises(TaskNotFoundError):
            await client.cancel_task(CancelTaskRequest(id=adas_task.id), context=bearer("o-token"))
        with pytest.raises(TaskNotFoundError):
            await send(client, request("m-2", task_id=adas_task.id), bearer("o-token"))
        streaming = server.client(transport, streaming=True)
        with pytest.raises(TaskNotFoundError):
            await anext(streaming.subscribe(SubscribeToTaskRequest(id=adas_task.id), context=bearer("o-token")))
        visible = await client.list_tasks(ListTasksRequest(), context=bearer("o-token"))
        assert [task.id for task in visible.tasks] == [operators_task.id]
        server.executor.go.set()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_unknown_token_is_rejected(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path, replace(OPTIONS, tokens={"operator": "o-token"})) as server:
        for context in (None, bearer("wrong"), ClientCallContext(service_parameters={"X-API-Key": "wrong"})):
            with pytest.raises(A2AClientError, match=r"401|UNAUTHENTICATED"):
                await send(server.client(transport), request("m-1"), context)
        key = ClientCallContext(service_parameters={"X-API-Key": "o-token"})
        assert (
            await send(server.client(transport), request("m-1"), key)
        ).status.state == TaskState.TASK_STATE_COMPLETED
        assert server.executor.owners == ["operator"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_rate_limited_caller_gets_retry_after(tmp_path: Path, transport: str) -> None:
    options = replace(OPTIONS, tokens={"ada": "a", "bob": "b"}, requests_per_minute=12)
    async with running_server(tmp_path, options) as server:
        client = server.client(transport)
        for _ in range(2):
            await client.list_tasks(ListTasksRequest(), context=bearer("a"))
        with pytest.raises(A2AClientError, match=r"429|RESOURCE_EXHAUSTED"):
            await client.list_tasks(ListTasksRequest(), context=bearer("a"))
        await client.list_tasks(ListTasksRequest(), context=bearer("b"))
        for _ in range(5):
            assert (await server.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_streams_over_the_limit_are_rejected(tmp_path: Path, transport: str) -> None:
    options = replace(OPTIONS, streams=StreamLimits(per_principal=1))
    async with running_server(tmp_path, options) as server:
        client = server.client(transport, streaming=True)
        first = client.send_message(request("m-1", "wait"))
        task = (await anext(first)).task
        with pytest.raises((A2AClientError, A2AError), match=r"429|RESOURCE_EXHAUSTED"):
            await send(client, request("m-2"))
        with pytest.raises((A2AClientError, A2AError), match=r"429|RESOURCE_EXHAUSTED"):
            await anext(client.subscribe(SubscribeToTaskRequest(id=task.id)))
        server.executor.go.set()
        assert states([event async for event in first])[-1] == "COMPLETED"
        assert (await send(client, request("m-3"))).id


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_idle_stream_is_closed_and_its_task_continues(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path, replace(OPTIONS, streams=StreamLimits(idle_s=1.0))) as server:
        client = server.client(transport, streaming=True)
        events = [event async for event in client.send_message(request("m-1", "wait"))]
        assert states(events) == ["SUBMITTED", "WORKING"]
        server.executor.go.set()

        async def completed() -> bool:
            task = await client.get_task(GetTaskRequest(id=events[0].task.id))
            return task.status.state == TaskState.TASK_STATE_COMPLETED

        await eventually(completed)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_streaming_is_rejected_if_disabled(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path, replace(OPTIONS, streaming=False)) as server:
        client = server.client(transport, streaming=True)
        assert (await send(client, request("m-1"))).status.state == TaskState.TASK_STATE_COMPLETED, "streamed"
        message = {"messageId": "m-2", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
        rejected = await server.http.post("/message:stream", json={"message": message}, headers=VERSION_HEADER)
        assert rejected.json()["error"]["details"][0]["reason"] == "UNSUPPORTED_OPERATION"
        call = {"jsonrpc": "2.0", "id": 1, "method": "SendStreamingMessage", "params": {"message": message}}
        assert (await server.http.post("/", json=call, headers=VERSION_HEADER)).json()["error"]["code"] == -32004


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_extended_card_requires_authentication(tmp_path: Path, transport: str) -> None:
    options = replace(OPTIONS, tokens={"ada": "a"}, setup={"model": "gpt-5.5"})
    async with running_server(tmp_path, options) as server:
        public = await server.http.get("/.well-known/agent-card.json")
        assert public.json()["capabilities"]["extendedAgentCard"]
        assert "gpt-5.5" not in public.text
        client = server.client(transport)
        card = await client.get_extended_agent_card(GetExtendedAgentCardRequest(), context=bearer("a"))
        assert [dict(each.params)["model"] for each in card.capabilities.extensions] == ["gpt-5.5"]
        with pytest.raises(A2AClientError, match=r"401|UNAUTHENTICATED"):
            await server.client(transport).get_extended_agent_card(GetExtendedAgentCardRequest())


# --- Extensions and versions ---


async def test_the_response_lists_the_active_extensions(tmp_path: Path) -> None:
    async with running_server(tmp_path, replace(OPTIONS, extensions=(USAGE,))) as server:
        headers = {**VERSION_HEADER, "A2A-Extensions": "urn:other,urn:test:usage"}
        assert (await server.http.get("/tasks", headers=headers)).headers["a2a-extensions"] == "urn:test:usage"
        assert "a2a-extensions" not in (await server.http.get("/tasks", headers=VERSION_HEADER)).headers
        old = await server.http.get("/v1/tasks/x", headers={"X-A2A-Extensions": "urn:test:usage"})
        assert old.headers["x-a2a-extensions"] == "urn:test:usage"
        call = server.grpc.ListTasks(
            ListTasksRequest(), metadata=(("a2a-version", "1.0"), ("a2a-extensions", "urn:other,urn:test:usage"))
        )
        await call
        assert ("a2a-extensions", "urn:test:usage") in tuple(await call.trailing_metadata())


@pytest.mark.parametrize("version", ["99.0", "0.3", "", "nonsense"])
async def test_an_unsupported_version_is_rejected(tmp_path: Path, version: str) -> None:
    async with running_server(tmp_path) as server:
        headers = {"A2A-Version": version}
        answer = await server.http.get("/tasks", headers=headers)
        assert answer.json()["error"]["details"][0]["reason"] == "VERSION_NOT_SUPPORTED"
        call = {"jsonrpc": "2.0", "id": 1, "method": "ListTasks", "params": {}}
        assert (await server.http.post("/", json=call, headers=headers)).json()["error"]["code"] == -32009
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await server.grpc.ListTasks(ListTasksRequest(), metadata=(("a2a-version", version),))
        assert rejected.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_the_version_may_be_a_query_parameter(tmp_path: Path) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "ListTasks", "params": {}}
    message = {"message": message_with({"text": "hello"})}
    async with running_server(tmp_path) as server:
        assert (await server.http.get("/tasks?A2A-Version=1.0&pageSize=3")).json()["pageSize"] == 3
        assert (await server.http.post("/?A2A-Version=1.0", json=call)).json()["result"]["totalSize"] == 0
        assert (await server.http.post("/message:send?A2A-Version=1.0", json=message)).json()["task"]
        for wrong in ("99.0", "0.3", "", "1%0a.0", "%ff"):
            answer = await server.http.get(f"/tasks?A2A-Version={wrong}")
            assert answer.json()["error"]["details"][0]["reason"] == "VERSION_NOT_SUPPORTED"
        header_first = await server.http.get("/tasks?A2A-Version=1.0", headers={"A2A-Version": "99.0"})
        assert header_first.status_code == 400


@pytest.mark.parametrize("version", ["1", "1.1", "1.7", "2.0", "01.0", "1.0rc1"])
async def test_another_minor_version_is_rejected_with_the_remedy(tmp_path: Path, version: str) -> None:
    sentence = f"A2A version '{version}' is not supported here; send the header A2A-Version: "
    headers = {"A2A-Version": version}
    old = a2a_v0_3_pb2.GetTaskRequest(name="tasks/x")
    async with running_server(tmp_path) as server:
        rest = await server.http.get("/tasks", headers=headers)
        assert (rest.status_code, rest.json()["error"]["message"]) == (400, sentence + "1.0")
        old_rest = await server.http.get("/v1/tasks/x", headers=headers)
        assert (old_rest.status_code, old_rest.json()["error"]["message"]) == (400, sentence + "0.3")
        for method, served in (("ListTasks", "1.0"), ("GetTask", "1.0"), ("tasks/get", "0.3"), ("message/send", "0.3")):
            error = (await rpc(server, method, {}, **headers))["error"]
            assert isinstance(error, dict)
            assert (error["code"], error["message"]) == (-32009, sentence + served)
        metadata = (("a2a-version", version),)
        old_grpc = a2a_v0_3_pb2_grpc.A2AServiceStub(server.channel)  # type: ignore[no-untyped-call]
        for call in (
            server.grpc.ListTasks(ListTasksRequest(), metadata=metadata),
            old_grpc.GetTask(old, metadata=metadata),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="is not supported here; send the header") as rejected:
                await call
            assert rejected.value.code() == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("version", ["1.0", "1.0.1"])
async def test_the_patch_number_of_a_version_does_not_matter(tmp_path: Path, version: str) -> None:
    async with running_server(tmp_path) as server:
        assert (await server.http.get("/tasks", headers={"A2A-Version": version})).status_code == 200
        assert "result" in await rpc(server, "ListTasks", {}, **{"A2A-Version": version})
        assert (await server.grpc.ListTasks(ListTasksRequest(), metadata=(("a2a-version", version),))).total_size == 0
        old = {"A2A-Version": f"0.3{version.removeprefix('1.0')}"}
        assert (await server.http.get("/v1/tasks/x", headers=old)).status_code == 404
        error = (await rpc(server, "tasks/get", {"id": "x"}, **old))["error"]
        assert isinstance(error, dict)
        assert error["code"] == -32001


async def test_a_missing_version_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    sentence = "A request without A2A-Version, which means 0.3, is not supported here; send the header A2A-Version: 1.0"
    for versions in (("1.0", "0.3"), ("1.0",)):
        async with running_server(tmp_path, replace(OPTIONS, versions=versions)) as server:
            assert (await server.http.get("/tasks")).json()["error"]["message"] == sentence
            error = (await rpc(server, "SendMessage", {}))["error"]
            assert isinstance(error, dict)
            assert (error["code"], error["message"]) == (-32009, sentence)
            with pytest.raises(grpc.aio.AioRpcError) as rejected:
                await server.grpc.ListTasks(ListTasksRequest())
            assert rejected.value.details() == sentence


async def test_a2a_0_3_works_on_all_transports(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        rest = {"request": {"messageId": "m-1", "role": "ROLE_USER", "content": [{"text": "hello"}]}}
        task = (await server.http.post("/v1/message:send", json=rest)).json()["task"]
        assert task["status"]["state"] == "TASK_STATE_COMPLETED"
        old = a2a_v0_3_pb2_grpc.A2AServiceStub(server.channel)  # type: ignore[no-untyped-call]
        message = a2a_v0_3_pb2.Message(
            message_id="m-2", role=a2a_v0_3_pb2.ROLE_USER, content=[a2a_v0_3_pb2.Part(text="hello")]
        )
        answer = await old.SendMessage(a2a_v0_3_pb2.SendMessageRequest(request=message))
        assert answer.task.status.state == a2a_v0_3_pb2.TASK_STATE_COMPLETED
        with pytest.raises(grpc.aio.AioRpcError):
            await old.GetTask(a2a_v0_3_pb2.GetTaskRequest(name="tasks/x"), metadata=(("a2a-version", "1.0"),))


async def test_a2a_0_3_is_rejected_if_disabled(tmp_path: Path) -> None:
    async with running_server(tmp_path, replace(OPTIONS, versions=("1.0",))) as server:
        call = {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"id": "x"}}
        assert (await server.http.post("/", json=call)).json()["error"]["code"] == -32601
        assert (await server.http.get("/v1/card")).status_code == 404
        old = a2a_v0_3_pb2_grpc.A2AServiceStub(server.channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await old.GetTask(a2a_v0_3_pb2.GetTaskRequest(name="tasks/x"))
        assert rejected.value.code() == grpc.StatusCode.UNIMPLEMENTED


# --- Errors ---


async def rpc(server: RunningServer, method: str, params: object, **headers: str) -> dict[str, object]:
    call = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    answer = (await server.http.post("/", json=call, headers=headers)).json()
    assert (answer["jsonrpc"], answer["id"]) == ("2.0", 7)
    return dict(answer)


def message_with(part: JsonObject, role: str = "ROLE_USER") -> JsonObject:
    return {"messageId": "m-1", "role": role, "parts": [part]}


OLD_MESSAGE: Final[JsonObject] = {
    "kind": "message",
    "messageId": "m-1",
    "role": "user",
    "parts": [{"kind": "text", "text": "hello"}],
}


def old_message_with(file: JsonObject, **more: JsonValue) -> JsonObject:
    return {"kind": "message", "messageId": "m-1", "role": "user", "parts": [{"kind": "file", "file": file, **more}]}


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("SendMessage", {}, -32602),
        ("SendMessage", {"message": "no object"}, -32602),
        ("SendMessage", {"message": {"role": "ROLE_USER", "parts": [{"text": "x"}]}}, -32602),
        ("GetTask", {}, -32602),
        ("GetTask", {"id": "x"}, -32001),
        ("CancelTask", {"id": "x"}, -32001),
        ("ListTasks", {"pageSize": 0}, -32602),
        ("ListTasks", {"pageSize": "many"}, -32602),
        ("ListTasks", {"status": 77}, -32602),
        ("ListTasks", {"status": "77"}, -32602),
        ("ListTasks", {"status": "FOO"}, -32602),
        ("ListTasks", {"includeArtifacts": "maybe"}, -32602),
        ("SendMessage", {"message": message_with({"raw": "!!!"})}, -32602),
        ("SendMessage", {"message": message_with({"raw": "aGVsbG8!!!"})}, -32602),
        ("SendStreamingMessage", {"message": message_with({"raw": "aGVsb"})}, -32602),
        ("SendMessage", {"message": message_with({"text": "x"}, role="ROLE_NOBODY")}, -32602),
        ("NoSuchMethod", {}, -32601),
        ("CreateTaskPushNotificationConfig", {"taskId": "x", "url": "https://example.com"}, -32003),
        ("GetExtendedAgentCard", {}, -32004),
    ],
)
async def test_the_codes_of_json_rpc(tmp_path: Path, method: str, params: object, code: int) -> None:
    async with running_server(tmp_path) as server:
        error = (await rpc(server, method, params, **VERSION_HEADER))["error"]
        assert isinstance(error, dict)
        assert error["code"] == code, error


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("message/send", {}, -32602),
        ("message/send", {"message": {"kind": "message"}}, -32602),
        ("message/send", {"message": old_message_with({"bytes": "!!!"})}, -32602),
        ("message/stream", {"message": old_message_with({"bytes": "aGVsb"})}, -32602),
        ("message/send", {"message": old_message_with({"uri": "https://x"}, metadata=nested(60))}, -32602),
        ("tasks/get", {}, -32602),
        ("tasks/get", {"id": "x"}, -32001),
        ("tasks/nonsense", {}, -32601),
        ("tasks/get", {"id": "x", "historyLength": 1 << 31}, -32602),
        ("tasks/get", {"id": "x", "historyLength": HUGE[:400]}, -32602),
        ("tasks/get", {"id": "x", "historyLength": HUGE}, -32602),
        ("message/send", {"message": OLD_MESSAGE, "configuration": {"historyLength": 1 << 31}}, -32602),
        ("message/send", {"message": {**OLD_MESSAGE, "metadata": {"a": 10**400}}}, -32602),
        ("message/stream", {"message": {**OLD_MESSAGE, "metadata": {"a": 10**400}}}, -32602),
    ],
)
async def test_the_codes_of_json_rpc_0_3(tmp_path: Path, method: str, params: object, code: int) -> None:
    async with running_server(tmp_path) as server:
        error = (await rpc(server, method, params))["error"]
        assert isinstance(error, dict)
        assert error["code"] == code, error


REQUIRED: Final = "field is required"
UNSENDABLE: Final[dict[str, tuple[JsonObject, dict[str, str]]]] = {
    "no message": ({}, {"message": REQUIRED}),
    "no role and no ID": (
        {"message": {"parts": [{"text": "x"}]}},
        {"message.messageId": REQUIRED, "message.role": REQUIRED},
    ),
    "no parts": (
        {"message": {"messageId": "m", "role": "ROLE_USER"}},
        {"message.parts": "field must contain at least one element"},
    ),
    "a text as message": ({"message": "no object"}, {"message": "is not an object"}),
    "a text as part": ({"message": {**message_with({}), "parts": ["x"]}}, {"message.parts[0]": "is not an object"}),
    "a number as ID": ({"message": {"messageId": 7}}, {"message.messageId": "is not a string"}),
    "a number as text": ({"message": message_with({"text": 7})}, {"message.parts[0].text": "is not a string"}),
    "parts that are none": ({"message": {"parts": {}}}, {"message.parts": "is not an array"}),
    "no base64": ({"message": message_with({"raw": "!"})}, {"message.parts[0].raw": "is not base64"}),
    "no metadata": ({"message": {"metadata": 7}}, {"message.metadata": "is not an object"}),
    "no number": ({"configuration": {"historyLength": "x"}}, {"configuration.historyLength": "is not a whole number"}),
    "a large number": (
        {"configuration": {"historyLength": 1 << 31}},
        {"configuration.historyLength": "is not a whole number"},
    ),
    "no boolean": (
        {"configuration": {"returnImmediately": "no"}},
        {"configuration.returnImmediately": "is not a boolean"},
    ),
}
"""Parameters of SendMessage, and the problems by field."""


@pytest.mark.parametrize("name", UNSENDABLE)
async def test_a_validation_error_names_field_and_problem(tmp_path: Path, name: str) -> None:
    params, problems = UNSENDABLE[name]
    sentence = "; ".join(f"{field}: {problem}" for field, problem in problems.items())
    violations = [{"field": field, "description": problem} for field, problem in problems.items()]
    async with running_server(tmp_path) as server:
        errors = []
        for method, path in (("SendMessage", "/message:send"), ("SendStreamingMessage", "/message:stream")):
            error = (await rpc(server, method, params, **VERSION_HEADER))["error"]
            assert isinstance(error, dict)
            assert error["code"] == -32602
            errors.append((error["message"], error["data"]))
            rest = await server.http.post(path, json=params, headers=VERSION_HEADER)
            assert rest.status_code == 400
            errors.append((rest.json()["error"]["message"], rest.json()["error"]["details"]))
        for text, (info, bad_request) in errors:
            assert text == sentence
            assert (info["reason"], info["metadata"]) == ("INVALID_PARAMS", problems)
            assert bad_request["fieldViolations"] == violations
        assert server.executor.owners == []


@pytest.mark.parametrize("name", ["no message", "no role and no ID", "no parts"])
async def test_a_validation_error_names_field_and_problem_over_grpc(tmp_path: Path, name: str) -> None:
    params, problems = UNSENDABLE[name]
    sentence = "; ".join(f"{field}: {problem}" for field, problem in problems.items())
    message_request = ParseDict(params, SendMessageRequest())
    async with running_server(tmp_path) as server:
        metadata = (("a2a-version", "1.0"),)
        for call in (
            server.grpc.SendMessage(message_request, metadata=metadata),
            server.grpc.SendStreamingMessage(message_request, metadata=metadata).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as rejected:
                await call
            assert (rejected.value.code(), rejected.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, sentence)
            [content] = [value for key, value in rejected.value.trailing_metadata() or () if key.endswith("-bin")]
            assert isinstance(content, bytes)
            violations = error_details_pb2.BadRequest()
            status_pb2.Status.FromString(content).details[1].Unpack(violations)
            assert {each.field: each.description for each in violations.field_violations} == problems


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/tasks?pageSize=many", "pageSize: is not a whole number"),
        ("/tasks?status=BOGUS", "status: 'BOGUS' is not one of "),
        ("/tasks?includeArtifacts=maybe", "includeArtifacts: is not a boolean"),
        ("/tasks/x?historyLength=1e3", "historyLength: is not a whole number"),
    ],
)
async def test_the_error_of_a_query_names_field_and_problem(tmp_path: Path, path: str, problem: str) -> None:
    async with running_server(tmp_path) as server:
        error = (await server.http.get(path, headers=VERSION_HEADER)).json()["error"]
        assert error["message"].startswith(problem)
        field = problem.partition(":")[0]
        assert list(error["details"][0]["metadata"]) == [field]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("GET", "/tasks/x", None, 404, "TASK_NOT_FOUND"),
        ("POST", "/tasks/x:cancel", None, 404, "TASK_NOT_FOUND"),
        ("POST", "/message:send", {}, 400, "INVALID_PARAMS"),
        ("POST", "/message:send", [], 400, "INVALID_PARAMS"),
        ("GET", "/tasks?pageSize=0", None, 400, "INVALID_PARAMS"),
        ("GET", "/tasks?pageSize=many", None, 400, "INVALID_PARAMS"),
        ("GET", f"/tasks?pageSize={HUGE}", None, 400, "INVALID_PARAMS"),
        ("GET", f"/tasks/x?historyLength={HUGE}", None, 400, "INVALID_PARAMS"),
        ("GET", "/tasks?status=77", None, 400, "INVALID_PARAMS"),
        ("GET", "/tasks?status=BOGUS", None, 400, "INVALID_PARAMS"),
        ("GET", "/tasks?includeArtifacts=maybe", None, 400, "INVALID_PARAMS"),
        ("GET", "/a-tenant/tasks?status=BOGUS", None, 404, None),
        ("POST", "/message:send", {"message": message_with({"raw": "!!!"})}, 400, "INVALID_PARAMS"),
        ("POST", "/message:stream", {"message": message_with({"raw": "aGVsbG8!!!"})}, 400, "INVALID_PARAMS"),
        ("GET", "/extendedAgentCard", None, 400, "UNSUPPORTED_OPERATION"),
        ("POST", "/tasks/x/pushNotificationConfigs", {"url": "https://x"}, 400, "PUSH_NOTIFICATION_NOT_SUPPORTED"),
        ("GET", "/nowhere/at/all", None, 404, None),
        ("GET", "/foo", None, 404, None),
        ("GET", "/foo/", None, 404, None),
        ("POST", "/v1", {}, 404, None),
        ("GET", "/a-tenant/tasks/", None, 404, None),
        ("GET", "/healthz/", None, 404, None),
        ("DELETE", "/tasks/x", None, 405, None),
        ("GET", "/", None, 405, None),
    ],
)
async def test_the_codes_of_http(
    tmp_path: Path, method: str, path: str, body: object, status: int, reason: str | None
) -> None:
    async with running_server(tmp_path) as server:
        content = {} if body is None else {"json": body}
        answer = await server.http.request(method, path, headers=VERSION_HEADER, **content)  # type: ignore[arg-type]
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
        error = answer.json()["error"]
        assert error["code"] == status
        assert reason is None or error["details"][0]["reason"] == reason


NO_TENANTS: Final = "tenant: 'acme' is unknown; this agent has no tenants"


@pytest.mark.parametrize("version", ["1.0", ""])
@pytest.mark.parametrize("path", ["/acme/tasks", "/acme/tasks/x", "/acme/message:send", "/v1/acme/message:send"])
async def test_the_path_of_a_tenant_does_not_exist(tmp_path: Path, path: str, version: str) -> None:
    async with running_server(tmp_path) as server:
        headers = {"A2A-Version": version}
        send = path.endswith(":send")
        answer = await (
            server.http.post(path, json={}, headers=headers) if send else server.http.get(path, headers=headers)
        )
        assert (answer.status_code, "the agent has no tenants" in answer.text) == (404, True)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/tasks"),
        ("GET", "/tasks/x"),
        ("POST", "/tasks/x:cancel"),
        ("GET", "/tasks/x:subscribe"),
        ("GET", "/extendedAgentCard"),
        ("POST", "/message:send"),
        ("POST", "/message:stream"),
        ("POST", "/tasks/x/pushNotificationConfigs"),
        ("DELETE", "/tasks/x/pushNotificationConfigs/y"),
    ],
)
async def test_an_undeclared_tenant_is_rejected_over_http(tmp_path: Path, method: str, path: str) -> None:
    message = message_with({"text": "hello"})
    async with running_server(tmp_path) as server:
        forms: list[tuple[str, JsonObject]] = [(f"{path}?tenant=acme", {"message": message})]
        if method == "POST" and ":cancel" not in path:
            forms.append((path, {"message": message, "tenant": "acme"}))
        for place, body in forms:
            content = {"json": body} if method == "POST" else {}
            answer = await server.http.request(method, place, headers=VERSION_HEADER, **content)  # type: ignore[arg-type]
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, NO_TENANTS)
        assert server.executor.owners == []


@pytest.mark.parametrize("method", JsonRpcDispatcher.METHOD_TO_MODEL)
async def test_an_undeclared_tenant_is_rejected_over_json_rpc_and_grpc(tmp_path: Path, method: str) -> None:
    model = JsonRpcDispatcher.METHOD_TO_MODEL[method]
    streaming = method in ("SendStreamingMessage", "SubscribeToTask")
    async with running_server(tmp_path) as server:
        assert NO_TENANTS not in str(await rpc(server, method, {"tenant": ""}, **VERSION_HEADER))
        error = (await rpc(server, method, {"tenant": "acme"}, **VERSION_HEADER))["error"]
        assert isinstance(error, dict)
        assert (error["code"], error["message"]) == (-32602, NO_TENANTS)
        call = getattr(server.grpc, method)(model(tenant="acme"), metadata=(("a2a-version", "1.0"),))
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await (call.read() if streaming else call)
        assert (rejected.value.code(), rejected.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, NO_TENANTS)


async def test_the_tenant_of_a_webhook_is_rejected(tmp_path: Path) -> None:
    webhook: JsonObject = {"url": "https://x", "tenant": "acme"}
    params: JsonObject = {
        "message": message_with({"text": "hello"}),
        "configuration": {"taskPushNotificationConfig": webhook},
    }
    async with running_server(tmp_path) as server:
        for transport in TRANSPORTS:
            with pytest.raises(InvalidParamsError, match="tenant: 'acme' is unknown"):
                await send(server.client(transport), ParseDict(params, SendMessageRequest()))


async def test_a_list_of_tasks_has_no_empty_fields(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        empty = {"tasks": [], "nextPageToken": "", "pageSize": 50, "totalSize": 0}
        assert (await server.http.get("/tasks", headers=VERSION_HEADER)).json() == empty
        assert (await rpc(server, "ListTasks", {}, **VERSION_HEADER))["result"] == empty
        task = await send(server.client("GRPC"), request("m-1"))
        shown = (await server.http.get(f"/tasks/{task.id}", headers=VERSION_HEADER)).json()
        for artifacts in (True, False):
            listed = shown if artifacts else {name: value for name, value in shown.items() if name != "artifacts"}
            page = {"tasks": [listed], "nextPageToken": "", "pageSize": 50, "totalSize": 1}
            query = f"/tasks?includeArtifacts={artifacts}"
            assert (await server.http.get(query, headers=VERSION_HEADER)).json() == page
            params = {"includeArtifacts": artifacts}
            assert (await rpc(server, "ListTasks", params, **VERSION_HEADER))["result"] == page
        waiting = await send(server.client("GRPC"), request("m-2", "wait", wait=False))
        page = (await server.http.get("/tasks?includeArtifacts=true", headers=VERSION_HEADER)).json()
        assert [(each["id"], each["artifacts"]) for each in page["tasks"][:1]] == [(waiting.id, [])]
        server.executor.go.set()


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/", "OPTIONS, POST"),
        ("/.well-known/agent-card.json", "GET, HEAD, OPTIONS"),
        ("/tasks", "GET, HEAD, OPTIONS"),
        ("/tasks/x:subscribe", "GET, HEAD, OPTIONS, POST"),
        ("/tasks/x/pushNotificationConfigs/y", "DELETE, GET, HEAD, OPTIONS"),
        ("/v1/message:send", "OPTIONS, POST"),
    ],
)
async def test_options_returns_the_methods_of_a_path(tmp_path: Path, path: str, methods: str) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.http.options(path)
        assert (answer.status_code, answer.content, answer.headers["allow"]) == (204, b"", methods)
        wrong = await server.http.put(path)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, methods)
        assert (await server.http.options("/nowhere")).status_code == 404


@pytest.mark.parametrize("method", ["SendMessage", "SendStreamingMessage"])
async def test_a_notification_is_processed_without_a_reply(tmp_path: Path, method: str) -> None:
    async with running_server(tmp_path, replace(OPTIONS, streams=StreamLimits(total=1))) as server:
        for number in range(2):
            message = {**message_with({"text": "hello"}), "messageId": f"m-{number}"}
            call = {"jsonrpc": "2.0", "method": method, "params": {"message": message}}
            answer = await server.http.post("/", json=call, headers=VERSION_HEADER)
            assert (answer.status_code, answer.content) == (204, b"")
        page = await server.client("JSONRPC").list_tasks(ListTasksRequest())
        assert [TaskState.Name(task.status.state) for task in page.tasks] == ["TASK_STATE_COMPLETED"] * 2


@pytest.mark.parametrize(
    "call",
    [
        {"jsonrpc": "2.0", "method": "GetTask", "params": {"id": "x"}},
        {"jsonrpc": "2.0", "method": "GetTask", "params": "x"},
        {"jsonrpc": "2.0", "method": "NoSuchMethod"},
    ],
)
async def test_a_wrong_notification_gets_no_reply_either(tmp_path: Path, call: JsonObject) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.http.post("/", json=call, headers=VERSION_HEADER)
        assert (answer.status_code, answer.content) == (204, b"")
        for no_notification in ({**call, "jsonrpc": "1.0"}, {**call, "id": None}, {"jsonrpc": "2.0"}):
            assert "error" in (await server.http.post("/", json=no_notification, headers=VERSION_HEADER)).json()


async def test_a_call_of_0_3_needs_an_id(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        call = {"jsonrpc": "2.0", "method": "message/send", "params": {"message": OLD_MESSAGE}}
        error = (await server.http.post("/", json=call)).json()["error"]
        assert (error["code"], error["message"]) == (-32602, "id: field required")


@pytest.mark.parametrize(
    ("params", "problems"),
    [
        ({}, {"message": "field required"}),
        ("x" * 50_000, {"params": "is not an object"}),
        (["x"], {"params": "is not an object"}),
        (
            {"message": {**OLD_MESSAGE, "role": "SECRET"}},
            {"message.role": "input should be 'agent' or 'user'"},
        ),
        ({"message": {**OLD_MESSAGE, "messageId": 7}}, {"message.messageId": "input should be a valid string"}),
        (
            {"message": {**OLD_MESSAGE, "parts": [{"kind": "text", "text": "x"}, {}]}},
            {f"message.parts[1].{field}": "field required" for field in ("text", "file", "data")},
        ),
    ],
)
async def test_an_error_of_0_3_names_the_fields_in_own_words(
    tmp_path: Path, params: JsonValue, problems: dict[str, str]
) -> None:
    async with running_server(tmp_path) as server:
        for method in ("message/send", "message/stream"):
            error = (await rpc(server, method, params))["error"]
            assert isinstance(error, dict)
            assert (error["code"], error["data"]) == (-32602, problems)
            assert error["message"] == "; ".join(f"{field}: {problem}" for field, problem in problems.items())


async def test_an_empty_part_is_a_client_error_in_0_3(tmp_path: Path) -> None:
    sentence = "message.parts[1]: has none of text, file, data"
    empty: tuple[JsonObject, ...] = ({}, {"text": None}, {"metadata": {"a": 1}})
    for part in empty:
        message: JsonObject = {"messageId": "m-1", "role": "ROLE_USER", "content": [{"text": "x"}, part]}
        old_request = ParseDict({"request": message}, a2a_v0_3_pb2.SendMessageRequest())
        async with running_server(tmp_path) as server:
            for method in ("send", "stream"):
                rest = await server.http.post(f"/v1/message:{method}", json={"request": message})
                assert (rest.status_code, rest.json()["error"]["message"]) == (400, sentence)
            old = a2a_v0_3_pb2_grpc.A2AServiceStub(server.channel)  # type: ignore[no-untyped-call]
            for call in (old.SendMessage(old_request), old.SendStreamingMessage(old_request).read()):
                with pytest.raises(grpc.aio.AioRpcError, match="has none of text, file, data") as rejected:
                    await call
                assert rejected.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert server.executor.owners == []


@pytest.mark.parametrize(
    ("path", "content", "code"),
    [
        (
            "/",
            b'{"jsonrpc": "2.0", "id": 7, "method": "ListTasks", "params": ' + b"[" * 5000 + b"]" * 5000 + b"}",
            -32700,
        ),
        ("/", b'{"jsonrpc": "2.0", "id": 7, "method": "\xff"}', -32700),
        ("/", b"{", -32700),
        ("/message:send", b'{"metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        ("/message:send", b'{"message": "\xff"}', 400),
        ("/message:send", b"{", 400),
        (
            "/",
            b'{"jsonrpc": "2.0", "id": 7, "method": "ListTasks", "params": {"pageSize": ' + HUGE.encode() + b"}}",
            -32700,
        ),
        (
            "/",
            b'{"jsonrpc": "2.0", "id": 7, "method": "ListTasks", "params": {"pageSize": "' + HUGE.encode() + b'"}}',
            -32602,
        ),
        ("/message:stream", b'{"metadata": {"a": ' + HUGE.encode() + b"}}", 400),
        ("/message:stream", b'{"metadata": {"a": ' + HUGE[:400].encode() + b"}}", 400),
        ("/message:stream", b'{"configuration": {"historyLength": "' + HUGE.encode() + b'"}}', 400),
        ("/v1/message:send", b'{"request": {"metadata": {"a": ' + HUGE.encode() + b"}}}", 400),
        ("/v1/message:stream", b'{"request": {"metadata": {"a": ' + HUGE[:400].encode() + b"}}}", 400),
        ("/v1/message:stream", b'{"configuration": {"historyLength": "' + HUGE.encode() + b'"}}', 400),
        ("/v1/message:stream", b"{", 400),
        ("/v1/message:stream", b'{"request": {"messageId": 7}}', 400),
        ("/v1/message:send", b'{"request": "\xff"}', 400),
        ("/v1/message:send", b'{"metadata": {"a": 1e999}}', 400),
        (
            "/v1/message:send",
            b'{"request": {"messageId": "m", "content": [{"file": {"fileWithBytes": "!!!"}}]}}',
            400,
        ),
    ],
)
async def test_an_unreadable_body_is_a_client_error(tmp_path: Path, path: str, content: bytes, code: int) -> None:
    async with running_server(tmp_path) as server:
        version = {} if path.startswith("/v1/") else VERSION_HEADER
        answer = await server.http.post(path, content=content, headers={"Content-Type": "application/json", **version})
        assert answer.json()["error"]["code"] == code, answer.text
        assert "Internal error; see" not in answer.text
        assert server.executor.owners == []


LONG: Final = (HUGE, int(HUGE[:4000]), [HUGE], {HUGE: 1})


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/tasks", ("pageSize", "historyLength", "page_size")),
        ("/tasks/x", ("historyLength", "history_length")),
        ("/tasks/x/pushNotificationConfigs", ("pageSize",)),
        ("/v1/tasks/x", ("historyLength",)),
    ],
)
async def test_an_error_does_not_repeat_a_long_query(tmp_path: Path, path: str, names: Sequence[str]) -> None:
    async with running_server(tmp_path) as server:
        for name in names:
            answer = await server.http.get(f"{path}?{name}={HUGE}", headers={} if "v1" in path else VERSION_HEADER)
            assert (answer.status_code, HUGE[:50] in answer.text, name in answer.text) == (400, False, True), (
                answer.text
            )


@pytest.mark.parametrize("value", LONG, ids=["digits", "integer", "array", "object"])
async def test_an_error_does_not_repeat_a_long_value(tmp_path: Path, value: JsonValue) -> None:
    """The SDK's own errors do, for every value that is not of a field's type."""
    async with running_server(tmp_path) as server:
        message: JsonObject = {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
        body: JsonObject = {"message": message, "configuration": {"historyLength": value}}
        calls: list[tuple[str, JsonObject]] = [
            ("SendMessage", body),
            ("GetTask", {"id": "x", "historyLength": value}),
            ("ListTasks", {"pageSize": value}),
            ("ListTasks", {"statusTimestampAfter": value}),
        ]
        for method, params in calls:
            said = json.dumps((await rpc(server, method, params, **VERSION_HEADER))["error"])
            assert ("-32602" in said, len(said) < 500) == (True, True), said
        answer = await server.http.post("/message:send", json=body, headers=VERSION_HEADER)
        assert (answer.status_code, len(answer.text) < 500) == (400, True), answer.text
        assert server.executor.owners == []


@pytest.mark.parametrize("length", [HUGE, "-1", "abc", "1e3", str(1 << 31)])
async def test_an_impossible_history_length_is_a_client_error_in_0_3(tmp_path: Path, length: str) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.http.get(f"/v1/tasks/x?historyLength={length}")
        assert (answer.status_code, "historyLength" in answer.text) == (400, True)


async def test_a_rejected_stream_of_0_3_has_the_status_of_its_error(tmp_path: Path) -> None:
    message: JsonObject = {"messageId": "m-1", "role": "ROLE_USER", "content": [{"text": "hello"}]}
    async with running_server(tmp_path) as server:
        streamed = await server.http.post("/v1/message:stream", json={"request": message})
        assert (streamed.status_code, "TASK_STATE_COMPLETED" in streamed.text) == (200, True)
        other = {**message, "content": [{"text": "another"}]}
        for path, body, status in (
            ("/v1/message:stream", {"request": other}, 400),
            ("/v1/tasks/x:subscribe", None, 404),
            ("/v1/message:stream?A2A-Version=2.0", {"request": message}, 400),
        ):
            rejected = await server.http.post(path, json=body)
            assert (rejected.status_code, rejected.json()["error"]["code"]) == (status, status), path


@pytest.mark.parametrize("version", [HUGE, "²", "1.0.0.0.0.0", "1.0rc1", "x", "-1"])
async def test_an_unreadable_version_is_not_supported(tmp_path: Path, version: str) -> None:
    async with running_server(tmp_path) as server:
        headers = {b"A2A-Version": version.encode()}
        for rest in (
            await server.http.get("/tasks", headers=headers),
            await server.http.get("/tasks", params={"A2A-Version": version}),
        ):
            assert rest.status_code == 400, rest.text
        call = {"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": "x"}}
        rpc_answer = await server.http.post("/", json=call, headers=headers)
        assert rpc_answer.json()["error"]["code"] == -32009
        assert len(rpc_answer.content) < 500


async def test_base64_is_accepted_in_both_alphabets_with_or_without_padding(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for number, content in enumerate(("-_8=", "+/8", "+/8=", "", "aGVs\nbG8=\n")):
            message = {**message_with({"raw": content}), "messageId": f"m-{number}"}
            answer = await server.http.post("/message:send", json={"message": message}, headers=VERSION_HEADER)
            assert answer.status_code == 200, answer.text


async def test_an_unknown_task_state_is_rejected_over_grpc_too(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        message_request = ListTasksRequest()
        message_request.status = 77  # type: ignore[assignment]
        with pytest.raises(InvalidParamsError, match="77 is not a task state"):
            await server.client("GRPC").list_tasks(message_request)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_must_have_a_json_content_type(tmp_path: Path, kind: str) -> None:
    """A form that a web page can post without a preflight request is not accepted as a message."""
    message = {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
    call = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    headers = VERSION_HEADER | ({"Content-Type": kind} if kind else {})
    async with running_server(tmp_path) as server:
        rejected = await server.http.post("/", content=json.dumps(call).encode(), headers=headers)
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (415, -32005)
        rejected = await server.http.post("/message:send", content=json.dumps({"message": message}), headers=headers)
        assert rejected.status_code == 415
        assert rejected.json()["error"]["details"][0]["reason"] == "CONTENT_TYPE_NOT_SUPPORTED"
        assert server.executor.owners == []
        for fine in ("application/json; charset=utf-8", "application/a2a+json"):
            content = json.dumps({"message": {**message, "messageId": fine}}).encode()
            answer = await server.http.post(
                "/message:send", content=content, headers={**VERSION_HEADER, "Content-Type": fine}
            )
            assert answer.status_code == 200


async def test_a_call_over_the_limit_is_rejected_over_grpc_too(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await server.grpc.SendMessage(request("m-1", "x" * 100_001), metadata=(("a2a-version", "1.0"),))
        assert rejected.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert server.executor.owners == []


@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"\x0a\x05a", b"\x0a\x01\xff\x12"])
@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_bytes_that_are_no_message_are_rejected_over_grpc(
    tmp_path: Path, content: bytes, compression: grpc.Compression, caplog: pytest.LogCaptureFixture
) -> None:
    services = ((a2a_pb2.DESCRIPTOR, "1.0"), (a2a_v0_3_pb2.DESCRIPTOR, "0.3"))
    async with running_server(tmp_path) as server:
        for file, version in services:
            [service] = file.services_by_name.values()
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                # The kind of the response does not matter, because there is none.
                rpc: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = server.channel.unary_unary(path)
                with pytest.raises(grpc.aio.AioRpcError) as rejected:
                    await rpc(content, metadata=(("a2a-version", version),), compression=compression)
                assert rejected.value.code() == grpc.StatusCode.INVALID_ARGUMENT, path
                assert method.input_type.full_name in str(rejected.value.details())
        assert "Traceback" not in caplog.text
        assert server.executor.owners == []


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_internal_error_does_not_leak_its_text(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from codex_workspace.server.handler import IdempotentHandler

    async def broken(*_arguments: object) -> None:
        raise ValueError("the secret is 42")

    monkeypatch.setattr(IdempotentHandler, "on_get_task", broken)
    async with running_server(tmp_path) as server:
        with pytest.raises(A2AError) as card:
            await server.client(transport).get_task(GetTaskRequest(id="x"))
    assert "Internal error; see" in str(card.value)
    assert "42" not in str(card.value)
    assert "the secret is 42" in caplog.text


# --- Ports ---


async def test_a_grpc_port_in_use_is_one_sentence() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"A2A_HOST/A2A_GRPC_PORT: cannot listen on 127.0.0.1 port {port}; "):
            async with bind_grpc("127.0.0.1", port, 1000, 15):
                pass


STUCK_CLIENT: Final = """
import sys, grpc
from a2a.types import Message, Part, SendMessageRequest
from a2a.types.a2a_pb2_grpc import A2AServiceStub
message = Message(message_id="m-1", role="ROLE_USER", parts=[Part(text="wait")])
call = A2AServiceStub(grpc.insecure_channel(sys.argv[1])).SendStreamingMessage(
    SendMessageRequest(message=message), metadata=(("a2a-version", "1.0"),))
next(call)
print("open", flush=True)
next(call)
"""
"""A client that reads one event and waits for the next."""


async def test_a_vanished_grpc_client_releases_its_slot(tmp_path: Path) -> None:
    options = replace(OPTIONS, streams=StreamLimits(total=1))
    async with (
        running_server(tmp_path, options, dead_after_s=4) as server,
        await anyio.open_process([sys.executable, "-c", STUCK_CLIENT, str(server.options.grpc_url)]) as client,
    ):
        assert client.stdout is not None
        assert b"open" in await client.stdout.receive()
        assert not await stream_accepted(server)
        client.send_signal(signal.SIGSTOP)
        await eventually(lambda: stream_accepted(server), poll_s=0.1)
        client.kill()


async def stream_accepted(server: RunningServer) -> bool:
    """Whether one more stream is accepted."""
    call = server.grpc.SendStreamingMessage(request(str(uuid.uuid4())), metadata=(("a2a-version", "1.0"),))
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False
    call.cancel()
    return True


async def test_grpc_stops_despite_an_open_stream(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        call = server.grpc.SendStreamingMessage(request("m-1", "wait"), metadata=(("a2a-version", "1.0"),))
        await call.read()
        start = anyio.current_time()
    assert anyio.current_time() - start < 4
    assert call.cancelled() or call.done()


def empty_parts(count: int) -> bytes:
    """Return a SendMessageRequest of this many empty parts."""
    number = Message.DESCRIPTOR.fields_by_name["parts"].number
    return SendMessageRequest(message=Message.FromString(bytes([number << 3 | 2, 0]) * count)).SerializeToString()


async def test_a_grpc_message_of_countless_fields_is_not_converted(tmp_path: Path) -> None:
    """In memory, six million empty parts take half a gigabyte; gRPC would convert them before authentication."""
    async with running_server(tmp_path, replace(OPTIONS, max_body_bytes=1 << 20)) as server:
        send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = server.channel.unary_unary(
            "/lf.a2a.v1.A2AService/SendMessage"
        )
        for content, why in (
            (empty_parts(MAX_FIELDS + 1), f"the message has more than {MAX_FIELDS} fields"),
            (b"\x0b", "the message has a field of an unknown form"),
            (b"\xff" * 11, "the message ends within a number, or has one that is too large"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=why) as refused:
                await send(content, metadata=(("a2a-version", "1.0"),))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_body_on_a_public_path_is_not_read(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        url = urlsplit(server.options.url)
        for path in ("/healthz", "/readyz", "/.well-known/agent-card.json"):
            async with await anyio.connect_tcp(str(url.hostname), url.port or 80) as stream:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                await stream.send(f"{head}Content-Length: 1000000\r\n\r\n[".encode())
                with anyio.fail_after(HANG_S):
                    assert b" 405 " in await stream.receive()
