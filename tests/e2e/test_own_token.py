"""The token that the agent generates if it is started on a terminal, beyond loopback and without A2A_TOKEN."""

import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import pytest
from a2a.utils.constants import TransportProtocol

from codex_workspace.common.a2a_terms import TERMINAL
from tests.docs.test_docs import path_with_curl
from tests.e2e.agent_process import AgentSetup, running_agent
from tests.e2e.client import peer, request, script
from tests.matrix.clients import own_client
from tests.support.terminal import OnTerminal, on_terminal
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.slow


@pytest.fixture
def setup(setup: AgentSetup) -> AgentSetup:
    return replace(setup, environment={"A2A_HOST": "0.0.0.0", "A2A_GRPC_PORT": "0", "LOG_FORMAT": "json"})


def serving(setup: AgentSetup, *options: str) -> AbstractAsyncContextManager[OnTerminal]:
    """Start the agent on a terminal, and wait until it has shown a token."""
    words = [sys.executable, "-m", "codex_workspace", "serve", *options]
    return on_terminal(words, setup.prepare(), setup.root)


async def status_of(url: str, token: str | None) -> int:
    headers = {"A2A-Version": "1.0"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        return (await http.get("/tasks")).status_code


async def test_the_token_is_shown_once_and_accepted_after_a_restart(setup: AgentSetup) -> None:
    async with serving(setup) as first:
        assert [await status_of(first.url, token) for token in (first.token, None, "x" * 43)] == [200, 401, 401]
        files = [file for file in setup.root.rglob("*") if file.is_file()]
        assert [file for file in files if first.token.encode() in file.read_bytes()] == []
        async with peer(first.url, first.token) as client:
            told = await client.ask(script({"run": "env; cat ../state/*.sha256"}, {"say": f"It is {first.token}."}))
        assert told.answer == "It is ***."
        assert first.token not in str(told.notes)
    # The log is what the terminal shows beside the message about the token.
    logged = [line for line in first.shown.splitlines() if line.startswith("{")]
    assert len(logged) > 1
    assert first.token not in "".join(logged)
    async with running_agent(setup) as again:
        assert await status_of(again.url, first.token) == 200
        assert await status_of(again.url, None) == 401
    assert "the token of an earlier start is valid; `serve --rotate-token` on a terminal replaces it" in (
        setup.log.read_text()
    )
    async with serving(setup, "--rotate-token") as rotated:
        assert rotated.token != first.token
        assert await status_of(rotated.url, rotated.token) == 200
        assert await status_of(rotated.url, first.token) == 401


async def test_the_shown_commands_work(setup: AgentSetup, tmp_path: Path) -> None:
    async with serving(setup) as agent:
        python = f"{sys.executable} -m codex_workspace chat -m Hello"
        commands = agent.commands.replace("codex-workspace chat", python)
        env = {"PATH": path_with_curl(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": setup.prepare()["PYTHONPATH"]}
        with anyio.fail_after(HANG_S):
            ran = await anyio.run_process(["sh", "-ec", commands], env=env, cwd=tmp_path)
    assert b'"TASK_STATE_' in ran.stdout
    assert b"You said: Hello" in ran.stdout


@pytest.mark.parametrize("transport", [each.value for each in TransportProtocol])
async def test_a_generated_token_is_valid_on_every_transport(setup: AgentSetup, transport: str) -> None:
    async with serving(setup) as agent, own_client(transport, agent.url, agent.token) as client:
        (event,) = [each async for each in client.send(request("Hello"))]
        assert event.task.status.state in TERMINAL


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        ([], {}, "A2A_TOKEN: is missing"),
        (["--rotate-token"], {}, "serve --rotate-token: needs a terminal"),
        (["--rotate-token"], {"A2A_TOKEN": "t" * 20}, "serve --rotate-token: needs a terminal"),
    ],
)
async def test_without_a_terminal_no_token_is_generated(
    setup: AgentSetup, options: list[str], environment: dict[str, str], sentence: str
) -> None:
    text = setup.prepare() | {"LOG_FORMAT": "text"}
    with anyio.fail_after(HANG_S):
        ran = await anyio.run_process(
            [sys.executable, "-m", "codex_workspace", "serve", *options], env=text | environment, check=False
        )
    assert ran.returncode == 2
    assert sentence in ran.stderr.decode()
    assert len(ran.stderr.decode().strip().splitlines()) == 1
    assert list((setup.root / "state").iterdir()) == []
