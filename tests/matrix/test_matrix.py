"""Every client uses all features of the agent over every transport: the real clients, the real codex."""

import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from a2a.client import A2AClientError
from a2a.compat.v0_3.conversions import to_core_task
from a2a.compat.v0_3.types import Task as OldTask
from a2a.types import (
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    TaskPushNotificationConfig,
    TaskState,
)
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value

from codex_workspace.common.a2a_terms import TERMINAL
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.model_requests import Message as Said
from codex_workspace.devkit.script import numbered_text
from tests.e2e.client import Seen, script
from tests.e2e.test_content import png
from tests.matrix.clients import CANNOT
from tests.matrix.conftest import Scene
from tests.matrix.remote import RemoteError
from tests.support.webhook_server import Received, webhook

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

COMPLETED, CANCELED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_CANCELED
ASKING, REJECTED = TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_REJECTED

WAYS = pytest.mark.parametrize("streaming", [False, True], ids=["blocking", "streaming"])


def message(*parts: Part | str, task_id: str = "", in_pieces: bool = False) -> SendMessageRequest:
    """Return a request with these parts, in its own context or for a task; `in_pieces` wants a growing answer."""
    return SendMessageRequest(
        message=Message(
            role=Role.ROLE_USER,
            message_id=str(uuid.uuid4()),
            task_id=task_id,
            context_id="" if task_id else str(uuid.uuid4()),
            parts=[Part(text=part) if isinstance(part, str) else part for part in parts],
            metadata={"urn:codex-workspace:answer-updates": "pieces"} if in_pieces else None,
        ),
        configuration=SendMessageConfiguration(),
    )


async def seen_of(events: AsyncIterator[StreamResponse], seen: Seen | None = None) -> Seen:
    """Return all events."""
    seen = seen or Seen()
    async for event in events:
        seen.take(event)
    return seen


async def answered(scene: Scene, asked: Seen, part: Part | str, *, streaming: bool) -> Seen:
    """Answer a task's question and return the resulting events."""
    seen = Seen(asked.task_id, asked.context_id, asked.state, artifacts=dict(asked.artifacts))
    return await seen_of(scene.client.send(message(part, task_id=asked.task_id), streaming=streaming), seen)


async def test_blocking(scene: Scene) -> None:
    seen = await seen_of(scene.client.send(message("hello there")))
    assert (seen.state, seen.answer, seen.tasks) == (COMPLETED, "You said: hello there", 1)
    kept = Seen().take_task(await scene.client.get(seen.task_id))
    assert (kept.state, kept.answer, kept.context_id) == (seen.state, seen.answer, seen.context_id)


async def test_streaming(scene: Scene) -> None:
    seen = await seen_of(
        scene.client.send(message(script({"chunks": 100, "delay_ms": 5}), in_pieces=True), streaming=True)
    )
    assert (seen.state, seen.answer) == (COMPLETED, numbered_text(1000))
    assert (seen.tasks, seen.terminals, seen.final_chunks) == (1, 1, 1)
    assert len(seen.answer_updates) > 3


async def test_shown_once(scene: Scene) -> None:
    sent = message(script({"chunks": 60, "delay_ms": 5, "phase": "final_answer"}))
    updates = await answer_updates(scene.client.send(sent, streaming=True))
    by_default = {"python-1.3": "pieces-then-whole", "python-0.3": "whole"} if scene.kind.transport != "GRPC" else {}
    match by_default.get(scene.kind.sdk, "pieces"):
        case "pieces":
            assert "".join(updates) == numbered_text(600)
        case "pieces-then-whole":
            assert numbered_text(600).startswith("".join(updates[:-1]))
            assert updates[-1] == numbered_text(600)
        case _:
            assert updates == [numbered_text(600)]
    sent = message(script({"chunks": 60, "delay_ms": 5, "phase": "final_answer"}), in_pieces=True)
    assert "".join(await answer_updates(scene.client.send(sent, streaming=True))) == numbered_text(600)
    (whole,) = [each.task async for each in scene.client.send(message(script({"chunks": 60})))]
    for task in (whole, await scene.client.get(whole.id)):
        assert [part.text for part in task.artifacts[-1].parts] == [numbered_text(600)]


