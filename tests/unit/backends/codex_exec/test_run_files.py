"""Folders of runs: made where they are needed, gone afterwards, and told from those of the dead."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import anyio
import pytest

from codex_workspace.backends.codex_exec.command import RunFiles
from codex_workspace.backends.codex_exec.run_files import PREFIX, Folder, clear_leftovers, write_file, written_run_files
from codex_workspace.common.errors import InputRefused
from codex_workspace.runtimes.options import RunOptions
from tests.e2e.agent_process import REPOSITORY

KILLED = """
import asyncio, os
from codex_workspace.backends.codex_exec.run_files import written_run_files

async def main():
    async with written_run_files(lambda folder: (folder() / "schema.json").write_text("{}")):
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, and nothing in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def inside(folder: Path) -> list[Path]:
    """Return what is in a folder."""
    return list(folder.iterdir())


async def test_what_needs_no_folder_has_none(temporary: Path, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.touch()
    async with written_run_files(lambda folder: write_file(RunOptions(images=(image,)), folder)) as files:
        assert files == RunFiles(None, (image,))
        assert inside(temporary) == []


async def test_all_that_needs_one_is_in_one_that_is_gone_afterwards(temporary: Path, tmp_path: Path) -> None:
    image = tmp_path / "a,b.png"
    image.write_bytes(b"png")
    options = RunOptions(output_schema={"type": "object"}, images=(image,))
    async with written_run_files(lambda folder: write_file(options, folder)) as files:
        assert files.schema is not None
        assert files.schema.read_text() == '{"type": "object"}'
        [link] = files.images
        assert (link.read_bytes(), link.suffix, "," in str(link)) == (b"png", ".png", False)
        assert inside(temporary) == [files.schema.parent] == [link.parent]
    assert inside(temporary) == []
    assert image.exists()


async def test_what_cannot_be_laid_down_leaves_no_folder(temporary: Path, tmp_path: Path) -> None:
    options = RunOptions(output_schema={}, images=(tmp_path / "none.png",))
    with pytest.raises(InputRefused, match=r"The image none\.png is no file"):
        async with written_run_files(lambda folder: write_file(options, folder)):
            pass
    assert inside(temporary) == []


async def test_a_task_that_is_cancelled_while_files_are_written_leaves_no_folder(temporary: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slowly(folder: Folder) -> None:
        begun.set()
        goes_on.wait(5)
        folder()

    async def run() -> None:
        async with written_run_files(slowly):
            pass

    task = asyncio.create_task(run())
    await anyio.to_thread.run_sync(begun.wait, 5)
    task.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inside(temporary) == []


async def test_a_run_that_is_cancelled_leaves_no_folder(temporary: Path) -> None:
    with anyio.CancelScope() as scope:
        async with written_run_files(lambda folder: folder()) as made:
            assert inside(temporary) == [made]
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert inside(temporary) == []


async def test_a_task_that_is_cancelled_again_while_its_folder_is_removed_leaves_none(temporary: Path) -> None:
    begun = asyncio.Event()

    async def run() -> None:
        async with written_run_files(lambda folder: folder()):
            begun.set()
            await anyio.sleep_forever()

    for steps in range(1, 5):
        task = asyncio.create_task(run())
        await begun.wait()
        begun.clear()
        while not task.done():
            task.cancel()
            for _ in range(steps):
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert inside(temporary) == [], steps


async def test_other_users_folders_are_left_alone(temporary: Path) -> None:
    folder = temporary / f"{PREFIX}left"
    folder.mkdir()
    clear_leftovers(of_user=os.getuid() + 1)
    assert inside(temporary) == [folder]
    clear_leftovers()
    assert inside(temporary) == []


async def test_a_killed_run_s_folder_is_removed_and_nothing_else(temporary: Path, tmp_path: Path) -> None:
    await anyio.run_process([sys.executable, "-c", KILLED], check=False, cwd=REPOSITORY, stderr=subprocess.STDOUT)
    [left] = inside(temporary)
    assert (left / "schema.json").exists()
    (tmp_path / "aim").mkdir()
    kept = [temporary / name for name in ("other", f"{PREFIX}file", f"{PREFIX}link")]
    kept[0].mkdir()
    kept[1].touch()
    kept[2].symlink_to(tmp_path / "aim")
    async with written_run_files(lambda folder: folder()) as living:
        clear_leftovers()
        assert set(inside(temporary)) == {*kept, living}
    assert (tmp_path / "aim").exists()


async def test_nobody_s_folder_is_taken_while_it_is_made(temporary: Path) -> None:
    enough = threading.Event()

    def clear() -> None:
        while not enough.is_set():
            clear_leftovers()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, clear)
        try:
            for _ in range(500):
                async with written_run_files(lambda folder: folder()) as made:
                    assert made in inside(temporary)
        finally:
            enough.set()
