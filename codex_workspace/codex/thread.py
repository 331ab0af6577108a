"""One context's codex thread: start or resume it, and run one turn at a time on it.

Here are codex's method names of a thread. The life of a turn that runs is left to `turn`, what its notifications mean
to `events`, the pipe to the connection that is handed in.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.codex.history import is_in_rollout, rollout_path, turn_record
from codex_workspace.codex.turn import CodexClient, Turn, TurnLimits, read_last_turns, request, restart_mcp_servers
from codex_workspace.common.errors import (
    CodexCannotStart,
    CodexError,
    CodexGone,
    CodexRefused,
    ProtocolError,
)
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.prompts import Instructions
from codex_workspace.protocol.app_server_reader import TurnReader
from codex_workspace.protocol.codex_events import (
    TokenUsage,
    TurnCompleted,
)
from codex_workspace.protocol.failures import LOST_THREAD
from codex_workspace.protocol.mailbox import Mailbox
from codex_workspace.protocol.mcp_status import (
    REQUIRED_FAILED,
    RETRY_S,
    ExpectedServers,
    McpStatus,
    describe_problems,
    query_status,
)
from codex_workspace.runtimes.backend import StartedTurn, ThreadIdStore, TurnInput, TurnOptions, TurnRecord, check_input

logger = logging.getLogger(__name__)

OTHER_WRITER_GRACE_S: Final = 6.0
"""A codex whose input has ended may take 5 s to leave, and holds its threads' locks until then."""

MAX_TRIES: Final = 3
"""A codex that dies, or loses the thread, before it has heard of a turn has done nothing for it: it is tried again. A
thread that ends every codex that loads it is not: others need codex too."""


STICKY: Final = ("model", "effort", "cwd")
"""What a turn has its own way and codex keeps for the turns after it; an output schema is forgotten with its turn."""


