"""`codex exec` as a process: one for each prompt, its events while they come, and its end whatever happens.

Arguments are left to `exec_arguments`, a run's files to `exec_files`, what it is told of MCP servers to
`exec_mcp_settings`, the meaning of what codex writes to `exec_lines`.
"""

import logging
import signal
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Generic, Protocol, Self, TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from codex_workspace.app_server import LAUNCH_OVERRIDES
from codex_workspace.backends.codex_exec.command import RunFiles, arguments, check, mcp_overrides, overrides
from codex_workspace.backends.codex_exec.login_lock import LoginLock
from codex_workspace.backends.codex_exec.one_shot import TERM_GRACE_S, end_codex, last_line, run_once
from codex_workspace.backends.codex_exec.run_files import clear_leftovers, write_file, written_run_files
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import CONFIG_REJECTED, MAX_REASON_CHARS, CodexCannotStart, is_config_error
from codex_workspace.common.values import Version, find_version
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.protocol.codex_events import TokenUsage, TurnError
from codex_workspace.protocol.failures import PROCESS_EXITED, inactivity_error
from codex_workspace.protocol.jsonrpc import LineSplitter, Skipped
from codex_workspace.protocol.versions import require_supported
from codex_workspace.runtimes.convert import NO_SESSION, NONE_USED, ExecConverter
from codex_workspace.runtimes.events import AgentEvent
from codex_workspace.runtimes.launch import MARK, Launch
from codex_workspace.runtimes.options import DEFAULT_OPTIONS, RunOptions
from codex_workspace.runtimes.process import DRAIN_S, STDERR_KEPT_BYTES, Process, spawn
from codex_workspace.runtimes.registry import INACTIVITY_S, NO_SERVERS

logger = logging.getLogger(__name__)

EXIT_GRACE_S: Final = 8.0
"""How long codex may take to end by itself after its turn: it writes the session down, and without DNS takes 5 s."""

LOOK_S: Final = 0.05
"""However long nobody has read, what codex has written meanwhile is looked at for so long before that is silence."""

VERSION_TIMEOUT_S: Final = 20.0

MAX_SESSIONS: Final = 1000
"""Sessions whose tokens are remembered, some hundred bytes each."""

EXEC_OVERRIDES: Final[Mapping[str, str]] = LAUNCH_OVERRIDES | {
    # The API key stands in codex's environment; commands get none of it.
    "shell_environment_policy.inherit": '"core"',
    "shell_environment_policy.ignore_default_excludes": "false",
}
"""Settings of every run, beside the app-server's."""

EPHEMERAL: Final = "cli_auth_credentials_store"

API_KEY_NAMES: Final = ("CODEX_API_KEY", "OPENAI_API_KEY")
"""Where codex looks for an API key: the first for what needs OpenAI's login, the other for providers that name it."""


@dataclass(frozen=True, slots=True)
class ExecLimits:
    """How long things may take, in seconds; `inactivity_s` of infinity lets codex be silent for as long as it likes.

    startup_s: how long it may be silent beside that before its session begins: it waits for required MCP servers.
    """

    inactivity_s: float = INACTIVITY_S
    term_grace_s: float = TERM_GRACE_S
    exit_grace_s: float = EXIT_GRACE_S
    startup_s: float = 0.0


AS_A_RULE: Final = ExecLimits()
NOTHING_HANDED: Final[Mapping[str, str]] = {}


E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class LineReader(Protocol[E_co]):
    """Takes the lines of one run and gives its events: `ExecConverter`, as a run uses it."""

    @property
    def session_id(self) -> str | None:
        """Codex's id of the session; None before it is said."""

    @property
    def session_usage(self) -> TokenUsage | None:
        """The tokens of the whole session; None before codex tells them."""

    @property
    def ended(self) -> object:
        """How the turn ended; None before codex has said so."""

    @property
    def failed(self) -> bool:
        """Whether codex has said that it gave up."""

    def feed(self, line: bytes | str) -> Sequence[E_co]:
        """Return the events of a line."""

    def skipped(self, size: int) -> Sequence[E_co]:
        """Return the events of a line of `size` bytes that was too long to be read."""

    def finish(
        self, exit_code: int | None = None, failure: TurnError | None = None, *, stopped: bool = False
    ) -> Sequence[E_co]:
        """Return the last events of the run."""


