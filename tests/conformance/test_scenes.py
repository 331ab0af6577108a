"""Earlier findings of the official conformance kit, tested with its executor but without the kit."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from a2a.client import Client
from a2a.types import GetTaskRequest, StreamResponse, Task, TaskState

from tests.conformance.sut import executor
from tests.integration.test_transports import TRANSPORTS, request, running_server, send

pytestmark = pytest.mark.slow


async def first(events: AsyncIterator[StreamResponse]) -> StreamResponse:
    answer, *_ = [event async for event in events]
    return answer


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_answer_may_be_a_bare_message(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path, other=executor()) as server:
        answer = await first(server.client(transport).send_message(request("tck-message-response-1")))
        assert answer.message.parts[0].text == "Direct message response"


PARTS: dict[str, Callable[[Task], bool]] = {
    "tck-artifact-text": lambda task: task.artifacts[0].parts[0].text == "Generated text content",
    "tck-artifact-file": lambda task: task.artifacts[0].parts[0].raw == b"Generated file content",
    "tck-artifact-file-url": lambda task: task.artifacts[0].parts[0].url == "https://example.com/output.txt",
    "tck-artifact-data": lambda task: task.artifacts[0].parts[0].data.struct_value["count"] == 42,
}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_kind_of_part_comes_through(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path, other=executor()) as server:
        for prefix, is_there in PARTS.items():
            assert is_there(await send(server.client(transport), request(f"{prefix}-1"))), prefix


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_follow_up_with_only_a_task_id_continues_its_context(tmp_path: Path, transport: str) -> None:
    async with running_server(tmp_path, other=executor()) as server:
        client = server.client(transport)
        message_request = await send(client, request("tck-input-required-1", "one"))
        assert message_request.status.state == TaskState.TASK_STATE_INPUT_REQUIRED
        for number, text in ((2, "two"), (3, "three")):
            await send(client, request(f"tck-input-required-{number}", text, task_id=message_request.id))
        done = await send(client, request("tck-complete-task-4", "four", task_id=message_request.id))
        assert (done.id, done.context_id) == (message_request.id, message_request.context_id)
        assert done.status.state == TaskState.TASK_STATE_COMPLETED
        answers = await texts(client, message_request.id, None)
        assert [text for text in answers if text in ("one", "two", "three", "four")] == ["one", "two", "three", "four"]
        assert await texts(client, message_request.id, 0) == []
        assert await texts(client, message_request.id, 2) == answers[-2:]


async def texts(client: Client, task_id: str, history_length: int | None) -> list[str]:
    task = await client.get_task(GetTaskRequest(id=task_id, history_length=history_length))
    return [message.parts[0].text for message in task.history]
