"""The codex process and its JSON-RPC: `async with open_app_server(...)` is a codex that has answered `initialize`.

Here are the process (spawn, watch, end, sweep), the pipe, and requests in both directions. What the methods and
notifications mean is left to `codex_workspace.codex.thread` and `codex_workspace.protocol.codex_events`.
"""

import logging
import random
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final, assert_never

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from codex_workspace import __version__
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import (
    CodexCannotStart,
    CodexGone,
    CodexRefused,
    CodexTimeout,
    InputRefused,
)
from codex_workspace.common.processes import PipeReader, PipeWriter, kill_marked
from codex_workspace.common.values import MAX_INPUT_CHARS, JsonObject, JsonValue, Version
from codex_workspace.protocol.jsonrpc import (
    MAX_LINE_BYTES,
    Failure,
    InvalidLine,
    LineSplitter,
    Notification,
    Request,
    Result,
    Skipped,
    decode,
    encode_error,
    encode_notification,
    encode_request,
    encode_result,
)
from codex_workspace.protocol.mailbox import Mailbox, ServerRequest
from codex_workspace.protocol.mcp_status import STARTUP, McpStatusTracker
from codex_workspace.protocol.server_requests import default_response
from codex_workspace.protocol.versions import initialized_version, require_supported
from codex_workspace.runtimes.launch import MARK, Launch
from codex_workspace.runtimes.process import DRAIN_S, KILL_GRACE_S, Process, spawn

logger = logging.getLogger(__name__)

CLIENT_NAME: Final = "codex_workspace"
"""Our name in `initialize`; codex makes an HTTP header of it, so it is plain ASCII."""

LAUNCH_OVERRIDES: Final = {
    "features.goals": "false",  # on by default from 0.163: codex starts turn after turn by itself
    "features.multi_agent": "false",  # sub-agents run on threads that nobody here started
    "features.plugins": "false",  # looks up hosts at start, and delays the exit when DNS is dead
    "features.apps": "false",
    "features.shell_snapshot": "false",  # a login shell for every new thread, and its environment in a file
    "features.unbounded_connection_retries": "false",  # on by default from 0.163: a refused connection never ends
    "analytics.enabled": "false",
    "check_for_update_on_startup": "false",
    "cli_auth_credentials_store": '"ephemeral"',  # an API key stays in memory, no auth.json
}
"""Settings that this agent's promises rest on; as `-c` they win over any config.toml."""

UNWANTED_NOTIFICATIONS: Final = (
    "account/rateLimits/updated",
    "remoteControl/status/changed",
    "thread/readState/changed",
    "thread/started",
    "thread/settings/updated",
    "item/reasoning/textDelta",
)


MAX_IN_FLIGHT: Final = 32
"""Unanswered requests at a time. Codex's own queue holds about 128; beyond it requests are lost without a word."""

OVERLOADED: Final = -32001
METHOD_NOT_FOUND: Final = -32601
MAX_OVERLOAD_RETRIES: Final = 8


EOF_GRACE_S: Final = 3.0
TERM_GRACE_S: Final = 2.0


def command_line(launch: Launch, mark: str) -> list[str]:
    """Return codex's argument vector."""
    settings = LAUNCH_OVERRIDES | {f"shell_environment_policy.set.{MARK}": f'"{mark}"'} | dict(launch.overrides)
    flags = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    return [str(launch.binary), "app-server", *flags]