class ExecRun(Generic[E]):
    """The events of one run, in order, while they come, as its lines tell them; after the last one no process is left.

    Of `CodexExec.run` the last one is the run's `Done`.
    """

    def __init__(
        self,
        process: Process,
        stdout: ByteReceiveStream,
        lines: LineReader[E],
        limits: ExecLimits,
        mark: str,
        resumes: str | None,
        max_line_bytes: int,
        begun: Callable[[str], object],
        gate: LoginLock | None,
    ) -> None:
        self._process = process
        self._stdout = stdout
        self._lines = lines
        self._limits = limits
        self._mark = mark
        self._resumes = resumes
        self._splitter = LineSplitter(max_line_bytes)
        self._begun: Callable[[str], object] = begun
        self._gate = gate
        self._events: deque[E] = deque()
        self._silent_from = anyio.current_time()
        self._waiting: anyio.CancelScope | None = None
        self._aborted = False
        self._is_over = False
        self._is_ended = False

    @property
    def session_id(self) -> str | None:
        """Codex's id of the session, by which it is resumed; None before codex says it."""
        return self._lines.session_id

    @property
    def session_usage(self) -> TokenUsage | None:
        """The tokens of the whole session; None before codex tells them."""
        return self._lines.session_usage

    @property
    def diagnostics(self) -> str:
        """The last lines that codex wrote on stderr, without the secrets that it was started with and the values of its
        configuration."""
        return self._process.last_lines()

    @property
    def last_words(self) -> str:
        """All that is kept of what codex wrote on stderr, some kilobytes, without the same secrets."""
        return self._process.last_lines(STDERR_KEPT_BYTES)

    @property
    def exit_code(self) -> int | None:
        """Codex's exit code, negative for the signal that has killed it; None while it runs."""
        return self._process.exit_code

    @property
    def is_over(self) -> bool:
        """Whether codex has ended; there may be events left to be read."""
        return self._is_over

    def abort(self) -> None:
        """Stop the run, from any task: whoever reads it gets the rest of its events, and a `Done` "interrupted"."""
        self._aborted = True
        self.wake()

    def wake(self) -> None:
        """Let whoever waits for codex look again at what has happened."""
        if self._waiting is not None:
            self._waiting.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E:
        """Return the next event. One task at a time may ask."""
        await self._have_some()
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    async def take(self) -> list[E]:
        """Return the events since, after waiting for one; nothing after the last. One task at a time may ask."""
        await self._have_some()
        events = list(self._events)
        self._events.clear()
        return events

    async def _have_some(self) -> None:
        while not self._events and not self._is_over:
            await self._read_more()

    def kill(self) -> None:
        """End codex at once."""
        self._process.signal_group(signal.SIGKILL)

    async def end(self) -> None:
        """End codex and all that it started, if it runs still."""
        if self._is_ended:
            return
        await end_codex(self._process, self._mark, self._gate, self._limits.term_grace_s)
        self._is_ended = True

    async def _read_more(self) -> None:
        if self._aborted:
            await self._finish(stopped=True)
            return
        try:
            data = await self._receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            await self._leave()
            return
        if data is None:
            await self._finish(inactivity_error(self._limits.inactivity_s))
            return
        for line in self._splitter.feed(data):
            self._take(line)
        if self._began_another():
            await self._finish(
                TurnError(f"codex has no session {self._resumes}, and began another", NO_SESSION, None, None)
            )

    async def _receive(self) -> bytes | None:
        """Return what codex has written next; None if it is silent for too long.

        Raises:
            EndOfStream: nothing more will come, as its output is closed, its process over, or the run aborted.
        """
        while True:
            over = self._process.over.is_set()
            with anyio.CancelScope(deadline=self._deadline(over=over)) as self._waiting:
                data = await self._stdout.receive()
                self._waiting = None
                return data
            self._waiting = None
            if self._aborted or over or (self._lines.ended and not self._process.over.is_set()):
                # A descendant of codex's may hold the pipe for ever.
                raise anyio.EndOfStream
            if not self._process.over.is_set():
                return None

    def _deadline(self, *, over: bool) -> float:
        if over:
            return anyio.current_time() + DRAIN_S
        patience_s = self._limits.exit_grace_s if self._lines.ended else self._limits.inactivity_s
        if self._lines.session_id is None:
            patience_s += self._limits.startup_s
        return max(self._silent_from + patience_s, anyio.current_time() + LOOK_S)

    def _take(self, line: bytes | Skipped) -> None:
        self._silent_from = anyio.current_time()
        if isinstance(line, Skipped):
            logger.error("skipped a line of %d bytes from codex: over the bound of one line", line.bytes)
            self._events += self._lines.skipped(line.bytes)
            return
        self._events += self._lines.feed(line)
        if self._lines.session_id is not None:
            self._begun(self._lines.session_id)

    async def _leave(self) -> None:
        """Take the run's end as codex's own, or the caller's."""
        for line in self._splitter.finish():
            self._take(line)
        with anyio.CancelScope(shield=True):
            if not self._aborted:
                left_s = self._silent_from + self._limits.exit_grace_s - anyio.current_time()
                await self._process.ended_within(max(left_s, DRAIN_S))
        await self._finish(stopped=self._aborted)

    async def _finish(self, failure: TurnError | None = None, *, stopped: bool = False) -> None:
        has_left = self._process.exit_code is not None
        await self.end()
        if stopped:
            await self._read_what_is_left()
        self._is_over = True
        if failure is None and has_left and not stopped and not self._lines.ended and not self._lines.failed:
            failure = self._crash()
        self._events += self._lines.finish(self._process.exit_code, failure, stopped=stopped)

    async def _read_what_is_left(self) -> None:
        """Take what codex has written before its end."""
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError), anyio.move_on_after(LOOK_S, shield=True):
            while True:
                for line in self._splitter.feed(await self._stdout.receive()):
                    self._take(line)

    def _crash(self) -> TurnError | None:
        """Return why codex has left, in a sentence of ours with its own words beside it; None where it says no ends at
        all."""
        if self._process.exit_code == 0:
            return None
        said = self.diagnostics
        sentence = CONFIG_REJECTED if is_config_error(said) else f"codex {self._process.how_it_ended()}"
        return TurnError(sentence, PROCESS_EXITED, None, _why(said) or None)

    def _began_another(self) -> bool:
        known = self._lines.session_id
        return self._resumes is not None and known is not None and known != self._resumes.lower()


