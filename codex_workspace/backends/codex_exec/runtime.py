"""`codex exec` as a runtime: one process for each prompt, and the protection of a ChatGPT login.

Codex refreshes the login's access token in its last five minutes, before it calls the model; each refresh token is
valid once. If two processes refresh at the same time, the provider rejects the second one. If a process is ended
between the request and the response, the token on disk is already used, and the login is lost. So runs start one at a
time while a refresh is due, and no process is ended during one.
"""

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import anyio

from codex_workspace.app_server import LAUNCH_OVERRIDES, require_supported, with_key_variables
from codex_workspace.backends.codex_exec.command import arguments, check, file_arguments, mcp_overrides, overrides
from codex_workspace.backends.codex_exec.history import session_tokens
from codex_workspace.common.errors import CONFIG_REJECTED, MAX_REASON_CHARS, CodexCannotStart, is_config_error
from codex_workspace.common.values import Version, find_version
from codex_workspace.config.login import refresh_due_at
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.protocol.codex_events import LOST_THREAD, NO_SESSION, PROCESS_EXITED, TokenUsage, TurnError
from codex_workspace.protocol.exec_reader import ExecReader
from codex_workspace.runtimes.cli_run import DEFAULT_LIMITS, CliRun, LineConverter, RunHooks, RunLimits, open_run
from codex_workspace.runtimes.convert import NONE_USED
from codex_workspace.runtimes.events import AgentEvent, RunWarning
from codex_workspace.runtimes.launch import DEFAULT_OPTIONS, MARK, NO_SERVERS, Launch, RunOptions, is_model_notice
from codex_workspace.runtimes.process import CompletedCommand, Process, new_mark, run_command

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S: Final = 20.0

MARGIN_S: Final = 2.0
"""How long codex takes to start: it may refresh a login that becomes due within this time."""

PATIENCE_S: Final = 10.0
"""How long other runs wait for a refresh, which usually takes a second and may fail."""

SPARE_S: Final = 3.0
"""How long to delay the end of a process that may be refreshing the login."""

LOOK_AGAIN_S: Final = 0.02

CREDENTIALS_STORE: Final = "cli_auth_credentials_store"

NO_VARIABLES: Final[Mapping[str, str]] = {}


def create(launch: Launch, servers: McpServers, inactivity_s: float) -> AbstractAsyncContextManager["CodexExec"]:
    """Return the runtime `codex-exec`; see `runtimes.Factory`."""
    return nullcontext(CodexExec(launch, RunLimits(inactivity_s), servers))


@dataclass(slots=True)
class ProcessCounts:
    """How many processes were started, how many died unexpectedly, and how many run."""

    started: int = 0
    died: int = 0
    running: int = 0


class CodexExec:
    """Runs prompts, each in its own process; may be used several times, and by several tasks.

    Runs of one session wait for each other.

    Args:
        launch: how to start codex. Its processes receive `launch.api_key` and no other credential.
        limits: time limits.
        servers: the MCP servers of every run.
    """

    def __init__(self, launch: Launch, limits: RunLimits = DEFAULT_LIMITS, servers: McpServers = NO_SERVERS) -> None:
        settings, variables = mcp_overrides(servers)
        secrets = [*launch.secrets, *(secret.reveal() for secret in servers.secrets), *variables.values()]
        self.launch: Final = with_key_variables(replace(launch, handed={**launch.handed, **variables}, secrets=secrets))
        self._limits = limits
        self.counts: Final = ProcessCounts()
        self._servers = settings
        self._version: Version | None = None
        self._starting = anyio.Lock(fast_acquire=True)
        uses_login = launch.api_key is None and launch.overrides.get(CREDENTIALS_STORE) == '"file"'
        self._login = LoginLock(launch.codex_home) if uses_login else None
        self._busy: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def run(
        self, prompt: str, options: RunOptions = DEFAULT_OPTIONS, variables: Mapping[str, str] = NO_VARIABLES
    ) -> AsyncIterator[CliRun]:
        """Run a prompt; leaving the block ends the process.

        Args:
            prompt: the prompt.
            options: the run's options.
            variables: further variables of codex's environment; their values are secrets.

        Raises:
            InputRefused: codex would reject or misread the prompt or an option.
            CodexCannotStart: codex cannot be started, or is too old.
        """
        options = replace(options, config={**self._servers, **options.config})
        check(prompt, options)
        await self.version()
        with file_arguments(options, self.launch) as files:
            async with (
                self._session(options.resume) as register,
                self._login.passed() if self._login is not None else nullcontext(),
                self._opened(prompt, options, files, variables, register) as run,
            ):
                yield run

    async def version(self) -> Version:
        """Return codex's version, which is read once.

        Raises:
            CodexCannotStart: codex cannot be started, does not report its version, or is too old.
        """
        async with self._starting:
            if self._version is None:
                self._version = await _read_version(self.launch)
            return self._version

    @asynccontextmanager
    async def _session(self, session_id: str | None) -> AsyncIterator[Callable[[str], object]]:
        """Wait until no other run uses the session: two processes that write it would damage it.

        Yields a function that registers a new session's id, for which others then wait too.
        """
        lock = anyio.Lock(fast_acquire=True)
        if session_id is not None:
            lock = self._busy.setdefault(session_id.lower(), lock)
        async with lock:
            yield lambda started: self._busy.setdefault(started.lower(), lock)

    @asynccontextmanager
    async def _opened(
        self,
        prompt: str,
        options: RunOptions,
        files: list[str],
        variables: Mapping[str, str],
        register: Callable[[str], object],
    ) -> AsyncIterator[CliRun]:
        launch = replace(
            self.launch, handed={**self.launch.handed, **variables}, secrets=[*self.launch.secrets, *variables.values()]
        )
        mark = new_mark(launch)
        settings = {**LAUNCH_OVERRIDES, f"shell_environment_policy.set.{MARK}": f'"{mark}"', **launch.overrides}
        command = [str(launch.binary), "exec", *overrides(settings), *arguments(options, files)]
        hooks = RunHooks(
            on_session=register,
            explain_exit=partial(_explain_exit, is_resumed=options.resume is not None),
            delay=partial(wait_for_refresh, launch.codex_home) if self._login is not None else None,
        )
        used_before: TokenUsage | None = NONE_USED
        if options.resume is not None:
            used_before = await anyio.to_thread.run_sync(session_tokens, launch.codex_home, options.resume)
        lines = ExecConverter(used_before)
        lines.unknown_models = launch.unknown_models
        async with open_run(launch, command, mark, prompt, lines, self._limits, hooks, options.resume) as run:
            yield run


