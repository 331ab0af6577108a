"""Prepares and supervises codex, with few imports, so that `serve` can start it before everything else."""

import hashlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.codex.index import REBUILD_TIMEOUT_S, rename_moved_index
from codex_workspace.codex.sandbox import (
    WITH_SANDBOX,
    check_sandbox,
    create_secret_files,
    profile_of,
    profile_overrides,
    without_sandbox,
)
from codex_workspace.codex.supervisor import CodexSupervisor, SupervisorLimits
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.database_url import sqlite_file
from codex_workspace.common.errors import CodexCannotStart, CodexGone, ConfigError
from codex_workspace.common.files import lock_folder
from codex_workspace.config.codex_toml import Managed, create_codex_home, prepare_codex_home
from codex_workspace.config.environment import Secret, header_secrets, secrets_in_url, tokens_in, without_proxy_for
from codex_workspace.config.loading import check_secrets, require_codex
from codex_workspace.config.login import update_login
from codex_workspace.config.prompts import link_skill_folders
from codex_workspace.config.providers import SUBSCRIPTION, ChosenProvider
from codex_workspace.config.settings import PlatformSettings, Settings
from codex_workspace.runtimes.launch import START_TIMEOUT_S, Launch
from codex_workspace.runtimes.process import end_leftovers

if TYPE_CHECKING:
    from codex_workspace.codex.thread import ThreadOptions
    from codex_workspace.platform.client import WorkspaceToken

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
"""The address of the agent's own tools; requests to it must not go through a proxy, which would see their tokens."""

QUESTION_FEATURES: Final[Mapping[str, str]] = {
    "features.request_permissions_tool": "true",
    "features.default_mode_request_user_input": "true",
    "suppress_unstable_features_warning": "true",
}
"""Lets the model request permissions and ask questions; the last entry suppresses codex's warning about the others."""


LOGIN_ON_DISK: Final[Mapping[str, str]] = {"cli_auth_credentials_store": '"file"'}
"""Makes codex read a subscription's login from auth.json and store the refreshed login there."""


@dataclass(frozen=True, slots=True)
class Launched:
    """How codex is started, and the supervisor of the app-server; None if each turn starts its own process."""

    launch: Launch
    codex: CodexSupervisor | None


@asynccontextmanager
async def open_launched(
    settings: Settings, provider: ChosenProvider, env: Mapping[str, str], url: str | None = None
) -> AsyncIterator[Launched]:
    """Lock the state, prepare CODEX_HOME, and supervise codex while the block is open; nothing is started yet.

    `url` is the agent's address; the error of a second agent with the same folders contains it.

    Raises:
        ConfigError: another agent uses a folder, CODEX_HOME's config.toml is broken, or a folder cannot be written.
        CodexCannotStart: there is no codex binary, or it cannot be run.
    """
    prepare_state(settings)
    check_secrets(settings, provider)
    create_codex_home(settings.codex_home)
    async with lock_state(settings, url), lock_folder(settings.codex_home, url, "CODEX_HOME"):
        prepare_codex_home(settings, provider, _further_config(settings))
        if provider.auth_mode == SUBSCRIPTION and provider.credential is not None:
            update_login(settings.codex_home, provider.credential)
        create_secret_files(settings)
        link_skill_folders(settings.codex_home, settings.skills)
        for name, why in settings.mcp.left_out.items():
            logger.warning("skipping the MCP server %s: %s", name, why)
        if settings.sandbox_blocked is not None:
            logger.warning("%s; %s", without_sandbox(settings), WITH_SANDBOX)
        launch = launch_of(settings, provider, env)
        await end_leftovers(launch.family)
        if rename_moved_index(settings.codex_home):
            launch = replace(launch, start_timeout_s=REBUILD_TIMEOUT_S)
        if is_exec(settings):
            yield Launched(launch, None)
            return
        async with task_group() as tasks:
            codex = CodexSupervisor(tasks, _opener(launch, settings, provider), _supervisor_limits(settings))
            try:
                yield Launched(launch, codex)
            finally:
                with anyio.CancelScope(shield=True):
                    await codex.close()


def _further_config(settings: Settings) -> Managed:
    if not is_exec(settings):
        return {}
    from codex_workspace.backends.codex_exec.backend import further_config

    return further_config(settings)


def secrets_of(settings: Settings, provider: ChosenProvider | None) -> list[str]:
    """Return every secret that must be redacted from logs and answers."""
    secrets = [
        *settings.tokens.values(),
        settings.own_token.text if settings.own_token else None,
        *(token_of(settings.platform).candidates() if settings.platform else ()),
        _inbound_secret(settings.platform) if settings.platform else None,
        provider.credential if provider else None,
        *settings.credentials,
        *settings.mcp.secrets,
        *settings.peer_tokens.values(),
        settings.metrics_token,
    ]
    known = [secret.reveal() for secret in secrets if secret is not None]
    return [
        *known,
        *(part for secret in known for part in tokens_in(secret)),
        *(header_secrets(settings.trace_headers.reveal()) if settings.trace_headers is not None else ()),
        *secrets_in_url(settings.database_url.reveal()),
    ]


def token_of(platform: PlatformSettings) -> "WorkspaceToken":
    """Return the workspace's token, from the configured places."""
    # Imported only on a platform: with its HTTP client it takes 100 ms.
    from codex_workspace.platform.client import WorkspaceToken

    return WorkspaceToken(platform.token_file, platform.provisioned, platform.token)


def _inbound_secret(platform: PlatformSettings) -> Secret | None:
    from codex_workspace.platform.client import read_secret

    return read_secret(platform.secret_file)


