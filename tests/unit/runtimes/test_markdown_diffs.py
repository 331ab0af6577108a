"""Tests `unified_diff` (`runtimes/markdown.py`) with `git apply`."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.protocol.codex_events import FilePatch
from codex_workspace.runtimes.markdown import unified_diff


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
