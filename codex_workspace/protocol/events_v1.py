"""Codex's older dialect of notifications, `codex/event/*`, said in the newer one.

Codex 0.72 sends both for the same thing, the older one first; which of them is heard is left to `events`. Later codexes
send none of it. Shapes: recordings 0.72.
"""

import base64
import shlex
from collections.abc import Callable
from typing import Final

from codex_workspace.common.values import (
    InvalidField,
    JsonObject,
    JsonValue,
    nested,
    nested_or_empty,
    number,
    number_or_none,
    objects,
    text,
    text_or_none,
    texts,
)
from codex_workspace.protocol.jsonrpc import Notification

PREFIX: Final = "codex/event/"

_QUIET: Final = frozenset(
    {
        "agent_message",  # the same as item_completed, without the item's id; so are the deltas and the reasoning
        "agent_message_delta",
        "agent_reasoning",
        "agent_reasoning_delta",
        "agent_reasoning_raw_content",
        "agent_reasoning_raw_content_delta",
        "agent_reasoning_section_break",
        "apply_patch_approval_request",  # asked by a request too
        "background_event",
        "context_compacted",
        "deprecation_notice",
        "elicitation_request",
        "entered_review_mode",
        "exec_approval_request",
        "exited_review_mode",
        "mcp_startup_complete",
        "mcp_startup_update",
        "raw_response_item",
        "terminal_interaction",
        "user_message",
        "view_image_tool_call",
        "web_search_begin",  # the same as item_started and item_completed
        "web_search_end",
    }
)


def belongs(notification: Notification, thread_id: str, turn_id: str) -> bool:
    """Tell whether a `codex/event/*` notification is of this turn."""
    params = notification.params
    return params.get("conversationId") == thread_id and params.get("id") == turn_id


class Interpreter:
    """Says the older dialect of one turn in the newer one."""

    def __init__(self) -> None:
        self._patches: set[str] = set()
        self._error: JsonObject | None = None

    def interpret(self, notification: Notification) -> Notification | None:
        """Return the same in the newer dialect; None where there is nothing to show.

        What is not known comes back as it is.

        Raises:
            OddShape: it is not of the known shape.
        """
        event = notification.method.removeprefix(PREFIX)
        if event in _QUIET:
            return None
        say = _SENTENCES.get(event)
        if say is None:
            return notification
        said = say(self, nested(notification.params, "msg"))
        if said is None:
            return None
        method, fields = said
        thread, turn = text(notification.params, "conversationId"), text(notification.params, "id")
        if method in {"turn/started", "turn/completed"}:
            return Notification(method, {"threadId": thread, "turn": {"id": turn, **fields}})
        return Notification(method, {"threadId": thread, "turnId": turn, **fields})

    def _task_started(self, _: JsonObject) -> "Sentence":
        return "turn/started", {}

    def _task_complete(self, _: JsonObject) -> "Sentence":
        status = "failed" if self._error is not None else "completed"
        return "turn/completed", {"status": status, "error": self._error}

    def _turn_aborted(self, _: JsonObject) -> "Sentence":
        return "turn/completed", {"status": "interrupted", "error": None}

    def _errored(self, message: JsonObject) -> "Sentence":
        self._error = _error(message)
        return "error", {"error": self._error, "willRetry": False}

    def _stream_errored(self, message: JsonObject) -> "Sentence":
        return "error", {"error": _error(message), "willRetry": True}

    def _warned(self, message: JsonObject) -> "Sentence":
        return "warning", {"message": text(message, "message")}

    def _item_started(self, message: JsonObject) -> "Sentence":
        return "item/started", {"item": _item(nested(message, "item"))}

    def _item_completed(self, message: JsonObject) -> "Sentence":
        return "item/completed", {"item": _item(nested(message, "item"))}

    def _text_delta(self, message: JsonObject) -> "Sentence":
        return "item/agentMessage/delta", {"itemId": text(message, "item_id"), "delta": text(message, "delta")}

    def _reasoning_delta(self, message: JsonObject) -> "Sentence":
        section = number_or_none(message, "summary_index") or 0
        fields: JsonObject = {
            "itemId": text(message, "item_id"),
            "delta": text(message, "delta"),
            "summaryIndex": section,
        }
        return "item/reasoning/summaryTextDelta", fields

    def _command_began(self, message: JsonObject) -> "Sentence":
        return "item/started", {"item": {**_command(message), "status": "inProgress"}}

    def _command_ended(self, message: JsonObject) -> "Sentence":
        exit_code = number_or_none(message, "exit_code")
        item: JsonObject = {
            **_command(message),
            "status": "completed" if exit_code == 0 else "failed",
            "aggregatedOutput": text_or_none(message, "aggregated_output"),
            "exitCode": exit_code,
            "durationMs": _duration_ms(message),
        }
        return "item/completed", {"item": item}

    def _output(self, message: JsonObject) -> "Sentence | None":
        call = text(message, "call_id")
        if call in self._patches:
            return None
        try:
            output = base64.b64decode(text(message, "chunk"), validate=True).decode("utf-8", "replace")
        except ValueError as error:
            raise InvalidField("chunk") from error
        return "item/commandExecution/outputDelta", {"itemId": call, "delta": output}

    def _patch_began(self, message: JsonObject) -> "Sentence":
        self._patches.add(text(message, "call_id"))
        return "item/started", {"item": {**_patch(message), "status": "inProgress"}}

    def _patch_ended(self, message: JsonObject) -> "Sentence":
        status = "completed" if message.get("success") is True else "failed"
        return "item/completed", {"item": {**_patch(message), "status": status}}

    def _diffed(self, message: JsonObject) -> "Sentence":
        return "turn/diff/updated", {"diff": text(message, "unified_diff")}

    def _tool_began(self, message: JsonObject) -> "Sentence":
        return "item/started", {"item": {**_tool(message), "status": "inProgress"}}

    def _tool_ended(self, message: JsonObject) -> "Sentence":
        result = nested_or_empty(message, "result")
        refusal = text_or_none(result, "Err")
        item: JsonObject = {
            **_tool(message),
            "status": "completed" if refusal is None and "Ok" in result else "failed",
            "result": result.get("Ok"),
            "error": None if refusal is None else {"message": refusal},
            "durationMs": _duration_ms(message),
        }
        return "item/completed", {"item": item}

    def _planned(self, message: JsonObject) -> "Sentence":
        plan: list[JsonValue] = [
            {"step": text(step, "step"), "status": _camel(text(step, "status"))} for step in objects(message, "plan")
        ]
        return "turn/plan/updated", {"plan": plan, "explanation": message.get("explanation")}

    def _counted(self, message: JsonObject) -> "Sentence | None":
        if message.get("info") is None:
            return None
        info = nested(message, "info")
        usage: JsonObject = {
            "total": _camel_keys(nested(info, "total_token_usage")),
            "last": _camel_keys(nested_or_empty(info, "last_token_usage")),
            "modelContextWindow": info.get("model_context_window"),
        }
        return "thread/tokenUsage/updated", {"tokenUsage": usage}


