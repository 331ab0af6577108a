"""The runtime `codex` of the public Python API: runs prompts as turns of one long-lived app-server."""

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Self
from weakref import WeakValueDictionary

import anyio

from codex_workspace.app_server import Connection, open_app_server, with_key_variables
from codex_workspace.codex.supervisor import CodexSupervisor, SupervisorLimits
from codex_workspace.codex.thread import SANDBOX_TYPES, id_in
from codex_workspace.codex.turn import Turn, TurnLimits
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import CodexGone, CodexRefused, InputRefused
from codex_workspace.common.values import MAX_INPUT_CHARS, JsonObject, JsonValue, TomlValue
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.protocol.app_server_reader import TurnReader
from codex_workspace.protocol.codex_events import LOST_THREAD, NO_SESSION, PROCESS_EXITED, TurnError
from codex_workspace.runtimes.backend import DynamicToolCall, text_input
from codex_workspace.runtimes.convert import NONE_USED, EventConverter, approval_data
from codex_workspace.runtimes.events import AgentEvent, Approval
from codex_workspace.runtimes.launch import DEFAULT_OPTIONS, FULL_AUTO, Launch, RunOptions, check_run


class AppServerRun:
    """The events of one turn as they arrive; the last one is its `Done`."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        turn.converter.session_id = turn.thread_id
        self._events: deque[AgentEvent] = deque()
        self._aborted = False
        self._is_gone = False

    @property
    def session_id(self) -> str:
        """The thread's id, which resumes it."""
        return self._turn.thread_id

    def abort(self) -> None:
        """Stop the run, from any task; the reader gets the remaining events and a `Done` "interrupted"."""
        self._aborted = True
        self._turn.interrupt()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AgentEvent:
        """Return the next event; only one task may read at a time."""
        while not self._events:
            if self._is_gone or self._turn.ended is not None:
                raise StopAsyncIteration
            await self._read_more()
        return self._events.popleft()

    async def _read_more(self) -> None:
        try:
            self._events += await self._turn.receive()
            self._decline_requests()
        except CodexGone as gone:
            self._is_gone = True
            failure = TurnError(gone.sentence, PROCESS_EXITED)
            self._events += self._turn.converter.finish(failure, stopped=self._aborted)

    def _decline_requests(self) -> None:
        while (pending := self._turn.pending) is not None:
            if not isinstance(pending.subject, DynamicToolCall):
                self._events.append(Approval(pending.id, approval_data(pending.subject)))
            self._turn.answer(pending, None)


class MissingSessionRun:
    """The events of a run whose session does not exist."""

    session_id: Final = None

    def __init__(self, reason: str) -> None:
        self._events = EventConverter().finish(TurnError(reason, NO_SESSION))

    def abort(self) -> None:
        """Do nothing: the run has ended."""

    async def __aiter__(self) -> AsyncIterator[AgentEvent]:
        """Yield the error and the `Done`."""
        for event in self._events:
            yield event


