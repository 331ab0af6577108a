"""Runs `codex app-server`: the child process, and JSON-RPC requests and notifications over its pipes."""

import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from codex_workspace import __version__
from codex_workspace.common.concurrency import PipeReader, PipeWriter, task_group
from codex_workspace.common.errors import CodexCannotStart, CodexGone, CodexRefused, CodexTimeout
from codex_workspace.common.processes import kill_marked
from codex_workspace.common.values import JsonObject, JsonValue, Version, find_version, format_version
from codex_workspace.protocol.app_server_reader import STARTUP, McpStatusTracker, is_quiet, piece_of
from codex_workspace.protocol.jsonrpc import (
    MAX_LINE_BYTES,
    Failure,
    InvalidMessage,
    LineSplitter,
    Mailbox,
    Notification,
    Request,
    Result,
    Skipped,
    decode,
    encode,
    text_or_none,
)
from codex_workspace.protocol.server_requests import default_response
from codex_workspace.runtimes.launch import MARK, Launch, is_model_notice
from codex_workspace.runtimes.process import DRAIN_S, KILL_GRACE_S, Process, new_mark, spawn

logger = logging.getLogger(__name__)

MINIMUM_VERSION: Final[Version] = (0, 158, 0)
"""The oldest supported codex, for the app-server and for `codex exec`."""

CLIENT_NAME: Final = "codex_workspace"
"""Our name in `initialize`; ASCII, because codex sends it in an HTTP header."""

LAUNCH_OVERRIDES: Final = {
    "features.goals": "false",  # codex would start further turns by itself
    "features.multi_agent": "false",  # sub-agents run on threads that no client has started
    "features.plugins": "false",  # looks up hosts at start, and delays the exit if DNS does not respond
    "features.apps": "false",
    "features.shell_snapshot": "false",  # starts a login shell for each thread, and stores its environment in a file
    "features.unbounded_connection_retries": "false",  # a refused connection would be retried forever
    "analytics.enabled": "false",
    "check_for_update_on_startup": "false",
    "cli_auth_credentials_store": '"ephemeral"',  # keeps an API key in memory, without auth.json
}
"""Settings that the agent relies on; sent as `-c`, they take precedence over config.toml."""

API_KEY_NAMES: Final = ("CODEX_API_KEY", "OPENAI_API_KEY")
"""The variables that codex reads an API key from: for OpenAI's login, and for providers that name it."""


def with_key_variables(launch: Launch) -> Launch:
    """Return `launch` with its API key in codex's environment; commands inherit only a core set of variables."""
    keys = {} if launch.api_key is None else dict.fromkeys(API_KEY_NAMES, launch.api_key)
    policy = {
        "shell_environment_policy.inherit": '"core"',
        "shell_environment_policy.ignore_default_excludes": "false",
    }
    return replace(launch, handed={**launch.handed, **keys}, overrides={**policy, **launch.overrides})


UNWANTED_NOTIFICATIONS: Final = (
    "account/rateLimits/updated",
    "remoteControl/status/changed",
    "thread/readState/changed",
    "thread/started",
    "thread/settings/updated",
    "item/reasoning/textDelta",
)

MAX_IN_FLIGHT: Final = 32
"""The maximum number of open requests. Codex's queue holds about 128; further requests are lost silently."""

METHOD_NOT_FOUND: Final = -32601

EXCERPT_BYTES: Final = 200
"""How much of an invalid line is logged."""

EOF_GRACE_S: Final = 3.0
TERM_GRACE_S: Final = 2.0


def command_line(launch: Launch, run_id: str) -> list[str]:
    """Return codex's argument vector; `run_id` marks the commands that the model runs."""
    settings = LAUNCH_OVERRIDES | {f"shell_environment_policy.set.{MARK}": f'"{run_id}"'} | dict(launch.overrides)
    flags = [argument for key, value in settings.items() for argument in ("-c", f"{key}={value}")]
    return [str(launch.binary), "app-server", *flags]


