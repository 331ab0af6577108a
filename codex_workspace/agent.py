"""The composition root: builds a running agent from its settings, for `cli.serve` and for `adapter`."""

import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.backends.codex_exec.backend import exec_backend, further_config
from codex_workspace.backends.codex_exec.turn import FileRequests
from codex_workspace.codex.sandbox import check_sandbox, create_secret_files, profile_of, profile_overrides
from codex_workspace.codex.supervisor import CodexSupervisor, SupervisorLimits
from codex_workspace.codex.thread import CodexThread, ThreadOptions, probe_mcp_servers
from codex_workspace.codex.transcript import TranscriptReader
from codex_workspace.codex.turn import TurnLimits
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.database_url import sqlite_file
from codex_workspace.common.errors import CodexCannotStart, CodexGone, ConfigError, StoreUnavailable
from codex_workspace.common.files import lock_folder
from codex_workspace.common.redact import Redactor
from codex_workspace.common.safe_http import AddressGuard, AllowList, SafeHttpClient
from codex_workspace.common.telemetry import NO_TRACER, Tracer, open_tracing
from codex_workspace.config.codex_toml import prepare_codex_home
from codex_workspace.config.environment import (
    Secret,
    header_secrets,
    secrets_in_url,
    tokens_in,
    without_proxy_for,
)
from codex_workspace.config.loading import SHORTEST_SECRET, check_secrets, require_codex
from codex_workspace.config.login import update_login
from codex_workspace.config.prompts import link_skill_folders
from codex_workspace.config.providers import SUBSCRIPTION, ChosenProvider
from codex_workspace.config.settings import PlatformSettings, Settings
from codex_workspace.executor import CodexAppServerExecutor
from codex_workspace.platform.client import PlatformClient, WorkspaceToken, open_platform_client, read_secret
from codex_workspace.protocol.app_server_reader import ExpectedServers
from codex_workspace.runtimes.backend import Backend, BackendLifecycle, RecoveryPolicy, ThreadRegistry, ToolCaller
from codex_workspace.runtimes.launch import Launch
from codex_workspace.runtimes.process import end_leftovers
from codex_workspace.storage.database import DatabaseFailed
from codex_workspace.storage.retention import INTERVAL_S
from codex_workspace.storage.store import Store, open_store
from codex_workspace.tasks import files
from codex_workspace.tasks.files import tool_spec
from codex_workspace.tasks.request import RequestReader
from codex_workspace.tasks.scheduling import AdmissionControl, MidTurn
from codex_workspace.tasks.telemetry import Telemetry

if TYPE_CHECKING:
    from codex_workspace.tools.mcp_server import ToolServer

logger = logging.getLogger(__name__)

READY_TIMEOUT_S: Final = 3.0
"""A probe waits this long for codex; starting it takes 50 to 250 ms."""


LOOPBACK: Final = "127.0.0.1"
"""The address of the agent's own tools; requests to it must not go through a proxy, which would see their tokens."""

SECONDS_PER_DAY: Final = 86400.0

QUESTION_FEATURES: Final[Mapping[str, str]] = {
    "features.request_permissions_tool": "true",
    "features.default_mode_request_user_input": "true",
    "suppress_unstable_features_warning": "true",
}
"""Lets the model request permissions and ask questions; the last entry suppresses codex's warning about the others."""


LOGIN_ON_DISK: Final[Mapping[str, str]] = {"cli_auth_credentials_store": '"file"'}
"""Makes codex read a subscription's login from auth.json and store the refreshed login there."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A running agent without a server; `platform` is the client of the platform, if one is configured."""

    executor: CodexAppServerExecutor
    store: Store
    codex: BackendLifecycle
    admission: AdmissionControl
    telemetry: Telemetry
    transcripts: TranscriptReader
    platform: PlatformClient | None = None

    async def not_ready_reason(self) -> str | None:
        """Return why no message can be answered now, or None; starts a codex that has died."""
        problem = await self.store.write_problem()
        if problem is not None:
            return problem
        return await self.codex.not_ready_reason(READY_TIMEOUT_S)

    async def lasting_problem(self) -> str | None:
        """Return the lasting problem that prevents all answers, or None."""
        return await self.store.write_problem() or self.codex.broken_reason


