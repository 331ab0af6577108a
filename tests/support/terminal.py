"""Runs a command that starts the agent on a terminal, where it generates a token."""

import os
import pty
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import psutil

from tests.support.waiting import HANG_S

TOKEN: Final = re.compile(r"^    ([\w-]{43})\r?$", re.MULTILINE)
URL: Final = re.compile(r"A2A at (http://[^\s\"]+)")
END: Final = "codex-workspace chat"
"""The last line about the token contains this."""
CTRL_C: Final = b"\x03"


@dataclass(frozen=True)
class OnTerminal:
    """An agent on a terminal, and what it has shown."""

    shown: str

    @property
    def url(self) -> str:
        (url,) = URL.findall(self.shown)
        return str(url)

    @property
    def token(self) -> str:
        (token,) = TOKEN.findall(self.shown)
        return str(token)

    @property
    def commands(self) -> str:
        """The commands that it has shown."""
        return self.shown.replace("\r", "").partition("From another terminal:\n")[2]


@asynccontextmanager
async def on_terminal(
    words: Sequence[str], env: Mapping[str, str], cwd: Path, *, by_key: bool = False
) -> AsyncIterator[OnTerminal]:
    """Run a command on a terminal, and wait until it has shown a token.

    by_key: stop it with Ctrl-C instead of a signal, because it passes keys on to a container.
    """
    ours, theirs = pty.openpty()
    process = psutil.Popen(words, env=env, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    try:
        with anyio.fail_after(HANG_S):
            while END.encode() not in shown:
                await anyio.wait_readable(ours)
                shown += _read(ours, shown)
        yield OnTerminal(shown.decode())
    finally:
        if by_key:
            os.write(ours, CTRL_C)
        else:
            process.send_signal(signal.SIGTERM)
        with anyio.CancelScope(shield=True), anyio.fail_after(HANG_S):
            await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        os.close(ours)


def _read(terminal: int, before: bytes) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError as error:  # the process has ended
        raise AssertionError(before.decode()) from error
