"""Files in the workspace: where they stand, who may see them, and what no link in the workspace can do to them."""

import os
import resource
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from codex_workspace.tasks.incoming_files import Attachment, AttachmentsNotWritten, prune, write

TASK = "0b5c7c1e-5a0e-4c36-9b1c-0f3a5d1f2e11"
FILE = Attachment("data.csv", "text/csv", b"a,b\n1,2\n")


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def modes_of(paths: Iterable[Path]) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in paths}


def test_files_stand_in_the_tasks_folder_and_codex_is_told_where(tmp_path: Path) -> None:
    told = write(tmp_path, TASK, [FILE, Attachment("ä b.bin", "application/octet-stream", b"\x00\xff")])
    folder = tmp_path / ".a2a" / TASK
    assert told.splitlines() == [
        "These files came with the message:",
        f"- .a2a/{TASK}/data.csv (text/csv, 8 bytes)",
        f"- .a2a/{TASK}/ä b.bin (application/octet-stream, 2 bytes)",
    ]
    assert (folder / "data.csv").read_bytes() == FILE.data
    assert (folder / "ä b.bin").read_bytes() == b"\x00\xff"
    assert names_in(folder) == ["data.csv", "ä b.bin"]


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path, TASK, [FILE])
    finally:
        os.umask(before)
    top = tmp_path / ".a2a"
    assert modes_of([top, top / TASK]) == {0o700}
    assert modes_of([top / ".gitignore", top / TASK / "data.csv"]) == {0o600}


def test_the_paths_are_seen_from_where_commands_run(tmp_path: Path) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    told = write(tmp_path, TASK, [FILE], cwd=tmp_path / "deep" / "down")
    assert f"- ../../.a2a/{TASK}/data.csv (" in told


def test_without_files_nothing_is_made_or_told(tmp_path: Path) -> None:
    assert write(tmp_path, TASK, []) == ""
    assert names_in(tmp_path) == []


def test_git_does_not_see_them(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    write(tmp_path, TASK, [FILE])
    seen = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, check=True, capture_output=True)
    assert seen.stdout == b""


def test_a_task_that_is_taken_up_again_has_its_files_as_they_came(tmp_path: Path) -> None:
    told = write(tmp_path, TASK, [FILE])
    (tmp_path / ".a2a" / TASK / "data.csv").write_bytes(b"changed meanwhile, and longer than before")
    (tmp_path / ".a2a" / TASK / "made.txt").write_bytes(b"by the agent")
    assert write(tmp_path, TASK, [FILE]) == told
    assert (tmp_path / ".a2a" / TASK / "data.csv").read_bytes() == FILE.data
    assert names_in(tmp_path / ".a2a" / TASK) == ["data.csv", "made.txt"]


@pytest.mark.parametrize("task_id", ["..", "a/b", ".", "x" * 65, "a\0b", "\ud800", "../../etc"])
def test_an_odd_task_id_leads_nowhere_else(tmp_path: Path, task_id: str) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    write(workspace, task_id, [FILE])
    assert names_in(tmp_path) == ["w"]
    assert names_in(workspace) == [".a2a"]
    (folder,) = [entry for entry in (workspace / ".a2a").iterdir() if entry.is_dir()]
    assert names_in(folder) == ["data.csv"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside of the workspace that nothing may be written to."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "data.csv").write_text("of somebody else")
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def untouched(folder: Path) -> bool:
    return names_in(folder) == ["data.csv"] and (folder / "data.csv").read_text() == "of somebody else"


def test_a_link_in_place_of_the_top_folder_is_not_followed(workspace: Path, elsewhere: Path) -> None:
    (workspace / ".a2a").symlink_to(elsewhere)
    with pytest.raises(AttachmentsNotWritten, match="something that is no folder stands in its place"):
        write(workspace, TASK, [FILE])
    assert untouched(elsewhere)


def test_a_link_in_place_of_the_tasks_folder_is_not_followed(workspace: Path, elsewhere: Path) -> None:
    (workspace / ".a2a").mkdir()
    (workspace / ".a2a" / TASK).symlink_to(elsewhere)
    with pytest.raises(AttachmentsNotWritten):
        write(workspace, TASK, [FILE])
    assert untouched(elsewhere)


def test_a_link_in_place_of_a_file_is_replaced(workspace: Path, elsewhere: Path) -> None:
    folder = workspace / ".a2a" / TASK
    folder.mkdir(parents=True)
    (folder / "data.csv").symlink_to(elsewhere / "data.csv")
    (workspace / ".a2a" / ".gitignore").symlink_to(elsewhere / "ignored")
    write(workspace, TASK, [FILE])
    assert not (folder / "data.csv").is_symlink()
    assert (folder / "data.csv").read_bytes() == FILE.data
    assert untouched(elsewhere)


def test_a_folder_in_place_of_a_file_is_said_and_nothing_is_left(workspace: Path) -> None:
    (workspace / ".a2a" / TASK / "data.csv").mkdir(parents=True)
    with pytest.raises(AttachmentsNotWritten, match=r"could not be laid down in \.a2a of the workspace"):
        write(workspace, TASK, [FILE])
    assert names_in(workspace / ".a2a" / TASK) == ["data.csv"]


def test_a_disk_that_takes_no_more_is_said_and_no_half_file_is_left(workspace: Path) -> None:
    write(workspace, TASK, [FILE])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(AttachmentsNotWritten, match="File too large"):
            write(workspace, TASK, [Attachment("data.csv", "text/csv", b"x" * 100_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names_in(workspace / ".a2a" / TASK) == ["data.csv"]
    assert (workspace / ".a2a" / TASK / "data.csv").read_bytes() == FILE.data


def test_a_workspace_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(AttachmentsNotWritten, match="No such file or directory"):
        write(tmp_path / "gone", TASK, [FILE])


def test_a_workspace_may_be_named_by_a_link(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(workspace)
    write(tmp_path / "link", TASK, [FILE])
    assert (workspace / ".a2a" / TASK / "data.csv").read_bytes() == FILE.data


def aged(workspace: Path, task_id: str, at: float) -> Path:
    write(workspace, task_id, [FILE])
    folder = workspace / ".a2a" / task_id
    os.utime(folder, (at, at))
    return folder


def test_old_tasks_folders_are_removed_but_for_those_to_keep(workspace: Path) -> None:
    old, kept, new = aged(workspace, "old", 100), aged(workspace, "kept", 100), aged(workspace, "new", 300)
    (old / "made").mkdir()
    os.utime(old, (100, 100))
    assert prune(workspace, before=200, keep=["kept"]) == 1
    assert (old.exists(), kept.exists(), new.exists()) == (False, True, True)
    assert (workspace / ".a2a" / ".gitignore").exists()


def test_pruning_follows_no_link(workspace: Path, elsewhere: Path) -> None:
    old = aged(workspace, "old", 100)
    (old / "link").symlink_to(elsewhere)
    os.utime(old, (100, 100))
    (workspace / ".a2a" / "link").symlink_to(elsewhere)
    os.utime(workspace / ".a2a" / "link", (100, 100), follow_symlinks=False)
    assert prune(workspace, before=200) == 1
    assert untouched(elsewhere)


def test_pruning_where_nothing_was_ever_laid_down(workspace: Path, elsewhere: Path) -> None:
    assert prune(workspace, before=200) == 0
    (workspace / ".a2a").symlink_to(elsewhere)
    assert prune(workspace, before=2e9) == 0
    assert untouched(elsewhere)
