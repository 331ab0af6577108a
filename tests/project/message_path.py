"""Prints the modules that a plain second message runs through.

`python -m tests.project.message_path` serves the agent in this process with the scripted model, sends two messages in
one context, and records which modules of the package run functions between the second request and its answer.
"""

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Final

import anyio
import httpx

from codex_workspace.cli.serve import serve
from codex_workspace.config.loading import load_settings
from codex_workspace.devkit.model import scripted_model
from tests.e2e.agent_process import AgentSetup
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.waiting import eventually

PACKAGE: Final = str(ROOT / "codex_workspace") + os.sep
DEVKIT: Final = PACKAGE + "devkit"


class Recorder:
    """Records the files of the package whose functions are called, in the order of their first call."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Count a call; installed with `sys.setprofile`."""
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and not file.startswith(DEVKIT):
            self.calls[file] = self.calls.get(file, 0) + 1

    @property
    def modules(self) -> list[str]:
        """The modules' names."""
        return [file.removeprefix(PACKAGE).removesuffix(".py").replace(os.sep, ".") for file in self.calls]


def message(message_id: str) -> dict[str, object]:
    """Return the JSON-RPC request that sends one text in the context `path`."""
    parts = [{"text": "hello"}]
    content = {"role": "ROLE_USER", "messageId": message_id, "contextId": "path", "parts": parts}
    return {"jsonrpc": "2.0", "id": message_id, "method": "SendMessage", "params": {"message": content}}


async def modules_of_second_message(root: Path) -> list[str]:
    """Return the modules that run for a plain second message."""
    recorder, port = Recorder(), free_port()
    async with scripted_model() as model, anyio.create_task_group() as tasks:
        env = AgentSetup(root, model.base_url, port=port).prepare()
        tasks.start_soon(serve, load_settings(env), env)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await eventually(lambda: _is_ready(client))
            headers = {"A2A-Version": "1.0"}
            (await client.post("/", json=message("first"), headers=headers)).raise_for_status()
            threading.setprofile(recorder)
            sys.setprofile(recorder)
            answer = await client.post("/", json=message("second"), headers=headers)
            sys.setprofile(None)
            threading.setprofile(None)
            assert "TASK_STATE_COMPLETED" in answer.text, answer.text
        os.kill(os.getpid(), signal.SIGTERM)
    return recorder.modules


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).is_success
    except httpx.ConnectError:
        return False


def main() -> None:
    """Print one module per line."""
    with tempfile.TemporaryDirectory() as root:
        sys.stdout.write("\n".join([*anyio.run(modules_of_second_message, Path(root)), ""]))


if __name__ == "__main__":
    main()
