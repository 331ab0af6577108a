"""One run of a coding CLI that writes a line per event: reads them, watches for silence, and ends the process."""

import logging
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from codex_workspace.common.concurrency import task_group
from codex_workspace.protocol.codex_events import (
    NO_SESSION,
    PROCESS_EXITED,
    TurnError,
    WarningReported,
    inactivity_error,
    process_exit_error,
)
from codex_workspace.protocol.jsonrpc import LineSplitter, Skipped
from codex_workspace.runtimes.convert import EventConverter
from codex_workspace.runtimes.events import AgentEvent
from codex_workspace.runtimes.launch import INACTIVITY_S, Launch
from codex_workspace.runtimes.process import DRAIN_S, KEPT_BYTES, Delay, Process, running

logger = logging.getLogger(__name__)

EXIT_GRACE_S: Final = 8.0
"""How long a CLI may take to exit after its turn: codex stores the session, and needs 5 s without DNS."""

PEEK_S: Final = 0.05
"""How long to read output that arrived while the caller was busy before the CLI counts as silent."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Time limits in seconds.

    inactivity_s: how long the CLI may write nothing; may be infinity.
    startup_s: added to `inactivity_s` until the session starts; the CLI waits for required MCP servers.
    """

    inactivity_s: float = INACTIVITY_S
    startup_s: float = 0.0


DEFAULT_LIMITS: Final = RunLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHooks:
    """What is particular to a CLI.

    on_session: receives the session's id with each line after the CLI has reported it.
    explain_exit: returns why a process failed that exited before its turn ended; None if only its exit code is known.
    delay: waits before the process is ended.
    """

    on_session: Callable[[str], object] = lambda _: None
    explain_exit: Callable[[Process], TurnError | None] = lambda process: TurnError(
        f"the process {process.how_it_ended()}", PROCESS_EXITED, None, process.last_lines() or None
    )
    delay: Delay | None = None


class LineConverter(EventConverter, ABC):
    """Converts the lines of one run of a CLI. No method raises."""

    @abstractmethod
    def feed(self, line: bytes | str) -> list[AgentEvent]:
        """Return the events of a line without its newline; none if it is no event."""

    def skipped(self, size: int) -> list[AgentEvent]:
        """Return the warning about a line of `size` bytes that was too long to be read."""
        return self.convert(WarningReported(f"skipped a line of {size} bytes, which exceeds the limit", False))


