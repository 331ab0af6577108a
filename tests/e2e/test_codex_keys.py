"""Each of codex's own keys in config.yaml takes effect in the real codex."""

from dataclasses import replace

import pytest
from a2a.types import TaskState

from codex_workspace.config.codex_toml import update_config
from codex_workspace.devkit.model import ScriptedModel
from tests.e2e.agent_process import AgentSetup, running_agent, spawn
from tests.e2e.client import peer, script

pytestmark = pytest.mark.slow

# The folders of a test are below /tmp, where commands may write by default.
WITHOUT_TMP = "[sandbox_workspace_write] # mine\nexclude_slash_tmp = true\nexclude_tmpdir_env_var = true\n"


def with_runtime(setup: AgentSetup, **keys: object) -> AgentSetup:
    """Return the setup with further keys in `runtime_config`."""
    return replace(setup, config={"runtime_config": {"model": "gpt-5.5", "provider": "scripted", **keys}})


async def test_commands_write_to_writable_folders_only(setup: AgentSetup) -> None:
    setup.prepare()
    for name in ("cache", "other"):
        (setup.root / name).mkdir()
    home = setup.root / "state" / "codex"
    home.mkdir()
    (home / "config.toml").write_text(WITHOUT_TMP)
    setup = replace(setup, codex={"writable_folders": ["../cache"]})
    tries = f"for at in . ../cache {setup.root}/other; do echo hello > $at/file; done"
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert (await client.ask(script({"run": tries}, {"say": "Tried."}))).answer == "Tried."
    written = [name for name in ("workspace", "cache", "other") if (setup.root / name / "file").exists()]
    assert written == ["workspace", "cache"]
    assert WITHOUT_TMP.splitlines()[0] in (home / "config.toml").read_text()


@pytest.mark.parametrize(
    ("codex", "live"),
    [
        ({}, []),
        ({"web_search": "cached"}, [False]),
        ({"web_search": "indexed"}, [True]),
        ({"web_search": "live"}, [True]),
    ],
)
async def test_the_model_gets_web_search_as_configured(
    setup: AgentSetup, model: ScriptedModel, codex: dict[str, object], live: list[bool]
) -> None:
    async with running_agent(replace(setup, codex=codex)) as agent, peer(agent.url) as client:
        assert (await client.ask("hello")).answer == "You said: hello"
    assert [tool.live for tool in model.requests[-1].tools if tool.kind == "web_search"] == live


async def test_the_platforms_timeout_is_the_turns_time_budget(setup: AgentSetup) -> None:
    async with running_agent(with_runtime(setup, timeout=1)) as agent, peer(agent.url) as client:
        seen = await client.ask(script({"chunks": 1000, "delay_ms": 20}))
    assert seen.state == TaskState.TASK_STATE_FAILED
    assert "longer than 1 s" in seen.sentence


async def test_without_a_required_variable_the_agent_does_not_start(setup: AgentSetup) -> None:
    setup = with_runtime(setup, required_env=["SCRIPTED_KEY", "OPENAI_API_KEY", "TICKETS"])
    assert spawn(setup).wait(20) == 2
    log = setup.log.read_text()
    assert "config.yaml: runtime_config.required_env[2]: names the variable TICKETS, which is not set" in log
    async with running_agent(replace(setup, environment={"TICKETS": "t"})) as agent, peer(agent.url) as client:
        assert (await client.ask("hello")).answer == "You said: hello"


async def test_a_second_start_leaves_the_operators_file_unchanged(setup: AgentSetup) -> None:
    setup.prepare()
    home = setup.root / "state" / "codex"
    home.mkdir()
    theirs = b"\xef\xbb\xbf# mine\r\nmodel_verbosity = 'low' # why\r\n[tools]\r\nview_image = true"
    (home / "config.toml").write_bytes(theirs)
    seen = []
    for _ in range(2):
        async with running_agent(setup) as agent, peer(agent.url) as client:
            assert (await client.ask("hello")).answer == "You said: hello"
        file = home / "config.toml"
        seen.append((file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_ino))
    assert seen[0] == seen[1]
    for line in theirs.splitlines():
        assert line in seen[0][0].splitlines()
    update_config(home, {})
    left = (home / "config.toml").read_text()
    assert [line for line in left.splitlines() if line] == theirs.decode().splitlines()


async def test_a_broken_config_toml_is_reported_and_left_unchanged(setup: AgentSetup) -> None:
    setup.prepare()
    file = setup.root / "state" / "codex" / "config.toml"
    file.parent.mkdir()
    file.write_text("[tools]\nview_image = maybe\n")
    assert spawn(setup).wait(20) == 2
    assert f"configuration: {file}: line 2, column 14: Invalid value; the file was not changed" in setup.log.read_text()
    assert file.read_text() == "[tools]\nview_image = maybe\n"
