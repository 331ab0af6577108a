"""Tests of `backends/codex_exec/runtime.py` with the real codex, its commands, patches and an MCP server."""

import asyncio
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import anyio
import pytest
import tomlkit

from codex_workspace.backends.codex_exec.command import mcp_overrides
from codex_workspace.backends.codex_exec.runtime import CodexExec
from codex_workspace.common.errors import CONFIG_REJECTED, CodexCannotStart, ConfigError, ConfigLocation, InputRefused
from codex_workspace.common.processes import find_marked
from codex_workspace.config.codex_toml import Managed
from codex_workspace.config.environment import Secret
from codex_workspace.config.mcp_servers import McpServer, McpServerEntry, McpServers, resolve
from codex_workspace.devkit.model import ScriptedModel, scripted_model
from codex_workspace.devkit.model_requests import MARKER, Output
from codex_workspace.runtimes.cli_run import RunLimits
from codex_workspace.runtimes.events import AgentEvent, Done, Error, FileChange, RunWarning, Text, ToolResult, ToolUse
from codex_workspace.runtimes.launch import MARK, Launch, RunOptions
from codex_workspace.runtimes.process import end_leftovers
from tests.e2e.agent_process import REPOSITORY
from tests.e2e.test_content import png
from tests.support.waiting import HANG_S, eventually

_T = TypeVar("_T")

pytestmark = [pytest.mark.versions, pytest.mark.with_exec]


KEY = "sk-scripted-0123456789"
TOKEN = "a-token-of-the-probe"
FOREIGN_KEYS = {"ANTHROPIC_API_KEY": "of-anthropic", "GEMINI_API_KEY": "of-google", "GITHUB_TOKEN": "of-github"}
ADD = "*** Begin Patch\n*** Add File: a.txt\n+one\n*** End Patch"
MINIMAL_SERVER = Path(__file__).parent / "minimal_mcp_server.py"
MCP_SERVER = Path(__file__).parent / "mcp_server.py"
UNSANDBOXED = RunOptions(sandbox="danger-full-access")

WITHOUT_TMP: Managed = {
    ("sandbox_workspace_write", "exclude_slash_tmp"): True,
    ("sandbox_workspace_write", "exclude_tmpdir_env_var"): True,
}
"""Settings that keep /tmp read-only in the sandbox: the folders of a test are below it."""
SANDBOXED = RunOptions(sandbox="workspace-write", config=WITHOUT_TMP)


def binary() -> Path:
    """Return the codex to test: `CODEX_BIN`, or the one of the pinned wheel."""
    wheel = importlib.util.find_spec("codex_cli_bin")
    assert wheel is not None
    assert wheel.origin is not None
    return Path(os.environ.get("CODEX_BIN") or Path(wheel.origin).parent / "bin" / "codex")


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    """The scripted model."""
    async with scripted_model() as model:
        yield model


@pytest.fixture
def launch(tmp_path: Path, model: ScriptedModel) -> Launch:
    """Settings that start codex in its own folders."""
    for name in ("home", "codex", "work"):
        (tmp_path / name).mkdir()
    provider = {
        "name": "scripted",
        "base_url": model.base_url,
        "wire_api": "responses",
        "requires_openai_auth": True,
        "request_max_retries": 0,
        "stream_max_retries": 0,
    }
    settings = {"model": "gpt-5.5", "model_provider": "scripted", "model_providers": {"scripted": provider}}
    (tmp_path / "codex" / "config.toml").write_text(tomlkit.dumps(settings))
    return Launch(
        binary=binary(),
        codex_home=tmp_path / "codex",
        cwd=tmp_path / "work",
        environment={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "home"),
            "OPENAI_API_KEY": "unset",
            **FOREIGN_KEYS,
        },
        api_key=KEY,
        family=f"exec-{uuid.uuid4().hex}",
    )


def script(*steps: Mapping[str, object]) -> str:
    """Return a prompt with a script for the model."""
    return f"Do this.\n{MARKER}{json.dumps(steps)}"


async def events_of(codex: CodexExec, prompt: str, options: RunOptions = UNSANDBOXED) -> list[AgentEvent]:
    """Run a prompt and return all its events."""
    with anyio.fail_after(HANG_S):
        async with codex.run(prompt, options) as run:
            return [event async for event in run]