SANDBOX_TYPES: Final = {
    "read-only": "readOnly",
    "workspace-write": "workspaceWrite",
    "danger-full-access": "dangerFullAccess",
}
"""The sandbox as codex is told it, and as it says it back."""


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """What a thread runs with. Told to codex at start and at every resume: no version remembers all of it.

    profile: the permission profile of codex's that makes the sandbox, which is then only compared.
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


async def probe_mcp_servers(codex: CodexClient, options: ThreadOptions, timeout_s: float) -> McpStatus:
    """Start a thread that nobody will use, and so all MCP servers; return what they are.

    Raises:
        CodexCannotStart: a required server does not start; with codex's own words.
        CodexGone: codex died, or did not answer within `timeout_s` seconds beside the servers' own time.
    """
    try:
        started = await request(codex, "thread/start", options.params(), timeout_s + options.servers.within_s)
    except CodexRefused as refusal:
        reason = refusal.message.rpartition(REQUIRED_FAILED)[2].removeprefix(" to initialize: ")
        raise CodexCannotStart(
            f"a required MCP server does not start (mcp_servers of config.yaml): {reason}"
        ) from refusal
    thread_id = _id_of(started, "thread")
    try:
        return await query_status(codex, thread_id, options.servers, timeout_s)
    finally:
        with suppress(CodexError):
            await request(codex, "thread/delete", {"threadId": thread_id}, timeout_s)


class CodexThread:
    """One context: its thread, and the queue before it.

    Args:
        connect: holds the codex of the moment for as long as its block is open, started anew where the last one died.
        memory: keeps this context's thread id.
        options: what the thread runs with.
        limits: how long things may take.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[CodexClient]],
        memory: ThreadIdStore,
        options: ThreadOptions,
        limits: TurnLimits,
    ) -> None:
        self._connect = connect
        self._memory = memory
        self._options = options
        self._limits = limits
        self._one_at_a_time = anyio.Lock()
        self._loaded: _Loaded | None = None
        self._never_used: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a turn runs or waits."""
        return self._one_at_a_time.locked()

    @asynccontextmanager
    async def turn(self, turn_input: TurnInput) -> AsyncIterator["StartedTurn[Turn]"]:
        """Wait for the lease and start a turn with `turn_input`; leaving the block stops the turn if it still runs.

        Raises:
            InputRefused: there is nothing in it, or more text than codex takes.
            CodexCannotStart, CodexGone, CodexRefused: codex could not begin the turn.
        """
        self.check(turn_input)
        async with self.lease() as lease, lease.turn(turn_input) as begun:
            yield begun

    def check(self, turn_input: TurnInput) -> None:
        """Refuse what codex would refuse, before it waits in line.

        Raises:
            InputRefused: there is nothing in it, or more text than codex takes.
        """
        check_input(turn_input, self._limits.max_text_chars)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator["CodexThreadLease"]:
        """Wait until nobody else speaks in this context; while the block is open, nobody else does."""
        async with self._one_at_a_time:
            yield CodexThreadLease(self)

    @asynccontextmanager
    async def _turn(self, start: JsonObject) -> AsyncIterator["StartedTurn[Turn]"]:
        async with AsyncExitStack() as held:
            begun = await self._begin(start, held)
            try:
                yield begun
            finally:
                with anyio.CancelScope(shield=True):
                    await begun.turn.abandon()
                if self._loaded is not None:
                    self._loaded.used = begun.turn.thread_usage

    async def _recorded(self, client_message_id: str, turn_input: TurnInput) -> TurnCompleted | TurnRecord:
        for _ in range(MAX_TRIES - 1):
            with suppress(CodexGone):
                return await self._read_record(client_message_id, turn_input)
        return await self._read_record(client_message_id, turn_input)

    async def _read_record(self, client_message_id: str, turn_input: TurnInput) -> TurnCompleted | TurnRecord:
        async with self._connect() as codex:
            loaded, _ = await self._load_thread(codex)
            try:
                read = await read_last_turns(codex, loaded.thread_id, self._limits.request_s)
            except CodexRefused as refusal:
                # A thread without a turn cannot be read with its turns.
                logger.info("no record of %s: %s", client_message_id, refusal.message)
                return TurnRecord.MISSING
        found, rollout = turn_record(read, client_message_id), loaded.rollout
        text = next((text for item in turn_input if isinstance(text := item.get("text"), str)), None)
        if found is TurnRecord.MISSING and rollout is not None and text is not None:
            return await anyio.to_thread.run_sync(_trace_in, rollout, text)
        return found

    async def _begin(self, start: JsonObject, held: AsyncExitStack) -> "StartedTurn[Turn]":
        """Begin a turn, with as many tries as are due while codex has not heard of it."""
        for _ in range(MAX_TRIES - 1):
            attempt = _Attempt()
            try:
                return await self._try_to_begin(start, held, attempt)
            except (CodexGone, CodexRefused) as error:
                if attempt.heard() or not _is_lost(error):
                    raise
                self._loaded = None
                await held.aclose()
        return await self._try_to_begin(start, held, _Attempt())

    async def _try_to_begin(self, start: JsonObject, held: AsyncExitStack, attempt: "_Attempt") -> "StartedTurn[Turn]":
        codex = await held.enter_async_context(self._connect())
        # A cancelled start would leave a thread behind that nobody knows.
        with anyio.CancelScope(shield=True):
            loaded, note = await self._load_thread(codex)
        missed = await self._missed_servers(codex, loaded)
        note = "\n".join(each for each in (note, *missed) if each is not None) or None
        # Nor is a turn left behind.
        with anyio.CancelScope(shield=True):
            # Listen before asking: the turn's first notification can come ahead of the answer.
            mailbox = attempt.mailbox = held.enter_context(codex.subscribe(loaded.thread_id))
            params: JsonObject = {**loaded.usual, "threadId": loaded.thread_id, **start}
            started = await request(codex, "turn/start", params, self._limits.request_s)
            loaded.usual = await self._usual(codex, start, loaded.usual)
            reader = TurnReader(loaded.thread_id, _id_of(started, "turn"))
            turn = Turn(codex, mailbox, reader, self._limits, loaded.used)
            self._never_used = None
        return StartedTurn(turn, note)

    async def _missed_servers(self, codex: CodexClient, loaded: "_Loaded") -> list[str]:
        """Wait for the thread's MCP servers, and return what has to be said of them and was not yet."""
        expected, now = self._options.servers, anyio.current_time()
        # One that is known not to be there is not waited for; one that was started again after its end is.
        awaited = [name for name in expected.names if name not in loaded.servers_missed]
        await codex.mcp_status.wait_for(loaded.thread_id, awaited, expected.within_s)
        if loaded.servers_tried_at is None:
            loaded.servers_tried_at = now
        elif loaded.servers_missed.keys() - expected.left_out.keys() and now >= loaded.servers_tried_at + RETRY_S:
            loaded.servers_tried_at = now
            await restart_mcp_servers(codex, self._limits.request_s)
        missed = describe_problems(expected, codex.mcp_status.of(loaded.thread_id))
        new = [sentence for name, sentence in missed.items() if name not in loaded.servers_missed]
        loaded.servers_missed = missed
        for sentence in new:
            logger.warning("%s", sentence)
        return new

    async def _usual(self, codex: CodexClient, start: JsonObject, usual: JsonObject) -> JsonObject:
        """Return what later turns have to be told, as codex keeps what one turn had its own way."""
        own = {name for name in STICKY if name in start}
        if "cwd" in own:
            usual = {**usual, "cwd": str(self._options.cwd)}
        if "model" in own:
            usual = {**usual, "model": self._options.model}
        if "effort" in own and "effort" not in usual:
            effort = self._options.effort or await self._default_effort(codex)
            usual = usual if effort is None else {**usual, "effort": effort}
        return usual

    async def _default_effort(self, codex: CodexClient) -> str | None:
        """Return the effort that the thread's model has by codex's own list; codex takes no word for "the default"."""
        try:
            listed = await request(codex, "model/list", {}, self._limits.request_s)
        except CodexRefused:
            return None
        models = listed.get("data") if isinstance(listed, dict) else None
        for model in models if isinstance(models, list) else []:
            match model:
                case {"model": str(name), "defaultReasoningEffort": str(effort)} if name == self._options.model:
                    return effort
                case _:
                    pass
        logger.warning("codex does not list %s; the effort of this turn stays for the next ones", self._options.model)
        return None

    async def _load_thread(self, codex: CodexClient) -> tuple["_Loaded", str | None]:
        """Return the context's thread, loaded in this codex, and what has to be said of it."""
        if self._loaded is not None and self._loaded.codex is codex:
            return self._loaded, None
        known = await self._memory.load()
        note = None
        if known is not None:
            try:
                rollout = await self._resume(codex, known)
            except CodexRefused as refusal:
                is_lost = LOST_THREAD.search(refusal.message) is not None
                if REQUIRED_FAILED in refusal.message or refusal.is_config_error or not is_lost:
                    raise
                logger.warning("thread %s cannot be resumed: %s", known, refusal.message)
                # A thread that was started here and has had no turn takes nothing with it.
                if known != self._never_used:
                    note = f"The earlier conversation cannot be resumed ({refusal.message}); a new one begins."
            else:
                await self._tell_changed_instructions(codex, known)
                self._loaded = _Loaded(codex, known, None, rollout)
                return self._loaded, None
        thread_id, rollout = await self._start(codex)
        await self._memory.save(thread_id, self._options.instructions.digest)
        self._never_used = thread_id
        self._loaded = _Loaded(codex, thread_id, TokenUsage(), rollout)
        return self._loaded, note

    async def _tell_changed_instructions(self, codex: CodexClient, thread_id: str) -> None:
        """Tell a resumed thread its instructions where it was told others: codex keeps those that it began with.

        What is told here is in the thread's record from then on, until codex compacts it; what takes its place then
        begins with the instructions that `thread/resume` named. A death ahead of `save` has it told twice.
        """
        instructions = self._options.instructions
        if await self._memory.instructions() == instructions.digest:
            return
        logger.info("thread %s is told the instructions, which have changed", thread_id)
        content: JsonObject = {"type": "input_text", "text": instructions.amendment}
        item: JsonObject = {"type": "message", "role": "developer", "content": [content]}
        await request(codex, "thread/inject_items", {"threadId": thread_id, "items": [item]}, self._limits.request_s)
        await self._memory.save(thread_id, instructions.digest)

    async def _start(self, codex: CodexClient) -> tuple[str, Path | None]:
        tools: JsonObject = {"dynamicTools": list(self._options.tools)} if self._options.tools else {}
        params: JsonObject = {**self._options.params(), **tools}
        started = await request(codex, "thread/start", params, self._loading_s)
        self._check_echo(started)
        return _id_of(started, "thread"), rollout_path(started)

    async def _resume(self, codex: CodexClient, thread_id: str) -> Path | None:
        params: JsonObject = {"threadId": thread_id, "excludeTurns": True, **self._options.params()}
        give_up = anyio.current_time() + OTHER_WRITER_GRACE_S
        while True:
            try:
                resumed = await request(codex, "thread/resume", params, self._loading_s)
            except CodexRefused as refusal:
                if "active writer" not in refusal.message or anyio.current_time() >= give_up:
                    raise
                await anyio.sleep(0.2)
            else:
                self._check_echo(resumed)
                return rollout_path(resumed)

    @property
    def _loading_s(self) -> float:
        """How long codex may take to load a thread: it answers when the required MCP servers have started."""
        return self._limits.request_s + self._options.servers.within_s

    def _check_echo(self, answer: JsonValue) -> None:
        """Compare what codex says it runs with to what it was told: a looser sandbox would go unnoticed."""
        sandbox = answer.get("sandbox") if isinstance(answer, dict) else None
        echoed = sandbox.get("type") if isinstance(sandbox, dict) else None
        wanted = SANDBOX_TYPES[self._options.sandbox]
        if echoed != wanted:
            raise ProtocolError(f"codex runs the thread with sandbox {echoed}, not {wanted} as it was told")
        profile = answer.get("activePermissionProfile") if isinstance(answer, dict) else None
        active = profile.get("id") if isinstance(profile, dict) else None
        if self._options.profile is not None and active != self._options.profile:
            raise ProtocolError(f"codex runs the thread with the profile {active}, not {self._options.profile}")