class Connection:
    """A JSON-RPC connection to codex over a pair of byte streams."""

    def __init__(
        self,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        kill: Callable[[], None] | None = None,
        pid: int | None = None,
        unknown_models: set[str] | None = None,
    ) -> None:
        self.pid = pid
        self.version: Version = (0, 0, 0)
        self.has_completed_turn = False
        self.mcp_status: Final = McpStatusTracker()
        self._splitter = LineSplitter(max_line_bytes)
        self._ids = count(1)
        self._in_flight = anyio.CapacityLimiter(MAX_IN_FLIGHT)
        self._calls: dict[int | str, _Call] = {}
        self._mailboxes: dict[str, Mailbox] = {}
        self._thread_ids: set[str] = set()
        self._open_requests: set[int | str] = set()
        self.error: CodexGone | None = None
        """Why this connection cannot be used any more; None while it can."""
        self._send_stream, self._receive_stream = anyio.create_memory_object_stream[bytes](MAX_IN_FLIGHT)
        self._kill = kill
        self._unknown_models = set() if unknown_models is None else unknown_models

    @property
    def threads(self) -> int:
        """The number of threads that were subscribed to; codex holds them in memory until it exits."""
        return len(self._thread_ids)

    async def call(self, method: str, params: JsonObject, *, timeout_s: float = 30.0) -> JsonValue:
        """Send a request and return its result.

        Raises:
            CodexRefused: codex responded with an error.
            CodexGone: the pipe was closed before the response arrived.
            CodexTimeout: no response within `timeout_s` seconds; the wait for a free slot does not count.
        """
        async with self._in_flight:
            id_ = next(self._ids)
            call = self._calls[id_] = _Call()
            try:
                with anyio.fail_after(timeout_s):
                    await self._send({"id": id_, "method": method, "params": params})
                    await call.answered.wait()
            except TimeoutError as error:
                raise CodexTimeout(f"codex did not answer {method} within {timeout_s:g} s") from error
            finally:
                del self._calls[id_]
        match call.response:
            case Result(value=value):
                return value
            case Failure(code=code, message=message):
                raise CodexRefused(method, code, message)
            case None:
                raise self._gone()

    async def request(self, method: str, params: JsonObject, timeout_s: float) -> JsonValue:
        """Send a request and return its result; kill a codex that does not respond, because its state is unknown.

        Raises:
            CodexRefused: codex responded with an error.
            CodexGone: codex died, or did not respond within `timeout_s` seconds.
        """
        try:
            return await self.call(method, params, timeout_s=timeout_s)
        except CodexTimeout as timeout:
            self.kill()
            raise CodexGone(f"codex did not answer {method} within {timeout_s:g} s and was killed") from timeout

    @contextmanager
    def subscribe(self, thread_id: str) -> Iterator[Mailbox]:
        """Collect the notifications and requests of a thread; there is one subscriber per thread.

        Requests of other threads get the default response.
        """
        mailbox = self._mailboxes[thread_id] = Mailbox()
        self._thread_ids.add(thread_id)
        if self.error is not None:
            mailbox.fail(self.error)
        try:
            yield mailbox
        finally:
            del self._mailboxes[thread_id]
            mailbox.close()

    async def responds(self, within_s: float) -> bool:
        """Return whether codex responds to a request; a stopped process is alive and does not."""
        try:
            await self.call("thread/loaded/list", {}, timeout_s=within_s)
        except CodexRefused:
            return True
        except (CodexTimeout, CodexGone):
            return False
        return True

    def kill(self) -> None:
        """Kill codex and fail the connection."""
        if self._kill is not None:
            self._kill()
        self.fail(CodexGone("codex stopped responding and was killed"))

    def fail(self, error: CodexGone) -> None:
        """Make all open and later requests, and all subscriptions, raise `error`."""
        if self.error is not None:
            return
        self.error = error
        # Closing both ends also wakes the senders that wait for room.
        self._send_stream.close()
        self._receive_stream.close()
        for call in self._calls.values():
            call.answered.set()
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        self.mcp_status.close()

    async def run(self, send: ByteSendStream, receive: ByteReceiveStream) -> None:
        """Transfer messages in both directions until codex closes its end."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write_all, send)
            await self._read_all(receive, tasks)
            tasks.cancel_scope.cancel()

    async def _send(self, message: JsonObject) -> None:
        try:
            await self._send_stream.send(encode(message))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise self._gone() from error

    def _gone(self) -> CodexGone:
        error = self.error
        return CodexGone(error.sentence, error.tail) if error else CodexGone("the pipe to codex is closed")

    async def _write_all(self, send: ByteSendStream) -> None:
        """Write all lines from one task, so that a cancelled sender never leaves half a line."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for line in self._receive_stream:
                await send.send(line)

    async def _read_all(self, receive: ByteReceiveStream, tasks: anyio.abc.TaskGroup) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                for line in self._splitter.feed(await receive.receive()):
                    self._dispatch(line, tasks)
        for line in self._splitter.finish():
            self._dispatch(line, tasks)

    def _dispatch(self, line: bytes | Skipped, tasks: anyio.abc.TaskGroup) -> None:
        if isinstance(line, Skipped):
            logger.error("skipped a line of %d bytes from codex: it exceeds the limit", line.bytes)
            return
        try:
            message = decode(line)
        except InvalidMessage as error:
            logger.warning("codex wrote an invalid line (%s): %r", error, line[:EXCERPT_BYTES])
            return
        match message:
            case Notification():
                self._deliver(message, len(line))
            case Request():
                # After `thread/resume`, codex sends open requests again, with the same id.
                if message.id not in self._open_requests:
                    self._open_requests.add(message.id)
                    mailbox = self._mailbox_of(message)
                    if mailbox is not None:
                        mailbox.put(message, len(line))
                    else:
                        message.answer(None)
                    tasks.start_soon(self._respond, message)
            case _:
                call = self._calls.get(message.id)
                if call is not None and not call.answered.is_set():
                    call.response = message
                    call.answered.set()

    def _mailbox_of(self, message: Notification | Request) -> Mailbox | None:
        thread_id = message.params.get("threadId")
        return self._mailboxes.get(thread_id) if isinstance(thread_id, str) else None

    def _deliver(self, notification: Notification, size: int) -> None:
        if notification.method == STARTUP:
            # Sent before the thread can be subscribed to.
            self.mcp_status.update(notification.params)
        message = notification.params.get("message")
        if notification.method == "warning" and is_model_notice(str(message), self._unknown_models):
            return
        mailbox = self._mailbox_of(notification)
        if mailbox is not None:
            mailbox.put(notification, size, piece_of(notification), is_quiet=is_quiet(notification))
        elif notification.method in ("configWarning", "warning"):
            warning = str(notification.params.get("summary") or message)
            # Codex prefers a bubblewrap on PATH to its own, which is the right one here.
            logger.log(logging.DEBUG if "bundled bubblewrap" in warning else logging.WARNING, "codex: %s", warning)

    async def _respond(self, message: Request) -> None:
        try:
            await message.answered.wait()
            result = default_response(message) if message.result is None else message.result
            response: JsonObject = {"id": message.id, "result": result}
            if result is None:
                logger.warning("rejected an unknown request of codex: %s", message.method)
                error: JsonObject = {"code": METHOD_NOT_FOUND, "message": f"{message.method} is not supported"}
                response = {"id": message.id, "error": error}
            with suppress(CodexGone):
                await self._send(response)
        finally:
            self._open_requests.discard(message.id)


