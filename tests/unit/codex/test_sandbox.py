"""What is said of codex's sandbox: a codex in memory where it answers oddly, the real one for what commands may do."""

import os
import tomllib
from pathlib import Path

import anyio
import pytest
import yaml

from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.codex import sandbox
from codex_workspace.codex.sandbox import SandboxReport, check_sandbox, digest, inspect_sandbox, run, sandbox_error
from codex_workspace.common.errors import CodexCannotStart, ConfigError, ProtocolError
from codex_workspace.common.values import JsonValue
from codex_workspace.config.codex_toml import prepare_codex_home
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import choose_provider
from codex_workspace.config.settings import Settings
from codex_workspace.launching import launch_of
from tests.e2e.agent_process import AgentSetup
from tests.support.memory_codex import memory_codex, params_of


def ran(exit_code: int, said: str = "") -> JsonValue:
    """Return what codex answers when a command has ended."""
    return {"exitCode": exit_code, "stdout": "", "stderr": said}


async def test_a_sandbox_in_which_a_command_ends_well_is_fine() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        tasks.start_soon(codex.answer, "command/exec", ran(0))
        await check_sandbox(codex.connection, "workspace-write", Path("/somewhere"))


async def test_a_sandbox_with_a_failing_command_is_rejected_with_the_remedies() -> None:
    said = "\nbwrap: No permissions to create a new namespace.\nand more\n"
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        tasks.start_soon(codex.answer, "command/exec", ran(1, said))
        with pytest.raises(CodexCannotStart) as raised:
            await check_sandbox(codex.connection, "workspace-write", Path("/somewhere"))
    sentence = str(raised.value)
    assert sentence == str(sandbox_error("workspace-write", "bwrap: No permissions to create a new namespace"))
    for word in ("codex.sandbox: workspace-write", "bwrap: No permissions", "seccomp=", "codex.sandbox to container"):
        assert word in sentence


async def test_a_command_that_codex_does_not_run_at_all_counts_as_blocked() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        async def refuse() -> None:
            await codex.refuse(await codex.read("command/exec"), -32600, "failed to run it")

        tasks.start_soon(refuse)
        with pytest.raises(CodexCannotStart, match="failed to run it"):
            await check_sandbox(codex.connection, "read-only", Path("/somewhere"))


@pytest.mark.parametrize("mode", ["container", "danger-full-access"])
async def test_without_a_sandbox_nothing_is_probed(mode: str) -> None:
    async with memory_codex() as codex:
        await check_sandbox(codex.connection, mode, Path("/somewhere"))
        assert codex.unread == []


@pytest.mark.parametrize("answer", [None, {}, {"exitCode": "0", "stdout": "", "stderr": ""}, {"exitCode": 0}])
async def test_an_answer_of_unknown_shape_is_reported(answer: JsonValue) -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:
        tasks.start_soon(codex.answer, "command/exec", answer)
        with pytest.raises(ProtocolError, match="command/exec lacks"):
            await run(codex.connection, ["true"], Path("/somewhere"))


async def test_the_command_runs_in_the_folder_that_is_named() -> None:
    async with memory_codex() as codex, anyio.create_task_group() as tasks:

        async def answer() -> None:
            request = await codex.read("command/exec")
            assert params_of(request)["cwd"] == "/somewhere"
            await codex.reply(request, {"exitCode": 3, "stdout": "a", "stderr": "b"})

        tasks.start_soon(answer)
        assert (await run(codex.connection, ["true"], Path("/somewhere"))).exit_code == 3


def test_a_secret_is_found_by_its_digest() -> None:
    sight = SandboxReport(frozenset(), frozenset(), reaches_network=False, values={7: frozenset((digest("s3cret"),))})
    assert sight.holders_of(["other"]) == []
    assert sight.holders_of(["other", "s3cret"]) == [7]


# --- The real codex ---


async def seen_with(tmp_path: Path, **codex: object) -> SandboxReport:
    """Let the real codex run the command that looks around, with these settings."""
    setup = AgentSetup(tmp_path, "http://127.0.0.1:1/v1", codex=codex)
    env = setup.prepare()
    settings = load_settings(env)
    provider = choose_provider(settings, env)
    prepare_codex_home(settings, provider)
    folders = [setup.workspace, tmp_path / "config", tmp_path / "state"]
    async with open_app_server(launch_of(settings, provider, env)) as connection:
        await check_sandbox(connection, settings.config.codex.sandbox, settings.workspace_dir)
        return await _look(connection, setup, folders)


async def _look(connection: Connection, setup: AgentSetup, folders: list[Path]) -> SandboxReport:
    before = {path: path.stat().st_mtime_ns for path in setup.workspace.rglob("*")}
    sight = await inspect_sandbox(connection, setup.workspace, folders)
    assert {path: path.stat().st_mtime_ns for path in setup.workspace.rglob("*")} == before
    return sight


async def test_permissions_of_a_command_in_each_mode(tmp_path: Path) -> None:
    workspace, own = tmp_path / "workspace", os.getpid()
    sight = await seen_with(tmp_path, sandbox="workspace-write")
    assert workspace in sight.writable
    assert not sight.reaches_network
    assert own not in sight.values, "a sandbox has processes of its own"

    sight = await seen_with(tmp_path, sandbox="workspace-write", network_access=True)
    assert sight.reaches_network

    sight = await seen_with(tmp_path, sandbox="read-only")
    assert workspace in sight.readable
    assert sight.writable == frozenset()

    sight = await seen_with(tmp_path, sandbox="container")
    assert {workspace, tmp_path / "state"} <= sight.writable
    assert sight.reaches_network


