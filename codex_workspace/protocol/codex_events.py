"""What codex's notifications mean: the typed events of one turn.

Here are the names of codex's notifications and items. The `codex/event/*` dialect of codex 0.72 is left to `events_v1`,
a turn's deadlines and open items to the conversation. Shapes: recordings 0.72 to 0.169.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
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
    texts,
)
from codex_workspace.protocol import events_v1
from codex_workspace.protocol.jsonrpc import Notification

Phase: TypeAlias = Literal["commentary", "final_answer"] | None
"""What the model said a message is for; None where it said nothing, which is common."""

TurnStatus: TypeAlias = Literal["completed", "interrupted", "failed"]


class ItemStatus(StrEnum):
    """How far an item is; a word of codex's that is not listed here is read as `UNKNOWN`."""

    IN_PROGRESS = "inProgress"
    COMPLETED = "completed"
    FAILED = "failed"
    DECLINED = "declined"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> "ItemStatus":
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """Codex works on the turn; from now on it accepts an interrupt."""


@dataclass(frozen=True, slots=True)
class MessageStarted:
    """The agent begins the message `item_id`."""

    item_id: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """A further piece of the agent's message `item_id`."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class MessageCompleted:
    """The whole of the agent's message `item_id`; replaces its deltas."""

    item_id: str
    text: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A further piece of section `section` (from 0) of the reasoning `item_id`."""

    item_id: str
    section: int
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningCompleted:
    """The whole of the reasoning `item_id`: the sections of its summary, or its raw text where there is no summary."""

    item_id: str
    sections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommandStarted:
    """Codex runs a shell command, or is about to ask whether it may."""

    item_id: str
    command: str
    cwd: str


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """A further piece of a command's output. Codex may send none of them: `CommandCompleted.output` is the whole."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class CommandCompleted:
    """A command's end; without `exit_code` it did not run to its own end.

    `output` is the whole, at most 1 MiB from codex 0.130 on.
    """

    item_id: str
    command: str
    cwd: str
    output: str
    exit_code: int | None
    status: ItemStatus
    duration_ms: int | None


@dataclass(frozen=True, slots=True)
class FilePatch:
    """A change of one file; `kind` is add, delete or update.

    `diff` is a unified diff of an updated file, and the whole text of an added or deleted one.
    """

    path: str
    kind: str
    diff: str


@dataclass(frozen=True, slots=True)
class PatchStarted:
    """Codex changes files, or is about to ask whether it may."""

    item_id: str
    changes: tuple[FilePatch, ...]


@dataclass(frozen=True, slots=True)
class PatchCompleted:
    """The end of a change of files; nothing was changed unless `status` is completed."""

    item_id: str
    changes: tuple[FilePatch, ...]
    status: ItemStatus


@dataclass(frozen=True, slots=True)
class DiffUpdated:
    """All that the turn has changed so far, as one unified diff."""

    diff: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """Codex calls a tool of the MCP server (or the namespace of dynamic tools) `server`; None where it is in none."""

    item_id: str
    server: str | None
    tool: str
    arguments: JsonValue


@dataclass(frozen=True, slots=True)
class ToolCallCompleted:
    """A tool's end; `result` is its text, or why it failed."""

    item_id: str
    server: str | None
    tool: str
    arguments: JsonValue
    result: str
    is_error: bool
    status: ItemStatus
    duration_ms: int | None