class AppServerRuntime:
    """Runs prompts as turns, for any number of tasks. The turns of one thread run one after the other.

    Args:
        connect: holds the current codex while its block is open.
        limits: the time limits.
        servers: the MCP servers of every thread.
    """

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[Connection]], limits: TurnLimits, servers: McpServers
    ) -> None:
        self._connect = connect
        self._limits = limits
        self._servers = servers
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def run(
        self, prompt: str, options: RunOptions = DEFAULT_OPTIONS
    ) -> AsyncIterator[AppServerRun | MissingSessionRun]:
        """Start a turn; leaving the block stops it if it still runs. `skip_git_check` has no effect.

        Raises:
            InputRefused: the prompt is empty or too long, or an option is invalid.
            CodexCannotStart, CodexGone, CodexRefused: codex could not start the turn.
        """
        check_run(prompt, options, MAX_INPUT_CHARS)
        lock = anyio.Lock(fast_acquire=True)
        if options.resume is not None:
            lock = self._locks.setdefault(options.resume.lower(), lock)
        async with lock, self._connect() as codex:
            try:
                thread_id = await self._load_thread(codex, options)
            except CodexRefused as refused:
                if options.resume is None or not LOST_THREAD.search(refused.message):
                    raise
                yield MissingSessionRun(refused.message)
                return
            # From now on a new thread can be resumed too.
            self._locks.setdefault(thread_id.lower(), lock)
            names = [server.name for server in self._servers.servers]
            await codex.mcp_status.wait_for(thread_id, names, self._servers.patience_s)
            # Subscribe before sending: the turn's first notification can precede the response.
            with codex.subscribe(thread_id) as mailbox:
                images: list[JsonValue] = [
                    {"type": "localImage", "path": str(image.absolute())} for image in options.images
                ]
                params: JsonObject = {"threadId": thread_id, "input": [*text_input(prompt), *images]}
                with anyio.CancelScope(shield=True):
                    sent = {**params, **_turn_params(options)}
                    result = await codex.request("turn/start", sent, self._limits.request_s)
                used_before = NONE_USED if options.resume is None else None
                reader = TurnReader(thread_id, id_in(result, "turn"))
                turn = Turn(codex, mailbox, reader, self._limits, used_before)
                try:
                    yield AppServerRun(turn)
                finally:
                    with anyio.CancelScope(shield=True):
                        await turn.stop()

    async def _load_thread(self, codex: Connection, options: RunOptions) -> str:
        params: JsonObject = {"approvalPolicy": "never", "config": self._config(options), **_thread_params(options)}
        timeout_s = self._limits.request_s + self._servers.patience_s
        with anyio.CancelScope(shield=True):
            if options.resume is None:
                started: JsonObject = {**params, "ephemeral": True} if options.ephemeral else params
                result = await codex.request("thread/start", started, timeout_s)
            else:
                resumed: JsonObject = {"threadId": options.resume, "excludeTurns": True, **params}
                result = await codex.request("thread/resume", resumed, timeout_s)
        return id_in(result, "thread")

    def _config(self, options: RunOptions) -> JsonObject:
        settings: dict[tuple[str, ...], JsonValue] = {
            path: _json(value) for path, value in self._servers.managed.items()
        }
        for server, values in self._servers.private.items():
            settings |= {("mcp_servers", server, *path): secret.reveal() for path, secret in values.items()}
        settings |= {path: _json(value) for path, value in options.config.items()}
        if options.web_search is not None:
            settings["web_search",] = "live" if options.web_search else "disabled"
        if options.writable:
            settings["sandbox_workspace_write", "writable_roots"] = [str(folder) for folder in options.writable]
        return _nested(settings)


@asynccontextmanager
async def create(launch: Launch, servers: McpServers, inactivity_s: float) -> AsyncIterator[AppServerRuntime]:
    """Start codex when a run needs it, restart it if it died, and stop it when the block is left.

    See `runtimes.Factory`.
    """
    launch = with_key_variables(launch)
    async with task_group() as tasks:
        codex = CodexSupervisor(tasks, lambda: open_app_server(launch), SupervisorLimits())
        try:
            yield AppServerRuntime(codex.use, TurnLimits(inactivity_s=inactivity_s), servers)
        finally:
            with anyio.CancelScope(shield=True):
                await codex.close()


def _thread_params(options: RunOptions) -> JsonObject:
    params: JsonObject = {
        "cwd": None if options.cwd is None else str(options.cwd),
        "model": options.model,
        "sandbox": options.effective_sandbox,
    }
    return {name: value for name, value in params.items() if value is not None}


def _turn_params(options: RunOptions) -> JsonObject:
    """Return the options of `turn/start`, with those that `thread/resume` ignores if the thread is loaded already."""
    params: dict[str, JsonValue] = {}
    if options.output_schema is not None:
        params["outputSchema"] = options.output_schema
    if options.resume is not None:
        params |= {name: value for name, value in _thread_params(options).items() if name != "sandbox"}
        sandbox = options.effective_sandbox
        if sandbox is not None:
            policy: dict[str, JsonValue] = {"type": SANDBOX_TYPES[sandbox]}
            if sandbox == FULL_AUTO:
                policy["writableRoots"] = [str(folder) for folder in options.writable]
            params["sandboxPolicy"] = policy
    return params


def _json(value: TomlValue) -> JsonValue:
    return list(value) if isinstance(value, list) else value


def _nested(settings: Mapping[tuple[str, ...], JsonValue]) -> JsonObject:
    root: dict[str, JsonValue] = {}
    for path, value in settings.items():
        table = root
        for key in path[:-1]:
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                raise InputRefused(f"The setting {'.'.join(path)} is both a table and a value.")
            table = inner
        table[path[-1]] = value
    return root
