"""The process of a coding CLI: started as the leader of its own process group, watched, signalled, and swept up."""

import logging
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream

from codex_workspace.common.errors import CodexCannotStart, redact_config_error
from codex_workspace.common.processes import PipeReader, PipeWriter, kill_marked
from codex_workspace.runtimes.launch import MARK, Launch, child_environment

logger = logging.getLogger(__name__)

STDERR_TAIL_BYTES: Final = 2048
"""How much of the end of stderr is quoted."""

STDERR_KEPT_BYTES: Final = 64 * 1024
"""How much of it is kept; a line that names each MCP server that failed, with its reason, has some kilobytes."""

MASK: Final = b"***"
KILL_GRACE_S: Final = 1.0
POLL_S: Final = 0.005

DRAIN_S: Final = 0.25
"""How long to wait for the rest of a dead process's output; a descendant may hold the pipe open indefinitely."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(slots=True)
class Process:
    """A running process, its pidfd, and the end of its stderr."""

    popen: subprocess.Popen[bytes]
    pidfd: int
    secrets: Sequence[bytes]
    tail: bytes = b""
    over: anyio.Event = field(default_factory=anyio.Event)

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self.popen.poll()

    def close(self) -> None:
        """Close the pidfd; call this after `watch` has ended."""
        os.close(self.pidfd)

    async def watch(self) -> None:
        """Set `over` when the process has ended, even if a descendant still holds its pipes."""
        await anyio.wait_readable(self.pidfd)
        self.popen.wait()
        self.over.set()

    async def ended_within(self, seconds: float) -> bool:
        """Return whether the process ends within `seconds`."""
        # Polls, because `watch` does not run any more when a cancelled block ends its process.
        with anyio.move_on_after(seconds):
            while self.popen.poll() is None:  # noqa: ASYNC110
                await anyio.sleep(POLL_S)
        return self.popen.poll() is not None

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group."""
        if self.popen.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)

    async def drain_stderr(self, stderr: ByteReceiveStream) -> None:
        """Read stderr to its end, so that the process never blocks on it, and keep the last bytes."""
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError):
            while True:
                data = await stderr.receive()
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug(
                        "codex stderr: %r", redact_config_error(data[:STDERR_TAIL_BYTES].decode("utf-8", "replace"))
                    )
                self.tail = (self.tail + data)[-(STDERR_KEPT_BYTES + self._longest_secret) :]

    def last_lines(self, at_most: int = STDERR_TAIL_BYTES) -> str:
        """Return the last `at_most` bytes of stderr without colours, secrets, and values of codex's configuration."""
        text = self.tail
        for secret in self.secrets:
            text = text.replace(secret, MASK)
        longest = self._longest_secret
        if len(self.tail) == STDERR_KEPT_BYTES + longest:
            # The text may begin with the end of a secret.
            text = text[longest:]
        # Before the text is cut: values are recognized by the text before them.
        shown = redact_config_error(_COLOUR.sub("", text.decode("utf-8", "replace")))
        return shown.encode()[-at_most:].decode("utf-8", "replace").strip()

    @property
    def _longest_secret(self) -> int:
        return max((len(secret) for secret in self.secrets), default=0)

    def how_it_ended(self) -> str:
        """Return how the process ended, as half a sentence."""
        match self.popen.poll():
            case None:
                return "closed its output"
            case code if code < 0:
                return f"was ended by signal {-code} ({signal.Signals(-code).name})"
            case code:
                return f"ended with exit code {code}"


async def end_leftovers(family: str) -> None:
    """Kill the processes that a killed agent of the same family left behind.

    A CLI usually exits when its stdin closes; one that hangs, or a command of it, does not, and keeps its locks. No
    other process of the family may be running.
    """
    ended = await kill_marked(MARK, f"{family}.", or_longer=True)
    if ended:
        logger.warning("killed %d processes that an earlier agent left behind", ended)


def spawn(launch: Launch, arguments: Sequence[str], mark: str) -> tuple[Process, PipeWriter, PipeReader, PipeReader]:
    """Start a program as the leader of its own process group; return it with its stdin, stdout and stderr.

    Raises:
        CodexCannotStart: the operating system cannot start it.
    """
    try:
        popen = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=launch.cwd,
            env=child_environment(launch, mark),
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise CodexCannotStart(
            f"codex cannot be started: {error.filename or launch.binary}: {error.strerror}"
        ) from error
    secrets = {*launch.secrets, *([launch.api_key] if launch.api_key else [])}
    longest_first = sorted((os.fsencode(secret) for secret in secrets if secret), key=len, reverse=True)
    process = Process(popen, os.pidfd_open(popen.pid), longest_first)
    assert popen.stdin is not None
    assert popen.stdout is not None
    assert popen.stderr is not None
    pipes = [os.dup(pipe.fileno()) for pipe in (popen.stdin, popen.stdout, popen.stderr)]
    for pipe in (popen.stdin, popen.stdout, popen.stderr):
        pipe.close()
    return process, PipeWriter(pipes[0]), PipeReader(pipes[1]), PipeReader(pipes[2])
