"""Bounded reading, atomic replacement, and locks of files (one agent per folder and database file)."""

import fcntl
import json
import os
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from errno import EAGAIN, EFBIG, EINVAL, EISDIR
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.common.errors import ConfigError

LOCK_NAME: Final = "agent.lock"

LOCK_TIMEOUT_S: Final = 1.0
"""The lock's holder may be about to exit, or be `doctor`, which releases it at once."""

LOCK_INTERVAL_S: Final = 0.05

UNKNOWN: Final = "process unknown"

SIDE_FILES: Final = ("-wal", "-shm", "-journal")
"""What SQLite appends to the name of a file for its other files."""

REPLACE_TIMEOUT_S: Final = 10.0
"""How long to wait for another process that replaces the same file; it takes some milliseconds."""

REPLACE_INTERVAL_S: Final = 0.01

_MAX_BYTES: Final = 4096

MAX_CONFIG_BYTES: Final = 1 << 20
"""The limit for every file that an operator provides; some have a lower one of their own."""


def read_config_file(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """Return the content of a file that an operator provides; follows links.

    Raises:
        OSError: it cannot be read, is not regular, or has more than `max_bytes`; `strerror` continues a sentence.
    """
    content = read_regular(file, max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(EFBIG, f"it has more than {max_bytes} bytes", str(file))
    return content


def read_regular(file: Path, max_bytes: int) -> bytes:
    """Return the first `max_bytes` of a regular file. Never waits for a pipe's writer.

    Raises:
        OSError: it cannot be read, or is not regular.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(file))
        if not stat.S_ISREG(mode):
            raise OSError(EINVAL, "it is a pipe or a device; write its content to a regular file", str(file))
        content = b""
        while len(content) < max_bytes and (piece := os.read(descriptor, max_bytes - len(content))):
            content += piece
        return content
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a folder: `where` is its address or command, `since` a time (ISO 8601, UTC)."""

    pid: int
    host: str
    since: str
    where: str

    def __str__(self) -> str:
        host = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"pid {self.pid}{host}, since {self.since}, {self.where}"


@asynccontextmanager
async def lock_folder(
    folder: Path, where: str | None = None, setting: str = "WORKSPACE_STATE_DIR"
) -> AsyncIterator[None]:
    """Hold the lock of a folder, or of a file, that the environment variable `setting` names.

    The kernel releases it when the process ends, and children do not inherit it. The lock file is emptied but not
    removed: removing it would release the lock of a process that has just opened it.

    Raises:
        ConfigError: another process holds the lock, or the file system has no locks.
    """
    descriptor = _open_lock(folder, setting)
    try:
        if not await _lock_in_time(descriptor, folder, setting):
            holder = _read_holder(descriptor) or UNKNOWN
            raise ConfigError(f"{setting}: another agent uses {folder} ({holder}); stop it, or set another one")
        _write_holder(descriptor, where)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def lock_holder(folder: Path) -> Holder | str | None:
    """Return the process that holds the lock, `UNKNOWN` if it is not known, None if it is not locked."""
    try:
        descriptor = os.open(_lock_file(folder), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(descriptor) or UNKNOWN
    finally:
        os.close(descriptor)
    return None


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; return False if another process holds the lock.

    Raises:
        OSError: the file system has no locks.
    """
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def try_lock_file(descriptor: int, path: Path) -> bool:
    """Lock an open file; return False if another process holds the lock, or has removed or replaced `path`.

    Raises:
        OSError: as `try_lock`.
    """
    try:
        return try_lock(descriptor) and os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock_file(folder: Path) -> Path:
    """Return the lock file inside a folder, or beside a file."""
    return folder.with_name(f"{folder.name}.lock") if folder.is_file() else folder / LOCK_NAME


def _open_lock(folder: Path, setting: str) -> int:
    file = _lock_file(folder)
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{setting}: {file} cannot be opened: {error.strerror}; "
            "make its folder writable for this user, or set another one"
        ) from error


async def _lock_in_time(descriptor: int, folder: Path, setting: str) -> bool:
    try:
        for _ in range(round(LOCK_TIMEOUT_S / LOCK_INTERVAL_S)):
            if try_lock(descriptor):
                return True
            await anyio.sleep(LOCK_INTERVAL_S)
    except OSError as error:
        raise ConfigError(
            f"{setting}: {folder} cannot be locked: {error.strerror}; use a folder on a local disk"
        ) from error
    return False


def _write_holder(descriptor: int, where: str | None) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = Holder(os.getpid(), socket.gethostname(), since, where or " ".join(sys.orig_argv[:4]))
    # If the disk is full, the lock works without its holder's name.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)


def _read_holder(descriptor: int) -> Holder | None:
    try:
        match json.loads(os.pread(descriptor, _MAX_BYTES, 0)):
            case {"pid": int(pid), "host": str(host), "since": str(since), "where": str(where)}:
                return Holder(pid, host, since, where)
    except (ValueError, RecursionError):
        pass
    return None


def replace_file(file: Path, data: bytes, mode: int = 0o600) -> None:
    """Create or replace a file atomically and durably; readers see the old or the new content.

    The temporary file is `.<name>.new`; the next call reuses one that a killed process left.

    Raises:
        OSError: the file cannot be written; the old content is unchanged.
    """
    new = file.parent / f".{file.name}.new"
    descriptor = _open_locked(new)
    try:
        _write(descriptor, data, mode)
        os.replace(new, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(new)
        raise
    finally:
        os.close(descriptor)
    # Some file systems cannot sync folders; the file is replaced anyway.
    with suppress(OSError):
        _sync_folder(file.parent)


def _write(descriptor: int, data: bytes, mode: int) -> None:
    os.ftruncate(descriptor, 0)
    os.fchmod(descriptor, mode)
    with os.fdopen(descriptor, "wb", closefd=False) as stream:
        stream.write(data)
    os.fsync(descriptor)


def _open_locked(new: Path) -> int:
    """Open a temporary file that no other process writes until it is closed."""
    deadline = time.monotonic() + REPLACE_TIMEOUT_S
    while True:
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # The process that held the lock may have renamed the file before.
            locked = try_lock_file(descriptor, new)
        except BaseException:
            os.close(descriptor)
            raise
        if locked:
            return descriptor
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise BlockingIOError(EAGAIN, "another process is replacing it", str(new))
        time.sleep(REPLACE_INTERVAL_S)


def rename_with_side_files(file: Path, new: Path) -> None:
    """Rename a SQLite file and its side files; the main file last, so that a repetition completes an interrupted call.

    Raises:
        OSError: a file cannot be renamed.
    """
    for suffix in (*SIDE_FILES, ""):
        with suppress(FileNotFoundError):
            file.with_name(file.name + suffix).rename(new.with_name(new.name + suffix))


MARK_OFFSET: Final = 60
"""Where SQLite stores `user_version` in a file: 4 bytes, the highest first."""


class WatchedPaths:
    """Files and folders that must stay in their places while the agent runs.

    What is written to an open file that was deleted or moved is lost, without an error. Each path is kept open: some
    file systems give a path that nobody uses a new inode number. Close this after all connections to a SQLite file:
    when a process closes any descriptor of a file, it loses its locks on it.

    Args:
        paths: the existing paths, by their names for messages.
        mark: what the files contain at `MARK_OFFSET`; a file that does not contain it yet may be overwritten.
    """

    def __init__(self, paths: Mapping[str, Path], mark: bytes | None = None) -> None:
        self._watched = [(name, path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)) for name, path in paths.items()]
        self._mark = mark
        self._marked = {opened for _, path, opened in self._watched if path.is_file() and self._has_mark(opened)}

    def problem(self) -> str | None:
        """Return what happened to one of the paths, and what the operator has to do; takes microseconds."""
        for name, path, opened in self._watched:
            if not _is_at(path, opened):
                return f"{name} was deleted, moved or replaced; restore it and restart the agent"
            if opened in self._marked and not self._has_mark(opened):
                return f"{name} was overwritten; stop the agent, restore a backup and start the agent"
            if not os.access(path, os.W_OK):
                return f"{name} is read-only; make it writable again"
        return None

    def close(self) -> None:
        """Stop watching."""
        for _, _, opened in self._watched:
            os.close(opened)

    def _has_mark(self, opened: int) -> bool:
        return self._mark is not None and os.pread(opened, len(self._mark), MARK_OFFSET) == self._mark


def _is_at(path: Path, opened: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(opened))
    return False


def _sync_folder(folder: Path) -> None:
    """Write the folder's entries to disk, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
