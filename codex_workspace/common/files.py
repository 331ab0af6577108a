"""One agent for one state folder: a lock that the kernel holds for as long as the process lives, and who has it.

Files that are replaced in one step: whoever reads one finds the old or the new, and after a crash too.
"""

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from errno import EAGAIN
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.common.errors import ConfigError

LOCK_NAME: Final = "agent.lock"

LOCK_TIMEOUT_S: Final = 1.0
"""A holder may be just ending, or be the doctor, who tries the lock for an instant."""

UNKNOWN: Final = "it does not say which"

_TRY_AGAIN_S: Final = 0.05
_MAX_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a folder: `where` is the address it answers at, or its command; `since` is ISO 8601, in UTC."""

    pid: int
    host: str
    since: str
    where: str

    def __str__(self) -> str:
        host = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"pid {self.pid}{host}, since {self.since}, {self.where}"


@asynccontextmanager
async def lock_folder(folder: Path, where: str | None = None) -> AsyncIterator[None]:
    """Hold a folder for this process; a dead process holds none, whatever its file says.

    No child inherits the lock. The file stays behind, empty: who took it away could take it from under the next one.

    Raises:
        ConfigError: another process holds it; the sentence says which. Or the folder's file system has no locks.
    """
    descriptor = _open(folder)
    try:
        if not await _lock_in_time(descriptor, folder):
            who = _said(descriptor) or UNKNOWN
            raise ConfigError(
                f"WORKSPACE_STATE_DIR: another agent works on {folder} ({who}); stop it, or name another folder"
            )
        _write(descriptor, _this_process(where))
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def lock_holder(folder: Path) -> Holder | str | None:
    """Return who holds a folder, a word where the holder does not say, None where nobody does. Nothing is changed."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _said(descriptor) or UNKNOWN
    finally:
        os.close(descriptor)
    return None


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed, where nobody else holds its lock; tell whether that was so.

    Raises:
        OSError: its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock_file(descriptor: int, path: Path) -> bool:
    """Do what `try_lock` does, and tell whether `path` is what is held: another may have removed that before.

    Raises:
        OSError: as `try_lock`.
    """
    return try_lock(descriptor) and _is_still(descriptor, path)


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _open(folder: Path) -> int:
    try:
        return os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"WORKSPACE_STATE_DIR: {folder / LOCK_NAME} cannot be opened: {error.strerror}; "
            "give this user the right to write there, or name another folder"
        ) from error


async def _lock_in_time(descriptor: int, folder: Path) -> bool:
    for _ in range(round(LOCK_TIMEOUT_S / _TRY_AGAIN_S)):
        if _lock(descriptor, folder):
            return True
        await anyio.sleep(_TRY_AGAIN_S)
    return False


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        return try_lock(descriptor)
    except OSError as error:
        raise ConfigError(
            f"WORKSPACE_STATE_DIR: {folder} cannot be locked against a second agent: {error.strerror}; "
            "name a folder on a local disk"
        ) from error


def _this_process(where: str | None) -> Holder:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return Holder(os.getpid(), socket.gethostname(), since, where or " ".join(sys.orig_argv[:4]))


def _write(descriptor: int, holder: Holder) -> None:
    text = json.dumps({"pid": holder.pid, "host": holder.host, "since": holder.since, "where": holder.where})
    # A full disk is no reason to do without the lock: it only does not say whose it is then.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _said(descriptor: int) -> Holder | None:
    try:
        match json.loads(os.pread(descriptor, _MAX_BYTES, 0)):
            case {"pid": int(pid), "host": str(host), "since": str(since), "where": str(where)}:
                return Holder(pid, host, since, where)
    except (ValueError, RecursionError):
        pass
    return None


PATIENCE_S_REPLACING: Final = 10.0
"""How long another process that replaces the same file is waited for; it takes some milliseconds."""

_TRY_AGAIN_S_REPLACING: Final = 0.01


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
    ends = time.monotonic() + PATIENCE_S_REPLACING
    while True:
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # One that was locked by another may be the file by now.
            is_ours = try_lock_file(descriptor, new)
        except BaseException:
            os.close(descriptor)
            raise
        if is_ours:
            return descriptor
        os.close(descriptor)
        if time.monotonic() >= ends:
            raise BlockingIOError(EAGAIN, "another process is replacing it", str(new))
        time.sleep(_TRY_AGAIN_S_REPLACING)


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
