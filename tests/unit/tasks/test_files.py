"""Files of the workspace: those of a message, those that the model hands over, and the tool in the real codex."""

import os
import resource
import stat
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from a2a.types import Part

from codex_workspace.common.errors import CodexRefused
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.devkit.model import ScriptedModel, scripted_model
from codex_workspace.devkit.model_requests import Output
from codex_workspace.protocol.jsonrpc import Request
from codex_workspace.runtimes.backend import HANDOVER_TOOL
from codex_workspace.tasks.files import (
    AttachmentsNotWritten,
    HandoverRefused,
    prune,
    take,
    tool_result,
    tool_spec,
    write,
)
from codex_workspace.tasks.parts import Attachment
from tests.e2e.agent_process import AgentSetup
from tests.e2e.client import script
from tests.unit.tasks.test_parts import png, real_codex

TASK = "0b5c7c1e-5a0e-4c36-9b1c-0f3a5d1f2e11"
FILE = Attachment("data.csv", "text/csv", b"a,b\n1,2\n")


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def modes_of(paths: Iterable[Path]) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in paths}


def test_files_are_stored_in_the_tasks_folder_and_their_paths_sent_to_codex(tmp_path: Path) -> None:
    told = write(tmp_path, TASK, [FILE, Attachment("ä b.bin", "application/octet-stream", b"\x00\xff")])
    folder = tmp_path / ".a2a" / TASK
    assert told.splitlines() == [
        "These files came with the message:",
        f"- .a2a/{TASK}/data.csv (text/csv, 8 bytes)",
        f"- .a2a/{TASK}/ä b.bin (application/octet-stream, 2 bytes)",
    ]
    assert (folder / "data.csv").read_bytes() == FILE.data
    assert (folder / "ä b.bin").read_bytes() == b"\x00\xff"
    assert names_in(folder) == ["data.csv", "ä b.bin"]


def test_only_the_user_may_read_them(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path, TASK, [FILE])
    finally:
        os.umask(before)
    top = tmp_path / ".a2a"
    assert modes_of([top, top / TASK]) == {0o700}
    assert modes_of([top / ".gitignore", top / TASK / "data.csv"]) == {0o600}


def test_paths_are_relative_to_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    told = write(tmp_path, TASK, [FILE], cwd=tmp_path / "deep" / "down")
    assert f"- ../../.a2a/{TASK}/data.csv (" in told


def test_git_does_not_see_them(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    write(tmp_path, TASK, [FILE])
    seen = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, check=True, capture_output=True)
    assert seen.stdout == b""


def test_the_rule_for_git_is_written_once(tmp_path: Path) -> None:
    write(tmp_path, TASK, [FILE])
    rule = tmp_path / ".a2a" / ".gitignore"
    before = rule.stat()
    write(tmp_path, "another", [FILE])
    assert rule.read_text() == "*\n"
    assert (rule.stat().st_ino, rule.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_folder_in_place_of_the_rule_for_git_stays(tmp_path: Path) -> None:
    (tmp_path / ".a2a" / ".gitignore").mkdir(parents=True)
    write(tmp_path, TASK, [FILE])
    assert (tmp_path / ".a2a" / TASK / "data.csv").read_bytes() == FILE.data


def test_files_of_concurrent_tasks_are_all_written(tmp_path: Path) -> None:
    tasks = [f"task-{number}" for number in range(200)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda task_id: write(tmp_path, task_id, [FILE]), tasks))
    assert names_in(tmp_path / ".a2a") == sorted([".gitignore", *tasks])


def test_a_resumed_task_has_its_original_files(tmp_path: Path) -> None:
    told = write(tmp_path, TASK, [FILE])
    (tmp_path / ".a2a" / TASK / "data.csv").write_bytes(b"changed meanwhile, and longer than before")
    (tmp_path / ".a2a" / TASK / "made.txt").write_bytes(b"by the agent")
    assert write(tmp_path, TASK, [FILE]) == told
    assert (tmp_path / ".a2a" / TASK / "data.csv").read_bytes() == FILE.data
    assert names_in(tmp_path / ".a2a" / TASK) == ["data.csv", "made.txt"]


