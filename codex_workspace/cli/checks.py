"""The doctor's checks of settings, folders, database, port, platform and provider."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import anyio
import httpx
from sqlalchemy import Connection as DatabaseConnection
from sqlalchemy import inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from codex_workspace.agent import secrets_of
from codex_workspace.common.errors import CodexError, ConfigError
from codex_workspace.common.files import lock_holder
from codex_workspace.common.redact import Redactor
from codex_workspace.config.loading import is_loopback, load_settings
from codex_workspace.config.prompts import CODEX_READS_BYTES, MEMORY
from codex_workspace.config.providers import ChosenProvider, choose_provider
from codex_workspace.config.settings import MISPLACED, Settings
from codex_workspace.runtimes.markdown import clean
from codex_workspace.server.app import bind
from codex_workspace.storage.database import file_version, integrity_problem, sqlite_file
from codex_workspace.storage.migrations import SCHEMA_VERSION, require_known_version

if TYPE_CHECKING:
    from codex_workspace.codex.sandbox import SandboxReport

Status = Literal["ok", "warning", "failed", "not run"]

LOW_DISK_BYTES: Final = 1 << 30
"""Less free space than this is a warning."""

MIN_DISK_BYTES: Final = 100 << 20
"""Less free space than this is a failure: codex stores every conversation, and a full disk loses them."""

MIN_TOKEN_CHARS: Final = 16
"""A shorter token can be guessed."""

HEALTH_TIMEOUT_S: Final = 2.0
PROVIDER_TIMEOUT_S: Final = 15.0
PROBE_TIMEOUT_S: Final = 5.0
"""For `/readyz`, which itself waits up to 3 s for codex, and for a database."""

EXIT_CONFIG: Final = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check; `exit_code` overrides that of the check."""

    status: Status
    finding: str
    remedy: str = ""
    exit_code: int | None = None


class Facts:
    """Results that later checks need: the settings, the provider, and what the sandbox allowed.

    sandbox: the report, or the error; a sentence if the sandbox was not inspected.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self._settings: Settings | None = None
        self._provider: ChosenProvider | None = None
        self.sandbox: SandboxReport | CodexError | str | None = None

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

    def load_settings(self) -> Settings:
        """Load the settings; raises ConfigError."""
        self._settings = load_settings(self.env)
        return self._settings

    def choose_provider(self) -> ChosenProvider:
        """Choose the provider; raises ConfigError."""
        self._provider = choose_provider(self.settings, self.env)
        return self._provider

    def redact(self, text: str) -> str:
        """Return `text` without known secrets and terminal control characters."""
        if self._settings is None:
            return clean(text)
        return clean(Redactor(secrets_of(self._settings, self._provider))(text))


def check_config(facts: Facts) -> Finding:
    """Check config.yaml and the environment."""
    try:
        settings = facts.load_settings()
    except ConfigError as error:
        return Finding("failed", str(error), "correct this and run the doctor again")
    text = f"{settings.config_file}; model {settings.model} ({settings.model_source})"
    if settings.misplaced:
        moves = "; ".join(f"{key} has no effect; use {MISPLACED[key]}" for key in settings.misplaced)
        return Finding("warning", f"{text}; {moves}", "move the value there, or remove it")
    return Finding("ok", text)


def check_provider(facts: Facts) -> Finding:
    """Check that a provider has a credential."""
    try:
        provider = facts.choose_provider()
    except ConfigError as error:
        return Finding("failed", str(error), "set the credential, or choose another provider in config.yaml")
    return Finding("ok", f"{provider.reason}; {provider.base_url}")


def check_instructions(facts: Facts) -> Finding:
    """Check the prompt files and skills, and that codex reads all of the workspace's AGENTS.md."""
    told, skills = facts.settings.instructions, [skill.name for skill in facts.settings.skills]
    files = f"{len(told.text)} characters of {', '.join(map(str, told.files))}" if told.files else "none"
    finding = f"{files}; skills: {', '.join(skills)}" if skills else files
    project = facts.settings.workspace_dir / MEMORY
    size = project.stat().st_size if project.is_file() else 0
    if size <= CODEX_READS_BYTES:
        return Finding("ok", finding)
    return Finding(
        "warning",
        f"{finding}\n{project} has {size} bytes; codex reads only the first {CODEX_READS_BYTES}",
        f"shorten it, or raise project_doc_max_bytes in {facts.settings.codex_home / 'config.toml'}",
    )


