"""What `codex exec` is told of MCP servers: settings, and their secrets by its environment."""

import re
from typing import Final

from app_server import PASSED_ENVIRONMENT
from codex_workspace.errors import ConfigError
from codex_workspace.mcp_servers import McpServers
from codex_workspace.toml_text import KeyPath, TomlValue

_OWN: Final = re.compile(r"CODEX_.*|OPENAI_.*|LC_.*|LD_.*")


def told_of(servers: McpServers) -> tuple[dict[KeyPath, TomlValue], dict[str, str]]:
    """Return the settings that tell codex of MCP servers, and the variables of its environment that hold their secrets.

    `codex exec` has no pipe to be told a secret by; its command line can be read by everybody on the machine, its
    environment by the same user.

    Raises:
        ConfigError: a secret's variable would be codex's own, or two servers want one variable with two values.
    """
    settings = dict(servers.managed)
    handed: dict[str, str] = {}
    for server in servers.servers:
        forwarded: list[str] = []
        for (table, key), secret in server.private.items():
            path = ("mcp_servers", server.name)
            if table == "env":
                _hand(handed, key, secret.reveal(), server.name)
                forwarded.append(key)
            else:
                name = f"MCP_HEADER_{len(handed)}_{re.sub(r'[^A-Za-z0-9]', '_', server.name).upper()}"
                _hand(handed, name, secret.reveal(), server.name)
                settings[(*path, "env_http_headers", key)] = name
        if forwarded:
            settings["mcp_servers", server.name, "env_vars"] = forwarded
    return settings, handed


def _hand(handed: dict[str, str], name: str, value: str, server: str) -> None:
    if name in PASSED_ENVIRONMENT or _OWN.fullmatch(name):
        raise ConfigError(
            f"mcp_servers: {server}: env: {name} is codex's own, and cannot hold a secret with codex exec"
        )
    if handed.setdefault(name, value) != value:
        raise ConfigError(f"mcp_servers: {server}: env: {name} has another value with another server; give it one")