async def answer_updates(events: AsyncIterator[StreamResponse]) -> list[str]:
    """Return the text of each update of the answer; each has one part."""
    updates = [event.artifact_update.artifact async for event in events if event.HasField("artifact_update")]
    assert all(len(each.parts) == 1 and each.artifact_id == "answer" for each in updates)
    return [each.parts[0].text for each in updates]


async def test_cancel(scene: Scene) -> None:
    seen, canceled = Seen(), Seen()
    beginning = message(script({"say": "I begin.", "stall": True}), in_pieces=True)
    # The text may arrive in several chunks.
    async for event in scene.client.send(beginning, streaming=True):
        if seen.take(event).answer == "I begin." and not canceled.task_id:
            canceled.take_task(await scene.client.cancel(seen.task_id))
    assert seen.answer == "I begin."
    assert seen.state == canceled.state == (await scene.client.get(seen.task_id)).status.state == CANCELED


@contextmanager
def signal(pipe: Path) -> Iterator[Callable[[], None]]:
    """Create a named pipe at which a command waits; the yielded function releases the command."""
    os.mkfifo(pipe)
    # Opened for reading and writing: opening does not block, and data is kept until it is read.
    with open(os.open(pipe, os.O_RDWR), "wb", buffering=0) as end:

        def go() -> None:
            end.write(b"go\n")

        yield go


async def test_subscribe(scene: Scene) -> None:
    with signal(scene.setup.workspace / "go") as go:
        sent = message(script({"run": "read line < go"}, {"say": "Done."}))
        sent.configuration.return_immediately = True
        begun = await seen_of(scene.client.send(sent))
        assert begun.state not in TERMINAL
        seen = Seen()
        async for event in scene.client.subscribe(begun.task_id):
            if event.HasField("task"):
                go()
            seen.take(event)
    assert (seen.task_id, seen.state, seen.answer, seen.tasks) == (begun.task_id, COMPLETED, "Done.", 1)


def outside(scene: Scene) -> Path:
    """Return a new file that sandboxed commands cannot write."""
    return scene.setup.root / f"{uuid.uuid4()}.txt"


def exists(file: Path) -> bool:
    return file.exists()


async def ask_for_approval(scene: Scene, file: Path, *, streaming: bool) -> Seen:
    """Let the model request to create a file outside the sandbox."""
    wish = script({"run": f"echo made > {file}", "escalate": True}, {"say": "So be it."})
    seen = await seen_of(scene.client.send(message(wish), streaming=streaming))
    assert seen.state == ASKING
    assert f"echo made > {file}" in seen.sentence
    assert seen.question["kind"] == "command"
    assert not exists(file)
    return seen


@WAYS
async def test_approval_yes(scene: Scene, streaming: bool) -> None:
    file = outside(scene)
    seen = await ask_for_approval(scene, file, streaming=streaming)
    done = await answered(scene, seen, "Yes, please.", streaming=streaming)
    assert (done.state, done.answer) == (COMPLETED, "So be it.")
    assert file.read_text() == "made\n"


@WAYS
async def test_approval_no(scene: Scene, streaming: bool) -> None:
    file = outside(scene)
    seen = await ask_for_approval(scene, file, streaming=streaming)
    done = await answered(scene, seen, "No, leave it alone.", streaming=streaming)
    assert (done.state, exists(file)) == (COMPLETED, False)
    assert any("leave it alone" in message_.text for message_ in user_messages(scene.model))


async def test_approval_by_data(scene: Scene) -> None:
    file = outside(scene)
    seen = await ask_for_approval(scene, file, streaming=False)
    decision = {"questionId": seen.question["questionId"], "decision": "approve"}
    done = await answered(scene, seen, Part(data=ParseDict(decision, Value())), streaming=False)
    assert (done.state, exists(file)) == (COMPLETED, True)


