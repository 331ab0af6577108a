"""The start of `serve`: what it imports, and that codex starts early but never for a configuration that is wrong.

Covers `launching`.
"""

import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import psutil
import pytest

from codex_workspace.common.files import lock_folder
from tests.e2e.agent_process import AgentSetup, running_agent
from tests.e2e.test_exec_process import binary
from tests.support.waiting import HANG_S

UNUSED = ("culsans", "aiologic", "grpc", "trio", "rich", "httpx._main", "opentelemetry", "mcp")


def recording_codex(folder: Path) -> tuple[str, Callable[[], list[int]]]:
    """Return a codex that records its process ID, and a function that returns those of all its processes."""
    program, record = folder / "recording-codex", folder / "codexes"
    program.write_text(f'#!/bin/sh\necho $$ >>"{record}"\nexec "{binary()}" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program), lambda: [int(line) for line in record.read_text().split()] if record.exists() else []


async def failed_start(setup: AgentSetup, **environment: str) -> str:
    """Start the agent, which must exit with code 2, and return the last line of its log."""
    command = [sys.executable, "-m", "codex_workspace", "serve"]
    with anyio.fail_after(HANG_S):
        done = await anyio.run_process(command, env=setup.prepare() | environment, check=False)
    assert done.returncode == 2, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return done.stderr.decode().splitlines()[-1]


def broken_database(setup: AgentSetup) -> dict[str, str]:
    """Return the setting of a database that is found to be damaged when it is opened."""
    return {"DATABASE_URL": f"sqlite:///{setup.root}/config/config.yaml"}


async def test_a_start_that_fails_later_leaves_no_codex(setup: AgentSetup) -> None:
    codex, started = recording_codex(setup.root)
    assert "database" in (await failed_start(setup, CODEX_BIN=codex, **broken_database(setup))).lower()
    assert len(started()) == 1
    assert not [process for process in started() if psutil.pid_exists(process)]


async def test_codex_exec_is_not_started_early(setup: AgentSetup) -> None:
    codex, started = recording_codex(setup.root)
    await failed_start(replace(setup, backend="exec"), CODEX_BIN=codex, **broken_database(setup))
    assert started() == []


@pytest.mark.parametrize(
    ("config", "environment", "word"),
    [
        ({"name": 5}, {}, "name"),
        ({}, {"SCRIPTED_KEY": ""}, "SCRIPTED_KEY"),
        ({}, {"SCRIPTED_KEY": "short"}, "SCRIPTED_KEY"),
        ({}, {"A2A_PORT": "{taken}"}, "A2A_PORT"),
        ({}, {"A2A_GRPC_PORT": "{taken}"}, "A2A_GRPC_PORT"),
        ({"a2a": {"protocol_versions": ["1.0"], "signing_key_file": "none.pem"}}, {}, "signing_key_file"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
async def test_a_wrong_configuration_starts_no_codex(
    setup: AgentSetup, config: dict[str, object], environment: dict[str, str], word: str
) -> None:
    codex, started = recording_codex(setup.root)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {name: value.format(taken=taken.getsockname()[1]) for name, value in environment.items()}
        assert word in await failed_start(replace(setup, config=config), CODEX_BIN=codex, **given)
    assert started() == []


async def test_a_second_agent_of_a_state_folder_starts_no_codex(setup: AgentSetup) -> None:
    codex, started = recording_codex(setup.root)
    setup.prepare()
    async with lock_folder(setup.root / "state"):
        assert "another agent uses" in await failed_start(setup, CODEX_BIN=codex)
    assert started() == []


async def test_serve_imports_only_what_it_uses(setup: AgentSetup) -> None:
    async with running_agent(setup, ("tests.e2e.listing_agent",)):
        pass
    [line] = [line for line in setup.log.read_text().splitlines() if line.startswith("imported:")]
    imported = set(line.split())
    assert "a2a.server.request_handlers" in imported
    assert imported.isdisjoint(UNUSED)
