"""One agent for a folder, with real processes that hold it, end and are killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import (
    LOCK_NAME,
    LOCK_TIMEOUT_S,
    UNKNOWN,
    Holder,
    lock_folder,
    lock_holder,
    try_lock_file,
)
from tests.e2e.agent_process import REPOSITORY

HOLD = """
import subprocess, sys, anyio
from pathlib import Path
from codex_workspace.common.files import lock_folder

async def hold():
    async with lock_folder(Path(sys.argv[1]), "http://127.0.0.1:8123/"):
        child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
        print(child.pid, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        child.kill()

anyio.run(hold)
"""


@contextmanager
def another_holder(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Hold the folder in another process until that is sent a line; gives it, and the pid of a child that it has."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    with another_holder(tmp_path) as (process, _):
        with pytest.raises(ConfigError) as refused:
            async with lock_folder(tmp_path):
                pytest.fail("both hold it")
        holder = lock_holder(tmp_path)
        process.communicate("\n")
    assert f"another agent works on {tmp_path} (pid {process.pid}, since 2" in str(refused.value)
    assert "http://127.0.0.1:8123/" in str(refused.value)
    assert isinstance(holder, Holder)
    assert (holder.pid, holder.where) == (process.pid, "http://127.0.0.1:8123/")


async def test_a_killed_holder_holds_nothing_though_its_child_lives(tmp_path: Path) -> None:
    with another_holder(tmp_path) as (process, child):
        process.send_signal(signal.SIGKILL)
        process.wait()
        try:
            assert str(process.pid) in (tmp_path / LOCK_NAME).read_text()
            assert alive(child)
            assert lock_holder(tmp_path) is None
            async with lock_folder(tmp_path):
                assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_NAME).read_text()
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_holder_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    with another_holder(tmp_path) as (process, _):
        async with anyio.create_task_group() as tasks:

            async def end_it() -> None:
                await anyio.sleep(LOCK_TIMEOUT_S / 4)
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()

            tasks.start_soon(end_it)
            async with lock_folder(tmp_path):
                pass


@pytest.mark.parametrize("left", [b"", b"nonsense", b'{"pid": 1}', b"\xff\xfe", b"[" * 5000])
async def test_what_a_file_says_that_nobody_holds_is_no_obstacle(tmp_path: Path, left: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(left)
    assert lock_holder(tmp_path) is None
    async with lock_folder(tmp_path, "here"):
        assert isinstance(lock_holder(tmp_path), Holder)
        (tmp_path / LOCK_NAME).write_bytes(left)
        assert lock_holder(tmp_path) == UNKNOWN
    assert lock_holder(tmp_path) is None


async def test_the_file_is_this_users_alone_and_stays_empty_behind(tmp_path: Path) -> None:
    async with lock_folder(tmp_path):
        assert (tmp_path / LOCK_NAME).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / LOCK_NAME).read_bytes() == b""


async def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    assert lock_holder(tmp_path / "no") is None
    with pytest.raises(ConfigError, match=r"WORKSPACE_STATE_DIR: .*agent\.lock cannot be opened: No such file"):
        async with lock_folder(tmp_path / "no"):
            pytest.fail("it is held")


def test_what_was_removed_before_it_was_locked_is_not_held(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    removed = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    folder.rmdir()
    assert not try_lock_file(removed, folder)
    folder.mkdir()
    assert not try_lock_file(removed, folder)
    first, second = (os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for _ in range(2))
    assert try_lock_file(first, folder)
    assert not try_lock_file(second, folder)
    os.close(first)
    assert try_lock_file(second, folder)
    os.close(second)
    os.close(removed)
