"""Compares every row of the tables in docs/events.md with the code, for both backends."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Final

import pytest

from codex_workspace.backends.codex_exec.runtime import ExecConverter
from codex_workspace.protocol.app_server_reader import TurnReader
from codex_workspace.protocol.jsonrpc import Notification, Request
from codex_workspace.protocol.server_requests import read_question
from codex_workspace.runtimes import events as agent_events
from codex_workspace.runtimes.convert import EventConverter, approval_data
from codex_workspace.runtimes.events import (
    EVENT_TYPES,
    AgentEvent,
    Approval,
    FileChange,
    FileDiff,
    Plan,
    PlanStep,
    ToolResult,
    ToolUse,
)
from codex_workspace.runtimes.markdown import MAX_LISTED, MAX_SHOWN_CHARS, MAX_SHOWN_LINES, markdown
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject

EVENTS: Final = ROOT / "docs" / "events.md"
CODE: Final = re.compile(r"`([^`]+)`")


def table(name: str) -> list[list[str]]:
    _, _, behind = EVENTS.read_text().partition(f"<!-- table: {name} -->\n")
    lines = behind[: behind.find("\n\n")].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


ROWS: Final = [
    (CODE.findall(event), CODE.findall(server), CODE.findall(line)) for event, server, line in table("mapping")
]
SERVER: Final = sorted({(name, event[0] if event else "") for event, names, _ in ROWS for name in names})
EXEC: Final = sorted({(name, event[0] if event else "") for event, _, names in ROWS for name in names})

SERVER_ITEMS: Final[Mapping[str, "JsonObject"]] = {
    "agentMessage": {"text": "hello"},
    "reasoning": {"summary": ["hm"]},
    "commandExecution": {"command": "ls", "cwd": "/", "aggregatedOutput": "a", "exitCode": 0, "status": "completed"},
    "fileChange": {"changes": [{"path": "a", "kind": {"type": "add"}, "diff": "x"}], "status": "completed"},
    "mcpToolCall": {"server": "s", "tool": "t", "arguments": {}, "status": "completed"},
    "dynamicToolCall": {"tool": "t", "arguments": {}, "success": True, "status": "completed"},
    "webSearch": {"query": "q"},
    "unheardOf": {},
}
SERVER_PARAMS: Final[Mapping[str, "JsonObject"]] = {
    "item/agentMessage/delta": {"itemId": "i", "delta": "x"},
    "item/reasoning/summaryTextDelta": {"itemId": "i", "delta": "x"},
    "item/reasoning/textDelta": {"itemId": "i", "delta": "x"},
    "item/commandExecution/outputDelta": {"itemId": "i", "delta": "x"},
    "turn/plan/updated": {"plan": [{"step": "a", "status": "pending"}]},
    "turn/diff/updated": {"diff": "x"},
    "thread/tokenUsage/updated": {"tokenUsage": {"total": {"inputTokens": 3}}},
    "error": {"error": {"message": "no"}},
    "warning": {"message": "no"},
    "turn/started": {"turn": {"id": "u"}},
    "turn/completed": {"turn": {"id": "u", "status": "completed"}},
    "thread/status/changed": {"status": {"type": "idle"}},
}
WITHOUT_TURN: Final = {"turn/started", "turn/completed", "thread/status/changed"}
"""Notifications without a separate `turnId`."""

REQUESTS: Final[Mapping[str, "JsonObject"]] = {
    "item/commandExecution/requestApproval": {"command": "ls"},
    "item/fileChange/requestApproval": {"itemId": "i"},
    "item/permissions/requestApproval": {"permissions": {"network": {"enabled": True}}},
    "item/tool/requestUserInput": {"questions": [{"id": "q", "header": "h", "question": "?", "options": None}]},
    "mcpServer/elicitation/request": {"serverName": "s", "mode": "url", "message": "m", "url": "https://example.com"},
}
EXEC_ITEMS: Final[Mapping[str, "JsonObject"]] = {
    "agent_message": {"text": "hello"},
    "reasoning": {"text": "hm"},
    "command_execution": {"command": "ls", "aggregated_output": "a", "exit_code": 0, "status": "completed"},
    "file_change": {"changes": [{"path": "a", "kind": "add"}], "status": "completed"},
    "mcp_tool_call": {"server": "s", "tool": "t", "arguments": {}, "status": "completed"},
    "web_search": {"query": "q"},
    "todo_list": {"items": [{"text": "a", "completed": False}]},
    "error": {"message": "careful"},
    "unheard_of": {},
}
EXEC_LINES: Final[Mapping[str, "JsonObject"]] = {
    "thread.started": {"thread_id": "t"},
    "turn.started": {},
    "turn.completed": {"usage": {"input_tokens": 3}},
    "turn.failed": {"error": {"message": "no"}},
    "error": {"message": "no"},
    "unheard.of": {},
}


def of_server(name: str) -> list[AgentEvent]:
    """Return the events for one notification or request of the app-server."""
    stream = EventConverter()
    method, _, kind = name.partition(" ")
    if method in REQUESTS:
        question = read_question(Request(0, method, {"threadId": "t", "turnId": "u", **REQUESTS[method]}))
        assert question is not None
        return [Approval("0", approval_data(question))]
    params = {"item": {"id": "i", "type": kind, **SERVER_ITEMS[kind]}} if kind else SERVER_PARAMS[method]
    ids: JsonObject = {"threadId": "t"} if method in WITHOUT_TURN else {"threadId": "t", "turnId": "u"}
    event = TurnReader("t", "u").read(Notification(method, {**ids, **params}))
    return [*(stream.convert(event) if event else []), *(stream.finish() if stream.ended else [])]


def of_exec(name: str) -> list[AgentEvent]:
    """Return the events for one line of `codex exec`, and for the end of the run if the line ends it."""
    kind, _, item = name.partition(" ")
    if item:
        fields: JsonObject = {"item": {"id": "i", "type": item, **EXEC_ITEMS[item]}}
    else:
        fields = EXEC_LINES[kind]
    lines = ExecConverter()
    events = lines.feed(json.dumps({"type": kind, **fields}))
    return events + (lines.finish() if lines.ended else [])


@pytest.mark.parametrize(("name", "event"), SERVER)
def test_app_server_notification_becomes_the_documented_event(name: str, event: str) -> None:
    types = {each.TYPE for each in of_server(name)}
    assert types == {row for words, row in SERVER if words == name} - {""} | extra_uses(name, types)
    assert not event or event in types


@pytest.mark.parametrize(("name", "event"), EXEC)
def test_exec_line_becomes_the_documented_event(name: str, event: str) -> None:
    types = {each.TYPE for each in of_exec(name)}
    assert types == {row for words, row in EXEC if words == name} - {""} | extra_uses(name, types)
    assert not event or event in types


def extra_uses(name: str, types: set[str]) -> set[str]:
    """Return the `tool_use` that is created for an end without a start, because each line is tested alone."""
    return {"tool_use"} & types if "completed" in name else set()


def test_every_event_type_has_a_row() -> None:
    assert [event[0] for event, _, _ in ROWS if event] == list(EVENT_TYPES)
    assert [CODE.findall(row[0])[0] for row in table("fields")] == list(EVENT_TYPES)


def test_mapping_table_lists_every_known_item() -> None:
    assert {name.partition(" ")[2] for name, _ in EXEC} >= set(EXEC_ITEMS)
    assert {name for name, _ in EXEC} >= set(EXEC_LINES)
    assert {name.partition(" ")[2] for name, _ in SERVER} >= set(SERVER_ITEMS)
    assert {name for name, _ in SERVER} >= set(SERVER_PARAMS) | set(REQUESTS)


@pytest.mark.parametrize("row", table("fields"), ids=lambda row: CODE.findall(row[0])[0])
def test_documented_fields_match_the_event(row: list[str]) -> None:
    kinds = {
        each.TYPE: each for each in vars(agent_events).values() if hasattr(each, "TYPE") and each.__name__[0] != "_"
    }
    (type_,) = CODE.findall(row[0])
    assert CODE.findall(row[1]) == [each.name for each in fields(kinds[type_])]


def test_tool_names_match_the_table() -> None:
    used: set[tuple[str, str]] = set()
    changed: JsonObject = {"id": "e", "type": "file_change", "changes": [{"path": "a", "kind": "update"}]}
    lines = [{"id": kind, "type": kind, **item} for kind, item in EXEC_ITEMS.items()] + [changed]
    run = ExecConverter()
    for each in lines:
        for event in run.feed(json.dumps({"type": "item.completed", "item": each})):
            if isinstance(event, ToolUse):
                used.add((event.tool, event.name))
    rows = {tuple(CODE.findall(tool) + CODE.findall(name)) for _, tool, name in table("tools")}
    assert rows - {()} == used - {("t", "t")}
    assert ("t", "t") in used


FOR_PEOPLE: Final[tuple[AgentEvent, ...]] = (
    ToolUse("c", "Bash", "command_execution", {"command": "/bin/bash -lc 'make test'"}),
    ToolResult("c", "tests/test_sum.py:3: AssertionError\n", is_error=True, exit_code=2),
    ToolUse("f", "Edit", "file_change", {"changes": [{"path": "sum.py", "kind": "update"}]}),
    FileChange("f", (FileDiff("sum.py", "update", "@@ -1 +1 @@\n-a - b\n+a + b\n"),)),
    ToolResult("f", "", is_error=False),
    ToolUse("w", "WebSearch", "web_search", {"query": "what is a sum"}),
    ToolResult("w", "", is_error=False),
    ToolUse("t", "now", "now", {"zone": "UTC"}, "clock"),
    ToolResult("t", "12:00", is_error=False),
    Plan((PlanStep("find the error", "completed"), PlanStep("test again", "in_progress"))),
)


def test_rendered_events_match_the_document() -> None:
    text = EVENTS.read_text()
    _, _, behind = text.partition("<!-- for people -->\n````markdown\n")
    assert behind.partition("\n````\n")[0] == "\n\n".join(filter(None, map(markdown, FOR_PEOPLE)))
    prose = " ".join(text.split())
    assert f"At most {MAX_SHOWN_CHARS:,} characters and {MAX_SHOWN_LINES} lines of" in prose
    assert f"at most {MAX_LISTED} files or steps" in prose
