"""How single notifications are read. Whole turns are replayed in `tests/integration/test_recordings.py`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    TurnReader,
    describe_problems,
    is_quiet,
    join_deltas,
    piece_of,
)
from codex_workspace.protocol.codex_events import (
    Activity,
    CommandCompleted,
    CommandOutput,
    CommandStarted,
    DiffUpdated,
    ErrorReported,
    FilePatch,
    ItemStatus,
    MessageCompleted,
    MessageDelta,
    MessageStarted,
    PatchCompleted,
    PatchStarted,
    PlanItem,
    PlanUpdated,
    ReasoningCompleted,
    ReasoningDelta,
    ThreadIdle,
    TokensUpdated,
    TokenUsage,
    ToolCallCompleted,
    ToolCallStarted,
    TurnCompleted,
    TurnError,
    TurnEvent,
    TurnStarted,
    UnknownEvent,
    WarningReported,
    WebSearchCompleted,
)
from codex_workspace.protocol.jsonrpc import Notification
from codex_workspace.runtimes.convert import EventConverter
from tests.integration.test_thread import ECHO, OPTIONS, Caller, CodexSide, ThreadSetup, open_thread, run_turn
from tests.support.memory_codex import in_virtual_time, memory_codex

THREAD, TURN = "thread-1", "0"
IDS: JsonObject = {"threadId": THREAD, "turnId": TURN}


def of_turn(method: str, **params: JsonValue) -> Notification:
    return Notification(method, {**IDS, **params})


def of_thread(method: str, **params: JsonValue) -> Notification:
    return Notification(method, {"threadId": THREAD, **params})


def started(**item: JsonValue) -> Notification:
    return of_turn("item/started", item=item)


def completed(**item: JsonValue) -> Notification:
    return of_turn("item/completed", item=item)


def turn_completed(**turn: JsonValue) -> Notification:
    return of_thread("turn/completed", turn={**turn, "id": TURN})


COMMAND: JsonObject = {"type": "commandExecution", "id": "c", "command": "ls", "cwd": "/w"}
PATCH: JsonObject = {
    "type": "fileChange",
    "id": "f",
    "changes": [{"path": "/w/a", "kind": {"type": "add"}, "diff": "hello\n"}],
}
CHANGES = (FilePatch("/w/a", "add", "hello\n"),)
MCP: JsonObject = {"type": "mcpToolCall", "id": "m", "server": "srv", "tool": "echo", "arguments": {"x": 1}}
DYNAMIC: JsonObject = {
    "type": "dynamicToolCall",
    "id": "d",
    "namespace": None,
    "tool": "ticket",
    "arguments": {"id": "7"},
}
TOTAL: JsonObject = {
    "totalTokens": 214,
    "inputTokens": 200,
    "cachedInputTokens": 20,
    "outputTokens": 14,
    "reasoningOutputTokens": 4,
}
LAST: JsonObject = {"totalTokens": 107, "inputTokens": 100, "cachedInputTokens": 10, "outputTokens": 7}
STEPS: JsonValue = [{"step": "look", "status": "completed"}, {"step": "do", "status": "inProgress"}]
NO_REASON = "codex reported a failed turn without a reason"


@pytest.mark.parametrize(
    ("notification", "event"),
    [
        (of_turn("item/agentMessage/delta", itemId="a", delta="he"), MessageDelta("a", "he")),
        (
            of_turn("item/reasoning/summaryTextDelta", itemId="r", delta="th", summaryIndex=2),
            ReasoningDelta("r", 2, "th"),
        ),
        (of_turn("item/reasoning/textDelta", itemId="r", delta="th", contentIndex=1), ReasoningDelta("r", 1, "th")),
        (of_turn("item/commandExecution/outputDelta", itemId="c", delta="o"), CommandOutput("c", "o")),
        (of_turn("turn/diff/updated", diff="--- a"), DiffUpdated("--- a")),
        (
            of_turn("turn/plan/updated", plan=STEPS, explanation=None),
            PlanUpdated((PlanItem("look", "completed"), PlanItem("do", "inProgress")), None),
        ),
        (
            of_turn("thread/tokenUsage/updated", tokenUsage={"total": TOTAL, "last": LAST, "modelContextWindow": 9}),
            TokensUpdated(TokenUsage(214, 200, 20, 14, 4), TokenUsage(107, 100, 10, 7, 0)),
        ),
        (of_thread("turn/started", turn={"id": TURN, "status": "inProgress"}), TurnStarted()),
        (of_turn("thread/compacted"), Activity()),
        (of_turn("item/mcpToolCall/progress", itemId="m", message="half"), Activity()),
        (of_turn("turn/newThing", x=1), UnknownEvent("turn/newThing", {**IDS, "x": 1})),
    ],
)
def test_a_notification_of_the_turn(notification: Notification, event: TurnEvent) -> None:
    assert TurnReader(THREAD, TURN).read(notification) == event


@pytest.mark.parametrize(
    ("notification", "event"),
    [
        (started(type="agentMessage", id="a", text="", phase="commentary"), MessageStarted("a", "commentary")),
        (
            completed(type="agentMessage", id="a", text="hi", phase="final_answer"),
            MessageCompleted("a", "hi", "final_answer"),
        ),
        (completed(type="agentMessage", id="a", text="hi", phase="newPhase"), MessageCompleted("a", "hi", None)),
        (completed(type="agentMessage", id="a", text="hi"), MessageCompleted("a", "hi", None)),
        (started(type="reasoning", id="r", summary=[], content=[]), Activity()),
        (
            completed(type="reasoning", id="r", summary=["one", "two"], content=["raw"]),
            ReasoningCompleted("r", ("one", "two")),
        ),
        (completed(type="reasoning", id="r", summary=[], content=["raw"]), ReasoningCompleted("r", ("raw",))),
        (started(**COMMAND, status="inProgress", aggregatedOutput=None), CommandStarted("c", "ls", "/w")),
        (
            completed(**COMMAND, status="failed", aggregatedOutput="no\n", exitCode=1, durationMs=12),
            CommandCompleted("c", "ls", "/w", "no\n", 1, ItemStatus.FAILED, 12),
        ),
        (
            completed(**COMMAND, status="declined", aggregatedOutput=None, exitCode=None, durationMs=None),
            CommandCompleted("c", "ls", "/w", "", None, ItemStatus.DECLINED, None),
        ),
        (
            completed(**COMMAND, status="newStatus"),
            CommandCompleted("c", "ls", "/w", "", None, ItemStatus.UNKNOWN, None),
        ),
        (started(**PATCH, status="inProgress"), PatchStarted("f", CHANGES)),
        (completed(**PATCH, status="completed"), PatchCompleted("f", CHANGES, ItemStatus.COMPLETED)),
        (started(**MCP, status="inProgress"), ToolCallStarted("m", "srv", "echo", {"x": 1})),
        (
            completed(
                **MCP,
                status="completed",
                result={"content": [{"type": "text", "text": "a"}, {"type": "image", "data": ".."}]},
                error=None,
                durationMs=5,
            ),
            ToolCallCompleted("m", "srv", "echo", {"x": 1}, "a\n[image]", False, ItemStatus.COMPLETED, 5),
        ),
        (
            completed(**MCP, status="failed", result=None, error={"message": "Transport closed"}, durationMs=5),
            ToolCallCompleted("m", "srv", "echo", {"x": 1}, "Transport closed", True, ItemStatus.FAILED, 5),
        ),
        (started(**DYNAMIC, status="inProgress"), ToolCallStarted("d", None, "ticket", {"id": "7"})),
        (
            completed(**DYNAMIC, status="completed", contentItems=[{"type": "inputText", "text": "x"}], success=True),
            ToolCallCompleted("d", None, "ticket", {"id": "7"}, "x", False, ItemStatus.COMPLETED, None),
        ),
        (
            completed(**DYNAMIC, status="completed", contentItems=None, success=False),
            ToolCallCompleted("d", None, "ticket", {"id": "7"}, "", True, ItemStatus.COMPLETED, None),
        ),
        (started(type="webSearch", id="w", query=""), Activity()),
        (completed(type="webSearch", id="w", query="codex"), WebSearchCompleted("w", "codex")),
        (completed(type="userMessage", id="u", content=[]), Activity()),
        (completed(type="hologram", id="h"), UnknownEvent("hologram", {"type": "hologram", "id": "h"})),
    ],
)
def test_an_item_of_the_turn(notification: Notification, event: TurnEvent) -> None:
    assert TurnReader(THREAD, TURN).read(notification) == event


@pytest.mark.parametrize(
    ("status", "event"),
    [
        ({"type": "idle"}, ThreadIdle()),
        ({"type": "notLoaded"}, ThreadIdle()),
        ({"type": "systemError"}, ThreadIdle()),
        ({"type": "active", "activeFlags": ["waitingOnApproval"]}, Activity()),
    ],
)
def test_the_status_of_the_thread_is_of_every_turn(status: JsonObject, event: TurnEvent) -> None:
    notification = of_thread("thread/status/changed", status=status)
    assert TurnReader(THREAD, TURN).read(notification) == event
    assert TurnReader("another", TURN).read(notification) is None


@pytest.mark.parametrize(
    ("info", "kind", "http_status"),
    [
        ("usageLimitExceeded", "usageLimitExceeded", None),
        ({"httpConnectionFailed": {"httpStatusCode": 401}}, "httpConnectionFailed", 401),
        ({"responseStreamDisconnected": {"httpStatusCode": None}}, "responseStreamDisconnected", None),
        ({"newKind": "odd"}, "newKind", None),
        (None, "other", None),
        ({}, "other", None),
        (7, "other", None),
    ],
)
def test_a_failure_type_is_a_string_or_an_objects_key(info: JsonValue, kind: str, http_status: int | None) -> None:
    error: JsonObject = {"message": "no", "codexErrorInfo": info, "additionalDetails": "more"}
    failure = TurnError("no", kind, http_status, "more")
    reader = TurnReader(THREAD, TURN)
    assert reader.read(of_turn("error", error=error, willRetry=False)) == ErrorReported(failure)
    assert reader.read(of_turn("error", error=error, willRetry=True)) == WarningReported("no", will_retry=True)
    assert reader.read(turn_completed(status="failed", error=error)) == TurnCompleted("failed", failure, None)


def test_a_warning_of_the_thread_is_read() -> None:
    event = TurnReader(THREAD, TURN).read(of_thread("warning", message="slow"))
    assert event == WarningReported("slow", will_retry=False)


@pytest.mark.parametrize(
    ("turn", "event"),
    [
        ({"status": "completed", "items": []}, TurnCompleted("completed", None, None)),
        (
            {
                "status": "completed",
                "items": [
                    {"type": "userMessage", "id": "u"},
                    {"type": "agentMessage", "id": "a", "text": "done", "phase": "final_answer"},
                ],
            },
            TurnCompleted("completed", None, MessageCompleted("a", "done", "final_answer")),
        ),
        (
            {"status": "completed", "items": [{"type": "agentMessage", "id": "a"}]},
            TurnCompleted("completed", None, None),
        ),
        ({"status": "interrupted", "error": None}, TurnCompleted("interrupted", None, None)),
        ({"status": "failed", "error": None}, TurnCompleted("failed", TurnError(NO_REASON, "other", None, None), None)),
        ({"status": "newStatus"}, TurnCompleted("failed", TurnError(NO_REASON, "other", None, None), None)),
    ],
)
def test_the_end_of_the_turn(turn: JsonObject, event: TurnEvent) -> None:
    assert TurnReader(THREAD, TURN).read(turn_completed(**turn)) == event


@pytest.mark.parametrize(
    "notification",
    [
        Notification("item/agentMessage/delta", {"threadId": THREAD, "turnId": "1", "itemId": "a", "delta": "x"}),
        Notification("item/agentMessage/delta", {"threadId": "another", "turnId": TURN, "itemId": "a", "delta": "x"}),
        Notification("turn/completed", {"threadId": THREAD, "turn": {"id": "1", "status": "completed"}}),
        Notification("turn/completed", {"threadId": "another", "turn": {"id": TURN, "status": "completed"}}),
        Notification("thread/settings/updated", {"threadId": THREAD}),
        Notification("account/rateLimits/updated", {"rateLimits": {}}),
        Notification("newThing", {}),
    ],
)
def test_events_outside_the_turn_are_ignored(notification: Notification) -> None:
    reader = TurnReader(THREAD, TURN)
    assert reader.read(notification) is None


METHODS = [
    "item/agentMessage/delta",
    "item/started",
    "item/completed",
    "item/reasoning/summaryTextDelta",
    "item/commandExecution/outputDelta",
    "turn/started",
    "turn/completed",
    "turn/diff/updated",
    "turn/plan/updated",
    "thread/tokenUsage/updated",
    "thread/status/changed",
    "warning",
    "error",
    "turn/newThing",
]
KEYS = st.sampled_from(
    [
        *("id", "type", "text", "item", "turn", "status", "error", "message", "codexErrorInfo", "itemId", "delta"),
        *("plan", "step", "tokenUsage", "total", "items", "content", "summary", "changes", "path", "kind", "result"),
        *("arguments", "command", "cwd", "server", "tool", "durationMs", "success"),
    ]
)
KINDS = ("agentMessage", "reasoning", "commandExecution", "fileChange", "mcpToolCall", "dynamicToolCall", "webSearch")
WORDS = st.sampled_from([TURN, "AgentMessage", *KINDS])
values: st.SearchStrategy[JsonValue] = st.recursive(
    st.sampled_from([None, True, 0, -1, 2.5, float("nan"), "", "x"]) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=6,
)
fields: st.SearchStrategy[JsonObject] = st.dictionaries(KEYS, values, max_size=4)


@given(st.sampled_from(METHODS), fields, st.booleans())
def test_reading_never_raises(method: str, params: JsonObject, with_turn: bool) -> None:
    ids: JsonObject = IDS if with_turn else {"threadId": THREAD}
    event = TurnReader(THREAD, TURN).read(Notification(method, {**params, **ids}))
    if event is not None:
        EventConverter().convert(event)


@given(st.sampled_from(["item/started", "item/completed"]), fields, st.sampled_from([None, *KINDS, 7, []]))
def test_reading_an_item_never_raises(method: str, item: JsonObject, kind: JsonValue) -> None:
    for typed in (item, {**item, "type": kind}):
        assert TurnReader(THREAD, TURN).read(of_turn(method, item=typed)) is not None


@given(fields)
def test_the_end_of_the_turn_is_read_despite_invalid_fields(turn: JsonObject) -> None:
    assert isinstance(TurnReader(THREAD, TURN).read(turn_completed(**turn)), TurnCompleted)


@given(st.sampled_from(METHODS), values, values, values)
def test_reading_never_raises_for_odd_ids(method: str, thread: JsonValue, turn: JsonValue, id_: JsonValue) -> None:
    params: JsonObject = {"threadId": thread, "turnId": turn, "turn": {"id": id_}, "conversationId": thread, "id": id_}
    TurnReader(THREAD, TURN).read(Notification(method, params))


# --- How far MCP servers are, over a codex in memory and on a clock that jumps

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


# --- Pieces of a text ---


def piece(
    delta: JsonValue, item: str = "m", method: str = "item/agentMessage/delta", **more: JsonValue
) -> Notification:
    return Notification(method, {"turnId": "t", "itemId": item, "delta": delta, **more})


@pytest.mark.parametrize(
    ("method", "params", "quiet"),
    [
        ("thread/tokenUsage/updated", {"tokenUsage": {}}, True),
        ("item/started", {"item": {"type": "userMessage"}}, True),
        ("item/completed", {"item": {"type": "userMessage"}}, True),
        ("item/completed", {"item": {"type": "agentMessage"}}, False),
        ("item/started", {"item": "userMessage"}, False),
        ("item/started", {}, False),
        ("turn/completed", {"item": {"type": "userMessage"}}, False),
    ],
)
def test_the_users_own_message_and_the_tokens_are_quiet(method: str, params: JsonObject, quiet: bool) -> None:
    assert is_quiet(Notification(method, params)) == quiet


def test_a_piece_names_its_text() -> None:
    assert piece_of(piece("x")) == "m"
    assert piece_of(piece("x", "r", "item/reasoning/summaryTextDelta", summaryIndex=0)) == "r"
    assert piece_of(piece("x", "c", "item/commandExecution/outputDelta")) == "c"
    assert piece_of(piece(1)) is None
    assert piece_of(piece("x", method="item/completed")) is None


def test_adjacent_pieces_of_one_text_are_joined_in_order() -> None:
    other = Notification("item/started", {"itemId": "m"})
    section = "item/reasoning/summaryTextDelta"
    messages = [
        *map(piece, "abc"),
        other,
        other,
        *map(piece, "de"),
        piece("f", "other"),
        piece(1),
        piece(1),
        piece("g", method=section, summaryIndex=0),
        piece("h", method=section, summaryIndex=1),
        piece("i", method=section, summaryIndex=1),
    ]
    joined = [
        piece("abc"),
        other,
        other,
        piece("de"),
        piece("f", "other"),
        piece(1),
        piece(1),
        piece("g", method=section, summaryIndex=0),
        piece("hi", method=section, summaryIndex=1),
    ]
    assert join_deltas(messages) == joined
    assert messages[0] == piece("a")