def secrets_of(settings: Settings, provider: ChosenProvider | None) -> list[str]:
    """Return every secret that must be redacted from logs and answers."""
    secrets = [
        *settings.tokens.values(),
        *(_token_of(settings.platform).candidates() if settings.platform else ()),
        read_secret(settings.platform.secret_file) if settings.platform else None,
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


def _token_of(platform: PlatformSettings) -> WorkspaceToken:
    return WorkspaceToken(platform.token_file, platform.provisioned, platform.token)


@asynccontextmanager
async def open_agent(
    settings: Settings, provider: ChosenProvider, env: Mapping[str, str], url: str | None = None
) -> AsyncIterator[Agent]:
    """Lock the state folder, prepare CODEX_HOME, open the store and run the agent while the block is open.

    `url` is the agent's address; the error of a second agent with the same state folder contains it.

    Raises:
        ConfigError: another agent uses the folder, CODEX_HOME's config.toml is broken, the database is damaged or
            newer, or a folder cannot be written.
    """
    prepare_state(settings)
    check_secrets(settings, provider)
    async with lock_folder(settings.state_dir, url):
        prepare_codex_home(settings, provider, further_config(settings) if is_exec(settings) else {})
        if provider.auth_mode == SUBSCRIPTION and provider.credential is not None:
            update_login(settings.codex_home, provider.credential)
        create_secret_files(settings)
        link_skill_folders(settings.codex_home, settings.skills)
        for name, why in settings.mcp.left_out.items():
            logger.warning("skipping the MCP server %s: %s", name, why)
        launch = launch_of(settings, provider, env)
        await end_leftovers(launch.family)
        redactor = Redactor(each for each in secrets_of(settings, provider) if len(each) >= SHORTEST_SECRET)
        file_requests = FileRequests()
        async with (
            tracing(settings, redactor) as tracer,
            open_store(settings.database_url.reveal(), stores_starts=is_exec(settings)) as store,
            _pruning(settings, store),
            _platform(settings, redactor) as platform,
            _agent_tools(settings, store, redactor, platform, file_requests) as tools,
            _backend(settings, provider, launch, store, tools, file_requests) as backend,
            _agent(settings, backend, store, Telemetry(tracer=tracer), redactor) as agent,
        ):
            yield replace(agent, platform=platform)


def tracing(settings: Settings, redactor: Callable[[str], str]) -> AbstractAsyncContextManager[Tracer]:
    """Export spans while the block is open, if the operator configured it."""
    if not settings.environment.has_traces:
        return nullcontext(NO_TRACER)
    headers = settings.trace_headers
    return open_tracing(settings.config.name, None if headers is None else headers.reveal(), redactor)


@asynccontextmanager
async def _platform(settings: Settings, redactor: Redactor) -> AsyncIterator[PlatformClient | None]:
    """Open the platform's client, if a platform is configured; its tokens are redacted as soon as they are known."""
    platform = settings.platform
    if platform is None:
        yield None
        return

    def redact_token(token: Secret) -> None:
        if len(token.reveal()) >= SHORTEST_SECRET:
            redactor.add(token.reveal())

    token = _token_of(platform)
    token.on_secret = redact_token
    async with open_platform_client(platform.url, platform.workspace_id, token) as api:
        yield api


@asynccontextmanager
async def _agent_tools(
    settings: Settings, store: Store, redactor: Redactor, platform: PlatformClient | None, file_requests: FileRequests
) -> AsyncIterator["ToolServer | None"]:
    """Serve the agent's own tools to the model, if they are enabled; with codex exec, one tool returns files."""
    if not settings.has_agent_tools:
        yield None
        return
    # Imported only if needed: the MCP package takes half a second and 23 MB.
    from codex_workspace.tools.mcp_server import SPARE_S, Toolbox, open_tool_server
    from codex_workspace.tools.peer_client import PeerClient

    toolbox = Toolbox(
        PeerClient(settings.config.peers, settings.peer_tokens),
        store.memories,
        store.conversations.newest,
        hand_over=file_requests.hand_over if is_exec(settings) else None,
    )
    if platform is not None:
        from codex_workspace.platform.tools import platform_toolbox

        names = [peer.name for peer in settings.config.peers]
        toolbox = platform_toolbox(toolbox, platform, names, [entry.name for entry in settings.config.principals])
    # A turn produces no events while it waits for a peer.
    longest_wait_s = max(0.0, settings.config.codex.turn_inactivity_timeout_s - SPARE_S)
    async with open_tool_server(toolbox, redactor, longest_wait_s) as tools:
        yield tools


@asynccontextmanager
async def _agent(
    settings: Settings, backend: Backend, store: Store, telemetry: Telemetry, redactor: Redactor
) -> AsyncIterator[Agent]:
    policy = RecoveryPolicy(settings.config.codex.recovery)
    admission = AdmissionControl(settings.config.limits)
    requests = _request_reader(settings, redactor, steers=backend.steers)
    async with task_group() as tasks:
        executor = CodexAppServerExecutor(
            tasks,
            backend.threads,
            store.deliveries,
            requests,
            policy,
            redactor,
            admission,
            settings.config.codex.question_timeout_s,
            asks_people=_asks_people(settings),
            telemetry=telemetry,
        )
        transcripts = TranscriptReader(settings.codex_home, store.deliveries.newest_thread, redactor)
        try:
            yield Agent(executor, store, backend.lifecycle, admission, telemetry, transcripts)
        finally:
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def _backend(
    settings: Settings,
    provider: ChosenProvider,
    launch: Launch,
    store: Store,
    tools: "ToolServer | None",
    file_requests: FileRequests,
) -> AsyncIterator[Backend]:
    """Provide the backend while the block is open; then stop its codex."""
    if is_exec(settings):
        add_tools = tools.added_to if tools else None
        yield exec_backend(settings, provider, launch, store.context_thread, add_tools, file_requests)
        return
    async with task_group() as tasks:
        opener = _opener(launch, settings, thread_options(settings, provider))
        codex = CodexSupervisor(tasks, opener, _supervisor_limits(settings))
        try:
            yield Backend(codex, ThreadRegistry(_thread_factory(settings, provider, store, codex, tools)), steers=True)
        finally:
            with anyio.CancelScope(shield=True):
                await codex.close()


def is_exec(settings: Settings) -> bool:
    """Return whether each turn runs in its own codex process."""
    return settings.config.codex.backend == "exec"


@asynccontextmanager
async def _pruning(settings: Settings, store: Store) -> AsyncIterator[None]:
    storage = settings.config.storage
    async with task_group() as tasks:
        tasks.start_soon(store.retention(storage.keep_days, storage.keep_tasks).run)
        tasks.start_soon(_prune_files, settings.workspace_dir, store, storage.keep_days)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


async def _prune_files(workspace: Path, store: Store, keep_days: float) -> None:
    """Remove the files of old messages from the workspace, now and every `INTERVAL_S`, until cancelled."""
    while True:
        before = time.time() - keep_days * SECONDS_PER_DAY
        try:
            keep = [delivery.task_id for delivery in await store.deliveries.unfinished()]
            await anyio.to_thread.run_sync(files.prune, workspace, before, keep)
        except (StoreUnavailable, DatabaseFailed, OSError) as error:
            logger.warning("cannot remove the files of old messages: %s", error)
        await anyio.sleep(INTERVAL_S)


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
        family=_family(settings.state_dir),
        overrides={
            **(QUESTION_FEATURES if _asks_people(settings) else {}),
            **(LOGIN_ON_DISK if is_login else {}),
            **profile_overrides(settings, env),
        },
    )


