"""What the kernel shows of processes: keep our own to ourselves, find and end those that outlived who started them.

Byte streams over raw pipe ends.

Not asyncio's subprocess streams: a pending `Process.wait()` there does not return while any descendant of the process
holds a pipe, and a closed process leaves transports behind. Here the pipes are ours, and an exit is seen on a pidfd.
"""

import ctypes
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

_PR_SET_DUMPABLE: Final = 4

KILL_ROUNDS: Final = 3
"""A process may fork while it is being ended; what is left after this many rounds does nothing but fork."""


def protect_from_inspection() -> None:
    """Let no process of the same user read this one's environment or memory; one with CAP_SYS_PTRACE still may.

    Commands that the model runs are of the same user. What is started from here is not covered, nor is a program that
    takes this one's place. Debuggers and core dumps of this process are lost with it.

    Raises:
        OSError: the kernel does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def find_marked(name: str, value: str, *, or_longer: bool = False) -> list[int]:
    """Return the ids of all processes whose environment holds `name=value`, zombies left out. Source: /proc.

    Where the environment cannot be read, as of a program whose file cannot be, an argument `….name="value"` counts.

    or_longer: also those whose value only begins so.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # Gone meanwhile, or another user's: neither is ours.
            with suppress(OSError):
                if _has_mark(folder, name, value, or_longer=or_longer):
                    found.append(int(folder.name))
    return found


def _has_mark(process: Path, name: str, value: str, *, or_longer: bool) -> bool:
    wanted = f"{name}={value}".encode()
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except PermissionError:
        quoted = f'.{name}="{value}' + ("" if or_longer else '"')
        return any(quoted.encode() in argument for argument in (process / "cmdline").read_bytes().split(b"\0"))
    return any(each == wanted or (or_longer and each.startswith(wanted)) for each in variables)


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    session: int
    began: int
    is_zombie: bool


def process_tree(process_id: int, known: Mapping[int, int] = MappingProxyType({})) -> dict[int, int]:
    """Return the process, if it runs, all that descend from it, and all of their sessions: ids and begins.

    Of one that has ended its session is left. `known` are such processes of before, whose parents may be gone.
    Source: /proc; a begin is in ticks of the kernel's clock, and tells a process from a later one of the same id.
    """
    table = _stats()
    leaders = {process_id, *known}
    found = {id_: each.began for id_, each in table.items() if id_ == process_id or known.get(id_) == each.began}
    more = found
    while more:
        found |= more
        more = {
            id_: each.began
            for id_, each in table.items()
            if id_ not in found and (each.parent in found or each.session in found or each.session in leaders)
        }
    return {id_: began for id_, began in found.items() if not table[id_].is_zombie}


async def kill_tree(process_id: int, known: Mapping[int, int]) -> None:
    """Kill what `process_tree` finds, which has found `known` before, and wait until it is gone."""
    with anyio.CancelScope(shield=True):
        for _ in _killings(process_id, known):
            await anyio.sleep(0.02)


def kill_tree_nowait(process_id: int, known: Mapping[int, int]) -> None:
    """Do what `kill_tree` does, without waiting."""
    for _ in _killings(process_id, known):
        pass


def _killings(process_id: int, known: Mapping[int, int]) -> Iterator[None]:
    """Kill what `process_tree` finds, and yield, until it finds nothing or `KILL_ROUNDS` are over."""
    for _ in range(KILL_ROUNDS):
        found = process_tree(process_id, known)
        if not found:
            return
        _kill(found)
        known = {**known, **found}
        yield


def _stats() -> dict[int, _Stat]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # Gone meanwhile.
            with suppress(OSError):
                # The name, in brackets, may hold anything.
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                found[int(folder.name)] = _Stat(int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in "ZX")
    return found


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def resident_bytes(process_id: int) -> int:
    """Return how much memory a process holds; 0 for one that is gone. Source: /proc."""
    try:
        pages = (Path("/proc") / str(process_id) / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def kill_marked(name: str, value: str, *, or_longer: bool = False) -> int:
    """Kill every process that `find_marked` finds; return how many were found."""
    swept: set[int] = set()
    with anyio.CancelScope(shield=True):
        for _ in range(KILL_ROUNDS):
            processes = await anyio.to_thread.run_sync(partial(find_marked, name, value, or_longer=or_longer))
            swept.update(processes)
            if not processes:
                break
            _kill(processes)
            await anyio.sleep(0.02)
    return len(swept)


def kill_marked_nowait(name: str, value: str) -> None:
    """Do what `kill_marked` does, without waiting."""
    for _ in range(KILL_ROUNDS):
        _kill(find_marked(name, value))


READ_BYTES: Final = 256 * 1024
"""One read takes at most this much: a few thousand deltas, or a quarter of codex's usual longest line."""


class PipeReader(ByteReceiveStream):
    """The reading end of a pipe, which it owns."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd

    async def receive(self, max_bytes: int = READ_BYTES) -> bytes:
        """Return what is there, after waiting for something.

        Raises:
            EndOfStream: every writer closed its end.
            ClosedResourceError: this end was closed.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._fd < 0:
                raise anyio.ClosedResourceError
            try:
                data = os.read(self._fd, max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._fd)
            else:
                if not data:
                    raise anyio.EndOfStream
                await anyio.lowlevel.cancel_shielded_checkpoint()
                return data

    async def aclose(self) -> None:
        """Close this end; a waiting `receive` ends with ClosedResourceError."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            anyio.notify_closing(fd)
            os.close(fd)


class PipeWriter(ByteSendStream):
    """The writing end of a pipe, which it owns."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd

    async def send(self, item: bytes) -> None:
        """Write all of `item`. A cancelled `send` may have written a part of it.

        Raises:
            BrokenResourceError: nobody reads the pipe any more.
            ClosedResourceError: this end was closed.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        rest = memoryview(item)
        while rest:
            if self._fd < 0:
                raise anyio.ClosedResourceError
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._fd)
            except BrokenPipeError as error:
                raise anyio.BrokenResourceError from error
        await anyio.lowlevel.cancel_shielded_checkpoint()

    async def aclose(self) -> None:
        """Close this end; the reader sees the end of the stream."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            anyio.notify_closing(fd)
            os.close(fd)
