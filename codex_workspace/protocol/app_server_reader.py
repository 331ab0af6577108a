"""Reads the notifications of `codex app-server`: the events of one turn, and the start of MCP servers.

This module contains codex's names of notifications and items. Shapes: recordings 0.163 and 0.169.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, TypeAlias

import anyio

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.environment import Secret
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
    Phase,
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
    content_text,
)
from codex_workspace.protocol.jsonrpc import (
    InvalidField,
    Notification,
    Request,
    nested,
    nested_or_empty,
    number_or_none,
    objects,
    text,
    text_or_none,
    texts,
)

_DELTAS: Final = frozenset(
    ("item/agentMessage/delta", "item/reasoning/summaryTextDelta", "item/commandExecution/outputDelta")
)
"""Notifications that add a piece to a text."""

_Reader: TypeAlias = Callable[[JsonObject], TurnEvent]


class TurnReader:
    """Selects and reads the events of one turn."""

    def __init__(self, thread_id: str, turn_id: str) -> None:
        self.thread_id: Final = thread_id
        self.turn_id: Final = turn_id

    def read(self, notification: Notification) -> TurnEvent | None:
        """Return the event in a notification, or None if it is about another turn. Never raises.

        The status and the warnings of the thread carry no turn and count as events of this one. A notification of this
        turn with an unknown name or an invalid shape is returned as `UnknownEvent`.
        """
        method, params = notification.method, notification.params
        if params.get("threadId") != self.thread_id:
            return None
        try:
            return self._event(method, params)
        except InvalidField:
            return UnknownEvent(method, params)

    def _event(self, method: str, params: JsonObject) -> TurnEvent | None:
        if params.get("turnId") == self.turn_id:
            return _OF_TURN[method](params) if method in _OF_TURN else UnknownEvent(method, params)
        if method in _OF_WHOLE_TURN:
            turn = nested(params, "turn")
            return _OF_WHOLE_TURN[method](turn) if turn.get("id") == self.turn_id else None
        return _OF_THREAD[method](params) if method in _OF_THREAD else None


def piece_of(message: Notification | Request) -> str | None:
    """Return the id of the item to whose text a message adds a piece; None for any other message."""
    if message.method not in _DELTAS or not isinstance(message.params.get("delta"), str):
        return None
    return text_or_none(message.params, "itemId")


def is_quiet(message: Notification) -> bool:
    """Whether a message tells nothing that cannot wait for the next one: the tokens so far, the user's own message."""
    if message.method in ("item/started", "item/completed"):
        return nested_or_empty(message.params, "item").get("type") == "userMessage"
    return message.method == "thread/tokenUsage/updated"


def join_deltas(messages: Sequence[Notification | Request]) -> list[Notification | Request]:
    """Return the messages in their order, with adjacent pieces of one text joined."""
    joined: list[Notification | Request] = []
    for _, (first, *others) in groupby(messages, _text_of):
        if others:
            delta = "".join(text(each.params, "delta") for each in (first, *others))
            first = Notification(first.method, {**first.params, "delta": delta})
        joined.append(first)
    return joined


def _text_of(message: Notification | Request) -> object:
    """Return what the pieces of one text have in common; a value of its own for any other message."""
    item, params = piece_of(message), message.params
    return object() if item is None else (message.method, item, params.get("turnId"), params.get("summaryIndex"))


def _plan(params: JsonObject) -> TurnEvent:
    steps = tuple(PlanItem(text(step, "step"), text(step, "status")) for step in objects(params, "plan"))
    return PlanUpdated(steps, text_or_none(params, "explanation"))


def _tokens(params: JsonObject) -> TurnEvent:
    usage = nested(params, "tokenUsage")
    return TokensUpdated(_token_count(nested(usage, "total")), _token_count(nested_or_empty(usage, "last")))


def _token_count(counts: JsonObject) -> TokenUsage:
    return TokenUsage(
        total=number_or_none(counts, "totalTokens") or 0,
        input=number_or_none(counts, "inputTokens") or 0,
        cached_input=number_or_none(counts, "cachedInputTokens") or 0,
        output=number_or_none(counts, "outputTokens") or 0,
        reasoning_output=number_or_none(counts, "reasoningOutputTokens") or 0,
    )


