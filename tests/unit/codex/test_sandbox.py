"""What is said of codex's sandbox: a codex in memory where it answers oddly, the real one for what commands may do."""

import os
from pathlib import Path

import anyio
import pytest

from codex_workspace.agent import launch_of
from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.codex.sandbox import SandboxReport, check_sandbox, digest, inspect_sandbox, run, sandbox_error
from codex_workspace.common.errors import CodexCannotStart, ProtocolError
from codex_workspace.common.values import JsonValue
from codex_workspace.config.codex_toml import prepare_codex_home
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import choose_provider
from tests.e2e.agent_process import AgentSetup
from tests.support.memory_codex import memory_codex, params_of


def ran(exit_code: int, said: str = "") -> JsonValue:
    """Return what codex answers when a command has ended."""
    return {"exitCode": exit_code, "stdout": "", "stderr": said}


async def test_a_sandbox_in_which_a_command_ends_well_is_fine() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        tasks.start_soon(codex.answer, "command/exec", ran(0))
        await check_sandbox(codex.connection, "workspace-write", Path("/somewhere"))


async def test_a_sandbox_with_a_failing_command_is_rejected_with_the_remedies() -> None:
    said = "\nbwrap: No permissions to create a new namespace.\nand more\n"
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        tasks.start_soon(codex.answer, "command/exec", ran(1, said))
        with pytest.raises(CodexCannotStart) as raised:
            await check_sandbox(codex.connection, "workspace-write", Path("/somewhere"))
    sentence = str(raised.value)
    assert sentence == str(sandbox_error("workspace-write", "bwrap: No permissions to create a new namespace"))
    for word in ("codex.sandbox: workspace-write", "bwrap: No permissions", "seccomp=", "codex.sandbox to container"):
        assert word in sentence


async def test_a_command_that_codex_does_not_run_at_all_counts_as_blocked() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        async def refuse() -> None:
            await codex.refuse(await codex.read("command/exec"), -32600, "failed to run it")

        tasks.start_soon(refuse)
        with pytest.raises(CodexCannotStart, match="failed to run it"):
            await check_sandbox(codex.connection, "read-only", Path("/somewhere"))


@pytest.mark.parametrize("mode", ["container", "danger-full-access"])
async def test_without_a_sandbox_nothing_is_probed(mode: str) -> None:
    async with memory_codex() as codex:
        await check_sandbox(codex.connection, mode, Path("/somewhere"))
        assert codex.unread == []


@pytest.mark.parametrize("answer", [None, {}, {"exitCode": "0", "stdout": "", "stderr": ""}, {"exitCode": 0}])
async def test_an_answer_of_unknown_shape_is_reported(answer: JsonValue) -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        tasks.start_soon(codex.answer, "command/exec", answer)
        with pytest.raises(ProtocolError, match="command/exec without"):
            await run(codex.connection, ["true"], Path("/somewhere"))


async def test_the_command_runs_in_the_folder_that_is_named() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        async def answer() -> None:
            request = await codex.read("command/exec")
            assert params_of(request)["cwd"] == "/somewhere"
            await codex.reply(request, {"exitCode": 3, "stdout": "a", "stderr": "b"})

        tasks.start_soon(answer)
        assert (await run(codex.connection, ["true"], Path("/somewhere"))).exit_code == 3


def test_a_secret_is_found_by_its_digest() -> None:
    sight = SandboxReport(frozenset(), frozenset(), reaches_network=False, values={7: frozenset((digest("s3cret"),))})
    assert sight.holders_of(["other"]) == []
    assert sight.holders_of(["other", "s3cret"]) == [7]


# --- The real codex ---


async def seen_with(tmp_path: Path, **codex: object) -> SandboxReport:
    """Let the real codex run the command that looks around, with these settings."""
    setup = AgentSetup(tmp_path, "http://127.0.0.1:1/v1", codex=codex)
    env = setup.prepare()
    settings = load_settings(env)
    provider = choose_provider(settings, env)
    prepare_codex_home(settings, provider)
    folders = [setup.workspace, tmp_path / "config", tmp_path / "state"]
    async with open_app_server(launch_of(settings, provider, env)) as connection:
        await check_sandbox(connection, settings.config.codex.sandbox, settings.workspace_dir)
        return await _look(connection, setup, folders)


async def _look(connection: Connection, setup: AgentSetup, folders: list[Path]) -> SandboxReport:
    before = {path: path.stat().st_mtime_ns for path in setup.workspace.rglob("*")}
    sight = await inspect_sandbox(connection, setup.workspace, folders)
    assert {path: path.stat().st_mtime_ns for path in setup.workspace.rglob("*")} == before
    return sight


async def test_permissions_of_a_command_in_each_mode(tmp_path: Path) -> None:
    workspace, own = tmp_path / "workspace", os.getpid()
    sight = await seen_with(tmp_path, sandbox="workspace-write")
    assert workspace in sight.writable
    assert not sight.reaches_network
    assert own not in sight.values, "a sandbox has processes of its own"

    sight = await seen_with(tmp_path, sandbox="workspace-write", network_access=True)
    assert sight.reaches_network

    sight = await seen_with(tmp_path, sandbox="read-only")
    assert workspace in sight.readable
    assert sight.writable == frozenset()

    sight = await seen_with(tmp_path, sandbox="container")
    assert {workspace, tmp_path / "state"} <= sight.writable
    assert sight.reaches_network