@dataclass(frozen=True, slots=True)
class WebSearchCompleted:
    """Codex searched the web."""

    item_id: str
    query: str


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One step of the agent's plan; `status` is codex's word: pending, inProgress, completed."""

    text: str
    status: str


@dataclass(frozen=True, slots=True)
class PlanUpdated:
    """The agent's plan; replaces the one before."""

    steps: tuple[PlanItem, ...]
    explanation: str | None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Numbers of tokens; `cached_input` is part of `input`, `reasoning_output` of `output`."""

    total: int = 0
    input: int = 0
    cached_input: int = 0
    output: int = 0
    reasoning_output: int = 0

    def minus(self, other: "TokenUsage") -> "TokenUsage":
        """Return how many more tokens these are than `other`."""
        return TokenUsage(
            self.total - other.total,
            self.input - other.input,
            self.cached_input - other.cached_input,
            self.output - other.output,
            self.reasoning_output - other.reasoning_output,
        )


@dataclass(frozen=True, slots=True)
class TokensUpdated:
    """The tokens of the whole thread so far, and how many fit into the model's context.

    `last` is the newest model call alone. It is not for adding up: codex up to 0.130 says the same call twice.
    """

    total: int
    input: int
    cached_input: int
    output: int
    reasoning_output: int
    context_window: int | None
    last: TokenUsage = TokenUsage()

    @property
    def thread(self) -> TokenUsage:
        """The tokens of the whole thread so far, as one value."""
        return TokenUsage(self.total, self.input, self.cached_input, self.output, self.reasoning_output)


@dataclass(frozen=True, slots=True)
class TurnError:
    """Why a turn failed; `kind` is codex's own word, such as usageLimitExceeded (other where it has none)."""

    message: str
    kind: str
    http_status: int | None
    details: str | None


@dataclass(frozen=True, slots=True)
class WarningReported:
    """Something went wrong and the turn goes on; with `will_retry` codex asks the model again."""

    message: str
    will_retry: bool


@dataclass(frozen=True, slots=True)
class ErrorReported:
    """Codex gave up; usually the failed `TurnCompleted` follows. 0.130 omits it for empty input."""

    failure: TurnError


@dataclass(frozen=True, slots=True)
class ThreadIdle:
    """The thread has no running turn (any more). Comes before the turn's first `ThreadActive` too."""

    system_error: bool


@dataclass(frozen=True, slots=True)
class ThreadActive:
    """The thread has a running turn; `waiting` holds codex's words for what it waits for, such as waitingOnApproval."""

    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TurnCompleted:
    """The turn is over. `last_message` is the agent's last word where codex repeats it here (from 0.163 on)."""

    status: TurnStatus
    failure: TurnError | None
    last_message: MessageCompleted | None


@dataclass(frozen=True, slots=True)
class Activity:
    """The turn goes on, and there is nothing to show."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A notification or type of item that is not known here, or is not of the known shape; of this turn."""

    name: str
    payload: JsonObject


TurnEvent: TypeAlias = (
    TurnStarted
    | MessageStarted
    | MessageDelta
    | MessageCompleted
    | ReasoningDelta
    | ReasoningCompleted
    | CommandStarted
    | CommandOutput
    | CommandCompleted
    | PatchStarted
    | PatchCompleted
    | DiffUpdated
    | ToolCallStarted
    | ToolCallCompleted
    | WebSearchCompleted
    | PlanUpdated
    | TokensUpdated
    | WarningReported
    | ErrorReported
    | ThreadIdle
    | ThreadActive
    | TurnCompleted
    | Activity
    | UnknownEvent
)


class TurnReader:
    """Reads the events of one turn out of all that codex says.

    Both ids are compared: codex 0.72 numbers turns from 0 in every thread. `unknown` counts the names of notifications
    and types of items that were given as `UnknownEvent`.
    """

    def __init__(self, thread_id: str, turn_id: str) -> None:
        self.thread_id: Final = thread_id
        self.turn_id: Final = turn_id
        self.unknown: Final[Counter[str]] = Counter()
        self._v1: events_v1.Interpreter | None = events_v1.Interpreter()

    def read(self, notification: Notification) -> tuple[TurnEvent, ...]:
        """Return what a notification says of this turn; nothing where it is about another one. Never raises.

        The status and the warnings of the thread carry no turn and count as this one's. What is of this turn and not
        known, or not of the known shape, is `UnknownEvent`.
        """
        params = notification.params
        if params.get("threadId") != self.thread_id:
            return self._read_v1(notification)
        # Codex 0.72 says everything in both dialects, but for turns that were begun in the older one: their start and
        # the user's message, which show nothing, come in the older dialect first. So it is heard until the other is.
        self._v1 = None
        return self._read(notification)

    def _read(self, notification: Notification) -> tuple[TurnEvent, ...]:
        method, params = notification.method, notification.params
        try:
            if params.get("turnId") == self.turn_id:
                reader = _OF_TURN.get(method)
                event = UnknownEvent(method, params) if reader is None else reader(params)
            elif method in _OF_WHOLE_TURN:
                turn = nested(params, "turn")
                if turn.get("id") != self.turn_id:
                    return ()
                event = _OF_WHOLE_TURN[method](turn)
            elif method in _OF_THREAD:
                event = _OF_THREAD[method](params)
            else:
                return ()
        except InvalidField:
            event = UnknownEvent(method, params)
        if type(event) is UnknownEvent:
            self.unknown[event.name] += 1
        return (event,)

    def _read_v1(self, notification: Notification) -> tuple[TurnEvent, ...]:
        if self._v1 is None or not notification.method.startswith(events_v1.PREFIX):
            return ()
        if not events_v1.belongs(notification, self.thread_id, self.turn_id):
            return ()
        try:
            newer = self._v1.interpret(notification)
        except InvalidField:
            newer = notification
        if newer is None:
            return (Activity(),)
        if newer is not notification:
            return self._read(newer)
        self.unknown[notification.method] += 1
        return (UnknownEvent(notification.method, notification.params),)


