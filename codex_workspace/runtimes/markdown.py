"""Unified diffs of what codex reports of its file changes.

Agent events as Markdown, for people: what a tool is given and what came of it. docs/events.md explains the stream.

Whatever an output holds, it stays inside its fence; what is left out of a long one is said. A2A's messages are made of
it (`replies`), and what `chat` and the demo show (`terminal`).
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
    Approval,
    Done,
    Error,
    FileChange,
    Plan,
    Reasoning,
    Text,
    ToolResult,
    ToolUse,
    UnmappedEvent,
    Usage,
)

MAX_LINE_CHARS: Final = 1_000
"""A sentence of the model's or a server's is shown so far."""


_SHOWN_FORMATS: Final = frozenset({"Cf", "Cs", "Zl", "Zp"})
"""Categories of characters that nobody sees, or that change the direction of others, beside the control characters."""


def unified_diff(changes: Iterable[FilePatch]) -> str:
    """Return one unified diff for all changes.

    Codex gives an added or deleted file's whole text as its `diff`, and only the hunks of a changed one.
    """
    return "".join(_one(change) for change in changes)


def _one(change: FilePatch) -> str:
    match change.kind:
        case "add":
            return f"--- /dev/null\n+++ {change.path}\n{_all_lines(change.diff, '+')}"
        case "delete":
            return f"--- {change.path}\n+++ /dev/null\n{_all_lines(change.diff, '-')}"
        case _:
            return f"--- {change.path}\n+++ {change.path}\n{_ended(change.diff)}"


def _all_lines(text: str, sign: str) -> str:
    lines = text.split("\n")
    unended = lines.pop()
    if unended:
        lines.append(unended)
    if not lines:
        return ""
    old, new = ("0,0", f"1,{len(lines)}") if sign == "+" else (f"1,{len(lines)}", "0,0")
    body = "".join(f"{sign}{line}\n" for line in lines)
    return f"@@ -{old} +{new} @@\n{body}" + ("\\ No newline at end of file\n" if unended else "")


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"


MAX_SHOWN_CHARS: Final = 4000
"""Of a command, an output, a diff or a tool's parameters, this much is shown."""

MAX_SHOWN_LINES: Final = 40
"""And so many of its lines: what a screen holds."""

MAX_UNWRAPPED_CHARS: Final = 20_000
"""A longer command is shown as codex runs it: taking it apart takes 1.5 µs for each character."""

MAX_LISTED: Final = 50
"""Of changed files and of a plan's steps, so many are listed."""

FAILED: Final = "Failed"
STOPPED: Final = "Stopped"
NOTE: Final = "Note"
"""The words that mark what went wrong, what did not come to its end, and what is said beside the work."""

_SHELLS: Final = frozenset({"bash", "zsh", "sh"})
CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\u2028\u2029\u202a-\u202e\u2066-\u2069]"  # line separators, and what makes text run backwards
)
"""What a terminal would obey. What else nobody sees, scripts and emoji need: it stays in the agent's own words."""

_SIGNS: Final = re.compile(r"(?<=[^\W_])_+(?=[^\W_])|(^#|[\\`*_\[\]<>~]|&(?=#?[0-9A-Za-z]+;))")
"""What Markdown takes for its own, as group 1; underscores inside of a word are none of that."""

_MARKS: Final = {"completed": "[x]", "in_progress": "[ ] *now:*"}


def markdown(event: AgentEvent) -> str:
    """Return an event as Markdown; "" for one of which people see nothing."""
    match event:
        case Text(text=text):
            return CONTROLS.sub(lambda found: visible(found[0]), text)
        case Reasoning(text=text):
            return "\n".join(f"> {line}" for line in visible(text).split("\n"))
        case ToolUse():
            return _use(event)
        case ToolResult(output="", is_error=False, exit_code=None):
            # Of a search, of changed files, or of a tool that has given something else than text.
            return ""
        case ToolResult(output=output, is_error=is_error, exit_code=exit_code):
            return result(output, is_error=is_error, exit_code=exit_code)
        case FileChange(changes=changes):
            # The use has named them all.
            diff = unified_diff(FilePatch(each.path, each.kind, each.diff) for each in changes if each.diff)
            return fenced(diff, "diff") if diff else ""
        case Plan(steps=steps, explanation=explanation):
            listed = _listed([f"{_MARKS.get(each.status, '[ ]')} {_plain(each.text)}" for each in steps])
            told = _plain(explanation or "")
            return "\n\n".join(part for part in (_named(event.name, None), told, listed) if part)
        case Error(message=message, code=word, fatal=fatal):
            return f"**{FAILED if fatal else NOTE}** ({one_line(word)}): {_plain(message)}"
        case Approval(about=about):
            return f"**Waits for an answer**\n\n{data(about)}"
        case Usage() | UnmappedEvent() | Done():
            return ""
        case _:
            assert_never(event)


def marked(word: str, sentence: str) -> str:
    """Return a sentence with a word before it that says what it is, such as `FAILED`."""
    return f"**{word}**: {sentence}"


def result(output: str, *, is_error: bool, exit_code: int | None = None, failed: str = FAILED) -> str:
    """Return what came of a tool: its output in a fence, and for an error, that it is one, by the word `failed`."""
    shown = fenced(output) if output.strip() else ""
    if not is_error:
        return shown or "*No output.*"
    how = "" if exit_code is None else f" (exit code {exit_code})"
    return f"**{failed}**{how}\n\n{shown}".rstrip()


def fenced(text: str, language: str = "") -> str:
    """Return a text in a fence that is longer than any in it, with its middle left out where it is long.

    What is not seen is shown as an escape, which is longer than the character that it stands for.
    """
    shown = visible(shortened(text.removesuffix("\n"), MAX_SHOWN_LINES))
    fence = "`" * (_longest_run(shown, 2) + 1)
    return f"{fence}{language}\n{shown}\n{fence}"


def code(text: str) -> str:
    """Return a text of one line as code, whatever is in it; without any, that it is empty."""
    line = one_line(text)
    if not line:
        return "*empty*"
    ticks = "`" * (_longest_run(line, 0) + 1)
    edge = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{edge}{line}{edge}{ticks}"


def data(value: JsonValue) -> str:
    """Return what a program would read, such as a tool's parameters."""
    return fenced(json.dumps(value, indent=2, ensure_ascii=False), "json")


def shortened(text: str, max_lines: int | None = None) -> str:
    """Return a text without its middle where it is long, and say so: what a command prints last is what matters most.

    A quarter of `MAX_SHOWN_CHARS`, and of `max_lines`, is its beginning, the rest its end.
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
    """Return a tool's name, and whose it is."""
    return f"**{_plain(name)}** ({_plain(server)})" if server else f"**{_plain(name)}**"


def _plain(words: str) -> str:
    """Return words of codex's or a server's on one line, without what Markdown would take for its own."""
    return _SIGNS.sub(lambda sign: f"\\{sign[1]}" if sign[1] else sign[0], one_line(words))


def _longest_run(text: str, at_least: int) -> int:
    return max(at_least, *(len(run) for run in re.findall(r"`+", text)), 0)


def one_line(text: str) -> str:
    """Return the text on one line, without what could end it; beyond 1000 characters it ends with "…"."""
    line = visible(" ".join(text.split()))
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}…"


def visible(text: str) -> str:
    r"""Return the text with characters that are not seen as escapes, such as \x1b; newlines and tabs stay."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in _SHOWN_FORMATS or unicodedata.category(character) == "Cc"
    return character.encode("unicode_escape").decode() if hidden and character not in "\n\t" else character
