"""Which tool an event of a turn is about: its `ToolUse`, or `Plan`, the same for the public stream and for A2A."""

from typing import assert_never

from codex_workspace.agent_events import Plan, PlanStep, ToolUse
from codex_workspace.events import (
    CommandFinished,
    CommandStarted,
    FilesChanged,
    FilesChanging,
    Planned,
    ToolFinished,
    ToolStarted,
    WebSearched,
)
from codex_workspace.tool_names import BASH, COMMAND, FILES, SEARCH, WEB_SEARCH, name_of_change
from codex_workspace.wire import JsonObject, JsonValue

ToolBegun = CommandStarted | FilesChanging | ToolStarted
ToolEnded = CommandFinished | FilesChanged | ToolFinished | WebSearched


def tool_use(event: ToolBegun | ToolEnded, extra: JsonObject | None = None) -> ToolUse:
    """Return what the agent uses; `extra` are the fields of codex's that the event has no place for."""
    extra = extra or {}
    match event:
        case CommandStarted(item, command, cwd) | CommandFinished(item, command, cwd):
            given: JsonObject = {"command": command, **({"cwd": cwd} if cwd else {})}
            return ToolUse(item, BASH, COMMAND, given, extra=extra)
        case FilesChanging(item, changes) | FilesChanged(item, changes):
            listed: list[JsonValue] = [{"path": each.path, "kind": each.kind} for each in changes]
            name = name_of_change(each.kind for each in changes)
            return ToolUse(item, name, FILES, {"changes": listed}, extra=extra)
        case ToolStarted(item, server, tool, arguments) | ToolFinished(item, server, tool, arguments):
            return ToolUse(item, tool, tool, _input(arguments), server, extra=extra)
        case WebSearched(item, query):
            return ToolUse(item, WEB_SEARCH, SEARCH, {"query": query}, extra=extra)
        case _:
            assert_never(event)


def plan_of(event: Planned, extra: JsonObject | None = None) -> Plan:
    """Return the agent's plan; `extra` as for `tool_use`."""
    steps = tuple(PlanStep(each.text, _step_status(each.status)) for each in event.steps)
    return Plan(steps, event.explanation, extra=extra or {})


def _step_status(status: str) -> str:
    return "in_progress" if status == "inProgress" else status


def _input(arguments: JsonValue) -> JsonObject:
    """Return a tool's arguments as an object; models also give texts and lists, and nothing."""
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments is None else {"arguments": arguments}
