"""The files of a run of `codex exec`: what it is told by a path and not by a word."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import anyio

from codex_workspace.backends.codex_exec.command import RunFiles
from codex_workspace.common.concurrency import run_in_thread
from codex_workspace.common.errors import InputRefused
from codex_workspace.common.files import try_lock_file
from codex_workspace.runtimes.options import RunOptions

PREFIX: Final = "codex-workspace-run-"
"""How the folder of a run begins, in the folder for temporary files."""

T = TypeVar("T")

Folder: TypeAlias = Callable[[], Path]
"""Gives the folder of a run, which is made when it is first asked for."""


@asynccontextmanager
async def written_run_files(lay: Callable[[Folder], T]) -> AsyncIterator[T]:
    """Yield what `lay` returns, which is called in a thread; the run's folder is there until the block is left."""
    files = _Files()
    try:
        yield await anyio.to_thread.run_sync(files.lay, lay)
    finally:
        await run_in_thread(files.remove)


class _Files:
    """A folder that is filled in a thread; asyncio's own cancelling leaves a thread at work that nobody waits for."""

    def __init__(self) -> None:
        self._alone = threading.Lock()
        self._folder: Path | None = None
        self._held = ExitStack()
        self._is_over = False

    def lay(self, lay: Callable[[Folder], T]) -> T:
        """Return what `lay` does, unless the folder was removed before."""
        with self._alone:
            if self._is_over:
                raise RuntimeError("the run is over")
            return lay(self._made)

    def remove(self) -> None:
        """Remove the folder, after waiting for a `lay` that is under way."""
        with self._alone:
            self._is_over = True
            self._held.close()

    def _made(self) -> Path:
        while self._folder is None:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            descriptor = _held(folder)
            # Another's `clear_leftovers` may have taken it before it was held.
            if descriptor is not None:
                self._held.callback(os.close, descriptor)
                self._held.callback(shutil.rmtree, folder, ignore_errors=True)
                self._folder = folder
        return self._folder


def write_file(options: RunOptions, folder: Folder) -> RunFiles:
    """Write what codex reads from files. A path with a comma would be two to it, so such an image gets another.

    Raises:
        InputRefused: an image is no file.
    """
    schema = None
    if options.output_schema is not None:
        schema = folder() / "schema.json"
        schema.write_text(json.dumps(options.output_schema))
    return RunFiles(schema, tuple(_image(image, at, folder) for at, image in enumerate(options.images)))


def _image(image: Path, at: int, folder: Folder) -> Path:
    if not image.is_file():
        raise InputRefused(f"The image {image.name} is no file.")
    if "," not in str(image):
        return image.absolute()
    link = (folder() / str(at)).with_suffix(image.suffix if "," not in image.suffix else "")
    link.symlink_to(image.absolute())
    return link


def clear_leftovers(of_user: int | None = None) -> None:
    """Remove the folders of killed runs: the kernel holds a living one's lock.

    of_user: whose they are, None for this process's own user; what others have there is left to them.
    """
    owner = os.getuid() if of_user is None else of_user
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            descriptor = _held(folder)
            if descriptor is not None:
                try:
                    if os.fstat(descriptor).st_uid == owner:
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(descriptor)


def _held(folder: Path) -> int | None:
    """Return a descriptor that holds a folder's lock; None where another holds it, or the folder is gone."""
    with suppress(FileNotFoundError), ExitStack() as opened:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        if try_lock_file(descriptor, folder):
            opened.pop_all()
            return descriptor
    return None
