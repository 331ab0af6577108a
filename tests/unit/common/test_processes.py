"""Processes that outlived the one that started them."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codex_workspace.common.processes import (
    all_processes,
    find_marked,
    fork_count,
    kill_marked,
    process_tree,
    processes_since,
)
from tests.e2e.agent_process import REPOSITORY

NAME = "CODEX_WORKSPACE_TEST"


@contextmanager
def sleeper(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of the mark that only a SIGKILL ends, and that has said so."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    environment = {**os.environ, NAME: mark}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_only_the_exact_marker_counts() -> None:
    mark = uuid.uuid4().hex
    with sleeper(mark) as process, sleeper(f"{mark}-longer"):
        assert find_marked(NAME, mark) == [process.pid]
        assert find_marked(NAME, mark[:-1]) == []
        assert find_marked(NAME[1:], mark) == []
        assert len(find_marked(NAME, mark, or_longer=True)) == 2
        assert len(find_marked(NAME, mark[:-1], or_longer=True)) == 2
        assert find_marked(NAME, mark[1:], or_longer=True) == []


async def test_sweep_kills_marked_processes_only() -> None:
    mark = uuid.uuid4().hex
    with sleeper(mark) as one, sleeper(mark) as two, sleeper("another") as other:
        assert await kill_marked(NAME, mark) == 2
        assert [one.wait(), two.wait()] == [-9, -9]
        assert other.poll() is None
        assert find_marked(NAME, mark) == []


def test_a_zombie_is_no_process() -> None:
    mark = uuid.uuid4().hex
    with sleeper(mark) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert find_marked(NAME, mark) == []


HIDE = (
    "import sys; from codex_workspace.common.processes import protect_from_inspection as protect; "
    "protect(); print(flush=True)"
)

# As root, this test could read everything; so who looks has no capabilities.
LOOK = """
import os, sys
from tests.e2e.without_capabilities import drop_all
drop_all()
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def test_a_program_that_cannot_be_read_is_found_by_its_arguments() -> None:
    mark = uuid.uuid4().hex
    arguments = [sys.executable, "-c", f"{HIDE}; sys.stdin.read()", f'a.{NAME}="{mark}"']
    wanted = (f"{mark!r}", f"{mark[:9]!r}", f"{mark[:9]!r}, or_longer=True")
    calls = ", ".join(f"find_marked({NAME!r}, {each})" for each in wanted)
    look = f"from codex_workspace.common.processes import find_marked; print({calls})"
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        process.stdout.readline()
        looked = [sys.executable, "-c", LOOK, look]
        said = subprocess.run(looked, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
        process.communicate()
    assert said == f"[{process.pid}] [] [{process.pid}]\n"


def test_only_later_processes_are_candidates() -> None:
    with sleeper("older") as older:
        forks = fork_count()
        with sleeper("first") as first, sleeper("later") as later:
            found = processes_since(first.pid, forks)
            assert {first.pid, later.pid} <= set(found)
            assert older.pid not in found
            assert set(process_tree(first.pid, found)) == {first.pid}


def test_every_process_is_a_candidate_when_the_ids_may_have_gone_round() -> None:
    round_ago = fork_count() - int(Path("/proc/sys/kernel/pid_max").read_text())
    with sleeper("older") as older, sleeper("first") as first:
        assert older.pid in processes_since(first.pid, round_ago)
    assert os.getpid() in all_processes()
