"""The oldest and the pinned codex: the agent works with both, and each can resume the other's threads."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from a2a.types import TaskState
from codex_cli_bin import bundled_codex_path  # type: ignore[import-untyped]

from codex_workspace.runtimes.backend import CONTINUE_PROMPT
from tests.e2e.agent_process import REPOSITORY, AgentSetup, running_agent
from tests.e2e.client import peer, script
from tests.e2e.turn_progress import wait_for_text

pytestmark = pytest.mark.slow

OLDEST = REPOSITORY / ".venv-codex-oldest" / "codex_cli_bin" / "bin" / "codex"
"""Installed by `make .venv-codex-oldest/ready`."""

PINNED = Path(bundled_codex_path())
BOTH_ORDERS = pytest.mark.parametrize(
    ("first", "then"), [(OLDEST, PINNED), (PINNED, OLDEST)], ids=["upgrade", "rollback"]
)
REPEAT = script({"repeat": True})


def with_codex(setup: AgentSetup, codex: Path) -> AgentSetup:
    """Return the setup with another codex."""
    return replace(setup, environment={**setup.environment, "CODEX_BIN": str(codex)})


@pytest.mark.parametrize("codex", [OLDEST, PINNED], ids=["oldest", "pinned"])
async def test_the_configured_codex_is_the_one_that_runs(setup: AgentSetup, codex: Path) -> None:
    version = (await anyio.run_process([codex, "--version"])).stdout.decode().split()[-1]
    named = with_codex(setup, codex)
    async with running_agent(named) as agent, peer(agent.url) as client:
        assert (await client.ask("hello")).state == TaskState.TASK_STATE_COMPLETED
        assert agent.codex().exe() == str(codex)
    command = [sys.executable, "-m", "codex_workspace", "doctor", "--json"]
    done = await anyio.run_process(command, env=named.prepare(), cwd=setup.root, check=False)
    (line,) = [check for check in json.loads(done.stdout) if check["check"] == "codex"]
    assert (line["status"], line["finding"]) == (
        "ok",
        f"codex {version} at {codex}; tested versions: 0.158.0 to 0.169.0",
    )


@BOTH_ORDERS
async def test_a_conversation_continues_with_another_version(setup: AgentSetup, first: Path, then: Path) -> None:
    async with running_agent(with_codex(setup, first)) as agent, peer(agent.url) as client:
        await client.ask(script({"run": "echo pear > fruit.txt"}, {"say": "the word is apple"}), "ctx")
    async with running_agent(with_codex(setup, then)) as agent, peer(agent.url) as client:
        seen = await client.ask(REPEAT, "ctx")
        assert "the word is apple" in seen.answer
        assert "notice" not in seen.kinds()
        assert (await client.ask(script({"run": "cat fruit.txt"}, {"say": "read"}), "ctx")).answer == "read"
    async with running_agent(with_codex(setup, first)) as agent, peer(agent.url) as client:
        answer = (await client.ask(REPEAT, "ctx")).answer
        assert ("the word is apple" in answer, "assistant: read" in answer) == (True, True)


@BOTH_ORDERS
async def test_an_interrupted_turn_is_resumed_by_another_version(setup: AgentSetup, first: Path, then: Path) -> None:
    async with running_agent(with_codex(setup, first)) as agent, peer(agent.url) as client:
        started = await client.begin(script({"say": "At work.", "stall": True, "times": 1}), "ctx")
        await wait_for_text(client, started)
        agent.process.kill()
        await agent.ended()
    async with running_agent(with_codex(setup, then)) as agent, peer(agent.url) as client:
        ended = await client.finished(started.task_id)
        assert (ended.state, ended.answer) == (TaskState.TASK_STATE_COMPLETED, f"You said: {CONTINUE_PROMPT}")
