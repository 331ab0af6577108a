"""Files that codex hands over: which it may, what becomes of them, and the tool as the real codex knows it."""

import os
from pathlib import Path

import pytest
from a2a.types import Artifact, Part

from codex_workspace.common.errors import CodexRefused
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.devkit.model import ScriptedModel, scripted_model
from codex_workspace.devkit.model_requests import Output
from codex_workspace.protocol.jsonrpc import Request
from codex_workspace.runtimes.backend import HANDOVER_TOOL
from codex_workspace.tasks.outgoing_files import (
    HandoverLimits,
    HandoverRefused,
    OutgoingFile,
    as_artifact,
    result,
    take,
    tool_spec,
)
from tests.e2e.agent_process import AgentSetup
from tests.e2e.client import script
from tests.unit.tasks.test_parts import png, real_codex

BOUNDS = HandoverLimits()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "report.md").write_text("# Report\n")
    (tmp_path / "secret.txt").write_text("not yours")
    return folder


def taken(arguments: JsonValue, workspace: Path, bounds: HandoverLimits = BOUNDS) -> OutgoingFile:
    outcome = take(arguments, workspace, bounds)
    assert isinstance(outcome, OutgoingFile), outcome
    return outcome


def refusal(arguments: JsonValue, workspace: Path, bounds: HandoverLimits = BOUNDS) -> str:
    outcome = take(arguments, workspace, bounds)
    assert isinstance(outcome, HandoverRefused), outcome
    return outcome.sentence


# --- What may be handed over ---


def test_a_file_is_handed_over_as_it_is(workspace: Path) -> None:
    assert taken({"path": "out/report.md"}, workspace) == OutgoingFile("report.md", "text/markdown", b"# Report\n")
    assert taken({"path": str(workspace / "out" / "report.md")}, workspace).name == "report.md"
    assert taken({"path": "out/../out/./report.md", "name": None}, workspace).data == b"# Report\n"


def test_it_may_get_another_name_and_is_what_it_is(workspace: Path) -> None:
    assert taken({"path": "out/report.md", "name": "../Ä.txt"}, workspace).name == "Ä.txt"
    assert taken({"path": "out/report.md", "name": "..."}, workspace).name == "report.md"
    (workspace / "shot").write_bytes(png())
    assert taken({"path": "shot", "name": "shot.txt"}, workspace).media_type == "image/png"


def test_a_relative_path_begins_where_commands_run(workspace: Path) -> None:
    outcome = take({"path": "report.md"}, workspace, BOUNDS, cwd=workspace / "out")
    assert isinstance(outcome, OutgoingFile)


def test_an_empty_file_is_a_file(workspace: Path) -> None:
    (workspace / "empty").touch()
    assert taken({"path": "empty"}, workspace).data == b""


def test_a_link_inside_the_workspace_is_followed(workspace: Path) -> None:
    (workspace / "latest").symlink_to("out/report.md")
    assert taken({"path": "latest"}, workspace).data == b"# Report\n"


def test_a_workspace_may_be_named_by_a_link(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(workspace)
    assert taken({"path": "out/report.md"}, tmp_path / "link").name == "report.md"


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/passwd", "out/../../secret.txt", "/proc/self/environ"])
def test_a_file_outside_of_the_workspace_is_not(workspace: Path, path: str) -> None:
    assert refusal({"path": path}, workspace).startswith("Only files inside the workspace")


def test_a_link_out_of_the_workspace_leads_nowhere(workspace: Path, tmp_path: Path) -> None:
    (workspace / "link").symlink_to(tmp_path / "secret.txt")
    (workspace / "folder").symlink_to(tmp_path)
    assert refusal({"path": "link"}, workspace).startswith("Only files inside the workspace")
    assert refusal({"path": "folder/secret.txt"}, workspace).startswith("Only files inside the workspace")


def test_a_folder_with_the_workspaces_name_as_its_beginning_is_outside(workspace: Path) -> None:
    beside = workspace.parent / f"{workspace.name}-2"
    beside.mkdir()
    (beside / "a.txt").touch()
    assert refusal({"path": str(beside / "a.txt")}, workspace).startswith("Only files inside")


def test_what_is_no_file_is_not_opened(workspace: Path) -> None:
    os.mkfifo(workspace / "pipe")
    assert refusal({"path": "pipe"}, workspace) == "pipe is no file; put a folder into an archive and hand that over."
    assert "out is no file" in refusal({"path": "out"}, workspace)
    assert "is no file" in refusal({"path": ""}, workspace)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("gone.txt", "gone.txt cannot be handed over: there is no such file."),
        ("out/report.md/x", "out/report.md/x cannot be handed over: not a directory."),
        ("a\0b", "ab cannot be handed over: this is no path."),
        ("\ud800", " cannot be handed over: this is no path."),
        ("x" * 5000, f"{'x' * 200}… cannot be handed over: file name too long."),
    ],
)
def test_why_a_path_leads_to_no_file(workspace: Path, path: str, why: str) -> None:
    assert refusal({"path": path}, workspace) == why


def test_links_that_go_round_in_circles(workspace: Path) -> None:
    (workspace / "a").symlink_to("b")
    (workspace / "b").symlink_to("a")
    assert refusal({"path": "a"}, workspace).endswith("its links go round in circles.")


