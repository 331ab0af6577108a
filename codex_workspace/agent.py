"""The composition root: builds a running agent from its settings, for `cli.serve` and for `adapter`."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from codex_workspace.backends.codex_exec.backend import exec_backend
from codex_workspace.backends.codex_exec.turn import FileRequests
from codex_workspace.codex.supervisor import CodexSupervisor
from codex_workspace.codex.thread import CodexThread
from codex_workspace.codex.transcript import TranscriptReader
from codex_workspace.codex.turn import TurnLimits
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.common.redact import Redactor
from codex_workspace.common.safe_http import AddressGuard, AllowList, SafeHttpClient
from codex_workspace.common.telemetry import NO_TRACER, Tracer, open_tracing
from codex_workspace.config.environment import Secret
from codex_workspace.config.loading import SHORTEST_SECRET
from codex_workspace.config.providers import ChosenProvider
from codex_workspace.config.settings import Settings
from codex_workspace.executor import CodexAppServerExecutor
from codex_workspace.launching import (
    Launched,
    asks_people,
    is_exec,
    open_launched,
    secrets_of,
    thread_options,
    token_of,
)
from codex_workspace.platform.client import PlatformClient, open_platform_client
from codex_workspace.runtimes.backend import Backend, BackendLifecycle, RecoveryPolicy, ThreadRegistry, ToolCaller
from codex_workspace.storage.database import DatabaseFailed
from codex_workspace.storage.retention import INTERVAL_S
from codex_workspace.storage.store import Store, open_store, wait_until_free
from codex_workspace.tasks import files
from codex_workspace.tasks.request import RequestReader
from codex_workspace.tasks.scheduling import AdmissionControl, MidTurn
from codex_workspace.tasks.telemetry import Telemetry

if TYPE_CHECKING:
    from codex_workspace.tools.mcp_server import ToolServer

logger = logging.getLogger(__name__)

READY_TIMEOUT_S: Final = 3.0
"""A probe waits this long for codex; starting it takes 50 to 250 ms."""

SECONDS_PER_DAY: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Agent:
    """A running agent without a server; `platform` is the client of the platform, if one is configured."""

    executor: CodexAppServerExecutor
    store: Store
    codex: BackendLifecycle
    admission: AdmissionControl
    telemetry: Telemetry
    transcripts: TranscriptReader
    platform: PlatformClient | None

    async def not_ready_reason(self) -> str | None:
        """Return why no message can be answered now, or None; starts a codex that has died."""
        return await self.store.write_problem() or await self.codex.not_ready_reason(READY_TIMEOUT_S)

    async def lasting_problem(self) -> str | None:
        """Return the lasting problem that prevents all answers, or None."""
        return await self.store.write_problem() or self.codex.broken_reason


@asynccontextmanager
async def open_agent(
    settings: Settings, provider: ChosenProvider, env: Mapping[str, str], url: str | None = None
) -> AsyncIterator[Agent]:
    """Launch codex when it is needed, and run the agent while the block is open; see `launching.open_launched`.

    Raises:
        ConfigError: as `open_launched` and `agent_around`.
    """
    async with open_launched(settings, provider, env, url) as launched:
        await wait_until_free(settings.database_url.reveal())
        async with agent_around(launched, settings, provider) as agent:
            yield agent


@asynccontextmanager
async def agent_around(launched: Launched, settings: Settings, provider: ChosenProvider) -> AsyncIterator[Agent]:
    """Open the store and run the agent while the block is open, with a prepared codex.

    Raises:
        ConfigError: the database is damaged or newer.
    """
    redactor = Redactor(each for each in secrets_of(settings, provider) if len(each) >= SHORTEST_SECRET)
    file_requests = FileRequests()
    home = settings.codex_home
    watched = {"WORKSPACE_STATE_DIR": settings.state_dir, "CODEX_HOME": home, "CODEX_HOME/sessions": home / "sessions"}
    async with (
        tracing(settings, redactor) as tracer,
        open_store(settings.database_url.reveal(), stores_starts=is_exec(settings), watched=watched) as store,
        _pruning(settings, store),
        _platform(settings, redactor) as platform,
        _agent_tools(settings, store, redactor, platform, file_requests) as tools,
        _backend(settings, provider, launched, store, tools, file_requests) as backend,
        _agent(settings, backend, store, Telemetry(tracer=tracer), redactor, platform) as agent,
    ):
        yield agent


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

    token = token_of(platform)
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
    settings: Settings,
    backend: Backend,
    store: Store,
    telemetry: Telemetry,
    redactor: Redactor,
    platform: PlatformClient | None,
) -> AsyncIterator[Agent]:
    policy = RecoveryPolicy(settings.config.codex.recovery)
    admission = AdmissionControl(settings.config.limits)
    push = settings.config.push
    requests = RequestReader(
        settings.workspace_dir,
        MidTurn(settings.config.codex.mid_turn),
        settings.config.limits,
        SafeHttpClient(AddressGuard(AllowList.parse(push.allow)), push.timeout_s).fetch,
        redactor,
        backend.steers,
    )
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
            asks_people=asks_people(settings),
            telemetry=telemetry,
        )
        transcripts = TranscriptReader(settings.codex_home, store.deliveries.newest_thread, redactor)
        try:
            yield Agent(executor, store, backend.lifecycle, admission, telemetry, transcripts, platform)
        finally:
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def _backend(
    settings: Settings,
    provider: ChosenProvider,
    launched: Launched,
    store: Store,
    tools: "ToolServer | None",
    file_requests: FileRequests,
) -> AsyncIterator[Backend]:
    """Provide the backend while the block is open; then stop its codex."""
    codex = launched.codex
    if codex is None:
        add_tools = tools.added_to if tools else None
        yield exec_backend(settings, provider, launched.launch, store.context_thread, add_tools, file_requests)
        return
    try:
        yield Backend(codex, ThreadRegistry(_thread_factory(settings, provider, store, codex, tools)), steers=True)
    finally:
        with anyio.CancelScope(shield=True):
            await codex.close()


@asynccontextmanager
async def _pruning(settings: Settings, store: Store) -> AsyncIterator[None]:
    storage = settings.config.storage
    async with task_group() as tasks:
        tasks.start_soon(store.keep_lock)
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


def _thread_factory(
    settings: Settings, provider: ChosenProvider, store: Store, codex: CodexSupervisor, tools: "ToolServer | None"
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
