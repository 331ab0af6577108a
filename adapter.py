"""The entry point of the platform's runtime, which imports this module, takes `Adapter`, and serves its executor.

The model and the prompt come from config.yaml and the environment, as under our own host. `capabilities` keeps its
default, none: with `session` the platform would reject messages during a turn, instead of queueing them.
"""

from codex_workspace.codex.transcript import LINES
from codex_workspace.common.values import JsonObject
from codex_workspace.executor import CodexAppServerExecutor
from codex_workspace.platform.runtime_contract import AdapterConfig, BaseAdapter
from codex_workspace.runtime_host import RuntimeHost


class CodexAdapter(BaseAdapter):
    """Runs the agent under the platform's runtime, which serves HTTP itself."""

    def __init__(self) -> None:
        self._host = RuntimeHost()

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
        """Return a description for people."""
        return "OpenAI Codex: one long-lived codex app-server that works in this workspace."

    def memory_filename(self) -> str:
        """Return the file that codex reads as a workspace's memory."""
        return "AGENTS.md"

    async def setup(self, config: AdapterConfig) -> None:
        """Read and check the configuration.

        Raises:
            ConfigError: a RuntimeError, as the runtime expects, that names file, key and remedy.
            CodexCannotStart: it is not known whether the kernel allows codex's sandbox.
        """
        await self._host.configure(str(config.config_path), getattr(config, "heartbeat", None))

    async def create_executor(self, config: AdapterConfig) -> CodexAppServerExecutor:
        """Return the executor, with a codex that has started and can run commands.

        Raises:
            ConfigError: CODEX_HOME's config.toml or the database cannot be used.
            CodexCannotStart: codex is missing or too old, or its sandbox does not work here.
        """
        if not self._host.is_configured:
            await self.setup(config)
        return await self._host.start()

    def pre_stop_state(self) -> JsonObject:
        """Return what the runtime stores in its snapshot: the main context's codex thread, as of the last answer.

        It is empty if the main context has no thread, or if `codex.conversations` is `per-context`.
        """
        return self._host.snapshot()

    def restore_state(self, snapshot: JsonObject) -> None:
        """Resume the snapshot's thread if the agent's own store has none."""
        self._host.restore(snapshot)

    async def transcript_lines(self, since: int = 0, limit: int = LINES) -> JsonObject:
        """Return `{runtime, supported, lines, cursor, more, source}`: the thread's record after `since` lines."""
        return await self._host.transcript_lines(since, limit)

    async def close(self) -> None:
        """Stop codex and close the store."""
        await self._host.close()


Adapter = CodexAdapter
