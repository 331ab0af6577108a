"""Executors of others: found by name, and served by the command line.

Covers `cli.server`.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import httpx
import psutil
import pytest

from codex_workspace.cli.serve import listening
from codex_workspace.cli.server import load_executor, server_options
from codex_workspace.common.errors import ConfigError
from codex_workspace.config.loading import load_settings
from codex_workspace.server.card import agent_card
from tests.conformance.sut import Script
from tests.e2e.agent_process import READY, REPOSITORY

NO_EXECUTOR = dict


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "must be module:factory, but is "),
        ("tests.conformance.sut", "must be module:factory"),
        ("tests.conformance.sut:", "must be module:factory"),
        (":executor", "must be module:factory"),
        ("tests.no_such_module:executor", "cannot be imported: No module named 'tests.no_such_module'"),
        ("tests.conformance.sut:nobody", "has no function nobody"),
        ("tests.conformance.sut:SCENES", "has no function SCENES"),
        ("tests.unit.cli.test_serve:NO_EXECUTOR", "returns a dict, not an AgentExecutor"),
    ],
)
def test_an_unknown_executor_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"--executor: .*{re.escape(sentence)}"):
        load_executor(name)


def test_serve_does_not_import_what_only_chat_needs() -> None:
    program = (
        "import sys; from codex_workspace.__main__ import main; main(['serve'], {'WORKSPACE_CONFIG_PATH': '/nowhere'});"
        "assert 'codex_workspace.common.lean_imports' in sys.modules; assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_a_factory_makes_the_executor() -> None:
    assert isinstance(load_executor("tests.conformance.sut:executor"), Script)


@pytest.mark.parametrize(
    ("a2a", "listed"), [("{}", True), ("{grpc_on_card: false}", False), ("{grpc_url: 'grpc.example.com:443'}", True)]
)
async def test_grpc_may_be_served_without_being_on_the_card(tmp_path: Path, a2a: str, listed: bool) -> None:
    (tmp_path / "config.yaml").write_text(f"name: a\nruntime: codex\nmodel: none\na2a: {a2a}\n")
    env = {"WORKSPACE_CONFIG_PATH": str(tmp_path), "HOME": str(tmp_path), "A2A_PORT": "0", "A2A_GRPC_PORT": "0"}
    settings = load_settings(env)
    async with listening(settings) as place:
        assert place.grpc is not None
        interfaces = agent_card(server_options(settings, place, None)).supported_interfaces
        assert ("GRPC" in {each.protocol_binding for each in interfaces}) == listed


async def test_the_command_line_serves_it_without_codex_and_stops_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "name: sut\nruntime: codex\nmodel: none\nprincipals:\n- name: ada\n  token_env: ADA\n"
    )
    env = {
        "PATH": os.environ["PATH"],
        "WORKSPACE_CONFIG_PATH": str(tmp_path),
        "WORKSPACE_STATE_DIR": str(tmp_path / "state"),
        "WORKSPACE_DIR": str(tmp_path),
        "CODEX_BIN": "/nonexistent",
        "A2A_PORT": "0",
        "A2A_GRPC_PORT": "0",
        "ADA": "a-token",
        "METRICS_TOKEN": "m-token",
    }
    command = [sys.executable, "-m", "codex_workspace", "serve", "--executor", "tests.conformance.sut:executor"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = psutil.Popen(command, cwd=REPOSITORY, env=env, stderr=output)
    try:
        with anyio.fail_after(15):
            while (ready := READY.search(log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                await anyio.sleep(0.02)
        assert re.search(r"gRPC at 127\.0\.0\.1:[1-9]\d+, A2A at", log.read_text())
        async with httpx.AsyncClient(base_url=ready.group(1), headers={"A2A-Version": "1.0"}) as http:
            message = {"messageId": "tck-artifact-text-1", "role": "ROLE_USER", "parts": [{"text": "x"}]}
            assert (await http.post("/message:send", json={"message": message})).status_code == 401
            known = {"Authorization": "Bearer a-token"}
            task = (await http.post("/message:send", json={"message": message}, headers=known)).json()["task"]
            assert task["artifacts"][0]["parts"][0]["text"] == "Generated text content"
            assert (await http.get("/metrics", headers=known)).status_code == 403
            numbers = (await http.get("/metrics", headers={"Authorization": "Bearer m-token"})).text
            assert 'deliveries{state="accepted"}' in numbers
            assert "codex_workspace_codex_" not in numbers
    finally:
        process.send_signal(signal.SIGTERM)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(process.wait)
    assert process.returncode == 0, log.read_text()
    assert "a-token" not in log.read_text()
