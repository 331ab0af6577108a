"""Processes of coding CLIs: start one in its own process group, keep the end of its output, and end its descendants."""

import glob
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import anyio
from anyio.abc import ByteReceiveStream

from codex_workspace.common.concurrency import PipeReader, PipeWriter, task_group
from codex_workspace.common.errors import CodexCannotStart, redact_config_error
from codex_workspace.common.processes import (
    find_marked,
    fork_count,
    kill_all,
    kill_marked,
    process_tree,
    processes_since,
)
from codex_workspace.runtimes.launch import MARK, Launch, child_environment

logger = logging.getLogger(__name__)

QUOTED_BYTES: Final = 2048
"""How much of the end of stderr is quoted."""

KEPT_BYTES: Final = 64 * 1024
"""How much of an output's end is kept; a line that names each MCP server that failed, with its reason, is some KB."""

MASK: Final = b"***"
KILL_GRACE_S: Final = 1.0
POLL_S: Final = 0.005

TERM_GRACE_S: Final = 1.5
"""How long a process may take to exit after SIGTERM before it receives SIGKILL."""

REAP_S: Final = 1.0
"""How long to block for a killed process if the task was cancelled; it takes a few milliseconds."""

DRAIN_S: Final = 0.25
"""How long to wait for the rest of a dead process's output; a descendant may hold the pipe open indefinitely."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

Delay: TypeAlias = Callable[[Callable[[], bool]], Awaitable[None]]
"""Waits until a process may be ended; the argument tells whether it has exited."""


class OutputTail:
    """The end of an output stream; `secrets` are masked, the longest first."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = secrets
        self._longest = max((len(secret) for secret in secrets), default=0)
        self._kept = b""

    async def read(self, stream: ByteReceiveStream) -> None:
        """Read a stream to its end, so that its writer never blocks."""
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError):
            while True:
                data = await stream.receive()
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug("output: %r", redact_config_error(data[:QUOTED_BYTES].decode("utf-8", "replace")))
                self._kept = (self._kept + data)[-(KEPT_BYTES + self._longest) :]

    def text(self) -> str:
        """Return the end of the output without secrets."""
        shown = self._kept
        for secret in self._secrets:
            shown = shown.replace(secret, MASK)
        # A full buffer may begin with the end of a secret.
        cut = self._longest if len(self._kept) == KEPT_BYTES + self._longest else 0
        return shown[cut:].decode("utf-8", "replace")


@dataclass(slots=True)
class Process:
    """A running process, its pidfd, its stderr's end, and the `forks` before it. `delay` waits before it is ended."""

    popen: subprocess.Popen[bytes]
    pidfd: int
    stderr: OutputTail
    mark: str
    forks: int
    delay: Delay | None = None
    over: anyio.Event = field(default_factory=anyio.Event)
    is_ended: bool = False

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

    def last_lines(self, at_most: int = QUOTED_BYTES) -> str:
        """Return the last `at_most` bytes of stderr without colours, secrets, and values of codex's configuration."""
        # Before the text is cut: values are recognized by the text before them.
        shown = redact_config_error(_COLOUR.sub("", self.stderr.text()))
        return shown.encode()[-at_most:].decode("utf-8", "replace").strip()

    def how_it_ended(self) -> str:
        """Return how the process ended, as half a sentence."""
        match self.popen.poll():
            case None:
                return "closed its output"
            case code if code < 0:
                return f"was ended by signal {-code} ({signal.Signals(-code).name})"
            case code:
                return f"ended with exit code {code}"

    async def end(self) -> None:
        """End the process and all its descendants, also if the task is cancelled."""
        if self.is_ended:
            return
        # The CLI may start descendants without the mark, and kills none of them when it is killed.
        pid = self.popen.pid
        descendants = process_tree(pid, processes_since(pid, self.forks))

        def leftovers() -> set[int]:
            later = processes_since(pid, self.forks)
            return {*process_tree(pid, later, descendants), *find_marked(MARK, self.mark, later)}

        try:
            with anyio.CancelScope(shield=True):
                if self.exit_code is None and self.delay is not None:
                    await self.delay(lambda: self.exit_code is not None)
                    descendants = process_tree(pid, processes_since(pid, self.forks), descendants)
                if self.exit_code is None:
                    self.signal_group(signal.SIGTERM)
                    if not await self.ended_within(TERM_GRACE_S):
                        self.signal_group(signal.SIGKILL)
                        await self.ended_within(KILL_GRACE_S)
                await anyio.to_thread.run_sync(kill_all, leftovers)
                self.is_ended = True
        finally:
            if not self.is_ended:
                # asyncio's own cancellation passes the shield, and may come again.
                self.signal_group(signal.SIGKILL)
                kill_all(leftovers)
                with suppress(subprocess.TimeoutExpired):
                    self.popen.wait(REAP_S)


