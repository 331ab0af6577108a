"""What notifications mean, one by one. Whole turns are replayed in `test_recordings`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.values import JsonObject, JsonValue
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
    ThreadActive,
    ThreadIdle,
    TokensUpdated,
    TokenUsage,
    ToolCallCompleted,
    ToolCallStarted,
    TurnCompleted,
    TurnError,
    TurnEvent,
    TurnReader,
    TurnStarted,
    TurnText,
    UnknownEvent,
    WarningReported,
    WebSearchCompleted,
)
from codex_workspace.protocol.jsonrpc import Notification

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


def older(event: str, **msg: JsonValue) -> Notification:
    params: JsonObject = {"id": TURN, "conversationId": THREAD, "msg": {"type": event, **msg}}
    return Notification(f"codex/event/{event}", params)


COMMAND: JsonObject = {"type": "commandExecution", "id": "c", "command": "ls", "cwd": "/w"}
PATCH: JsonObject = {
    "type": "fileChange",
    "id": "f",
    "changes": [{"path": "/w/a", "kind": {"type": "add"}, "diff": "hello\n"}],
}
TEXT: JsonObject = {"type": "Text", "text": "x"}
ADDED: JsonObject = {"type": "add", "content": "hello\n"}
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
SILENT = "codex says that the turn failed, and not why"


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
            TokensUpdated(214, 200, 20, 14, 4, 9, TokenUsage(107, 100, 10, 7, 0)),
        ),
        (of_thread("turn/started", turn={"id": TURN, "status": "inProgress"}), TurnStarted()),
        (of_turn("thread/compacted"), Activity()),
        (of_turn("item/mcpToolCall/progress", itemId="m", message="half"), Activity()),
        (of_turn("turn/newThing", x=1), UnknownEvent("turn/newThing", {**IDS, "x": 1})),
    ],
)
def test_a_notification_of_the_turn(notification: Notification, event: TurnEvent) -> None:
    assert TurnReader(THREAD, TURN).read(notification) == (event,)


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
    assert TurnReader(THREAD, TURN).read(notification) == (event,)


@pytest.mark.parametrize(
    ("status", "event"),
    [
        ({"type": "idle"}, ThreadIdle(system_error=False)),
        ({"type": "notLoaded"}, ThreadIdle(system_error=False)),
        ({"type": "systemError"}, ThreadIdle(system_error=True)),
        ({"type": "active", "activeFlags": []}, ThreadActive(())),
        ({"type": "active", "activeFlags": ["waitingOnApproval"]}, ThreadActive(("waitingOnApproval",))),
    ],
)
def test_the_status_of_the_thread_is_of_every_turn(status: JsonObject, event: TurnEvent) -> None:
    notification = of_thread("thread/status/changed", status=status)
    assert TurnReader(THREAD, TURN).read(notification) == (event,)
    assert TurnReader("another", TURN).read(notification) == ()


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
def test_the_kind_of_a_failure_is_a_word_or_the_key_of_an_object(
    info: JsonValue, kind: str, http_status: int | None
) -> None:
    error: JsonObject = {"message": "no", "codexErrorInfo": info, "additionalDetails": "more"}
    failure = TurnError("no", kind, http_status, "more")
    reader = TurnReader(THREAD, TURN)
    assert reader.read(of_turn("error", error=error, willRetry=False)) == (ErrorReported(failure),)
    assert reader.read(of_turn("error", error=error, willRetry=True)) == (WarningReported("no", will_retry=True),)
    assert reader.read(turn_completed(status="failed", error=error)) == (TurnCompleted("failed", failure, None),)


def test_a_warning_of_the_thread_is_heard() -> None:
    assert TurnReader(THREAD, TURN).read(of_thread("warning", message="slow")) == (
        WarningReported("slow", will_retry=False),
    )


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
        ({"status": "failed", "error": None}, TurnCompleted("failed", TurnError(SILENT, "other", None, None), None)),
        ({"status": "newStatus"}, TurnCompleted("failed", TurnError(SILENT, "other", None, None), None)),
    ],
)
def test_the_end_of_the_turn(turn: JsonObject, event: TurnEvent) -> None:
    assert TurnReader(THREAD, TURN).read(turn_completed(**turn)) == (event,)


@pytest.mark.parametrize(
    "notification",
    [
        Notification("item/agentMessage/delta", {"threadId": THREAD, "turnId": "1", "itemId": "a", "delta": "x"}),
        Notification("item/agentMessage/delta", {"threadId": "another", "turnId": TURN, "itemId": "a", "delta": "x"}),
        Notification("turn/completed", {"threadId": THREAD, "turn": {"id": "1", "status": "completed"}}),
        Notification("turn/completed", {"threadId": "another", "turn": {"id": TURN, "status": "completed"}}),
        Notification("codex/event/agent_message_content_delta", {"conversationId": "another", "id": TURN, "msg": {}}),
        Notification("codex/event/agent_message_content_delta", {"conversationId": THREAD, "id": "1", "msg": {}}),
        Notification("thread/settings/updated", {"threadId": THREAD}),
        Notification("account/rateLimits/updated", {"rateLimits": {}}),
        Notification("newThing", {}),
    ],
)
def test_what_is_not_of_the_turn_is_not_heard(notification: Notification) -> None:
    reader = TurnReader(THREAD, TURN)
    assert reader.read(notification) == ()
    assert not reader.unknown


def test_unknown_names_are_counted() -> None:
    reader = TurnReader(THREAD, TURN)
    for notification in [
        of_turn("turn/newThing"),
        of_turn("turn/newThing"),
        completed(type="hologram"),
        older("new_thing"),
        of_turn("item/agentMessage/delta", itemId="a"),
    ]:
        reader.read(notification)
    assert reader.unknown == {"turn/newThing": 2, "hologram": 1, "item/agentMessage/delta": 1}


def test_output_that_is_not_base64_is_unknown() -> None:
    for chunk in ("!", "\xe9"):
        output = older("exec_command_output_delta", call_id="c", chunk=chunk)
        assert TurnReader(THREAD, TURN).read(output) == (UnknownEvent(output.method, output.params),)


def test_the_older_dialect_is_heard_until_the_newer_one_is() -> None:
    reader = TurnReader(THREAD, TURN)
    delta = older("agent_message_content_delta", item_id="a", delta="x")
    assert reader.read(delta) == (MessageDelta("a", "x"),)
    assert reader.read(of_turn("thread/compacted")) == (Activity(),)
    assert reader.read(delta) == ()


@pytest.mark.parametrize(
    ("notification", "event"),
    [
        (older("task_started", model_context_window=None), TurnStarted()),
        (older("task_complete", last_agent_message="x"), TurnCompleted("completed", None, None)),
        (older("turn_aborted", reason="interrupted"), TurnCompleted("interrupted", None, None)),
        (older("agent_message_content_delta", item_id="a", delta="x"), MessageDelta("a", "x")),
        (older("agent_message_delta", delta="x"), Activity()),
        (
            older("item_completed", item={"type": "AgentMessage", "id": "a", "content": [TEXT]}),
            MessageCompleted("a", "x", None),
        ),
        (
            older("item_completed", item={"type": "Reasoning", "id": "r", "summary_text": ["x"], "raw_content": []}),
            ReasoningCompleted("r", ("x",)),
        ),
        (older("item_completed", item={"type": "WebSearch", "id": "w", "query": "x"}), WebSearchCompleted("w", "x")),
        (
            older("stream_error", message="again", codex_error_info={"response_stream_disconnected": {}}),
            WarningReported("again", will_retry=True),
        ),
        (
            older("error", message="no", codex_error_info={"http_connection_failed": {"http_status_code": 401}}),
            ErrorReported(TurnError("no", "httpConnectionFailed", 401, None)),
        ),
        (older("warning", message="slow"), WarningReported("slow", will_retry=False)),
        (
            older("plan_update", plan=[{"step": "do", "status": "in_progress"}]),
            PlanUpdated((PlanItem("do", "inProgress"),), None),
        ),
        (older("token_count", info=None), Activity()),
        (older("exec_command_output_delta", call_id="c", chunk="aGkK"), CommandOutput("c", "hi\n")),
        (
            older("patch_apply_end", call_id="f", success=True, changes={"/w/a": ADDED}),
            PatchCompleted("f", CHANGES, ItemStatus.COMPLETED),
        ),
    ],
)
def test_the_older_dialect(notification: Notification, event: TurnEvent) -> None:
    assert TurnReader(THREAD, TURN).read(notification) == (event,)


def test_an_error_of_the_older_dialect_is_told_again_at_the_end() -> None:
    reader = TurnReader(THREAD, TURN)
    reader.read(older("error", message="no", codex_error_info="usage_limit_exceeded"))
    failure = TurnError("no", "usageLimitExceeded", None, None)
    assert reader.read(older("task_complete", last_agent_message=None)) == (TurnCompleted("failed", failure, None),)


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
OLDER = [
    "task_started",
    "task_complete",
    "error",
    "stream_error",
    "item_started",
    "item_completed",
    "exec_command_begin",
    "exec_command_end",
    "exec_command_output_delta",
    "patch_apply_begin",
    "patch_apply_end",
    "mcp_tool_call_begin",
    "mcp_tool_call_end",
    "plan_update",
    "token_count",
    "turn_diff",
    "new_thing",
]
KEYS = st.sampled_from(
    [
        *("id", "type", "text", "item", "turn", "status", "error", "message", "codexErrorInfo", "itemId", "delta"),
        *("plan", "step", "tokenUsage", "total", "items", "content", "summary", "changes", "path", "kind", "result"),
        *("arguments", "command", "cwd", "call_id", "chunk", "msg", "invocation", "server", "tool", "duration"),
        *("secs", "nanos", "info", "total_token_usage", "codex_error_info", "item_id", "success"),
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
    for event in TurnReader(THREAD, TURN).read(Notification(method, {**params, **ids})):
        TurnText().apply(event)


@given(st.sampled_from(["item/started", "item/completed"]), fields, st.sampled_from([None, *KINDS, 7, []]))
def test_reading_an_item_never_raises(method: str, item: JsonObject, kind: JsonValue) -> None:
    for typed in (item, {**item, "type": kind}):
        assert len(TurnReader(THREAD, TURN).read(of_turn(method, item=typed))) == 1


@given(fields)
def test_the_end_of_the_turn_is_heard_whatever_else_it_says(turn: JsonObject) -> None:
    (event,) = TurnReader(THREAD, TURN).read(turn_completed(**turn))
    assert isinstance(event, TurnCompleted)


@given(st.sampled_from(OLDER), values)
def test_reading_the_older_dialect_never_raises(event: str, msg: JsonValue) -> None:
    params: JsonObject = {"conversationId": THREAD, "id": TURN, "msg": msg}
    assert len(TurnReader(THREAD, TURN).read(Notification(f"codex/event/{event}", params))) == 1


@given(st.sampled_from(METHODS), values, values, values)
def test_reading_never_raises_for_odd_ids(method: str, thread: JsonValue, turn: JsonValue, id_: JsonValue) -> None:
    params: JsonObject = {"threadId": thread, "turnId": turn, "turn": {"id": id_}, "conversationId": thread, "id": id_}
    TurnReader(THREAD, TURN).read(Notification(method, params))


def text_of(*events: TurnEvent) -> TurnText:
    text = TurnText()
    for event in events:
        text.apply(event)
    return text


@pytest.mark.parametrize(
    ("events", "answer"),
    [
        ([], ""),
        ([MessageDelta("a", "he"), MessageDelta("a", "llo")], "hello"),
        ([MessageStarted("a", None), MessageDelta("a", "hel"), MessageCompleted("a", "hello", None)], "hello"),
        ([MessageCompleted("a", "hello", None), MessageDelta("a", "late")], "hello"),
        ([MessageCompleted("a", "first", None), MessageCompleted("b", "second", None)], "second"),
        (
            [MessageCompleted("a", "answer", "final_answer"), MessageCompleted("b", "by the way", "commentary")],
            "answer",
        ),
        ([MessageCompleted("a", "looking", "commentary"), MessageStarted("b", None)], "looking"),
        ([MessageCompleted("a", "looking", None), MessageStarted("b", None), MessageDelta("b", "do")], "do"),
        ([MessageCompleted("a", "hello", None), MessageCompleted("b", "", None)], "hello"),
        ([MessageDelta("a", "hal"), WarningReported("again", will_retry=True)], ""),
        (
            [MessageCompleted("a", "one", None), MessageDelta("b", "hal"), WarningReported("again", will_retry=True)],
            "one",
        ),
        ([TurnCompleted("completed", None, MessageCompleted("a", "hello", None))], "hello"),
        (
            [
                MessageCompleted("a", "hello", None),
                TurnCompleted("completed", None, MessageCompleted("a", "hello", None)),
            ],
            "hello",
        ),
    ],
)
def test_the_answer_so_far(events: list[TurnEvent], answer: str) -> None:
    assert text_of(*events).answer == answer


def test_the_messages_come_in_the_order_they_began() -> None:
    text = text_of(
        MessageStarted("a", "commentary"), MessageDelta("b", "two"), MessageCompleted("a", "one", "commentary")
    )
    assert text.messages == (MessageCompleted("a", "one", "commentary"), MessageCompleted("b", "two", None))


def test_token_counts_subtract() -> None:
    usage = TokensUpdated(214, 200, 20, 14, 4, None, TokenUsage(107, 100, 10, 7, 2))
    assert usage.thread.minus(usage.last) == TokenUsage(107, 100, 10, 7, 2)
