"""Tests `runtimes/cli_run.py` with shell scripts: any program that writes lines is a CLI, and every run ends once."""

import uuid
from collections.abc import Sequence
from pathlib import Path

import anyio

from codex_workspace.common.processes import find_marked
from codex_workspace.protocol.codex_events import TurnError
from codex_workspace.runtimes.cli_run import RunHooks, RunLimits, open_run
from codex_workspace.runtimes.launch import MARK, Launch
from codex_workspace.runtimes.process import new_mark


class Lines:
    """Returns each line as it is; the line `done` ends the turn, and the line `id X` names the session."""

    def __init__(self) -> None:
        self.session_id: str | None = None
        self.ended: str | None = None
        self.failed = False

    def feed(self, line: bytes | str) -> Sequence[str]:
        text = line if isinstance(line, str) else line.decode()
        if text.startswith("id "):
            self.session_id = text[3:]
        self.ended = text if text == "done" else self.ended
        return [text]

    def skipped(self, size: int) -> Sequence[str]:
        return [f"skipped {size}"]

    def finish(
        self, exit_code: int | None = None, failure: TurnError | None = None, *, stopped: bool = False
    ) -> Sequence[str]:
        return [f"end {'stopped' if stopped else failure.kind if failure is not None else 'completed'}"]


def launch_in(folder: Path) -> Launch:
    """Return how to start the shell."""
    return Launch(Path("/bin/sh"), folder, folder, {"PATH": "/usr/bin:/bin"}, family=f"cli-{uuid.uuid4().hex}")


async def run(
    launch: Launch, script: str, limits: RunLimits | None = None, resume: str | None = None, abort_at: str = ""
) -> list[str]:
    """Return all events of a run, which is aborted after the event `abort_at`."""
    events: list[str] = []
    limits = limits or RunLimits()
    command = ["/bin/sh", "-c", script]
    with anyio.fail_after(60):
        async with open_run(launch, command, new_mark(launch), "hi", Lines(), limits, RunHooks(), resume) as opened:
            async for event in opened:
                events.append(event)
                if event == abort_at:
                    opened.abort()
    assert find_marked(MARK, f"{launch.family}.", or_longer=True) == []
    return events


async def test_a_prompt_arrives_on_stdin_and_lines_are_events(tmp_path: Path) -> None:
    assert await run(launch_in(tmp_path), "echo id x; cat; echo; echo done") == ["id x", "hi", "done", "end completed"]


async def test_an_exit_before_the_end_is_a_failure(tmp_path: Path) -> None:
    assert await run(launch_in(tmp_path), "echo one; exit 3") == ["one", "end processExited"]


async def test_silence_ends_the_run(tmp_path: Path) -> None:
    limits = RunLimits(inactivity_s=0.5, term_grace_s=0.1)
    assert await run(launch_in(tmp_path), "echo one; sleep 600", limits) == ["one", "end watchdogTimeout"]


async def test_an_abort_kills_a_process_that_ignores_sigterm_and_its_descendants(tmp_path: Path) -> None:
    script = "trap '' TERM; setsid sleep 600 & echo one; while :; do sleep 600; done"
    events = await run(launch_in(tmp_path), script, RunLimits(term_grace_s=0.1), abort_at="one")
    assert events == ["one", "end stopped"]


async def test_another_session_than_the_wanted_one_is_a_missing_session(tmp_path: Path) -> None:
    events = await run(launch_in(tmp_path), "echo id other; sleep 600", resume="wanted")
    assert events == ["id other", "end sessionNotFound"]
