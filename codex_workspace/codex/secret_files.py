"""What commands of the model's must not read, as a permission profile of codex's (`codex.hide_secrets`).

The profile is defined on codex's command line and named to each thread, so config.toml and its sandbox stay as they
are. It widens nothing: it is the sandbox of config.yaml, less the agent's own secrets.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import tomlkit

from codex_workspace.common.errors import ConfigError
from codex_workspace.config.settings import Settings
from codex_workspace.storage.database import sqlite_file

PROFILE: Final = "codex-workspace"
"""The profile's name, to codex."""

_BASES: Final = {"read-only": ":read-only", "workspace-write": ":workspace"}
_SPECIAL: Final = frozenset("*?[]{}\\")
"""What codex reads as a pattern; in a folder's name it would hide something else."""

_KEPT: Final = ("auth.json", ".credentials.json", "config.toml", "sessions", "archived_sessions", "history.jsonl")
"""In CODEX_HOME: the login, those of MCP servers, the operator's configuration, and everybody's conversations."""


def profile_of(settings: Settings) -> str | None:
    """Return the profile that threads run with; None where nothing is hidden."""
    return PROFILE if settings.config.codex.hide_secrets else None


def prepare(settings: Settings) -> None:
    """Make CODEX_HOME's `sessions`, and the files of what the platform will tell us, so that the first codex can be
    told to hide them too.

    Raises:
        ConfigError: they cannot be made.
    """
    if not settings.config.codex.hide_secrets:
        return
    try:
        (settings.codex_home / "sessions").mkdir(mode=0o700, exist_ok=True)
        for file in _kept_for_platform(settings):
            file.touch(0o600)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be made: {error.strerror}") from error


def definition(settings: Settings, env: Mapping[str, str]) -> dict[str, str]:
    """Return the `-c` settings that define the profile, none where nothing is hidden.

    A file that is not there is left out: codex would put an empty one in its place, where its commands may write.

    Raises:
        ConfigError: a folder's name cannot be told to codex.
    """
    if not settings.config.codex.hide_secrets:
        return {}
    rules: dict[str, str | int] = {"glob_scan_max_depth": 1}
    rules |= {_plain(folder): "write" for folder in settings.writable_folders}
    rules |= {_plain(file): "deny" for file in secret_files(settings, env)}
    rules |= {f"{_plain(file)}*": "deny" for file in _databases(settings)}
    profile = tomlkit.inline_table()
    profile["extends"] = _BASES[settings.config.codex.sandbox]
    profile["filesystem"] = tomlkit.inline_table()
    profile["filesystem"].update(rules)
    if settings.config.codex.network_access and settings.config.codex.sandbox == "workspace-write":
        profile["network"] = tomlkit.inline_table()
        profile["network"].update({"enabled": True})
    return {f"permissions.{PROFILE}": profile.as_string()}


def secret_files(settings: Settings, env: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files and folders with secrets that are there, links followed; databases are not among them."""
    beside = settings.config_file.parent
    named = [
        *(settings.codex_home / name for name in _KEPT),
        *(Path(file) for name, file in env.items() if name.endswith(_SECRET_FILES) and file),
        *(beside / entry.token_file for entry in settings.config.principals if entry.token_file),
        *(beside / file for file in [settings.config.a2a.signing_key_file] if file),
        *_kept_for_platform(settings),
        *(settings.platform.provisioned if settings.platform is not None else ()),
    ]
    return tuple(dict.fromkeys(path.resolve() for path in _there(named)))


def _kept_for_platform(settings: Settings) -> tuple[Path, ...]:
    platform = settings.platform
    return () if platform is None else (platform.token_file, platform.secret_file)


_SECRET_FILES: Final = tuple(
    f"{kind}_FILE" for kind in ("KEY", "TOKEN", "SECRET", "PASSWORD", "JSON", "URL", "HEADERS")
)
"""How variables end that name the file of a secret; others, such as SSL_CERT_FILE, are for commands too."""


def _there(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.is_file() or (path.name in _KEPT and path.is_dir())]


def _databases(settings: Settings) -> tuple[Path, ...]:
    """Return what the names of databases begin with: their logs' and copies' begin so too."""
    own = sqlite_file(settings.database_url.reveal())
    home = settings.codex_home.resolve()
    of_codex = sorted({home / name for name in _OF_CODEX})
    return (*of_codex, *([own.resolve()] if own is not None else []))


_OF_CODEX: Final = ("logs_", "state_", "thread_history_", "memories_", "goals_", "queue_")
"""The databases in CODEX_HOME, by what comes ahead of their version."""


def _plain(path: Path) -> str:
    if _SPECIAL & set(str(path)):
        raise ConfigError(f"codex.hide_secrets: {path} has one of * ? [ ] {{ }} \\ in its name, which codex misreads")
    return str(path)
