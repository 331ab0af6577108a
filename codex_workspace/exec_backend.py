"""The backend of `codex exec`: what each run is told of the settings, and what stands in config.toml for all."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from app_server import Launch
from codex_workspace.codex_home import Managed
from codex_workspace.conversation import Conversations, ThreadMemory
from codex_workspace.errands import Errands
from codex_workspace.exec_arguments import ExecOptions, Sandbox
from codex_workspace.exec_conversation import ExecConversation, SessionOptions, Tally
from codex_workspace.exec_mcp_settings import told_of
from codex_workspace.exec_process import CodexExec, ExecLimits
from codex_workspace.exec_servers import RunServers
from codex_workspace.exec_standing import ExecStanding
from codex_workspace.mcp_startup import Expected
from codex_workspace.providers import ChosenProvider
from codex_workspace.settings import Settings
from codex_workspace.talks import Backend, Talk
from codex_workspace.toml_text import KeyPath, TomlValue
from codex_workspace.toolbox import Caller

if TYPE_CHECKING:
    from codex_workspace.agent_tools import AgentTools

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
    servers, _ = told_of(settings.mcp)
    text = settings.instructions.text
    return servers | ({("developer_instructions",): text} if text else {})


def exec_backend(
    settings: Settings,
    provider: ChosenProvider,
    launch: Launch,
    memory: Callable[[str, str], ThreadMemory],
    tools: "AgentTools | None",
    errands: Errands,
) -> Backend:
    """Return the backend; `memory` gives what keeps the session id of an owner's context, `errands` hears the tools.

    Raises:
        ConfigError: as `further_config`.
    """
    _, handed = told_of(settings.mcp)
    launch = replace(
        launch, handed={**launch.handed, **handed}, secrets=[*launch.secrets, *(each for each in handed.values())]
    )
    configured = Expected(
        tuple(server.name for server in settings.mcp.servers), settings.mcp.patience_s, settings.mcp.left_out
    )
    needed = [server.name for server in settings.mcp.servers if server.required]
    expected = configured if tools is None else tools.added_to(configured, Caller("", ""))
    servers = RunServers(expected, needed)
    limits = ExecLimits(settings.config.codex.turn_inactivity_timeout_s, startup_s=expected.within_s)
    codex = CodexExec(launch, limits)
    tally = Tally()
    options = SessionOptions(
        ExecOptions(
            model=provider.model, sandbox=_SANDBOXES[settings.config.codex.sandbox], cwd=settings.workspace_dir
        ),
        settings.instructions,
        total_s=settings.turn_timeout_s,
        max_text_chars=settings.config.limits.max_text_chars,
    )

    def make(owner: str, context_id: str) -> Talk:
        own, caller = options, Caller(owner, context_id)
        if tools is not None:
            config, secrets = _told_of(tools.added_to(Expected(), caller))
            own = replace(options, config=config, handed=secrets)
        return ExecConversation(
            codex, settings.codex_home, memory(owner, context_id), own, servers, errands, caller, tally
        )

    standing = ExecStanding(codex, launch, settings.config.codex.sandbox, RunServers(configured, needed), tally)
    return Backend(standing, Conversations(make), steers=False)


def _told_of(expected: Expected) -> tuple[dict[KeyPath, TomlValue], dict[str, str]]:
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
