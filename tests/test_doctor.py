"""The doctor as a person runs it, on settings that are right and on wrong ones."""

import json
import signal
import sys
from contextlib import closing
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen, run

import pytest

from codex_workspace.doctor import (
    CHECKS,
    TESTED_VERSIONS,
    Facts,
    Finding,
    check_codex,
    check_database,
    check_instructions,
    check_workspace,
)
from codex_workspace.server import bind
from tests.e2e.agent_process import REPOSITORY, SECRET, Place, running_agent

COMMAND = (sys.executable, "-m", "codex_workspace", "doctor")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of an agent that nothing is wrong with; its model is not asked."""
    return Place(tmp_path, "http://127.0.0.1:1/v1").prepare()


def doctor(env: dict[str, str], *arguments: str) -> CompletedProcess[str]:
    return run(
        [*COMMAND, *arguments],
        env=env,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        stdin=DEVNULL,
        timeout=20,
        check=False,
    )


def reports(env: dict[str, str]) -> tuple[int, dict[str, dict[str, str]]]:
    done = doctor(env, "--json")
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert [report["check"] for report in found] == [check.name for check in CHECKS]
    return done.returncode, {report["check"]: report for report in found}


def codex_that_says(folder: Path, text: str) -> str:
    binary = folder / "some-codex"
    binary.write_text(f"#!/bin/sh\necho '{text}'\n")
    binary.chmod(0o755)
    return str(binary)


def test_nothing_is_wrong(env: dict[str, str], tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = doctor(env)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * len(CHECKS)
    assert "credential: SCRIPTED_KEY" in done.stdout
    assert "answered initialize in " in done.stdout
    assert SECRET not in done.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_the_agent_is_told_is_shown(env: dict[str, str], tmp_path: Path) -> None:
    prompt = Path(env["WORKSPACE_CONFIG_PATH"]) / "system-prompt.md"
    prompt.write_text("Be brief.")
    facts = Facts(env)
    facts.learn_settings()
    assert check_instructions(facts) == Finding("ok", f"9 characters of {prompt}")
    (tmp_path / "workspace" / "AGENTS.md").write_text("x" * 32769)
    found = check_instructions(facts)
    assert found.status == "warning"
    assert "AGENTS.md has 32769 bytes, of which codex reads 32768" in found.finding
    assert "project_doc_max_bytes" in found.remedy


def test_a_reader_that_leaves_early_is_no_traceback(env: dict[str, str]) -> None:
    with Popen(COMMAND, env=env, cwd=REPOSITORY, stdout=PIPE, stderr=PIPE, text=True, stdin=DEVNULL) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(20) == 128 + signal.SIGPIPE


def test_a_wrong_configuration_leaves_with_2_and_what_depends_on_it_is_not_run(env: dict[str, str]) -> None:
    config = Path(env["WORKSPACE_CONFIG_PATH"]) / "config.yaml"
    config.write_text(f"{config.read_text()}\nnonsense: 1\n")
    code, found = reports(env)
    assert code == 2
    assert found["config"]["status"] == "failed"
    assert "nonsense" in found["config"]["finding"]
    assert {report["status"] for name, report in found.items() if name != "config"} == {"not run"}
    assert found["handshake"]["finding"] == "needs provider and codex"


def test_a_missing_credential_leaves_with_2_and_the_rest_is_looked_at(env: dict[str, str]) -> None:
    code, found = reports(env | {"SCRIPTED_KEY": ""})
    assert code == 2
    assert found["provider"]["status"] == "failed"
    assert "SCRIPTED_KEY" in found["provider"]["finding"]
    assert found["handshake"] == {
        "check": "handshake",
        "status": "not run",
        "finding": "needs provider",
        "remedy": "",
    }
    assert found["codex"]["status"] == "ok"


def test_a_missing_codex_leaves_with_3(env: dict[str, str]) -> None:
    code, found = reports(env | {"CODEX_BIN": "/nowhere/codex"})
    assert code == 3
    assert found["codex"]["finding"] == "/nowhere/codex cannot be run: No such file or directory"
    assert "CODEX_BIN" in found["codex"]["remedy"]
    assert found["handshake"]["status"] == "not run"


def test_a_codex_that_does_not_answer_leaves_with_3(env: dict[str, str], tmp_path: Path) -> None:
    code, found = reports(env | {"CODEX_BIN": codex_that_says(tmp_path, "codex-cli 0.163.0")})
    assert code == 3
    assert found["codex"]["status"] == "ok"
    assert found["handshake"]["status"] == "failed"
    assert found["handshake"]["finding"].startswith("codex cannot start: it ended with exit code 0")


def test_folders_that_cannot_be_used_leave_with_1(env: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "a-file"
    state.touch()
    code, found = reports(env | {"WORKSPACE_STATE_DIR": str(state)})
    assert code == 1
    for name in ("state", "codex home"):
        assert found[name]["status"] == "failed"
        assert f"{state} is a file" in found[name]["finding"]


def test_a_port_that_another_program_has_leaves_with_1(env: dict[str, str]) -> None:
    with closing(bind("127.0.0.1", 0)) as taken:
        # It takes connections and says nothing.
        port = taken.getsockname()[1]
        code, found = reports(env | {"A2A_PORT": str(port)})
    assert code == 1
    assert found["port"]["status"] == "failed"
    assert f"cannot listen on 127.0.0.1 port {port}" in found["port"]["finding"]


async def test_an_agent_that_serves_there_already_is_no_fault(tmp_path: Path) -> None:
    place = Place(tmp_path, "http://127.0.0.1:1/v1")
    async with running_agent(place) as agent:
        port = agent.url.rstrip("/").rsplit(":", 1)[1]
        code, found = reports(place.prepare() | {"A2A_PORT": port})
    assert code == 0
    assert found["port"]["finding"] == f"an agent serves at http://127.0.0.1:{port} already, and is ready"
    assert "tables" in found["database"]["finding"]


@pytest.mark.parametrize(
    ("said", "status", "finding"),
    [
        ("codex-cli 0.135.9", "failed", "codex 0.135.9 at {binary} is too old"),
        ("codex-cli 0.136.0", "warning", "codex 0.136.0 at {binary} was not tested with this agent"),
        ("codex-cli 0.157.1", "warning", "codex 0.157.1 at {binary} was not tested with this agent"),
        ("codex-cli 0.158.0", "ok", "codex 0.158.0 at {binary}"),
        ("codex-cli 0.169.7", "ok", "codex 0.169.7 at {binary}"),
        ("codex-cli 0.170.0", "warning", "codex 0.170.0 at {binary} was not tested with this agent"),
        ("codex-cli 1.0.0", "warning", "codex 1.0.0 at {binary} was not tested with this agent"),
        ("hello", "failed", "{binary} does not tell a version, it is not codex"),
    ],
)
def test_a_codex_is_judged_by_its_version(
    env: dict[str, str], tmp_path: Path, said: str, status: str, finding: str
) -> None:
    binary = codex_that_says(tmp_path, said)
    found = check_codex(facts(env | {"CODEX_BIN": binary}))
    assert (found.status, found.finding) == (status, finding.format(binary=binary))
    assert (found.remedy == "") == (status == "ok")


def test_the_tested_versions_are_those_that_make_test_and_make_test_versions_run() -> None:
    oldest, newest = (".".join(map(str, version)) for version in TESTED_VERSIONS)
    assert f"openai-codex-cli-bin=={oldest}\n" in (REPOSITORY / "requirements-codex-oldest.txt").read_text()
    assert f"\nCODEX_NEWEST := {newest}\n" in (REPOSITORY / "Makefile").read_text()


@pytest.mark.parametrize(
    ("url", "status", "finding"),
    [
        ("sqlite+aiosqlite:///{folder}/new.sqlite3", "ok", "sqlite+aiosqlite:///{folder}/new.sqlite3 (will be made"),
        ("sqlite+aiosqlite:///{folder}/text", "failed", "sqlite+aiosqlite:///{folder}/text does not open: "),
        ("postgresql+asyncpg://me:hidden-word@127.0.0.1:1/x", "failed", "postgresql+asyncpg://me:***@127.0.0.1:1/x"),
    ],
)
def test_a_database_is_tried_and_its_password_not_shown(
    env: dict[str, str], tmp_path: Path, url: str, status: str, finding: str
) -> None:
    (tmp_path / "text").write_text("this is no database, and long enough to be none: " * 10)
    known = facts(env | {"DATABASE_URL": url.format(folder=tmp_path)})
    found = check_database(known)
    assert found.status == status
    assert found.finding.startswith(finding.format(folder=tmp_path))
    assert "hidden-word" not in found.finding
    assert known.scrub("hidden-word") == ("***" if "hidden-word" in url else "hidden-word")


def test_a_workspace_that_cannot_be_written_is_a_warning(env: dict[str, str]) -> None:
    # Not even root can make files there.
    assert check_workspace(facts(env | {"WORKSPACE_DIR": "/proc"})).status == "warning"


def facts(env: dict[str, str]) -> Facts:
    known = Facts(env)
    known.learn_settings()
    return known
