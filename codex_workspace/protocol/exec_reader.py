"""What the lines of `codex exec --json` mean: the events of a turn, the same as an app-server's.

Here are the names of exec's events and items. Codex 0.42, the first that has such lines (`--experimental-json`), names
some of them otherwise and never says that a turn begins or ends. Shapes: recordings/exec 0.42 to 0.169.
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
from codex_workspace.protocol.jsonrpc import START_CHARS

MAX_NOISE_LINES: Final = 20
"""So many lines that are no events are kept, of each the first characters: codex and its parents print warnings."""

Stage: TypeAlias = Literal["started", "updated", "completed"]

_RETRY: Final = re.compile(r"^Reconnecting\.\.\. \d+/\d+|; retrying \d+/\d+ in ")
"""How codex says that it asks the model again, and so goes on: today's words, and those of 0.42."""

_STATUS: Final = re.compile(r"\bstatus:? (\d{3})\b")

_KINDS: Final = (
    ("ran out of room in the model's context window", "contextWindowExceeded"),
    ("hit your usage limit", "usageLimitExceeded"),
    ("Selected model is at capacity", "serverOverloaded"),
    ("experiencing high demand", "internalServerError"),
)
"""Exec tells a failure in words only; these are the app-server's words for some of them."""


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """An event, the fields of its line that it has no place for, and the id of the item that the line is about."""

    event: TurnEvent
    extra: JsonObject = field(default_factory=dict)
    item: str | None = None