def _error(params: JsonObject) -> TurnEvent:
    failure = _failure(nested(params, "error"))
    if params.get("willRetry") is True:
        return WarningReported(failure.message, will_retry=True)
    return ErrorReported(failure)


def _failure(error: JsonObject) -> TurnError:
    """Return why a turn failed. The kind is a string, or the only key of an object with details."""
    message = text_or_none(error, "message") or "codex reported a failed turn without a reason"
    details = text_or_none(error, "additionalDetails")
    match error.get("codexErrorInfo"):
        case str(kind):
            return TurnError(message, kind, None, details)
        case dict(info) if info:
            kind = next(iter(info))
            return TurnError(message, kind, number_or_none(nested_or_empty(info, kind), "httpStatusCode"), details)
        case _:
            return TurnError(message, "other", None, details)


def _thread_status(params: JsonObject) -> TurnEvent:
    status = nested(params, "status")
    match status.get("type"):
        case "idle" | "notLoaded" | "systemError":
            return ThreadIdle()
        case "active":
            return Activity()
        case _:
            raise InvalidField("status.type")


def turn_completed(turn: JsonObject) -> TurnCompleted:
    """Return a turn's end; an unknown status counts as failed, because the turn is over all the same."""
    last_message: MessageCompleted | None = None
    for item in objects(turn, "items"):
        if item.get("type") == "agentMessage":
            with suppress(InvalidField):
                last_message = _message(item)
    match turn.get("status"):
        case "completed":
            return TurnCompleted("completed", None, last_message)
        case "interrupted":
            return TurnCompleted("interrupted", None, last_message)
        case _:
            return TurnCompleted("failed", _failure(nested_or_empty(turn, "error")), last_message)


def _item_started(params: JsonObject) -> TurnEvent:
    return _item(_STARTED, nested(params, "item"))


def _item_completed(params: JsonObject) -> TurnEvent:
    return _item(_COMPLETED, nested(params, "item"))


def _item(readers: dict[str, _Reader], item: JsonObject) -> TurnEvent:
    kind = text(item, "type")
    if kind in _QUIET_ITEMS:
        return Activity()
    return readers[kind](item) if kind in readers else UnknownEvent(kind, item)


def _message(item: JsonObject) -> MessageCompleted:
    return MessageCompleted(text(item, "id"), text(item, "text"), _phase(item))


def _phase(item: JsonObject) -> Phase:
    match item.get("phase"):
        case "commentary":
            return "commentary"
        case "final_answer":
            return "final_answer"
        case _:
            return None


def _command_completed(item: JsonObject) -> TurnEvent:
    return CommandCompleted(
        text(item, "id"),
        text(item, "command"),
        text_or_none(item, "cwd") or "",
        text_or_none(item, "aggregatedOutput") or "",
        number_or_none(item, "exitCode"),
        _status(item),
        number_or_none(item, "durationMs"),
    )


def _status(item: JsonObject) -> ItemStatus:
    return ItemStatus(text_or_none(item, "status") or "unknown")


def _changes(item: JsonObject) -> tuple[FilePatch, ...]:
    return tuple(
        FilePatch(
            text(change, "path"),
            text_or_none(nested_or_empty(change, "kind"), "type") or "unknown",
            text_or_none(change, "diff") or "",
        )
        for change in objects(item, "changes")
    )


def _tool_started(item: JsonObject, server: str) -> TurnEvent:
    return ToolCallStarted(text(item, "id"), text_or_none(item, server), text(item, "tool"), item.get("arguments"))


def _tool_completed(item: JsonObject, server: str, result: str, *, is_error: bool) -> TurnEvent:
    status = _status(item)
    return ToolCallCompleted(
        text(item, "id"),
        text_or_none(item, server),
        text(item, "tool"),
        item.get("arguments"),
        result,
        is_error or status is not ItemStatus.COMPLETED,
        status,
        number_or_none(item, "durationMs"),
    )


def _mcp_tool_completed(item: JsonObject) -> TurnEvent:
    error = text_or_none(nested_or_empty(item, "error"), "message")
    result = content_text(objects(nested_or_empty(item, "result"), "content")) if error is None else error
    return _tool_completed(item, "server", result, is_error=error is not None)


def _dynamic_tool_completed(item: JsonObject) -> TurnEvent:
    result = content_text(objects(item, "contentItems"))
    return _tool_completed(item, "namespace", result, is_error=item.get("success") is False)


