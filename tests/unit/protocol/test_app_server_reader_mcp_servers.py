"""How far MCP servers are, over a codex in memory and on a clock that jumps."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from codex_workspace.codex.thread import McpStatus, probe_mcp_servers
from codex_workspace.codex.turn import MAX_RESTARTS, RELOAD, TRANSPORT_CLOSED
from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.environment import Secret
from codex_workspace.protocol.app_server_reader import (
    MAX_FAILURE_CHARS,
    RETRY_S,
    STARTUP,
    ExpectedServers,
    McpStatusTracker,
    describe_problems,
)
from tests.integration.test_thread import ECHO, OPTIONS, Caller, CodexSide, ThreadSetup, open_thread, run_turn
from tests.support.memory_codex import in_virtual_time, memory_codex

TWO = ExpectedServers(("a", "b"), 30.0)


def status(name: str, state: str, thread_id: str | None = "t", **more: JsonValue) -> JsonObject:
    return {"name": name, "status": state, "threadId": thread_id, **more}


def tracker_of(*notes: JsonObject) -> McpStatusTracker:
    startups = McpStatusTracker()
    for note in notes:
        startups.update(note)
    return startups


# --- What codex has said ---


def test_the_last_status_of_a_thread_counts() -> None:
    known = tracker_of(status("a", "starting"), status("a", "ready"), status("a", "failed", "other")).of("t")
    assert known == {"a": ""}


def test_a_status_belongs_to_its_thread() -> None:
    startups = tracker_of(status("a", "failed", error="no such file"))
    assert startups.of("t")["a"] == "no such file"
    assert startups.of("another") == {}


@pytest.mark.parametrize("odd", [{}, {"name": 1, "status": "ready"}, {"name": "a"}])
def test_a_status_of_another_shape_is_ignored(odd: JsonObject) -> None:
    assert tracker_of(odd).of("t") == {}


def test_an_unknown_status_is_not_final() -> None:
    assert tracker_of(status("a", "warming up")).of("t")["a"] is None


def test_codexs_message_is_reduced_to_the_cause() -> None:
    failed = "MCP client for `a` failed to start: MCP startup failed: no such\n file."
    late = "MCP client for `b` timed out after 3 seconds. Add or adjust `startup_timeout_sec` in your config.toml:\n[…]"
    startups = tracker_of(status("a", "failed", error=failed), status("b", "failed", error=late))
    assert describe_problems(replace(TWO, left_out={"c": "names X, which is not set"}), startups.of("t")) == {
        "c": "The MCP server c is not available: names X, which is not set.",
        "a": "The MCP server a is not available: no such file.",
        "b": "The MCP server b is not available: timed out after 3 seconds.",
    }


def test_a_server_without_status_is_missing() -> None:
    assert describe_problems(TWO, tracker_of(status("a", "ready")).of("t")) == {
        "b": "The MCP server b did not start within 30 s."
    }


def test_settings_sent_over_the_pipe_have_the_shape_of_codexs_configuration() -> None:
    private = {"a": {("env", "KEY"): Secret("1"), ("env", "TOKEN"): Secret("2"), ("http_headers", "X"): Secret("3")}}
    assert ExpectedServers(("a",), private=private).config() == {
        "mcp_servers": {"a": {"env": {"KEY": "1", "TOKEN": "2"}, "http_headers": {"X": "3"}}}
    }
    assert "1" not in repr(private)


# --- Waiting ---


@in_virtual_time
async def test_all_configured_servers_are_awaited() -> None:
    startups = McpStatusTracker()
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            for note in (status("a", "starting"), status("b", "failed"), status("a", "ready")):
                await anyio.sleep(1)
                startups.update(note)

        tasks.start_soon(start)
        begin_s = anyio.current_time()
        known = await startups.wait_for("t", ("a", "b"), 30)
        assert anyio.current_time() - begin_s == 3
    assert known == {"a": "", "b": "failed"}


@in_virtual_time
async def test_waiting_ends_at_the_time_out_or_codexs_exit() -> None:
    startups = McpStatusTracker()
    start = anyio.current_time()
    assert await startups.wait_for("t", ("a",), 7) == {}
    assert anyio.current_time() - start == 7
    startups.close()
    assert await startups.wait_for("t", ("a",), 7) == {}
    assert anyio.current_time() - start == 7


# --- A conversation ---


@asynccontextmanager
async def with_servers() -> AsyncIterator[ThreadSetup]:
    async with open_thread(options=replace(OPTIONS, servers=TWO)) as setup:
        yield setup


async def begin(side: CodexSide, **states: str) -> None:
    """Start the thread and its servers, then the turn."""
    await side.start_thread()
    for name, state in states.items():
        await side.codex.tell(STARTUP, **status(name, state, "thread-1"))
    await side.start_turn()


async def lose_a_server(side: CodexSide) -> None:
    item: JsonObject = {"type": "mcpToolCall", "id": "m", "server": "a", "tool": "x", "status": "failed"}
    error: JsonObject = {"message": f"call failed: {TRANSPORT_CLOSED}"}
    await side.notify("item/completed", turnId="turn-1", item={**item, "error": error})


@in_virtual_time
async def test_a_turn_waits_for_the_servers_of_its_thread() -> None:
    async with with_servers() as setup:

        async def play(side: CodexSide) -> None:
            await side.start_thread()
            await side.codex.tell(STARTUP, **status("a", "ready", "thread-1"))
            await anyio.sleep(5)
            assert side.codex.unread == []
            await side.codex.tell(STARTUP, **status("b", "ready", "thread-1"))
            await side.start_turn()
            await side.complete()

        assert (await run_turn(setup, play)).note is None


@in_virtual_time
async def test_cancelling_while_servers_start_leaves_no_turn() -> None:
    async with with_servers() as setup:

        async def leave() -> None:
            with anyio.move_on_after(5):
                await Caller()(setup.thread)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            await setup.side.start_thread()
        assert setup.side.codex.unread == []

        async def play(side: CodexSide) -> None:
            for name in TWO.names:
                await side.codex.tell(STARTUP, **status(name, "ready", "thread-1"))
            await side.start_turn()
            await side.complete()

        assert (await run_turn(setup, play)).note is None


@in_virtual_time
async def test_a_missing_server_is_reported_once_and_retried_later() -> None:
    async with with_servers() as setup:

        async def first(side: CodexSide) -> None:
            await begin(side, a="ready", b="failed")
            await side.complete()

        async def second(side: CodexSide) -> None:
            await side.start_turn("turn-2")
            await side.complete("turn-2")

        async def third(side: CodexSide) -> None:
            await side.codex.answer(RELOAD, {})
            await side.codex.tell(STARTUP, **status("b", "ready", "thread-1"))
            await side.start_turn("turn-3")
            await side.complete("turn-3")

        assert (await run_turn(setup, first)).note == "The MCP server b is not available: failed."
        assert (await run_turn(setup, second)).note is None
        await anyio.sleep(RETRY_S)
        assert (await run_turn(setup, third)).note is None


@in_virtual_time
async def test_a_server_that_has_ended_is_started_again_so_often_and_no_more() -> None:
    async with with_servers() as setup:

        async def play(side: CodexSide) -> None:
            await begin(side, a="ready", b="ready")
            for _ in range(MAX_RESTARTS):
                await lose_a_server(side)
                await side.codex.answer(RELOAD, {})
            await lose_a_server(side)
            await side.complete()

        caller = await run_turn(setup, play)
        assert caller.ended.status == "completed"
        assert setup.side.codex.unread == []


# --- A thread for trying them ---


@in_virtual_time
async def test_a_failing_required_server_is_reported_with_codexs_message() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        async def play() -> None:
            request = await codex.read("thread/start")
            message = "error creating thread: required MCP servers failed to initialize: a: no such file"
            await codex.refuse(request, -32603, message)

        tasks.start_soon(play)
        with pytest.raises(CodexCannotStart, match=r"a required MCP server does not start \(.*\): a: no such file$"):
            await probe_mcp_servers(codex.connection, OPTIONS, 30)


@in_virtual_time
async def test_the_probe_thread_is_archived() -> None:
    found: list[McpStatus] = []
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        async def near() -> None:
            found.append(await probe_mcp_servers(codex.connection, replace(OPTIONS, servers=TWO), 30))

        tasks.start_soon(near)
        await codex.answer("thread/start", {"thread": {"id": "t"}, **ECHO})
        await codex.tell(STARTUP, **status("a", "ready"))
        await codex.tell(STARTUP, **status("b", "failed", error="no"))
        listed: JsonObject = {"data": [{"name": "a", "tools": {"two": {}, "one": {}}}]}
        request = await codex.answer("mcpServerStatus/list", listed)
        assert request == {"threadId": "t", "serverName": "a", "detail": "toolsAndAuthOnly"}
        await codex.answer("thread/delete", {})
    assert found == [McpStatus({"a": ["one", "two"]}, {"b": "The MCP server b is not available: no."})]


def test_why_a_server_is_not_there_is_a_sentence_for_people() -> None:
    chain = (
        "MCP client for `far` failed to start: MCP startup failed: handshaking with MCP server failed: "
        "Send message error "
        "Transport [rmcp::transport::worker::WorkerTransport<rmcp::transport::http::Worker<reqwest::Client>>] error: "
        "Client error: error sending request for url (http://127.0.0.1:1/mcp), when send initialize request"
    )
    startups = tracker_of({"threadId": "t", "name": "far", "status": "failed", "error": chain})
    sentence = describe_problems(ExpectedServers(("far",), 30.0), startups.of("t"))["far"]
    assert "::" not in sentence
    assert "handshaking with MCP server failed" in sentence
    assert sentence.endswith("when send initialize request.")
    long = tracker_of({"threadId": "t", "name": "far", "status": "failed", "error": f"began {'x' * 5000} ended"})
    assert len(describe_problems(ExpectedServers(("far",), 30.0), long.of("t"))["far"]) < MAX_FAILURE_CHARS + 50