class ExecReader:
    """Reads the lines of one run.

    `thread_id` is codex's id of the session, None before it is said. `noise` are the last lines that were no events.
    """

    def __init__(self) -> None:
        self.thread_id: str | None = None
        self.noise: Final[deque[str]] = deque(maxlen=MAX_NOISE_LINES)
        self._tells_ends = True
        self._grown: dict[str, str] = {}
        self._rewritten: set[str] = set()
        self._given: dict[tuple[str, str], JsonObject] = {}
        self._plan: tuple[PlanItem, ...] | None = None
        self._kinds: dict[str, str] = {}
        self._nameless: dict[str, deque[str]] = {}
        self._names = 0

    @staticmethod
    def skipped(size: int) -> WarningReported:
        """Return what is said of a line of `size` bytes that was too long to be read."""
        said = f"codex wrote a line of {size} bytes, which is more than is read; what it said is missing here."
        return WarningReported(said, will_retry=False)

    @property
    def tells_ends(self) -> bool:
        """Whether this codex says that a turn has ended; 0.42 does not."""
        return self._tells_ends

    def read(self, line: bytes | str) -> tuple[ParsedLine, ...]:
        """Return what a line says, without its newline; nothing where it is no event. Never raises."""
        fields = _object_in(line)
        if fields is None:
            self._note(line)
            return ()
        kind = text_or_none(fields, "type") or ""
        try:
            return self._read(kind, fields)
        except InvalidField:
            return (ParsedLine(UnknownEvent(kind, fields)),)

    def _note(self, line: bytes | str) -> None:
        start = line[: 4 * START_CHARS]
        words = (start if isinstance(start, str) else start.decode("utf-8", "replace")).strip()
        if words:
            self.noise.append(words[:START_CHARS])

    def _read(self, kind: str, fields: JsonObject) -> tuple[ParsedLine, ...]:
        match kind:
            case "thread.started":
                self.thread_id = text(fields, "thread_id")
                return (ParsedLine(Activity(), _beyond(fields, "thread_id")),)
            case "session.created":
                self.thread_id = text(fields, "session_id")
                self._tells_ends = False
                return (ParsedLine(Activity(), _beyond(fields, "session_id")),)
            case "turn.started":
                self._tells_ends = True
                return (ParsedLine(TurnStarted(), _beyond(fields)),)
            case "turn.completed":
                usage = nested_or_empty(fields, "usage")
                told = (ParsedLine(_usage(usage), _beyond(usage, *_COUNTS)),) if usage else ()
                return (*told, ParsedLine(TurnCompleted("completed", None, None), _beyond(fields, "usage")))
            case "turn.failed":
                error = nested_or_empty(fields, "error")
                message = text_or_none(error, "message") or "codex does not say why"
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
        kind = text_or_none(item, "type") or text(item, "item_type")
        kind = _OLDER_NAMES.get(kind, kind)
        if kind not in _KNOWN:
            return (ParsedLine(UnknownEvent(kind, fields)),)
        extra = {
            **_beyond(fields, "item"),
            **_beyond(item, "id", "item_type", *_KNOWN[kind]),
            **_beyond_inside("result", nested_or_empty(item, "result"), "content"),
            **_beyond_inside("error", nested_or_empty(item, "error"), "message"),
            **_beyond_listed(item, kind),
        }
        id_ = self._id(stage, kind, item)
        return (ParsedLine(self._read_item(stage, kind, id_, self._with_given(stage, kind, id_, item)), extra, id_),)

    def _with_given(self, stage: Stage, kind: str, id_: str, item: JsonObject) -> JsonObject:
        """Return the item with what its tool was given, where its beginning says that and its end does not."""
        given = {key: item[key] for key in _GIVEN.get(kind, ()) if item.get(key) is not None}
        if stage == "started":
            self._given[kind, id_] = given
            return item
        return {**item, **self._given.get((kind, id_), {}), **given}

    def _id(self, stage: Stage, kind: str, item: JsonObject) -> str:
        """Return the item's id; one without is named here, its updates and end by the kind of item.

        An id that an item of another kind has is given this one with its kind.
        """
        given = item.get("id")
        if isinstance(given, int) and not isinstance(given, bool):
            given = str(given)
        if isinstance(given, str) and given:
            return given if self._kinds.setdefault(given, kind) == kind else f"{given}-{kind}"
        opened = self._nameless.setdefault(kind, deque())
        match stage:
            case "updated" if opened:
                return opened[-1]
            case "completed" if opened:
                return opened.popleft()
        self._names += 1
        name = f"nameless-{self._names}"
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
        whole = text_or_none(item, "text") or ""
        more = self._more(id_, whole)
        if more is None or id_ in self._rewritten:
            # Nothing adds to a message that was said as a whole: from here on it is said so each time.
            self._rewritten.add(id_)
            return MessageCompleted(id_, whole, None)
        return MessageDelta(id_, more) if more or stage == "updated" else MessageStarted(id_, None)

    def _reasoning(self, stage: Stage, id_: str, item: JsonObject) -> TurnEvent:
        if stage == "completed":
            return ReasoningCompleted(id_, (text(item, "text"),))
        more = self._more(id_, text_or_none(item, "text") or "")
        return ReasoningDelta(id_, 0, more) if more else Activity()

    def _command(self, stage: Stage, id_: str, item: JsonObject) -> TurnEvent:
        output = text_or_none(item, "aggregated_output") or ""
        match stage:
            case "started":
                return CommandStarted(id_, text(item, "command"), "")
            case "updated":
                more = self._more(id_, output)
                return CommandOutput(id_, more) if more else Activity()
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

    def _more(self, id_: str, whole: str) -> str | None:
        """Return what a text that is said as a whole each time has more than before; None where it was rewritten."""
        before = self._grown.get(id_, "")
        self._grown[id_] = whole
        return whole[len(before) :] if whole.startswith(before) else None


def _object_in(line: bytes | str) -> JsonObject | None:
    try:
        # Of a key that comes twice the last counts: codex's searches have two ids, the same ones in every line.
        value = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_number(word: str) -> JsonValue:
    raise ValueError(f"{word} is no JSON")


def _beyond(fields: JsonObject, *known: str) -> JsonObject:
    return {key: value for key, value in fields.items() if key != "type" and key not in known}


def _beyond_inside(name: str, table: JsonObject, known: str) -> JsonObject:
    """Return what a table has beside what is read of it: an MCP tool's result has its content as a structure too."""
    more: JsonObject = {key: value for key, value in table.items() if key != known and value}
    return {name: more} if more else {}