class ExecConverter(LineConverter):
    """Converts the lines of one run of `codex exec --json`. Codex reports the tokens of the whole session."""

    def __init__(self, used_before: TokenUsage | None = NONE_USED, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(used_before, clock)
        self._reader: Final = ExecReader()
        self.unknown_models: set[str] = set()

    def feed(self, line: bytes | str) -> list[AgentEvent]:
        """Return the events of a line without its newline; none if it is no event."""
        parsed = self._reader.read(line)
        self.session_id = self._reader.thread_id
        return [event for each in parsed for event in self.convert(each) if not self._is_notice(event)]

    def _is_notice(self, event: AgentEvent) -> bool:
        return isinstance(event, RunWarning) and is_model_notice(event.message, self.unknown_models)


class LoginLock:
    """Delays the start of runs while another run may be refreshing the login of `codex_home`.

    A login that is not refreshed while a run waits for `PATIENCE_S` delays no further run.
    """

    def __init__(self, codex_home: Path) -> None:
        self._home = codex_home
        self._refreshing = 0
        self._last_start = -math.inf
        self._given_up: float | None = None

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Wait until no other run is about to refresh the login, at most `PATIENCE_S`; the block is a run."""
        last_start = self._last_start
        due_at = await _refresh_due_at(self._home)
        with anyio.move_on_after(PATIENCE_S) as patience:
            while due_at is not None and due_at != self._given_up and self._refreshing:
                # Another process writes the file, so it is polled.
                await anyio.sleep(LOOK_AGAIN_S)
                due_at = await _refresh_due_at(self._home)
        # Not if the login is being written, or was not due yet when the last run started.
        if patience.cancelled_caught and due_at is not None and -math.inf < due_at < last_start:
            logger.warning("codex has not refreshed the login within %g s; further runs do not wait", PATIENCE_S)
            self._given_up = due_at
        is_due = due_at is not None
        if is_due:
            self._last_start = time.time()
        self._refreshing += is_due
        try:
            yield
        finally:
            self._refreshing -= is_due


async def wait_for_refresh(codex_home: Path, is_over: Callable[[], bool]) -> None:
    """Wait while codex may be refreshing the login: until it is fresh, `is_over` returns True, or time is up.

    A cancellation is raised after the wait.
    """
    cancelled: BaseException | None = None
    ends = anyio.current_time() + SPARE_S
    with anyio.CancelScope(shield=True):
        while not is_over() and anyio.current_time() < ends:
            try:
                if await _refresh_due_at(codex_home) is None:
                    break
                await anyio.sleep(LOOK_AGAIN_S)
            except anyio.get_cancelled_exc_class() as error:
                # asyncio's own cancellation passes the shield.
                cancelled = error
    if cancelled is not None:
        raise cancelled


async def _refresh_due_at(codex_home: Path) -> float | None:
    """Return the time from which codex refreshes the login; None if the login is fresh or missing."""
    due_at = await anyio.to_thread.run_sync(refresh_due_at, codex_home)
    return due_at if due_at is not None and due_at - MARGIN_S < time.time() else None


def _explain_exit(process: Process, *, is_resumed: bool) -> TurnError | None:
    """Return why codex exited before the turn ended; None after exit code 0."""
    if process.exit_code == 0:
        return None
    stderr = process.last_lines()
    if is_config_error(stderr):
        sentence, kind = CONFIG_REJECTED, PROCESS_EXITED
    else:
        sentence = f"codex {process.how_it_ended()}"
        kind = NO_SESSION if is_resumed and LOST_THREAD.search(stderr) else PROCESS_EXITED
    return TurnError(sentence, kind, None, _last_error(stderr) or None)


def _last_error(stderr: str) -> str:
    """Return codex's last error message on one line, or its last line."""
    lines = stderr.splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("Error")]
    return " ".join(" ".join(lines[errors[-1] if errors else -1 :]).split())[:MAX_REASON_CHARS]


async def run_codex(launch: Launch, *arguments: str) -> CompletedCommand:
    """Run a codex command that may refresh the login.

    Raises:
        CodexCannotStart: codex cannot be started, or does not end in time.
    """
    return await run_command(
        launch, *arguments, within_s=COMMAND_TIMEOUT_S, delay=partial(wait_for_refresh, launch.codex_home)
    )


async def _read_version(launch: Launch) -> Version:
    completed = await run_codex(launch, "--version")
    version = find_version(completed.stdout)
    if version is None:
        shown = ": ".join(filter(None, (f"exit code {completed.exit_code}", completed.last_line)))
        raise CodexCannotStart(f"codex did not report its version ({shown}); set CODEX_BIN to a codex executable")
    require_supported(version)
    return version
