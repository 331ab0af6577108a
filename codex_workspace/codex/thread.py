"""The codex thread of one context: starts or resumes it, and runs one turn at a time on it."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.app_server import Connection
from codex_workspace.codex.history import is_in_rollout, read_last_turns, rollout_path, turn_record
from codex_workspace.codex.turn import Turn, TurnLimits, restart_mcp_servers
from codex_workspace.common.errors import CodexCannotStart, CodexError, CodexGone, CodexRefused, ProtocolError
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.prompts import Instructions
from codex_workspace.protocol.app_server_reader import (
    REQUIRED_FAILED,
    RETRY_S,
    ExpectedServers,
    TurnReader,
    describe_problems,
)
from codex_workspace.protocol.codex_events import LOST_THREAD, TokenUsage, TurnCompleted
from codex_workspace.protocol.jsonrpc import Mailbox, nested_or_empty, objects, text_or_none
from codex_workspace.runtimes.backend import StartedTurn, ThreadIdStore, TurnInput, TurnOptions, TurnRecord, input_texts

logger = logging.getLogger(__name__)

OTHER_WRITER_GRACE_S: Final = 6.0
"""A codex whose stdin was closed may take 5 s to exit, and holds the locks of its threads until then."""

MAX_ATTEMPTS: Final = 3
"""If codex dies, or loses the thread, before it has received a turn, the turn is tried again. The number is limited,
because a thread that crashes every codex would take codex away from the other threads."""

STICKY_OPTIONS: Final = ("model", "effort", "cwd")
"""The options of a turn that codex keeps for later turns; it forgets an output schema with its turn."""


SANDBOX_TYPES: Final = {
    "read-only": "readOnly",
    "workspace-write": "workspaceWrite",
    "danger-full-access": "dangerFullAccess",
}
"""The sandbox mode in requests, and its name in codex's results."""


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """The options of a thread; sent at start and at every resume, because codex does not store all of them.

    profile: codex's permission profile that defines the sandbox; `sandbox` is then only compared.
    """

    cwd: Path
    model: str
    model_provider: str
    sandbox: str
    approval_policy: str
    effort: str | None = None
    instructions: Instructions = field(default_factory=Instructions)
    tools: tuple[JsonObject, ...] = ()
    servers: ExpectedServers = field(default_factory=ExpectedServers)
    profile: str | None = None

    def params(self) -> JsonObject:
        """Return the fields of `thread/start` and `thread/resume`."""
        return {
            "cwd": str(self.cwd),
            "model": self.model,
            "modelProvider": self.model_provider,
            **({"permissions": self.profile} if self.profile else {"sandbox": self.sandbox}),
            "approvalPolicy": self.approval_policy,
            "developerInstructions": self.instructions.text or None,
            **({"config": config} if (config := self.servers.config()) else {}),
        }

    def check_applied(self, result: JsonValue) -> None:
        """Compare the sandbox that codex reports with the requested one.

        Raises:
            ProtocolError: they differ.
        """
        fields = result if isinstance(result, dict) else {}
        sandbox, requested = text_or_none(nested_or_empty(fields, "sandbox"), "type"), SANDBOX_TYPES[self.sandbox]
        if sandbox != requested:
            raise ProtocolError(f"codex runs the thread with sandbox {sandbox} instead of {requested}")
        profile = text_or_none(nested_or_empty(fields, "activePermissionProfile"), "id")
        if self.profile is not None and profile != self.profile:
            raise ProtocolError(f"codex runs the thread with the profile {profile} instead of {self.profile}")


