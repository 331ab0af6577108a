"""Files are replaced whole, or not at all, and what a killed process has begun does not stay for long."""

import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from codex_workspace.common.files import replace_file

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


def test_what_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_what_killed_processes_have_left_is_one_file_that_goes_with_the_next(tmp_path: Path) -> None:
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


def test_processes_that_replace_one_file_at_once_leave_one_of_their_wholes(tmp_path: Path) -> None:
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
