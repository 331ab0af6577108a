"""Renders agent events as Markdown for people. docs/events.md shows examples.

Output stays inside its fence whatever it contains, and omissions in long output are marked.
"""

import json
import re
import shlex
import unicodedata
from collections.abc import Iterable
from typing import Final, assert_never

from codex_workspace.common.values import JsonValue
from codex_workspace.protocol.codex_events import FilePatch
from codex_workspace.runtimes.events import (
    COMMAND,
    FILES,
    SEARCH,
    AgentEvent,
    AgentMessage,
    Approval,
    Done,
    Error,
    FileChange,
    FileDiff,
    Plan,
    Reasoning,
    ReasoningSummary,
    RunDiff,
    RunWarning,
    Text,
    ToolOutput,
    ToolResult,
    ToolUse,
    UnmappedEvent,
    Usage,
)

MAX_LINE_CHARS: Final = 1_000
"""The length limit of text that is shown on one line."""

_SHOWN_FORMATS: Final = frozenset({"Cf", "Cs", "Zl", "Zp"})
"""Categories of invisible characters, and of those that change the direction of text, beside control characters."""


def unified_diff(changes: Iterable[FilePatch | FileDiff]) -> str:
    """Return one unified diff of all changes."""
    return "".join(_file_diff(change) for change in changes)


def _file_diff(change: FilePatch | FileDiff) -> str:
    match change.kind:
        case "add":
            return f"--- /dev/null\n+++ {change.path}\n{_all_lines(change.diff, '+')}"
        case "delete":
            return f"--- {change.path}\n+++ /dev/null\n{_all_lines(change.diff, '-')}"
        case _:
            return f"--- {change.path}\n+++ {change.path}\n{_with_newline(change.diff)}"


def _all_lines(text: str, sign: str) -> str:
    lines = text.split("\n")
    last = lines.pop()
    if last:
        lines.append(last)
    if not lines:
        return ""
    old, new = ("0,0", f"1,{len(lines)}") if sign == "+" else (f"1,{len(lines)}", "0,0")
    body = "".join(f"{sign}{line}\n" for line in lines)
    return f"@@ -{old} +{new} @@\n{body}" + ("\\ No newline at end of file\n" if last else "")


def _with_newline(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"


MAX_SHOWN_CHARS: Final = 4000
"""The limit of what is shown of a command, an output, a diff or a tool's parameters."""

MAX_SHOWN_LINES: Final = 40
"""The limit of lines: the height of a screen."""

MAX_UNWRAPPED_CHARS: Final = 20_000
"""Longer commands are shown as codex runs them; parsing takes 1.5 µs per character."""

MAX_LISTED: Final = 50
"""The limit of listed files and plan steps."""

FAILED: Final = "Failed"
STOPPED: Final = "Stopped"
NOTE: Final = "Note"
"""Labels of failures, of interrupted work, and of remarks."""

_SHELLS: Final = frozenset({"bash", "zsh", "sh"})
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\u2028\u2029\u202a-\u202e\u2066-\u2069]"  # line separators, and what makes text run backwards
)
"""Characters that control a terminal. The agent's own text keeps other invisible ones, which scripts and emoji need."""

_SIGNS: Final = re.compile(r"(?<=[^\W_])_+(?=[^\W_])|(^#|[\\`*_\[\]<>~]|&(?=#?[0-9A-Za-z]+;))")
"""Markdown's special characters, as group 1; underscores inside a word are not special."""

_MARKS: Final = {"completed": "[x]", "in_progress": "[ ] *now:*"}


def markdown(event: AgentEvent) -> str:
    """Return an event as Markdown; "" if it has nothing to show."""
    match event:
        case Text(text=text):
            return clean(text)
        case Reasoning(text=text):
            return "\n".join(f"> {line}" for line in visible(text).split("\n"))
        case ToolUse():
            return _use(event)
        case ToolResult(output="", is_error=False, exit_code=None):
            return ""
        case ToolResult(output=output, is_error=is_error, exit_code=exit_code):
            return result(output, is_error=is_error, exit_code=exit_code)
        case FileChange(changes=changes):
            # The tool use names the files.
            diff = unified_diff(each for each in changes if each.diff)
            return fenced(diff, "diff") if diff else ""
        case Plan(steps=steps, explanation=explanation):
            listed = _listed([f"{_MARKS.get(each.status, '[ ]')} {_plain(each.text)}" for each in steps])
            return "\n\n".join(filter(None, (_named(event.name, None), _plain(explanation or ""), listed)))
        case RunWarning(message=message):
            return marked(NOTE, _plain(message))
        case Error(message=message, code=error_code, fatal=fatal):
            return f"**{FAILED if fatal else NOTE}** ({one_line(error_code)}): {_plain(message)}"
        case Approval(about=about):
            return f"**Waiting for an answer**\n\n{data(about)}"
        case AgentMessage() | ReasoningSummary() | ToolOutput() | RunDiff() | Usage() | UnmappedEvent() | Done():
            return ""
        case _:
            assert_never(event)