class CodexThreadLease:
    """The word in one context: whoever holds it may speak as often as is needed."""

    def __init__(self, conversation: CodexThread) -> None:
        self._conversation = conversation

    def turn(
        self, turn_input: TurnInput, client_message_id: str | None = None, options: TurnOptions | None = None
    ) -> AbstractAsyncContextManager["StartedTurn[Turn]"]:
        """Start a turn, and stop it if it still runs when the block is left; raises as `CodexThread.turn` does.

        Args:
            said: what is said.
            client_message_id: the message's id in codex's record, for `turn_record`.
            options: what this turn has its own way.
        """
        own = {} if options is None else options.params()
        return self._conversation._turn({"input": list(turn_input), "clientUserMessageId": client_message_id, **own})

    async def recorded_end(
        self, client_message_id: str, turn_input: TurnInput, turn_id: str | None = None
    ) -> TurnCompleted | TurnRecord:
        """Return from codex's record how the last turn ended whose client id begins with `client_message_id`.

        `turn_input` is the turn's input; `turn_id` is not needed.
        """
        return await self._conversation._recorded(client_message_id, turn_input)


@dataclass(slots=True)
class _Loaded:
    """A thread that a codex holds in memory.

    used: its tokens so far, where that is known. rollout: the file that codex keeps it in.
    usual: what every turn has to be told since one had it its own way.
    servers_tried_at: when its MCP servers were last started; None where they were not waited for yet.
    servers_missed: those that are not there, with the sentence that was said of it.
    """

    codex: CodexClient
    thread_id: str
    used: TokenUsage | None
    rollout: Path | None
    usual: JsonObject = field(default_factory=dict)
    servers_tried_at: float | None = None
    servers_missed: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Attempt:
    """What is known of an attempt to begin a turn."""

    mailbox: Mailbox | None = None

    def heard(self) -> bool:
        """Tell whether codex has said anything of the thread since: then the turn may have begun."""
        return self.mailbox is not None and self.mailbox.has_received


def _trace_in(rollout: Path, text: str) -> TurnRecord:
    """Look for a message in a thread's file; one that cannot be read holds none."""
    try:
        with rollout.open(encoding="utf-8", errors="replace") as lines:
            return TurnRecord.INTERRUPTED if is_in_rollout(lines, text) else TurnRecord.MISSING
    except OSError as error:
        logger.warning("%s cannot be read: %s", rollout, error.strerror)
        return TurnRecord.MISSING


def _is_lost(error: CodexGone | CodexRefused) -> bool:
    """Tell whether `error` says that codex, or the thread in it, is not there: starting again will help."""
    return isinstance(error, CodexGone) or "thread not found" in error.message


def _id_of(answer: JsonValue, name: str) -> str:
    """Return `answer[name]["id"]`: the shape of every answer that makes a thread or a turn."""
    match answer:
        case dict() if isinstance(made := answer.get(name), dict) and isinstance(made_id := made.get("id"), str):
            return made_id
        case _:
            raise ProtocolError(f"codex answered without the id of the {name}")
