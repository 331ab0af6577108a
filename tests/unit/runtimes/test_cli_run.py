"""Tests `runtimes/cli_run.py` with shell scripts: any program that writes lines is a CLI, and every run ends once."""

import uuid
from pathlib import Path

import anyio

from codex_workspace.backends.codex_exec.runtime import ExecConverter
from codex_workspace.common.processes import find_marked
from codex_workspace.runtimes.cli_run import RunHooks, RunLimits, open_run
from codex_workspace.runtimes.events import AgentMessage, Done
from codex_workspace.runtimes.launch import MARK, Launch
from codex_workspace.runtimes.process import new_mark

STARTED = '{"type":"thread.started","thread_id":"x"}'
DONE = '{"type":"turn.completed"}'


def message(text: str) -> str:
    """Return the line of a message."""
    return f'{{"type":"item.completed","item":{{"id":"{text}","type":"agent_message","text":"{text}"}}}}'


def launch_in(folder: Path) -> Launch:
    """Return how to start the shell."""
    return Launch(Path("/bin/sh"), folder, folder, {"PATH": "/usr/bin:/bin"}, family=f"cli-{uuid.uuid4().hex}")


async def run(
    launch: Launch, script: str, limits: RunLimits | None = None, resume: str | None = None, abort_at: str = ""
) -> list[str]:
    """Return the messages of a run and how it ended; abort it after the message `abort_at`."""
    seen: list[str] = []
    limits = limits or RunLimits()
    command = ["/bin/sh", "-c", script]
    with anyio.fail_after(60):
        async with open_run(
            launch, command, new_mark(launch), "hi", ExecConverter(), limits, RunHooks(), resume
        ) as opened:
            async for event in opened:
                match event:
                    case AgentMessage(text=text):
                        seen.append(text)
                        if text == abort_at:
                            opened.abort()
                    case Done(stop_reason=reason, error=error):
                        seen.append(error.code if error is not None else reason)
                    case _:
                        pass
    assert find_marked(MARK, f"{launch.family}.", or_longer=True) == []
    return seen


async def test_a_prompt_arrives_on_stdin_and_lines_are_events(tmp_path: Path) -> None:
    script = f"echo '{STARTED}'; cat >/dev/null; echo '{message('hi')}'; echo '{DONE}'"
    assert await run(launch_in(tmp_path), script) == ["hi", "completed"]


async def test_an_exit_before_the_end_is_a_failure(tmp_path: Path) -> None:
    assert await run(launch_in(tmp_path), f"echo '{message('one')}'; exit 3") == ["one", "PROCESS_EXITED"]


async def test_silence_ends_the_run(tmp_path: Path) -> None:
    limits = RunLimits(inactivity_s=0.5)
    script = f"echo '{message('one')}'; sleep 600"
    assert await run(launch_in(tmp_path), script, limits) == ["one", "WATCHDOG_TIMEOUT"]


async def test_an_abort_kills_a_process_that_ignores_sigterm_and_its_descendants(tmp_path: Path) -> None:
    script = f"trap '' TERM; setsid sleep 600 & echo '{message('one')}'; while :; do sleep 600; done"
    assert await run(launch_in(tmp_path), script, abort_at="one") == ["one", "interrupted"]


async def test_another_session_than_the_requested_one_is_a_missing_session(tmp_path: Path) -> None:
    assert await run(launch_in(tmp_path), f"echo '{STARTED}'; sleep 600", resume="wanted") == ["SESSION_NOT_FOUND"]
