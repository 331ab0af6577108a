"""Say what is wrong with this agent's setting, and how to mend it: `python -m codex_workspace doctor`.

Each check is a small function that finds one thing; the table `CHECKS` says in which order, and what each depends on.
Nothing stays changed: files are only tried where they are, and codex is started on a copy of its configuration.
"""

import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

import anyio
import httpx
from sqlalchemy import Connection as DatabaseConnection
from sqlalchemy import inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from codex_workspace.agent import is_exec, launch_of, secrets_of, thread_options
from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.backends.codex_exec import backend as exec_standing
from codex_workspace.backends.codex_exec.backend import further_config
from codex_workspace.backends.codex_exec.process import CodexExec
from codex_workspace.cli.terminal import clean
from codex_workspace.codex import secret_files as hiding
from codex_workspace.codex.mcp_servers import McpStatus, probe_mcp_servers
from codex_workspace.codex.sandbox import WITHOUT, SandboxReport, check_sandbox, inspect_sandbox
from codex_workspace.common.errors import CodexCannotStart, CodexError, ConfigError
from codex_workspace.common.files import lock_folder, lock_holder
from codex_workspace.common.redact import Redactor
from codex_workspace.common.values import Version, find_version, format_version
from codex_workspace.config.codex_toml import prepare_codex_home
from codex_workspace.config.loading import is_loopback, load_settings
from codex_workspace.config.prompts import CODEX_READS_BYTES, MEMORY
from codex_workspace.config.providers import ChosenProvider, choose_provider
from codex_workspace.config.settings import MISPLACED, Settings
from codex_workspace.protocol.versions import MINIMUM_VERSION
from codex_workspace.runtimes.launch import Launch
from codex_workspace.server.app import bind
from codex_workspace.storage.database import file_version, integrity_problem, set_aside, sqlite_file
from codex_workspace.storage.migrations import SCHEMA_VERSION, require_known_version

TESTED_VERSIONS: Final = ((0, 158, 0), (0, 169, 0))
"""The oldest and the newest codex that the end-to-end tests were run with, whatever their patch. Those before often
leave the output of a short command out of their report."""

FEW_BYTES: Final = 1 << 30
TOO_FEW_BYTES: Final = 100 << 20
"""Below the one a warning, below the other a failure: codex keeps every conversation, and a full disk loses them."""

FEW_CHARS: Final = 16
"""A token of fewer characters can be guessed, given time."""

VERSION_TIMEOUT_S: Final = 15.0
HEALTH_TIMEOUT_S: Final = 2.0
MODEL_TIMEOUT_S: Final = 15.0
SERVER_ERRORS: Final = 500
PROBE_TIMEOUT_S: Final = 5.0
"""For `/readyz`, which itself waits up to 3 s for codex, and for a database."""

EXIT_OTHER: Final = 1
EXIT_CONFIG: Final = 2
EXIT_CODEX: Final = 3