def check_access(facts: Facts) -> Finding:
    """Check who may send messages."""
    tokens, host = facts.settings.tokens, facts.settings.environment.A2A_HOST
    if tokens:
        named = ", ".join(tokens)
        short = [name for name, token in tokens.items() if len(token.reveal()) < MIN_TOKEN_CHARS]
        if not short:
            return Finding("ok", f"callers need a bearer token; tokens exist for {named}")
        return Finding(
            "warning",
            f"callers need a bearer token; tokens exist for {named}; the token of {', '.join(short)} is easy to guess",
            f"use a token of at least {MIN_TOKEN_CHARS} random characters",
        )
    if is_loopback(host):
        return Finding("ok", f"no token is set; only programs on this machine can reach {host}")
    return Finding(
        "warning",
        f"anyone who can reach {host} can run commands here without a token",
        "set A2A_TOKEN, unless a proxy in front of the agent authenticates callers",
    )


def check_state(facts: Facts) -> Finding:
    """Check that the state folder is writable."""
    return _writable(facts.settings.state_dir, "WORKSPACE_STATE_DIR")


def check_codex_home(facts: Facts) -> Finding:
    """Check that CODEX_HOME is writable."""
    return _writable(facts.settings.codex_home, "CODEX_HOME")


def _writable(folder: Path, variable: str) -> Finding:
    there = nearest_existing(folder)
    remedy = f"give this user write permission, or set {variable} to another folder"
    if not there.is_dir():
        return Finding("failed", f"{folder} cannot be created: {there} is a file", remedy)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Finding("failed", f"{there} is not writable: {first_line(error)}", remedy)
    return Finding("ok", f"{folder}" if there == folder else f"{folder} (is created at the first start)")


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def check_disk(facts: Facts) -> Finding:
    """Check the free disk space, of CODEX_HOME or of the state folder, whichever has less."""
    folders = (facts.settings.codex_home, facts.settings.state_dir)
    free, folder = min((shutil.disk_usage(nearest_existing(each)).free, each) for each in folders)
    shown = f"{free / (1 << 30):.1f} GiB free at {folder}"
    remedy = "free disk space, or move the state folder (WORKSPACE_STATE_DIR)"
    if free < MIN_DISK_BYTES:
        return Finding("failed", shown, remedy)
    return Finding("warning", shown, remedy) if free < LOW_DISK_BYTES else Finding("ok", shown)


def check_workspace(facts: Facts) -> Finding:
    """Check that codex can work in the workspace."""
    folder = facts.settings.workspace_dir
    if not os.access(folder, os.R_OK | os.X_OK):
        return Finding("failed", f"{folder} is not readable", "give this user read permission (WORKSPACE_DIR)")
    sandbox = facts.settings.config.codex.sandbox
    if sandbox != "read-only" and not _is_writable(folder):
        return Finding(
            "warning",
            f"{folder} is not writable, so codex cannot change files",
            "give this user write permission, or set codex.sandbox to read-only",
        )
    return Finding("ok", f"{folder}, sandbox {sandbox}")


