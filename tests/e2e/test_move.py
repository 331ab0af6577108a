"""Conversations survive a move of the state folder, of CODEX_HOME and of the workspace, and a restored backup."""

import shutil
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest
from a2a.types import TaskState

from codex_workspace import launching
from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.codex.index import REBUILD_TIMEOUT_S
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import choose_provider
from codex_workspace.runtimes.backend import CONTINUE_PROMPT
from codex_workspace.runtimes.launch import START_TIMEOUT_S, Launch
from tests.e2e.agent_process import AgentSetup, running_agent
from tests.e2e.client import peer, script
from tests.e2e.test_exec_process import binary
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.both_backends

REPEAT = script({"repeat": True})
LOST = "cannot be resumed"
SKILL = "---\nname: fruit\ndescription: Knows fruit.\n---\nSay it.\n"


async def talk(setup: AgentSetup, text: str, context_id: str = "ctx") -> str:
    """Serve, send one message, stop, and return the answer."""
    async with running_agent(setup) as agent, peer(agent.url) as client:
        seen = await client.ask(text, context_id)
        assert seen.state == TaskState.TASK_STATE_COMPLETED
        assert await agent.stop() == 0
    return seen.answer


def indexes(codex_home: Path) -> list[str]:
    """Return the names of codex's indexes that were renamed."""
    return sorted(file.name for file in codex_home.glob("state_*.moved-*") if not file.name.endswith(("-wal", "-shm")))


def at(setup: AgentSetup, **folders: Path) -> AgentSetup:
    """Return the setup with other folders."""
    return replace(setup, environment={**setup.environment, **{name: str(path) for name, path in folders.items()}})


@pytest.mark.versions
async def test_conversations_continue_after_the_state_folder_was_moved(setup: AgentSetup, tmp_path: Path) -> None:
    state, moved = tmp_path / "state", tmp_path / "moved"
    await talk(setup, "the word is apple")
    state.rename(moved)
    there = at(setup, WORKSPACE_STATE_DIR=moved)
    assert "the word is apple" in await talk(there, REPEAT)
    assert LOST not in setup.log.read_text()
    assert len(indexes(moved / "codex")) == 1
    # Later starts find the new index in order, and a move back is the same as a move.
    await talk(there, "the word is pear")
    assert len(indexes(moved / "codex")) == 1
    state.rmdir()
    moved.rename(state)
    answer = await talk(setup, REPEAT)
    assert ("the word is apple" in answer, "the word is pear" in answer) == (True, True)


@pytest.mark.slow
async def test_an_index_that_another_codex_uses_is_not_renamed(setup: AgentSetup, tmp_path: Path) -> None:
    home, moved = tmp_path / "one", tmp_path / "two"
    await talk(at(setup, CODEX_HOME=home), "the word is apple")
    home.rename(moved)
    there = at(setup, CODEX_HOME=moved)
    async with open_app_server(Launch(binary(), moved, tmp_path)) as other:
        command = [sys.executable, "-m", "codex_workspace", "serve"]
        with anyio.fail_after(HANG_S):
            refused = await anyio.run_process(command, env=there.prepare(), check=False)
        assert (refused.returncode, indexes(moved)) == (2, [])
        assert "which was moved, and another codex uses this index; stop that codex" in refused.stderr.decode()
        await other.call("thread/list", {}, timeout_s=HANG_S)
    assert "the word is apple" in await talk(there, REPEAT)
    assert len(indexes(moved)) == 1


def has_ended(codex: Connection) -> bool:
    return codex.error is not None