@pytest.mark.parametrize(
    "arguments", [None, [], "out/report.md", {}, {"path": 5}, {"path": "out/report.md", "name": 5}, {"name": "x"}]
)
def test_arguments_of_another_shape_are_refused(workspace: Path, arguments: JsonValue) -> None:
    assert refusal(arguments, workspace).startswith("The arguments have to be ")


# --- How much ---


def test_a_file_over_the_bound_is_refused(workspace: Path) -> None:
    bounds = HandoverLimits(file_bytes=9)
    assert taken({"path": "out/report.md"}, workspace, bounds).name == "report.md"
    (workspace / "out" / "report.md").write_text("# Reports\n")
    assert refusal({"path": "out/report.md"}, workspace, bounds) == "out/report.md has 10 bytes; a file may have 9."


def test_a_tasks_files_have_a_bound_together(workspace: Path) -> None:
    bounds = HandoverLimits(left_bytes=12, left_files=3)
    left = bounds.after(taken({"path": "out/report.md"}, workspace, bounds))
    assert left == HandoverLimits(left_bytes=3, left_files=2)
    assert refusal({"path": "out/report.md"}, workspace, left) == "out/report.md has 9 bytes; 3 are left for this task."
    assert refusal({"path": "out/report.md"}, workspace, HandoverLimits(left_files=0)).startswith("No more files")


# --- What becomes of it ---


def test_a_file_is_an_artifact_of_its_own_with_its_bytes() -> None:
    file = OutgoingFile("a.md", "text/markdown", b"# A\n")
    part = Part(raw=b"# A\n", media_type="text/markdown", filename="a.md")
    assert as_artifact(file, 2) == Artifact(artifact_id="file-2", name="a.md", parts=[part])


def test_the_model_reads_what_became_of_it() -> None:
    assert result(OutgoingFile("a.md", "text/markdown", b"# A\n")) == {
        "contentItems": [{"type": "inputText", "text": "Handed over as a.md (text/markdown, 4 bytes)."}],
        "success": True,
    }
    assert result(HandoverRefused("No.")) == {"contentItems": [{"type": "inputText", "text": "No."}], "success": False}


# --- The real codex ---


def call_of(path: str) -> list[JsonValue]:
    step: dict[str, object] = {"tool": {"name": HANDOVER_TOOL, "arguments": {"path": path}}}
    return [{"type": "text", "text": script(step, {"say": "given"})}]


def offers(model: ScriptedModel) -> list[str | None]:
    """Return the namespace of each tool of ours that the model was offered last."""
    return [tool.namespace for tool in model.requests[-1].tools if tool.name == HANDOVER_TOOL]


def outputs(model: ScriptedModel) -> list[str]:
    return [item.text for item in model.requests[-1].input if isinstance(item, Output)]


class Answering:
    """Answers codex's requests as the agent would, and remembers them."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.asked: list[JsonObject] = []

    def __call__(self, request: Request) -> JsonValue:
        assert request.method == "item/tool/call"
        self.asked.append(request.params)
        return result(take(request.params["arguments"], self.workspace, BOUNDS))


async def test_codex_offers_the_tool_and_asks_for_it_also_in_a_resumed_thread(tmp_path: Path) -> None:
    async with scripted_model() as model:
        setup = AgentSetup(tmp_path, model.base_url)
        answering = Answering(setup.workspace)
        async with real_codex(setup) as codex:
            (setup.workspace / "report.md").write_text("# Report\n")
            thread_id = await codex.start(dynamicTools=[tool_spec()])
            await codex.turn(thread_id, call_of("report.md"), answering)
            assert offers(model) == [None]
            assert outputs(model) == ["Handed over as report.md (text/markdown, 9 bytes)."]
            await codex.turn(thread_id, call_of("gone.md"), answering)
            assert outputs(model)[-1] == "gone.md cannot be handed over: there is no such file."
        async with real_codex(setup) as codex:
            await codex.resume(thread_id)
            await codex.turn(thread_id, call_of("report.md"), answering)
            assert offers(model) == [None]
            assert len(outputs(model)) == 3
    assert [(each["tool"], each["namespace"], each["arguments"]) for each in answering.asked] == [
        (HANDOVER_TOOL, None, {"path": "report.md"}),
        (HANDOVER_TOOL, None, {"path": "gone.md"}),
        (HANDOVER_TOOL, None, {"path": "report.md"}),
    ]


async def test_a_thread_that_was_started_without_the_tool_never_offers_it(tmp_path: Path) -> None:
    async with scripted_model() as model:
        setup = AgentSetup(tmp_path, model.base_url)
        async with real_codex(setup) as codex:
            thread_id = await codex.start()
            await codex.turn(thread_id, call_of("report.md"))
        async with real_codex(setup) as codex:
            await codex.resume(thread_id, dynamicTools=[tool_spec()])
            await codex.turn(thread_id, call_of("report.md"))
            assert offers(model) == []


async def test_codex_checks_the_tool_when_a_thread_starts(tmp_path: Path) -> None:
    async with scripted_model() as model, real_codex(AgentSetup(tmp_path, model.base_url)) as codex:
        with pytest.raises(CodexRefused):
            await codex.start(dynamicTools=[tool_spec(), tool_spec()])