def marked(label: str, sentence: str) -> str:
    """Return a sentence after a label, such as `FAILED`."""
    return f"**{label}**: {sentence}"


def result(output: str, *, is_error: bool, exit_code: int | None = None, failed: str = FAILED) -> str:
    """Return a tool's output in a fence; an error is labelled `failed`."""
    shown = fenced(output) if output.strip() else ""
    if not is_error:
        return shown or "*No output.*"
    code = "" if exit_code is None else f" (exit code {exit_code})"
    return f"**{failed}**{code}\n\n{shown}".rstrip()


def fenced(text: str, language: str = "", max_lines: int = MAX_SHOWN_LINES) -> str:
    """Return a text in a fence that is longer than any fence in it; the middle of a long text is left out.

    Invisible characters are shown as escapes.
    """
    shown = visible(shortened(text.removesuffix("\n"), max_lines))
    fence = "`" * (_longest_run(shown, 2) + 1)
    return f"{fence}{language}\n{shown}\n{fence}"


def code(text: str) -> str:
    """Return a text on one line as code; an empty text is shown as such."""
    line = one_line(text)
    if not line:
        return "*empty*"
    ticks = "`" * (_longest_run(line, 0) + 1)
    edge = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{edge}{line}{edge}{ticks}"


def data(value: JsonValue) -> str:
    """Return a JSON value, such as a tool's parameters, in a fence."""
    return fenced(json.dumps(value, indent=2, ensure_ascii=False), "json")


def shortened(text: str, max_lines: int | None = None) -> str:
    """Return a text without its middle if it is too long; the omission is marked.

    A quarter of `MAX_SHOWN_CHARS` and of `max_lines` is the text's beginning, the rest its end, which matters most.
    """
    if len(text) <= MAX_SHOWN_CHARS and (max_lines is None or text.count("\n") < max_lines):
        return text
    first = MAX_SHOWN_CHARS // 4
    head, tail = text[:first], text[first - MAX_SHOWN_CHARS :]
    if max_lines is not None:
        above = max_lines // 4
        head = "\n".join(head.split("\n")[:above])
        tail = "\n".join(tail.split("\n")[above - max_lines :])
    return f"{head}\n[… {len(text) - len(head) - len(tail)} characters left out …]\n{tail}"


def unwrapped(line: str) -> str:
    """Return the command that a person would type: codex runs `ls` as `/bin/bash -lc ls`."""
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
    head = _named(event.name, event.server)
    match event:
        case ToolUse(tool=tool, server=None, input={"command": str(line)}) if tool == COMMAND:
            return f"{head}\n\n{fenced(unwrapped(line), 'bash')}"
        case ToolUse(tool=tool, server=None, input={"changes": list(changes)}) if tool == FILES:
            return f"{head}\n\n{_listed([_change(each) for each in changes])}".rstrip()
        case ToolUse(tool=tool, server=None, input={"query": str(query)}) if tool == SEARCH:
            return f"{head} {code(query)}" if query.strip() else head
        case _:
            return f"{head}\n\n{data(event.input)}" if event.input else head


def _change(change: JsonValue) -> str:
    match change:
        case {"path": str(path), "kind": str(kind)}:
            return f"{one_line(kind)} {code(path)}"
        case _:
            return "a file"


def _listed(lines: Iterable[str]) -> str:
    """Return the lines as a list."""
    lines = list(lines)
    more = len(lines) - MAX_LISTED
    shown = lines[:MAX_LISTED] + ([f"… and {more} more"] if more > 0 else [])
    return "\n".join(f"- {line}" for line in shown)


def _named(name: str, server: str | None) -> str:
    """Return a tool's name and its server."""
    return f"**{_plain(name)}** ({_plain(server)})" if server else f"**{_plain(name)}**"


def _plain(text: str) -> str:
    """Return a text on one line with Markdown's special characters escaped."""
    return _SIGNS.sub(lambda sign: f"\\{sign[1]}" if sign[1] else sign[0], one_line(text))


def _longest_run(text: str, at_least: int) -> int:
    return max(at_least, *(len(run) for run in re.findall(r"`+", text)), 0)


def one_line(text: str) -> str:
    """Return the text on one line; after `MAX_LINE_CHARS` characters it ends with "…"."""
    line = visible(" ".join(text.split()))
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}…"


def visible(text: str) -> str:
    r"""Return the text with invisible characters as escapes, such as \x1b; newlines and tabs stay."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def clean(text: str) -> str:
    r"""Return the text with characters that control a terminal as escapes, such as \x1b; newlines and tabs stay."""
    return _CONTROLS.sub(lambda found: visible(found[0]), text)


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in _SHOWN_FORMATS or unicodedata.category(character) == "Cc"
    return character.encode("unicode_escape").decode() if hidden and character not in "\n\t" else character