def new_mark(launch: Launch) -> str:
    """Return the mark of a new process; see `MARK`."""
    return f"{launch.family}.{uuid.uuid4().hex}"


def spawn(launch: Launch, arguments: Sequence[str], mark: str) -> tuple[Process, PipeWriter, PipeReader, PipeReader]:
    """Start a program as the leader of its own process group; return it with its stdin, stdout and stderr.

    Raises:
        CodexCannotStart: the operating system cannot start it.
    """
    forks = fork_count()
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
    process = Process(popen, os.pidfd_open(popen.pid), OutputTail(_secrets_of(launch)), mark, forks)
    assert popen.stdin is not None
    assert popen.stdout is not None
    assert popen.stderr is not None
    pipes = [os.dup(pipe.fileno()) for pipe in (popen.stdin, popen.stdout, popen.stderr)]
    for pipe in (popen.stdin, popen.stdout, popen.stderr):
        pipe.close()
    return process, PipeWriter(pipes[0]), PipeReader(pipes[1]), PipeReader(pipes[2])


def _secrets_of(launch: Launch) -> list[bytes]:
    secrets = {*launch.secrets, *([launch.api_key] if launch.api_key else [])}
    return sorted((os.fsencode(secret) for secret in secrets if secret), key=len, reverse=True)


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """A command that has exited, and the end of its output without secrets."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of stderr, or of stdout if stderr is empty; "" without any output."""
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines()]
        return next((line for line in reversed(lines) if line), "")


@asynccontextmanager
async def running(
    launch: Launch, arguments: Sequence[str], mark: str, delay: Delay | None = None
) -> AsyncIterator[tuple[Process, PipeWriter, PipeReader]]:
    """Start a program like `spawn` and read its stderr; yield it with its stdin and stdout.

    Leaving the block ends the program, after `delay`, and all its descendants.
    """
    process, stdin, stdout, stderr = spawn(launch, arguments, mark)
    process.delay = delay
    try:
        async with task_group() as tasks:
            tasks.start_soon(process.watch)
            tasks.start_soon(process.stderr.read, stderr)
            try:
                yield process, stdin, stdout
            finally:
                await process.end()
                tasks.cancel_scope.deadline = anyio.current_time() + DRAIN_S
    finally:
        with anyio.CancelScope(shield=True):
            for stream in (stdin, stdout, stderr):
                await stream.aclose()
        process.close()


async def run_command(launch: Launch, *arguments: str, within_s: float, delay: Delay | None = None) -> CompletedCommand:
    """Run the CLI with an empty stdin until it exits; end all its descendants.

    Args:
        launch: how to start it.
        arguments: its arguments.
        within_s: how long it may take.
        delay: waits before the process is ended.

    Raises:
        CodexCannotStart: it cannot be started, or takes longer.
    """
    output = OutputTail(_secrets_of(launch))
    command = [str(launch.binary), *arguments]
    async with running(launch, command, new_mark(launch), delay) as (process, stdin, stdout):
        await stdin.aclose()
        with anyio.move_on_after(within_s):
            async with task_group() as tasks:
                tasks.start_soon(output.read, stdout)
                await process.over.wait()
                # A descendant may hold the pipe open indefinitely.
                tasks.cancel_scope.deadline = anyio.current_time() + DRAIN_S
        if not process.over.is_set():
            raise CodexCannotStart(f"codex {arguments[0]} did not end within {within_s:g} s")
    return CompletedCommand(process.popen.returncode, output.text(), process.stderr.text())


@contextmanager
def run_folder(launch: Launch) -> Iterator[Path]:
    """Create a temporary folder; `end_leftovers` removes it if this process is killed."""
    with tempfile.TemporaryDirectory(prefix=_folder_prefix(launch.family), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _folder_prefix(family: str) -> str:
    return f"codex-workspace-{family}-"


async def end_leftovers(family: str) -> None:
    """Kill the processes that a killed agent of the same family left behind, and remove its temporary folders.

    A CLI usually exits when its stdin closes; one that hangs, or a command of it, does not, and keeps its locks. No
    other process of the family may be running.
    """
    ended = await kill_marked(MARK, f"{family}.", or_longer=True)
    if ended:
        logger.warning("killed %d processes that an earlier agent left behind", ended)
    await anyio.to_thread.run_sync(_remove_folders, family)


def _remove_folders(family: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(_folder_prefix(family))}*"):
        shutil.rmtree(folder, ignore_errors=True)