Status = Literal["ok", "warning", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, and where something is to be done, what; `exit_code` where it is not the check's."""

    status: Status
    finding: str
    remedy: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """One line of the doctor's answer; its fields are the keys of `--json`."""

    check: str
    status: Status
    finding: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Untried:
    """That no command has looked around, in a sentence."""

    sentence: str


class Facts:
    """What earlier checks have learned, for those that depend on them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self._settings: Settings | None = None
        self._provider: ChosenProvider | None = None
        self.sight: SandboxReport | Untried | CodexError | None = None

    @property
    def settings(self) -> Settings:
        """The settings; for checks that depend on `config`."""
        assert self._settings is not None
        return self._settings

    @property
    def provider(self) -> ChosenProvider:
        """The provider; for checks that depend on `provider`."""
        assert self._provider is not None
        return self._provider

    def learn_settings(self) -> Settings:
        """Load the settings; raises ConfigError."""
        self._settings = load_settings(self.env)
        return self._settings

    def learn_provider(self) -> ChosenProvider:
        """Choose the provider; raises ConfigError."""
        self._provider = choose_provider(self.settings, self.env)
        return self._provider

    def scrub(self, text: str) -> str:
        """Return `text` without any secret that is known, and without what a terminal would obey."""
        if self._settings is None:
            return clean(text)
        return clean(Redactor(secrets_of(self._settings, self._provider))(text))


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what it needs to have succeeded, and the exit code that its failure means."""

    name: str
    run: Callable[[Facts], Finding]
    needs: tuple[str, ...] = ()
    exit_code: int = EXIT_OTHER


def doctor(env: Mapping[str, str], *, as_json: bool, online: bool = False) -> int:
    """Run all checks and print what they find, line by line or as a JSON list.

    Args:
        env: the agent's environment.
        as_json: for programs.
        online: also those that ask the model's provider, with the credential.

    Returns:
        The exit code: 0 nothing failed, 2 the configuration did, 3 codex cannot start, 1 something else failed.
    """
    # What libraries and codex's connection log is in the findings, in fewer words.
    logging.basicConfig(handlers=[logging.NullHandler()])
    reports: list[Report] = []
    failures: set[int] = set()
    facts = Facts(env)
    for check in (*CHECKS, *(ONLINE if online else ())):
        found = _found(check, facts, reports)
        report = Report(check.name, found.status, facts.scrub(found.finding), facts.scrub(found.remedy))
        reports.append(report)
        if found.status == "failed":
            failures.add(found.exit_code or check.exit_code)
        if not as_json:
            _show(report)
    if as_json:
        print(json.dumps([asdict(report) for report in reports], indent=2, ensure_ascii=False))
    return next((code for code in (EXIT_CONFIG, EXIT_CODEX, EXIT_OTHER) if code in failures), 0)


def _found(check: Check, facts: Facts, before: Sequence[Report]) -> Finding:
    missing = [report.check for report in before if report.check in check.needs and report.status in _NO_BASIS]
    if missing:
        return Finding("not run", f"needs {' and '.join(missing)}")
    return check.run(facts)


_NO_BASIS: Final = ("failed", "not run")


def _show(report: Report) -> None:
    finding = report.finding.replace("\n", f"\n{'':<22}")
    print(f"{report.status:<8} {report.check:<12} {finding}", flush=True)
    if report.remedy:
        print(f"{'':<21} -> {report.remedy}", flush=True)


def check_config(facts: Facts) -> Finding:
    """Whether config.yaml and the environment are right."""
    try:
        settings = facts.learn_settings()
    except ConfigError as error:
        return Finding("failed", str(error), "correct this, then ask the doctor again")
    said = f"{settings.config_file}; model {settings.model} ({settings.model_source})"
    if settings.misplaced:
        moves = "; ".join(f"{key} is not read, it is {MISPLACED[key]} that counts" for key in settings.misplaced)
        return Finding("warning", f"{said}; {moves}", "move it there, or take it out")
    return Finding("ok", said)


def check_provider(facts: Facts) -> Finding:
    """Whether there is a provider with a credential; which one is said, the credential never."""
    try:
        provider = facts.learn_provider()
    except ConfigError as error:
        return Finding("failed", str(error), "set the credential, or name another provider in config.yaml")
    return Finding("ok", f"{provider.reason}; {provider.base_url}")


def check_instructions(facts: Facts) -> Finding:
    """What the agent is told of its work, and whether codex reads all of the workspace's AGENTS.md."""
    told, skills = facts.settings.instructions, [skill.name for skill in facts.settings.skills]
    files = f"{len(told.text)} characters of {', '.join(map(str, told.files))}" if told.files else "none"
    finding = f"{files}; skills: {', '.join(skills)}" if skills else files
    project = facts.settings.workspace_dir / MEMORY
    size = project.stat().st_size if project.is_file() else 0
    if size <= CODEX_READS_BYTES:
        return Finding("ok", finding)
    return Finding(
        "warning",
        f"{finding}\n{project} has {size} bytes, of which codex reads {CODEX_READS_BYTES}",
        f"shorten it, or raise project_doc_max_bytes in {facts.settings.codex_home / 'config.toml'}",
    )


def check_access(facts: Facts) -> Finding:
    """Who may send messages."""
    listen = facts.settings.listen
    if listen.tokens:
        named = ", ".join(listen.tokens)
        short = [name for name, token in listen.tokens.items() if len(token.reveal()) < FEW_CHARS]
        if not short:
            return Finding("ok", f"callers need a bearer token; there is one for {named}")
        return Finding(
            "warning",
            f"callers need a bearer token; there is one for {named}, and that of {', '.join(short)} can be guessed",
            f"use a token of {FEW_CHARS} random characters or more",
        )
    if is_loopback(listen.host):
        return Finding("ok", f"no token is set; only programs on this machine reach {listen.host}")
    return Finding(
        "warning",
        f"whoever reaches {listen.host} may have commands run here, without a token",
        "set A2A_TOKEN, unless something in front of the agent asks for one",
    )


def check_codex(facts: Facts) -> Finding:
    """Whether there is a codex, and of a version that is known to work."""
    binary = facts.settings.codex_bin
    remedy = "install openai-codex-cli-bin as requirements-codex.txt has it, or name the binary in CODEX_BIN"
    if binary is None:
        return Finding("failed", "codex is not installed", remedy)
    try:
        said = _ask_version(binary, facts.env)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("failed", f"{binary} cannot be run: {_of(error)}", remedy)
    version = find_version(said)
    if version is None:
        return Finding("failed", f"{binary} does not tell a version, it is not codex", remedy)
    return _judge_version(version, binary)


def _judge_version(version: Version, binary: Path) -> Finding:
    oldest, newest = TESTED_VERSIONS
    tested = f"tested are {format_version(oldest)} to {format_version(newest)}"
    shown = f"codex {format_version(version)} at {binary}"
    if version < MINIMUM_VERSION:
        return Finding("failed", f"{shown} is too old", f"install {format_version(MINIMUM_VERSION)} or newer")
    if not oldest[:2] <= version[:2] <= newest[:2]:
        return Finding("warning", f"{shown} was not tested with this agent", tested)
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


def check_state(facts: Facts) -> Finding:
    """Whether the state folder can be written."""
    return _writable(facts.settings.state_dir, "WORKSPACE_STATE_DIR")


def check_codex_home(facts: Facts) -> Finding:
    """Whether codex's folder can be written."""
    return _writable(facts.settings.codex_home, "CODEX_HOME")


def _writable(folder: Path, variable: str) -> Finding:
    there = _nearest(folder)
    remedy = f"give this user the right to write there, or name another folder in {variable}"
    if not there.is_dir():
        return Finding("failed", f"{folder} cannot be a folder: {there} is a file", remedy)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Finding("failed", f"{there} cannot be written: {_of(error)}", remedy)
    return Finding("ok", f"{folder}" if there == folder else f"{folder} (will be made at the first start)")


def _nearest(folder: Path) -> Path:
    """Return the folder, or the first above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def check_disk(facts: Facts) -> Finding:
    """Whether there is room for conversations; of the two folders that grow, the one with less is shown."""
    folders = (facts.settings.codex_home, facts.settings.state_dir)
    free, folder = min((shutil.disk_usage(_nearest(each)).free, each) for each in folders)
    shown = f"{free / (1 << 30):.1f} GiB free at {folder}"
    remedy = "make room, or move the state folder (WORKSPACE_STATE_DIR)"
    if free < TOO_FEW_BYTES:
        return Finding("failed", shown, remedy)
    return Finding("warning", shown, remedy) if free < FEW_BYTES else Finding("ok", shown)


def check_workspace(facts: Facts) -> Finding:
    """Whether codex can work in its folder."""
    folder = facts.settings.workspace_dir
    if not os.access(folder, os.R_OK | os.X_OK):
        return Finding("failed", f"{folder} cannot be read", "give this user the right to read it (WORKSPACE_DIR)")
    sandbox = facts.settings.config.codex.sandbox
    if sandbox != "read-only" and not _takes_files(folder):
        return Finding(
            "warning",
            f"{folder} cannot be written, so codex can change nothing",
            "give this user the right to write there, or set codex.sandbox to read-only",
        )
    return Finding("ok", f"{folder}, sandbox {sandbox}")


def _takes_files(folder: Path) -> bool:
    """Tell whether a file can be made in a folder; its access bits do not say so for root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_database(facts: Facts) -> Finding:
    """Whether the store opens. A SQLite file that does not exist yet is not made."""
    given = facts.settings.database_url.reveal()
    remedy = "correct DATABASE_URL, or take it away to have a file in the state folder"
    try:
        url = make_url(given)
    except ArgumentError:
        return Finding("failed", "DATABASE_URL is no URL of a database", remedy)
    shown = url.render_as_string(hide_password=True)
    file = Path(url.database) if url.drivername.startswith("sqlite") and url.database else None
    if file is not None and not file.exists():
        return Finding("ok", f"{shown} (will be made at the first start)")
    try:
        count = anyio.run(_count_tables, given)
    except (SQLAlchemyError, OSError, ImportError) as error:
        return Finding("failed", f"{shown} does not open: {_of(error)}", remedy)
    return Finding("ok", f"{shown}, {count} tables")


async def _count_tables(url: str) -> int:
    engine = create_async_engine(url)
    try:
        with anyio.fail_after(PROBE_TIMEOUT_S):
            async with engine.connect() as connection:
                return await connection.run_sync(_table_count)
    finally:
        await engine.dispose()


def _table_count(connection: DatabaseConnection) -> int:
    return len(inspect(connection).get_table_names())


def check_lock(facts: Facts) -> Finding:
    """Whether an agent works on the state folder."""
    folder = facts.settings.state_dir
    try:
        holder = lock_holder(folder)
    except OSError as error:
        return Finding("failed", f"{folder} cannot be asked who works on it: {_of(error)}", "check its rights")
    return Finding("ok", f"no agent works on {folder}" if holder is None else f"an agent works on {folder}: {holder}")


def check_schema(facts: Facts) -> Finding:
    """Whether the database's file is whole and ours, and of a version that this agent knows."""
    file = sqlite_file(facts.settings.database_url.reveal())
    if file is None:
        return Finding("ok", f"looked at when the agent starts; this one makes version {SCHEMA_VERSION}")
    if not file.exists() or (file.is_file() and file.stat().st_size == 0):
        return Finding("ok", f"will be version {SCHEMA_VERSION}")
    try:
        wrong = integrity_problem(file)
        version = file_version(file) if wrong is None else 0
        require_known_version(version, str(file))
    except ConfigError as error:
        return Finding("failed", str(error), "correct this, then ask the doctor again")
    if wrong is not None:
        remedy = (
            "put a copy of the right one in its place, or move it away: `python -m codex_workspace doctor --set-aside`"
        )
        return Finding("failed", f"{file} {wrong}", remedy)
    return Finding("ok", f"version {version}")


def set_database_aside(env: Mapping[str, str]) -> int:
    """Rename a database's file that is damaged or another program's, say where it is, and return the exit code.

    Raises:
        ConfigError: it is neither, it is not a file of ours to rename, or an agent works with it.
    """
    settings = load_settings(env)
    file = sqlite_file(settings.database_url.reveal())
    if file is None:
        raise ConfigError("DATABASE_URL: only the file of a SQLite database can be set aside")
    if not settings.state_dir.is_dir():
        raise ConfigError(f"WORKSPACE_STATE_DIR: {settings.state_dir} is not there, so there is nothing to set aside")
    print(f"{file} is now {anyio.run(_set_aside, settings.state_dir, file)}; the next start makes a new one")
    return 0


async def _set_aside(folder: Path, file: Path) -> Path:
    async with lock_folder(folder):
        return set_aside(file)


def check_port(facts: Facts) -> Finding:
    """Whether the port is free, or this agent serves on it already."""
    listen = facts.settings.listen
    if listen.port == 0:
        return Finding("ok", f"any free port of {listen.host}")
    try:
        with bind(listen.host, listen.port):
            return Finding("ok", f"{listen.host} port {listen.port} is free")
    except ConfigError as error:
        return _ask_who_serves(listen.host, listen.port, str(error))


def _ask_who_serves(host: str, port: int, taken: str) -> Finding:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    remedy = "stop the other program, or choose another port (A2A_PORT)"
    try:
        with httpx.Client(base_url=address, timeout=PROBE_TIMEOUT_S, trust_env=False) as http:
            if http.get("/healthz", timeout=HEALTH_TIMEOUT_S).json() != {"status": "ok"}:
                return Finding("failed", taken, remedy)
            ready = http.get("/readyz").json()
    except (httpx.HTTPError, ValueError):
        return Finding("failed", taken, remedy)
    if isinstance(ready, dict) and ready.get("status") == "ready":
        return Finding("ok", f"an agent serves at {address} already, and is ready")
    reason = ready.get("reason") if isinstance(ready, dict) else None
    return Finding("warning", f"an agent serves at {address} already, but is not ready: {reason}", "see its log")


def check_handshake(facts: Facts) -> Finding:
    """Whether codex starts with its configuration, and answers."""
    home = ""
    try:
        with tempfile.TemporaryDirectory(prefix="codex-workspace-doctor-") as home:
            milliseconds, version = anyio.run(_greet, _at_another_home(facts, Path(home)), facts)
    except CodexCannotStart as error:
        said = _as_at_home(error, home, facts)
        return Finding("failed", said, "read codex's own words above; check CODEX_BIN and CODEX_HOME/config.toml")
    except ConfigError as error:
        said = _as_at_home(error, home, facts)
        return Finding("failed", said, "correct this, then ask the doctor again", EXIT_CONFIG)
    except (CodexError, OSError) as error:
        return Finding("failed", f"codex cannot be started: {_of(error)}", "check CODEX_BIN and CODEX_HOME")
    answered = "read its configuration" if is_exec(facts.settings) else "answered initialize"
    return Finding("ok", f"codex {format_version(version)} {answered} in {milliseconds:.0f} ms")


def _as_at_home(error: Exception, home: str, facts: Facts) -> str:
    """Return what an error says of the copy of codex's configuration as said of the real one."""
    return str(error).replace(home, str(facts.settings.codex_home)) if home else str(error)


def _at_another_home(facts: Facts, home: Path, settings: Settings | None = None) -> Settings:
    """Return the settings, or others, with a copy of codex's configuration: no trace is left in the real one."""
    settings = replace(settings or facts.settings, codex_home=home)
    own = facts.settings.codex_home / "config.toml"
    if own.is_file():
        shutil.copyfile(own, home / "config.toml")
    prepare_codex_home(settings, facts.provider, further_config(settings) if is_exec(settings) else {})
    return settings


async def _greet(settings: Settings, facts: Facts) -> tuple[float, tuple[int, int, int]]:
    started = time.perf_counter()
    launch = launch_of(settings, facts.provider, facts.env)
    if is_exec(settings):
        version = await CodexExec(launch).version()
        await exec_standing.refuse_broken_config(launch)
        milliseconds = (time.perf_counter() - started) * 1000
        facts.sight = await _try_sandbox(launch, settings)
        return milliseconds, version
    # What is hidden is the agent's own, not that of the copy.
    launch = replace(launch, overrides={**launch.overrides, **hiding.definition(facts.settings, facts.env)})
    async with open_app_server(launch) as codex:
        milliseconds = (time.perf_counter() - started) * 1000
        facts.sight = await _look_around(codex, facts)
        return milliseconds, codex.version


def check_sandbox_finding(facts: Facts) -> Finding:
    """What the model's commands may do: one is run as codex runs them, and tries."""
    match facts.sight:
        case SandboxReport() as sight:
            pass
        case CodexCannotStart() as error:
            return Finding("failed", str(error), "docs/sandbox.md says more")
        case Untried(sentence):
            return Finding("ok", sentence)
        case error:
            return Finding("failed", f"no command could be tried: {error}", "see what is said of the handshake")
    said = f"{facts.settings.config.codex.sandbox}: a command {_abilities(sight, _folders(facts))}"
    holders = sight.holders_of(secrets_of(facts.settings, facts.provider))
    if not holders and facts.settings.exposed:
        changeable = " and ".join(facts.settings.exposed)
        return Finding("warning", f"{said}; so it can change {changeable}", "name another folder in WORKSPACE_DIR")
    if not holders:
        return Finding("ok", f"{said}; saw no credential")
    shown = ", ".join(f"{process} ({_program(process)})" for process in holders[:5])
    return Finding(
        "warning",
        f"{said}; saw the agent's credentials in the environment of the processes {shown}",
        "start the agent as a user of its own, who is not root, from a process that has no credentials",
    )


def _abilities(sight: SandboxReport, named: Mapping[str, Path]) -> str:
    """Return what a command could do, as verbs with their objects."""
    writable = [name for name, folder in named.items() if folder in sight.writable]
    only_readable = [name for name, folder in named.items() if folder in sight.readable - sight.writable]
    closed = [name for name, folder in named.items() if folder not in sight.readable | sight.writable]
    verbs = [("can write", writable), ("can only read", only_readable), ("cannot see", closed)]
    network = "reaches this machine's network" if sight.reaches_network else "reaches no network"
    return "; ".join([*(f"{verb} {', '.join(names)}" for verb, names in verbs if names), network])


def _folders(facts: Facts) -> dict[str, Path]:
    """Return the folders and files that are of interest to whom a command obeys, by what people call them."""
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
    files = {str(file): file for file in hiding.secret_files(settings, facts.env) if file.is_file()}
    if database is not None and database.is_file():
        files["the database"] = database
    return {name: folder for name, folder in named.items() if folder.is_dir()} | files


def _program(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return "gone"


async def _try_sandbox(launch: Launch, settings: Settings) -> Untried | CodexError:
    """Have a command run in codex's sandbox, where only a turn would run one in that of config.yaml."""
    mode = settings.config.codex.sandbox
    try:
        await exec_standing.refuse_blocked(launch, mode)
    except CodexError as error:
        return error
    made = "codex's own is off" if mode in WITHOUT else "codex's sandbox works here"
    return Untried(f"{mode}: {made}; what a command may do is not tried with codex.backend exec")


async def _look_around(codex: Connection, facts: Facts) -> SandboxReport | CodexError:
    settings = facts.settings
    try:
        profile = hiding.profile_of(settings)
        await check_sandbox(codex, settings.config.codex.sandbox, settings.workspace_dir, profile)
        return await inspect_sandbox(codex, settings.workspace_dir, _folders(facts).values(), profile)
    except CodexError as error:
        return error


def check_platform(facts: Facts) -> Finding:
    """Whether the platform answers at all."""
    platform = facts.settings.platform
    if platform is None:
        return Finding("ok", "none is configured")
    try:
        with httpx.Client(timeout=PROBE_TIMEOUT_S) as http:
            status = http.get(platform.url).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "correct PLATFORM_URL, or see why this machine does not reach it"
        return Finding("failed", f"{platform.url} does not answer: {_of(error)}", remedy)
    if status >= SERVER_ERRORS:
        return Finding("warning", f"{platform.url} answers HTTP {status}", "see what is wrong with the platform")
    return Finding("ok", f"{platform.url} answers; this agent is {platform.workspace_id} there")


def check_model(facts: Facts) -> Finding:
    """Whether the model's provider answers, takes the credential and has the model. Costs no tokens."""
    provider = facts.provider
    if provider.auth_mode == "chatgpt_subscription":
        return Finding("not run", "a subscription is used up by asking; send the agent a message instead")
    headers = {"Authorization": f"Bearer {provider.credential.reveal()}"} if provider.credential else {}
    try:
        with httpx.Client(timeout=MODEL_TIMEOUT_S) as http:
            answer = http.get(f"{provider.base_url.rstrip('/')}/models", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "correct base_url (or OPENAI_BASE_URL), or see why this machine does not reach it"
        return Finding("failed", f"{provider.base_url} does not answer: {_of(error)}", remedy)
    return _judge_models(answer, provider)


def _judge_models(answer: httpx.Response, provider: ChosenProvider) -> Finding:
    at = provider.base_url
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return Finding("failed", f"{at} refuses the credential (HTTP {answer.status_code})", "renew the credential")
    try:
        names = {entry["id"] for entry in answer.json()["data"]} if answer.is_success else None
    except (ValueError, KeyError, TypeError):
        names = None
    if names is None:
        said = f"{at} answers HTTP {answer.status_code} and does not tell its models"
        return Finding("warning", said, "send the agent a message to see whether it can work with it")
    if provider.model not in names:
        return Finding("warning", f"{at} answers, and does not name the model {provider.model}", "name another model")
    return Finding("ok", f"{at} answers, takes the credential and has the model {provider.model}")


def check_mcp(facts: Facts) -> Finding:
    """Whether the MCP servers start, and which tools they have; all of them are started for this."""
    servers = facts.settings.mcp
    if not servers.servers and not servers.left_out:
        return Finding("ok", "none is configured")
    if is_exec(facts.settings):
        names = ", ".join(server.name for server in servers.servers) or "none"
        said = f"{names}: not tried, as with codex.backend exec only a turn starts them"
        missed = [f"{name}: {why}" for name, why in servers.left_out.items()]
        return Finding(
            "warning" if missed else "ok", "\n".join((said, *missed)), "set those variables" if missed else ""
        )
    try:
        with tempfile.TemporaryDirectory(prefix="codex-workspace-doctor-") as home:
            # Where one is required, codex says of it alone that it does not start.
            settings = replace(facts.settings, mcp=servers.optional)
            found = anyio.run(_try_servers, _at_another_home(facts, Path(home), settings), facts)
    except (CodexError, ConfigError, OSError) as error:
        return Finding("failed", f"they cannot be tried: {_of(error)}", "see what is said of the handshake")
    tools = [f"{name}: {len(each)} tools ({', '.join(each)})" for name, each in found.tools.items()]
    said = "\n".join((*found.problems.values(), *tools))
    if not found.problems:
        return Finding("ok", said)
    required = {server.name for server in servers.servers if server.required}
    remedy = "correct mcp_servers in config.yaml; run the command of such a server by hand, or ask for its address"
    return Finding("failed" if found.problems.keys() & required else "warning", said, remedy)


async def _try_servers(settings: Settings, facts: Facts) -> McpStatus:
    options = thread_options(settings, facts.provider)
    async with open_app_server(launch_of(settings, facts.provider, facts.env)) as codex:
        return await probe_mcp_servers(codex, options, settings.config.codex.request_timeout_s)


def _of(error: Exception) -> str:
    """Return the first line of what an error says; its name where it says nothing."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said.split("\n", 1)[0] or type(error).__name__


CHECKS: Final = (
    Check("config", check_config, exit_code=EXIT_CONFIG),
    Check("provider", check_provider, needs=("config",), exit_code=EXIT_CONFIG),
    Check("instructions", check_instructions, needs=("config",)),
    Check("access", check_access, needs=("config",)),
    Check("codex", check_codex, needs=("config",), exit_code=EXIT_CODEX),
    Check("state", check_state, needs=("config",)),
    Check("codex home", check_codex_home, needs=("config",)),
    Check("disk", check_disk, needs=("config",)),
    Check("workspace", check_workspace, needs=("config",)),
    Check("lock", check_lock, needs=("config",)),
    Check("schema", check_schema, needs=("config",), exit_code=EXIT_CONFIG),
    Check("database", check_database, needs=("config", "schema")),
    Check("port", check_port, needs=("config",)),
    Check("handshake", check_handshake, needs=("provider", "codex"), exit_code=EXIT_CODEX),
    Check("sandbox", check_sandbox_finding, needs=("handshake",), exit_code=EXIT_CODEX),
    Check("mcp servers", check_mcp, needs=("handshake",), exit_code=EXIT_CODEX),
    Check("platform", check_platform, needs=("config",)),
)
"""In the order in which they are run and shown."""

ONLINE: Final = (Check("model", check_model, needs=("provider",)),)
"""Those that are run only when asked for."""
