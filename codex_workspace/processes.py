"""Find and end processes that outlived the one that started them."""

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import anyio

SWEEP_ROUNDS: Final = 3
"""A process may fork while it is being ended; what is left after this many rounds does nothing but fork."""


def marked(name: str, value: str, *, or_longer: bool = False) -> list[int]:
    """Return the ids of all processes whose environment holds `name=value`, zombies left out. Source: /proc.

    or_longer: also those whose value only begins so.
    """
    wanted = f"{name}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # Gone meanwhile, or another user's: neither is ours.
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if any(each == wanted or (or_longer and each.startswith(wanted)) for each in variables):
                    found.append(int(folder.name))
    return found


def resident_bytes(process_id: int) -> int:
    """Return how much memory a process holds; 0 for one that is gone. Source: /proc."""
    try:
        pages = (Path("/proc") / str(process_id) / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def sweep(name: str, value: str, *, or_longer: bool = False) -> int:
    """Kill every process that is `marked` so, as commands live in sessions of their own; return how many were found."""
    swept: set[int] = set()
    with anyio.CancelScope(shield=True):
        for _ in range(SWEEP_ROUNDS):
            processes = await anyio.to_thread.run_sync(partial(marked, name, value, or_longer=or_longer))
            swept.update(processes)
            if not processes:
                break
            for process in processes:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            await anyio.sleep(0.02)
    return len(swept)