def last_event(events: Sequence[AgentEvent]) -> Done:
    """Return the last event, which is the only `Done`."""
    *before, done = events
    assert isinstance(done, Done)
    assert not any(isinstance(event, Done) for event in before)
    return done


def events_of_type(kind: type[_T], events: Sequence[AgentEvent]) -> list[_T]:
    """Return the events of one type."""
    return [event for event in events if isinstance(event, kind)]


def remaining_processes(launch: Launch) -> list[int]:
    """Return the processes of a launch that are still running."""
    return find_marked(MARK, f"{launch.family}.", or_longer=True)


def environment_of(processes: Sequence[int]) -> str:
    """Return the environments of processes, without those that have ended."""
    found = ""
    for process in processes:
        with suppress(FileNotFoundError):
            found += Path(f"/proc/{process}/environ").read_text()
    return found


async def test_a_session_resumes_and_remembers(launch: Launch, model: ScriptedModel) -> None:
    codex = CodexExec(launch)
    first = last_event(await events_of(codex, script({"say": "The word is basalt."})))
    assert (first.text, first.stop_reason, first.error) == ("The word is basalt.", "completed", None)
    assert first.usage is not None
    assert first.session_id is not None
    events = await events_of(codex, script({"repeat": True}), replace(UNSANDBOXED, resume=first.session_id))
    second = last_event(events)
    assert "The word is basalt." in second.text
    assert second.session_id == first.session_id
    assert second.usage is not None
    # The input of the second call contains the first turn, and little more.
    assert first.usage.input < second.usage.input < first.usage.input * 1.5
    assert {request.authorization for request in model.requests} == {f"Bearer {KEY}"}
    assert remaining_processes(launch) == []


async def test_a_missing_session_starts_no_new_one(launch: Launch) -> None:
    gone = replace(UNSANDBOXED, resume="01a1fdff-8a53-70f0-a558-000000000000")
    done = last_event(await events_of(CodexExec(launch), "go on", gone))
    assert done.stop_reason == "failed"
    assert done.error is not None
    assert "no rollout" in done.error.message or "no session" in done.error.message


@pytest.mark.parametrize("prompt", ["--help", "-", "a\0b", "é\u2028\U0001f600\udc80", "--\n-c x=y", "x" * 400_000])
async def test_a_prompt_is_never_an_option(launch: Launch, model: ScriptedModel, prompt: str) -> None:
    done = last_event(await events_of(CodexExec(launch), prompt))
    assert done.stop_reason == "completed", done.error
    said = model.requests[-1].last_user_message
    assert said is not None
    assert said.text.strip() == prompt.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("prompt", ["", " \n", "x" * 1_048_577])
async def test_a_prompt_over_codexs_limit_starts_no_process(launch: Launch, prompt: str) -> None:
    with pytest.raises(InputRefused, match="The message has"):
        await events_of(CodexExec(replace(launch, binary=Path("/nonexistent"))), prompt)


async def test_commands_and_file_changes_arrive_as_they_happen(launch: Launch) -> None:
    prompt = script({"say": "I look.", "run": "echo hi"}, {"run": "exit 3"}, {"patch": ADD}, {"say": "Changed."})
    events = await events_of(CodexExec(launch), prompt)
    uses, results = events_of_type(ToolUse, events), events_of_type(ToolResult, events)
    assert [use.name for use in uses] == ["Bash", "Bash", "Write"]
    assert [use.id for use in uses] == [result.id for result in results]
    assert [(result.exit_code, result.is_error) for result in results] == [(0, False), (3, True), (None, False)]
    assert results[0].output == "hi\n"
    [change] = events_of_type(FileChange, events)
    assert [(Path(each.path).name, each.kind) for each in change.changes] == [("a.txt", "add")]
    assert (launch.cwd / "a.txt").read_text() == "one\n"
    assert last_event(events).text == "Changed."
    assert [event.text for event in events_of_type(Text, events)] == ["I look.", "Changed."]