def _text_delta(params: JsonObject) -> TurnEvent:
    return MessageDelta(text(params, "itemId"), text(params, "delta"))


def _reasoning_delta(params: JsonObject) -> TurnEvent:
    return ReasoningDelta(text(params, "itemId"), number_or_none(params, "summaryIndex") or 0, text(params, "delta"))


def _raw_reasoning_delta(params: JsonObject) -> TurnEvent:
    return ReasoningDelta(text(params, "itemId"), number_or_none(params, "contentIndex") or 0, text(params, "delta"))


def _command_output(params: JsonObject) -> TurnEvent:
    return CommandOutput(text(params, "itemId"), text(params, "delta"))


def _diff_updated(params: JsonObject) -> TurnEvent:
    return DiffUpdated(text(params, "diff"))


def _planned(params: JsonObject) -> TurnEvent:
    steps = tuple(PlanItem(text(step, "step"), text(step, "status")) for step in objects(params, "plan"))
    return PlanUpdated(steps, text_or_none(params, "explanation"))


def _usage(params: JsonObject) -> TurnEvent:
    usage = nested(params, "tokenUsage")
    thread = _token_count(nested(usage, "total"))
    return TokensUpdated(
        total=thread.total,
        input=thread.input,
        cached_input=thread.cached_input,
        output=thread.output,
        reasoning_output=thread.reasoning_output,
        context_window=number_or_none(usage, "modelContextWindow"),
        last=_token_count(nested_or_empty(usage, "last")),
    )


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
    return (
        WarningReported(failure.message, will_retry=True) if params.get("willRetry") is True else ErrorReported(failure)
    )


def _failure(error: JsonObject) -> TurnError:
    """Return why a turn failed; codex says the kind as a word, or as the only key of an object that holds details."""
    message = text_or_none(error, "message") or "codex says that the turn failed, and not why"
    details = text_or_none(error, "additionalDetails")
    match error.get("codexErrorInfo"):
        case str(kind):
            return TurnError(message, kind, None, details)
        case dict(info) if info:
            kind = next(iter(info))
            return TurnError(message, kind, number_or_none(nested_or_empty(info, kind), "httpStatusCode"), details)
        case _:
            return TurnError(message, "other", None, details)


def _warned(params: JsonObject) -> TurnEvent:
    return WarningReported(text(params, "message"), will_retry=False)


def _thread_status(params: JsonObject) -> TurnEvent:
    status = nested(params, "status")
    match status.get("type"):
        case "idle" | "notLoaded":
            return ThreadIdle(system_error=False)
        case "systemError":
            return ThreadIdle(system_error=True)
        case "active":
            return ThreadActive(texts(status, "activeFlags"))
        case _:
            raise InvalidField("status.type")


def _turn_started(_: JsonObject) -> TurnEvent:
    return TurnStarted()


