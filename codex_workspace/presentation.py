"""Agent events as Markdown, for people: what a tool is given and what came of it. docs/events.md explains the stream.

Whatever an output holds, it stays inside its fence; what is left out of a long one is said.
"""

import json
import re
import shlex
from collections.abc import Iterable
from typing import Final, assert_never

from codex_workspace.agent_events import (
    AgentEvent,
    Approval,
    Done,
    Error,
    FileChange,
    Other,
    Plan,
    Reasoning,
    Text,
    ToolResult,
    ToolUse,
    Usage,
)
from codex_workspace.prompts import one_line, visible
from codex_workspace.tool_names import COMMAND, FILES, SEARCH
from codex_workspace.wire import JsonObject, JsonValue

MAX_SHOWN_CHARS: Final = 4000
"""Of a command, an output or a tool's parameters, this much is shown."""

MAX_UNWRAPPED_CHARS: Final = 20_000
"""A longer command is shown as codex runs it: taking it apart takes 1.5 µs for each character."""

MAX_LISTED: Final = 50
"""Of changed files and of a plan's steps, so many are listed."""

_SHELLS: Final = frozenset({"bash", "zsh", "sh"})
_MARKS: Final = {"completed": "[x]", "in_progress": "[ ] *now:*"}


def markdown(event: AgentEvent) -> str:
    """Return an event as Markdown; "" for one of which people see nothing."""
    match event:
        case Text(text=text):
            return text
        case Reasoning(text=text):
            return "\n".join(f"> {line}" for line in visible(text).split("\n"))
        case ToolUse():
            return _use(event)
        case ToolResult(output=output, is_error=is_error, exit_code=exit_code):
            return result(output, is_error=is_error, exit_code=exit_code)
        case FileChange(changes=changes):
            return _listed([f"{one_line(each.kind)} {code(each.path)}" for each in changes])
        case Plan(steps=steps, explanation=explanation):
            told = f"{_plain(explanation)}\n\n" if explanation else ""
            return told + _listed([f"{_MARKS.get(each.status, '[ ]')} {_plain(each.text)}" for each in steps])
        case Error(message=message, code=word, fatal=fatal):
            return f"**{'Failed' if fatal else 'Note'}** ({one_line(word)}): {_plain(message)}"
        case Approval(about=about):
            return f"**Waits for an answer**\n\n{_parameters(about)}"
        case Usage() | Other() | Done():
            return ""
        case _:
            assert_never(event)


def command(line: str) -> str:
    """Return a command as a person would have typed it, in a fence."""
    return fenced(unwrapped(line), "bash")


def named(name: str, server: str | None) -> str:
    """Return a tool's name, and whose it is."""
    return f"**{_plain(name)}** ({_plain(server)})" if server else f"**{_plain(name)}**"


def result(output: str, *, is_error: bool, exit_code: int | None = None, failed: str = "Failed") -> str:
    """Return what came of a tool: its output in a fence, and for an error, that it is one, by the word `failed`."""
    shown = fenced(output) if output.strip() else ""
    if not is_error:
        return shown or "*No output.*"
    how = "" if exit_code is None else f" (exit code {exit_code})"
    return f"**{failed}**{how}\n\n{shown}".rstrip()


def fenced(text: str, language: str = "", max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return a text in a fence that is longer than any in it, with its middle left out where it is long.

    What is not seen is shown as an escape, which is longer than the character that it stands for.
    """
    shown = visible(_cut(text.removesuffix("\n"), max_chars))
    fence = "`" * (_longest_run(shown, 2) + 1)
    return f"{fence}{language}\n{shown}\n{fence}"


def code(text: str) -> str:
    """Return a text of one line as code, whatever is in it."""
    line = one_line(text)
    ticks = "`" * (_longest_run(line, 0) + 1)
    edge = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{edge}{line}{edge}{ticks}"


def unwrapped(line: str) -> str:
    """Return what a person would have typed: codex runs `ls` as `/bin/bash -lc ls`."""
    if len(line) > MAX_UNWRAPPED_CHARS:
        return line
    try:
        words = shlex.split(line)
    except ValueError:
        return line
    match words:
        case [shell, "-lc" | "-c", script] if shell.rsplit("/", 1)[-1] in _SHELLS:
            return script
        case _:
            return line


def _use(event: ToolUse) -> str:
    head = named(event.name, event.server)
    match event:
        case ToolUse(tool=tool, server=None, input={"command": str(line)}) if tool == COMMAND:
            return f"{head}\n\n{command(line)}"
        case ToolUse(tool=tool, server=None, input={"changes": list(changes)}) if tool == FILES:
            return f"{head}\n\n{_listed([_change(each) for each in changes])}".rstrip()
        case ToolUse(tool=tool, server=None, input={"query": str(query)}) if tool == SEARCH:
            return f"{head} {code(query)}" if query.strip() else head
        case _:
            return f"{head}\n\n{_parameters(event.input)}" if event.input else head


def _change(change: JsonValue) -> str:
    match change:
        case {"path": str(path), "kind": str(kind)}:
            return f"{one_line(kind)} {code(path)}"
        case _:
            return "a file"


def _parameters(given: JsonObject) -> str:
    return fenced(json.dumps(given, indent=2, ensure_ascii=False), "json")


def _listed(lines: Iterable[str]) -> str:
    """Return the lines as a list."""
    lines = list(lines)
    more = len(lines) - MAX_LISTED
    shown = lines[:MAX_LISTED] + ([f"… and {more} more"] if more > 0 else [])
    return "\n".join(f"- {line}" for line in shown)


def _plain(name: str) -> str:
    """Return words of codex's or a server's on one line, without what Markdown would take for its own."""
    return re.sub(r"^#|[\\`*_\[\]<>~]", r"\\\g<0>", one_line(name))


def _cut(text: str, max_chars: int) -> str:
    """Leave out a long text's middle: what a command prints last is what matters most."""
    if len(text) <= max_chars:
        return text
    head, tail = max_chars // 4, max_chars - max_chars // 4
    return f"{text[:head]}\n[… {len(text) - head - tail} characters left out …]\n{text[-tail:]}"


def _longest_run(text: str, at_least: int) -> int:
    return max(at_least, *(len(run) for run in re.findall(r"`+", text)), 0)