class Connection:
    """Requests, answers and notifications over a pair of byte streams with codex at the far end."""

    def __init__(
        self,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        kill: Callable[[], None] | None = None,
        pid: int | None = None,
    ) -> None:
        self.pid: Final = pid
        self.version: Version = (0, 0, 0)
        self.has_completed_turn = False
        self.skipped_lines = 0
        self.mcp_status: Final = McpStatusTracker()
        self._splitter = LineSplitter(max_line_bytes)
        self._numbers = count(1)
        self._in_flight = anyio.CapacityLimiter(MAX_IN_FLIGHT)
        self._waiting: dict[int | str, _Waiter] = {}
        self._mailboxes: dict[str, Mailbox] = {}
        self._listened_to: set[str] = set()
        self._being_answered: set[int | str] = set()
        self._error: CodexGone | None = None
        self._outbox_in, self._outbox_out = anyio.create_memory_object_stream[bytes](MAX_IN_FLIGHT)
        self._kill = kill

    @property
    def error(self) -> CodexGone | None:
        """Why this connection is of no more use; None while it is."""
        return self._error

    @property
    def threads(self) -> int:
        """How many threads were listened to: codex holds each of them in memory until it ends."""
        return len(self._listened_to)

    async def call(self, method: str, params: JsonObject, *, timeout_s: float = 30.0) -> JsonValue:
        """Send a request and return its result.

        Raises:
            CodexRefused: codex answered with an error.
            CodexGone: the pipe closed before the answer came, or was closed already.
            CodexTimeout: no answer within `timeout_s` seconds of the sending; the wait for a free place is not counted.
            InputRefused: `params` hold more text than codex takes.
        """
        _refuse_oversized(params)
        for attempt in range(MAX_OVERLOAD_RETRIES):
            try:
                return await self._call_once(method, params, timeout_s)
            except CodexRefused as refusal:
                if refusal.code != OVERLOADED:
                    raise
            await anyio.sleep(0.02 * 2**attempt * random.uniform(0.5, 1.5))
        return await self._call_once(method, params, timeout_s)

    @contextmanager
    def subscribe(self, thread_id: str) -> Iterator[Mailbox]:
        """Collect what codex says and asks of a thread from now on. One listener at a time for each thread.

        What is asked of a thread that nobody listens to gets the plain refusal.
        """
        if thread_id in self._mailboxes:
            raise RuntimeError(f"thread {thread_id} has a listener already")
        mailbox = self._mailboxes[thread_id] = Mailbox()
        self._listened_to.add(thread_id)
        if self._error is not None:
            mailbox.fail(self._error)
        try:
            yield mailbox
        finally:
            del self._mailboxes[thread_id]
            mailbox.close()

    async def responds(self, within_s: float) -> bool:
        """Tell whether codex answers at all: a stopped or wedged one is alive, and says nothing."""
        try:
            await self.call("thread/loaded/list", {}, timeout_s=within_s)
        except CodexRefused:
            return True
        except (CodexTimeout, CodexGone):
            return False
        return True

    def kill(self) -> None:
        """End codex at once, without its consent; every waiter gets CodexGone, and nobody is given it any more."""
        if self._kill is not None:
            self._kill()
        self.fail(CodexGone("codex stopped answering and was ended"))

    def fail(self, error: CodexGone) -> None:
        """Declare the connection dead: all that wait, and all that come later, get `error`."""
        if self._error is not None:
            return
        self._error = error
        self._outbox_in.close()
        # This is what wakes those that wait for room in the outbox.
        self._outbox_out.close()
        for waiter in self._waiting.values():
            waiter.answered.set()
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        self.mcp_status.close()

    async def run(self, send: ByteSendStream, receive: ByteReceiveStream) -> None:
        """Carry messages both ways until codex closes its end."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write_all, send)
            await self._read_all(receive, tasks)
            tasks.cancel_scope.cancel()

    async def notify(self, method: str) -> None:
        """Send a notification without content."""
        await self._send(encode_notification(method, {}))

    async def _call_once(self, method: str, params: JsonObject, timeout_s: float) -> JsonValue:
        async with self._in_flight:
            number = next(self._numbers)
            waiter = self._waiting[number] = _Waiter()
            try:
                with anyio.fail_after(timeout_s):
                    await self._send(encode_request(number, method, params))
                    await waiter.answered.wait()
            except TimeoutError as error:
                raise CodexTimeout(f"codex did not answer {method} within {timeout_s:g} s") from error
            finally:
                del self._waiting[number]
        match waiter.answer:
            case Result(value=value):
                return value
            case Failure(code=code, message=message):
                raise CodexRefused(method, code, message)
            case None:
                raise self._as_gone()
            case _:
                assert_never(waiter.answer)

    async def _send(self, line: bytes) -> None:
        try:
            await self._outbox_in.send(line)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise self._as_gone() from error

    def _as_gone(self) -> CodexGone:
        known = self._error
        return CodexGone(known.sentence, known.tail) if known else CodexGone("the pipe to codex is closed")

    async def _write_all(self, send: ByteSendStream) -> None:
        """Be the only writer: a line goes out whole, whatever is cancelled."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for line in self._outbox_out:
                await send.send(line)

    async def _read_all(self, receive: ByteReceiveStream, tasks: anyio.abc.TaskGroup) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                for line in self._splitter.feed(await receive.receive()):
                    self._take(line, tasks)
        for line in self._splitter.finish():
            self._take(line, tasks)

    def _take(self, line: bytes | Skipped, tasks: anyio.abc.TaskGroup) -> None:
        if isinstance(line, Skipped):
            self.skipped_lines += 1
            logger.error("skipped a line of %d bytes from codex: over the bound of one line", line.bytes)
            return
        message = decode(line)
        match message:
            case Notification():
                self._deliver(message, len(line))
            case Result() | Failure():
                self._settle(message)
            case Request():
                self._start_answering(message, len(line), tasks)
            case InvalidLine():
                logger.warning("codex wrote a line that is no message (%s): %r", message.reason, message.excerpt)
            case _:
                assert_never(message)

    def _deliver(self, notification: Notification, size: int) -> None:
        if notification.method == STARTUP:
            # It comes before anybody can listen to the thread.
            self.mcp_status.update(notification.params)
        thread_id = notification.params.get("threadId")
        mailbox = self._mailboxes.get(thread_id) if isinstance(thread_id, str) else None
        if mailbox is not None:
            mailbox.put(notification, size)
        elif notification.method in ("configWarning", "warning"):
            said = str(notification.params.get("summary") or notification.params.get("message"))
            # It looks for a bubblewrap on PATH first; its own one is the right one here.
            logger.log(logging.DEBUG if "bundled bubblewrap" in said else logging.WARNING, "codex: %s", said)

    def _settle(self, answer: Result | Failure) -> None:
        waiter = self._waiting.get(answer.id)
        if waiter is not None and not waiter.answered.is_set():
            waiter.answer = answer
            waiter.answered.set()

    def _start_answering(self, request: Request, size: int, tasks: anyio.abc.TaskGroup) -> None:
        # `thread/resume` on the same connection sends pending requests again, with the same id.
        if request.id not in self._being_answered:
            self._being_answered.add(request.id)
            thread_id = request.params.get("threadId")
            mailbox = self._mailboxes.get(thread_id) if isinstance(thread_id, str) else None
            tasks.start_soon(self._answer_request, request, mailbox.put_request(request, size) if mailbox else None)

    async def _answer_request(self, request: Request, asking: ServerRequest | None) -> None:
        try:
            if asking is not None:
                await asking.answered.wait()
            given = asking.result if asking is not None else None
            answer = default_response(request) if given is None else given
            if answer is None:
                logger.warning("codex asked something unknown, refused: %s", request.method)
                line = encode_error(request.id, METHOD_NOT_FOUND, f"{request.method} is not supported")
            else:
                line = encode_result(request.id, answer)
            with suppress(CodexGone):
                await self._send(line)
        finally:
            self._being_answered.discard(request.id)


