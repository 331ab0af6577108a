"""The agent under the platform's runtime: settings, lifecycle and snapshots, for the adapter."""

import logging
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import anyio

from codex_workspace.codex.transcript import LINES, TranscriptReader, answer
from codex_workspace.common.concurrency import BackgroundResource, task_group
from codex_workspace.common.processes import protect_from_inspection
from codex_workspace.common.values import JsonObject
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import ChosenProvider, choose_provider
from codex_workspace.config.settings import OPERATOR, Settings
from codex_workspace.executor import CodexAppServerExecutor
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.deadline_reply import DeferredReplies
from codex_workspace.platform.delegation_results import DelegationResults
from codex_workspace.platform.host_adapter import RuntimeHostAdapter, open_host_adapter
from codex_workspace.platform.inbox import PlatformInbox, inbox_slots
from codex_workspace.platform.runtime_contract import (
    clear_wedge,
    is_smoke_test,
    mark_wedged,
    read_delegation_results,
)
from codex_workspace.runtimes.backend import BackendLifecycle
from codex_workspace.storage.store import Store
from codex_workspace.tasks.scheduling import AdmissionControl

logger = logging.getLogger(__name__)

THREAD: Final = "session_id"
"""The snapshot's key, which the runtime's own adapters use, too; its scrubber lets a UUID pass."""

REPORTED_RESULTS: Final = "delegation_results_told"
"""The file in the state folder with the digests of reported results."""

HEALTH_INTERVAL_S: Final = 5.0
"""The interval between health checks; the platform learns the result with the next heartbeat, 30 s apart."""


class HostedAgent(Protocol):
    """The agent as the runtime host needs it; `codex_workspace.agent.Agent`."""

    @property
    def executor(self) -> CodexAppServerExecutor: ...
    @property
    def store(self) -> Store: ...
    @property
    def codex(self) -> BackendLifecycle: ...
    @property
    def admission(self) -> AdmissionControl: ...
    @property
    def transcripts(self) -> TranscriptReader: ...
    @property
    def platform(self) -> PlatformClient | None: ...

    async def not_ready_reason(self) -> str | None:
        """Return why no message can be answered; asking restarts a codex that has died."""

    async def wedged(self) -> str | None:
        """Return why no message can be answered, for a lasting reason."""


OpenAgent = Callable[[Settings, ChosenProvider, Mapping[str, str]], AbstractAsyncContextManager[HostedAgent]]


@dataclass(frozen=True, slots=True)
class _Running:
    agent: HostedAgent
    adapter: RuntimeHostAdapter


class RuntimeHost:
    """One agent that the platform's runtime hosts."""

    def __init__(self, open_agent: OpenAgent) -> None:
        self._open_agent = open_agent
        self._open: Callable[[], AbstractAsyncContextManager[_Running]] | None = None
        self._resource: BackgroundResource[_Running] | None = None

    @property
    def is_configured(self) -> bool:
        """Whether `configure` has succeeded."""
        return self._open is not None

    def configure(self, config_path: str, heartbeat: object) -> None:
        """Read and check the configuration, and protect this process's environment from other processes.

        Raises:
            ConfigError: a RuntimeError that names file, key and remedy.
        """
        protect_from_inspection()
        env = {**os.environ, "WORKSPACE_CONFIG_PATH": config_path}
        settings = load_settings(env)
        provider = choose_provider(settings, env)
        self._open = lambda: _open_running(settings, self._open_agent(settings, provider, env), env, heartbeat)

    async def start(self) -> CodexAppServerExecutor:
        """Start the agent; return its executor. In a smoke test codex starts with the first message.

        Raises:
            ConfigError: CODEX_HOME's config.toml or the database cannot be used.
            CodexCannotStart: codex is missing or too old, or its sandbox does not work here.
        """
        assert self._open is not None
        self._resource = BackgroundResource(self._open, usable=lambda _running: True)
        return (await self._resource.get()).agent.executor

    @property
    def _running(self) -> _Running | None:
        return None if self._resource is None else self._resource.current

    def snapshot(self) -> JsonObject:
        """Return the codex thread of the main context, for a state folder that gets lost."""
        running = self._running
        thread_id = None if running is None else running.adapter.thread_id
        return {} if thread_id is None else {THREAD: thread_id}

    def restore(self, snapshot: JsonObject) -> None:
        """Resume the thread of a snapshot if the store has none; the runtime nests the snapshot under `adapter`."""
        running = self._running
        if running is None or not isinstance(snapshot, dict):
            return
        for held in (snapshot.get("adapter"), snapshot):
            thread_id = held.get(THREAD) if isinstance(held, dict) else None
            if isinstance(thread_id, str) and _is_uuid(thread_id):
                running.adapter.restore(thread_id)
                return

    async def transcript_lines(self, since: int = 0, limit: int = LINES) -> JsonObject:
        """Return the lines of the thread's record after the first `since`; see `TranscriptReader.lines`."""
        running = self._running
        if running is None:
            return answer(since=since)
        return await running.agent.transcripts.lines(max(0, since), max(1, limit))

    async def close(self) -> None:
        """Stop codex and close the store."""
        if self._resource is not None:
            await self._resource.close()


