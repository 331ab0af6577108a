"""Diagnoses problems of this agent's setup and prints a remedy for each: `codex-workspace doctor`.

The doctor changes nothing; codex is started on a copy of its configuration. `CHECKS` lists the checks in their order.
"""

import json
import logging
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.app_server import MINIMUM_VERSION, Connection, open_app_server
from codex_workspace.backends.codex_exec import backend as exec_backend
from codex_workspace.backends.codex_exec.runtime import CodexExec
from codex_workspace.cli import checks
from codex_workspace.cli.checks import CheckFailed, Facts, Finding, explained
from codex_workspace.codex import sandbox
from codex_workspace.codex.thread import ThreadOptions, probe_mcp_servers
from codex_workspace.common.database_url import sqlite_file
from codex_workspace.common.errors import AgentError, CodexCannotStart, CodexError, ConfigError
from codex_workspace.common.values import find_version, format_version
from codex_workspace.config.codex_toml import prepare_codex_home
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import SUBSCRIPTION, ChosenProvider
from codex_workspace.config.settings import Settings
from codex_workspace.launching import is_exec, launch_of, lock_state, thread_options
from codex_workspace.protocol.jsonrpc import objects, text
from codex_workspace.runtimes.launch import ASSUMED_WINDOW, UNKNOWN_MODEL, Launch
from codex_workspace.storage.sqlite import set_aside

EXIT_OTHER: Final = 1
EXIT_CONFIG: Final = 2
EXIT_CODEX: Final = 3

TESTED_VERSIONS: Final = ((0, 158, 0), (0, 169, 0))
"""The oldest and the newest minor version of codex that the end-to-end tests run."""

VERSION_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Check:
    """A check, the remedies and the exit code of its failure, and the checks that must have succeeded before it.

    correction: the remedy if a ConfigError is the finding.
    """

    name: str
    run: Callable[[Facts], Finding]
    remedy: str = ""
    correction: str = "correct this and run the doctor again"
    needs: tuple[str, ...] = ("config",)
    exit_code: int = EXIT_OTHER


def doctor(env: Mapping[str, str], *, as_json: bool, online: bool = False) -> int:
    """Run all checks and print their findings.

    Args:
        env: the agent's environment.
        as_json: print one JSON list instead of lines.
        online: also send a request to the model's provider, with the credential.

    Returns:
        The exit code: 0 if nothing failed, 2 if the configuration is wrong, 3 if codex cannot start, else 1.
    """
    # The findings state what libraries and the connection to codex would log.
    logging.basicConfig(handlers=[logging.NullHandler()])
    findings: dict[str, Finding] = {}
    codes: set[int] = set()
    facts = Facts(env)
    for check in (*CHECKS, *(ONLINE if online else ())):
        findings[check.name], code = run_check(check, facts, findings)
        codes.add(code)
        if not as_json:
            _print(check.name, findings[check.name])
    if as_json:
        listed = [{"check": name, **asdict(found)} for name, found in findings.items()]
        print(json.dumps(listed, indent=2, ensure_ascii=False))
    return next((code for code in (EXIT_CONFIG, EXIT_CODEX, EXIT_OTHER) if code in codes), 0)


def run_check(check: Check, facts: Facts, before: Mapping[str, Finding]) -> tuple[Finding, int]:
    """Return the check's finding and exit code, given the findings of the checks before it."""
    missing = [name for name in before if name in check.needs and before[name].status in ("failed", "not run")]
    if missing:
        return Finding("not run", f"needs {' and '.join(missing)}"), 0
    code = check.exit_code
    try:
        found = check.run(facts)
    except ConfigError as error:
        found, code = Finding("failed", str(error), check.correction), EXIT_CONFIG
    except (AgentError, OSError) as error:
        found = Finding("failed", str(error))
        code = EXIT_CODEX if isinstance(error, CodexError) else code
    remedy = found.remedy or (check.remedy if found.status in ("warning", "failed") else "")
    found = Finding(found.status, facts.redact(found.finding), facts.redact(remedy))
    return found, code if found.status == "failed" else 0


def _print(name: str, found: Finding) -> None:
    finding = found.finding.replace("\n", f"\n{'':<22}")
    print(f"{found.status:<8} {name:<12} {finding}", flush=True)
    if found.remedy:
        print(f"{'':<21} -> {found.remedy}", flush=True)


