"""One agent for a folder, with real processes that hold it, end and are killed."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import anyio
import pytest

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import (
    LOCK_NAME,
    LOCK_TIMEOUT_S,
    MARK_OFFSET,
    UNKNOWN,
    Holder,
    WatchedPaths,
    lock_folder,
    lock_holder,
    read_config_file,
    read_regular,
    replace_file,
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


async def test_a_second_process_is_rejected_with_the_holders_pid(tmp_path: Path) -> None:
    with another_holder(tmp_path) as (process, _):
        with pytest.raises(ConfigError) as refused:
            async with lock_folder(tmp_path):
                pytest.fail("both hold it")
        holder = lock_holder(tmp_path)
        process.communicate("\n")
    assert f"another agent uses {tmp_path} (pid {process.pid}, since 2" in str(refused.value)
    assert "http://127.0.0.1:8123/" in str(refused.value)
    assert isinstance(holder, Holder)
    assert (holder.pid, holder.where) == (process.pid, "http://127.0.0.1:8123/")


async def test_a_killed_holder_releases_the_lock_despite_its_child(tmp_path: Path) -> None:
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


async def test_an_ending_holder_is_awaited(tmp_path: Path) -> None:
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
async def test_a_lock_file_without_holder_is_no_obstacle(tmp_path: Path, left: bytes) -> None:
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


async def test_a_file_has_its_lock_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite3"
    file.touch()
    async with lock_folder(file, "here", "DATABASE_URL"), lock_folder(tmp_path):
        assert (tmp_path / "a.sqlite3.lock").is_file()
        assert isinstance(lock_holder(file), Holder)
        with pytest.raises(ConfigError, match=r"^DATABASE_URL: another agent uses .*a\.sqlite3 \(pid "):
            async with lock_folder(file, "here", "DATABASE_URL"):
                pytest.fail("both hold it")
    assert lock_holder(file) is None


def test_a_removed_lock_file_is_not_held(tmp_path: Path) -> None:
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


# --- Files are replaced whole, or not at all, and what a killed process has begun does not stay for long ---


KILLED_BEFORE_THE_LAST_STEP = """
import os, signal, sys
from pathlib import Path
from codex_workspace.common.files import replace_file
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace_file(Path(sys.argv[1]), b"a secret that is longer than what comes next", 0o644)
"""


def test_a_file_is_made_for_its_user_alone_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, b"old")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"old", 0o600)
    with file.open("rb") as reader:
        replace_file(file, b"new", 0o644)
        assert reader.read() == b"old"
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o644)
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_replacement_keeps_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_killed_processs_temporary_file_is_reused(tmp_path: Path) -> None:
    file = tmp_path / "auth.json"
    replace_file(file, b"old")
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_LAST_STEP, str(file)], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert file.read_bytes() == b"old"
        assert len(list(tmp_path.iterdir())) == 2
    replace_file(file, b"new")
    assert list(tmp_path.iterdir()) == [file]
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o600)


def test_concurrent_replacements_leave_one_complete_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    wholes = [bytes([letter]) * (50_000 + letter) for letter in range(100)]
    with ProcessPoolExecutor(2, get_context("spawn")) as others:
        for _ in others.map(partial(replace_file, file), wholes):
            assert file.read_bytes() in wholes
    assert list(tmp_path.iterdir()) == [file]


def test_both_the_file_and_its_new_name_are_on_disk_on_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[str, bool]] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        what = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        kept.append((what, (tmp_path / "file").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    replace_file(tmp_path / "file", b"new")
    assert kept == [("file", False), ("folder", True)]


# --- Watched paths ---


def test_a_deleted_moved_or_replaced_path_is_a_problem_until_it_is_back(tmp_path: Path) -> None:
    folder, file, moved = tmp_path / "folder", tmp_path / "folder" / "file", tmp_path / "moved"
    folder.mkdir()
    file.touch()
    watched = WatchedPaths({"FOLDER": folder, "the file": file})
    assert watched.problem() is None
    with file.open("a") as opened:
        opened.write("It may change.")
    assert watched.problem() is None

    folder.rename(moved)
    assert watched.problem() == "FOLDER was deleted, moved or replaced; restore it and restart the agent"
    folder.symlink_to(moved)
    assert watched.problem() is None
    file.rename(moved / "other")
    assert watched.problem() == "the file was deleted, moved or replaced; restore it and restart the agent"
    file.touch()
    assert watched.problem() == "the file was deleted, moved or replaced; restore it and restart the agent"
    (moved / "other").rename(file)
    assert watched.problem() is None


def test_a_new_folder_in_the_place_of_a_deleted_one_is_a_problem(tmp_path: Path) -> None:
    """The kernel may give it the same inode number if nobody has the deleted one open."""
    folder = tmp_path / "folder"
    folder.mkdir()
    watched = WatchedPaths({"FOLDER": folder})
    folder.rmdir()
    folder.mkdir()
    assert watched.problem() == "FOLDER was deleted, moved or replaced; restore it and restart the agent"
    watched.close()


def test_a_file_must_keep_a_mark_that_it_has(tmp_path: Path) -> None:
    marked, other = tmp_path / "marked", tmp_path / "other"
    for file, mark in ((marked, b"mark"), (other, b"none")):
        file.write_bytes(bytes(MARK_OFFSET) + mark)
    watched = WatchedPaths({"the file": marked, "the other": other, "FOLDER": tmp_path}, b"mark")
    other.write_bytes(b"")
    assert watched.problem() is None
    for content in (b"", bytes(MARK_OFFSET) + b"none"):
        marked.write_bytes(content)
        assert watched.problem() == "the file was overwritten; stop the agent, restore a backup and start the agent"
    watched.close()


WATCH = """
import sys
from pathlib import Path
from codex_workspace.common.files import WatchedPaths

folder = Path(sys.argv[1])
watched = WatchedPaths({"FOLDER": folder})
for mode in (0o700, 0o500, 0o700):
    folder.chmod(mode)
    print(watched.problem())
"""


def test_a_folder_that_becomes_read_only_is_a_problem(tmp_path: Path) -> None:
    # Root may write to every folder, unless it has no capabilities.
    command = [sys.executable, "-m", "tests.e2e.without_capabilities", "code"]
    (tmp_path / "code.py").write_text(WATCH)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    printed = subprocess.run([*command, str(tmp_path)], env=environment, check=True, capture_output=True, text=True)
    assert printed.stdout.splitlines() == ["None", "FOLDER is read-only; make it writable again", "None"]


# --- Files of operators are read with a bound, and nothing else is


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_config_file(tmp_path / "link", 5) == b"12345"
    assert read_regular(tmp_path / "file", 3) == b"123"
    assert read_config_file(Path("/proc/self/cmdline"))
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_config_file(tmp_path / "file", 4)


def test_pipes_devices_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(OSError, match="it is a pipe or a device; write its content to a regular file"):
            read_config_file(file)
    with pytest.raises(IsADirectoryError):
        read_config_file(tmp_path)
