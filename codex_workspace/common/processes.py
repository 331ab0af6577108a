"""Finds and kills processes by an environment variable or by descent (/proc), and byte streams over pipes.

asyncio's subprocess streams are not used: a pending `Process.wait()` does not return while a descendant of the process
holds a pipe, and a closed process leaves transports behind.
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
"""A process may fork while it is killed; processes that survive this many rounds do nothing but fork."""


def protect_from_inspection() -> None:
    """Prevent other processes of the user, such as the model's commands, from reading this one's environment and
    memory.

    Child processes and a program that replaces this one (exec) are not protected. Processes with CAP_SYS_PTRACE can
    still read it. Debuggers and core dumps do not work any more.

    Raises:
        OSError: the kernel rejects it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def find_marked(name: str, value: str, *, or_longer: bool = False) -> list[int]:
    """Return the IDs of all processes with `name=value` in their environment, except zombies.

    If the environment is not readable, because the program's file is not, an argument `….name="value"` counts.

    or_longer: also find values that start with `value`.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # It has ended meanwhile, or belongs to another user.
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
    started: int
    is_zombie: bool


def process_tree(process_id: int, known: Mapping[int, int] = MappingProxyType({})) -> dict[int, int]:
    """Return a process, its descendants and all processes of their sessions: start times by process ID.

    `known` is an earlier result; its processes' parents may have ended. A start time is in ticks of the kernel's clock
    and distinguishes a process from a later one with the same ID.
    """
    table = _stats()
    leaders = {process_id, *known}
    found = {id_: each.started for id_, each in table.items() if id_ == process_id or known.get(id_) == each.started}
    more = found
    while more:
        found |= more
        more = {
            id_: each.started
            for id_, each in table.items()
            if id_ not in found and (each.parent in found or each.session in found or each.session in leaders)
        }
    return {id_: started for id_, started in found.items() if not table[id_].is_zombie}


async def kill_tree(process_id: int, known: Mapping[int, int]) -> None:
    """Kill all processes that `process_tree` finds, and wait for their end; `known` is its earlier result."""
    with anyio.CancelScope(shield=True):
        for _ in _kill_rounds(process_id, known):
            await anyio.sleep(0.02)


def kill_tree_nowait(process_id: int, known: Mapping[int, int]) -> None:
    """Kill the same processes as `kill_tree`, without waiting."""
    for _ in _kill_rounds(process_id, known):
        pass


def _kill_rounds(process_id: int, known: Mapping[int, int]) -> Iterator[None]:
    """Kill all processes that `process_tree` finds and yield, until there are none or after `KILL_ROUNDS`."""
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
            # It has ended meanwhile.
            with suppress(OSError):
                # The name, in parentheses, may contain anything.
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                found[int(folder.name)] = _Stat(int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in "ZX")
    return found


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def resident_bytes(process_id: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        pages = (Path("/proc") / str(process_id) / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def kill_marked(name: str, value: str, *, or_longer: bool = False) -> int:
    """Kill every process that `find_marked` finds; return how many were found."""
    killed: set[int] = set()
    with anyio.CancelScope(shield=True):
        for _ in range(KILL_ROUNDS):
            processes = await anyio.to_thread.run_sync(partial(find_marked, name, value, or_longer=or_longer))
            killed.update(processes)
            if not processes:
                break
            _kill(processes)
            await anyio.sleep(0.02)
    return len(killed)


def kill_marked_nowait(name: str, value: str) -> None:
    """Kill the same processes as `kill_marked`, without waiting."""
    for _ in range(KILL_ROUNDS):
        _kill(find_marked(name, value))


READ_BYTES: Final = 256 * 1024
"""The size of one read: a few thousand deltas, or a quarter of codex's longest usual line."""


class PipeReader(ByteReceiveStream):
    """The reading end of a pipe, which it owns."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd

    async def receive(self, max_bytes: int = READ_BYTES) -> bytes:
        """Wait for data and return it.

        Raises:
            EndOfStream: all writers closed their ends.
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
        """Close this end; a waiting `receive` raises ClosedResourceError."""
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
        """Write all of `item`; a cancelled `send` may have written a part of it.

        Raises:
            BrokenResourceError: the reader closed its end.
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
