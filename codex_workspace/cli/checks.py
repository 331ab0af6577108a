"""The doctor's checks of settings, folders, database, port, platform and provider.

A check returns a `Finding`, or raises an error whose text is the finding of a failure.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import httpx

from codex_workspace.common.database_url import sqlite_file
from codex_workspace.common.errors import AgentError, CodexError, ConfigError
from codex_workspace.common.files import lock_holder
from codex_workspace.common.redact import Redactor
from codex_workspace.config.loading import is_loopback, load_settings
from codex_workspace.config.prompts import AGENTS_FILE, MAX_AGENTS_FILE_BYTES
from codex_workspace.config.providers import ChosenProvider, choose_provider
from codex_workspace.config.settings import MISPLACED, Settings
from codex_workspace.launching import secrets_of
from codex_workspace.runtimes.markdown import clean
from codex_workspace.server.sockets import bind, reachable
from codex_workspace.storage.schema import SCHEMA_VERSION, require_known_version
from codex_workspace.storage.sqlite import file_version, integrity_problem
from codex_workspace.storage.store import engine_of

LOW_DISK_BYTES: Final = 1 << 30
"""Less free space than this is a warning."""

MIN_DISK_BYTES: Final = 100 << 20
"""Less free space than this is a failure: codex stores every conversation, and a full disk loses them."""

MIN_TOKEN_CHARS: Final = 16
"""A shorter token can be guessed."""

PROVIDER_TIMEOUT_S: Final = 15.0
PROBE_TIMEOUT_S: Final = 5.0
"""For `/readyz`, which itself waits up to 3 s for codex, and for a database."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check; without a remedy, that of the check's failures is shown."""

    status: Literal["ok", "warning", "failed", "not run"]
    finding: str
    remedy: str = ""


class CheckFailed(AgentError):
    """A check failed, for the reason given."""


@dataclass
class Facts:
    """Results that later checks need; they depend on the checks that set them.

    codex_copy: the temporary copy of CODEX_HOME that codex was started with.
    """

    env: Mapping[str, str]
    settings: Settings = field(init=False)
    provider: ChosenProvider = field(init=False)
    secrets: list[str] = field(default_factory=list)
    codex_copy: str = ""
    sandbox: Finding | CodexError = field(init=False)
    mcp_servers: Finding | CodexError = field(init=False)
    metadata: Finding | CodexError = field(init=False)

    def redact(self, text: str) -> str:
        """Return `text` without known secrets, control characters and the path of the temporary copy."""
        if self.codex_copy:
            text = text.replace(self.codex_copy, str(self.settings.codex_home))
        return clean(Redactor(self.secrets)(text))


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Let errors of the operating system and of libraries fail the check: `what`, and the error's first line.

    Raises:
        CheckFailed: such an error occurred.
    """
    try:
        yield
    except (OSError, ImportError, httpx.HTTPError, httpx.InvalidURL, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).split("\n", 1)[0]
        raise CheckFailed(f"{what}: {reason or type(error).__name__}") from error


def check_config(facts: Facts) -> Finding:
    """Check config.yaml and the environment."""
    facts.settings = settings = load_settings(facts.env)
    facts.secrets = secrets_of(settings, None)
    text = f"{settings.config_file}; model {settings.model} ({settings.model_source})"
    if settings.misplaced:
        moves = "; ".join(f"{key} has no effect; use {MISPLACED[key]}" for key in settings.misplaced)
        return Finding("warning", f"{text}; {moves}", "move the value there, or remove it")
    return Finding("ok", text)


def check_provider(facts: Facts) -> Finding:
    """Check that a provider has a credential."""
    facts.provider = choose_provider(facts.settings, facts.env)
    facts.secrets = secrets_of(facts.settings, facts.provider)
    return Finding("ok", f"{facts.provider.reason}; {facts.provider.base_url}")


def check_instructions(facts: Facts) -> Finding:
    """Check the prompt files and skills, and that codex reads all of the workspace's AGENTS.md."""
    told, skills = facts.settings.instructions, [skill.name for skill in facts.settings.skills]
    files = f"{len(told.text)} characters of {', '.join(map(str, told.files))}" if told.files else "none"
    finding = f"{files}; skills: {', '.join(skills)}" if skills else files
    project = facts.settings.workspace_dir / AGENTS_FILE
    size = project.stat().st_size if project.is_file() else 0
    if size <= MAX_AGENTS_FILE_BYTES:
        return Finding("ok", finding)
    return Finding(
        "warning",
        f"{finding}\n{project} has {size} bytes; codex reads only the first {MAX_AGENTS_FILE_BYTES}",
        f"shorten it, or raise project_doc_max_bytes in {facts.settings.codex_home / 'config.toml'}",
    )