def set_database_aside(env: Mapping[str, str]) -> int:
    """Rename a database file that is damaged or belongs to another program, print its new name, and return 0.

    Raises:
        ConfigError: the file is neither, the database is not a SQLite file, or an agent uses it.
    """
    # Whether codex's sandbox works does not matter here.
    settings = load_settings({**env, "SANDBOX_FALLBACK": ""})
    file = sqlite_file(settings.database_url.reveal())
    if file is None:
        raise ConfigError("DATABASE_URL: only the file of a SQLite database can be set aside")
    if not settings.state_dir.is_dir():
        raise ConfigError(f"WORKSPACE_STATE_DIR: {settings.state_dir} does not exist, so there is nothing to set aside")
    print(f"{file} is now {anyio.run(_set_aside, settings, file)}; the next start creates a new one")
    return 0


async def _set_aside(settings: Settings, file: Path) -> Path:
    async with lock_state(settings):
        return set_aside(file)


def check_codex(facts: Facts) -> Finding:
    """Check that codex is installed in a supported version."""
    binary = facts.settings.codex_bin
    if binary is None:
        raise CheckFailed("codex is not installed")
    passed = {name: facts.env[name] for name in ("PATH", "HOME") if name in facts.env}
    with explained(f"{binary} cannot be run"):
        asked = subprocess.run(
            [binary, "--version"],
            env=passed,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERSION_TIMEOUT_S,
            check=True,
        )
    version = find_version(asked.stdout.decode("utf-8", "replace"))
    if version is None:
        raise CheckFailed(f"{binary} does not print a version, so it is not codex")
    oldest, newest = TESTED_VERSIONS
    tested = f"tested versions: {format_version(oldest)} to {format_version(newest)}"
    shown = f"codex {format_version(version)} at {binary}"
    if version < MINIMUM_VERSION:
        return Finding("failed", f"{shown} is too old", f"install {format_version(MINIMUM_VERSION)} or newer")
    if not oldest[:2] <= version[:2] <= newest[:2]:
        return Finding("warning", f"{shown} is not tested with this agent", tested)
    return Finding("ok", f"{shown}; {tested}")


def check_handshake(facts: Facts) -> Finding:
    """Check that codex starts with its configuration and answers; also find out what later checks report."""
    # If a required MCP server fails, codex reports only that one.
    settings = replace(facts.settings, mcp=facts.settings.mcp.optional)
    with tempfile.TemporaryDirectory(prefix="codex-workspace-doctor-") as home:
        facts.codex_copy = home
        if (settings.codex_home / "config.toml").is_file():
            shutil.copyfile(settings.codex_home / "config.toml", Path(home, "config.toml"))
        further = exec_backend.further_config(settings) if is_exec(settings) else {}
        prepare_codex_home(replace(settings, codex_home=Path(home)), facts.provider, further)
        # The sandbox hides the real folders, not the copy.
        launch = replace(launch_of(settings, facts.provider, facts.env), codex_home=Path(home))
        if is_exec(settings):
            return anyio.run(_start_exec, launch, facts)
        return anyio.run(_start_app_server, launch, thread_options(settings, facts.provider), facts)


async def _start_exec(launch: Launch, facts: Facts) -> Finding:
    started = time.perf_counter()
    version = await CodexExec(launch).version()
    await exec_backend.require_valid_config(launch)
    milliseconds = (time.perf_counter() - started) * 1000
    facts.sandbox = await _result(_try_exec_sandbox(launch, facts))
    facts.metadata = Finding("not run", "with codex.backend: exec, the log of a model's first turn says it")
    servers = facts.settings.mcp
    names = ", ".join(server.name for server in servers.servers) or "none"
    missed = [f"{name}: {why}" for name, why in servers.left_out.items()]
    text = f"{names}: not started; with codex.backend: exec, each turn starts them"
    remedy = "set those variables" if missed else ""
    facts.mcp_servers = Finding("warning" if missed else "ok", "\n".join((text, *missed)), remedy)
    return Finding("ok", f"codex {format_version(version)} read its configuration in {milliseconds:.0f} ms")


async def _start_app_server(launch: Launch, options: ThreadOptions, facts: Facts) -> Finding:
    started = time.perf_counter()
    async with open_app_server(launch) as codex:
        milliseconds = (time.perf_counter() - started) * 1000
        facts.sandbox = await _result(_inspect_sandbox(codex, facts))
        facts.mcp_servers = await _result(_start_mcp_servers(codex, options, facts))
        facts.metadata = await _result(_look_up_model(codex, facts.provider))
        return Finding("ok", f"codex {format_version(codex.version)} answered initialize in {milliseconds:.0f} ms")