def _turn_completed(turn: JsonObject) -> TurnEvent:
    """Return the turn's end; a status that is not known counts as failed, because the turn is over all the same."""
    last_message = _last_message(turn)
    match turn.get("status"):
        case "completed":
            return TurnCompleted("completed", None, last_message)
        case "interrupted":
            return TurnCompleted("interrupted", None, last_message)
        case _:
            return TurnCompleted("failed", _failure(nested_or_empty(turn, "error")), last_message)


def _last_message(turn: JsonObject) -> MessageCompleted | None:
    """Return the agent's last message in a turn; one of an odd shape is left out, for the turn is over all the same."""
    messages = [item for item in objects(turn, "items") if item.get("type") == "agentMessage"]
    try:
        return _said(messages[-1]) if messages else None
    except InvalidField:
        return None


def _item_started(params: JsonObject) -> TurnEvent:
    return _read_item(_STARTED, nested(params, "item"))


def _item_completed(params: JsonObject) -> TurnEvent:
    return _read_item(_COMPLETED, nested(params, "item"))


def _read_item(readers: "dict[str, Callable[[JsonObject], TurnEvent]]", item: JsonObject) -> TurnEvent:
    kind = text(item, "type")
    if kind in _QUIET_ITEMS:
        return Activity()
    return readers[kind](item) if kind in readers else UnknownEvent(kind, item)


def _message_started(item: JsonObject) -> TurnEvent:
    return MessageStarted(text(item, "id"), _phase(item))


def _said(item: JsonObject) -> MessageCompleted:
    return MessageCompleted(text(item, "id"), text(item, "text"), _phase(item))


def _phase(item: JsonObject) -> Phase:
    match item.get("phase"):
        case "commentary":
            return "commentary"
        case "final_answer":
            return "final_answer"
        case _:
            return None


def _reasoned(item: JsonObject) -> TurnEvent:
    return ReasoningCompleted(text(item, "id"), texts(item, "summary") or texts(item, "content"))


def _command_started(item: JsonObject) -> TurnEvent:
    return CommandStarted(text(item, "id"), text(item, "command"), text_or_none(item, "cwd") or "")


def _command_finished(item: JsonObject) -> TurnEvent:
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


def _files_changing(item: JsonObject) -> TurnEvent:
    return PatchStarted(text(item, "id"), _changes(item))


def _files_changed(item: JsonObject) -> TurnEvent:
    return PatchCompleted(text(item, "id"), _changes(item), _status(item))


def _changes(item: JsonObject) -> tuple[FilePatch, ...]:
    return tuple(
        FilePatch(
            text(change, "path"),
            text_or_none(nested_or_empty(change, "kind"), "type") or "unknown",
            text_or_none(change, "diff") or "",
        )
        for change in objects(item, "changes")
    )


def _mcp_tool_started(item: JsonObject) -> TurnEvent:
    return ToolCallStarted(text(item, "id"), text_or_none(item, "server"), text(item, "tool"), item.get("arguments"))


def _mcp_tool_finished(item: JsonObject) -> TurnEvent:
    status = _status(item)
    refusal = text_or_none(nested_or_empty(item, "error"), "message")
    result = content_text(objects(nested_or_empty(item, "result"), "content"))
    return ToolCallCompleted(
        text(item, "id"),
        text_or_none(item, "server"),
        text(item, "tool"),
        item.get("arguments"),
        result if refusal is None else refusal,
        refusal is not None or status is not ItemStatus.COMPLETED,
        status,
        number_or_none(item, "durationMs"),
    )


def _dynamic_tool_started(item: JsonObject) -> TurnEvent:
    return ToolCallStarted(text(item, "id"), text_or_none(item, "namespace"), text(item, "tool"), item.get("arguments"))


def _dynamic_tool_finished(item: JsonObject) -> TurnEvent:
    status = _status(item)
    return ToolCallCompleted(
        text(item, "id"),
        text_or_none(item, "namespace"),
        text(item, "tool"),
        item.get("arguments"),
        content_text(objects(item, "contentItems")),
        item.get("success") is False or status is not ItemStatus.COMPLETED,
        status,
        number_or_none(item, "durationMs"),
    )


def content_text(parts: list[JsonObject]) -> str:
    """Return the text of a tool's content, one part a line; a part without text is named by its type."""
    return "\n".join(_part_text(part) for part in parts)


