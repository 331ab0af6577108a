"""Codex's sandbox: whether it works on this machine, what it permits, and the permission profile that hides secrets.

If the kernel denies codex a sandbox, as under Docker's default seccomp profile, turns complete although every command
in them fails. So the sandbox is checked by a command before the first turn.
"""

import hashlib
import json
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import tomlkit

from codex_workspace.app_server import Connection
from codex_workspace.common.database_url import sqlite_file
from codex_workspace.common.errors import CodexCannotStart, CodexRefused, CodexTimeout, ConfigError, ProtocolError
from codex_workspace.config.settings import Settings
from codex_workspace.protocol.jsonrpc import InvalidField, number, text

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject

SECCOMP_PROFILE: Final = "deploy/seccomp.json"
"""This project's profile for Docker hosts: Docker's own, with namespaces and mounts allowed."""

PROBE_TIMEOUT_S: Final = 10.0
"""A command in the sandbox takes about 0.1 s, and several times that on a busy machine."""

WITHOUT: Final = frozenset(("danger-full-access", "container"))
"""The modes in which codex runs commands without a sandbox."""

PROFILE: Final = "codex-workspace"
"""The name of the permission profile."""

_BASES: Final = {"read-only": ":read-only", "workspace-write": ":workspace"}

_PATTERN_CHARS: Final = frozenset("*?[]{}\\")
"""Codex reads these as a pattern, which would hide other files."""

_SECRETS_OF_CODEX: Final = (
    *("auth.json", ".credentials.json", "config.toml"),
    *("sessions", "archived_sessions", "history.jsonl"),
)
"""Files and folders in CODEX_HOME: credentials, the operator's configuration, and the conversations of all callers."""

_DATABASES_OF_CODEX: Final = ("logs_", "state_", "thread_history_", "memories_", "goals_", "queue_")
"""The prefixes of databases in CODEX_HOME; a version follows."""

_SECRET_FILE_VARIABLES: Final = tuple(
    f"{kind}_FILE" for kind in ("KEY", "TOKEN", "SECRET", "PASSWORD", "JSON", "URL", "HEADERS")
)
"""The endings of variables that name a file with a secret; others, such as SSL_CERT_FILE, stay readable."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What a command could read, write and connect to.

    values: the digests (`digest`) of all values in the environments that it could read, by process id.
    """

    readable: frozenset[Path]
    writable: frozenset[Path]
    reaches_network: bool
    values: Mapping[int, frozenset[str]]

    def holders_of(self, secrets: Iterable[str]) -> list[int]:
        """Return the ids of the processes whose environment shows one of `secrets`."""
        wanted = {digest(secret) for secret in secrets}
        return sorted(process for process, seen in self.values.items() if seen & wanted)


def digest(value: str) -> str:
    """Return a digest of a variable's value, so that no secret is sent to or by a command."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:16]


async def check_sandbox(codex: Connection, mode: str, folder: Path, profile: str | None = None) -> None:
    """Run a command in the sandbox, in `folder`; do nothing if `mode` has no sandbox.

    Raises:
        CodexCannotStart: the sandbox does not work on this machine.
    """
    if mode in WITHOUT:
        return
    try:
        result = await run(codex, ["true"], folder, profile)
    except (CodexRefused, CodexTimeout) as error:
        raise sandbox_error(mode, str(error)) from error
    if result.exit_code != 0:
        raise sandbox_error(mode, result.stderr or result.stdout or f"exit code {result.exit_code}")


def sandbox_error(mode: str, output: str) -> CodexCannotStart:
    """Return the error that the sandbox does not work on this machine, with the remedies."""
    why = next((line.strip() for line in output.splitlines() if line.strip()), "")
    return CodexCannotStart(
        f"codex's sandbox (codex.sandbox: {mode}) cannot work on this machine, so every command would fail: "
        f"{why.rstrip('.')}; in Docker, start the container with --security-opt seccomp={SECCOMP_PROFILE}, or, if "
        f"the container itself is a sufficient sandbox, set codex.sandbox to container in config.yaml"
    )


def without_sandbox(settings: Settings) -> str:
    """Return what commands can do because `codex.sandbox: auto` found codex's sandbox blocked, and why it is."""
    return (
        f"codex.sandbox: auto: codex's sandbox cannot work here ({settings.sandbox_blocked}), so the container is the "
        f"sandbox: commands reach the network, and read and change all files of the agent's user, its state included"
    )


WITH_SANDBOX: Final = (
    f"for codex's sandbox, start the container with --security-opt seccomp={SECCOMP_PROFILE}; codex.sandbox: "
    "workspace-write makes it a condition, and container turns this warning off"
)


async def run(codex: Connection, command: list[str], folder: Path, profile: str | None = None) -> CommandResult:
    """Run `command` in `folder` as codex runs the model's commands, with `profile` if one is given.

    Raises:
        CodexRefused: the program or the folder does not exist.
        CodexGone, CodexTimeout: as `Connection.call`.
        ProtocolError: the result has an unknown shape.
    """
    params: JsonObject = {"command": [*command], "cwd": str(folder), "timeoutMs": int(PROBE_TIMEOUT_S * 1000)}
    if profile is not None:
        params["permissionProfile"] = profile
    result = await codex.call("command/exec", params, timeout_s=PROBE_TIMEOUT_S + 1)
    try:
        if not isinstance(result, dict):
            raise InvalidField("a result")
        return CommandResult(number(result, "exitCode"), text(result, "stdout"), text(result, "stderr"))
    except InvalidField as error:
        raise ProtocolError(f"codex's response to command/exec lacks {error}") from error


