"""What is hidden from commands: the profile that codex is told, read back as TOML."""

import tomllib
from pathlib import Path

import pytest
import yaml

from codex_workspace.codex import sandbox
from codex_workspace.common.errors import ConfigError
from codex_workspace.config.loading import load_settings
from codex_workspace.config.settings import Settings


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