@dataclass(slots=True)
class _Call:
    answered: anyio.Event = field(default_factory=anyio.Event)
    response: Result | Failure | None = None


@asynccontextmanager
async def open_app_server(launch: Launch) -> AsyncIterator[Connection]:
    """Start codex and initialize it; leaving the block ends it and its descendants.

    Leaving takes at most a little more than `EOF_GRACE_S + TERM_GRACE_S + KILL_GRACE_S`, usually 50 ms.

    Raises:
        CodexCannotStart: the program does not exist, is too old, exits, or does not respond in time.
    """
    mark = new_mark(launch)
    process, stdin, stdout, stderr = spawn(launch, command_line(launch, mark), mark)
    connection = Connection(
        max_line_bytes=launch.max_line_bytes,
        kill=lambda: process.signal_group(signal.SIGKILL),
        pid=process.popen.pid,
        unknown_models=launch.unknown_models,
    )
    try:
        async with task_group() as tasks:
            tasks.start_soon(process.watch)
            tasks.start_soon(process.stderr.read, stderr)
            tasks.start_soon(_run, connection, process, stdin, stdout)
            try:
                await _initialize(connection, process, launch)
                yield connection
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process, stdin)
                tasks.cancel_scope.cancel()
    finally:
        connection.fail(CodexGone("codex was stopped"))
        with anyio.CancelScope(shield=True):
            for stream in (stdin, stdout, stderr):
                await stream.aclose()
        process.close()
        await kill_marked(MARK, mark)


