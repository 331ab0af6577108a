"""The agent under the platform's runtime: settings, lifecycle and snapshots, for the adapter."""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.agent import Agent, open_agent
from codex_workspace.codex.transcript import LINES, transcript_page
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.processes import protect_from_inspection
from codex_workspace.common.values import JsonObject
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import ChosenProvider, choose_provider
from codex_workspace.config.settings import Settings
from codex_workspace.executor import CodexAppServerExecutor
from codex_workspace.platform.host_adapter import DelegationResults, RuntimeHostAdapter, open_host_adapter
from codex_workspace.platform.inbox import PlatformInbox
from codex_workspace.platform.runtime_contract import is_smoke_test, report_wedge

logger = logging.getLogger(__name__)

THREAD_KEY: Final = "session_id"
"""The key of the thread ID in a snapshot, as in the runtime's other adapters; the runtime does not redact a UUID."""

REPORTED_RESULTS: Final = "delegation_results_told"
"""The file in the state folder with the digests of reported results."""

HEALTH_INTERVAL_S: Final = 5.0
"""The interval between health checks; the next heartbeat reports the result to the platform."""


@dataclass(frozen=True, slots=True)
class _Running:
    agent: Agent
    adapter: RuntimeHostAdapter


class RuntimeHost:
    """One agent that the platform's runtime hosts."""

    def __init__(self) -> None:
        self._open: Callable[[], AbstractAsyncContextManager[_Running]] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._running: _Running | None = None
        self._closing = asyncio.Event()

    @property
    def is_configured(self) -> bool:
        """Whether `configure` has succeeded."""
        return self._open is not None

    async def configure(self, config_path: str, heartbeat: object) -> None:
        """Read and check the configuration, and protect this process's environment from other processes.

        Raises:
            ConfigError: a RuntimeError that names file, key and remedy.
            CodexCannotStart: as `load_settings`.
        """
        protect_from_inspection()
        env = {**os.environ, "WORKSPACE_CONFIG_PATH": config_path}
        # In a thread, because it may wait seconds for codex's sandbox, and the host serves meanwhile.
        settings = await anyio.to_thread.run_sync(load_settings, env)
        provider = choose_provider(settings, env)
        self._open = lambda: _open_running(settings, provider, env, heartbeat)

    async def start(self) -> CodexAppServerExecutor:
        """Start the agent; return its executor. In a smoke test codex starts with the first message.

        Raises:
            ConfigError: CODEX_HOME's config.toml or the database cannot be used.
            CodexCannotStart: codex is missing or too old, or its sandbox does not work here.
        """
        assert self._open is not None
        opened: asyncio.Future[CodexAppServerExecutor] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(self._open(), opened), name="agent")
        return await asyncio.shield(opened)

    async def _hold(
        self, opening: AbstractAsyncContextManager[_Running], opened: "asyncio.Future[CodexAppServerExecutor]"
    ) -> None:
        """Hold the agent open until `close`: the task that entered its cancel scopes must also leave them."""
        try:
            async with opening as running:
                self._running = running
                opened.set_result(running.agent.executor)
                await self._closing.wait()
        except Exception as error:
            if opened.done():
                logger.exception("the agent has ended")
                report_wedge(str(error))
            else:
                opened.set_exception(error)
        finally:
            self._running = None
            opened.cancel()

    def snapshot(self) -> JsonObject:
        """Return the ID of the main context's codex thread as of the last answer; it outlives a lost state folder."""
        running = self._running
        thread_id = None if running is None else running.adapter.thread_id
        return {} if thread_id is None else {THREAD_KEY: thread_id}

    def restore(self, snapshot: JsonObject) -> None:
        """Resume the thread of a snapshot if the store has none; the runtime nests the snapshot under `adapter`."""
        running = self._running
        if running is None or not isinstance(snapshot, dict):
            return
        for candidate in (snapshot.get("adapter"), snapshot):
            thread_id = candidate.get(THREAD_KEY) if isinstance(candidate, dict) else None
            if isinstance(thread_id, str) and _is_uuid(thread_id):
                running.adapter.restore(thread_id)
                return

    async def transcript_lines(self, since: int = 0, limit: int = LINES) -> JsonObject:
        """Return the lines of the thread's record after the first `since`; see `TranscriptReader.lines`."""
        running = self._running
        if running is None:
            return transcript_page(since=since)
        return await running.agent.transcripts.lines(max(0, since), max(1, limit))

    async def close(self) -> None:
        """Stop codex and close the store."""
        if self._holder is not None:
            self._closing.set()
            if self._running is None:
                self._holder.cancel()
            await asyncio.wait([self._holder])


@asynccontextmanager
async def _open_running(
    settings: Settings, provider: ChosenProvider, env: Mapping[str, str], heartbeat: object
) -> AsyncIterator[_Running]:
    is_smoke = is_smoke_test(env)
    file = Path(env.get("DELEGATION_RESULTS_FILE") or settings.state_dir / "delegation_results.jsonl")
    async with open_agent(settings, provider, env) as agent:
        if not is_smoke:
            await agent.codex.start()
        async with (
            open_host_adapter(
                agent.executor,
                agent.store,
                agent.admission,
                DelegationResults(file, settings.state_dir / REPORTED_RESULTS),
                heartbeat=heartbeat,
                one_main_context=settings.config.codex.conversations == "main",
                resumes=not is_smoke,
            ) as adapter,
            task_group() as tasks,
        ):
            agent.executor.host_adapter = adapter
            if not is_smoke:
                tasks.start_soon(report_unhealthy, lambda: _lasting_problem(agent))
            if agent.platform is not None and not is_smoke:
                agent.executor.inbox = PlatformInbox(agent.platform, agent.store.outbox, adapter.replies, settings)
                tasks.start_soon(agent.executor.poll, adapter.handler)
            try:
                yield _Running(agent, adapter)
            finally:
                tasks.cancel_scope.cancel()
                # The next process resumes unfinished tasks.
                with anyio.CancelScope(shield=True):
                    await agent.executor.drain(0.0)


async def _lasting_problem(agent: Agent) -> str | None:
    await agent.not_ready_reason()
    return await agent.lasting_problem()


async def report_unhealthy(check: Callable[[], Awaitable[str | None]], interval_s: float = HEALTH_INTERVAL_S) -> None:
    """Report lasting problems and their end to the platform's heartbeat, until cancelled.

    `check` returns the current lasting problem, or None.
    """
    was_wedged = False
    while True:
        problem = await check()
        if problem is not None or was_wedged:
            report_wedge(problem)
        was_wedged = problem is not None
        await anyio.sleep(interval_s)


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False
