"""The doctor as a person runs it, on settings that are right and on wrong ones. Covers `cli.checks`."""

import json
import signal
import sqlite3
import sys
import uuid
from contextlib import closing
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen, run

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from codex_workspace.cli.checks import Facts, Finding, check_config, check_provider
from codex_workspace.cli.doctor import CHECKS, ONLINE, TESTED_VERSIONS, run_check
from codex_workspace.common.errors import CodexCannotStart, CodexError
from codex_workspace.devkit.model import scripted_model
from codex_workspace.server.sockets import bind
from codex_workspace.storage.schema import TABLES
from tests.e2e.agent_process import REPOSITORY, SECRET, AgentSetup, running_agent

COMMAND = (sys.executable, "-m", "codex_workspace", "doctor")
WITHOUT_CAPABILITIES = (sys.executable, "-m", "tests.e2e.without_capabilities", "codex_workspace", "doctor")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of an agent that nothing is wrong with; its model is not asked."""
    return AgentSetup(tmp_path, "http://127.0.0.1:1/v1").prepare()


def doctor(env: dict[str, str], *arguments: str, command: tuple[str, ...] = COMMAND) -> CompletedProcess[str]:
    return run(
        [*command, *arguments],
        env=env,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        stdin=DEVNULL,
        timeout=120,
        check=False,
    )


def reports(env: dict[str, str], command: tuple[str, ...] = COMMAND) -> tuple[int, dict[str, dict[str, str]]]:
    done = doctor(env, "--json", command=command)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert [report["check"] for report in found] == [check.name for check in CHECKS]
    return done.returncode, {report["check"]: report for report in found}


def codex_that_says(folder: Path, text: str) -> str:
    binary = folder / "some-codex"
    binary.write_text(f"#!/bin/sh\necho '{text}'\n")
    binary.chmod(0o755)
    return str(binary)


def test_every_check_passes(env: dict[str, str], tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = doctor(env)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * len(CHECKS)
    assert "credential: SCRIPTED_KEY" in done.stdout
    assert "answered initialize in " in done.stdout
    assert SECRET not in done.stdout
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    # Codex makes a place to mount something in its working folder, and takes it away.
    workspace = tmp_path / "workspace"
    assert after | {workspace: before[workspace]} == before


@pytest.mark.slow
def test_with_codex_exec_no_app_server_is_started(tmp_path: Path) -> None:
    servers = [
        {"name": "some", "command": "some-server"},
        {"name": "other", "url": "http://x/", "headers": {"A": "${B}"}},
    ]
    setup = AgentSetup(tmp_path, "http://127.0.0.1:1/v1", backend="exec", config={"mcp_servers": servers})
    env = setup.prepare()
    code, found = reports(env)
    assert code == 0
    assert "read its configuration in " in found["handshake"]["finding"]
    assert "sandbox works here; commands are not tested" in found["sandbox"]["finding"]
    assert "some: not started" in found["mcp servers"]["finding"]
    assert "names the variable B" in found["mcp servers"]["finding"]
    assert found["mcp servers"]["remedy"] == "set those variables"
    home = tmp_path / "state" / "codex"
    home.mkdir()
    (home / "config.toml").write_text("[tui]\nnotifications = 17\n")
    code, found = reports(env)
    assert code == 3
    assert f"codex rejects {home / 'config.toml'}: " in found["handshake"]["finding"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "declared", "status"),
    [
        ("my-model", {}, "warning"),
        ("my-model", {"context_window": 100_000}, "ok"),
        ("my-model", {"context_window": 1_000_000}, "warning"),
        ("vendor/gpt-5.5", {}, "ok"),
        ("gpt-5.5-mini", {}, "ok"),
    ],
)
def test_a_model_that_codex_does_not_know_is_a_warning(
    tmp_path: Path, model: str, declared: dict[str, object], status: str
) -> None:
    entry = {"name": "scripted", "auth_mode": "openai_compat_responses", "base_url": "http://127.0.0.1:1/v1"}
    config = {"runtime_config": {"model": model, "provider": "scripted"}, "providers": [entry | declared]}
    code, found = reports(AgentSetup(tmp_path, "", config=config).prepare())
    assert (code, found["metadata"]["status"]) == (0, status)
    assert ("does not know the model my-model" in found["metadata"]["finding"]) == (model == "my-model")
    assert bool(found["metadata"]["remedy"]) == (status == "warning")


def test_the_instructions_are_listed(env: dict[str, str], tmp_path: Path) -> None:
    prompt = Path(env["WORKSPACE_CONFIG_PATH"]) / "system-prompt.md"
    prompt.write_text("Be brief.")
    assert find("instructions", env) == Finding("ok", f"9 characters of {prompt}")
    (tmp_path / "workspace" / "AGENTS.md").write_text("x" * 32769)
    found = find("instructions", env)
    assert found.status == "warning"
    assert "AGENTS.md has 32769 bytes; codex reads only the first 32768" in found.finding
    assert "project_doc_max_bytes" in found.remedy


def test_a_reader_that_leaves_early_is_no_traceback(env: dict[str, str]) -> None:
    with Popen(COMMAND, env=env, cwd=REPOSITORY, stdout=PIPE, stderr=PIPE, text=True, stdin=DEVNULL) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(20) == 128 + signal.SIGPIPE


def test_an_invalid_configuration_exits_with_2_and_skips_dependent_checks(env: dict[str, str]) -> None:
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
    assert found["provider"]["remedy"] == "set the credential, or choose another provider in config.yaml"
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
    assert found["handshake"]["remedy"].startswith("see codex's message above; check CODEX_BIN")


def test_a_broken_config_toml_is_reported_with_its_path_and_exits_with_2(env: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "codex-home"
    home.mkdir()
    (home / "config.toml").write_text("model = \n")
    code, found = reports(env | {"CODEX_HOME": str(home)})
    assert (code, found["handshake"]["status"]) == (2, "failed")
    assert str(home / "config.toml") in found["handshake"]["finding"]
    assert found["handshake"]["remedy"] == "correct this and run the doctor again"
    assert "codex-workspace-doctor-" not in json.dumps(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('model_providers = { x = { name = "x" } }\n', "model_providers: must be a table that begins with"),
        ('model_providers.x.name = "x"\n', "model_providers.x.name: must be the key name in a table that begins with"),
    ],
)
def test_a_config_toml_that_cannot_be_edited_is_reported_with_its_key(
    env: dict[str, str], tmp_path: Path, text: str, problem: str
) -> None:
    home = tmp_path / "codex-home"
    home.mkdir()
    (home / "config.toml").write_text(text)
    found = find("handshake", env | {"CODEX_HOME": str(home)})
    assert found.finding.startswith(f"{home / 'config.toml'}: {problem} [model_providers")
    assert found.finding.endswith("; the file was not changed")
    assert found.remedy == "correct this and run the doctor again"


def test_folders_that_cannot_be_used_leave_with_1(env: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "a-file"
    state.touch()
    code, found = reports(env | {"WORKSPACE_STATE_DIR": str(state)})
    assert code == 1
    for name in ("state", "codex home"):
        assert found[name]["status"] == "failed"
        assert found[name]["finding"].endswith(f"cannot be used: {state} is a file")
    assert "choose another folder with WORKSPACE_STATE_DIR" in found["state"]["remedy"]
    assert "choose another folder with CODEX_HOME" in found["codex home"]["remedy"]


def test_a_port_in_use_exits_with_1(env: dict[str, str]) -> None:
    with closing(bind("127.0.0.1", 0)) as taken:
        # It takes connections and says nothing.
        port = taken.getsockname()[1]
        code, found = reports(env | {"A2A_PORT": str(port)})
    assert code == 1
    assert found["port"]["status"] == "failed"
    assert f"cannot listen on 127.0.0.1 port {port}" in found["port"]["finding"]


@pytest.mark.slow
async def test_an_agent_that_serves_there_already_is_no_fault(tmp_path: Path) -> None:
    setup = AgentSetup(tmp_path, "http://127.0.0.1:1/v1")
    async with running_agent(setup) as agent:
        port = agent.url.rstrip("/").rsplit(":", 1)[1]
        code, found = reports(setup.prepare() | {"A2A_PORT": port})
    assert code == 0
    assert found["port"]["finding"] == f"an agent already listens at http://127.0.0.1:{port} and is ready"
    assert found["database"]["status"] == "ok"


@pytest.mark.parametrize(
    ("said", "status", "finding"),
    [
        ("codex-cli 0.135.9", "failed", "codex 0.135.9 at {binary} is too old"),
        ("codex-cli 0.157.1", "failed", "codex 0.157.1 at {binary} is too old"),
        ("codex-cli 0.158.0", "ok", "codex 0.158.0 at {binary}; tested versions: 0.158.0 to 0.169.0"),
        ("codex-cli 0.169.7", "ok", "codex 0.169.7 at {binary}; tested versions: 0.158.0 to 0.169.0"),
        ("codex-cli 0.170.0", "warning", "codex 0.170.0 at {binary} is not tested with this agent"),
        ("codex-cli 1.0.0", "warning", "codex 1.0.0 at {binary} is not tested with this agent"),
        ("hello", "failed", "{binary} does not print a version, so it is not codex"),
    ],
)
def test_a_codex_is_judged_by_its_version(
    env: dict[str, str], tmp_path: Path, said: str, status: str, finding: str
) -> None:
    binary = codex_that_says(tmp_path, said)
    found = find("codex", env | {"CODEX_BIN": binary})
    assert (found.status, found.finding) == (status, finding.format(binary=binary))
    assert (found.remedy == "") == (status == "ok")


def test_the_tested_versions_are_those_that_make_test_and_make_test_versions_run() -> None:
    oldest, newest = (".".join(map(str, version)) for version in TESTED_VERSIONS)
    assert f"openai-codex-cli-bin=={oldest} " in (REPOSITORY / "requirements-codex-oldest.txt").read_text()
    assert f"\nCODEX_NEWEST := {newest}\n" in (REPOSITORY / "Makefile").read_text()


@pytest.mark.parametrize(
    ("url", "status", "finding"),
    [
        ("sqlite:///{folder}/new.sqlite3", "ok", "{folder}/new.sqlite3 (created"),
        ("postgresql://me:hidden-word@127.0.0.1:1/x", "failed", "cannot open x at 127.0.0.1: "),
    ],
)
def test_a_database_is_checked_without_showing_its_password(
    env: dict[str, str], tmp_path: Path, url: str, status: str, finding: str
) -> None:
    given = env | {"DATABASE_URL": url.format(folder=tmp_path)}
    found = find("database", given)
    assert found.status == status
    assert found.finding.startswith(finding.format(folder=tmp_path))
    assert ("correct DATABASE_URL, or remove it" in found.remedy) == (status == "failed")
    assert "hidden-word" not in found.finding
    assert facts(given).redact("hidden-word") == ("***" if "hidden-word" in url else "hidden-word")


def test_a_damaged_database_may_be_set_aside_and_a_newer_one_not(env: dict[str, str], tmp_path: Path) -> None:
    given = env | {"DATABASE_URL": f"sqlite:///{tmp_path}/agent.sqlite3"}
    (tmp_path / "agent.sqlite3").write_text("no database")
    damaged = find("schema", given)
    assert (damaged.status, "doctor --set-aside" in damaged.remedy) == ("failed", True)
    (tmp_path / "agent.sqlite3").unlink()
    with closing(sqlite3.connect(tmp_path / "agent.sqlite3")) as database:
        database.execute("CREATE TABLE schema_version (version INTEGER, created_at FLOAT)")
        database.execute("INSERT INTO schema_version VALUES (99, 0)")
        for table in TABLES:
            database.execute(f"CREATE TABLE IF NOT EXISTS {table} (x)")
        database.commit()
    newer = find("schema", given)
    assert (newer.status, newer.remedy) == ("failed", "correct this and run the doctor again")
    assert "schema version 99" in newer.finding


@pytest.mark.parametrize(
    ("error", "finding", "remedy"),
    [
        (CodexError("gone"), "no command could be run: gone", "see the handshake check"),
        (CodexCannotStart("no sandbox"), "no sandbox", "see docs/sandbox.md"),
    ],
)
def test_a_failed_sandbox_check_names_the_remedy(
    env: dict[str, str], error: CodexError, finding: str, remedy: str
) -> None:
    known = facts(env)
    known.sandbox = error
    (check,) = (check for check in CHECKS if check.name == "sandbox")
    assert run_check(check, known, {}) == (Finding("failed", finding, remedy), 3)


def test_a_workspace_that_cannot_be_written_is_a_warning(env: dict[str, str]) -> None:
    # Not even root can make files there.
    assert find("workspace", env | {"WORKSPACE_DIR": "/proc"}).status == "warning"


@pytest.mark.parametrize(
    ("tokens", "status", "finding"),
    [
        ({}, "ok", "no token is set"),
        ({"A2A_TOKEN": "0123456789abcdef"}, "ok", "tokens exist for operator"),
        ({"ADA_TOKEN": "0123456789abcdef"}, "ok", "tokens exist for ada"),
        ({"A2A_TOKEN": "0123456789abcdef", "ADA_TOKEN": "0123"}, "warning", "the token of ada is easy to guess"),
    ],
)
def test_the_access_rule_is_shown(tmp_path: Path, tokens: dict[str, str], status: str, finding: str) -> None:
    principals = [{"name": "ada", "token_env": "ADA_TOKEN"}] if "ADA_TOKEN" in tokens else []
    setup = AgentSetup(tmp_path, "http://127.0.0.1:1/v1", config={"principals": principals}, environment=tokens)
    found = find("access", setup.prepare())
    assert found.status == status
    assert finding in found.finding


@pytest.mark.parametrize(
    ("sandbox", "said"),
    [
        ("workspace-write", ("can write the workspace", "; cannot reach the network; it cannot read credentials")),
        (
            "read-only",
            (
                "can only read the workspace, config.yaml's folder",
                "; cannot reach the network; it cannot read credentials",
            ),
        ),
        (
            "container",
            ("can write the workspace, config.yaml's folder", "; can reach the network; it cannot read cred"),
        ),
    ],
)
@pytest.mark.slow
def test_the_sandbox_is_probed(tmp_path: Path, sandbox: str, said: tuple[str, str]) -> None:
    env = AgentSetup(tmp_path, "http://127.0.0.1:1/v1", codex={"sandbox": sandbox}).prepare()
    # Of this machine's other agents, root would see the key that all tests use.
    code, found = reports(env | {"SCRIPTED_KEY": uuid.uuid4().hex}, WITHOUT_CAPABILITIES)
    assert (code, found["sandbox"]["status"]) == (0, "ok")
    assert found["sandbox"]["finding"].startswith(f"{sandbox}: a command {said[0]}")
    assert said[1] in found["sandbox"]["finding"]


@pytest.mark.slow
def test_a_credential_that_a_command_could_read_is_a_warning(tmp_path: Path) -> None:
    env = AgentSetup(tmp_path, "http://127.0.0.1:1/v1", codex={"sandbox": "container"}).prepare()
    secret = uuid.uuid4().hex
    # As the shell is that has set the variables.
    command = [sys.executable, "-m", "tests.e2e.without_capabilities", "code"]
    with Popen(command, env=env | {"SOME_KEY": secret}, cwd=REPOSITORY, stdin=PIPE, stdout=PIPE, stderr=PIPE) as shell:
        assert shell.stderr is not None
        assert shell.stderr.readline().startswith(b"Python")
        code, found = reports(env | {"SCRIPTED_KEY": secret}, WITHOUT_CAPABILITIES)
        shell.communicate(b"exit()\n")
    assert (code, found["sandbox"]["status"]) == (0, "warning")
    assert f"in the environment of the processes {shell.pid} (python" in found["sandbox"]["finding"]
    assert secret not in str(found)


@pytest.mark.slow
def test_a_sandbox_that_cannot_work_leaves_with_3(env: dict[str, str]) -> None:
    code, found = reports(env, (sys.executable, "-m", "tests.e2e.docker_seccomp", "codex_workspace", "doctor"))
    assert code == 3
    assert found["handshake"]["status"] == "ok"
    assert found["sandbox"]["status"] == "failed"
    assert "codex.sandbox to container" in found["sandbox"]["finding"]


# --- Online ---


def test_a_platform_that_does_not_answer_leaves_with_1(env: dict[str, str]) -> None:
    platform = {"PLATFORM_URL": "http://127.0.0.1:1", "WORKSPACE_ID": "me"}
    found = find("platform", env | platform)
    assert (found.status, found.finding[:40]) == ("failed", "http://127.0.0.1:1 does not answer: [Err")
    assert find("platform", env) == Finding("ok", "none is configured")


async def test_the_model_is_requested_only_with_online(tmp_path: Path) -> None:
    async with scripted_model(model="gpt-5.5") as model:
        env = AgentSetup(tmp_path, model.base_url).prepare()

        found = await anyio.to_thread.run_sync(find, "model", env)
        assert found.status == "ok"
        assert "has the model gpt-5.5" in found.finding
        other = await anyio.to_thread.run_sync(find, "model", env | {"MODEL": "gpt-other"})
        assert (other.status, "does not list the model gpt-other" in other.finding) == ("warning", True)


@pytest.mark.parametrize(("status", "judged"), [(401, "failed"), (403, "failed"), (404, "warning"), (500, "warning")])
async def test_a_providers_response_is_interpreted(tmp_path: Path, status: int, judged: str) -> None:
    asked: list[bytes] = []

    async def answer(stream: SocketStream) -> None:
        async with stream:
            asked.append(await stream.receive())
            await stream.send(f"HTTP/1.1 {status} No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(SocketAttribute.local_port)
        env = AgentSetup(tmp_path, f"http://127.0.0.1:{port}/v1/").prepare()
        found = await anyio.to_thread.run_sync(find, "model", env)
        tasks.cancel_scope.cancel()
    assert found.status == judged
    assert SECRET not in str(found)
    assert asked[0].startswith(b"GET /v1/models ")
    assert f"Bearer {SECRET}".encode() in asked[0]


@pytest.mark.slow
def test_an_unreachable_provider_fails_with_online_only(env: dict[str, str]) -> None:
    done = doctor(env, "--json", "--online")
    assert done.returncode == 1
    assert json.loads(done.stdout)[-1] == {
        "check": "model",
        "status": "failed",
        "finding": "http://127.0.0.1:1/v1 does not answer: [Errno 111] Connection refused",
        "remedy": "correct base_url (or OPENAI_BASE_URL), or check the network connection",
    }


def facts(env: dict[str, str]) -> Facts:
    known = Facts(env)
    check_config(known)
    check_provider(known)
    return known


def find(name: str, env: dict[str, str]) -> Finding:
    """Run one check."""
    (check,) = (check for check in (*CHECKS, *ONLINE) if check.name == name)
    return run_check(check, facts(env), {})[0]
