"""The backend that runs one `codex exec` for each turn, and its checks at start."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from codex_workspace.backends.codex_exec.command import mcp_overrides, overrides, pass_secrets
from codex_workspace.backends.codex_exec.mcp_servers import ExecMcpServers, is_server_failure
from codex_workspace.backends.codex_exec.runtime import CodexExec, run_codex
from codex_workspace.backends.codex_exec.thread import ExecThread, ExecThreadOptions
from codex_workspace.backends.codex_exec.turn import FileRequests
from codex_workspace.codex.sandbox import WITHOUT, sandbox_error
from codex_workspace.common.errors import MAX_REASON_CHARS, CodexCannotStart
from codex_workspace.common.values import KeyPath, TomlValue, Version
from codex_workspace.config.codex_toml import CONFIG_NAME, Managed
from codex_workspace.config.providers import ChosenProvider
from codex_workspace.config.settings import Settings
from codex_workspace.protocol.app_server_reader import ExpectedServers
from codex_workspace.runtimes.backend import Backend, BackendStats, Thread, ThreadIdStore, ThreadRegistry, ToolCaller
from codex_workspace.runtimes.cli_run import RunLimits
from codex_workspace.runtimes.launch import Launch, RunOptions, Sandbox

NO_MODEL: Final[Mapping[KeyPath, TomlValue]] = {
    ("model_provider",): "none",
    ("model_providers", "none", "name"): "none",
    ("model_providers", "none", "base_url"): "http://127.0.0.1:9",
    ("model_providers", "none", "wire_api"): "responses",
    ("model_providers", "none", "request_max_retries"): 0,
    ("model_providers", "none", "stream_max_retries"): 0,
}
"""A provider that does not exist: codex starts its session before it calls the model, and is ended then."""

_SANDBOXES: Final[Mapping[str, Sandbox]] = {
    "read-only": "read-only",
    "workspace-write": "workspace-write",
    "danger-full-access": "danger-full-access",
    "container": "danger-full-access",
}


class ExecPreflight:
    """Checks at start whether codex can run turns.

    Args:
        codex: runs prompts.
        launch: how to start codex.
        sandbox: `codex.sandbox` of config.yaml.
        servers: the MCP servers of config.yaml.
    """

    def __init__(self, codex: CodexExec, launch: Launch, sandbox: str, servers: ExecMcpServers) -> None:
        self._codex = codex
        self._launch = launch
        self._sandbox = sandbox
        self._servers = servers

    async def start(self) -> Version:
        """Check codex's version, which is returned, its configuration, its sandbox, and the required MCP servers.

        Raises:
            CodexCannotStart: one of the checks fails.
        """
        version = await self._codex.version()
        await require_valid_config(self._launch)
        await require_sandbox(self._launch, self._sandbox)
        await require_mcp_servers(self._codex, self._servers)
        return version

    @property
    def broken_reason(self) -> str | None:
        """Why codex counts as broken; None while its binary exists."""
        if os.access(self._launch.binary, os.X_OK):
            return None
        return "codex cannot be started: its executable is missing; install codex, or correct CODEX_BIN"

    async def not_ready_reason(self, within_s: float) -> str | None:
        """Return why no turn could start, as far as this is known without starting one."""
        return self.broken_reason

    def stats(self) -> BackendStats:
        """Return the process statistics; each process has one thread, and its memory is not measured."""
        counts = self._codex.counts
        return BackendStats(counts.started, counts.died, self.broken_reason is None, counts.running, resident_bytes=0)


async def require_valid_config(launch: Launch) -> None:
    """Make codex read its configuration, by a command that does nothing else.

    Raises:
        CodexCannotStart: codex rejects the file; contains codex's message.
    """
    completed = await run_codex(launch, "mcp", "list", *overrides(launch.overrides))
    if completed.exit_code != 0:
        output = completed.stderr or completed.stdout
        _, error, why = output.partition("Error:")
        raise CodexCannotStart.for_config(launch.codex_home / CONFIG_NAME, f"{error}{why}" or output)


async def require_sandbox(launch: Launch, mode: str) -> None:
    """Run a command in codex's strictest sandbox, unless `mode` (of config.yaml) needs no sandbox.

    Raises:
        CodexCannotStart: the sandbox does not work here; contains codex's message.
    """
    if mode in WITHOUT:
        return
    completed = await run_codex(launch, "sandbox", "--", "true")
    if completed.exit_code != 0:
        raise sandbox_error(mode, completed.last_line[:MAX_REASON_CHARS] or f"exit code {completed.exit_code}")


async def require_mcp_servers(codex: CodexExec, servers: ExecMcpServers) -> None:
    """Start a session with the required servers, without storing it and without a model.

    Raises:
        CodexCannotStart: one of them does not start; contains codex's message.
    """
    if not servers.required:
        return
    options = RunOptions(ephemeral=True, config={**NO_MODEL, **servers.settings(servers.optional)})
    async with codex.run("This prompt is not sent to a model.", options) as run:
        if await run.wait_for_session() is not None:
            return
        if is_server_failure(run.full_diagnostics):
            servers.leave_out_failed(run.full_diagnostics, servers.optional)
        raise CodexCannotStart("codex ended before its session started", run.diagnostics)


def further_config(settings: Settings) -> Managed:
    """Return our keys of config.toml that the app-server receives over its pipe instead. They contain no secret.

    Raises:
        ConfigError: an MCP server's secret cannot be passed in codex's environment.
    """
    servers, _ = mcp_overrides(settings.mcp)
    text = settings.instructions.text
    return servers | ({("developer_instructions",): text} if text else {})


def exec_backend(
    settings: Settings,
    provider: ChosenProvider,
    launch: Launch,
    memory: Callable[[str, str], ThreadIdStore],
    add_tools: Callable[[ExpectedServers, ToolCaller], ExpectedServers] | None,
    file_requests: FileRequests,
) -> Backend:
    """Return the backend.

    Args:
        settings: the agent's settings.
        provider: the model's provider.
        launch: how to start codex.
        memory: returns what stores the session id of an owner's context.
        add_tools: adds our own MCP server for a caller; None if the agent has no tools.
        file_requests: connects calls of the file tool to the running turn.

    Raises:
        ConfigError: see `further_config`.
    """
    _, variables = mcp_overrides(settings.mcp)
    secrets = [*launch.secrets, *variables.values()]
    launch = replace(launch, handed={**launch.handed, **variables}, secrets=secrets)
    configured = ExpectedServers(
        tuple(server.name for server in settings.mcp.servers), settings.mcp.patience_s, settings.mcp.left_out
    )
    required = [server.name for server in settings.mcp.servers if server.required]
    expected = configured if add_tools is None else add_tools(configured, ToolCaller("", ""))
    servers = ExecMcpServers(expected, required)
    limits = RunLimits(settings.config.codex.turn_inactivity_timeout_s, startup_s=expected.within_s)
    codex = CodexExec(launch, limits)
    sandbox = settings.config.codex.sandbox
    options = ExecThreadOptions(
        RunOptions(model=provider.model, sandbox=_SANDBOXES[sandbox], cwd=settings.workspace_dir),
        settings.instructions,
        total_s=settings.turn_timeout_s,
    )

    def make(owner: str, context_id: str) -> Thread:
        own, caller = options, ToolCaller(owner, context_id)
        if add_tools is not None:
            config, own_variables = _tool_settings(add_tools(ExpectedServers(), caller))
            own = replace(options, run=replace(options.run, config=config), variables=own_variables)
        store = memory(owner, context_id)
        return ExecThread(codex, store, own, servers, file_requests, caller)

    preflight = ExecPreflight(codex, launch, sandbox, ExecMcpServers(configured, required))
    return Backend(preflight, ThreadRegistry(make), steers=False)


def _tool_settings(expected: ExpectedServers) -> tuple[dict[KeyPath, TomlValue], dict[str, str]]:
    """Return the settings of our own MCP servers, and the environment variables that contain their headers."""
    variables: dict[str, str] = {}
    config: dict[KeyPath, TomlValue] = {
        ("mcp_servers", name, key): value
        for name, table in expected.told.items()
        for key, value in table.items()
        if isinstance(value, str | int | float | bool)
    }
    for name, private in expected.private.items():
        config |= pass_secrets(name, private, variables)
    return config, variables
