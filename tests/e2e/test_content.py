"""Content of messages and handed-over files: images, files and data, incoming and outgoing."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from a2a.types import GetTaskRequest, Part, Task, TaskState
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.model_requests import Message as Said
from codex_workspace.devkit.model_requests import Output
from codex_workspace.tasks.files import FOLDER, write
from codex_workspace.tasks.parts import Attachment
from tests.e2e.agent_process import AgentProcess, AgentSetup, running_agent
from tests.e2e.client import Peer, Seen, peer, request, script
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

COMPLETED, REJECTED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_REJECTED


def png() -> bytes:
    """Return a red PNG image of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = (1).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


async def send(client: Peer, *parts: Part, context_id: str = "ctx") -> Seen:
    sent = request("", context_id)
    del sent.message.parts[:]
    sent.message.parts.extend(parts)
    seen = Seen()
    async for event in client.streaming.send_message(sent):
        seen.take(event)
    return seen


def last_user_message(model: ScriptedModel) -> Said:
    """Return the last user message of the model's last call."""
    message = model.requests[-1].last_user_message
    assert message is not None
    return message


async def task(client: Peer, seen: Seen) -> Task:
    return await client.blocking.get_task(GetTaskRequest(id=seen.task_id))


@pytest.mark.versions
@pytest.mark.parametrize("declared", ["image/png", ""])
async def test_an_image_reaches_the_model(client: Peer, model: ScriptedModel, declared: str) -> None:
    seen = await send(client, Part(text="What is this?"), Part(raw=png(), media_type=declared, filename="dot.png"))
    assert seen.state == COMPLETED
    (url,) = last_user_message(model).images
    assert url.startswith("data:image/png;base64,")
    assert "What is this?" in last_user_message(model).text


async def test_small_files_and_data_become_turn_input(client: Peer, model: ScriptedModel) -> None:
    data = ParseDict({"port": 8080, "ratio": 0.5}, Value())
    table = Part(raw=b"a,b\n1,2\n", media_type="text/csv", filename="table.csv")
    assert (await send(client, Part(text="Look:"), table, Part(data=data))).state == COMPLETED
    received = last_user_message(model).text
    assert "table.csv (text/csv)" in received
    assert "a,b\n1,2\n" in received
    assert '"port": 8080' in received


async def test_a_large_file_is_stored_where_commands_can_read_it(
    client: Peer, model: ScriptedModel, setup: AgentSetup
) -> None:
    content = b"line\n" * 20_000
    count = script({"run": "wc -l .a2a/*/big.log"}, {"say": "Counted."})
    seen = await send(client, Part(raw=content, media_type="text/plain", filename="../big.log"), Part(text=count))
    assert (seen.state, seen.answer) == (COMPLETED, "Counted.")
    (laid,) = (setup.workspace / ".a2a").glob("*/big.log")
    assert laid.read_bytes() == content
    assert f".a2a/{laid.parent.name}/big.log (text/plain, 100000 bytes)" in last_user_message(model).text
    assert any("20000 .a2a/" in item.text for item in model.requests[-1].input if isinstance(item, Output))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            Part(raw=b"GIF89a", media_type="image/png"),
            "Part 1 has the media type image/png, but its bytes are image/gif",
        ),
        (Part(raw=b"\xff\xfe", media_type="text/plain"), "its bytes are not UTF-8 text"),
        (Part(url="http://127.0.0.1:9/a.png"), "cannot be fetched: its host is not public"),
    ],
)
async def test_unsupported_content_is_rejected_with_a_reason(client: Peer, part: Part, words: str) -> None:
    seen = await send(client, part)
    assert (seen.state, words in seen.sentence) == (REJECTED, True), seen.sentence


@pytest.mark.versions
async def test_a_requested_file_becomes_an_artifact(client: Peer, setup: AgentSetup) -> None:
    hand = {"name": "hand_over_file", "arguments": {"path": "out/report.txt", "name": "Report.txt"}}
    steps = script({"run": "mkdir out && printf 'all well' > out/report.txt"}, {"tool": hand}, {"say": "Here it is."})
    seen = await client.ask(steps, "ctx")
    assert (seen.state, seen.answer) == (COMPLETED, "Here it is.")
    (file,) = [each for each in (await task(client, seen)).artifacts if each.artifact_id == "file-1"]
    (part,) = file.parts
    assert (file.name, part.raw, part.media_type, part.filename) == (
        "Report.txt",
        b"all well",
        "text/plain",
        "Report.txt",
    )


async def test_a_file_outside_the_workspace_is_not_sent(client: Peer, model: ScriptedModel, setup: AgentSetup) -> None:
    (setup.root / "secret.txt").write_text("secret")
    (setup.workspace / "link").symlink_to(setup.root / "secret.txt")
    calls = [{"name": "hand_over_file", "arguments": {"path": path}} for path in ("../secret.txt", "link", "nothing")]
    seen = await client.ask(script({"tool": calls}, {"say": "No."}), "ctx")
    assert seen.state == COMPLETED
    received = [item.text for item in model.requests[-1].input if isinstance(item, Output)]
    assert sum("inside the workspace" in text for text in received) == 2
    assert sum("no such file" in text for text in received) == 1
    assert [each.artifact_id for each in (await task(client, seen)).artifacts] == ["answer"]


@pytest.mark.versions
async def test_the_tool_survives_a_restart_of_codex(client: Peer, agent: AgentProcess, setup: AgentSetup) -> None:
    (setup.workspace / "note.txt").write_text("kept")
    await client.ask("hello", "ctx")
    agent.codex().kill()
    hand = {"name": "hand_over_file", "arguments": {"path": "note.txt"}}
    seen = await client.ask(script({"tool": hand}, {"say": "Here."}), "ctx")
    assert any(each.artifact_id == "file-1" for each in (await task(client, seen)).artifacts)


@pytest.mark.parametrize("name", ["dot.png", "dot?size=1"])
async def test_an_image_url_is_fetched_if_the_operator_allows_it(
    setup: AgentSetup, model: ScriptedModel, tmp_path: Path, name: str
) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / name.partition("?")[0]).write_bytes(png())
    with file_server(tmp_path / "web") as url:
        allowing = replace(setup, push={"allow": ["127.0.0.1"]})
        async with running_agent(allowing) as agent, peer(agent.url) as client:
            seen = await send(client, Part(text="Look:"), Part(url=f"{url}/{name}", media_type="image/png"))
            assert seen.state == COMPLETED
            (image,) = last_user_message(model).images
            assert image.startswith("data:image/png;base64,")
            missing = await send(client, Part(url=f"{url}/none.png"))
            assert (missing.state, "cannot be fetched: HTTP 404" in missing.sentence) == (REJECTED, True)
            (tmp_path / "web" / "text.png").write_text("no image")
            other = await send(client, Part(url=f"{url}/text.png"))
            assert (other.state, "not a known image format" in other.sentence) == (REJECTED, True)


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP and return its URL."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_files_of_old_messages_are_removed_from_the_workspace(setup: AgentSetup) -> None:
    setup.prepare()
    write(setup.workspace, "long-ago", [Attachment("a.txt", "text/plain", b"a")])
    write(setup.workspace, "today", [Attachment("a.txt", "text/plain", b"a")])
    folder = setup.workspace / FOLDER
    os.utime(folder / "long-ago", (0, 0))
    async with running_agent(setup):
        await eventually(lambda: not (folder / "long-ago").exists())
        assert (folder / "today").exists()