class CliRun:
    """The events of one run in order; after the last one no process is left. One task at a time may read it."""

    def __init__(
        self,
        process: Process,
        stdout: ByteReceiveStream,
        lines: LineConverter,
        limits: RunLimits,
        hooks: RunHooks,
        resume: str | None,
        max_line_bytes: int,
    ) -> None:
        self._process = process
        self._stdout = stdout
        self.lines: Final = lines
        self._limits = limits
        self._hooks = hooks
        self._resume = resume
        self._splitter = LineSplitter(max_line_bytes)
        self._events: deque[AgentEvent] = deque()
        self._silent_since = anyio.current_time()
        self._receiving: anyio.CancelScope | None = None
        self._aborted = False
        self._is_over = False

    @property
    def session_id(self) -> str | None:
        """The session's id, by which it is resumed; None until the CLI reports it."""
        return self.lines.session_id

    @property
    def diagnostics(self) -> str:
        """The last lines of stderr, without secrets and values of codex's configuration."""
        return self._process.last_lines()

    @property
    def full_diagnostics(self) -> str:
        """All of stderr that was kept, without the same values."""
        return self._process.last_lines(KEPT_BYTES)

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.exit_code

    def abort(self) -> None:
        """Stop the run; may be called from any task. The remaining events can still be read."""
        self._aborted = True
        self.wake()

    def wake(self) -> None:
        """Interrupt the wait for output."""
        if self._receiving is not None:
            self._receiving.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AgentEvent:
        """Return the next event."""
        await self._wait_for_events()
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    async def wait_for_session(self) -> str | None:
        """Wait until the session's id is known, and return it; None if the process ended before."""
        while self.session_id is None and not self._is_over:
            await self._read_more()
        return self.session_id

    async def take(self) -> list[AgentEvent]:
        """Wait for an event and return all events that have arrived; return none after the last one."""
        await self._wait_for_events()
        events = list(self._events)
        self._events.clear()
        return events

    def kill(self) -> None:
        """Kill the process."""
        self._process.signal_group(signal.SIGKILL)

    async def _wait_for_events(self) -> None:
        while not self._events and not self._is_over:
            await self._read_more()

    async def _read_more(self) -> None:
        if self._aborted:
            await self._finish(stopped=True)
            return
        try:
            data = await self._receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            await self._finish_output()
            return
        if data is None:
            await self._finish(inactivity_error(self._limits.inactivity_s))
            return
        for line in self._splitter.feed(data):
            self._take_line(line)
        started = self.lines.session_id
        if self._resume is not None and started is not None and started != self._resume.lower():
            why = f"session {self._resume} does not exist; codex started another one"
            await self._finish(TurnError(why, NO_SESSION))

    async def _receive(self) -> bytes | None:
        """Return the next output; None if the process is silent for too long.

        Raises:
            EndOfStream: the output is closed, the process has ended, or the run is aborted.
        """
        while True:
            over = self._process.over.is_set()
            with anyio.CancelScope(deadline=self._deadline(over=over)) as self._receiving:
                data = await self._stdout.receive()
                self._receiving = None
                return data
            self._receiving = None
            if self._aborted or over or (self.lines.ended and not self._process.over.is_set()):
                # A descendant may hold the pipe open indefinitely.
                raise anyio.EndOfStream
            if not self._process.over.is_set():
                return None

    def _deadline(self, *, over: bool) -> float:
        if over:
            return anyio.current_time() + DRAIN_S
        allowed_s = EXIT_GRACE_S if self.lines.ended else self._limits.inactivity_s
        if self.lines.session_id is None:
            allowed_s += self._limits.startup_s
        return max(self._silent_since + allowed_s, anyio.current_time() + PEEK_S)

    def _take_line(self, line: bytes | Skipped) -> None:
        self._silent_since = anyio.current_time()
        if isinstance(line, Skipped):
            logger.error("skipped a line of %d bytes, which exceeds the limit", line.bytes)
            self._events += self.lines.skipped(line.bytes)
            return
        self._events += self.lines.feed(line)
        if self.lines.session_id is not None:
            self._hooks.on_session(self.lines.session_id)

    async def _finish_output(self) -> None:
        """Finish the run after the end of its output."""
        for line in self._splitter.finish():
            self._take_line(line)
        with anyio.CancelScope(shield=True):
            if not self._aborted:
                left_s = self._silent_since + EXIT_GRACE_S - anyio.current_time()
                await self._process.ended_within(max(left_s, DRAIN_S))
        await self._finish(stopped=self._aborted)

    async def _finish(self, failure: TurnError | None = None, *, stopped: bool = False) -> None:
        has_exited = self._process.exit_code is not None
        await self._process.end()
        if stopped:
            await self._read_rest()
        self._is_over = True
        if failure is None and not (stopped or self.lines.ended or self.lines.failure):
            explained = self._hooks.explain_exit(self._process) if has_exited else None
            failure = explained or process_exit_error(self._process.exit_code)
        self._events += self.lines.finish(failure, stopped=stopped)

    async def _read_rest(self) -> None:
        """Read what the process wrote before its end."""
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError), anyio.move_on_after(PEEK_S, shield=True):
            while True:
                for line in self._splitter.feed(await self._stdout.receive()):
                    self._take_line(line)


@asynccontextmanager
async def open_run(
    launch: Launch,
    command: Sequence[str],
    mark: str,
    prompt: str,
    lines: LineConverter,
    limits: RunLimits,
    hooks: RunHooks,
    resume: str | None = None,
) -> AsyncIterator[CliRun]:
    """Start a CLI with `prompt` on stdin; leaving the block ends it.

    Raises:
        CodexCannotStart: the operating system cannot start it.
    """
    async with running(launch, command, mark, hooks.delay) as (process, stdin, stdout), task_group() as tasks:
        run = CliRun(process, stdout, lines, limits, hooks, resume, launch.max_line_bytes)
        tasks.start_soon(_watch, process, run)
        tasks.start_soon(_send_prompt, stdin, prompt)
        try:
            yield run
        finally:
            tasks.cancel_scope.cancel()


async def _watch(process: Process, run: CliRun) -> None:
    await process.over.wait()
    run.wake()


async def _send_prompt(stdin: ByteSendStream, prompt: str) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        # Replaces lone surrogates, which UTF-8 cannot encode.
        await stdin.send(prompt.encode("utf-8", "replace"))
    await stdin.aclose()
