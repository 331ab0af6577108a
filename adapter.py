"""The platform's door: its runtime imports this module, takes `Adapter`, and gets an executor with codex behind it.

What the runtime thinks of model and prompt is not asked: config.yaml, the files beside it and the environment say both,
as under our own host. Capabilities stay as the runtime has them, none: `session` would have the platform refuse, rather
than keep, what comes while a turn runs.
"""

import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.agent import Agent, open_agent
from codex_workspace.codex.transcript import LINES, answer
from codex_workspace.common.concurrency import BackgroundResource, task_group
from codex_workspace.common.processes import protect_from_inspection
from codex_workspace.common.values import JsonObject
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import ChosenProvider, choose_provider
from codex_workspace.config.settings import Settings
from codex_workspace.executor import CodexAppServerExecutor
from codex_workspace.platform.deadline_reply import open_deferred_replies
from codex_workspace.platform.runtime_contract import (
    AdapterConfig,
    BaseAdapter,
    DelegationResults,
    delegation_results,
    is_smoke,
)
from codex_workspace.platform.runtime_host import (
    DeferredReplySender,
    RuntimeHostAdapter,
    open_runtime_host,
    report_unhealthy,
)
from codex_workspace.server.handler import IdempotentHandler

logger = logging.getLogger(__name__)

THREAD: Final = "session_id"
"""The key of a snapshot that the runtime's own adapters use, too: a UUID passes its scrubber."""

KNOWN_RESULTS: Final = "delegation_results_told"
"""In the state folder: digests of what was told."""


class CodexAdapter(BaseAdapter):
    """Hands off to `CodexAppServerExecutor`; the platform's runtime does the HTTP itself."""

    def __init__(self) -> None:
        self._open: Callable[[], AbstractAsyncContextManager[_Running]] | None = None
        self._agent: BackgroundResource[_Running] | None = None
        self._host: RuntimeHostAdapter | None = None

    @staticmethod
    def name() -> str:
        """Return the runtime's id, as in config.yaml."""
        return "codex"

    @staticmethod
    def display_name() -> str:
        """Return the name for people."""
        return "Codex"

    @staticmethod
    def description() -> str:
        """Return what it is, in a sentence."""
        return "OpenAI Codex: one long-lived codex app-server that works in this workspace."

    def memory_filename(self) -> str:
        """Return the file that codex reads as a workspace's memory."""
        return "AGENTS.md"

    async def setup(self, config: AdapterConfig) -> None:
        """Read and check the configuration; from now on no other process can read this one's environment.

        Raises:
            ConfigError: a RuntimeError, as the runtime expects, that names file, key and remedy.
        """
        protect_from_inspection()
        env = {**os.environ, "WORKSPACE_CONFIG_PATH": str(config.config_path)}
        settings = load_settings(env)
        provider = choose_provider(settings, env)
        unread = inbox_unread(settings)
        if unread is not None:
            logger.warning(unread)
        heartbeat: object = getattr(config, "heartbeat", None)
        self._open = lambda: _opened(settings, provider, env, heartbeat)

    async def create_executor(self, config: AdapterConfig) -> CodexAppServerExecutor:
        """Return the executor, with a codex that has started and can run commands; in a smoke test it starts later.

        Raises:
            ConfigError: CODEX_HOME's config.toml or the database cannot be used.
            CodexCannotStart: codex is missing or too old, or its sandbox cannot work here.
        """
        if self._open is None:
            await self.setup(config)
        assert self._open is not None
        self._agent = BackgroundResource(self._open, usable=lambda _running: True)
        agent, self._host = await self._agent.get()
        return agent.executor

    def pre_stop_state(self) -> JsonObject:
        """Return what a snapshot keeps: the codex thread that was last at work, where there is one.

        The thread is in our store as well, from its first turn on; a snapshot is for a state folder that was lost.
        """
        thread_id = self._host.thread_id if self._host is not None else None
        return {} if thread_id is None else {THREAD: thread_id}

    def restore_state(self, snapshot: JsonObject) -> None:
        """Go on in a snapshot's thread, where the store knows of none.

        The runtime nests what `pre_stop_state` gave under `adapter`; its own adapters look for it beside that.
        """
        if self._host is None or not isinstance(snapshot, dict):
            return
        inner = snapshot.get("adapter")
        for part in (inner, snapshot):
            thread_id = part.get(THREAD) if isinstance(part, dict) else None
            if isinstance(thread_id, str) and _is_uuid(thread_id):
                self._host.restore(thread_id)
                return

    async def transcript_lines(self, since: int = 0, limit: int = LINES) -> JsonObject:
        """Return what codex does, after the first `since` lines of its record of the thread that was last at work.

        `{runtime, supported, lines, cursor, more, source}`, as `Transcripts.lines` gives them.
        """
        running = self._agent.current if self._agent is not None else None
        if running is None:
            return answer(since=since)
        agent, _host = running
        return await agent.transcripts.lines(max(0, since), max(1, limit))

    async def close(self) -> None:
        """End codex and close the store."""
        if self._agent is not None:
            await self._agent.close()


_Running = tuple[Agent, RuntimeHostAdapter]


@asynccontextmanager
async def _opened(
    settings: Settings, provider: ChosenProvider, env: Mapping[str, str], heartbeat: object
) -> AsyncIterator[_Running]:
    """Open the agent, and what stands between it and the runtime."""
    is_tried_out, codex = is_smoke(env), settings.config.codex
    async with open_agent(settings, provider, env) as agent:
        if not is_tried_out:
            await agent.codex.start()
        async with (
            open_runtime_host(
                agent.executor,
                agent.store,
                agent.admission,
                DelegationResults(_results_file(env), settings.state_dir / KNOWN_RESULTS, delegation_results),
                heartbeat=heartbeat,
                open_later=_late_answers(agent, settings) if not is_tried_out else None,
                one_main_context=codex.conversations == "main",
                is_smoke=is_tried_out,
            ) as host,
            task_group() as beside,
        ):
            if not is_tried_out:
                beside.start_soon(report_unhealthy, lambda: _what_is_wrong(agent))
            try:
                agent.executor.host_adapter = host
                yield agent, host
            finally:
                beside.cancel_scope.cancel()
                # What is left is taken up by the next process.
                with anyio.CancelScope(shield=True):
                    await agent.executor.drain(0.0)


def _late_answers(
    agent: Agent, settings: Settings
) -> Callable[[IdempotentHandler], AbstractAsyncContextManager[DeferredReplySender]] | None:
    """Return what opens the block in which late answers are sent; None where the platform's address is not known."""
    api, within_s = agent.platform, settings.config.platform.answer_within_s
    return None if api is None else lambda handler: open_deferred_replies(api, agent.store.outbox, handler, within_s)


def inbox_unread(settings: Settings) -> str | None:
    """Return what to say to an operator who wants the inbox polled: that nobody does; None where that is not wanted."""
    if settings.config.platform.delivery != "poll":
        return None
    return (
        f"{settings.config_file}: platform.delivery: poll is for the agent's own host; under the platform's runtime "
        "nobody reads the inbox. Have the platform push to this workspace, or start the agent without the runtime"
    )


def _results_file(env: Mapping[str, str]) -> Path | None:
    """Return where the runtime is told to leave results of delegations; its own choice depends on its version."""
    named = env.get("DELEGATION_RESULTS_FILE", "")
    return Path(named) if named else None


async def _what_is_wrong(agent: Agent) -> str | None:
    """Return why nothing can be answered for a reason that lasts; None where there is none.

    A codex that has died is started again by this.
    """
    await agent.not_ready_reason()
    return await agent.wedged()


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


Adapter = CodexAdapter
