"""The temporary folder of a run of `codex exec`: the output schema, and images."""

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
"""The prefix of a run's folder in the temporary directory."""

T = TypeVar("T")

Folder: TypeAlias = Callable[[], Path]
"""Returns the folder of a run, and creates it with the first call."""


@asynccontextmanager
async def written_run_files(lay: Callable[[Folder], T]) -> AsyncIterator[T]:
    """Call `lay` in a thread and yield its result; the folder is removed when the block is left."""
    files = _Files()
    try:
        yield await anyio.to_thread.run_sync(files.lay, lay)
    finally:
        await run_in_thread(files.remove)


class _Files:
    """A folder that is filled in a thread, which may still run after asyncio's own cancellation."""

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
        """Remove the folder after waiting for a running `lay`."""
        with self._alone:
            self._is_over = True
            self._held.close()

    def _made(self) -> Path:
        while self._folder is None:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            descriptor = _held(folder)
            # `clear_leftovers` of another process may have locked it first.
            if descriptor is not None:
                self._held.callback(os.close, descriptor)
                self._held.callback(shutil.rmtree, folder, ignore_errors=True)
                self._folder = folder
        return self._folder


def write_file(options: RunOptions, folder: Folder) -> RunFiles:
    """Write the files of a run. Codex splits paths at commas, so an image with one in its path is linked.

    Raises:
        InputRefused: an image does not exist.
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
    """Remove the folders of killed runs, which hold no lock any more.

    `of_user`: the owner of the folders; None for the current user.
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
    """Return a descriptor that holds the folder's lock; None if another process holds it, or the folder is missing."""
    with suppress(FileNotFoundError), ExitStack() as opened:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        if try_lock_file(descriptor, folder):
            opened.pop_all()
            return descriptor
    return None
