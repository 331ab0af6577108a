"""Restarts the MCP servers of codex's threads, and probes them before the first turn."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from codex_workspace.app_server import Connection
from codex_workspace.codex.thread_options import ThreadOptions, id_in
from codex_workspace.common.errors import CodexCannotStart, CodexError, CodexRefused
from codex_workspace.common.values import JsonObject, JsonValue, nested_or_empty, objects
from codex_workspace.protocol.codex_events import ToolCallCompleted, TurnEvent
from codex_workspace.protocol.mcp_status import REQUIRED_FAILED, McpServerState, describe_problems

logger = logging.getLogger(__name__)

RELOAD: Final = "config/mcpServer/reload"
"""The request that starts the servers that are down."""

TRANSPORT_CLOSED: Final = "Transport closed"
"""Part of the error of a tool call whose server's process has exited. Codex reconnects to HTTP servers itself."""

MAX_RESTARTS: Final = 5
"""How often one turn restarts servers that have exited; one that exits on every call is not restarted forever."""


@dataclass(frozen=True, slots=True)
class McpStatus:
    """The MCP servers of a thread: the tools of each that has started, and the problem of each other one."""

    tools: Mapping[str, list[str]]
    problems: Mapping[str, str]


def server_exited(event: TurnEvent) -> bool:
    """Return whether a tool call failed because its MCP server's process has exited."""
    return isinstance(event, ToolCallCompleted) and event.is_error and TRANSPORT_CLOSED in event.result


async def restart_mcp_servers(codex: Connection, timeout_s: float) -> None:
    """Start the MCP servers that are down.

    Raises:
        CodexGone: codex died, or did not respond within `timeout_s` seconds.
    """
    try:
        await codex.request(RELOAD, {}, timeout_s)
    except CodexRefused as refusal:
        logger.warning("cannot restart MCP servers: %s", refusal)


async def probe_mcp_servers(codex: Connection, options: ThreadOptions, timeout_s: float) -> McpStatus:
    """Start all MCP servers by a temporary thread, and return their status.

    Raises:
        CodexCannotStart: a required server does not start; with codex's reason.
        CodexGone: codex died, or did not respond within `timeout_s` seconds after the servers' own time.
    """
    timeout_s += options.servers.within_s
    try:
        started = await codex.request("thread/start", options.params(), timeout_s)
    except CodexRefused as refusal:
        reason = refusal.message.rpartition(REQUIRED_FAILED)[2].removeprefix(" to initialize: ")
        raise CodexCannotStart(
            f"a required MCP server does not start (mcp_servers of config.yaml): {reason}"
        ) from refusal
    thread_id = id_in(started, "thread")
    try:
        return await _query_status(codex, thread_id, options, timeout_s)
    finally:
        with suppress(CodexError):
            await codex.request("thread/delete", {"threadId": thread_id}, timeout_s)


async def _query_status(codex: Connection, thread_id: str, options: ThreadOptions, timeout_s: float) -> McpStatus:
    expected = options.servers
    known = await codex.mcp_status.wait_for(thread_id, expected.names, expected.within_s)
    tools: dict[str, list[str]] = {}
    for name, status in known.items():
        if status.state is McpServerState.READY:
            # With a name, codex asks the running server; without one, it starts all of them again.
            params: JsonObject = {"threadId": thread_id, "serverName": name, "detail": "toolsAndAuthOnly"}
            tools[name] = _tools_in(await codex.call("mcpServerStatus/list", params, timeout_s=timeout_s), name)
    return McpStatus(tools, describe_problems(expected, known))


def _tools_in(listed: JsonValue, name: str) -> list[str]:
    servers = objects(listed, "data") if isinstance(listed, dict) else []
    return next((sorted(nested_or_empty(server, "tools")) for server in servers if server.get("name") == name), [])