@pytest.mark.parametrize("task_id", ["..", "a/b", ".", "x" * 65, "a\0b", "\ud800", "../../etc"])
def test_an_odd_task_id_stays_inside_the_folder(tmp_path: Path, task_id: str) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    write(workspace, task_id, [FILE])
    assert names_in(tmp_path) == ["w"]
    assert names_in(workspace) == [".a2a"]
    (folder,) = [entry for entry in (workspace / ".a2a").iterdir() if entry.is_dir()]
    assert names_in(folder) == ["data.csv"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside of the workspace that nothing may be written to."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "data.csv").write_text("not from this task")
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def untouched(folder: Path) -> bool:
    return names_in(folder) == ["data.csv"] and (folder / "data.csv").read_text() == "not from this task"


def test_a_link_in_place_of_the_top_folder_is_not_followed(workspace: Path, elsewhere: Path) -> None:
    (workspace / ".a2a").symlink_to(elsewhere)
    with pytest.raises(AttachmentsNotWritten, match="a file with that name is not a folder"):
        write(workspace, TASK, [FILE])
    assert untouched(elsewhere)


def test_a_link_in_place_of_the_tasks_folder_is_not_followed(workspace: Path, elsewhere: Path) -> None:
    (workspace / ".a2a").mkdir()
    (workspace / ".a2a" / TASK).symlink_to(elsewhere)
    with pytest.raises(AttachmentsNotWritten):
        write(workspace, TASK, [FILE])
    assert untouched(elsewhere)


def test_a_link_in_place_of_a_file_is_replaced(workspace: Path, elsewhere: Path) -> None:
    folder = workspace / ".a2a" / TASK
    folder.mkdir(parents=True)
    (folder / "data.csv").symlink_to(elsewhere / "data.csv")
    (workspace / ".a2a" / ".gitignore").symlink_to(elsewhere / "ignored")
    write(workspace, TASK, [FILE])
    assert not (folder / "data.csv").is_symlink()
    assert (folder / "data.csv").read_bytes() == FILE.data
    assert untouched(elsewhere)


def test_a_folder_in_place_of_a_file_is_reported_and_cleaned_up(workspace: Path) -> None:
    (workspace / ".a2a" / TASK / "data.csv").mkdir(parents=True)
    with pytest.raises(AttachmentsNotWritten, match=r"could not be written to \.a2a in the workspace"):
        write(workspace, TASK, [FILE])
    assert names_in(workspace / ".a2a" / TASK) == ["data.csv"]


def test_a_full_disk_is_reported_and_leaves_no_partial_file(workspace: Path) -> None:
    write(workspace, TASK, [FILE])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(AttachmentsNotWritten, match="File too large"):
            write(workspace, TASK, [Attachment("data.csv", "text/csv", b"x" * 100_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names_in(workspace / ".a2a" / TASK) == []


def test_a_missing_workspace_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AttachmentsNotWritten, match="No such file or directory"):
        write(tmp_path / "gone", TASK, [FILE])


def test_the_workspace_may_be_a_symbolic_link(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(workspace)
    write(tmp_path / "link", TASK, [FILE])
    assert (workspace / ".a2a" / TASK / "data.csv").read_bytes() == FILE.data


def aged(workspace: Path, task_id: str, at: float) -> Path:
    write(workspace, task_id, [FILE])
    folder = workspace / ".a2a" / task_id
    os.utime(folder, (at, at))
    return folder


def test_old_tasks_folders_are_removed_but_for_those_to_keep(workspace: Path) -> None:
    old, kept, new = aged(workspace, "old", 100), aged(workspace, "kept", 100), aged(workspace, "new", 300)
    (old / "made").mkdir()
    os.utime(old, (100, 100))
    prune(workspace, before=200, keep=["kept"])
    assert (old.exists(), kept.exists(), new.exists()) == (False, True, True)
    assert (workspace / ".a2a" / ".gitignore").exists()


def test_pruning_follows_no_link(workspace: Path, elsewhere: Path) -> None:
    old = aged(workspace, "old", 100)
    (old / "link").symlink_to(elsewhere)
    os.utime(old, (100, 100))
    (workspace / ".a2a" / "link").symlink_to(elsewhere)
    os.utime(workspace / ".a2a" / "link", (100, 100), follow_symlinks=False)
    prune(workspace, before=200)
    assert not old.exists()
    assert untouched(elsewhere)


def test_pruning_without_a_folder(workspace: Path, elsewhere: Path) -> None:
    prune(workspace, before=200)
    assert names_in(workspace) == []
    (workspace / ".a2a").symlink_to(elsewhere)
    prune(workspace, before=2e9)
    assert untouched(elsewhere)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A workspace with a report."""
    folder = tmp_path / "workspace"
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "report.md").write_text("# Report\n")
    (tmp_path / "secret.txt").write_text("not yours")
    return folder


def taken(arguments: JsonValue, workspace: Path, max_bytes: int = 1000, left_bytes: int = 1000) -> Part:
    return take(arguments, workspace, max_bytes, left_bytes)


def refusal(arguments: JsonValue, workspace: Path, max_bytes: int = 1000, left_bytes: int = 1000) -> str:
    with pytest.raises(HandoverRefused) as refused:
        take(arguments, workspace, max_bytes, left_bytes)
    return str(refused.value)


# --- What may be handed over ---


def test_a_file_is_handed_over_as_it_is(filled: Path) -> None:
    assert taken({"path": "out/report.md"}, filled) == Part(
        raw=b"# Report\n", media_type="text/markdown", filename="report.md"
    )
    assert taken({"path": str(filled / "out" / "report.md")}, filled).filename == "report.md"
    assert taken({"path": "out/../out/./report.md", "name": None}, filled).raw == b"# Report\n"


def test_a_file_may_be_renamed_and_keeps_its_type(filled: Path) -> None:
    assert taken({"path": "out/report.md", "name": "../Ä.txt"}, filled).filename == "Ä.txt"
    assert taken({"path": "out/report.md", "name": "..."}, filled).filename == "report.md"
    (filled / "shot").write_bytes(png())
    assert taken({"path": "shot", "name": "shot.txt"}, filled).media_type == "image/png"


def test_a_relative_path_starts_in_the_working_folder(filled: Path) -> None:
    assert take({"path": "report.md"}, filled, 1000, 1000, cwd=filled / "out").filename == "report.md"


def test_an_empty_file_is_a_file(filled: Path) -> None:
    (filled / "empty").touch()
    assert taken({"path": "empty"}, filled).raw == b""


def test_a_link_inside_the_workspace_is_followed(filled: Path) -> None:
    (filled / "latest").symlink_to("out/report.md")
    assert taken({"path": "latest"}, filled).raw == b"# Report\n"


def test_a_file_of_a_workspace_that_is_a_link_is_handed_over(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(filled)
    assert taken({"path": "out/report.md"}, tmp_path / "link").filename == "report.md"


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/passwd", "out/../../secret.txt", "/proc/self/environ"])
def test_a_file_outside_of_the_workspace_is_not(filled: Path, path: str) -> None:
    assert refusal({"path": path}, filled).startswith("Only files inside the workspace")


def test_a_link_out_of_the_workspace_is_rejected(filled: Path, tmp_path: Path) -> None:
    (filled / "link").symlink_to(tmp_path / "secret.txt")
    (filled / "folder").symlink_to(tmp_path)
    assert refusal({"path": "link"}, filled).startswith("Only files inside the workspace")
    assert refusal({"path": "folder/secret.txt"}, filled).startswith("Only files inside the workspace")


def test_a_folder_with_the_workspaces_name_as_its_beginning_is_outside(filled: Path) -> None:
    beside = filled.parent / f"{filled.name}-2"
    beside.mkdir()
    (beside / "a.txt").touch()
    assert refusal({"path": str(beside / "a.txt")}, filled).startswith("Only files inside")


def test_only_regular_files_are_opened(filled: Path) -> None:
    os.mkfifo(filled / "pipe")
    assert refusal({"path": "pipe"}, filled) == "pipe is not a file; to send a folder, put it into an archive."
    assert "out is not a file" in refusal({"path": "out"}, filled)
    assert "is not a file" in refusal({"path": ""}, filled)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("gone.txt", "gone.txt cannot be sent: there is no such file."),
        ("out/report.md/x", "out/report.md/x cannot be sent: not a directory."),
        ("a\0b", "ab cannot be sent: the path is invalid."),
        ("\ud800", " cannot be sent: the path is invalid."),
        ("x" * 5000, f"{'x' * 200}… cannot be sent: file name too long."),
    ],
)
def test_why_a_path_leads_to_no_file(filled: Path, path: str, why: str) -> None:
    assert refusal({"path": path}, filled) == why


def test_links_that_go_round_in_circles(filled: Path) -> None:
    (filled / "a").symlink_to("b")
    (filled / "b").symlink_to("a")
    assert refusal({"path": "a"}, filled).endswith("its symbolic links form a loop.")


@pytest.mark.parametrize(
    "arguments", [None, [], "out/report.md", {}, {"path": 5}, {"path": "out/report.md", "name": 5}, {"name": "x"}]
)
def test_invalid_arguments_are_rejected(filled: Path, arguments: JsonValue) -> None:
    assert refusal(arguments, filled).startswith("The arguments must be ")


# --- Limits ---


def test_a_file_over_a_limit_is_refused(filled: Path) -> None:
    report: JsonValue = {"path": "out/report.md"}
    assert taken(report, filled, max_bytes=9, left_bytes=9).filename == "report.md"
    assert refusal(report, filled, max_bytes=8) == "out/report.md has 9 bytes; a file may have at most 8."
    assert refusal(report, filled, left_bytes=3) == "out/report.md has 9 bytes; 3 are left for this task."


# --- The real codex ---


def call_of(path: str) -> list[JsonValue]:
    step: dict[str, object] = {"tool": {"name": HANDOVER_TOOL, "arguments": {"path": path}}}
    return [{"type": "text", "text": script(step, {"say": "given"})}]


def offers(model: ScriptedModel) -> list[str | None]:
    """Return the namespace of each of our tools in the last request to the model."""
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
        try:
            file = take(request.params["arguments"], self.workspace, 1000, 1000)
        except HandoverRefused as refused:
            return tool_result(str(refused), success=False)
        return tool_result(f"Sent as {file.filename}.", success=True)


async def test_codex_offers_the_tool_and_asks_for_it_also_in_a_resumed_thread(tmp_path: Path) -> None:
    async with scripted_model() as model:
        setup = AgentSetup(tmp_path, model.base_url)
        answering = Answering(setup.workspace)
        async with real_codex(setup) as codex:
            (setup.workspace / "report.md").write_text("# Report\n")
            thread_id = await codex.start(dynamicTools=[tool_spec()])
            await codex.turn(thread_id, call_of("report.md"), answering)
            assert offers(model) == [None]
            assert outputs(model) == ["Sent as report.md."]
            await codex.turn(thread_id, call_of("gone.md"), answering)
            assert outputs(model)[-1] == "gone.md cannot be sent: there is no such file."
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
