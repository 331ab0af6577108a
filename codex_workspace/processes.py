"""Find and end processes that outlived the one that started them."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio

SWEEP_ROUNDS: Final = 3
"""A process may fork while it is being ended; what is left after this many rounds does nothing but fork."""


def marked(name: str, value: str) -> list[int]:
    """Return the ids of all processes whose environment holds `name=value`, zombies left out. Source: /proc."""
    wanted = f"{name}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # Gone meanwhile, or another user's: neither is ours.
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def resident_bytes(process_id: int) -> int:
    """Return how much memory a process holds; 0 for one that is gone. Source: /proc."""
    try:
        pages = (Path("/proc") / str(process_id) / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def sweep(name: str, value: str) -> None:
    """Kill every process whose environment holds `name=value`: commands live in sessions of their own."""
    with anyio.CancelScope(shield=True):
        for _ in range(SWEEP_ROUNDS):
            processes = await anyio.to_thread.run_sync(marked, name, value)
            if not processes:
                return
            for process in processes:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            await anyio.sleep(0.02)