def check_access(facts: Facts) -> Finding:
    """Check who may send messages."""
    host, tokens = facts.settings.environment.A2A_HOST, facts.settings.tokens
    owners = [*tokens, *(["operator (generated)"] if facts.settings.own_token else [])]
    if not owners and is_loopback(host):
        return Finding("ok", f"no token is set; only programs on this machine can reach {host}")
    if not owners:
        return Finding(
            "warning",
            f"anyone who can reach {host} can run commands here without a token",
            "set A2A_TOKEN, unless a proxy in front of the agent authenticates callers",
        )
    text = f"callers need a bearer token; tokens exist for {', '.join(owners)}"
    if short := [name for name, token in tokens.items() if len(token.reveal()) < MIN_TOKEN_CHARS]:
        remedy = f"use a token of at least {MIN_TOKEN_CHARS} random characters"
        return Finding("warning", f"{text}; the token of {', '.join(short)} is easy to guess", remedy)
    return Finding("ok", text)


def check_writable(folder: Path) -> Finding:
    """Check that a folder is writable."""
    there = nearest_existing(folder)
    if not there.is_dir():
        raise CheckFailed(f"{folder} cannot be used: {there} is a file")
    # Permission bits do not show this for root.
    with explained(f"cannot write to {there}"), tempfile.TemporaryFile(dir=there):
        return Finding("ok", f"{folder}" if there == folder else f"{folder} (created at the first start)")


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def check_disk(facts: Facts) -> Finding:
    """Check the free disk space, of CODEX_HOME or of the state folder, whichever has less."""
    folders = (facts.settings.codex_home, facts.settings.state_dir)
    free, folder = min((shutil.disk_usage(nearest_existing(each)).free, each) for each in folders)
    shown = f"{free / (1 << 30):.1f} GiB free at {folder}"
    return Finding("failed" if free < MIN_DISK_BYTES else "warning" if free < LOW_DISK_BYTES else "ok", shown)


def check_workspace(facts: Facts) -> Finding:
    """Check that codex can work in the workspace."""
    folder, sandbox = facts.settings.workspace_dir, facts.settings.config.codex.sandbox
    with explained(f"{folder} is not readable"):
        next(folder.iterdir(), None)
    try:
        if sandbox != "read-only":
            check_writable(folder)
    except CheckFailed as error:
        remedy = "give this user write permission, or set codex.sandbox to read-only"
        return Finding("warning", f"{error}, so codex cannot change files", remedy)
    return Finding("ok", f"{folder}, sandbox {sandbox}")


def check_lock(facts: Facts) -> Finding:
    """Check which agents use the state folder, CODEX_HOME and the database file."""
    settings, found = facts.settings, list[str]()
    for used in (settings.state_dir, settings.codex_home, sqlite_file(settings.database_url.reveal())):
        with explained(f"cannot read the lock of {used}"):
            if used is not None and (holder := lock_holder(used)) is not None:
                found.append(f"an agent uses {used}: {holder}")
    return Finding("ok", "\n".join(found) or f"no agent uses {settings.state_dir}")


