"""Reads the lines of `codex exec --json` into the same events as those of an app-server.

This module contains exec's names of events and items. Shapes: recordings/exec 0.163 and 0.169.
"""

import json
import re
from typing import Final

from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.codex_events import (
    Activity,
    CommandCompleted,
    CommandStarted,
    ErrorReported,
    FilePatch,
    ItemStatus,
    MessageCompleted,
    PatchCompleted,
    PatchStarted,
    PlanItem,
    PlanUpdated,
    ReasoningCompleted,
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
    nested,
    nested_or_empty,
    number_or_none,
    objects,
    text,
    text_or_none,
)

_RETRY: Final = re.compile(r"^Reconnecting\.\.\. \d+/\d+")
"""The message of an error after which codex repeats the model call."""

_STATUS: Final = re.compile(r"\bstatus:? (\d{3})\b")

_KINDS: Final = (
    ("ran out of room in the model's context window", "contextWindowExceeded"),
    ("hit your usage limit", "usageLimitExceeded"),
    ("Selected model is at capacity", "serverOverloaded"),
    ("experiencing high demand", "internalServerError"),
)
"""Parts of failure messages, and the app-server's code for each; exec reports the message only."""


class ExecReader:
    """Reads the lines of one run; `thread_id` is codex's id of the session, or None before codex reports it."""

    def __init__(self) -> None:
        self.thread_id: str | None = None
        self._plan: tuple[PlanItem, ...] | None = None

    def read(self, line: bytes | str) -> tuple[TurnEvent, ...]:
        """Return the events of a line, without its newline; nothing if it is not an event. Never raises."""
        fields = _object_in(line)
        if fields is None:
            return ()
        kind = text_or_none(fields, "type") or ""
        try:
            return self._read(kind, fields)
        except InvalidField:
            return (UnknownEvent(kind, fields),)

    def _read(self, kind: str, fields: JsonObject) -> tuple[TurnEvent, ...]:
        match kind:
            case "thread.started":
                self.thread_id = text(fields, "thread_id")
                return (Activity(),)
            case "turn.started":
                return (TurnStarted(),)
            case "turn.completed":
                usage = nested_or_empty(fields, "usage")
                tokens = (TokensUpdated(token_count(usage)),) if usage else ()
                return (*tokens, TurnCompleted("completed"))
            case "turn.failed":
                message = text_or_none(nested_or_empty(fields, "error"), "message")
                failure = _failure(message or "codex reported a failed turn without a reason")
                return (TurnCompleted("failed", failure, None),)
            case "error":
                message = text(fields, "message")
                if _RETRY.search(message):
                    return (WarningReported(message, will_retry=True),)
                return (ErrorReported(_failure(message)),)
            case "item.started" | "item.updated" | "item.completed":
                return (self._item(kind, fields),)
            case _:
                return (UnknownEvent(kind, fields),)

    def _item(self, stage: str, fields: JsonObject) -> TurnEvent:
        item = nested(fields, "item")
        kind, id_ = text(item, "type"), text(item, "id")
        if kind not in _ITEMS:
            return UnknownEvent(kind, fields)
        if kind == "todo_list":
            return self._todo_list(item)
        match stage:
            case "item.started":
                return _started(kind, id_, item)
            case "item.completed":
                return _completed(kind, id_, item)
            case _:
                return Activity()

    def _todo_list(self, item: JsonObject) -> TurnEvent:
        steps = tuple(
            PlanItem(text(each, "text"), "completed" if each.get("completed") is True else "pending")
            for each in objects(item, "items")
        )
        if steps == self._plan:
            return Activity()
        self._plan = steps
        return PlanUpdated(steps, None)


def _object_in(line: bytes | str) -> JsonObject | None:
    try:
        # The last of two equal keys counts: codex's searches have two ids, the same ones in every line.
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_COUNTS: Final = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_output_tokens")


def token_count(counts: JsonObject) -> TokenUsage:
    """Return the tokens of the session so far, in a line or in a session's file; a missing number is 0."""
    given, cached, output, reasoning = (number_or_none(counts, key) or 0 for key in _COUNTS)
    return TokenUsage(given + output, given, cached, output, reasoning)


def _failure(message: str) -> TurnError:
    kind = next((kind for part, kind in _KINDS if part in message), "other")
    status = _STATUS.search(message)
    return TurnError(message, kind, int(status.group(1)) if status else None, None)


def _status(item: JsonObject) -> ItemStatus:
    return ItemStatus(text_or_none(item, "status") or "unknown")


def _changes(item: JsonObject) -> tuple[FilePatch, ...]:
    return tuple(
        FilePatch(text(each, "path"), text_or_none(each, "kind") or "unknown", text_or_none(each, "diff") or "")
        for each in objects(item, "changes")
    )


def _started(kind: str, id_: str, item: JsonObject) -> TurnEvent:
    match kind:
        case "command_execution":
            return CommandStarted(id_, text(item, "command"), "")
        case "file_change":
            return PatchStarted(id_, _changes(item))
        case "mcp_tool_call":
            return ToolCallStarted(id_, text_or_none(item, "server"), text(item, "tool"), item.get("arguments"))
        case _:
            # Includes searches, whose query is known when they are complete.
            return Activity()


def _completed(kind: str, id_: str, item: JsonObject) -> TurnEvent:
    match kind:
        case "agent_message":
            return MessageCompleted(id_, text(item, "text"), None)
        case "reasoning":
            return ReasoningCompleted(id_, (text(item, "text"),))
        case "command_execution":
            output = text_or_none(item, "aggregated_output") or ""
            exit_code = number_or_none(item, "exit_code")
            return CommandCompleted(id_, text(item, "command"), "", output, exit_code, _status(item), None)
        case "file_change":
            return PatchCompleted(id_, _changes(item), _status(item))
        case "mcp_tool_call":
            return _tool_completed(id_, item)
        case "web_search":
            return WebSearchCompleted(id_, text_or_none(item, "query") or "")
        case _:
            return WarningReported(text(item, "message"), will_retry=False)


def _tool_completed(id_: str, item: JsonObject) -> TurnEvent:
    status = _status(item)
    error = text_or_none(nested_or_empty(item, "error"), "message")
    return ToolCallCompleted(
        id_,
        text_or_none(item, "server"),
        text(item, "tool"),
        item.get("arguments"),
        content_text(objects(nested_or_empty(item, "result"), "content")) if error is None else error,
        error is not None or status is not ItemStatus.COMPLETED,
        status,
        None,
    )


_ITEMS: Final = frozenset(
    (
        *("agent_message", "reasoning", "command_execution", "file_change"),
        *("mcp_tool_call", "web_search", "todo_list", "error"),
    )
)
"""The types of items."""