@asynccontextmanager
async def _open_running(
    settings: Settings,
    opening: AbstractAsyncContextManager[HostedAgent],
    env: Mapping[str, str],
    heartbeat: object,
) -> AsyncIterator[_Running]:
    is_smoke, named = is_smoke_test(env), env.get("DELEGATION_RESULTS_FILE", "")
    reported = settings.state_dir / REPORTED_RESULTS
    results = DelegationResults(Path(named) if named else None, reported, read_delegation_results)
    async with opening as agent:
        if not is_smoke:
            await agent.codex.start()
        inbox = None if is_smoke or agent.platform is None else _inbox(settings, agent.store, agent.platform)
        async with (
            open_host_adapter(
                agent.executor,
                agent.store,
                agent.admission,
                results,
                heartbeat=heartbeat,
                late=None if inbox is None else _late_replies(settings, agent.store, inbox),
                one_main_context=settings.config.codex.conversations == "main",
                resumes=not is_smoke,
            ) as adapter,
            task_group() as tasks,
        ):
            agent.executor.host_adapter, agent.executor.inbox = adapter, inbox
            if not is_smoke:
                tasks.start_soon(report_unhealthy, lambda: _lasting_problem(agent))
                tasks.start_soon(agent.executor.poll, adapter.handler)
            try:
                yield _Running(agent, adapter)
            finally:
                tasks.cancel_scope.cancel()
                # The next process resumes what is left.
                with anyio.CancelScope(shield=True):
                    await agent.executor.drain(0.0)


def _inbox(settings: Settings, store: Store, client: PlatformClient) -> PlatformInbox:
    # Polled messages belong to the same principal, and so to the same thread, as those that the runtime passes on.
    polls = settings.config.platform.delivery == "poll"
    return PlatformInbox(client, store.outbox, inbox_slots(settings), OPERATOR, polls=polls)


def _late_replies(settings: Settings, store: Store, inbox: PlatformInbox) -> DeferredReplies:
    return DeferredReplies(store.outbox, settings.config.platform.answer_within_s, lambda: inbox.dispatcher)


async def _lasting_problem(agent: HostedAgent) -> str | None:
    await agent.not_ready_reason()
    return await agent.wedged()


async def report_unhealthy(check: Callable[[], Awaitable[str | None]], every_s: float = HEALTH_INTERVAL_S) -> None:
    """Have the platform's heartbeat report, until cancelled, when the agent cannot work, and when it can again.

    `check` returns the lasting problem, if there is one.
    """
    was_wedged = False
    while True:
        problem = await check()
        if problem is not None:
            mark_wedged(problem)
        elif was_wedged:
            clear_wedge()
        was_wedged = problem is not None
        await anyio.sleep(every_s)


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False