async def inspect_sandbox(
    codex: Connection, folder: Path, paths: Iterable[Path], profile: str | None = None
) -> SandboxReport:
    """Run a command in `folder` that tries what the sandbox permits; it changes nothing.

    Args:
        codex: the connection.
        folder: the command's working directory.
        paths: the folders and files that it tries to read and to write.
        profile: the permission profile of threads, if any.

    Raises:
        CodexError: as `run`; or the command failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        argument = json.dumps({"folders": [str(each) for each in paths], "port": listener.getsockname()[1]})
        result = await run(codex, [sys.executable, "-I", "-c", _PROBE, argument], folder, profile)
    if result.exit_code != 0:
        raise ProtocolError(
            f"the probe command failed with exit code {result.exit_code}: {result.stderr.strip()[-300:]}"
        )
    report = json.loads(result.stdout)
    return SandboxReport(
        readable=frozenset(Path(each) for each in report["readable"]),
        writable=frozenset(Path(each) for each in report["writable"]),
        reaches_network=report["reaches_network"],
        values={int(process): frozenset(values) for process, values in report["values"].items()},
    )


def profile_of(settings: Settings) -> str | None:
    """Return the permission profile of threads; None if `codex.hide_secrets` is off."""
    return PROFILE if settings.config.codex.hide_secrets else None


def create_secret_files(settings: Settings) -> None:
    """Create `sessions`, and the platform's secret files if they are to be hidden: the first codex hides what exists.

    Raises:
        ConfigError: they cannot be created.
    """
    try:
        (settings.codex_home / "sessions").mkdir(mode=0o700, exist_ok=True)
        for file in _platform_files(settings) if settings.config.codex.hide_secrets else ():
            file.touch(0o600)
    except OSError as error:
        raise ConfigError(f"cannot create {error.filename}: {error.strerror}") from error


def profile_overrides(settings: Settings, env: Mapping[str, str]) -> dict[str, str]:
    """Return the `-c` settings that define the permission profile: the configured sandbox without the agent's secrets.

    Missing files are not listed, because codex would create empty ones, in folders where commands may write.

    Raises:
        ConfigError: codex would misread a path.
    """
    if not settings.config.codex.hide_secrets:
        return {}
    own = sqlite_file(settings.database_url.reveal())
    home = settings.codex_home.resolve()
    databases = (*sorted(home / name for name in _DATABASES_OF_CODEX), *([own.resolve()] if own is not None else []))
    rules: dict[str, str | int] = {"glob_scan_max_depth": 1}
    rules |= {_literal(folder): "write" for folder in settings.writable_folders}
    rules |= {_literal(file): "deny" for file in secret_files(settings, env)}
    # The names of a database's log and copies begin with its own name.
    rules |= {f"{_literal(file)}*": "deny" for file in databases}
    profile = tomlkit.inline_table()
    profile["extends"] = _BASES[settings.config.codex.sandbox]
    profile["filesystem"] = tomlkit.inline_table()
    profile["filesystem"].update(rules)
    if settings.config.codex.network_access and settings.config.codex.sandbox == "workspace-write":
        profile["network"] = tomlkit.inline_table()
        profile["network"].update({"enabled": True})
    return {f"permissions.{PROFILE}": profile.as_string()}


def secret_files(settings: Settings, env: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the existing files and folders with secrets, with links resolved; databases are not among them."""
    beside = settings.config_file.parent
    named = [
        *(settings.codex_home / name for name in _SECRETS_OF_CODEX),
        *(Path(file) for name, file in env.items() if name.endswith(_SECRET_FILE_VARIABLES) and file),
        *(beside / entry.token_file for entry in settings.config.principals if entry.token_file),
        *(beside / file for file in [settings.config.a2a.signing_key_file] if file),
        *_platform_files(settings),
        *(settings.platform.provisioned if settings.platform is not None else ()),
    ]
    existing = (path for path in named if path.is_file() or (path.name in _SECRETS_OF_CODEX and path.is_dir()))
    return tuple(dict.fromkeys(path.resolve() for path in existing))


def _platform_files(settings: Settings) -> tuple[Path, ...]:
    platform = settings.platform
    return () if platform is None else (platform.token_file, platform.secret_file)


def _literal(path: Path) -> str:
    if _PATTERN_CHARS & set(str(path)):
        raise ConfigError(f"codex.hide_secrets: {path} contains * ? [ ] {{ }} or \\, which codex misreads; rename it")
    return str(path)


_PROBE: Final = """
import glob, hashlib, json, os, socket, sys

asked = json.loads(sys.argv[1])


def digests(file):
    try:
        with open(file, "rb") as stream:
            variables = stream.read().split(b"\\0")
    except OSError:
        return []
    return [hashlib.sha256(each.partition(b"=")[2]).hexdigest()[:16] for each in variables if b"=" in each]


def reaches(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


found = {file.split("/")[2]: digests(file) for file in glob.glob("/proc/[0-9]*/environ")}
print(json.dumps({
    "readable": [each for each in asked["folders"] if os.access(each, os.R_OK | os.path.isdir(each) * os.X_OK)],
    "writable": [each for each in asked["folders"] if os.access(each, os.W_OK)],
    "reaches_network": reaches(asked["port"]),
    "values": {process: values for process, values in found.items() if values},
}))
"""