@dataclass(slots=True)
class _Waiter:
    answered: anyio.Event = field(default_factory=anyio.Event)
    answer: Result | Failure | None = None


@asynccontextmanager
async def open_app_server(launch: Launch) -> AsyncIterator[Connection]:
    """Start codex and greet it; leaving the block ends it and everything that it started.

    Leaving takes at most `EOF_GRACE_S + TERM_GRACE_S + KILL_GRACE_S` and a moment, usually 50 ms.

    Raises:
        CodexCannotStart: no such binary, too old, or it ended or stayed silent before it answered.
    """
    mark = f"{launch.family}.{uuid.uuid4().hex}"
    process, stdin, stdout, stderr = spawn(launch, command_line(launch, mark), mark)
    connection = Connection(
        max_line_bytes=launch.max_line_bytes,
        kill=lambda: process.signal_group(signal.SIGKILL),
        pid=process.popen.pid,
    )
    try:
        async with task_group() as tasks:
            tasks.start_soon(process.watch)
            tasks.start_soon(process.drain_stderr, stderr)
            tasks.start_soon(_carry, connection, process, stdin, stdout, mark)
            try:
                await _greet(connection, process, launch)
                yield connection
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process, stdin)
                tasks.cancel_scope.cancel()
    finally:
        connection.fail(CodexGone("codex was ended, as its block was left"))
        for stream in (stdin, stdout, stderr):
            with anyio.CancelScope(shield=True):
                await stream.aclose()
        process.close()
        await kill_marked(MARK, mark)


