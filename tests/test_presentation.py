"""Agent events as Markdown: it is read as it was meant, whatever stands in it."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.agent_events import (
    AgentEvent,
    Approval,
    ChangedFile,
    Done,
    Error,
    FileChange,
    Other,
    Plan,
    PlanStep,
    Reasoning,
    Text,
    Tokens,
    ToolResult,
    ToolUse,
    Usage,
)
from codex_workspace.presentation import MAX_LISTED, MAX_SHOWN_CHARS, code, command, fenced, markdown, result

TOKENS = Tokens(1, 0, 1, 0)


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (Text("m", "*Hello*"), "*Hello*"),
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
        (ToolUse("t", "echo_it", "echo_it", {"x": 1}, "srv"), '**echo\\_it** (srv)\n\n```json\n{\n  "x": 1\n}\n```'),
        (ToolUse("t", "now", "now", {}), "**now**"),
        (ToolUse("t", "command_execution", "command_execution", {"command": 3}), None),
        (ToolResult("c", "hi\n", is_error=False, exit_code=0), "```\nhi\n```"),
        (ToolResult("c", "", is_error=False, exit_code=0), "*No output.*"),
        (ToolResult("c", "no", is_error=True, exit_code=3), "**Failed** (exit code 3)\n\n```\nno\n```"),
        (ToolResult("c", "", is_error=True), "**Failed**"),
        (FileChange("f", (ChangedFile("a", "add"), ChangedFile("b", "delete"))), "- add `a`\n- delete `b`"),
        (
            Plan((PlanStep("look", "completed"), PlanStep("write", "in_progress"), PlanStep("test", "pending")), "Why"),
            "Why\n\n- [x] look\n- [ ] *now:* write\n- [ ] test",
        ),
        (Error("gone\nwrong", "OTHER", fatal=True), "**Failed** (OTHER): gone wrong"),
        (Error("again", "RETRYING", fatal=False), "**Note** (RETRYING): again"),
        (
            Error("see [x](http://a) <img> **b**", "OTHER", fatal=True),
            r"**Failed** (OTHER): see \[x\](http://a) \<img\> \*\*b\*\*",
        ),
        (Plan((PlanStep("[x](y)", "pending"),), "# h\n```\n~~~"), "\\# h \\`\\`\\` \\~\\~\\~\n\n- [ ] \\[x\\](y)"),
        (
            ToolUse("t", "command_execution", "command_execution", {"command": "ls"}, "srv"),
            '**command\\_execution** (srv)\n\n```json\n{\n  "command": "ls"\n}\n```',
        ),
        (Approval("0", {"kind": "url"}), '**Waits for an answer**\n\n```json\n{\n  "kind": "url"\n}\n```'),
        (Usage(TOKENS, TOKENS), ""),
        (Other("x", {}), ""),
        (Done("text", "s", 1, TOKENS, "completed"), ""),
    ],
)
def test_events_are_shown_so(event: AgentEvent, shown: str | None) -> None:
    assert shown is None or markdown(event) == shown


@given(st.text(alphabet="`a\n ~", max_size=200) | st.text())
def test_nothing_ends_a_fence_from_inside(text: str) -> None:
    opening, *inside, closing = fenced(text).split("\n")
    assert opening == closing
    assert re.fullmatch("`{3,}", opening)
    assert not [line for line in inside if opening in line]


@given(st.text(alphabet="`a\n ", max_size=50))
def test_code_is_one_line_that_nothing_ends_from_inside(text: str) -> None:
    shown = code(text)
    ticks = re.match("`+", shown)
    assert ticks is not None
    assert "\n" not in shown
    assert ticks[0] not in re.split(r"(?<=[^`])`+$", shown[len(ticks[0]) :])[0] or not text.strip()


def test_a_long_output_is_cut_in_the_middle_and_says_so() -> None:
    shown = result("first\n" + "x" * 100_000 + "\nlast", is_error=False)
    assert shown.startswith("```\nfirst\n")
    assert shown.endswith("\nlast\n```")
    assert f"[… {100_011 - MAX_SHOWN_CHARS} characters left out …]" in shown
    assert len(shown) < MAX_SHOWN_CHARS + 100


def test_only_what_is_shown_of_a_long_output_is_looked_at() -> None:
    began = time.process_time()
    for _ in range(10):
        result("é\x1b\n" * 2_000_000, is_error=False)
        command("/bin/bash -lc 'cat > f <<EOF\n" + "x y z\n" * 50_000 + "EOF'")
    assert time.process_time() - began < 2


def test_what_a_terminal_would_obey_is_shown_as_what_it_is() -> None:
    assert command("echo \x1b[31mred") == "```bash\necho \\x1b[31mred\n```"


def test_a_long_list_says_how_much_more_there_is() -> None:
    shown = markdown(FileChange("f", tuple(ChangedFile(str(number), "add") for number in range(MAX_LISTED + 7))))
    assert shown.endswith("- … and 7 more")
    assert len(shown.splitlines()) == MAX_LISTED + 1