async def _result(check: Awaitable[Finding]) -> Finding | CodexError:
    try:
        return await check
    except CodexError as error:
        return error


async def _try_exec_sandbox(launch: Launch, facts: Facts) -> Finding:
    """Run a command in codex's sandbox; only a turn of `codex exec` would apply the one of config.yaml."""
    mode = facts.settings.config.codex.sandbox
    await exec_backend.require_sandbox(launch, mode)
    made = "codex's sandbox is off" if mode in sandbox.WITHOUT else "codex's sandbox works here"
    return _sandbox_finding(facts.settings, f"{mode}: {made}; commands are not tested with codex.backend: exec")


def _sandbox_finding(settings: Settings, text: str) -> Finding:
    """Return what was found; it is a warning if codex's sandbox is off because it cannot work here."""
    if settings.sandbox_blocked is None:
        return Finding("ok", text)
    return Finding("warning", f"{text}; {sandbox.without_sandbox(settings)}", sandbox.WITH_SANDBOX)


async def _inspect_sandbox(codex: Connection, facts: Facts) -> Finding:
    """Find out what commands can do, by running one the way codex runs the model's."""
    settings, folders = facts.settings, _folders(facts)
    mode, profile = settings.config.codex.sandbox, sandbox.profile_of(settings)
    await sandbox.check_sandbox(codex, mode, settings.workspace_dir, profile)
    report = await sandbox.inspect_sandbox(codex, settings.workspace_dir, folders.values(), profile)
    text = f"{mode}: a command {_abilities(report, folders)}"
    holders = report.holders_of(facts.secrets)
    if holders:
        shown = ", ".join(f"{process} ({_program(process)})" for process in holders[:5])
        return Finding(
            "warning",
            f"{text}; it can read the agent's credentials in the environment of the processes {shown}",
            "start the agent as a separate, non-root user, from a process without credentials",
        )
    if settings.exposed:
        changeable = " and ".join(settings.exposed)
        return Finding("warning", f"{text}, so it can change {changeable}", "set WORKSPACE_DIR to another folder")
    return _sandbox_finding(settings, f"{text}; it cannot read credentials")


def _abilities(report: sandbox.SandboxReport, named: Mapping[str, Path]) -> str:
    """Return what a command could do, in words."""
    verbs = {
        "can write": report.writable,
        "can only read": report.readable - report.writable,
        "cannot see": {*named.values()} - report.readable - report.writable,
    }
    found = {verb: [name for name, path in named.items() if path in paths] for verb, paths in verbs.items()}
    network = "can reach the network" if report.reaches_network else "cannot reach the network"
    return "; ".join([*(f"{verb} {', '.join(names)}" for verb, names in found.items() if names), network])


def _folders(facts: Facts) -> dict[str, Path]:
    """Return the folders and files to try to access, by their descriptions."""
    settings = facts.settings
    folders = {
        "the workspace": settings.workspace_dir,
        "config.yaml's folder": settings.config_file.parent,
        "the state folder": settings.state_dir,
        "CODEX_HOME": settings.codex_home,
        "HOME": Path(facts.env.get("HOME", "/nonexistent")),
        "/tmp": Path("/tmp"),
    }
    files = {str(file): file for file in sandbox.secret_files(settings, facts.env)}
    database = sqlite_file(settings.database_url.reveal())
    if database is not None:
        files["the database"] = database
    return {name: path for name, path in (folders | files).items() if path.exists()}