def _is_writable(folder: Path) -> bool:
    """Return whether a file can be created in a folder; permission bits do not show that for root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_database(facts: Facts) -> Finding:
    """Check that the database opens; a SQLite file that does not exist is not created."""
    given = facts.settings.database_url.reveal()
    remedy = "correct DATABASE_URL, or remove it to use a file in the state folder"
    try:
        url = make_url(given)
    except ArgumentError:
        return Finding("failed", "DATABASE_URL is not a database URL", remedy)
    shown = url.render_as_string(hide_password=True)
    file = Path(url.database) if url.drivername.startswith("sqlite") and url.database else None
    if file is not None and not file.exists():
        return Finding("ok", f"{shown} (is created at the first start)")
    try:
        count = anyio.run(_count_tables, given)
    except (SQLAlchemyError, OSError, ImportError) as error:
        return Finding("failed", f"cannot open {shown}: {first_line(error)}", remedy)
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
    """Check whether an agent uses the state folder."""
    folder = facts.settings.state_dir
    try:
        holder = lock_holder(folder)
    except OSError as error:
        return Finding("failed", f"cannot read the lock of {folder}: {first_line(error)}", "check its permissions")
    return Finding("ok", f"no agent uses {folder}" if holder is None else f"an agent uses {folder}: {holder}")


def check_schema(facts: Facts) -> Finding:
    """Check that the database file is intact, belongs to this agent, and has a known schema version."""
    file = sqlite_file(facts.settings.database_url.reveal())
    if file is None:
        return Finding("ok", f"checked when the agent starts; this agent uses version {SCHEMA_VERSION}")
    if not file.exists() or (file.is_file() and file.stat().st_size == 0):
        return Finding("ok", f"will be version {SCHEMA_VERSION}")
    try:
        wrong = integrity_problem(file)
        version = file_version(file) if wrong is None else 0
        require_known_version(version, str(file))
    except ConfigError as error:
        return Finding("failed", str(error), "correct this and run the doctor again")
    if wrong is not None:
        remedy = "restore a backup of the file, or rename it: `python -m codex_workspace doctor --set-aside`"
        return Finding("failed", f"{file} {wrong}", remedy)
    return Finding("ok", f"version {version}")


def check_port(facts: Facts) -> Finding:
    """Check that the port is free, or that this agent already listens on it."""
    host, port = facts.settings.environment.A2A_HOST, facts.settings.port
    if port == 0:
        return Finding("ok", f"any free port of {host}")
    try:
        with bind(host, port):
            return Finding("ok", f"{host} port {port} is free")
    except ConfigError as error:
        return _identify_listener(host, port, str(error))


def _identify_listener(host: str, port: int, taken: str) -> Finding:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    remedy = "stop the other program, or set A2A_PORT to another port"
    try:
        with httpx.Client(base_url=address, timeout=PROBE_TIMEOUT_S, trust_env=False) as http:
            if http.get("/healthz", timeout=HEALTH_TIMEOUT_S).json() != {"status": "ok"}:
                return Finding("failed", taken, remedy)
            ready = http.get("/readyz").json()
    except (httpx.HTTPError, ValueError):
        return Finding("failed", taken, remedy)
    if isinstance(ready, dict) and ready.get("status") == "ready":
        return Finding("ok", f"an agent already listens at {address} and is ready")
    reason = ready.get("reason") if isinstance(ready, dict) else None
    return Finding("warning", f"an agent already listens at {address} but is not ready: {reason}", "see its log")


def check_platform(facts: Facts) -> Finding:
    """Check that the platform answers."""
    platform = facts.settings.platform
    if platform is None:
        return Finding("ok", "none is configured")
    try:
        with httpx.Client(timeout=PROBE_TIMEOUT_S) as http:
            status = http.get(platform.url).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "correct PLATFORM_URL, or check the network connection"
        return Finding("failed", f"{platform.url} does not answer: {first_line(error)}", remedy)
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return Finding("warning", f"{platform.url} answers HTTP {status}", "check the platform")
    return Finding("ok", f"{platform.url} answers; the workspace is {platform.workspace_id}")


def check_model(facts: Facts) -> Finding:
    """Check that the provider answers, accepts the credential and has the model. Costs no tokens."""
    provider = facts.provider
    if provider.auth_mode == "chatgpt_subscription":
        return Finding("not run", "a request would use up the subscription; send the agent a message instead")
    headers = {"Authorization": f"Bearer {provider.credential.reveal()}"} if provider.credential else {}
    try:
        with httpx.Client(timeout=PROVIDER_TIMEOUT_S) as http:
            answer = http.get(f"{provider.base_url.rstrip('/')}/models", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "correct base_url (or OPENAI_BASE_URL), or check the network connection"
        return Finding("failed", f"{provider.base_url} does not answer: {first_line(error)}", remedy)
    return _judge_models(answer, provider)


def _judge_models(answer: httpx.Response, provider: ChosenProvider) -> Finding:
    at = provider.base_url
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return Finding("failed", f"{at} rejects the credential (HTTP {answer.status_code})", "renew the credential")
    try:
        names = {entry["id"] for entry in answer.json()["data"]} if answer.is_success else None
    except (ValueError, KeyError, TypeError):
        names = None
    if names is None:
        text = f"{at} answers HTTP {answer.status_code} and does not list its models"
        return Finding("warning", text, "send the agent a message to test it")
    if provider.model not in names:
        return Finding("warning", f"{at} answers but does not list the model {provider.model}", "choose another model")
    return Finding("ok", f"{at} answers, accepts the credential and has the model {provider.model}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its class name if it has none."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.split("\n", 1)[0] or type(error).__name__
