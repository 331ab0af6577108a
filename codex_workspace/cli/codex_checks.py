"""The doctor's checks of codex: version, handshake, sandbox and MCP servers.

codex is started on a copy of its configuration, so that the checks change nothing.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.agent import is_exec, launch_of, secrets_of, thread_options
from codex_workspace.app_server import MINIMUM_VERSION, Connection, open_app_server
from codex_workspace.backends.codex_exec import backend as exec_backend
from codex_workspace.backends.codex_exec.backend import further_config
from codex_workspace.backends.codex_exec.runtime import CodexExec
from codex_workspace.cli.checks import EXIT_CONFIG, Facts, Finding, first_line
from codex_workspace.codex.sandbox import (
    WITHOUT,
    SandboxReport,
    check_sandbox,
    inspect_sandbox,
    profile_of,
    profile_overrides,
    secret_files,
)
from codex_workspace.codex.thread import McpStatus, probe_mcp_servers
from codex_workspace.common.errors import CodexCannotStart, CodexError, ConfigError
from codex_workspace.common.values import Version, find_version, format_version
from codex_workspace.config.codex_toml import prepare_codex_home
from codex_workspace.config.settings import Settings
from codex_workspace.runtimes.launch import Launch
from codex_workspace.storage.database import sqlite_file

TESTED_VERSIONS: Final = ((0, 158, 0), (0, 169, 0))
"""The oldest and the newest minor version of codex that the end-to-end tests run."""


VERSION_TIMEOUT_S: Final = 15.0


def check_codex(facts: Facts) -> Finding:
    """Check that codex is installed in a supported version."""
    binary = facts.settings.codex_bin
    remedy = "install openai-codex-cli-bin as pinned in requirements-codex.txt, or set CODEX_BIN to the binary"
    if binary is None:
        return Finding("failed", "codex is not installed", remedy)
    try:
        text = _ask_version(binary, facts.env)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("failed", f"{binary} cannot be run: {first_line(error)}", remedy)
    version = find_version(text)
    if version is None:
        return Finding("failed", f"{binary} prints no version, so it is not codex", remedy)
    return _version_finding(version, binary)


def _version_finding(version: Version, binary: Path) -> Finding:
    oldest, newest = TESTED_VERSIONS
    tested = f"tested versions: {format_version(oldest)} to {format_version(newest)}"
    shown = f"codex {format_version(version)} at {binary}"
    if version < MINIMUM_VERSION:
        return Finding("failed", f"{shown} is too old", f"install {format_version(MINIMUM_VERSION)} or newer")
    if not oldest[:2] <= version[:2] <= newest[:2]:
        return Finding("warning", f"{shown} is not tested with this agent", tested)
    return Finding("ok", f"{shown}; {tested}")


def _ask_version(binary: Path, env: Mapping[str, str]) -> str:
    passed = {name: env[name] for name in ("PATH", "HOME") if name in env}
    asked = subprocess.run(
        [str(binary), "--version"],
        env=passed,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=VERSION_TIMEOUT_S,
        check=True,
    )
    return asked.stdout.decode("utf-8", "replace")


def check_handshake(facts: Facts) -> Finding:
    """Check that codex starts with its configuration and answers."""
    home = ""
    try:
        with tempfile.TemporaryDirectory(prefix="codex-workspace-doctor-") as home:
            milliseconds, version = anyio.run(_handshake, _with_copied_home(facts, Path(home)), facts)
    except CodexCannotStart as error:
        text = _with_real_home(error, home, facts)
        return Finding("failed", text, "see codex's message above; check CODEX_BIN and CODEX_HOME/config.toml")
    except ConfigError as error:
        text = _with_real_home(error, home, facts)
        return Finding("failed", text, "correct this and run the doctor again", EXIT_CONFIG)
    except (CodexError, OSError) as error:
        return Finding("failed", f"cannot start codex: {first_line(error)}", "check CODEX_BIN and CODEX_HOME")
    answered = "read its configuration" if is_exec(facts.settings) else "answered initialize"
    return Finding("ok", f"codex {format_version(version)} {answered} in {milliseconds:.0f} ms")


def _with_real_home(error: Exception, home: str, facts: Facts) -> str:
    """Return an error's text with the real CODEX_HOME in place of the temporary copy."""
    return str(error).replace(home, str(facts.settings.codex_home)) if home else str(error)


def _with_copied_home(facts: Facts, home: Path, settings: Settings | None = None) -> Settings:
    """Return settings whose CODEX_HOME is `home`, with a copy of codex's configuration."""
    settings = replace(settings or facts.settings, codex_home=home)
    own = facts.settings.codex_home / "config.toml"
    if own.is_file():
        shutil.copyfile(own, home / "config.toml")
    prepare_codex_home(settings, facts.provider, further_config(settings) if is_exec(settings) else {})
    return settings


async def _handshake(settings: Settings, facts: Facts) -> tuple[float, tuple[int, int, int]]:
    started = time.perf_counter()
    launch = launch_of(settings, facts.provider, facts.env)
    if is_exec(settings):
        version = await CodexExec(launch).version()
        await exec_backend.require_valid_config(launch)
        milliseconds = (time.perf_counter() - started) * 1000
        facts.sandbox = await _try_sandbox(launch, settings)
        return milliseconds, version
    # The sandbox hides the real folders, not the copy.
    launch = replace(launch, overrides={**launch.overrides, **profile_overrides(facts.settings, facts.env)})
    async with open_app_server(launch) as codex:
        milliseconds = (time.perf_counter() - started) * 1000
        facts.sandbox = await _inspect_sandbox(codex, facts)
        return milliseconds, codex.version


