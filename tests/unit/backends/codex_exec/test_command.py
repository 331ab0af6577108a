"""Tests the command line of `codex exec`; the end-to-end tests pass it to codex."""

import json
import tempfile
from pathlib import Path

import pytest

from codex_workspace.backends.codex_exec.command import arguments, check, file_arguments
from codex_workspace.common.errors import InputRefused
from codex_workspace.runtimes.launch import Launch, RunOptions

SESSION = "01a1fdff-8a53-70f0-a558-4221fd0ad429"


def test_a_new_session_reads_its_prompt_from_stdin() -> None:
    assert arguments(RunOptions(), []) == ["--json", "--color=never", "--skip-git-repo-check", "-"]


def test_the_git_check_can_be_enabled() -> None:
    assert arguments(RunOptions(skip_git_check=False), []) == ["--json", "--color=never", "-"]


def test_the_session_to_resume_follows_all_options() -> None:
    options = RunOptions(resume=SESSION, model="gpt-5.5", sandbox="read-only", cwd=Path("/w"))
    told = arguments(options, ["--output-schema=/s.json", "--image=/a.png"])
    assert told[3:] == [
        *("--sandbox=read-only", "--cd=/w", "--model=gpt-5.5"),
        *("--output-schema=/s.json", "--image=/a.png", "resume", SESSION, "-"),
    ]


@pytest.mark.parametrize("options", [RunOptions(full_auto=True), RunOptions(full_auto=True, sandbox="workspace-write")])
def test_full_auto_selects_a_sandbox(options: RunOptions) -> None:
    check("hi", options)
    assert arguments(options, [])[3:-1] == ["--sandbox=workspace-write"]


def test_values_that_look_like_options_stay_values() -> None:
    told = arguments(RunOptions(model="--full-auto", cwd=Path("-x"), writable=(Path("--y"),)), [])
    assert told[3:-1] == ["--cd=-x", "--add-dir=--y", "--model=--full-auto"]


def test_settings_are_passed_as_toml() -> None:
    options = RunOptions(config={("a",): 'x"\n', ("b", "c-d"): ["-", "'"], ("e",): True})
    assert arguments(options, [])[3:-1] == [
        *("-c", r'a="x\"\n"', "-c", """b.c-d=["-", "'"]""", "-c", "e=true"),
    ]


@pytest.mark.parametrize(("wanted", "value"), [(True, "live"), (False, "disabled")])
def test_web_search_is_passed_as_a_setting(wanted: bool, value: str) -> None:
    assert arguments(RunOptions(web_search=wanted), [])[3:-1] == ["-c", f'web_search="{value}"']


def test_a_session_is_stored_by_default() -> None:
    assert "--ephemeral" not in arguments(RunOptions(), [])
    assert "--ephemeral" in arguments(RunOptions(ephemeral=True), [])


@pytest.mark.parametrize("session", ["", "--last", "a name", f"{SESSION} ", f"{SESSION}\n", "../x"])
def test_only_a_uuid_can_be_resumed(session: str) -> None:
    with pytest.raises(InputRefused, match="not a UUID"):
        check("hi", RunOptions(resume=session))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (RunOptions(full_auto=True, sandbox="read-only"), "full_auto runs commands in the sandbox workspace-write"),
        (RunOptions(ephemeral=True, resume=SESSION), "not stored cannot resume"),
        (RunOptions(config={("a", "b.c"): 1}), "The setting 'a.b.c' cannot be passed"),
        (RunOptions(config={(): 1}), "cannot be passed"),
    ],
)
def test_options_that_codex_would_misread_are_rejected(options: RunOptions, problem: str) -> None:
    with pytest.raises(InputRefused, match=problem):
        check("hi", options)


@pytest.mark.parametrize(
    "odd", [RunOptions(model="a\0b"), RunOptions(cwd=Path("a\0b")), RunOptions(images=(Path("\0"),))]
)
def test_a_nul_is_rejected(odd: RunOptions) -> None:
    with pytest.raises(InputRefused, match="NUL"):
        check("hi", odd)


LAUNCH = Launch(Path("/codex"), Path("/home"), Path("/work"), family="a-family")


def test_files_are_in_a_folder_that_is_removed_and_have_no_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    image = tmp_path / "a,b.png"
    image.write_bytes(b"png")
    options = RunOptions(output_schema={"type": "object"}, images=(image,))
    with file_arguments(options, LAUNCH) as files:
        schema, passed = (each.partition("=") for each in files)
        assert (schema[0], passed[0]) == ("--output-schema", "--image")
        assert json.loads(Path(schema[2]).read_text()) == {"type": "object"}
        assert Path(passed[2]).read_bytes() == b"png"
        assert "," not in passed[2]
    assert list(temporary.iterdir()) == []
    with file_arguments(RunOptions(), LAUNCH) as files:
        assert (files, list(temporary.iterdir())) == ([], [])


@pytest.mark.parametrize("missing", ["nothing.png", "."])
def test_an_image_that_is_no_file_is_rejected(tmp_path: Path, missing: str) -> None:
    options = RunOptions(output_schema={}, images=(tmp_path / missing,))
    with pytest.raises(InputRefused, match="is not a file"), file_arguments(options, LAUNCH):
        pass
