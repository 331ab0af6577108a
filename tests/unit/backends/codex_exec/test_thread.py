"""The session of one context with `codex exec`, without codex."""

import base64
import os
import tempfile
import threading
from pathlib import Path
from typing import NoReturn, cast

import pytest

from codex_workspace.backends.codex_exec.mcp_servers import ExecMcpServers
from codex_workspace.backends.codex_exec.runtime import CodexExec, ProcessCounts
from codex_workspace.backends.codex_exec.thread import ExecThread, ExecThreadOptions
from codex_workspace.backends.codex_exec.turn import FileRequests
from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.app_server_reader import ExpectedServers
from codex_workspace.runtimes.backend import ToolCaller
from codex_workspace.runtimes.launch import Launch, RunOptions
from tests.integration.test_thread import Memory


class NoCodex:
    """Reads the images of a run, and fails to start codex."""

    def __init__(self, folder: Path) -> None:
        self.launch = Launch(folder / "codex", folder, folder, family="a-family")
        self.counts = ProcessCounts()
        self.images: list[bytes] = []

    def run(self, _prompt: str, options: RunOptions, _variables: object) -> NoReturn:
        self.images = [image.read_bytes() for image in options.images]
        raise CodexCannotStart("there is no codex")


def image(data: bytes) -> JsonObject:
    return {"type": "image", "url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}


async def test_images_are_written_outside_of_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[threading.Thread] = []

    def write(path: Path, data: bytes) -> None:
        writers.append(threading.current_thread())
        with path.open("wb") as file:
            file.write(data)

    monkeypatch.setattr(Path, "write_bytes", write)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    codex = NoCodex(tmp_path)
    servers, caller = ExecMcpServers(ExpectedServers()), ToolCaller("owner", "context")
    options = ExecThreadOptions(RunOptions())
    context = ExecThread(cast("CodexExec", codex), Memory(), options, servers, FileRequests(), caller)
    with pytest.raises(CodexCannotStart):
        async with context.turn([image(b"one"), {"type": "text", "text": "look"}, image(b"two")]):
            pass
    assert codex.images == [b"one", b"two"]
    assert len(writers) == 2
    assert threading.current_thread() not in writers
    assert os.listdir(tmp_path) == []
