"""The notes that tell a task's readers when a tool starts and how it ends; pure."""

import json
from dataclasses import replace
from typing import NamedTuple

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.runtimes import markdown
from codex_workspace.runtimes.events import ToolResult, ToolUse


class Note(NamedTuple):
    """A step of a turn: its kind, Markdown for people, and metadata for programs."""

    kind: str
    text: str
    about: JsonObject


def start_note(use: ToolUse) -> Note | None:
    """Return the note of a tool's start; None for a file change, which is shown when it is made."""
    about = _tool(use)
    match use.kind:
        case "patch":
            return None
        case "search":
            about = {"itemId": use.id, "query": markdown.shortened(str(use.input.get("query")))}
        case "tool":
            about |= {"status": "inProgress", "input": _bounded(use.input)}
        case "command":
            about["status"] = "inProgress"
    return Note(use.kind, markdown.markdown(use), about)


def end_note(use: ToolUse, result: ToolResult, *, follows_start: bool) -> Note | None:
    """Return the note of a tool's end, which names the tool unless it directly follows that of its start.

    None for a search, and for a file change that was made.
    """
    output, is_error, exit_code = result.output, result.is_error, result.exit_code
    about = {**_tool(use), "status": result.status, "durationMs": result.duration_ms}
    failed = markdown.FAILED
    match use.kind:
        case "search":
            return None
        case "patch" if not is_error:
            return None
        case "command":
            about["exitCode"] = exit_code
            failed = markdown.STOPPED if exit_code is None else failed
        case _:
            about["isError"] = is_error
    head = "" if follows_start else f"{markdown.markdown(_without_arguments(use))}\n\n"
    shown = markdown.result(output, is_error=is_error, exit_code=exit_code, failed=failed)
    kind = "command" if use.kind == "command" else "tool"
    return Note(kind, f"{head}{shown}", {**about, "output": markdown.shortened(output)})


def _tool(use: ToolUse) -> JsonObject:
    if use.kind == "command":
        return {"itemId": use.id, "command": use.input.get("command"), "cwd": use.input.get("cwd", "")}
    return {"itemId": use.id, "tool": use.tool, "server": use.server}


def _without_arguments(use: ToolUse) -> ToolUse:
    return replace(use, input={}) if use.kind == "tool" else use


def _bounded(value: JsonValue) -> JsonValue:
    """Return `value`, or its shortened JSON text if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= markdown.MAX_SHOWN_CHARS else markdown.shortened(text)
