"""Files that are replaced in one step: whoever reads one finds the old or the new, and after a crash too."""

import os
import time
from contextlib import suppress
from errno import EAGAIN
from pathlib import Path
from typing import Final

from codex_workspace.lock import hold

PATIENCE_S: Final = 10.0
"""How long another process that replaces the same file is waited for; it takes some milliseconds."""

_TRY_AGAIN_S: Final = 0.01


def replace_file(file: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file, or make it; on return it is on disk, as far as the file system can be told so.

    What a killed process has left, `.<name>.new` beside the file, is taken over by the next one that replaces it.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    new = file.parent / f".{file.name}.new"
    descriptor = _opened(new)
    try:
        os.ftruncate(descriptor, 0)
        os.fchmod(descriptor, mode)
        with os.fdopen(descriptor, "wb", closefd=False) as stream:
            stream.write(data)
        os.fsync(descriptor)
        os.replace(new, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(new)
        raise
    finally:
        os.close(descriptor)
    # Some file systems know no such thing of folders; the file is replaced all the same.
    with suppress(OSError):
        _keep_names(file.parent)


def _opened(new: Path) -> int:
    """Open the new file, which no other process writes until it is closed."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # One that was locked by another may be the file by now.
            is_ours = hold(descriptor, new)
        except BaseException:
            os.close(descriptor)
            raise
        if is_ours:
            return descriptor
        os.close(descriptor)
        if time.monotonic() >= ends:
            raise BlockingIOError(EAGAIN, "another process is replacing it", str(new))
        time.sleep(_TRY_AGAIN_S)


def _keep_names(folder: Path) -> None:
    """Have the folder's names written to disk: a new one may be forgotten where the power fails.

    Raises:
        OSError: its file system cannot do that, or this user may not read the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
