"""What `codex exec` is called with; that the real one takes it is tested in e2e."""

from pathlib import Path

import pytest

from codex_workspace.backends.codex_exec.command import ExecOptions, RunFiles, arguments, check
from codex_workspace.common.errors import InputRefused
from codex_workspace.common.values import Version

NEW: Version = (0, 163, 0)
OLD: Version = (0, 42, 0)
SESSION = "01a1fdff-8a53-70f0-a558-4221fd0ad429"
NO_FILES = RunFiles()


def test_a_new_session_reads_its_prompt_from_stdin() -> None:
    assert arguments(ExecOptions(), NO_FILES, NEW) == ["--json", "--color=never", "--skip-git-repo-check", "-"]


def test_the_git_check_is_skipped_only_where_wanted() -> None:
    assert arguments(ExecOptions(skip_git_check=False), NO_FILES, NEW) == ["--json", "--color=never", "-"]


def test_a_session_goes_on_behind_all_options() -> None:
    options = ExecOptions(resume=SESSION, model="gpt-5.5", sandbox="read-only", cwd=Path("/w"))
    told = arguments(options, RunFiles(Path("/s.json"), (Path("/a.png"), Path("/b.png"))), NEW)
    assert told[3:] == [
        *("--sandbox=read-only", "--cd=/w", "--model=gpt-5.5", "--output-schema=/s.json"),
        *("--image=/a.png", "--image=/b.png", "resume", SESSION, "-"),
    ]


@pytest.mark.parametrize(
    "options", [ExecOptions(full_auto=True), ExecOptions(full_auto=True, sandbox="workspace-write")]
)
def test_full_auto_is_a_sandbox(options: ExecOptions) -> None:
    check(options)
    assert arguments(options, NO_FILES, NEW)[3:-1] == ["--sandbox=workspace-write"]


def test_values_that_begin_as_options_stay_values() -> None:
    told = arguments(ExecOptions(model="--full-auto", cwd=Path("-x"), writable=(Path("--y"),)), NO_FILES, NEW)
    assert told[3:-1] == ["--cd=-x", "--add-dir=--y", "--model=--full-auto"]


def test_settings_are_toml_whatever_is_in_them() -> None:
    options = ExecOptions(config={("a",): 'x"\n', ("b", "c-d"): ["-", "'"], ("e",): True})
    assert arguments(options, NO_FILES, NEW)[3:-1] == [
        *("-c", r'a="x\"\n"', "-c", """b.c-d=["-", "'"]""", "-c", "e=true"),
    ]


@pytest.mark.parametrize(("wanted", "words"), [(True, ("true", "live")), (False, ("false", "disabled"))])
def test_the_search_has_two_settings(wanted: bool, words: tuple[str, str]) -> None:
    told = arguments(ExecOptions(web_search=wanted), NO_FILES, NEW)
    assert told[3:-1] == ["-c", f"tools.web_search={words[0]}", "-c", f'web_search="{words[1]}"']


def test_an_old_codex_is_told_in_its_own_way() -> None:
    told = arguments(ExecOptions(writable=(Path('/a"b'),)), NO_FILES, OLD)
    assert told == [
        *("--experimental-json", "--color=never", "--skip-git-repo-check"),
        *("-c", r'sandbox_workspace_write.writable_roots=["/a\"b"]', "-"),
    ]


def test_an_old_codex_gets_no_images() -> None:
    with pytest.raises(InputRefused, match=r"codex 0\.42\.0 takes no images"):
        arguments(ExecOptions(), RunFiles(images=(Path("/a.png"),)), OLD)


def test_a_session_is_kept_unless_that_is_unwanted() -> None:
    assert "--ephemeral" in arguments(ExecOptions(ephemeral=True), NO_FILES, NEW)
    with pytest.raises(InputRefused, match=r"codex 0\.42\.0 cannot be kept from writing"):
        arguments(ExecOptions(ephemeral=True), NO_FILES, OLD)


@pytest.mark.parametrize("session", ["", "--last", "a name", f"{SESSION} ", f"{SESSION}\n", "../x"])
def test_only_an_id_is_resumed(session: str) -> None:
    with pytest.raises(InputRefused, match="no UUID"):
        check(ExecOptions(resume=session))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (ExecOptions(full_auto=True, sandbox="read-only"), "full_auto runs commands in the sandbox workspace-write"),
        (ExecOptions(ephemeral=True, resume=SESSION), "kept nowhere resumes no session"),
        (ExecOptions(config={("a", "b.c"): 1}), "The setting 'a.b.c' cannot be given"),
        (ExecOptions(config={(): 1}), "cannot be given"),
    ],
)
def test_what_codex_would_misread_is_refused(options: ExecOptions, problem: str) -> None:
    with pytest.raises(InputRefused, match=problem):
        check(options)


@pytest.mark.parametrize(
    "odd", [ExecOptions(model="a\0b"), ExecOptions(cwd=Path("a\0b")), ExecOptions(images=(Path("\0"),))]
)
def test_what_no_command_line_can_hold_is_refused(odd: ExecOptions) -> None:
    with pytest.raises(InputRefused, match="NUL"):
        check(odd)