class CodexThread:
    """One context: its thread, and the queue for it. It is its own `ThreadLease`.

    Args:
        connect: holds the current codex while its block is open, and restarts it if it died.
        store: stores the context's thread id.
        options: the thread's options.
        limits: the time limits.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        store: ThreadIdStore,
        options: ThreadOptions,
        limits: TurnLimits,
    ) -> None:
        self._connect = connect
        self._store = store
        self._options = options
        self._limits = limits
        self._lock = anyio.Lock(fast_acquire=True)
        self._loaded: _Loaded | None = None
        self._unused_thread_id: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a turn runs or waits."""
        return self._lock.locked()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator["CodexThread"]:
        """Wait for exclusive access to the thread, and hold it while the block is open."""
        async with self._lock:
            yield self

    @asynccontextmanager
    async def turn(
        self, turn_input: TurnInput, client_message_id: str | None = None, options: TurnOptions | None = None
    ) -> AsyncIterator[StartedTurn[Turn]]:
        """Start a turn; leaving the block stops it if it still runs. The caller must hold the lease.

        Raises:
            CodexCannotStart, CodexGone, CodexRefused: codex could not start the turn.
        """
        own = {} if options is None else options.params()
        params: JsonObject = {"input": list(turn_input), "clientUserMessageId": client_message_id, **own}
        async with AsyncExitStack() as stack:
            started = await self._start_turn(params, stack)
            try:
                yield started
            finally:
                with anyio.CancelScope(shield=True):
                    await started.turn.stop()
                if self._loaded is not None:
                    self._loaded.usage = started.turn.thread_usage

    async def recorded_end(
        self, client_message_id: str, turn_input: TurnInput, turn_id: str | None = None
    ) -> TurnCompleted | TurnRecord:
        """Return from codex's record how an earlier turn of this message ended; `turn_id` is not needed."""
        for _ in range(MAX_ATTEMPTS - 1):
            with suppress(CodexGone):
                return await self._read_record(client_message_id, turn_input)
        return await self._read_record(client_message_id, turn_input)

    async def _read_record(self, client_message_id: str, turn_input: TurnInput) -> TurnCompleted | TurnRecord:
        async with self._connect() as codex:
            loaded, _ = await self._load_thread(codex)
            try:
                turns = await read_last_turns(codex, loaded.thread_id, self._limits.request_s)
            except CodexRefused as refusal:
                # A thread without a turn has no record.
                logger.info("no record of message %s: %s", client_message_id, refusal.message)
                return TurnRecord.MISSING
        record, rollout, texts = turn_record(turns, client_message_id), loaded.rollout, input_texts(turn_input)
        if record is TurnRecord.MISSING and rollout is not None and texts:
            return await anyio.to_thread.run_sync(_record_in_rollout, rollout, texts[0])
        return record

    async def _start_turn(self, params: JsonObject, stack: AsyncExitStack) -> StartedTurn[Turn]:
        """Start a turn; try again if codex died, or lost the thread, before it received the turn."""
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            mailbox: Mailbox | None = None
            try:
                codex = await stack.enter_async_context(self._connect())
                # A cancelled request would leave an unknown thread behind, or below an unknown turn.
                with anyio.CancelScope(shield=True):
                    loaded, note = await self._load_thread(codex)
                problems = await self._new_server_problems(codex, loaded)
                # Subscribe before sending: the turn's first notification can precede the response.
                mailbox = stack.enter_context(codex.subscribe(loaded.thread_id))
                with anyio.CancelScope(shield=True):
                    turn = await self._send_turn(codex, loaded, mailbox, params)
            except (CodexGone, CodexRefused) as error:
                is_lost = isinstance(error, CodexGone) or "thread not found" in error.message
                was_received = mailbox is not None and mailbox.has_received
                if was_received or not is_lost or not attempts_left:
                    raise
                self._loaded = None
                await stack.aclose()
            else:
                break
        return StartedTurn(turn, "\n".join([*([note] if note else []), *problems]) or None)

    async def _send_turn(self, codex: Connection, loaded: "_Loaded", mailbox: Mailbox, params: JsonObject) -> Turn:
        sent: JsonObject = {**loaded.restored_options, "threadId": loaded.thread_id, **params}
        result = await codex.request("turn/start", sent, self._limits.request_s)
        await self._restore_options(codex, loaded, params)
        self._unused_thread_id = None
        reader = TurnReader(loaded.thread_id, id_in(result, "turn"))
        return Turn(codex, mailbox, reader, self._limits, loaded.usage)

    async def _new_server_problems(self, codex: Connection, loaded: "_Loaded") -> list[str]:
        """Wait for the thread's MCP servers, and return the problems that were not reported yet."""
        if codex.mcp_status.by_thread.get(loaded.thread_id, {}) == loaded.servers and not loaded.server_problems:
            # All servers ran at the last turn, and none has changed.
            return []
        expected = self._options.servers
        awaited = [name for name in expected.names if name not in loaded.server_problems]
        loaded.servers = await codex.mcp_status.wait_for(loaded.thread_id, awaited, expected.within_s)
        await self._retry_servers(codex, loaded, expected)
        problems = describe_problems(expected, loaded.servers)
        new = [sentence for name, sentence in problems.items() if name not in loaded.server_problems]
        loaded.server_problems = problems
        if new:
            logger.warning("%s", " ".join(new))
        return new

    async def _retry_servers(self, codex: Connection, loaded: "_Loaded", expected: ExpectedServers) -> None:
        """Start the failed MCP servers again if the last try was long ago."""
        now = anyio.current_time()
        if loaded.servers_tried_at is None:
            loaded.servers_tried_at = now
        elif loaded.server_problems.keys() - expected.left_out.keys() and now >= loaded.servers_tried_at + RETRY_S:
            loaded.servers_tried_at = now
            await restart_mcp_servers(codex, self._limits.request_s)

    async def _restore_options(self, codex: Connection, loaded: "_Loaded", params: JsonObject) -> None:
        """Note the options that later turns must send, because codex keeps those of this turn."""
        changed = {name for name in STICKY_OPTIONS if name in params}
        if "cwd" in changed:
            loaded.restored_options["cwd"] = str(self._options.cwd)
        if "model" in changed:
            loaded.restored_options["model"] = self._options.model
        if "effort" in changed and "effort" not in loaded.restored_options:
            effort = self._options.effort or await self._default_effort(codex)
            if effort is not None:
                loaded.restored_options["effort"] = effort

    async def _default_effort(self, codex: Connection) -> str | None:
        """Return the default effort of the thread's model by codex's list; codex has no value for "the default"."""
        try:
            listed = await codex.request("model/list", {}, self._limits.request_s)
        except CodexRefused:
            return None
        for model in objects(listed, "data") if isinstance(listed, dict) else []:
            if model.get("model") == self._options.model:
                return text_or_none(model, "defaultReasoningEffort")
        logger.warning(
            "codex does not list the model %s; later turns keep the effort of this turn", self._options.model
        )
        return None

    async def _load_thread(self, codex: Connection) -> tuple["_Loaded", str | None]:
        """Return the context's thread, loaded in this codex, and a note for the user if its history was lost."""
        if self._loaded is not None and self._loaded.codex is codex:
            return self._loaded, None
        stored_id = await self._store.load()
        note = None
        if stored_id is not None:
            try:
                rollout = await self._resume(codex, stored_id)
            except CodexRefused as refusal:
                is_lost = LOST_THREAD.search(refusal.message) is not None
                if REQUIRED_FAILED in refusal.message or refusal.is_config_error or not is_lost:
                    raise
                logger.warning("cannot resume thread %s: %s", stored_id, refusal.message)
                if stored_id != self._unused_thread_id:
                    note = f"The earlier conversation cannot be resumed ({refusal.message}); a new one begins."
            else:
                await self._send_changed_instructions(codex, stored_id)
                self._loaded = _Loaded(codex, stored_id, None, rollout)
                return self._loaded, None
        thread_id, rollout = await self._start(codex)
        await self._store.save(thread_id, self._options.instructions.digest)
        self._unused_thread_id = thread_id
        self._loaded = _Loaded(codex, thread_id, TokenUsage(), rollout)
        return self._loaded, note

    async def _send_changed_instructions(self, codex: Connection, thread_id: str) -> None:
        """Add changed instructions to the history of a resumed thread, because codex keeps those of its start.

        When codex compacts the thread, the summary begins with the instructions of `thread/resume`. If this process
        dies before `save`, the instructions are added twice.
        """
        instructions = self._options.instructions
        if await self._store.instructions() == instructions.digest:
            return
        logger.info("sending changed instructions to thread %s", thread_id)
        content: JsonObject = {"type": "input_text", "text": instructions.amendment}
        item: JsonObject = {"type": "message", "role": "developer", "content": [content]}
        params: JsonObject = {"threadId": thread_id, "items": [item]}
        await codex.request("thread/inject_items", params, self._limits.request_s)
        await self._store.save(thread_id, instructions.digest)

    async def _start(self, codex: Connection) -> tuple[str, Path | None]:
        tools: JsonObject = {"dynamicTools": list(self._options.tools)} if self._options.tools else {}
        result = await codex.request("thread/start", {**self._options.params(), **tools}, self._loading_s)
        self._options.check_applied(result)
        return id_in(result, "thread"), rollout_path(result)

    async def _resume(self, codex: Connection, thread_id: str) -> Path | None:
        params: JsonObject = {"threadId": thread_id, "excludeTurns": True, **self._options.params()}
        give_up = anyio.current_time() + OTHER_WRITER_GRACE_S
        while True:
            try:
                result = await codex.request("thread/resume", params, self._loading_s)
            except CodexRefused as refusal:
                if "active writer" not in refusal.message or anyio.current_time() >= give_up:
                    raise
                await anyio.sleep(0.2)
            else:
                self._options.check_applied(result)
                return rollout_path(result)

    @property
    def _loading_s(self) -> float:
        """The time limit for loading a thread: codex responds when the required MCP servers have started."""
        return self._limits.request_s + self._options.servers.within_s