@WAYS
async def test_context_answer(scene: Scene, streaming: bool) -> None:
    file = outside(scene)
    asked = await ask_for_approval(scene, file, streaming=streaming)
    other, word = message("What is the time?"), message("yes")
    other.message.context_id = word.message.context_id = asked.context_id
    refused = await seen_of(scene.client.send(other, streaming=streaming))
    assert (refused.state, f"taskId {asked.task_id}" in refused.sentence) == (REJECTED, True)
    assert not exists(file)
    assert (await seen_of(scene.client.send(word, streaming=streaming))).state == COMPLETED
    assert exists(file)


def user_messages(model: ScriptedModel) -> list[Said]:
    """Return the user messages of the model's last call."""
    return [each for each in model.requests[-1].input if isinstance(each, Said) and each.role == "user"]


@WAYS
async def test_image_in(scene: Scene, streaming: bool) -> None:
    image = Part(raw=png(), media_type="image/png", filename="dot.png")
    seen = await seen_of(scene.client.send(message("What is this?", image), streaming=streaming))
    assert seen.state == COMPLETED
    message_ = scene.model.requests[-1].last_user_message
    assert message_ is not None
    (url,) = message_.images
    assert url.startswith("data:image/png;base64,")
    assert "What is this?" in message_.text


@WAYS
async def test_file_out(scene: Scene, streaming: bool) -> None:
    (scene.setup.workspace / "dot.png").write_bytes(png())
    hand = {"name": "hand_over_file", "arguments": {"path": "dot.png", "name": "Dot.png"}}
    wish = script({"tool": hand}, {"say": "Here it is."})
    parts = []
    async for event in scene.client.send(message(wish), streaming=streaming):
        artifacts = [event.artifact_update.artifact, *event.task.artifacts]
        parts += [part for each in artifacts if each.artifact_id == "file-1" for part in each.parts]
    (part,) = parts
    assert (part.raw, part.media_type, part.filename) == (png(), "image/png", "Dot.png")


def from_0_3(received: Received) -> StreamResponse:
    """Read a notification of A2A 0.3: a whole task."""
    return StreamResponse(task=to_core_task(OldTask.model_validate_json(received.body)))


async def test_push(scene: Scene) -> None:
    async with webhook() as hook:
        sent = message("hello there")
        config = TaskPushNotificationConfig(url=hook.url, token="a-secret")
        sent.configuration.task_push_notification_config.CopyFrom(config)
        seen = await seen_of(scene.client.send(sent))
        task, number = Seen(), 0
        while task.state not in TERMINAL:
            received = (await hook.heard(number + 1))[number]
            number += 1
            assert received.headers["x-a2a-notification-token"] == "a-secret"
            task.take(from_0_3(received) if scene.kind.is_old else ParseDict(received.payload, StreamResponse()))
    assert task.task_id == seen.task_id
    assert (task.tasks, task.terminals) == ((number, 0) if scene.kind.is_old else (1, 1))
    assert (task.state, task.answer) == (seen.state, seen.answer) == (COMPLETED, "You said: hello there")


async def test_list(scene: Scene) -> None:
    seen = await seen_of(scene.client.send(message("hello there")))
    if words := CANNOT.get((scene.kind.sdk, "list")):
        with pytest.raises(RemoteError, match=words):
            await scene.client.list(seen.context_id)
    else:
        (task,) = await scene.client.list(seen.context_id)
        assert (task.id, task.status.state) == (seen.task_id, COMPLETED)


async def test_token(scene: Scene) -> None:
    asked = len(scene.model.requests)
    async with scene.kind.opened(scene.url, "wrong") as stranger:
        for streaming in (False, True):
            with pytest.raises((A2AClientError, RemoteError), match=r"401|UNAUTHENTICATED|the token is unknown"):
                await seen_of(stranger.send(message("hello there"), streaming=streaming))
    assert len(scene.model.requests) == asked