def _beyond_listed(item: JsonObject, kind: str) -> JsonObject:
    """Return the item's list as it came, where something in it has more fields than are read."""
    name, known = _LISTED.get(kind, ("", frozenset()))
    listed = item.get(name)
    if not isinstance(listed, list):
        return {}
    return {name: listed} if any(isinstance(each, dict) and not known.issuperset(each) for each in listed) else {}


_COUNTS: Final = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_output_tokens")


def token_count(told: JsonObject) -> TokenUsage:
    """Return the tokens that codex tells, in a line or in a session's file; a number that is missing is 0."""
    given, cached, output, reasoning = (number_or_none(told, key) or 0 for key in _COUNTS)
    return TokenUsage(given + output, given, cached, output, reasoning)


def _usage(usage: JsonObject) -> TokensUpdated:
    """Return the tokens of the whole thread so far: what exec tells of a turn holds the turns before it."""
    count = token_count(usage)
    return TokensUpdated(count.total, count.input, count.cached_input, count.output, count.reasoning_output, None)


def _failure(message: str) -> TurnError:
    kind = next((kind for words, kind in _KINDS if words in message), "other")
    status = _STATUS.search(message)
    return TurnError(message, kind, int(status.group(1)) if status else None, None)


def _status(item: JsonObject) -> ItemStatus:
    word = text_or_none(item, "status") or "unknown"
    return ItemStatus.IN_PROGRESS if word == "in_progress" else ItemStatus(word)


def _changes(item: JsonObject) -> tuple[FilePatch, ...]:
    return tuple(
        FilePatch(text(each, "path"), text_or_none(each, "kind") or "unknown", text_or_none(each, "diff") or "")
        for each in objects(item, "changes")
    )


def _changing(id_: str, item: JsonObject) -> TurnEvent:
    return PatchStarted(id_, _changes(item))


def _changed(id_: str, item: JsonObject) -> TurnEvent:
    return PatchCompleted(id_, _changes(item), _status(item))


def _tool_started(id_: str, item: JsonObject) -> TurnEvent:
    return ToolCallStarted(id_, text_or_none(item, "server"), text(item, "tool"), item.get("arguments"))


def _tool_finished(id_: str, item: JsonObject) -> TurnEvent:
    status = _status(item)
    refusal = text_or_none(nested_or_empty(item, "error"), "message")
    result = content_text(objects(nested_or_empty(item, "result"), "content"))
    return ToolCallCompleted(
        id_,
        text_or_none(item, "server"),
        text(item, "tool"),
        item.get("arguments"),
        result if refusal is None else refusal,
        refusal is not None or status is not ItemStatus.COMPLETED,
        status,
        None,
    )


def _searched(id_: str, item: JsonObject) -> TurnEvent:
    return WebSearchCompleted(id_, text_or_none(item, "query") or "")


_OLDER_NAMES: Final = {"assistant_message": "agent_message"}

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
"""The types of items, and the fields that are read of each."""

_GIVEN: Final[dict[str, tuple[str, ...]]] = {
    "command_execution": ("command",),
    "file_change": ("changes",),
    "mcp_tool_call": ("server", "tool", "arguments"),
}
"""The fields that say what a tool is given."""

_LISTED: Final[dict[str, tuple[str, frozenset[str]]]] = {
    "file_change": ("changes", frozenset({"path", "kind", "diff"})),
    "todo_list": ("items", frozenset({"text", "completed"})),
}
"""Lists in items, and the fields that are read of what is in them."""

_OF_ITEM: Final[dict[str, dict[Stage, Callable[[str, JsonObject], TurnEvent]]]] = {
    "file_change": {"started": _changing, "completed": _changed},
    "mcp_tool_call": {"started": _tool_started, "completed": _tool_finished},
    # When a search begins, codex does not know yet what for.
    "web_search": {"completed": _searched},
}