def _program(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return "gone"


async def _start_mcp_servers(codex: Connection, options: ThreadOptions, facts: Facts) -> Finding:
    """Start all MCP servers and list their tools."""
    servers = facts.settings.mcp
    if not servers.servers and not servers.left_out:
        return Finding("ok", "none is configured")
    found = await probe_mcp_servers(codex, options, facts.settings.config.codex.request_timeout_s)
    tools = [f"{name}: {len(each)} tools ({', '.join(each)})" for name, each in found.tools.items()]
    failed = {server.name for server in servers.servers if server.required} & found.problems.keys()
    text = "\n".join((*found.problems.values(), *tools))
    return Finding("failed" if failed else "warning" if found.problems else "ok", text)


async def _look_up_model(codex: Connection, provider: ChosenProvider) -> Finding:
    """Look for the model in codex's list."""
    if provider.auth_mode == SUBSCRIPTION:
        return Finding("ok", "codex loads its list of models with the subscription")
    listed = await codex.call("model/list", {"includeHidden": True})
    known = tuple(text(each, "model") for each in objects(listed, "data")) if isinstance(listed, dict) else ()
    if _begins_as(known, provider.model):
        return Finding("ok", f"codex knows the model {provider.model}")
    finding = f"codex does not know the model {provider.model}: {UNKNOWN_MODEL}"
    is_declared = 0 < int(provider.overrides.get("model_context_window", "0")) <= ASSUMED_WINDOW
    return Finding("ok" if is_declared else "warning", finding)


def _begins_as(known: tuple[str, ...], model: str) -> bool:
    """Return whether codex takes a model for a known one: by the beginning of its name, with or without `vendor/`."""
    return model.startswith(known) or model.rpartition("/")[2].startswith(known)


def _found(result: Finding | CodexError, failure: str) -> Finding:
    """Return what the handshake has found out; `failure` says what a later error of the connection prevented.

    Raises:
        CodexCannotStart: the sandbox cannot work.
    """
    if isinstance(result, CodexCannotStart):
        raise result
    if isinstance(result, CodexError):
        return Finding("failed", f"{failure}: {result}", "see the handshake check")
    return result


_PERMIT: Final = "give this user permission to read and write it, or choose another folder with"

CHECKS: Final = (
    Check("config", checks.check_config, needs=()),
    Check(
        "provider", checks.check_provider, correction="set the credential, or choose another provider in config.yaml"
    ),
    Check("instructions", checks.check_instructions),
    Check("access", checks.check_access),
    Check(
        "codex",
        check_codex,
        "install openai-codex-cli-bin as pinned in requirements-codex.txt, or set CODEX_BIN to the binary",
        exit_code=EXIT_CODEX,
    ),
    Check("state", lambda facts: checks.check_writable(facts.settings.state_dir), f"{_PERMIT} WORKSPACE_STATE_DIR"),
    Check("codex home", lambda facts: checks.check_writable(facts.settings.codex_home), f"{_PERMIT} CODEX_HOME"),
    Check("disk", checks.check_disk, "free disk space, or move the state folder (WORKSPACE_STATE_DIR)"),
    Check("workspace", checks.check_workspace, f"{_PERMIT} WORKSPACE_DIR"),
    Check("lock", checks.check_lock, f"{_PERMIT} WORKSPACE_STATE_DIR"),
    Check(
        "schema",
        checks.check_schema,
        "restore a backup of the file, or rename it: `python -m codex_workspace doctor --set-aside`",
        exit_code=EXIT_CONFIG,
    ),
    Check(
        "database",
        checks.check_database,
        "correct DATABASE_URL, or remove it to use a file in the state folder",
        needs=("config", "schema"),
    ),
    Check("port", checks.check_port, "stop the other program, or set A2A_PORT to another port"),
    Check(
        "handshake",
        check_handshake,
        "see codex's message above; check CODEX_BIN and CODEX_HOME/config.toml",
        needs=("provider", "codex"),
        exit_code=EXIT_CODEX,
    ),
    Check(
        "sandbox",
        lambda facts: _found(facts.sandbox, "no command could be run"),
        "see docs/sandbox.md",
        needs=("handshake",),
        exit_code=EXIT_CODEX,
    ),
    Check(
        "mcp servers",
        lambda facts: _found(facts.mcp_servers, "the servers cannot be started"),
        "correct mcp_servers in config.yaml; run the server's command by hand, or request its URL",
        needs=("handshake",),
        exit_code=EXIT_CODEX,
    ),
    Check(
        "metadata",
        lambda facts: _found(facts.metadata, "codex does not list its models"),
        "set context_window, or for a larger one model_catalog_file, of the provider in config.yaml",
        needs=("handshake",),
        exit_code=EXIT_CODEX,
    ),
    Check("platform", checks.check_platform, "correct PLATFORM_URL, or check the network connection"),
)
"""In the order in which they run."""

ONLINE: Final = (
    Check(
        "model",
        checks.check_model,
        "correct base_url (or OPENAI_BASE_URL), or check the network connection",
        needs=("provider",),
    ),
)
"""Checks that run with `--online` only."""
