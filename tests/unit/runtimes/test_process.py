"""Tests `runtimes/process.py` and `runtimes/launch.py`: commands that exit, hang, or write too much."""

import asyncio
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.common.processes import find_marked
from codex_workspace.runtimes.launch import MARK, Launch
from codex_workspace.runtimes.process import KEPT_BYTES, run_command
from tests.e2e.agent_process import REPOSITORY


def launch(folder: Path, script: str) -> Launch:
    """Return how to start a script in place of codex."""
    program = folder / "codex"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return Launch(program, folder, folder, {"PATH": "/usr/bin:/bin"}, family=f"once-{uuid.uuid4().hex}")


async def test_output_and_exit_code_are_returned(tmp_path: Path) -> None:
    ran = await run_command(launch(tmp_path, 'echo "$1 $2"; cat; echo no >&2; exit 4'), "a", "b", within_s=20)
    assert (ran.stdout, ran.stderr, ran.exit_code) == ("a b\n", "no\n", 4)


async def test_a_command_that_takes_too_long_is_ended_with_its_descendants(tmp_path: Path) -> None:
    asleep = launch(tmp_path, "sleep 600 & sleep 600 & wait")
    with anyio.fail_after(20), pytest.raises(CodexCannotStart, match=r"^codex list did not end within 1 s$"):
        await run_command(asleep, "list", within_s=1)
    assert find_marked(MARK, f"{asleep.family}.", or_longer=True) == []


@pytest.mark.parametrize("times", [1, 5])
async def test_cancellation_by_asyncio_waits_for_no_pipe_and_leaves_no_process(tmp_path: Path, times: int) -> None:
    asleep = launch(tmp_path, "setsid sleep 30 & echo > begun; sleep 30 & wait")
    running = asyncio.create_task(run_command(asleep, within_s=100))
    with anyio.fail_after(20):
        while not (tmp_path / "begun").exists():
            await anyio.sleep(0.02)
    began = anyio.current_time()
    for _ in range(times):
        running.cancel()
        await anyio.lowlevel.checkpoint()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert anyio.current_time() - began < 10
    with anyio.fail_after(5):
        # A killed process does not disappear at once.
        while find_marked(MARK, f"{asleep.family}.", or_longer=True):
            await anyio.sleep(0.02)


async def test_a_descendant_that_holds_the_pipes_delays_nothing(tmp_path: Path) -> None:
    began = anyio.current_time()
    ran = await run_command(launch(tmp_path, "echo said; sleep 30 &"), within_s=20)
    assert ran.stdout == "said\n"
    assert anyio.current_time() - began < 10


async def test_only_the_end_of_long_output_is_kept_without_secrets(tmp_path: Path) -> None:
    loud = launch(
        tmp_path, "for _ in 1 2 3; do head -c 50000 /dev/zero | tr '\\0' .; echo a-secret; done | tee /dev/stderr"
    )
    ran = await run_command(replace(loud, secrets=["a-secret", "secret"]), within_s=20)
    assert ran.stderr == ran.stdout
    assert KEPT_BYTES - 20 < len(ran.stdout) <= KEPT_BYTES
    assert ran.stdout.count("***\n") == 2
    assert "secret" not in ran.stdout


@pytest.mark.parametrize("missing", ["codex", "work"])
async def test_a_missing_program_or_folder_is_named(tmp_path: Path, missing: str) -> None:
    (tmp_path / "bin").mkdir()
    there = launch(tmp_path / "bin", "true")
    gone = Launch(
        tmp_path / "codex" if missing == "codex" else there.binary,
        tmp_path,
        tmp_path / "work" if missing == "work" else tmp_path,
    )
    with pytest.raises(CodexCannotStart, match=f"codex cannot be started: {tmp_path / missing}: No such file"):
        await run_command(gone, within_s=20)


LOOK_UPS = """
import re, subprocess, sys
from pathlib import Path
import anyio
from codex_workspace.common.processes import find_marked
from codex_workspace.runtimes.launch import MARK, Launch
from codex_workspace.runtimes.process import run_command

def see(event, arguments):
    if event == "open" and (found := re.match(r"/proc/(\\d+)", str(arguments[0]))):
        seen.add(int(found[1]))

seen = set()
folder = Path(sys.argv[1])
unrelated = [subprocess.Popen(["sleep", "60"]) for _ in range(50)]
try:
    sys.addaudithook(see)
    launch = Launch(folder / "codex", folder, folder, {"PATH": "/usr/bin:/bin"}, family="looks")
    completed = anyio.run(lambda: run_command(launch, within_s=20))
    left = int(completed.stdout)
    looked = set(seen)
    print(left in looked, len(looked & {each.pid for each in unrelated}), find_marked(MARK, "looks.", or_longer=True))
finally:
    for each in unrelated:
        each.kill()
"""


def test_a_stop_looks_at_no_process_that_is_older_than_the_run(tmp_path: Path) -> None:
    launch(tmp_path, "setsid sleep 600 >/dev/null 2>&1 & echo $!")
    completed = subprocess.run(
        [sys.executable, "-c", LOOK_UPS, tmp_path], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert completed.stdout == "True 0 []\n"
