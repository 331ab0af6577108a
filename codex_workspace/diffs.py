"""Unified diffs of what codex reports of its file changes."""

from collections.abc import Iterable

from codex_workspace.events import Change


def unified_diff(changes: Iterable[Change]) -> str:
    """Return one unified diff for all changes.

    Codex gives an added or deleted file's whole text as its `diff`, and only the hunks of a changed one.
    """
    return "".join(_one(change) for change in changes)


def _one(change: Change) -> str:
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
