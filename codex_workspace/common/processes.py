"""Finds and kills processes by an environment variable or by descent (/proc)."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import anyio

_PR_SET_DUMPABLE: Final = 4

KILL_ROUNDS: Final = 3
"""A process may fork while it is killed; processes that survive this many rounds do nothing but fork."""


def fork_count() -> int:
    """Return how many processes and threads the kernel has started; 0 if it does not tell."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("processes ")), 0)


def all_processes() -> list[int]:
    """Return the IDs of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def processes_since(first: int, forks: int) -> list[int]:
    """Return the IDs of the process `first` and of all that may have started after it; few others are among them.

    The kernel gives out IDs in a circle and skips those in use, so the later processes have the IDs that follow.

    Args:
        first: a process of this program.
        forks: the `fork_count` before it was started.
    """
    found, now = all_processes(), fork_count()
    if now == 0:
        return found
    limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    *_, tasks, last = Path("/proc/loadavg").read_text().split()
    # The lowest 300 IDs are given out in the first round only.
    distance = now - forks + int(tasks.partition("/")[2]) + 300
    if (int(last) - first) % limit > distance:
        # Forks that failed took IDs without being counted.
        return found
    return [id_ for id_ in found if (id_ - first) % limit <= distance]


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


def find_marked(name: str, value: str, among: Iterable[int] | None = None, *, or_longer: bool = False) -> list[int]:
    """Return the IDs of the processes with `name=value` in their environment, except zombies.

    If the environment is not readable because the program's file is not, an argument `….name="value"` counts instead.

    among: the processes to look at; None for all. or_longer: also find values that start with `value`.
    """
    found = []
    for id_ in all_processes() if among is None else among:
        # The process has ended, or belongs to another user.
        with suppress(OSError):
            if _has_mark(Path(f"/proc/{id_}"), name, value, or_longer=or_longer):
                found.append(id_)
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


def process_tree(
    process_id: int, among: Iterable[int], known: Mapping[int, int] = MappingProxyType({})
) -> dict[int, int]:
    """Return a process, its descendants and all processes of their sessions: start times by process ID.

    `among` are the processes to look at. `known` is an earlier result; its processes' parents may have ended. A start
    time is in ticks of the kernel's clock and distinguishes a process from a later one with the same ID.
    """
    table = _stats(among)
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


def _stats(among: Iterable[int]) -> dict[int, _Stat]:
    found = {}
    for id_ in among:
        # The process has ended.
        with suppress(OSError):
            # The name, in parentheses, may contain anything.
            fields = Path(f"/proc/{id_}/stat").read_text(errors="replace").rpartition(")")[2].split()
            found[id_] = _Stat(int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in "ZX")
    return found


def kill_all(find: Callable[[], Iterable[int]]) -> int:
    """Kill all processes that `find` returns, until it finds none or after `KILL_ROUNDS`; return how many it found."""
    killed = set[int]()
    for _ in range(KILL_ROUNDS):
        processes = set(find())
        if not processes:
            break
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        killed |= processes
        time.sleep(0.02)
    return len(killed)


async def kill_marked(name: str, value: str, *, or_longer: bool = False) -> int:
    """Kill every process that `find_marked` finds; return how many were found."""
    with anyio.CancelScope(shield=True):
        killed = await anyio.to_thread.run_sync(kill_all, partial(find_marked, name, value, or_longer=or_longer))
    return killed  # noqa: RET504  # for mypy, the block can suppress exceptions