def _activity(_: JsonObject) -> TurnEvent:
    return Activity()


_OF_TURN: Final[dict[str, _Reader]] = {
    "item/agentMessage/delta": lambda params: MessageDelta(text(params, "itemId"), text(params, "delta")),
    "item/started": _item_started,
    "item/completed": _item_completed,
    "item/reasoning/summaryTextDelta": lambda params: ReasoningDelta(
        text(params, "itemId"), number_or_none(params, "summaryIndex") or 0, text(params, "delta")
    ),
    "item/reasoning/textDelta": lambda params: ReasoningDelta(
        text(params, "itemId"), number_or_none(params, "contentIndex") or 0, text(params, "delta")
    ),
    "item/commandExecution/outputDelta": lambda params: CommandOutput(text(params, "itemId"), text(params, "delta")),
    "turn/diff/updated": lambda params: DiffUpdated(text(params, "diff")),
    "turn/plan/updated": _plan,
    "thread/tokenUsage/updated": _tokens,
    "error": _error,
    "warning": lambda params: WarningReported(text(params, "message"), will_retry=False),
    **dict.fromkeys(
        (
            "autoApprovalReview/strictReviewRequired",
            "hook/completed",
            "hook/started",
            "item/autoApprovalReview/completed",
            "item/autoApprovalReview/started",
            "item/commandExecution/terminalInteraction",
            "item/fileChange/outputDelta",
            "item/fileChange/patchUpdated",
            "item/mcpToolCall/progress",
            "item/plan/delta",
            "item/reasoning/summaryPartAdded",
            "model/rerouted",
            "model/safetyBuffering/updated",
            "model/verification",
            "modelProvider/authRecoveryCompleted",
            "modelProvider/authRecoveryStarted",
            "thread/compacted",
            "thread/goal/updated",
            "turn/moderationMetadata",
        ),
        _activity,
    ),
}
"""Notifications that carry the id of a turn. Source: the schema of codex 0.163, and recordings of 0.169."""

_OF_WHOLE_TURN: Final[dict[str, _Reader]] = {"turn/started": lambda _: TurnStarted(), "turn/completed": turn_completed}
"""Notifications that carry the turn itself, and with it its id."""

_OF_THREAD: Final[dict[str, _Reader]] = {"thread/status/changed": _thread_status, "warning": _OF_TURN["warning"]}
"""Notifications that carry a thread and no turn; others of this kind are not about turns."""

_STARTED: Final[dict[str, _Reader]] = {
    "agentMessage": lambda item: MessageStarted(text(item, "id"), _phase(item)),
    "reasoning": _activity,
    "commandExecution": lambda item: CommandStarted(
        text(item, "id"), text(item, "command"), text_or_none(item, "cwd") or ""
    ),
    "fileChange": lambda item: PatchStarted(text(item, "id"), _changes(item)),
    "mcpToolCall": lambda item: _tool_started(item, "server"),
    "dynamicToolCall": lambda item: _tool_started(item, "namespace"),
    "webSearch": _activity,
}

_COMPLETED: Final[dict[str, _Reader]] = {
    "agentMessage": _message,
    "reasoning": lambda item: ReasoningCompleted(text(item, "id"), texts(item, "summary") or texts(item, "content")),
    "commandExecution": _command_completed,
    "fileChange": lambda item: PatchCompleted(text(item, "id"), _changes(item), _status(item)),
    "mcpToolCall": _mcp_tool_completed,
    "dynamicToolCall": _dynamic_tool_completed,
    "webSearch": lambda item: WebSearchCompleted(text(item, "id"), text_or_none(item, "query") or ""),
}

_QUIET_ITEMS: Final = frozenset(
    {
        "collabAgentToolCall",
        "contextCompaction",
        "enteredReviewMode",
        "exitedReviewMode",
        "functionCallOutput",
        "hookPrompt",
        "imageGeneration",
        "imageView",
        "plan",
        "sleep",
        "subAgentActivity",
        "userMessage",
    }
)
"""Known types of items that show only that the turn goes on."""


# --- The start of MCP servers ---

STARTUP: Final = "mcpServer/startupStatus/updated"
"""The notification about a server's start."""

REQUIRED_FAILED: Final = "required MCP servers failed"
"""Part of the error with which codex rejects a thread if a required server does not start."""