def _asks_people(settings: Settings) -> bool:
    return settings.config.codex.approval_policy != "never"


def _family(state: Path) -> str:
    """Return the name that identifies the codex processes of agents with this state folder."""
    return hashlib.sha256(os.fsencode(state.resolve())).hexdigest()[:16]


def thread_options(settings: Settings, provider: ChosenProvider) -> ThreadOptions:
    """Return the options of every thread; codex's own sandbox is off if the container is the sandbox."""
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


def _request_reader(settings: Settings, redactor: Redactor, *, steers: bool) -> RequestReader:
    push = settings.config.push
    return RequestReader(
        settings.workspace_dir,
        MidTurn(settings.config.codex.mid_turn),
        settings.config.limits,
        SafeHttpClient(AddressGuard(AllowList.parse(push.allow)), push.timeout_s).fetch,
        redactor,
        steers,
    )


def _supervisor_limits(settings: Settings) -> SupervisorLimits:
    codex, limits = settings.config.codex, settings.config.limits
    return SupervisorLimits(
        restart_wait_s=codex.restart_wait_s,
        max_restarts=codex.max_restarts,
        memory_mb=limits.codex_memory_mb,
        threads=settings.mcp.threads_within(limits.mcp_processes, limits.codex_threads),
    )


@contextmanager
def _as_start_failure() -> Iterator[None]:
    """Report the end of codex during its first checks as a failed start."""
    try:
        yield
    except CodexGone as gone:
        raise CodexCannotStart(f"codex cannot start: {gone.sentence}", gone.tail) from gone


def _opener(
    launch: Launch, settings: Settings, options: ThreadOptions
) -> Callable[[], AbstractAsyncContextManager[Connection]]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Connection]:
        async with open_app_server(launch) as codex:
            with _as_start_failure():
                await check_sandbox(codex, settings.config.codex.sandbox, settings.workspace_dir, options.profile)
                if settings.mcp.required:
                    request_s = settings.config.codex.request_timeout_s
                    await probe_mcp_servers(codex, options, request_s)
            yield codex

    return opened


def _thread_factory(
    settings: Settings,
    provider: ChosenProvider,
    store: Store,
    codex: CodexSupervisor,
    tools: "ToolServer | None",
) -> Callable[[str, str], CodexThread]:
    options = thread_options(settings, provider)
    config = settings.config.codex
    limits = TurnLimits(
        inactivity_s=config.turn_inactivity_timeout_s,
        total_s=settings.turn_timeout_s,
        request_s=config.request_timeout_s,
    )

    def create_thread(owner: str, context_id: str) -> CodexThread:
        with_tools = options
        if tools is not None:
            with_tools = replace(options, servers=tools.added_to(options.servers, ToolCaller(owner, context_id)))
        return CodexThread(codex.use, store.context_thread(owner, context_id), with_tools, limits)

    return create_thread