@dataclass(slots=True)
class _Loaded:
    """A thread that a codex has loaded.

    usage: the tokens of the thread, if they are known.
    rollout: the thread's file.
    restored_options: the options that every turn must send, because an earlier turn changed them.
    servers_tried_at: when its MCP servers were last started; None before the first wait for them.
    servers: their status at the last turn.
    server_problems: the sentence about each unavailable server, by its name.
    """

    codex: Connection
    thread_id: str
    usage: TokenUsage | None
    rollout: Path | None
    restored_options: dict[str, JsonValue] = field(default_factory=dict)
    servers_tried_at: float | None = None
    servers: Mapping[str, str | None] | None = None
    server_problems: dict[str, str] = field(default_factory=dict)


def _record_in_rollout(rollout: Path, text: str) -> TurnRecord:
    """Look for a message in a thread's file; a file that cannot be read does not contain it."""
    try:
        with rollout.open(encoding="utf-8", errors="replace") as lines:
            return TurnRecord.INTERRUPTED if is_in_rollout(lines, text) else TurnRecord.MISSING
    except OSError as error:
        logger.warning("cannot read %s: %s", rollout, error.strerror)
        return TurnRecord.MISSING


def id_in(result: JsonValue, name: str) -> str:
    """Return `result[name]["id"]`, the id of the thread or turn in a result.

    Raises:
        ProtocolError: the result has no such id.
    """
    id_ = text_or_none(nested_or_empty(result, name), "id") if isinstance(result, dict) else None
    if id_ is None:
        raise ProtocolError(f"codex's response lacks the id of the {name}")
    return id_