async def _carry(connection: Connection, process: Process, stdin: PipeWriter, stdout: PipeReader, mark: str) -> None:
    """Run the connection until codex is gone, by its pipe or by its process, and say so to all who wait."""
    async with anyio.create_task_group() as tasks:

        async def cut_off() -> None:
            await process.over.wait()
            await anyio.sleep(DRAIN_S)
            tasks.cancel_scope.cancel()

        tasks.start_soon(cut_off)
        await connection.run(stdin, stdout)
        # The pipe is closed: the process is about to end, or of no use without it.
        with anyio.move_on_after(DRAIN_S):
            await process.over.wait()
        if not process.over.is_set():
            process.signal_group(signal.SIGKILL)
            await process.ended_within(KILL_GRACE_S)
        tasks.cancel_scope.cancel()
    connection.fail(CodexGone(f"codex {process.how_it_ended()}", process.last_lines()))
    await kill_marked(MARK, mark)


async def _greet(connection: Connection, process: Process, launch: Launch) -> None:
    hello: JsonObject = {
        "clientInfo": {"name": CLIENT_NAME, "title": "Codex workspace agent", "version": __version__},
        "capabilities": {
            "experimentalApi": True,
            "optOutNotificationMethods": list(UNWANTED_NOTIFICATIONS),
        },
    }
    try:
        result = await connection.call("initialize", hello, timeout_s=launch.start_timeout_s)
        await connection.notify("initialized")
        connection.version = initialized_version(result)
        require_supported(connection.version)
        await _refuse_broken_config(connection, launch)
        if launch.api_key is not None:
            login: JsonObject = {"type": "apiKey", "apiKey": launch.api_key}
            await connection.call("account/login/start", login, timeout_s=launch.start_timeout_s)
    except CodexGone as error:
        raise CodexCannotStart(f"codex cannot start: it {process.how_it_ended()}", error.tail) from error
    except (CodexRefused, CodexTimeout) as error:
        raise CodexCannotStart(f"codex cannot start: {error}", process.last_lines()) from error


async def _refuse_broken_config(connection: Connection, launch: Launch) -> None:
    """Let codex say what is wrong with its config.toml: it starts without the file, and refuses every thread then."""
    try:
        await connection.call("config/read", {}, timeout_s=launch.start_timeout_s)
    except CodexRefused as refusal:
        raise CodexCannotStart.for_config(launch.codex_home / "config.toml", refusal.message) from refusal


async def _end(process: Process, stdin: PipeWriter) -> None:
    """Ask codex to end, then make it: end of input, SIGTERM, SIGKILL, each with its time."""
    await stdin.aclose()
    if await process.ended_within(EOF_GRACE_S):
        return
    process.signal_group(signal.SIGTERM)
    if await process.ended_within(TERM_GRACE_S):
        return
    process.signal_group(signal.SIGKILL)
    await process.ended_within(KILL_GRACE_S)


def _refuse_oversized(params: JsonObject) -> None:
    inputs = params.get("input")
    if not isinstance(inputs, list):
        return
    texts = [item.get("text") for item in inputs if isinstance(item, dict)]
    chars = sum(len(text) for text in texts if isinstance(text, str))
    if chars > MAX_INPUT_CHARS:
        raise InputRefused(f"the message has {chars} characters; codex takes at most {MAX_INPUT_CHARS}")
