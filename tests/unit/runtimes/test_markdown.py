"""Tests `runtimes/markdown.py`: any text in an event is shown as text."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.protocol.codex_events import (
    FilePatch,
    ItemStatus,
    PatchCompleted,
    PatchStarted,
    WebSearchCompleted,
)
from codex_workspace.runtimes.convert import EventConverter
from codex_workspace.runtimes.events import (
    FILES,
    AgentEvent,
    Approval,
    Done,
    Error,
    FileChange,
    FileDiff,
    Plan,
    PlanStep,
    Reasoning,
    Text,
    TokenCounts,
    ToolResult,
    ToolUse,
    UnmappedEvent,
    Usage,
)
from codex_workspace.runtimes.markdown import (
    MAX_LISTED,
    MAX_SHOWN_CHARS,
    MAX_SHOWN_LINES,
    code,
    data,
    fenced,
    markdown,
    marked,
    result,
    shortened,
    unified_diff,
    unwrapped,
)

TOKENS = TokenCounts(1, 0, 1, 0)


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (Text("m", "*Hello*\n\t\U0001f468\u200d\U0001f467"), "*Hello*\n\t\U0001f468\u200d\U0001f467"),
        (Reasoning("r", "one\ntwo"), "> one\n> two"),
        (
            ToolUse("c", "Bash", "command_execution", {"command": "/bin/bash -lc 'ls -l'"}),
            "**Bash**\n\n```bash\nls -l\n```",
        ),
        (
            ToolUse("f", "Edit", "file_change", {"changes": [{"path": "a`b", "kind": "update"}]}),
            "**Edit**\n\n- update ``a`b``",
        ),
        (ToolUse("w", "WebSearch", "web_search", {"query": "basalt"}), "**WebSearch** `basalt`"),
        (ToolUse("t", "echo_it", "echo_it", {"x": 1}, "srv"), '**echo_it** (srv)\n\n```json\n{\n  "x": 1\n}\n```'),
        (ToolUse("t", "now", "now", {}), "**now**"),
        (ToolUse("t", "command_execution", "command_execution", {"command": 3}), None),
        (ToolResult("c", "hi\n", is_error=False, exit_code=0), "```\nhi\n```"),
        (ToolResult("c", "", is_error=False, exit_code=0), "*No output.*"),
        (ToolResult("c", "no", is_error=True, exit_code=3), "**Failed** (exit code 3)\n\n```\nno\n```"),
        (ToolResult("c", "", is_error=True), "**Failed**"),
        (ToolResult("w", "", is_error=False), ""),
        (FileChange("f", (FileDiff("a", "add"), FileDiff("b", "delete"))), ""),
        (
            FileChange("f", (FileDiff("a", "update", "@@ -1 +1 @@\n-x\n+y\n"), FileDiff("b", "delete"))),
            "```diff\n--- a\n+++ a\n@@ -1 +1 @@\n-x\n+y\n```",
        ),
        (
            Plan((PlanStep("look", "completed"), PlanStep("write", "in_progress"), PlanStep("test", "pending")), "Why"),
            "**TodoWrite**\n\nWhy\n\n- [x] look\n- [ ] *now:* write\n- [ ] test",
        ),
        (Error("gone\nwrong", "OTHER", fatal=True), "**Failed** (OTHER): gone wrong"),
        (Error("again", "RETRYING", fatal=False), "**Note** (RETRYING): again"),
        (
            Error("see [x](http://a) <img> **b**", "OTHER", fatal=True),
            r"**Failed** (OTHER): see \[x\](http://a) \<img\> \*\*b\*\*",
        ),
        (Plan(()), "**TodoWrite**"),
        (
            Plan((PlanStep("[x](y)", "pending"),), "# h\n```\n~~~"),
            "**TodoWrite**\n\n\\# h \\`\\`\\` \\~\\~\\~\n\n- [ ] \\[x\\](y)",
        ),
        (
            Plan((PlanStep("a & b; &lt;b&gt; &#42; &#x2a;", "pending"),)),
            "**TodoWrite**\n\n- [ ] a & b; \\&lt;b\\&gt; \\&#42; \\&#x2a;",
        ),
        (
            ToolUse("t", "command_execution", "command_execution", {"command": "ls"}, "srv"),
            '**command_execution** (srv)\n\n```json\n{\n  "command": "ls"\n}\n```',
        ),
        (Approval("0", {"kind": "url"}), '**Waiting for an answer**\n\n```json\n{\n  "kind": "url"\n}\n```'),
        (Usage(TOKENS, TOKENS), ""),
        (UnmappedEvent("x", {}), ""),
        (Done("text", "s", 1, TOKENS, "completed"), ""),
    ],
)
def test_events_are_rendered_as_documented(event: AgentEvent, shown: str | None) -> None:
    assert shown is None or markdown(event) == shown


@given(st.text(alphabet="`a\n ~", max_size=200) | st.text())
def test_text_cannot_close_its_fence(text: str) -> None:
    opening, *inside, closing = fenced(text).split("\n")
    assert opening == closing
    assert re.fullmatch("`{3,}", opening)
    assert not [line for line in inside if opening in line]


@given(st.text(alphabet="`a\n ", max_size=50))
def test_inline_code_is_one_line_that_text_cannot_close(text: str) -> None:
    shown = code(text)
    ticks = re.match("`+", shown)
    assert "\n" not in shown
    if not text.strip():
        assert shown == "*empty*"
        return
    assert ticks is not None
    assert ticks[0] not in re.split(r"(?<=[^`])`+$", shown[len(ticks[0]) :])[0]


def test_long_output_is_truncated_in_the_middle_with_a_notice() -> None:
    shown = result("first\n" + "x" * 100_000 + "\nlast", is_error=False)
    assert shown.startswith("```\nfirst\n")
    assert shown.endswith("\nlast\n```")
    assert f"[… {100_011 - MAX_SHOWN_CHARS} characters left out …]" in shown
    assert len(shown) < MAX_SHOWN_CHARS + 100


def test_only_the_shown_part_of_long_output_is_scanned() -> None:
    began = time.process_time()
    for _ in range(10):
        result("é\x1b\n" * 2_000_000, is_error=False)
        bash("/bin/bash -lc 'cat > f <<EOF\n" + "x y z\n" * 50_000 + "EOF'")
    assert time.process_time() - began < 2


def bash(line: str) -> str:
    return markdown(ToolUse("c", "Bash", "command_execution", {"command": line}))


def test_terminal_control_characters_are_escaped() -> None:
    assert bash("echo \x1b[31mred") == "**Bash**\n\n```bash\necho \\x1b[31mred\n```"
    assert result("\x1b[2J", is_error=False) == "```\n\\x1b[2J\n```"
    assert markdown(Text("m", "\x1b[2J\u202e\x9b\r")) == "\\x1b[2J\\u202e\\x9b\\r"
    assert data({"\u202e": "\x1b"}) == '```json\n{\n  "\\u202e": "\\u001b"\n}\n```'


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("list_peers", "list_peers"),
        ("a__b_c", "a__b_c"),
        ("_private", r"\_private"),
        ("__init__", r"\_\_init\_\_"),
        ("a_ b", r"a\_ b"),
        ("a_*b*", r"a\_\*b\*"),
        ("#1 #2", r"\#1 #2"),
    ],
)
def test_only_markdown_syntax_is_escaped(name: str, shown: str) -> None:
    assert markdown(ToolUse("t", name, name, {})) == f"**{shown}**"


def test_a_notice_starts_with_its_kind() -> None:
    assert marked("Failed", "The model *refused*.") == "**Failed**: The model *refused*."


def test_the_middle_of_many_lines_is_omitted() -> None:
    shown = result("".join(f"{number}\n" for number in range(1000)), is_error=False)
    first, last = ("\n".join(map(str, numbers)) for numbers in (range(10), range(970, 1000)))
    assert shown == f"```\n{first}\n[… {3889 - len(first) - len(last)} characters left out …]\n{last}\n```"
    assert result("x\n" * MAX_SHOWN_LINES, is_error=False).count("x") == MAX_SHOWN_LINES


texts = st.text(alphabet="x\n", max_size=200) | st.integers(0, 20_000).map("x\n".__mul__) | st.text()


@given(texts, st.none() | st.integers(4, 50))
def test_a_shortened_text_reports_the_omitted_amount(text: str, max_lines: int | None) -> None:
    shown = shortened(text, max_lines)
    if shown == text:
        assert len(text) <= MAX_SHOWN_CHARS
        assert max_lines is None or len(text.split("\n")) <= max_lines
        return
    found = re.fullmatch(r"(.*)\n\[… (\d+) characters left out …\]\n(.*)", shown, re.DOTALL)
    assert found is not None
    head, left_out, tail = found.groups()
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(left_out) + len(tail) == len(text)
    assert int(left_out) > 0
    assert len(head) + len(tail) <= MAX_SHOWN_CHARS
    assert max_lines is None or len(head.split("\n")) + len(tail.split("\n")) <= max_lines


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/bin/bash -lc 'uname -sr; ls'", "uname -sr; ls"),
        ("/usr/bin/zsh -c ls", "ls"),
        ("ls -l", "ls -l"),
        ("echo 'unclosed", "echo 'unclosed"),
        ("python -c 1", "python -c 1"),
    ],
)
def test_a_command_is_shown_as_typed(command: str, expected: str) -> None:
    assert unwrapped(command) == expected
    assert bash(command) == f"**Bash**\n\n```bash\n{expected}\n```"


def test_a_long_list_reports_how_many_more() -> None:
    numbers = range(MAX_LISTED + 7)
    shown = markdown(
        ToolUse("f", "Write", FILES, {"changes": [{"path": str(each), "kind": "add"} for each in numbers]})
    )
    assert shown.endswith("- … and 7 more")
    assert len(shown.splitlines()) == 2 + MAX_LISTED + 1


def test_a_run_lists_its_changes_and_searches_once() -> None:
    stream = EventConverter()
    changes = (FilePatch("sum.py", "update", ""),)
    told = [
        markdown(event)
        for each in (
            PatchStarted("f", changes),
            PatchCompleted("f", changes, ItemStatus.COMPLETED),
            WebSearchCompleted("w", "basalt"),
        )
        for event in stream.convert(each)
    ]
    assert list(filter(None, told)) == ["**Edit**\n\n- update `sum.py`", "**WebSearch** `basalt`"]


# --- Tests `unified_diff` (`runtimes/markdown.py`) with `git apply`


def applied(folder: Path, diff: str) -> None:
    """Apply a diff of files that are named by their absolute paths in `folder`."""
    command = ["git", "apply", "--unsafe-paths", "-p1", "--directory=/", "-"]
    subprocess.run(command, cwd=folder, input=diff.encode(), check=True, capture_output=True)


@pytest.mark.parametrize("text", ["one\n", "one\ntwo\n", "no newline at the end", "a\n\n\nb", "\n", "é\u2028ü\r\n"])
def test_an_added_and_a_deleted_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.txt"
    applied(tmp_path, unified_diff([FilePatch(str(file), "add", text)]))
    assert file.read_bytes() == text.encode()
    applied(tmp_path, unified_diff([FilePatch(str(file), "delete", text)]))
    assert not file.exists()


def test_several_changes_are_one_diff(tmp_path: Path) -> None:
    changed, deleted, added = (tmp_path / name for name in ("changed", "deleted", "added"))
    changed.write_text("one\ntwo\nthree\n")
    deleted.write_text("old\n")
    changes = [
        FilePatch(str(changed), "update", "@@ -1,3 +1,3 @@\n one\n-two\n+zwei\n three"),
        FilePatch(str(deleted), "delete", "old\n"),
        FilePatch(str(added), "add", "new\n"),
    ]
    applied(tmp_path, unified_diff(changes))
    assert changed.read_text() == "one\nzwei\nthree\n"
    assert not deleted.exists()
    assert added.read_text() == "new\n"


def test_the_headers_name_the_files() -> None:
    assert unified_diff([FilePatch("/w/a", "add", "x\n")]) == "--- /dev/null\n+++ /w/a\n@@ -0,0 +1,1 @@\n+x\n"
    assert unified_diff([FilePatch("/w/a", "delete", "x")]) == (
        "--- /w/a\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-x\n\\ No newline at end of file\n"
    )
    assert unified_diff([FilePatch("/w/a", "update", "@@ -1 +1 @@\n-a\n+b\n")]) == (
        "--- /w/a\n+++ /w/a\n@@ -1 +1 @@\n-a\n+b\n"
    )
    assert unified_diff([]) == ""


@pytest.mark.parametrize("kind", ["add", "delete", "update", "unknown"])
def test_an_empty_change_is_its_headers(kind: str) -> None:
    assert unified_diff([FilePatch("/w/a", kind, "")]).count("\n") == 2


@given(st.text(), st.sampled_from(["add", "delete", "update", "unknown"]))
def test_a_diff_ends_with_a_newline(text: str, kind: str) -> None:
    assert unified_diff([FilePatch("/w/a", kind, text)]).endswith("\n")


@given(st.text(min_size=1))
def test_the_lines_of_an_added_file_are_its_text(text: str) -> None:
    diff = unified_diff([FilePatch("/w/a", "add", text)])
    body = diff.split("\n", 3)[3]
    lines = [line[1:] for line in body.split("\n") if line.startswith("+")]
    whole = "\n".join(lines) + ("" if "\\ No newline" in diff.rsplit("\n", 2)[1] else "\n")
    assert whole == text