# --- What is hidden from commands: the profile that codex gets, read back as TOML


def settings_of(root: Path, env: dict[str, str], config: dict[str, object] | None = None, **codex: object) -> Settings:
    """Return the settings of an agent under `root` that hides its secrets."""
    for name in ("workspace", "config", "state/codex"):
        (root / name).mkdir(parents=True, exist_ok=True)
    hides = {"hide_secrets": True, **codex}
    given = {"name": "a", "runtime": "codex", "runtime_config": {"model": "gpt-5.5"}, "codex": hides, **(config or {})}
    (root / "config" / "config.yaml").write_text(yaml.safe_dump({"template_schema_version": 1, **given}))
    folders = {"CONFIG_PATH": "config", "STATE_DIR": "state"}
    own = {f"WORKSPACE_{name}": str(root / folder) for name, folder in folders.items()}
    return load_settings({**own, "WORKSPACE_DIR": str(root / "workspace"), "A2A_TOKEN": "t" * 20, **env})


def profile(settings: Settings, env: dict[str, str]) -> dict[str, object]:
    """Return the profile as codex reads it."""
    ((key, value),) = sandbox.profile_overrides(settings, env).items()
    assert key == f"permissions.{sandbox.PROFILE}"
    read = tomllib.loads(f"it = {value}")["it"]
    assert isinstance(read, dict)
    return read


def test_missing_files_are_not_listed(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, {})
    home = settings.codex_home
    before = profile(settings, {})["filesystem"]
    assert isinstance(before, dict)
    assert [name for name in before if not name.endswith("*")] == ["glob_scan_max_depth"]
    assert before[f"{tmp_path}/state/workspace.sqlite3*"] == "deny"

    sandbox.create_secret_files(settings)
    (home / "auth.json").write_text("{}")
    after = profile(settings, {})["filesystem"]
    assert isinstance(after, dict)
    assert {name for name in after if name not in before} == {f"{home}/auth.json", f"{home}/sessions"}


def test_secret_files_are_listed_with_their_purpose(tmp_path: Path) -> None:
    for name in ("one", "two", "bundle"):
        (tmp_path / name).write_text("secret-" * 4)
    (tmp_path / "link").symlink_to("one")
    env = {
        "MY_API_KEY_FILE": str(tmp_path / "link"),
        "SSL_CERT_FILE": str(tmp_path / "bundle"),
        "OTHER_TOKEN_FILE": str(tmp_path / "gone"),
    }
    settings = settings_of(tmp_path, env, {"principals": [{"name": "ada", "token_file": "../two"}]})
    assert sandbox.secret_files(settings, env) == (tmp_path / "one", tmp_path / "two")


def test_a_secret_issued_later_is_hidden_from_the_first_command(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, {"PLATFORM_URL": "http://platform", "WORKSPACE_ID": "w"})
    assert sandbox.secret_files(settings, {}) == ()
    provisioned = tmp_path / "config" / ".auth_token"
    provisioned.write_text("token-of-the-provisioner")
    sandbox.create_secret_files(settings)
    assert settings.platform is not None
    kept = (settings.platform.token_file, settings.platform.secret_file)
    assert sandbox.secret_files(settings, {}) == (settings.codex_home / "sessions", *kept, provisioned)
    assert [file.stat().st_mode & 0o777 for file in kept] == [0o600, 0o600]
    assert kept[0].parent == settings.state_dir


def test_sessions_exist_before_the_first_codex_also_if_nothing_is_hidden(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, {"PLATFORM_URL": "http://platform", "WORKSPACE_ID": "w"}, hide_secrets=False)
    sandbox.create_secret_files(settings)
    assert (settings.codex_home / "sessions").is_dir()
    assert settings.platform is not None
    assert not settings.platform.token_file.exists()


def test_the_profile_allows_only_what_config_yaml_allows(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    settings = settings_of(tmp_path, {}, writable_folders=["../more"], network_access=True)
    wide = profile(settings, {})
    assert wide["extends"] == ":workspace"
    assert wide["network"] == {"enabled": True}
    files = wide["filesystem"]
    assert isinstance(files, dict)
    assert [name for name, access in files.items() if access == "write"] == [str(tmp_path / "more")]

    narrow = profile(settings_of(tmp_path, {}, sandbox="read-only", network_access=True), {})
    assert narrow["extends"] == ":read-only"
    assert "network" not in narrow


def test_without_secrets_there_is_no_profile(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, {}, hide_secrets=False)
    assert sandbox.profile_overrides(settings, {}) == {}
    assert sandbox.profile_of(settings) is None


def test_a_secret_that_cannot_be_hidden_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"codex\.hide_secrets: needs codex's own sandbox"):
        settings_of(tmp_path, {}, sandbox="container")
    odd = tmp_path / "odd[1]"
    with pytest.raises(ConfigError, match="which codex misreads"):
        sandbox.profile_overrides(settings_of(odd, {}), {})
