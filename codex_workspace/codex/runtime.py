"""The app-server as a runtime: prompts as turns of one long-lived codex, told in the public stream of events.

The agent itself answers messages by `job`; this is for programs that want events and no A2A.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Self
from weakref import WeakValueDictionary

import anyio

from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.codex.supervisor import CodexSupervisor, SupervisorLimits
from codex_workspace.codex.thread import SANDBOX_TYPES
from codex_workspace.codex.turn import CodexClient, Turn, TurnLimits, request
from codex_workspace.common.concurrency import BackgroundResource
from codex_workspace.common.errors import CodexGone, InputRefused, ProtocolError
from codex_workspace.common.values import MAX_INPUT_CHARS, JsonObject, JsonValue, TomlValue
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.protocol.app_server_reader import TurnReader
from codex_workspace.protocol.codex_events import TokenUsage, TurnError
from codex_workspace.protocol.failures import PROCESS_EXITED
from codex_workspace.protocol.server_requests import Declined, response_to
from codex_workspace.runtimes.backend import DynamicToolCall, TurnInput, text_input
from codex_workspace.runtimes.convert import NONE_USED, EventConverter
from codex_workspace.runtimes.events import AgentEvent
from codex_workspace.runtimes.launch import Launch
from codex_workspace.runtimes.options import DEFAULT_OPTIONS, FULL_AUTO, RunOptions, check_run

NO_TOOL: Final[JsonObject] = {
    "success": False,
    "contentItems": [{"type": "inputText", "text": "There is no such tool."}],
}
"""What the model is told that calls a tool of a client's: here there are none."""


class AppServerRun:
    """The events of one turn, in order, while they come; the last one is its `Done`."""

    def __init__(self, turn: Turn, used_before: TokenUsage | None) -> None:
        self._turn = turn
        self._stream = EventConverter(used_before)
        self._stream.session_id = turn.thread_id
        self._events: deque[AgentEvent] = deque()
        self._aborted = False
        self._is_over = False

    @property
    def session_id(self) -> str:
        """Codex's id of the thread, by which it is resumed."""
        return self._turn.thread_id

    def abort(self) -> None:
        """Stop the run, from any task: whoever reads it gets the rest of its events, and a `Done` "interrupted"."""
        self._aborted = True
        self._turn.interrupt()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AgentEvent:
        """Return the next event. One task at a time may ask."""
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            await self._read_more()
        return self._events.popleft()

    async def _read_more(self) -> None:
        try:
            for event in await self._turn.receive():
                self._events += self._stream.convert(event)
            self._refuse_what_is_asked()
        except CodexGone as gone:
            self._finish(TurnError(gone.sentence, PROCESS_EXITED, None, gone.tail or None))
        else:
            if self._turn.ended is not None:
                self._finish(self._turn.ended.failure)

    def _refuse_what_is_asked(self) -> None:
        """Nobody is there to be asked: say so to the reader, and no to codex."""
        while (pending := self._turn.pending) is not None:
            match pending.subject:
                case DynamicToolCall():
                    self._turn.answer(pending, NO_TOOL)
                case question:
                    self._events += self._stream.approval(pending.id, question)
                    self._turn.answer(pending, response_to(question, Declined()))

    def _finish(self, failure: TurnError | None) -> None:
        self._is_over = True
        self._events += self._stream.finish(failure, stopped=self._aborted)