RETRY_S: Final = 60.0
"""A server that has not started is retried by the first turn that starts this long after the last try."""

MAX_FAILURE_CHARS: Final = 240
"""Longer reasons are shortened; codex reports the whole chain of errors."""

_TYPES: Final = re.compile(r"\s*\[[\w:<>, ()]*::[^\]]*\]\s*")
"""The name of a Rust type in brackets."""

_AROUND: Final = re.compile(r"^MCP client for `[^`]*` (failed to start: )?(MCP startup failed: )?|\. Add or adjust .*$")


@dataclass(frozen=True, slots=True)
class ExpectedServers:
    """The servers that a thread should have.

    within_s: how long to wait for their start.
    left_out: the names of servers that are not started, each with the reason.
    told: the configurations that are in no file, by the server's name.
    private: the values that are sent over codex's pipe only, by the server's name: table and key, and the secret.
    """

    names: tuple[str, ...] = ()
    within_s: float = 0.0
    left_out: Mapping[str, str] = field(default_factory=dict)
    private: Mapping[str, Mapping[tuple[str, str], Secret]] = field(default_factory=dict)
    told: Mapping[str, JsonObject] = field(default_factory=dict)

    def config(self) -> JsonObject:
        """Return the servers' configuration that is not in config.toml, in the shape of `thread/start.config`."""
        tables: dict[str, JsonValue] = dict(self.told)
        for name, values in self.private.items():
            server: dict[str, JsonValue] = dict(self.told.get(name, {}))
            for (table, key), value in values.items():
                before = server.get(table)
                server[table] = {**(before if isinstance(before, dict) else {}), key: value.reveal()}
            tables[name] = server
        return {"mcp_servers": tables} if tables else {}


class McpStatusTracker:
    """The status of the MCP servers of one codex's threads: None while one starts, "" when it is ready, else why not.

    Codex starts a set of servers for each thread, and delays the first model call for one second only.
    """

    def __init__(self) -> None:
        self.by_thread: dict[str, dict[str, str | None]] = {}
        self._closed = False
        self._changed = anyio.Event()

    def update(self, params: JsonObject) -> None:
        """Read a notification; one of another shape is ignored."""
        match params:
            case {"threadId": str(thread_id), "name": str(name), "status": str(status), **rest}:
                error = {"ready": "", "failed": failure_reason(rest.get("error")) or status, "cancelled": status}
                self.by_thread.setdefault(thread_id, {})[name] = error.get(status)
                self._changed.set()
            case _:
                pass

    def close(self) -> None:
        """End all waits; codex sends no further notifications."""
        self._closed = True
        self._changed.set()

    def of(self, thread_id: str) -> Mapping[str, str | None]:
        """Return the known status of a thread's servers, by their names."""
        return dict(self.by_thread.get(thread_id, {}))

    async def wait_for(self, thread_id: str, names: Collection[str], within_s: float) -> Mapping[str, str | None]:
        """Wait until these servers of a thread have started or failed; return the status of all of its servers."""
        with anyio.move_on_after(within_s):
            while not self._closed and any(self.of(thread_id).get(name) is None for name in names):
                self._changed = anyio.Event() if self._changed.is_set() else self._changed
                await self._changed.wait()
        return self.of(thread_id)


def describe_problems(expected: ExpectedServers, known: Mapping[str, str | None]) -> dict[str, str]:
    """Return a sentence about each server that is unavailable, by its name."""
    reasons = {**expected.left_out, **{name: reason for name, reason in known.items() if reason}}
    late = [name for name in expected.names if known.get(name) is None]
    return {
        **{name: f"The MCP server {name} is not available: {reason}." for name, reason in reasons.items()},
        **{name: f"The MCP server {name} did not start within {expected.within_s:g} s." for name in late},
    }


def failure_reason(error: JsonValue) -> str:
    """Return codex's reason on one line, without the server's name, the advice on config.toml, and Rust types."""
    if not isinstance(error, str):
        return ""
    reason = _TYPES.sub(" ", _AROUND.sub("", " ".join(error.split()))).removesuffix(".")
    if len(reason) <= MAX_FAILURE_CHARS:
        return reason
    # The beginning names the attempt, the end the cause.
    half = MAX_FAILURE_CHARS // 2
    return f"{reason[:half].rstrip()} … {reason[-half:].lstrip()}"