Sentence = tuple[str, JsonObject]
"""The method of a notification in the newer dialect, and its params without the ids."""

_SENTENCES: Final[dict[str, Callable[[Interpreter, JsonObject], Sentence | None]]] = {
    "task_started": Interpreter._task_started,
    "task_complete": Interpreter._task_complete,
    "turn_aborted": Interpreter._turn_aborted,
    "error": Interpreter._errored,
    "stream_error": Interpreter._stream_errored,
    "warning": Interpreter._warned,
    "item_started": Interpreter._item_started,
    "item_completed": Interpreter._item_completed,
    "agent_message_content_delta": Interpreter._text_delta,
    "reasoning_content_delta": Interpreter._reasoning_delta,
    "exec_command_begin": Interpreter._command_began,
    "exec_command_end": Interpreter._command_ended,
    "exec_command_output_delta": Interpreter._output,
    "patch_apply_begin": Interpreter._patch_began,
    "patch_apply_end": Interpreter._patch_ended,
    "turn_diff": Interpreter._diffed,
    "mcp_tool_call_begin": Interpreter._tool_began,
    "mcp_tool_call_end": Interpreter._tool_ended,
    "plan_update": Interpreter._planned,
    "token_count": Interpreter._counted,
}


def _item(item: JsonObject) -> JsonObject:
    kind = text(item, "type")
    newer: JsonObject = {**item, "type": kind[:1].lower() + kind[1:]}
    match kind:
        case "AgentMessage":
            newer["text"] = "".join(text(part, "text") for part in objects(item, "content"))
        case "Reasoning":
            newer["summary"], newer["content"] = item.get("summary_text"), item.get("raw_content")
        case _:
            pass
    return newer


def _error(message: JsonObject) -> JsonObject:
    info = message.get("codex_error_info")
    if isinstance(info, str):
        info = _camel(info)
    elif isinstance(info, dict):
        info = {_camel(kind): _camel_keys(nested_or_empty(info, kind)) for kind in info}
    return {"message": text(message, "message"), "codexErrorInfo": info}


def _command(message: JsonObject) -> JsonObject:
    return {
        "type": "commandExecution",
        "id": text(message, "call_id"),
        "command": shlex.join(texts(message, "command")),
        "cwd": text(message, "cwd"),
    }


def _patch(message: JsonObject) -> JsonObject:
    changes: list[JsonValue] = [
        _change(path, nested(nested(message, "changes"), path)) for path in nested(message, "changes")
    ]
    return {"type": "fileChange", "id": text(message, "call_id"), "changes": changes}


def _change(path: str, change: JsonObject) -> JsonObject:
    diff = change.get("unified_diff", change.get("content"))
    return {"path": path, "kind": {"type": change.get("type")}, "diff": diff}


def _tool(message: JsonObject) -> JsonObject:
    invocation = nested(message, "invocation")
    return {
        "type": "mcpToolCall",
        "id": text(message, "call_id"),
        "server": text(invocation, "server"),
        "tool": text(invocation, "tool"),
        "arguments": invocation.get("arguments"),
    }


def _duration_ms(message: JsonObject) -> int:
    duration = nested(message, "duration")
    return number(duration, "secs") * 1000 + number(duration, "nanos") // 1_000_000


def _camel_keys(fields: JsonObject) -> JsonObject:
    return {_camel(key): value for key, value in fields.items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