class AppServerRuntime:
    """Runs prompts as turns; may be used again, and by several tasks. Turns of one thread wait for one another.

    Args:
        connect: holds the codex of the moment for as long as its block is open.
        limits: how long things may take.
        servers: the MCP servers of every thread.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[CodexClient]],
        limits: TurnLimits,
        servers: McpServers,
    ) -> None:
        self._connect = connect
        self._limits = limits
        self._servers = servers
        self._busy: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def run(self, prompt: str, options: RunOptions = DEFAULT_OPTIONS) -> AsyncIterator[AppServerRun]:
        """Let codex answer `prompt`; leaving the block early stops the turn. The app-server never asks for git.

        Raises:
            InputRefused: the prompt is empty or longer than codex takes, or an option cannot be given to it.
            CodexCannotStart, CodexGone, CodexRefused: codex could not begin the turn.
        """
        check_run(prompt, options, MAX_INPUT_CHARS)
        async with self._alone(options.resume) as lock, self._connect() as codex:
            thread_id = await self._load_thread(codex, options)
            # From now on a new thread can be resumed too.
            self._busy.setdefault(thread_id.lower(), lock)
            names = [server.name for server in self._servers.servers]
            await codex.mcp_status.wait_for(thread_id, names, self._servers.patience_s)
            # Listen before asking: the turn's first notification can come ahead of the answer.
            with codex.subscribe(thread_id) as mailbox:
                params: JsonObject = {"threadId": thread_id, "input": list(_input(prompt, options)), **_own(options)}
                with anyio.CancelScope(shield=True):
                    started = await request(codex, "turn/start", params, self._limits.request_s)
                used_before = NONE_USED if options.resume is None else None
                reader = TurnReader(thread_id, _id_in(started, "turn"))
                turn = Turn(codex, mailbox, reader, self._limits, used_before)
                try:
                    yield AppServerRun(turn, used_before)
                finally:
                    with anyio.CancelScope(shield=True):
                        await turn.abandon()

    @asynccontextmanager
    async def _alone(self, thread_id: str | None) -> AsyncIterator[anyio.Lock]:
        lock = anyio.Lock()
        if thread_id is not None:
            lock = self._busy.setdefault(thread_id.lower(), lock)
        async with lock:
            yield lock

    async def _load_thread(self, codex: CodexClient, options: RunOptions) -> str:
        told: JsonObject = {"approvalPolicy": "never", "config": self._config(options), **_of_thread(options)}
        within_s = self._limits.request_s + self._servers.patience_s
        with anyio.CancelScope(shield=True):
            if options.resume is None:
                started: JsonObject = {**told, "ephemeral": True} if options.ephemeral else told
                answer = await request(codex, "thread/start", started, within_s)
            else:
                resumed: JsonObject = {"threadId": options.resume, "excludeTurns": True, **told}
                answer = await request(codex, "thread/resume", resumed, within_s)
        return _id_in(answer, "thread")

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


def create(launch: Launch, servers: McpServers, inactivity_s: float) -> AbstractAsyncContextManager["AppServerRuntime"]:
    """Return the runtime `codex`; see `runtimes.registry.Factory`."""
    return open_app_server_runtime(launch, servers, TurnLimits(inactivity_s=inactivity_s))


@asynccontextmanager
async def open_app_server_runtime(
    launch: Launch, servers: McpServers, limits: TurnLimits
) -> AsyncIterator[AppServerRuntime]:
    """Hold a codex ready, started when it is first asked for and again where it has died; leaving ends it."""
    codex = CodexSupervisor(lambda: open_app_server(launch), SupervisorLimits(), BackgroundResource[Connection])
    try:
        yield AppServerRuntime(codex.use, limits, servers)
    finally:
        with anyio.CancelScope(shield=True):
            await codex.close()


def _of_thread(options: RunOptions) -> JsonObject:
    own: JsonObject = {
        "cwd": None if options.cwd is None else str(options.cwd),
        "model": options.model,
        "sandbox": options.effective_sandbox,
    }
    return {name: value for name, value in own.items() if value is not None}


def _own(options: RunOptions) -> JsonObject:
    """Return what the turn is told: what a thread that codex holds already does not take with `thread/resume`."""
    own: dict[str, JsonValue] = {}
    if options.output_schema is not None:
        own["outputSchema"] = options.output_schema
    if options.resume is not None:
        own |= {name: value for name, value in _of_thread(options).items() if name != "sandbox"}
        sandbox = options.effective_sandbox
        if sandbox is not None:
            policy: dict[str, JsonValue] = {"type": SANDBOX_TYPES[sandbox]}
            if sandbox == FULL_AUTO:
                policy["writableRoots"] = [str(folder) for folder in options.writable]
            own["sandboxPolicy"] = policy
    return own


def _input(prompt: str, options: RunOptions) -> TurnInput:
    # A lone surrogate is no text, and codex takes nothing but UTF-8.
    text = prompt.encode("utf-8", "replace").decode()
    images: TurnInput = [{"type": "localImage", "path": str(image.absolute())} for image in options.images]
    return [*text_input(text), *images]


def _json(value: TomlValue) -> JsonValue:
    return list(value) if isinstance(value, list) else value


def _nested(settings: Mapping[tuple[str, ...], JsonValue]) -> JsonObject:
    root: dict[str, JsonValue] = {}
    for path, value in settings.items():
        table = root
        for key in path[:-1]:
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                raise InputRefused(f"The setting {'.'.join(path)} is a table and a value.")
            table = inner
        table[path[-1]] = value
    return root


def _id_in(answer: JsonValue, name: str) -> str:
    match answer:
        case dict() if isinstance(made := answer.get(name), dict) and isinstance(made_id := made.get("id"), str):
            return made_id
        case _:
            raise ProtocolError(f"codex answered without the id of the {name}")