@dataclass(frozen=True, slots=True)
class McpStatus:
    """The MCP servers of a thread: the tools of each that has started, and the problem of each other one."""

    tools: Mapping[str, list[str]]
    problems: Mapping[str, str]


async def probe_mcp_servers(codex: Connection, options: ThreadOptions, timeout_s: float) -> McpStatus:
    """Start all MCP servers by a temporary thread, and return their status.

    Raises:
        CodexCannotStart: a required server does not start; with codex's reason.
        CodexGone: codex died, or did not respond within `timeout_s` seconds after the servers' own time.
    """
    timeout_s += options.servers.within_s
    try:
        started = await codex.request("thread/start", options.params(), timeout_s)
    except CodexRefused as refusal:
        reason = refusal.message.rpartition(REQUIRED_FAILED)[2].removeprefix(" to initialize: ")
        raise CodexCannotStart(
            f"a required MCP server does not start (mcp_servers of config.yaml): {reason}"
        ) from refusal
    thread_id = id_in(started, "thread")
    tools: dict[str, list[str]] = {}
    try:
        known = await codex.mcp_status.wait_for(thread_id, options.servers.names, options.servers.within_s)
        for name in [name for name, problem in known.items() if problem == ""]:
            # With a name, codex asks the running server; without one, it starts all of them again.
            params: JsonObject = {"threadId": thread_id, "serverName": name, "detail": "toolsAndAuthOnly"}
            listed = await codex.call("mcpServerStatus/list", params, timeout_s=timeout_s)
            servers = objects(listed, "data") if isinstance(listed, dict) else []
            found = (nested_or_empty(server, "tools") for server in servers if server.get("name") == name)
            tools[name] = sorted(next(found, {}))
    finally:
        with suppress(CodexError):
            await codex.request("thread/delete", {"threadId": thread_id}, timeout_s)
    return McpStatus(tools, describe_problems(options.servers, known))