def check_sandbox_finding(facts: Facts) -> Finding:
    """Check what commands can do, by running one the way codex runs the model's."""
    match facts.sandbox:
        case SandboxReport() as report:
            pass
        case CodexCannotStart() as error:
            return Finding("failed", str(error), "see docs/sandbox.md")
        case str(sentence):
            return Finding("ok", sentence)
        case error:
            return Finding("failed", f"no command could be run: {error}", "see the handshake check")
    text = f"{facts.settings.config.codex.sandbox}: a command {_abilities(report, _folders(facts))}"
    holders = report.holders_of(secrets_of(facts.settings, facts.provider))
    if not holders and facts.settings.exposed:
        changeable = " and ".join(facts.settings.exposed)
        return Finding("warning", f"{text}; so it can change {changeable}", "set WORKSPACE_DIR to another folder")
    if not holders:
        return Finding("ok", f"{text}; it saw no credential")
    shown = ", ".join(f"{process} ({_program(process)})" for process in holders[:5])
    return Finding(
        "warning",
        f"{text}; it saw the agent's credentials in the environment of the processes {shown}",
        "start the agent as a separate, non-root user, from a process without credentials",
    )


def _abilities(report: SandboxReport, named: Mapping[str, Path]) -> str:
    """Return what a command could do, in words."""
    writable = [name for name, folder in named.items() if folder in report.writable]
    only_readable = [name for name, folder in named.items() if folder in report.readable - report.writable]
    closed = [name for name, folder in named.items() if folder not in report.readable | report.writable]
    verbs = [("can write", writable), ("can only read", only_readable), ("cannot see", closed)]
    network = "can reach the network" if report.reaches_network else "cannot reach the network"
    return "; ".join([*(f"{verb} {', '.join(names)}" for verb, names in verbs if names), network])


def _folders(facts: Facts) -> dict[str, Path]:
    """Return the folders and files to try to access, by their descriptions."""
    settings = facts.settings
    home = facts.env.get("HOME")
    named = {
        "the workspace": settings.workspace_dir,
        "config.yaml's folder": settings.config_file.parent,
        "the state folder": settings.state_dir,
        "CODEX_HOME": settings.codex_home,
        **({"HOME": Path(home)} if home else {}),
        "/tmp": Path("/tmp"),
    }
    database = sqlite_file(settings.database_url.reveal())
    files = {str(file): file for file in secret_files(settings, facts.env) if file.is_file()}
    if database is not None and database.is_file():
        files["the database"] = database
    return {name: folder for name, folder in named.items() if folder.is_dir()} | files


def _program(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return "gone"


async def _try_sandbox(launch: Launch, settings: Settings) -> str | CodexError:
    """Run a command in codex's sandbox; only a turn of `codex exec` would apply the one of config.yaml."""
    mode = settings.config.codex.sandbox
    try:
        await exec_backend.require_sandbox(launch, mode)
    except CodexError as error:
        return error
    made = "codex's sandbox is off" if mode in WITHOUT else "codex's sandbox works here"
    return f"{mode}: {made}; commands are not tried with codex.backend: exec"


async def _inspect_sandbox(codex: Connection, facts: Facts) -> SandboxReport | CodexError:
    settings = facts.settings
    try:
        profile = profile_of(settings)
        await check_sandbox(codex, settings.config.codex.sandbox, settings.workspace_dir, profile)
        return await inspect_sandbox(codex, settings.workspace_dir, _folders(facts).values(), profile)
    except CodexError as error:
        return error


def check_mcp(facts: Facts) -> Finding:
    """Start all MCP servers and list their tools."""
    servers = facts.settings.mcp
    if not servers.servers and not servers.left_out:
        return Finding("ok", "none is configured")
    if is_exec(facts.settings):
        names = ", ".join(server.name for server in servers.servers) or "none"
        text = f"{names}: not started; with codex.backend: exec only a turn starts them"
        missed = [f"{name}: {why}" for name, why in servers.left_out.items()]
        return Finding(
            "warning" if missed else "ok", "\n".join((text, *missed)), "set those variables" if missed else ""
        )
    try:
        with tempfile.TemporaryDirectory(prefix="codex-workspace-doctor-") as home:
            # If a required server fails, codex reports only that one.
            settings = replace(facts.settings, mcp=servers.optional)
            found = anyio.run(_try_servers, _with_copied_home(facts, Path(home), settings), facts)
    except (CodexError, ConfigError, OSError) as error:
        return Finding("failed", f"the servers cannot be started: {first_line(error)}", "see the handshake check")
    tools = [f"{name}: {len(each)} tools ({', '.join(each)})" for name, each in found.tools.items()]
    text = "\n".join((*found.problems.values(), *tools))
    if not found.problems:
        return Finding("ok", text)
    required = {server.name for server in servers.servers if server.required}
    remedy = "correct mcp_servers in config.yaml; run the server's command by hand, or request its URL"
    return Finding("failed" if found.problems.keys() & required else "warning", text, remedy)


async def _try_servers(settings: Settings, facts: Facts) -> McpStatus:
    options = thread_options(settings, facts.provider)
    async with open_app_server(launch_of(settings, facts.provider, facts.env)) as codex:
        return await probe_mcp_servers(codex, options, settings.config.codex.request_timeout_s)
