"""Tests of `runtimes/__init__.py`: both runtimes report the same run alike, with the real codex.

Covers `codex.runtime`.
"""

import ast
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from codex_workspace.codex.runtime import AppServerRun
from codex_workspace.common.errors import ConfigError
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.runtimes import GROUP, Run, Runtime, create_runtime
from codex_workspace.runtimes.cli_run import CliRun
from codex_workspace.runtimes.events import AgentEvent, Done, FileChange, ToolResult, ToolUse
from codex_workspace.runtimes.launch import Launch, RunOptions
from tests.docs.test_docs import the_snippet
from tests.e2e.agent_process import REPOSITORY
from tests.e2e.test_exec_process import (
    ADD,
    KEY,
    TOKEN,
    UNSANDBOXED,
    events_of_type,
    last_event,
    launch,
    model,
    probe,
    remaining_processes,
    script,
)
from tests.support.waiting import HANG_S

__all__ = ["launch", "model"]

pytestmark = [pytest.mark.versions, pytest.mark.slow]

NAMES = ("codex", "codex-exec")


async def events_of(runtime: Runtime, prompt: str, options: RunOptions = UNSANDBOXED) -> list[AgentEvent]:
    """Run a prompt and return all its events."""
    with anyio.fail_after(HANG_S):
        async with runtime.run(prompt, options) as run:
            return [event async for event in run]


@pytest.mark.parametrize("name", [*NAMES, "Codex", "CODEX-Exec"])
async def test_a_runtime_created_by_name_remembers_a_session(launch: Launch, name: str) -> None:
    async with create_runtime(name, launch) as runtime:
        first = last_event(await events_of(runtime, script({"say": "The word is basalt."})))
        second = last_event(
            await events_of(runtime, script({"repeat": True}), replace(UNSANDBOXED, resume=first.session_id))
        )
    assert (first.text, first.stop_reason) == ("The word is basalt.", "completed")
    assert "The word is basalt." in second.text
    assert first.session_id == second.session_id
    assert first.usage is not None
    assert second.usage is not None
    assert remaining_processes(launch) == []


async def test_both_runtimes_emit_the_same_events(launch: Launch) -> None:
    runs: list[list[AgentEvent]] = []
    for name in NAMES:
        prompt = script({"say": "I look.", "run": "echo hi"}, {"run": "exit 3"}, {"patch": ADD}, {"say": "Changed."})
        async with create_runtime(name, launch) as runtime:
            runs.append(await events_of(runtime, prompt))
        (launch.cwd / "a.txt").unlink()
    app_server, exec_ = runs
    assert comparable(app_server) == comparable(exec_)
    assert [use.name for use in events_of_type(ToolUse, exec_)] == ["Bash", "Bash", "Write"]
    assert last_event(app_server).usage is not None


def session_of(run: Run) -> str:
    """Return the ID of a run's session."""
    assert isinstance(run, AppServerRun | CliRun)
    assert run.session_id is not None
    return run.session_id


def comparable(events: Sequence[AgentEvent]) -> list[object]:
    """Return the parts of the events that are equal in every run."""
    return [
        [use.name for use in events_of_type(ToolUse, events)],
        [(result.exit_code, result.is_error) for result in events_of_type(ToolResult, events)],
        [
            [(Path(each.path).name, each.kind) for each in change.changes]
            for change in events_of_type(FileChange, events)
        ],
        last_event(events).text,
        last_event(events).stop_reason,
    ]


@pytest.mark.parametrize("name", NAMES)
async def test_a_run_is_aborted(launch: Launch, name: str) -> None:
    async with create_runtime(name, launch) as runtime:
        async with runtime.run(script({"run": "sleep 600"}), UNSANDBOXED) as run:
            events = []
            async for event in run:
                events.append(event)
                if isinstance(event, ToolUse):
                    run.abort()
        assert last_event(events).stop_reason == "interrupted"
        ephemeral = replace(UNSANDBOXED, ephemeral=True)
        assert last_event(await events_of(runtime, script({"say": "Again."}), ephemeral)).text == "Again."
    assert remaining_processes(launch) == []
    # The file of the first run; the second one was ephemeral.
    assert len(list(launch.codex_home.rglob("rollout-*"))) == 1


@pytest.mark.parametrize("name", NAMES)
async def test_a_new_session_is_serialized_too(launch: Launch, name: str) -> None:
    async with create_runtime(name, launch) as runtime, anyio.create_task_group() as tasks:
        ends: list[str] = []

        async def resume(session: str) -> None:
            ends.append(
                last_event(
                    await events_of(runtime, script({"say": "second"}), replace(UNSANDBOXED, resume=session))
                ).text
            )

        async with runtime.run(script({"run": "sleep 1"}, {"say": "first"}), UNSANDBOXED) as run:
            async for event in run:
                if isinstance(event, ToolUse):
                    tasks.start_soon(resume, session_of(run))
                if isinstance(event, Done):
                    ends.append(event.text)
    assert ends == ["first", "second"]


@pytest.mark.parametrize("name", NAMES)
async def test_silence_times_out_a_run(launch: Launch, name: str) -> None:
    async with create_runtime(name, launch, inactivity_s=1.0) as runtime:
        done = last_event(await events_of(runtime, script({"run": "sleep 600"})))
    assert done.error is not None
    assert done.error.code == "WATCHDOG_TIMEOUT"


@pytest.mark.parametrize("name", NAMES)
async def test_a_failure_is_the_last_event(launch: Launch, name: str) -> None:
    async with create_runtime(name, launch) as runtime:
        done = last_event(await events_of(runtime, script({"fail": 401})))
    assert done.stop_reason == "failed"
    assert done.error is not None
    assert "401" in done.error.message