class CodexExec:
    """Runs prompts, each in a process of its own; may be used again, and by several tasks.

    Runs of one session wait for one another. What is remembered of a session is its number of tokens.

    Args:
        launch: how to start codex: binary, home, working folder, API key. Its environment is an allow-list of
            `launch.environment`: no other vendor's credential, no `OPENAI_API_KEY` unless it is `launch.api_key`.
        limits: how long things may take.
        servers: the MCP servers of every run.
    """

    def __init__(
        self,
        launch: Launch,
        limits: ExecLimits = AS_A_RULE,
        servers: McpServers = NO_SERVERS,
    ) -> None:
        table, handed = mcp_overrides(servers)
        keys = dict.fromkeys(API_KEY_NAMES, launch.api_key) if launch.api_key is not None else {}
        secrets = [*launch.secrets, *(secret.reveal() for secret in servers.secrets), *handed.values()]
        self._launch = replace(launch, handed={**launch.handed, **keys, **handed}, secrets=secrets)
        self._limits = limits
        self._servers = table
        self._version: Version | None = None
        self._build: _Build | None = None
        self._asking = anyio.Lock()
        self._gate = LoginLock(launch.codex_home) if _has_login(launch) else None
        self._busy: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._used: OrderedDict[str, TokenUsage] = OrderedDict()

    @asynccontextmanager
    async def run(self, prompt: str, options: RunOptions = DEFAULT_OPTIONS) -> AsyncIterator[ExecRun[AgentEvent]]:
        """Let codex answer `prompt`; leaving the block early stops it, and leaves no process behind.

        Raises:
            InputRefused, CodexCannotStart: as `follow`.
        """
        async with self.follow(prompt, options, ExecConverter) as run:
            yield run

    @asynccontextmanager
    async def follow(
        self,
        prompt: str,
        options: RunOptions,
        reads: Callable[[TokenUsage | None], LineReader[E]],
        handed: Mapping[str, str] = NOTHING_HANDED,
    ) -> AsyncIterator[ExecRun[E]]:
        """Do what `run` does, in events of another kind.

        Args:
            prompt: what is said.
            options: what this run has its own way.
            reads: makes what reads the run's lines, told the tokens of the session before it.
            handed: further variables of codex's environment, each of them a secret.

        Raises:
            InputRefused: the prompt is empty or longer than codex takes, or an option cannot be given to it.
            CodexCannotStart: there is no such binary, or it is none of codex's.
        """
        options = replace(options, config={**self._servers, **options.config})
        check(prompt, options)
        await self.version()
        async with (
            written_run_files(partial(write_file, options)) as files,
            self._session(options.resume) as begun,
            self._gate.passed() if self._gate is not None else nullcontext(),
            self._opened(prompt, options, files, reads, handed, begun) as run,
        ):
            yield run

    async def version(self) -> Version:
        """Return codex's version, which is asked for once, and again where another binary has taken its place.

        Raises:
            CodexCannotStart: there is no such binary, it does not say its version, or it is too old.
        """
        async with self._asking:
            build = await anyio.to_thread.run_sync(_build_of, self._launch.binary)
            if self._version is None:
                await anyio.to_thread.run_sync(clear_leftovers)
            if self._version is None or build != self._build:
                # An upgrade in place is used by the next run, with other arguments.
                self._version = await _ask_version(self._launch)
                self._build = build
            return self._version

    @asynccontextmanager
    async def _session(self, session_id: str | None) -> AsyncIterator[Callable[[str], object]]:
        """Wait for the session: two codexes that write it at once would damage it.

        What is yielded is told the id of a new one, which is then waited for by others too.
        """
        lock = anyio.Lock()
        if session_id is not None:
            lock = self._busy.setdefault(session_id.lower(), lock)
        async with lock:
            yield lambda begun: self._busy.setdefault(begun.lower(), lock)

    @asynccontextmanager
    async def _opened(
        self,
        prompt: str,
        options: RunOptions,
        files: RunFiles,
        reads: Callable[[TokenUsage | None], LineReader[E]],
        handed: Mapping[str, str],
        begun: Callable[[str], object],
    ) -> AsyncIterator[ExecRun[E]]:
        launch = replace(
            self._launch,
            handed={**self._launch.handed, **handed},
            secrets=[*self._launch.secrets, *handed.values()],
        )
        mark = f"{launch.family}.{uuid.uuid4().hex}"
        process, stdin, stdout, stderr = spawn(launch, self._command(options, files, mark), mark)
        lines = reads(self._used_before(options.resume))
        told_before = lines.session_usage
        run = ExecRun(
            process, stdout, lines, self._limits, mark, options.resume, launch.max_line_bytes, begun, self._gate
        )
        try:
            async with task_group() as tasks:
                tasks.start_soon(_watch, process, run)
                tasks.start_soon(process.drain_stderr, stderr)
                tasks.start_soon(_tell, stdin, prompt)
                try:
                    yield run
                finally:
                    await run.end()
                    tasks.cancel_scope.cancel()
        finally:
            self._remember(run, told_before)
            with anyio.CancelScope(shield=True):
                for stream in (stdin, stdout, stderr):
                    await stream.aclose()
            process.close()

    def _command(self, options: RunOptions, files: RunFiles, mark: str) -> list[str]:
        settings = {**EXEC_OVERRIDES, f"shell_environment_policy.set.{MARK}": f'"{mark}"', **self._launch.overrides}
        return [str(self._launch.binary), "exec", *overrides(settings), *arguments(options, files)]

    def _used_before(self, session_id: str | None) -> TokenUsage | None:
        return NONE_USED if session_id is None else self._used.get(session_id.lower())

    def _remember(self, run: ExecRun[E], told_before: TokenUsage | None) -> None:
        """Note the session's tokens. A run that was stopped has told none, so that nobody knows them any more."""
        if run.session_id is None:
            return
        self._used.pop(run.session_id, None)
        if run.session_usage is not None and run.session_usage != told_before:
            self._used[run.session_id] = run.session_usage
            if len(self._used) > MAX_SESSIONS:
                self._used.popitem(last=False)


