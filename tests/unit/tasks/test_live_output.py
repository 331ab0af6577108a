"""The live view of a turn."""

import pytest
from a2a.types import TaskArtifactUpdateEvent
from google.protobuf.json_format import MessageToDict

from codex_workspace.runtimes.events import BASH, COMMAND, RunDiff, ToolOutput, ToolResult, ToolUse
from codex_workspace.runtimes.markdown import MAX_SHOWN_CHARS
from codex_workspace.tasks.live_output import (
    INTERVAL_S,
    ITEMS,
    MAX_DIFF_CHARS,
    MAX_OUTPUT_CHARS,
    LiveOutput,
)


def started(item: str, command: str = "make") -> ToolUse:
    return ToolUse(item, BASH, COMMAND, {"command": command})


def finished(item: str, output: str) -> ToolResult:
    return ToolResult(item, output, is_error=False)


def shape(update: TaskArtifactUpdateEvent) -> tuple[str, str, bool, bool]:
    return update.artifact.artifact_id, update.artifact.parts[0].text, update.append, update.last_chunk


def test_a_commands_output_grows_and_ends_complete() -> None:
    live = LiveOutput("t", "c")
    assert live.see(started("i")) == live.flush(0.0) == []
    live.see(ToolOutput("i", "one\n"))
    live.see(ToolOutput("i", "two\n"))
    assert [shape(each) for each in live.flush(5.0)] == [("output-1", "one\ntwo\n", False, False)]
    live.see(ToolOutput("i", "three\n"))
    assert live.due(0.1) == 5.0 + INTERVAL_S
    assert live.due(1.0) == 5.0 + 1.0
    assert [shape(each) for each in live.flush(6.0)] == [("output-1", "three\n", True, False)]
    assert [shape(each) for each in live.see(finished("i", "one\ntwo\nthree\n"))] == [
        ("output-1", "one\ntwo\nthree\n", False, True)
    ]
    assert live.due(0.1) is None


def test_every_command_has_an_artifact_with_its_command() -> None:
    live = LiveOutput("t", "c")
    for item in ("a", "b"):
        live.see(started(item, f"run {item}"))
        live.see(ToolOutput(item, item))
    about = {each.artifact.artifact_id: MessageToDict(each.artifact.metadata)[ITEMS] for each in live.flush(0.0)}
    assert about == {
        "output-1": {"kind": "commandOutput", "itemId": "a", "command": "run a"},
        "output-2": {"kind": "commandOutput", "itemId": "b", "command": "run b"},
    }


def test_the_diff_is_the_newest_one() -> None:
    live = LiveOutput("t", "c")
    live.see(RunDiff("old"))
    live.see(RunDiff("new"))
    (update,) = live.flush(0.0)
    assert shape(update) == ("diff", "new", False, False)
    assert update.artifact.parts[0].media_type == "text/x-diff"


@pytest.mark.parametrize("pieces", [1, 7])
def test_long_output_is_truncated(pieces: int) -> None:
    live = LiveOutput("t", "c")
    live.see(started("i"))
    shown = 0
    for _ in range(pieces):
        live.see(ToolOutput("i", "x" * MAX_OUTPUT_CHARS))
        shown += sum(len(each.artifact.parts[0].text) for each in live.flush(0.0))
    assert shown == MAX_OUTPUT_CHARS
    (closed,) = live.see(finished("i", "y" * (MAX_SHOWN_CHARS + 10)))
    assert "[… 10 characters left out …]" in closed.artifact.parts[0].text
    live.see(RunDiff("d" * (MAX_DIFF_CHARS + 1)))
    (diff,) = live.flush(0.0)
    assert len(diff.artifact.parts[0].text) == MAX_DIFF_CHARS
    assert MessageToDict(diff.artifact.metadata)[ITEMS] == {"kind": "diff", "isCut": True}


def test_output_of_an_unknown_command_is_ignored() -> None:
    live = LiveOutput("t", "c")
    assert live.see(ToolOutput("i", "x")) == live.see(finished("i", "x")) == []
    assert live.due(0.1) is None