async def _run(connection: Connection, process: Process, stdin: PipeWriter, stdout: PipeReader) -> None:
    """Run the connection until codex closes its pipe or exits, then fail it."""
    async with anyio.create_task_group() as tasks:

        async def cancel_after_exit() -> None:
            await process.over.wait()
            await anyio.sleep(DRAIN_S)
            tasks.cancel_scope.cancel()

        tasks.start_soon(cancel_after_exit)
        await connection.run(stdin, stdout)
        # The pipe is closed: the process is about to exit, or is useless without it.
        with anyio.move_on_after(DRAIN_S):
            await process.over.wait()
        process.signal_group(signal.SIGKILL)
        await process.ended_within(KILL_GRACE_S)
        tasks.cancel_scope.cancel()
    connection.fail(CodexGone(f"codex {process.how_it_ended()}", process.last_lines()))


async def _initialize(connection: Connection, process: Process, launch: Launch) -> None:
    timeout_s = launch.start_timeout_s
    params: JsonObject = {
        "clientInfo": {"name": CLIENT_NAME, "title": "Codex workspace agent", "version": __version__},
        "capabilities": {"experimentalApi": True, "optOutNotificationMethods": list(UNWANTED_NOTIFICATIONS)},
    }
    try:
        result = await connection.call("initialize", params, timeout_s=timeout_s)
        await connection._send({"method": "initialized", "params": {}})
        # The user agent begins with our name and codex's version.
        agent = text_or_none(result, "userAgent") if isinstance(result, dict) else None
        version = find_version((agent or "").partition(" ")[0])
        if version is None:
            raise CodexCannotStart("codex did not report its version; set CODEX_BIN to a codex executable")
        require_supported(version)
        connection.version = version
        # With an invalid config.toml, codex starts and then rejects every thread.
        await connection.call("config/read", {}, timeout_s=timeout_s)
        if launch.api_key is not None:
            login: JsonObject = {"type": "apiKey", "apiKey": launch.api_key}
            await connection.call("account/login/start", login, timeout_s=timeout_s)
    except CodexGone as error:
        # Another program, such as a wrapper that ends without codex.
        hint = "; check that CODEX_BIN is a codex executable" if process.popen.poll() == 0 else ""
        raise CodexCannotStart(f"codex cannot start: it {process.how_it_ended()}{hint}", error.tail) from error
    except (CodexRefused, CodexTimeout) as error:
        if isinstance(error, CodexRefused) and error.method == "config/read":
            raise CodexCannotStart.for_config(launch.codex_home / "config.toml", error.message) from error
        raise CodexCannotStart(f"codex cannot start: {error}", process.last_lines()) from error


def require_supported(version: Version) -> None:
    """Reject a codex that is too old.

    Raises:
        CodexCannotStart: the version is older than `MINIMUM_VERSION`.
    """
    if version < MINIMUM_VERSION:
        raise CodexCannotStart(
            f"codex {format_version(version)} is too old: this agent needs {format_version(MINIMUM_VERSION)} or newer; "
            "install a newer codex, or set CODEX_BIN to one"
        )


async def _end(process: Process, stdin: PipeWriter) -> None:
    """End codex by closing its stdin, then by SIGTERM, then by SIGKILL."""
    await stdin.aclose()
    if not await process.ended_within(EOF_GRACE_S):
        process.signal_group(signal.SIGTERM)
        if not await process.ended_within(TERM_GRACE_S):
            process.signal_group(signal.SIGKILL)
            await process.ended_within(KILL_GRACE_S)