@pytest.mark.parametrize("name", NAMES)
async def test_a_missing_session_has_its_own_error_code(launch: Launch, name: str) -> None:
    missing = replace(UNSANDBOXED, resume="01a1fdff-8a53-70f0-a558-000000000000")
    async with create_runtime(name, launch) as runtime:
        done = last_event(await events_of(runtime, "go on", missing))
    assert (done.stop_reason, done.session_id) == ("failed", None)
    assert done.error is not None
    assert done.error.code == "SESSION_NOT_FOUND"
    assert list(launch.codex_home.rglob("rollout-*")) == []


@pytest.mark.parametrize("name", NAMES)
async def test_a_providers_key_variable_reaches_codex_but_no_command(
    launch: Launch, model: ScriptedModel, name: str
) -> None:
    config = launch.codex_home / "config.toml"
    config.write_text(config.read_text().replace("requires_openai_auth = true", 'env_key = "OPENAI_API_KEY"'))
    async with create_runtime(name, launch) as runtime:
        events = await events_of(runtime, script({"run": "env"}, {"say": "Done."}))
    assert last_event(events).text == "Done.", last_event(events).error
    assert {request.authorization for request in model.requests} == {f"Bearer {KEY}"}
    assert KEY not in str(events)


@pytest.mark.parametrize("name", NAMES)
async def test_mcp_servers_work(launch: Launch, name: str) -> None:
    config = (launch.codex_home / "config.toml").read_bytes()
    call = {"tool": {"name": "digest_of", "namespace": "mcp__probe", "arguments": {"variable": "TOKEN"}}}
    async with create_runtime(name, launch, probe({"TOKEN": "${PROBE_TOKEN}"})) as runtime:
        events = await events_of(runtime, script(call, {"say": "Called."}))
    [result] = events_of_type(ToolResult, events)
    assert (len(result.output), result.is_error) == (64, False), result
    assert TOKEN not in str(events)
    assert (launch.codex_home / "config.toml").read_bytes() == config


@pytest.mark.parametrize("name", NAMES)
async def test_the_options_reach_the_model(launch: Launch, model: ScriptedModel, name: str) -> None:
    options = RunOptions(model="gpt-5.4", sandbox="danger-full-access", config={("model_reasoning_effort",): "low"})
    async with create_runtime(name, launch) as runtime:
        await events_of(runtime, "hi", options)
    assert (model.requests[-1].model, model.requests[-1].effort) == ("gpt-5.4", "low")
    assert model.requests[-1].authorization == f"Bearer {KEY}"


@pytest.mark.parametrize("name", ["", "codex_exec", "gemini"])
def test_an_unknown_name_lists_the_known_ones(launch: Launch, name: str) -> None:
    with pytest.raises(ConfigError, match=f"runtime: must be one of codex, codex-exec, but is '{name}'"):
        create_runtime(name, launch)


class NullRuntime:
    """A third-party runtime."""

    @asynccontextmanager
    async def run(self, prompt: str, options: RunOptions = UNSANDBOXED) -> AsyncIterator["NullRuntime"]:
        yield self

    def abort(self) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[AgentEvent]:
        yield Done("nothing", None, 0, None, "completed")


@asynccontextmanager
async def open_null_runtime(launch: Launch, servers: McpServers, inactivity_s: float) -> AsyncIterator[NullRuntime]:
    yield NullRuntime()


@pytest.fixture
def third_party_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with runtimes."""
    info = tmp_path / "site" / "of_others-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\nNothing = {__name__}:open_null_runtime\nbroken = no_such_module:x\nodd = {__name__}:NAMES\n"
        "raising = of_others_raising:x\nspelt = of_others_spelt:x\n"
    )
    (tmp_path / "site" / "of_others_raising.py").write_text("raise RuntimeError('no luck')")
    (tmp_path / "site" / "of_others_spelt.py").write_text("x = (")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


async def test_the_documented_program_runs(launch: Launch) -> None:
    program = the_snippet(REPOSITORY / "docs" / "runtimes.md", "runs with CODEX_BIN")
    environment = {"CODEX_BIN": str(launch.binary), "CODEX_HOME": str(launch.codex_home), "CODEX_API_KEY": KEY}
    output = await anyio.run_process(
        [sys.executable, "-c", program],
        cwd=launch.cwd,
        env={**launch.environment, **environment, "PYTHONPATH": str(REPOSITORY)},
    )
    ends = [
        event for line in output.stdout.decode().splitlines() if (event := ast.literal_eval(line))["type"] == "done"
    ]
    assert [end["text"] for end in ends] == ["You said: Hello", "You said: And again"]
    assert len({end["session_id"] for end in ends}) == 1


@pytest.mark.usefixtures("third_party_package")
async def test_third_party_runtimes_can_be_registered(launch: Launch) -> None:
    async with create_runtime("NOTHING", launch) as runtime:
        assert last_event(await events_of(runtime, "hi")).text == "nothing"


@pytest.mark.usefixtures("third_party_package")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none", "one of codex, codex-exec, broken, nothing, odd, raising, spelt"),
        ("broken", "cannot be loaded: ModuleNotFoundError"),
        ("raising", r"raising \(of_others_raising:x\) cannot be loaded: RuntimeError: no luck"),
        ("spelt", "cannot be loaded: SyntaxError"),
        ("odd", "not a function"),
    ],
)
def test_a_broken_third_party_runtime_is_reported(launch: Launch, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        create_runtime(name, launch)