async def test_the_options_reach_the_model(launch: Launch, model: ScriptedModel, tmp_path: Path) -> None:
    other = tmp_path / "other, with a comma"
    other.mkdir()
    (other / "red,dot.png").write_bytes(png())
    options = RunOptions(
        model="gpt-5.4",
        full_auto=True,
        cwd=other,
        web_search=True,
        output_schema={
            "type": "object",
            "properties": {"x": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        images=(other / "red,dot.png",),
        config={("model_reasoning_effort",): "low"},
    )
    codex = CodexExec(launch)
    done = last_event(await events_of(codex, script({"say": '{"x": "y"}'}), options))
    assert done.text == '{"x": "y"}', done.error
    request = model.requests[-1]
    assert (request.model, request.effort, request.output_schema) == ("gpt-5.4", "low", options.output_schema)
    assert any(tool.name == "web_search" for tool in request.tools)
    assert str(other) in str(request.input)
    assert request.last_user_message is not None
    assert len(request.last_user_message.images) == 1


async def test_the_folder_of_a_killed_run_is_removed_at_the_next_start(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = (
        "import asyncio, os, pathlib, sys; from codex_workspace.runtimes import Launch, RunOptions, create_runtime\n"
        "async def main():\n"
        "    binary, home, family = sys.argv[1:]\n"
        "    launch = Launch(pathlib.Path(binary), pathlib.Path(home), pathlib.Path(home), family=family)\n"
        "    async with create_runtime('codex-exec', launch) as runtime:\n"
        "        async with runtime.run('hi', RunOptions(output_schema={'type': 'object'})):\n"
        "            os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    words = [str(launch.binary), str(launch.codex_home), launch.family]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    await anyio.run_process([sys.executable, "-c", code, *words], check=False, cwd=REPOSITORY, env=environment)
    assert len(list(temporary.iterdir())) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    await end_leftovers("another")
    assert len(list(temporary.iterdir())) == 1
    await end_leftovers(launch.family)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("options", [SANDBOXED, RunOptions(full_auto=True, config=WITHOUT_TMP)])
async def test_commands_and_patches_write_only_the_configured_folders(
    launch: Launch, model: ScriptedModel, tmp_path: Path, options: RunOptions
) -> None:
    more, outside = tmp_path / "more, and more", tmp_path / "outside"
    for folder in (more, outside):
        folder.mkdir()
    options = replace(options, writable=(more,))
    for number in (1, 2):
        touch = f"touch a{number} '{more}/a{number}' {outside}/a{number}; readlink /proc/self/ns/pid"
        patches = [
            {"patch": f"*** Begin Patch\n*** Add File: {folder}/b{number}\n+one\n*** End Patch"}
            for folder in (more, outside)
        ]
        events = await events_of(CodexExec(launch), script({"run": touch}, *patches, {"say": "Tried."}), options)
        done = last_event(events)
        assert done.text == "Tried.", done.error
        ran = next(each for each in events_of_type(ToolResult, events) if each.output)
        assert "Read-only file system" in ran.output
        assert os.readlink("/proc/self/ns/pid") not in ran.output
        outputs = [item.text for item in model.requests[-1].input if isinstance(item, Output)]
        assert "outside of the project" in outputs[-1]
        # The sandbox also applies to a resumed session.
        options = replace(options, resume=done.session_id)
    assert sorted(file.name for file in more.iterdir()) == ["a1", "a2", "b1", "b2"]
    assert sorted(file.name for file in launch.cwd.iterdir()) == ["a1", "a2"]
    assert list(outside.iterdir()) == []


async def test_a_git_repository_is_required_if_configured(launch: Launch) -> None:
    codex = CodexExec(launch)
    done = last_event(await events_of(codex, "hi", RunOptions(sandbox="read-only", skip_git_check=False)))
    assert done.stop_reason == "failed"
    assert done.error is not None
    assert "skip-git-repo-check" in done.error.message


async def test_a_failure_is_reported_once(launch: Launch) -> None:
    events = await events_of(CodexExec(launch), script({"fail": 401}))
    done = last_event(events)
    assert done.stop_reason == "failed"
    assert done.error is not None
    assert "401" in done.error.message
    assert [error.fatal for error in events_of_type(Error, events)].count(True) == 1


@pytest.mark.parametrize("options", [UNSANDBOXED, SANDBOXED])
async def test_an_aborted_run_leaves_no_command_behind(launch: Launch, options: RunOptions) -> None:
    seconds = f"600.{uuid.uuid4().int}"
    prompt = script({"run": f"env -i setsid sleep {seconds} & setsid sleep {seconds} & sleep {seconds}"})
    async with CodexExec(launch).run(prompt, options) as run:
        async for event in run:
            if isinstance(event, ToolUse):
                break
        await eventually(lambda: len(sleeping_processes(seconds)) >= 3)
        assert remaining_processes(launch)
        run.abort()
        rest = [event async for event in run]
    assert last_event(rest).stop_reason == "interrupted"
    assert [result.is_error for result in events_of_type(ToolResult, rest)] == [True]
    assert remaining_processes(launch) == []
    assert sleeping_processes(seconds) == []


def sleeping_processes(seconds: str) -> list[int]:
    """Return the processes that run `sleep` with this argument."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().split(b"\0")[-2:-1] == [seconds.encode()]:
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    "command",
    ["env -i /bin/sleep {} & wait", "env -i setsid sleep {} & sleep 600", "env -u CODEX_WORKSPACE_RUN sleep {}"],
)
async def test_a_command_without_the_run_marker_is_killed_too(launch: Launch, command: str) -> None:
    seconds = f"600.{uuid.uuid4().int}"
    async with CodexExec(launch).run(script({"run": command.format(seconds)}), UNSANDBOXED) as run:
        with anyio.fail_after(HANG_S):
            async for event in run:
                if isinstance(event, ToolUse):
                    break
            await eventually(lambda: sleeping_processes(seconds))
    assert sleeping_processes(seconds) == []


STUBBORN = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    result = {"tools": []}
    if asked["method"] == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
        result = {"protocolVersion": asked["params"]["protocolVersion"], **about}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
time.sleep(600)
"""


async def test_an_mcp_server_that_ignores_eof_is_killed_too(launch: Launch) -> None:
    name = f"600.{uuid.uuid4().int}"
    entry = McpServerEntry(
        name="stubborn", command=sys.executable, args=("-c", STUBBORN, name), env={}, required=True, trusted=True
    )
    servers = resolve([entry], {}, ConfigLocation("config.yaml"))
    async with CodexExec(launch, servers=servers).run(script({"run": "sleep 600"}), UNSANDBOXED) as run:
        async for event in run:
            if isinstance(event, ToolUse):
                break
        assert sleeping_processes(name)
        run.abort()
        assert last_event([event async for event in run]).stop_reason == "interrupted"
    assert sleeping_processes(name) == []


async def test_cancelling_the_shutdown_leaves_no_process(launch: Launch) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async with CodexExec(launch).run(
            script({"run": "trap '' TERM; setsid sleep 600 & sleep 600"}), UNSANDBOXED
        ) as run:
            async for event in run:
                if isinstance(event, ToolUse):
                    started.set()

    reading = asyncio.create_task(read())
    await started.wait()
    for _ in range(2):
        reading.cancel()
        await anyio.sleep(0.003)
    with pytest.raises(asyncio.CancelledError):
        await reading
    await eventually(lambda: not remaining_processes(launch))


async def test_a_run_can_be_aborted_by_another_task(launch: Launch) -> None:
    async with (
        CodexExec(launch).run(script({"run": "sleep 600"}), UNSANDBOXED) as run,
        anyio.create_task_group() as tasks,
    ):
        events: list[AgentEvent] = []
        began = anyio.Event()

        async def read() -> None:
            async for event in run:
                events.append(event)
                if isinstance(event, ToolUse):
                    began.set()

        tasks.start_soon(read)
        await began.wait()
        run.abort()
    assert last_event(events).stop_reason == "interrupted"


async def test_leaving_the_block_leaves_no_process(launch: Launch) -> None:
    async with CodexExec(launch).run(script({"run": "sleep 600"}), UNSANDBOXED) as run:
        async for event in run:
            if isinstance(event, ToolUse):
                break
    assert remaining_processes(launch) == []


async def test_a_cancelled_reader_leaves_no_process(launch: Launch) -> None:
    with anyio.move_on_after(1) as scope:
        await events_of(CodexExec(launch), script({"run": "sleep 600"}))
    assert scope.cancelled_caught
    assert remaining_processes(launch) == []


async def test_silence_times_out_a_run(launch: Launch) -> None:
    codex = CodexExec(launch, RunLimits(inactivity_s=1.0))
    events = await events_of(codex, script({"run": "sleep 600"}))
    done = last_event(events)
    assert done.error is not None
    assert (done.stop_reason, done.error.code) == ("failed", "WATCHDOG_TIMEOUT")
    assert done.error.message == "The turn was silent for 1 s and was stopped."
    assert remaining_processes(launch) == []


async def test_lines_keep_a_run_alive(launch: Launch) -> None:
    codex = CodexExec(launch, RunLimits(inactivity_s=3.0))
    prompt = script(*({"run": f"sleep 1.{number}"} for number in (1, 2, 3)), {"say": "Slept."})
    assert last_event(await events_of(codex, prompt)).text == "Slept."


async def test_waiting_for_servers_is_not_silence(launch: Launch) -> None:
    slow = McpServerEntry(
        name="slow", command=sys.executable, args=(str(MINIMAL_SERVER), "3"), env={}, required=True, trusted=True
    )
    servers = resolve([slow], {}, ConfigLocation("config.yaml"))
    call = {"tool": {"name": "echo", "namespace": "mcp__slow", "arguments": {"text": "late"}}}
    codex = CodexExec(launch, RunLimits(inactivity_s=2.0, startup_s=10.0), servers)
    events = await events_of(codex, script(call, {"say": "Called."}))
    assert [result.output for result in events_of_type(ToolResult, events)] == ["echo late"]
    assert last_event(events).text == "Called."


async def test_a_busy_reader_is_not_silence(launch: Launch) -> None:
    codex = CodexExec(launch, RunLimits(inactivity_s=3.0))
    async with codex.run(script({"run": "sleep 1.5"}, {"run": "sleep 3"}, {"say": "Slept."}), UNSANDBOXED) as run:
        events = []
        async for event in run:
            events.append(event)
            if len(events_of_type(ToolUse, events)) == 1 and not events_of_type(ToolResult, events):
                await anyio.sleep(3.5)
    assert (last_event(events).stop_reason, last_event(events).text) == ("completed", "Slept.")


async def test_silence_during_a_busy_reader_is_reported_afterwards(launch: Launch) -> None:
    codex = CodexExec(launch, RunLimits(inactivity_s=1.0))
    with anyio.fail_after(HANG_S):
        async with codex.run(script({"run": "sleep 600"}), UNSANDBOXED) as run:
            events = []
            async for event in run:
                events.append(event)
                if isinstance(event, ToolUse):
                    await anyio.sleep(2)
    error = last_event(events).error
    assert error is not None
    assert error.code == "WATCHDOG_TIMEOUT"


async def test_one_instance_serves_concurrent_tasks(launch: Launch) -> None:
    codex = CodexExec(launch)
    answers: list[str] = []

    async def ask(word: str) -> None:
        answers.append(last_event(await events_of(codex, script({"say": word}))).text)

    async with anyio.create_task_group() as tasks:
        for word in ("one", "two", "three"):
            tasks.start_soon(ask, word)
    assert sorted(answers) == ["one", "three", "two"]


async def test_runs_of_one_session_are_serialized(launch: Launch) -> None:
    codex = CodexExec(launch)
    session = last_event(await events_of(codex, script({"say": "begun"}))).session_id
    running: list[bool] = []

    async def ask() -> None:
        async with codex.run(script({"run": "sleep 0.3"}), replace(UNSANDBOXED, resume=session)) as run:
            running.append(True)
            assert len(running) == 1
            assert last_event([event async for event in run]).stop_reason == "completed"
            running.pop()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)


async def test_tokens_of_a_stopped_run_do_not_count_for_the_next(launch: Launch) -> None:
    codex = CodexExec(launch)
    session = replace(UNSANDBOXED, resume=last_event(await events_of(codex, script({"say": "begun"}))).session_id)
    async with codex.run(script({"run": "echo 1"}, {"run": "sleep 600"}), session) as run:
        stopped = []
        async for event in run:
            stopped.append(event)
            if len(events_of_type(ToolUse, stopped)) == 2:
                run.abort()
    assert last_event(stopped).usage is None
    first, second = [last_event(await events_of(codex, script({"say": "again"}), session)).usage for _ in range(2)]
    assert first is not None
    assert second is not None
    # The input of the second call contains the first turn, and little more.
    assert first.input < second.input < first.input * 1.5


async def test_a_line_over_the_limit_is_reported_as_missing(launch: Launch) -> None:
    codex = CodexExec(replace(launch, max_line_bytes=3000))
    events = await events_of(codex, script({"run": "printf %05000d 7"}, {"say": "Printed."}))
    assert events_of_type(Error, events) == []
    [warning] = events_of_type(RunWarning, events)
    assert "which exceeds the limit" in warning.message
    assert [result.is_error for result in events_of_type(ToolResult, events)] == [True]
    assert last_event(events).text == "Printed."


async def test_output_before_an_abort_is_delivered(launch: Launch) -> None:
    with anyio.fail_after(HANG_S):
        async with CodexExec(launch).run(
            script({"run": "echo hi"}, {"run": "touch on; sleep 600"}), UNSANDBOXED
        ) as run:
            await eventually((launch.cwd / "on").exists)
            run.abort()
            events = [event async for event in run]
    assert next(result.output for result in events_of_type(ToolResult, events)) == "hi\n"
    assert last_event(events).stop_reason == "interrupted"


async def test_only_codexs_own_credential_reaches_codex(launch: Launch) -> None:
    async with CodexExec(launch).run(script({"run": "env; sleep 600"}), UNSANDBOXED) as run:
        async for event in run:
            if isinstance(event, ToolUse):
                break
        found = environment_of(remaining_processes(launch))
    assert KEY in found
    assert not any(name in found or value in found for name, value in FOREIGN_KEYS.items())


async def test_no_key_is_passed_if_none_is_configured(launch: Launch, model: ScriptedModel) -> None:
    last_event(await events_of(CodexExec(replace(launch, api_key=None)), script({"say": "x"})))
    assert all(request.authorization is None for request in model.requests)


async def test_commands_do_not_see_the_key(launch: Launch) -> None:
    events = await events_of(CodexExec(launch), script({"run": "env"}))
    [result] = events_of_type(ToolResult, events)
    assert "PATH=" in result.output
    assert KEY not in result.output


def probe(env: Mapping[str, str]) -> McpServers:
    """Return the test's MCP server with these environment variables."""
    entry = McpServerEntry(
        name="probe", command=sys.executable, args=(str(MCP_SERVER),), env=env, required=True, trusted=True
    )
    return resolve([entry], {"PROBE_TOKEN": TOKEN}, ConfigLocation("config.yaml"))


async def test_an_mcp_server_exists_for_one_run_and_leaves_no_trace(launch: Launch) -> None:
    config = (launch.codex_home / "config.toml").read_bytes()
    call = {"tool": {"name": "digest_of", "namespace": "mcp__probe", "arguments": {"variable": "TOKEN"}}}
    codex = CodexExec(launch, servers=probe({"TOKEN": "${PROBE_TOKEN}", "PLAIN": "x"}))
    async with codex.run(script(call, {"say": "Called."}), UNSANDBOXED) as run:
        events = [event async for event in run]
    [use], [result] = events_of_type(ToolUse, events), events_of_type(ToolResult, events)
    assert (use.name, use.server, use.input) == ("digest_of", "probe", {"variable": "TOKEN"})
    assert (result.output, result.is_error) == (hashlib.sha256(TOKEN.encode()).hexdigest(), False)
    assert (launch.codex_home / "config.toml").read_bytes() == config


def test_secrets_of_mcp_servers_are_not_on_the_command_line() -> None:
    settings, handed = mcp_overrides(probe({"TOKEN": "${PROBE_TOKEN}"}))
    assert TOKEN not in str(settings)
    assert settings["mcp_servers", "probe", "env_vars"] == ["TOKEN"]
    assert handed == {"TOKEN": TOKEN}


def test_secrets_in_headers_are_passed_as_environment_variables() -> None:
    entry = McpServerEntry(name="far-away", url="http://localhost:1/mcp", bearer_token_env="PROBE_TOKEN")
    settings, handed = mcp_overrides(resolve([entry], {"PROBE_TOKEN": TOKEN}, ConfigLocation("config.yaml")))
    assert settings["mcp_servers", "far-away", "env_http_headers", "Authorization"] == "MCP_HEADER_0_FAR_AWAY"
    assert handed == {"MCP_HEADER_0_FAR_AWAY": f"Bearer {TOKEN}"}


def test_servers_with_similar_names_have_separate_headers() -> None:
    entries = [
        McpServerEntry(name=name, url="http://localhost:1/mcp", bearer_token_env=variable)
        for name, variable in (("a-b", "ONE"), ("a_b", "TWO"))
    ]
    _, handed = mcp_overrides(resolve(entries, {"ONE": "1", "TWO": "2"}, ConfigLocation("config.yaml")))
    assert sorted(handed.values()) == ["Bearer 1", "Bearer 2"]


@pytest.mark.parametrize("name", ["PATH", "CODEX_HOME", "OPENAI_API_KEY", "LD_PRELOAD"])
def test_a_secret_does_not_override_codexs_variables(name: str) -> None:
    with pytest.raises(ConfigError, match=f"env: {name} is reserved by codex"):
        mcp_overrides(probe({name: "${PROBE_TOKEN}"}))


def test_two_servers_cannot_share_a_variable_with_two_values() -> None:
    servers = tuple(McpServer(name, {}, {("env", "TOKEN"): Secret(name)}, (), 1.0, False, False) for name in "ab")
    with pytest.raises(ConfigError, match="b: env: TOKEN has different values"):
        mcp_overrides(McpServers(servers))


async def test_a_crash_is_reported_with_codexs_own_words(launch: Launch) -> None:
    (launch.codex_home / "config.toml").write_text(f"model = [ # {KEY}")
    async with CodexExec(launch).run("hi", UNSANDBOXED) as run:
        done = last_event([event async for event in run])
        said = run.diagnostics
    assert done.error is not None
    assert (done.stop_reason, done.error.code) == ("failed", "PROCESS_EXITED")
    assert done.error.message.startswith(f"{CONFIG_REJECTED}: Error loading config.toml: ")
    assert "expected" in done.error.message
    assert "config.toml:1:" in said
    assert KEY not in said + done.error.message


async def test_a_killed_codex_is_a_failure(launch: Launch) -> None:
    async with CodexExec(launch).run(script({"run": "kill -9 $PPID; sleep 600"}), UNSANDBOXED) as run:
        done = last_event([event async for event in run])
    assert done.error is not None
    assert "SIGKILL" in done.error.message
    assert remaining_processes(launch) == []


@pytest.mark.parametrize("last", ["echo codex-cli 0.163.0", "wait"])
async def test_the_version_query_leaves_no_process(launch: Launch, tmp_path: Path, last: str) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f"#!/bin/sh\nsleep 600 >/dev/null 2>&1 &\ntouch {tmp_path}/on\n{last}\n")
    wrapper.chmod(0o700)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(CodexExec(replace(launch, binary=wrapper)).version)
            await eventually((tmp_path / "on").exists)
            if last == "wait":
                tasks.cancel_scope.cancel()
    assert remaining_processes(launch) == []


@pytest.mark.parametrize(
    ("name", "problem"), [("/nonexistent", "cannot be started"), (shutil.which("true"), "did not report its version")]
)
async def test_a_binary_that_is_not_codex_is_one_sentence(launch: Launch, name: str, problem: str) -> None:
    with pytest.raises(CodexCannotStart, match=problem):
        await events_of(CodexExec(replace(launch, binary=Path(name))), "hi")


async def test_the_version_is_read_once(launch: Launch, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho codex-cli 0.163.0\n")
    wrapper.chmod(0o700)
    codex = CodexExec(replace(launch, binary=wrapper))
    assert [await codex.version() for _ in range(2)] == [(0, 163, 0)] * 2
    assert (tmp_path / "asked").read_text() == "asked\n"