def is_exec(settings: Settings) -> bool:
    """Return whether each turn runs in its own codex process."""
    return settings.config.codex.backend == "exec"


def prepare_state(settings: Settings) -> None:
    """Create the state folder and its SQLite file if they are missing, readable by this user only.

    Raises:
        ConfigError: they cannot be created, or the database file has become empty.
    """
    file = sqlite_file(settings.database_url.reveal())
    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if file is not None and not file.is_dir():
            _reject_emptied(file, settings.codex_home)
            # SQLite creates its journal files with the permissions of this file.
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise ConfigError(
            f"WORKSPACE_STATE_DIR: cannot create or write {error.filename}: {error.strerror}; "
            "set it to a writable directory"
        ) from error


@asynccontextmanager
async def lock_state(settings: Settings, url: str | None = None) -> AsyncIterator[None]:
    """Lock the state folder and the SQLite file, which can be in another folder.

    Raises:
        ConfigError: another agent uses one of them.
    """
    file = sqlite_file(settings.database_url.reveal())
    async with (
        lock_folder(settings.state_dir, url),
        lock_folder(file.resolve(), url, "DATABASE_URL") if file is not None and file.is_file() else nullcontext(),
    ):
        yield


def _reject_emptied(file: Path, codex_home: Path) -> None:
    """Reject an empty database if codex has conversations: it contained their tasks and messages."""
    sessions = codex_home / "sessions"
    if file.exists() and file.stat().st_size == 0 and sessions.is_dir() and any(sessions.iterdir()):
        raise ConfigError(
            f"DATABASE_URL: {file} is empty, although {sessions} contains conversations; restore a backup "
            "(those from before an upgrade end in .bak), or remove the empty file to start without their tasks"
        )


def launch_of(settings: Settings, provider: ChosenProvider, env: Mapping[str, str]) -> Launch:
    """Return how to start codex: the binary, its home and its API key.

    Raises:
        CodexCannotStart: there is no codex binary, or it cannot be run.
        ConfigError: codex cannot be configured to hide the secret files from commands.
    """
    is_login = provider.auth_mode == SUBSCRIPTION
    # The agent's tools listen on loopback, and the preflight of codex exec uses a closed port there.
    uses_loopback = settings.has_agent_tools or is_exec(settings)
    return Launch(
        binary=require_codex(settings.codex_bin),
        codex_home=settings.codex_home,
        cwd=settings.workspace_dir,
        environment=without_proxy_for(LOOPBACK, env) if uses_loopback else env,
        api_key=provider.credential.reveal() if provider.credential is not None and not is_login else None,
        secrets=secrets_of(settings, provider),
        # The same for all agents with this state folder.
        family=hashlib.sha256(os.fsencode(settings.state_dir.resolve())).hexdigest()[:16],
        overrides={
            **provider.overrides,
            **(QUESTION_FEATURES if asks_people(settings) else {}),
            **(LOGIN_ON_DISK if is_login else {}),
            **profile_overrides(settings, env),
        },
    )


def asks_people(settings: Settings) -> bool:
    """Return whether codex asks before commands that the sandbox does not permit."""
    return settings.config.codex.approval_policy != "never"


def thread_options(settings: Settings, provider: ChosenProvider) -> "ThreadOptions":
    """Return the options of every thread; codex's own sandbox is off if the container is the sandbox."""
    # Imported only if needed: with the A2A SDK it takes 0.3 s.
    from codex_workspace.codex.thread import ThreadOptions
    from codex_workspace.protocol.app_server_reader import ExpectedServers
    from codex_workspace.tasks.files import tool_spec

    codex = settings.config.codex
    return ThreadOptions(
        cwd=settings.workspace_dir,
        model=provider.model,
        model_provider=provider.slug,
        sandbox="danger-full-access" if codex.sandbox == "container" else codex.sandbox,
        approval_policy=codex.approval_policy,
        effort=codex.reasoning_effort,
        instructions=settings.instructions,
        tools=(tool_spec(),),
        servers=ExpectedServers(
            tuple(server.name for server in settings.mcp.servers),
            settings.mcp.patience_s,
            settings.mcp.left_out,
            settings.mcp.private,
        ),
        profile=profile_of(settings),
    )


def _supervisor_limits(settings: Settings) -> SupervisorLimits:
    codex, limits = settings.config.codex, settings.config.limits
    return SupervisorLimits(
        restart_wait_s=codex.restart_wait_s,
        max_restarts=codex.max_restarts,
        memory_mb=limits.codex_memory_mb,
        threads=settings.mcp.threads_within(limits.mcp_processes, limits.codex_threads),
    )


def _opener(
    launch: Launch, settings: Settings, provider: ChosenProvider
) -> Callable[[], AbstractAsyncContextManager[Connection]]:
    probe: Callable[[Connection], Awaitable[object]] | None = None
    if settings.mcp.required:
        # Imported before the event loop runs beside other imports.
        from codex_workspace.codex.thread import probe_mcp_servers

        options, timeout_s = thread_options(settings, provider), settings.config.codex.request_timeout_s
        probe = partial(probe_mcp_servers, options=options, timeout_s=timeout_s)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Connection]:
        nonlocal launch
        async with open_app_server(launch) as codex:
            # Later starts find the index that this one has made.
            launch = replace(launch, start_timeout_s=START_TIMEOUT_S)
            try:
                await check_sandbox(codex, settings.config.codex.sandbox, settings.workspace_dir, profile_of(settings))
                if probe is not None:
                    await probe(codex)
            except CodexGone as gone:
                raise CodexCannotStart(f"codex cannot start: {gone.sentence}", gone.tail) from gone
            yield codex

    return opened