@pytest.mark.app_server_only
async def test_only_the_first_start_after_a_move_may_take_long(
    setup: AgentSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, moved, timeouts = tmp_path / "state", tmp_path / "moved", list[float]()
    await talk(setup, "the word is apple")
    state.rename(moved)
    env = at(setup, WORKSPACE_STATE_DIR=moved).prepare()
    settings = load_settings(env)

    def opened(launch: Launch) -> AbstractAsyncContextManager[Connection]:
        timeouts.append(launch.start_timeout_s)
        return open_app_server(launch)

    monkeypatch.setattr(launching, "open_app_server", opened)
    async with launching.open_launched(settings, choose_provider(settings, env), env) as launched:
        assert launched.codex is not None
        for _ in range(2):
            await launched.codex.start()
            async with launched.codex.use() as codex:
                codex.kill()
                await eventually(partial(has_ended, codex))
    assert timeouts == [REBUILD_TIMEOUT_S, START_TIMEOUT_S]


@pytest.mark.slow
async def test_everything_may_be_moved(setup: AgentSetup, tmp_path: Path) -> None:
    """State, CODEX_HOME outside of it, workspace, configuration and skills."""
    setup.prepare()
    skill = tmp_path / "config" / "skills" / "fruit"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text(SKILL)
    (tmp_path / "config" / "prompt.md").write_text("Be short.")
    config = {"skills": ["fruit"], "prompt_files": ["prompt.md"]}
    first = at(replace(setup, config=config), CODEX_HOME=tmp_path / "home" / "codex")
    async with running_agent(first) as agent, peer(agent.url) as client:
        before = await client.ask("the word is apple", "ctx")
        assert await agent.stop() == 0
    root = tmp_path / "elsewhere"
    root.mkdir()
    for name in ("state", "home", "workspace", "config"):
        (tmp_path / name).rename(root / name)
    second = at(replace(first, root=root), CODEX_HOME=root / "home" / "codex")
    async with running_agent(second) as agent, peer(agent.url) as client:
        after = await client.ask(REPEAT, "ctx")
        await client.ask(script({"run": "pwd > here"}), "ctx")
        assert (await client.get(before.task_id)).answer == before.answer
        assert await agent.stop() == 0
    assert "the word is apple" in after.answer
    assert (root / "workspace" / "here").read_text().strip() == str(root / "workspace")
    links = list((root / "home" / "codex" / "skills" / "codex-workspace").iterdir())
    assert [link.resolve() for link in links] == [root / "config" / "skills" / "fruit"]
    assert not [name for name in ("state", "home", "workspace") if (tmp_path / name).exists()]


@pytest.mark.slow
async def test_an_interrupted_turn_continues_after_codex_home_was_moved(setup: AgentSetup, tmp_path: Path) -> None:
    home, moved = tmp_path / "one", tmp_path / "two"
    async with running_agent(at(setup, CODEX_HOME=home)) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        running = await client.begin(script({"run": "sleep 60"}, {"repeat": True}), "ctx")
        await eventually(lambda: agent.commands("60"))
        agent.process.kill()
        await agent.ended()
    home.rename(moved)
    async with running_agent(at(setup, CODEX_HOME=moved)) as agent, peer(agent.url) as client:
        ended = await client.finished(running.task_id)
        answer = (await client.ask(REPEAT, "ctx")).answer
        assert await agent.stop() == 0
    assert ended.state == TaskState.TASK_STATE_COMPLETED
    assert ended.answer == f"You said: {CONTINUE_PROMPT}"
    assert "the word is apple" in answer
    assert LOST not in setup.log.read_text()


@pytest.mark.slow
async def test_a_backup_is_restored_in_place_and_beside_the_original(setup: AgentSetup, tmp_path: Path) -> None:
    state, backup, copy = tmp_path / "state", tmp_path / "backup", tmp_path / "copy"
    await talk(setup, "the word is apple")
    shutil.copytree(state, backup, symlinks=True)
    await talk(setup, "the word is pear")
    original = {file: file.read_bytes() for file in (state / "codex" / "sessions").rglob("*.jsonl")}

    # A copy beside the original must not write into the original's conversations.
    shutil.copytree(backup, copy, symlinks=True)
    answer = await talk(at(setup, WORKSPACE_STATE_DIR=copy), REPEAT)
    assert ("the word is apple" in answer, "the word is pear" in answer) == (True, False)
    assert {file: file.read_bytes() for file in original} == original

    # In place, the backup is as it was, without another index.
    shutil.rmtree(state)
    shutil.copytree(backup, state, symlinks=True)
    answer = await talk(setup, REPEAT)
    assert ("the word is apple" in answer, "the word is pear" in answer) == (True, False)
    assert indexes(state / "codex") == []
    assert LOST not in setup.log.read_text()
