"""How codex stands where each turn has a process of its own: nothing runs in between, so what can be told is whether
the binary is there and its sandbox works.

The backend of `codex exec`: what each run is told of the settings, and what stands in config.toml for all.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from codex_workspace.backends.codex_exec.command import mcp_overrides
from codex_workspace.backends.codex_exec.file_requests import FileRequests
from codex_workspace.backends.codex_exec.mcp_servers import ExecMcpServers, has_failed
from codex_workspace.backends.codex_exec.runtime import CodexExec, run_codex
from codex_workspace.backends.codex_exec.thread import ExecThread, ExecThreadOptions, ProcessCounts
from codex_workspace.backends.codex_exec.turn import TurnLines
from codex_workspace.codex.sandbox import PROBE_TIMEOUT_S, WITHOUT, sandbox_error
from codex_workspace.common.errors import MAX_REASON_CHARS, CodexCannotStart
from codex_workspace.common.values import KeyPath, TomlValue, Version
from codex_workspace.config.codex_toml import CONFIG_NAME, Managed
from codex_workspace.config.providers import ChosenProvider
from codex_workspace.config.settings import Settings
from codex_workspace.protocol.mcp_status import ExpectedServers
from codex_workspace.runtimes.backend import Backend, BackendStats, Thread, ThreadIdStore, ThreadRegistry, ToolCaller
from codex_workspace.runtimes.cli_run import RunLimits
from codex_workspace.runtimes.launch import Launch
from codex_workspace.runtimes.options import RunOptions, Sandbox
from codex_workspace.runtimes.process import CompletedCommand

NO_MODEL: Final[Mapping[KeyPath, TomlValue]] = {
    ("model_provider",): "nobody",
    ("model_providers", "nobody", "name"): "nobody",
    ("model_providers", "nobody", "base_url"): "http://127.0.0.1:9",
    ("model_providers", "nobody", "wire_api"): "responses",
    ("model_providers", "nobody", "request_max_retries"): 0,
    ("model_providers", "nobody", "stream_max_retries"): 0,
}
"""A provider that nobody is: codex begins its session before it asks one, and may ask once before it is ended."""


@dataclass(frozen=True, slots=True)
class ExecInfo:
    """A codex that was looked at."""

    version: Version


class ExecPreflight:
    """Looks at the codex that turns will be run by.

    Args:
        codex: what runs prompts.
        launch: how codex is started.
        sandbox: codex.sandbox of config.yaml.
        servers: the MCP servers of config.yaml.
        tally: counts the processes.
    """

    def __init__(
        self, codex: CodexExec, launch: Launch, sandbox: str, servers: ExecMcpServers, tally: ProcessCounts
    ) -> None:
        self._codex = codex
        self._launch = launch
        self._sandbox = sandbox
        self._servers = servers
        self._tally = tally

    async def start(self) -> ExecInfo:
        """Ask codex for its version, have it read its configuration, run a command in its sandbox, and start the MCP
        servers that are required.

        Raises:
            CodexCannotStart: it is not there or too old, does not take its config.toml, has no sandbox that works on
                this machine, or a required MCP server does not start.
        """
        version = await self._codex.version()
        await refuse_broken_config(self._launch)
        await refuse_blocked(self._launch, self._sandbox)
        await refuse_without_servers(self._codex, self._servers)
        return ExecInfo(version)

    @property
    def broken_reason(self) -> str | None:
        """Why codex counts as broken; None while its binary is there."""
        if os.access(self._launch.binary, os.X_OK):
            return None
        return "codex cannot be started: the program that CODEX_BIN names, or that was installed, is not there any more"

    async def not_ready_reason(self, within_s: float) -> str | None:
        """Return why no turn could be begun, as far as that can be told without beginning one."""
        return self.broken_reason

    def stats(self) -> BackendStats:
        """Return how many processes there were and are; each has one thread. Their memory is not measured."""
        return BackendStats(
            self._tally.started, self._tally.died, self.broken_reason is None, self._tally.running, resident_bytes=0
        )

    async def close(self) -> None:
        """Do nothing: each turn ends its own process."""


async def refuse_broken_config(launch: Launch) -> None:
    """Let codex read its config.toml, by a command that does nothing else and asks no model.

    Raises:
        CodexCannotStart: it does not take the file; with codex's own words.
    """
    ran = await _run(launch, "mcp", "list")
    if ran.exit_code != 0:
        said = ran.stderr or ran.stdout
        _, error, why = said.partition("Error:")
        raise CodexCannotStart.for_config(launch.codex_home / CONFIG_NAME, f"{error}{why}" or said)


async def refuse_blocked(launch: Launch, mode: str) -> None:
    """Have `codex sandbox` run a command, in its strictest sandbox; nothing where `mode` (of config.yaml) has none.

    Raises:
        CodexCannotStart: the sandbox cannot work here; with codex's own words, and the two ways out.
    """
    if mode in WITHOUT:
        return
    ran = await _run(launch, "sandbox", "--", "true")
    if ran.exit_code != 0:
        raise sandbox_error(mode, ran.last_line[:MAX_REASON_CHARS] or f"exit code {ran.exit_code}")


async def refuse_without_servers(codex: CodexExec, servers: ExecMcpServers) -> None:
    """Have codex begin a session with the required servers, kept nowhere and without a model; nothing without servers.

    Raises:
        CodexCannotStart: one of them does not start; with codex's own words.
    """
    if not servers.required:
        return
    attempt = servers.of_those_required()
    options = RunOptions(ephemeral=True, config={**NO_MODEL, **attempt.config()})
    async with codex.follow("Nobody hears this.", options, TurnLines) as run:
        while run.session_id is None and not run.is_over:
            await run.take()
        if run.session_id is not None:
            return
        if has_failed(run.full_diagnostics):
            attempt.failed(run.full_diagnostics)
        raise CodexCannotStart("codex ended before it had begun", run.diagnostics)


async def _run(launch: Launch, *arguments: str) -> CompletedCommand:
    late = f"codex {arguments[0]} did not end within {PROBE_TIMEOUT_S:g} s"
    return await run_codex(launch, *arguments, within_s=PROBE_TIMEOUT_S, late=late)


_SANDBOXES: Final[Mapping[str, Sandbox]] = {
    "read-only": "read-only",
    "workspace-write": "workspace-write",
    "danger-full-access": "danger-full-access",
    "container": "danger-full-access",
}


def further_config(settings: Settings) -> Managed:
    """Return our keys of config.toml beside the app-server's, which are told that one over its pipe. None is a secret.

    Raises:
        ConfigError: an MCP server's secret cannot be handed to codex in its environment.
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
    errands: FileRequests,
) -> Backend:
    """Return the backend; `memory` gives what keeps the session id of an owner's context, `errands` hears the tools.

    Raises:
        ConfigError: as `further_config`.
    """
    _, handed = mcp_overrides(settings.mcp)
    launch = replace(
        launch, handed={**launch.handed, **handed}, secrets=[*launch.secrets, *(each for each in handed.values())]
    )
    configured = ExpectedServers(
        tuple(server.name for server in settings.mcp.servers), settings.mcp.patience_s, settings.mcp.left_out
    )
    needed = [server.name for server in settings.mcp.servers if server.required]
    expected = configured if add_tools is None else add_tools(configured, ToolCaller("", ""))
    servers = ExecMcpServers(expected, needed)
    limits = RunLimits(settings.config.codex.turn_inactivity_timeout_s, startup_s=expected.within_s)
    codex = CodexExec(launch, limits)
    tally = ProcessCounts()
    options = ExecThreadOptions(
        RunOptions(model=provider.model, sandbox=_SANDBOXES[settings.config.codex.sandbox], cwd=settings.workspace_dir),
        settings.instructions,
        total_s=settings.turn_timeout_s,
        max_text_chars=settings.config.limits.max_text_chars,
    )

    def make(owner: str, context_id: str) -> Thread:
        own, caller = options, ToolCaller(owner, context_id)
        if add_tools is not None:
            config, secrets = _told_of(add_tools(ExpectedServers(), caller))
            own = replace(options, config=config, handed=secrets)
        return ExecThread(codex, settings.codex_home, memory(owner, context_id), own, servers, errands, caller, tally)

    standing = ExecPreflight(codex, launch, settings.config.codex.sandbox, ExecMcpServers(configured, needed), tally)
    return Backend(standing, ThreadRegistry(make), steers=False)


def _told_of(expected: ExpectedServers) -> tuple[dict[KeyPath, TomlValue], dict[str, str]]:
    """Return what the command line says of servers that stand in no file, and the variables that hold their headers."""
    config: dict[KeyPath, TomlValue] = {}
    handed: dict[str, str] = {}
    for name, table in expected.told.items():
        for key, value in table.items():
            if isinstance(value, str | int | float | bool):
                config["mcp_servers", name, key] = value
    for name, private in expected.private.items():
        for number, ((_, header), secret) in enumerate(private.items()):
            variable = f"MCP_OWN_{number}_{name.upper()}"
            config["mcp_servers", name, "env_http_headers", header] = variable
            handed[variable] = secret.reveal()
    return config, handed