def _part_text(part: JsonObject) -> str:
    shown = text_or_none(part, "text")
    return shown if shown is not None else f"[{text_or_none(part, 'type') or 'unknown'}]"


def _web_searched(item: JsonObject) -> TurnEvent:
    return WebSearchCompleted(text(item, "id"), text_or_none(item, "query") or "")


def _alive(_: JsonObject) -> TurnEvent:
    return Activity()


_OF_TURN: Final[dict[str, Callable[[JsonObject], TurnEvent]]] = {
    "item/agentMessage/delta": _text_delta,
    "item/started": _item_started,
    "item/completed": _item_completed,
    "item/reasoning/summaryTextDelta": _reasoning_delta,
    "item/reasoning/textDelta": _raw_reasoning_delta,
    "item/commandExecution/outputDelta": _command_output,
    "turn/diff/updated": _diff_updated,
    "turn/plan/updated": _planned,
    "thread/tokenUsage/updated": _usage,
    "error": _error,
    "warning": _warned,
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
        _alive,
    ),
}
"""Notifications that carry the id of a turn: schema of codex 0.163, and what the others' recordings hold beyond it."""

_OF_WHOLE_TURN: Final[dict[str, Callable[[JsonObject], TurnEvent]]] = {
    "turn/started": _turn_started,
    "turn/completed": _turn_completed,
}
"""Notifications that carry the turn itself, and with it its id."""

_OF_THREAD: Final[dict[str, Callable[[JsonObject], TurnEvent]]] = {
    "thread/status/changed": _thread_status,
    "warning": _warned,
}
"""Notifications that carry a thread and no turn; others of this kind are not about turns."""

_STARTED: Final[dict[str, Callable[[JsonObject], TurnEvent]]] = {
    "agentMessage": _message_started,
    "reasoning": _alive,
    "commandExecution": _command_started,
    "fileChange": _files_changing,
    "mcpToolCall": _mcp_tool_started,
    "dynamicToolCall": _dynamic_tool_started,
    "webSearch": _alive,
}

_COMPLETED: Final[dict[str, Callable[[JsonObject], TurnEvent]]] = {
    "agentMessage": _said,
    "reasoning": _reasoned,
    "commandExecution": _command_finished,
    "fileChange": _files_changed,
    "mcpToolCall": _mcp_tool_finished,
    "dynamicToolCall": _dynamic_tool_finished,
    "webSearch": _web_searched,
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
"""Known types of items of which nothing is shown: they show that the turn goes on."""


@dataclass(slots=True)
class _Message:
    pieces: list[str]
    phase: Phase
    whole: bool


class TurnText:
    """The agent's messages of one turn, put together from its events."""

    def __init__(self) -> None:
        self._messages: dict[str, _Message] = {}

    def apply(self, event: TurnEvent) -> None:
        """Take note of an event; those that are not about messages change nothing."""
        match event:
            case MessageDelta(item_id, piece):
                message = self._messages.get(item_id)
                if message is None:
                    self._messages[item_id] = _Message([piece], None, whole=False)
                elif not message.whole:
                    message.pieces.append(piece)
            case MessageStarted(item_id, phase):
                self._messages.setdefault(item_id, _Message([], phase, whole=False))
            case WarningReported(will_retry=True):
                # Codex asks the model again, whose words begin anew under another id.
                self._messages = {id_: each for id_, each in self._messages.items() if each.whole}
            case (
                MessageCompleted(item_id, whole, phase)
                | TurnCompleted(last_message=MessageCompleted(item_id, whole, phase))
            ):
                self._messages[item_id] = _Message([whole], phase, whole=True)
            case _:
                pass

    @property
    def answer(self) -> str:
        """The final answer so far: the last message the model called that, else the last one; "" before any text."""
        said = [message for message in self.messages if message.text]
        final = [message for message in said if message.phase == "final_answer"]
        return (final or said)[-1].text if said else ""

    @property
    def messages(self) -> tuple[MessageCompleted, ...]:
        """The messages in the order they began; one that is not complete has the text that came so far."""
        return tuple(MessageCompleted(id_, "".join(each.pieces), each.phase) for id_, each in self._messages.items())