def _why(said: str) -> str:
    """Return on one line why codex gave up, by what it wrote last: its error where it names one, else the last line."""
    lines = said.splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("Error")]
    return " ".join(" ".join(lines[errors[-1] if errors else -1 :]).split())[:MAX_REASON_CHARS]


@dataclass(frozen=True, slots=True)
class _Build:
    """What tells one binary from another that takes its place, or is written over it."""

    device: int
    inode: int
    bytes: int
    modified_ns: int


def _build_of(binary: Path) -> _Build | None:
    """Return what the file is now; None where it is not there, or stands in `PATH`."""
    try:
        found = binary.stat()
    except OSError:
        return None
    return _Build(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _has_login(launch: Launch) -> bool:
    """Tell whether codex goes by the login in its home, which it then refreshes."""
    return launch.api_key is None and launch.overrides.get(EPHEMERAL) == '"file"'


async def _watch(process: Process, run: ExecRun[E]) -> None:
    await process.watch()
    run.wake()


async def _tell(stdin: ByteSendStream, prompt: str) -> None:
    """Say the prompt; a codex that has ended says itself why."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        # A lone surrogate is no text, and codex takes nothing but UTF-8.
        await stdin.send(prompt.encode("utf-8", "replace"))
    await stdin.aclose()


async def _ask_version(launch: Launch) -> Version:
    late = f"codex did not say its version within {VERSION_TIMEOUT_S:g} s"
    told = await run_once(launch, "--version", within_s=VERSION_TIMEOUT_S, late=late)
    version = find_version(told.stdout.decode("utf-8", "replace"))
    if version is None:
        said = ": ".join(filter(None, (f"exit code {told.returncode}", last_line(told.stderr))))
        raise CodexCannotStart(f"codex did not tell its version ({said}); is CODEX_BIN really codex?")
    require_supported(version)
    return version
