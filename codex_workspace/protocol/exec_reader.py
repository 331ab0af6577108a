"""Reads the lines of `codex exec --json` into the same events as those of an app-server.

This module contains exec's names of events and items. Shapes: recordings/exec 0.163 and 0.169.
"""

import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from codex_workspace.common.values import (
    InvalidField,
    JsonObject,
    JsonValue,
    nested,
    nested_or_empty,
    number_or_none,
    objects,
    text,
    text_or_none,
)
from codex_workspace.protocol.codex_events import (
    Activity,
    CommandCompleted,
    CommandOutput,
    CommandStarted,
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

Stage: TypeAlias = Literal["started", "updated", "completed"]

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


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """An event, the fields of its line that the event does not hold, and the id of the line's item."""

    event: TurnEvent
    extra: JsonObject = field(default_factory=dict)
    item: str | None = None


class ExecReader:
    """Reads the lines of one run; `thread_id` is codex's id of the session, or None before codex reports it."""

    def __init__(self) -> None:
        self.thread_id: str | None = None
        self._texts: dict[str, str] = {}
        self._rewritten: set[str] = set()
        self._inputs: dict[tuple[str, str], JsonObject] = {}
        self._plan: tuple[PlanItem, ...] | None = None
        self._kinds: dict[str, str] = {}
        self._without_id: dict[str, deque[str]] = {}
        self._generated_ids = 0

    @staticmethod
    def skipped(size: int) -> WarningReported:
        """Return the warning about a line of `size` bytes that was too long to be read."""
        return WarningReported(f"codex wrote a line of {size} bytes, which exceeds the limit; it was skipped.", False)

    def read(self, line: bytes | str) -> tuple[ParsedLine, ...]:
        """Return the events of a line, without its newline; nothing if it is not an event. Never raises."""
        fields = _object_in(line)
        if fields is None:
            return ()
        kind = text_or_none(fields, "type") or ""
        try:
            return self._read(kind, fields)
        except InvalidField:
            return (ParsedLine(UnknownEvent(kind, fields)),)

    def _read(self, kind: str, fields: JsonObject) -> tuple[ParsedLine, ...]:
        match kind:
            case "thread.started":
                self.thread_id = text(fields, "thread_id")
                return (ParsedLine(Activity(), _beyond(fields, "thread_id")),)
            case "turn.started":
                return (ParsedLine(TurnStarted(), _beyond(fields)),)
            case "turn.completed":
                usage = nested_or_empty(fields, "usage")
                tokens = (ParsedLine(TokensUpdated(token_count(usage)), _beyond(usage, *_COUNTS)),) if usage else ()
                return (*tokens, ParsedLine(TurnCompleted("completed", None, None), _beyond(fields, "usage")))
            case "turn.failed":
                error = nested_or_empty(fields, "error")
                message = text_or_none(error, "message") or "codex reported a failed turn without a reason"
                extra = {**_beyond(fields, "error"), **_beyond_inside("error", error, "message")}
                return (ParsedLine(TurnCompleted("failed", _failure(message), None), extra),)
            case "error":
                message = text(fields, "message")
                if _RETRY.search(message):
                    return (ParsedLine(WarningReported(message, will_retry=True), _beyond(fields, "message")),)
                return (ParsedLine(ErrorReported(_failure(message)), _beyond(fields, "message")),)
            case "item.started":
                return self._item("started", fields)
            case "item.updated":
                return self._item("updated", fields)
            case "item.completed":
                return self._item("completed", fields)
            case _:
                return (ParsedLine(UnknownEvent(kind, fields)),)

    def _item(self, stage: Stage, fields: JsonObject) -> tuple[ParsedLine, ...]:
        item = nested(fields, "item")
        kind = text(item, "type")
        if kind not in _KNOWN:
            return (ParsedLine(UnknownEvent(kind, fields)),)
        extra = {
            **_beyond(fields, "item"),
            **_beyond(item, "id", *_KNOWN[kind]),
            **_beyond_inside("result", nested_or_empty(item, "result"), "content"),
            **_beyond_inside("error", nested_or_empty(item, "error"), "message"),
            **_beyond_listed(item, kind),
        }
        id_ = self._id(stage, kind, item)
        return (ParsedLine(self._read_item(stage, kind, id_, self._with_inputs(stage, kind, id_, item)), extra, id_),)

    def _with_inputs(self, stage: Stage, kind: str, id_: str, item: JsonObject) -> JsonObject:
        """Return the item with its tool's inputs, which may be in the line that started it only."""
        inputs = {key: item[key] for key in _INPUTS.get(kind, ()) if item.get(key) is not None}
        if stage == "started":
            self._inputs[kind, id_] = inputs
            return item
        return {**item, **self._inputs.get((kind, id_), {}), **inputs}

    def _id(self, stage: Stage, kind: str, item: JsonObject) -> str:
        """Return the item's id, made unique by its kind if an item of another kind has the same one.

        An item without an id gets a generated one; its updates and its end are found by the kind of item.
        """
        id_ = item.get("id")
        if isinstance(id_, int) and not isinstance(id_, bool):
            id_ = str(id_)
        if isinstance(id_, str) and id_:
            return id_ if self._kinds.setdefault(id_, kind) == kind else f"{id_}-{kind}"
        opened = self._without_id.setdefault(kind, deque())
        match stage:
            case "updated" if opened:
                return opened[-1]
            case "completed" if opened:
                return opened.popleft()
        self._generated_ids += 1
        name = f"generated-{self._generated_ids}"
        if stage != "completed":
            opened.append(name)
        return name

    def _read_item(self, stage: Stage, kind: str, id_: str, item: JsonObject) -> TurnEvent:
        match kind:
            case "agent_message":
                return self._message(stage, id_, item)
            case "reasoning":
                return self._reasoning(stage, id_, item)
            case "command_execution":
                return self._command(stage, id_, item)
            case "todo_list":
                return self._todo_list(item)
            case "error":
                return WarningReported(text(item, "message"), will_retry=False)
            case _:
                reader = _OF_ITEM[kind].get(stage)
                return Activity() if reader is None else reader(id_, item)

    def _message(self, stage: Stage, id_: str, item: JsonObject) -> TurnEvent:
        if stage == "completed":
            return MessageCompleted(id_, text(item, "text"), None)
        full = text_or_none(item, "text") or ""
        added = self._added(id_, full)
        if added is None or id_ in self._rewritten:
            # Deltas cannot extend a message that was completed, so each further update completes it again.
            self._rewritten.add(id_)
            return MessageCompleted(id_, full, None)
        return MessageDelta(id_, added) if added or stage == "updated" else MessageStarted(id_, None)

    def _reasoning(self, stage: Stage, id_: str, item: JsonObject) -> TurnEvent:
        if stage == "completed":
            return ReasoningCompleted(id_, (text(item, "text"),))
        added = self._added(id_, text_or_none(item, "text") or "")
        return ReasoningDelta(id_, 0, added) if added else Activity()

    def _command(self, stage: Stage, id_: str, item: JsonObject) -> TurnEvent:
        output = text_or_none(item, "aggregated_output") or ""
        match stage:
            case "started":
                return CommandStarted(id_, text(item, "command"), "")
            case "updated":
                added = self._added(id_, output)
                return CommandOutput(id_, added) if added else Activity()
            case "completed":
                exit_code = number_or_none(item, "exit_code")
                return CommandCompleted(id_, text(item, "command"), "", output, exit_code, _status(item), None)

    def _todo_list(self, item: JsonObject) -> TurnEvent:
        steps = tuple(
            PlanItem(text(each, "text"), "completed" if each.get("completed") is True else "pending")
            for each in objects(item, "items")
        )
        if steps == self._plan:
            return Activity()
        self._plan = steps
        return PlanUpdated(steps, None)

    def _added(self, id_: str, full: str) -> str | None:
        """Return the part that was added to a text since its previous update; None if the text was rewritten."""
        before = self._texts.get(id_, "")
        self._texts[id_] = full
        return full[len(before) :] if full.startswith(before) else None


def _object_in(line: bytes | str) -> JsonObject | None:
    try:
        # The last of two equal keys counts: codex's searches have two ids, the same ones in every line.
        value = json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _reject_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


def _beyond(fields: JsonObject, *known: str) -> JsonObject:
    return {key: value for key, value in fields.items() if key != "type" and key not in known}


def _beyond_inside(name: str, table: JsonObject, known: str) -> JsonObject:
    """Return the other fields of a nested object, for example the structured content of an MCP tool's result."""
    others: JsonObject = {key: value for key, value in table.items() if key != known and value}
    return {name: others} if others else {}


def _beyond_listed(item: JsonObject, kind: str) -> JsonObject:
    """Return the item's list unchanged if one of its elements has fields that are not read."""
    name, known = _LISTED.get(kind, ("", frozenset()))
    listed = item.get(name)
    if not isinstance(listed, list):
        return {}
    return {name: listed} if any(isinstance(each, dict) and not known.issuperset(each) for each in listed) else {}


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
    status = text_or_none(item, "status") or "unknown"
    return ItemStatus.IN_PROGRESS if status == "in_progress" else ItemStatus(status)


def _changes(item: JsonObject) -> tuple[FilePatch, ...]:
    return tuple(
        FilePatch(text(each, "path"), text_or_none(each, "kind") or "unknown", text_or_none(each, "diff") or "")
        for each in objects(item, "changes")
    )


def _patch_started(id_: str, item: JsonObject) -> TurnEvent:
    return PatchStarted(id_, _changes(item))


def _patch_completed(id_: str, item: JsonObject) -> TurnEvent:
    return PatchCompleted(id_, _changes(item), _status(item))


def _tool_started(id_: str, item: JsonObject) -> TurnEvent:
    return ToolCallStarted(id_, text_or_none(item, "server"), text(item, "tool"), item.get("arguments"))


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


def _search_completed(id_: str, item: JsonObject) -> TurnEvent:
    return WebSearchCompleted(id_, text_or_none(item, "query") or "")


_KNOWN: Final[dict[str, tuple[str, ...]]] = {
    "agent_message": ("text",),
    "reasoning": ("text",),
    "command_execution": ("command", "aggregated_output", "exit_code", "status"),
    "file_change": ("changes", "status"),
    "mcp_tool_call": ("server", "tool", "arguments", "result", "error", "status"),
    "web_search": ("query",),
    "todo_list": ("items",),
    "error": ("message",),
}
"""The types of items, and the fields that are read from each."""

_INPUTS: Final[dict[str, tuple[str, ...]]] = {
    "command_execution": ("command",),
    "file_change": ("changes",),
    "mcp_tool_call": ("server", "tool", "arguments"),
}
"""The fields with a tool's inputs."""

_LISTED: Final[dict[str, tuple[str, frozenset[str]]]] = {
    "file_change": ("changes", frozenset({"path", "kind", "diff"})),
    "todo_list": ("items", frozenset({"text", "completed"})),
}
"""The lists in items, and the fields that are read from their elements."""

_OF_ITEM: Final[dict[str, dict[Stage, Callable[[str, JsonObject], TurnEvent]]]] = {
    "file_change": {"started": _patch_started, "completed": _patch_completed},
    "mcp_tool_call": {"started": _tool_started, "completed": _tool_completed},
    # The query is known only when the search is complete.
    "web_search": {"completed": _search_completed},
}