def check_schema(facts: Facts) -> Finding:
    """Check that the database file is intact, belongs to this agent, and has a known schema version."""
    file = sqlite_file(facts.settings.database_url.reveal())
    if file is None:
        return Finding("ok", f"checked when the agent starts; this agent uses version {SCHEMA_VERSION}")
    wrong = integrity_problem(file)
    if wrong is not None:
        raise CheckFailed(f"{file} {wrong}")
    if not file.exists() or file.stat().st_size == 0:
        return Finding("ok", f"will be version {SCHEMA_VERSION}")
    version = file_version(file)
    require_known_version(version, str(file))
    return Finding("ok", f"version {version}")


def check_database(facts: Facts) -> Finding:
    """Check that the database opens; a SQLite file that does not exist is not created."""
    url = facts.settings.database_url.reveal()
    engine, file = engine_of(url), sqlite_file(url)
    if file is not None and not file.exists():
        return Finding("ok", f"{file} (created at the first start)")
    try:
        engine.connect().close()
        holder = engine.holder()
    except engine.errors as error:
        raise CheckFailed(f"cannot open {engine.name}: {' '.join(str(error).split())}") from error
    return Finding("ok", engine.name if holder is None else f"{engine.name}; an agent uses it: {holder}")


def check_port(facts: Facts) -> Finding:
    """Check that the port is free, or that this agent already listens on it."""
    host, port = facts.settings.environment.A2A_HOST, facts.settings.port
    if port == 0:
        return Finding("ok", f"any free port of {host}")
    try:
        with bind(host, port):
            return Finding("ok", f"{host} port {port} is free")
    except ConfigError as error:
        return _identify_listener(f"http://{reachable(host)}:{port}", str(error))


def _identify_listener(url: str, taken: str) -> Finding:
    try:
        with httpx.Client(timeout=PROBE_TIMEOUT_S, trust_env=False) as http:
            answer = http.get(f"{url}/readyz").json()
    except (httpx.HTTPError, ValueError):
        answer = None
    match answer:
        case {"status": "ready"}:
            return Finding("ok", f"an agent already listens at {url} and is ready")
        case {"reason": reason}:
            return Finding("warning", f"an agent already listens at {url} but is not ready: {reason}", "see its log")
        case _:
            return Finding("failed", taken)


def check_platform(facts: Facts) -> Finding:
    """Check that the platform answers."""
    platform = facts.settings.platform
    if platform is None:
        return Finding("ok", "none is configured")
    with explained(f"{platform.url} does not answer"):
        status = httpx.get(platform.url, timeout=PROBE_TIMEOUT_S).status_code
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return Finding("warning", f"{platform.url} answers HTTP {status}", "check the platform")
    return Finding("ok", f"{platform.url} answers; the workspace is {platform.workspace_id}")


def check_model(facts: Facts) -> Finding:
    """Check that the provider answers, accepts the credential and has the model. Costs no tokens."""
    provider, at = facts.provider, facts.provider.base_url
    if provider.auth_mode == "chatgpt_subscription":
        return Finding("not run", "a request would count against the subscription; send the agent a message instead")
    headers = {"Authorization": f"Bearer {provider.credential.reveal()}"} if provider.credential else {}
    with explained(f"{at} does not answer"):
        answer = httpx.get(f"{at.rstrip('/')}/models", headers=headers, timeout=PROVIDER_TIMEOUT_S)
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return Finding("failed", f"{at} rejects the credential (HTTP {answer.status_code})", "renew the credential")
    try:
        names = {entry["id"] for entry in answer.raise_for_status().json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        text = f"{at} answers HTTP {answer.status_code} and does not list its models"
        return Finding("warning", text, "send the agent a message to test it")
    if provider.model not in names:
        return Finding("warning", f"{at} answers but does not list the model {provider.model}", "choose another model")
    return Finding("ok", f"{at} answers, accepts the credential and has the model {provider.model}")
