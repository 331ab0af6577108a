"""The platform's door: its runtime imports this module, takes `Adapter`, and gets an executor with codex behind it."""

import os
from typing import TYPE_CHECKING

import anyio
from a2a.server.agent_execution import AgentExecutor

from codex_workspace.agent import Agent, open_agent
from codex_workspace.contract import AdapterConfig, BaseAdapter
from codex_workspace.owner import Owner
from codex_workspace.processes import hide_from_others
from codex_workspace.providers import choose_provider
from codex_workspace.settings import load_settings
from codex_workspace.transcript import LINES, answer
from codex_workspace.wire import JsonObject

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager


class CodexAdapter(BaseAdapter):
    """Hands off to `CodexAppServerExecutor`; the platform's runtime does the HTTP itself."""

    def __init__(self) -> None:
        self._open: Callable[[], AbstractAsyncContextManager[Agent]] | None = None
        self._agent: Owner[Agent] | None = None
        self._executor: AgentExecutor | None = None

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
        hide_from_others()
        env = {**os.environ, "WORKSPACE_CONFIG_PATH": str(config.config_path)}
        settings = load_settings(env)
        provider = choose_provider(settings, env)
        self._open = lambda: open_agent(settings, provider, env)

    async def create_executor(self, config: AdapterConfig) -> AgentExecutor:
        """Return the executor, with a codex that has started and can run commands.

        Raises:
            ConfigError: CODEX_HOME's config.toml or the database cannot be used.
            CodexCannotStart: codex is missing or too old, or its sandbox cannot work here.
        """
        if self._open is None:
            await self.setup(config)
        assert self._open is not None
        self._agent = Owner(self._open, usable=lambda _agent: True)
        agent = await self._agent.get()
        try:
            await agent.codex.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise
        self._executor = agent.executor
        return self._executor

    async def transcript_lines(self, since: int = 0, limit: int = LINES) -> JsonObject:
        """Return what codex does, after the first `since` lines of its record of the thread that was last at work.

        `{runtime, supported, lines, cursor, more, source}`, as `Transcripts.lines` gives them.
        """
        agent = self._agent.current if self._agent is not None else None
        if agent is None:
            return answer(since=since)
        return await agent.transcripts.lines(max(0, since), max(1, limit))

    async def close(self) -> None:
        """End codex and close the store."""
        if self._agent is not None:
            await self._agent.close()


Adapter = CodexAdapter
