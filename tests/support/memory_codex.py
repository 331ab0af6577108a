"""Codex in memory: the real connection, with a test at the far end of its pipes."""

import inspect
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec

import anyio
import pytest
from trio.testing import MockClock

from codex_workspace.app_server import Connection
from codex_workspace.codex.thread import CodexThread
from codex_workspace.codex.turn import Turn
from codex_workspace.common.concurrency import PipeWriter
from codex_workspace.common.errors import CodexGone
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.jsonrpc import MAX_LINE_BYTES, LineSplitter
from codex_workspace.runtimes.backend import StartedTurn, TurnInput
from tests.support.pipes import AnyPipeReader

_P = ParamSpec("_P")

ENDED = "codex ended with exit code 0"
"""The connection's error after codex in memory has exited."""


class MemoryCodex:
    """The far end: `read` returns the client's messages, `write` sends codex's messages."""

    def __init__(self, connection: Connection, requests: AnyPipeReader, messages: PipeWriter) -> None:
        self.connection = connection
        self.unread: list[JsonObject] = []
        self._requests = requests
        self._messages = messages
        self._splitter = LineSplitter()

    async def read(self, method: str | None = None) -> JsonObject:
        """Return the client's next message; if `method` is given, it must be for that method."""
        while not self.unread:
            for line in self._splitter.feed(await self._requests.receive()):
                assert isinstance(line, bytes)
                self.unread.append(json.loads(line))
        message = self.unread.pop(0)
        if method is not None:
            assert message.get("method") == method, message
        return message

    async def assert_silent(self, seconds: float) -> None:
        """Check that the client sends nothing for this time."""
        with anyio.move_on_after(seconds):
            pytest.fail(f"unexpected message: {await self.read()}")

    async def answer(self, method: str, result: JsonValue) -> JsonObject:
        """Read the next request, which must be for `method`, send its result, and return its params."""
        request = await self.read(method)
        await self.reply(request, result)
        return params_of(request)

    async def write(self, *messages: JsonObject) -> None:
        """Send messages unchanged."""
        await self.write_bytes(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    async def write_bytes(self, data: bytes) -> None:
        """Send bytes unchanged."""
        await self._messages.send(data)

    async def reply(self, request: JsonObject, result: JsonValue) -> None:
        """Send the result of a request."""
        await self.write({"id": request["id"], "result": result})

    async def refuse(self, request: JsonObject, code: int, message: str) -> None:
        """Send an error response to a request."""
        await self.write({"id": request["id"], "error": {"code": code, "message": message}})

    async def tell(self, method: str, **params: JsonValue) -> None:
        """Send a notification."""
        await self.write({"method": method, "params": params})

    async def exit(self) -> None:
        """Close both pipes."""
        await self._messages.aclose()
        await self._requests.aclose()


def params_of(request: JsonObject) -> JsonObject:
    """Return a request's params."""
    params = request["params"]
    assert isinstance(params, dict)
    return params


@asynccontextmanager
async def memory_codex(*, max_line_bytes: int = MAX_LINE_BYTES) -> AsyncIterator[MemoryCodex]:
    """Connect to a codex in memory; `kill` makes it exit."""
    to_codex, to_us = os.pipe(), os.pipe()
    async with (
        AnyPipeReader(to_codex[0]) as requests,
        PipeWriter(to_codex[1]) as stdin,
        AnyPipeReader(to_us[0]) as stdout,
        PipeWriter(to_us[1]) as messages,
        anyio.create_task_group() as tasks,
    ):

        def kill() -> None:
            tasks.start_soon(codex.exit)

        connection = Connection(max_line_bytes=max_line_bytes, kill=kill)
        codex = MemoryCodex(connection, requests, messages)

        async def carry() -> None:
            await connection.run(stdin, stdout)
            connection.fail(CodexGone(ENDED))

        tasks.start_soon(carry)
        try:
            yield codex
        finally:
            tasks.cancel_scope.cancel()
            connection.fail(CodexGone(ENDED))


def in_virtual_time(test: Callable[_P, Awaitable[None]]) -> Callable[_P, None]:
    """Run an asynchronous test on a clock that jumps to the next deadline when all tasks are waiting."""

    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        clock = MockClock(autojump_threshold=0)
        anyio.run(partial(test, *args, **kwargs), backend="trio", backend_options={"clock": clock})

    run.__name__, run.__doc__ = getattr(test, "__name__", "run"), test.__doc__
    # pytest reads the parameters of a test from its signature.
    setattr(run, "__signature__", inspect.signature(test))  # noqa: B010
    return run


@asynccontextmanager
async def turn_of(thread: CodexThread, turn_input: TurnInput) -> AsyncIterator[StartedTurn[Turn]]:
    """Wait for the thread, and run a turn while the block is open."""
    async with thread.lease() as lease, lease.turn(turn_input) as started:
        yield started
