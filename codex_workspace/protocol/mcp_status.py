"""How far codex has come with starting MCP servers: read from its notifications, waited for, and put into words.

Codex starts a set of servers for each thread, and delays the first model call for one second only.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

import anyio

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.environment import Secret

STARTUP: Final = "mcpServer/startupStatus/updated"
"""Codex's notification of a server's start."""

RELOAD: Final = "config/mcpServer/reload"
"""The request that has codex start those anew that are down."""

CLOSED: Final = "Transport closed"
"""How a call of a tool ends whose server's process has ended. Codex comes back to one over HTTP by itself."""

REQUIRED_FAILED: Final = "required MCP servers failed"
"""What codex refuses a thread with where a required server does not start."""

MAX_REVIVALS: Final = 5
"""How often one turn has servers started that have ended: one that ends with every call does not come back for ever."""

RETRY_S: Final = 60.0
"""A server that has not started is tried again with a turn that begins this long after the last try."""


class McpServerState(StrEnum):
    """How far a server is, by codex's words; one that is not known here counts as `STARTING`."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class McpServerStatus:
    """How far a server is; `error` is codex's sentence where it failed."""

    state: McpServerState
    error: str = ""

    @property
    def is_final(self) -> bool:
        """Whether its start is over, one way or the other."""
        return self.state is not McpServerState.STARTING


@dataclass(frozen=True, slots=True)
class ExpectedServers:
    """The servers that a thread ought to have.

    within_s: how long their start is waited for. left_out: why one is not even tried, by its name.
    told: the configuration of one that stands in no file, by its name.
    private: what codex is told of one over its pipe only, by its name: table and key of its configuration, and value.
    """

    names: tuple[str, ...] = ()
    within_s: float = 0.0
    left_out: Mapping[str, str] = field(default_factory=dict)
    private: Mapping[str, Mapping[tuple[str, str], Secret]] = field(default_factory=dict)
    told: Mapping[str, JsonObject] = field(default_factory=dict)

    def config(self) -> JsonObject:
        """Return what codex is told of them beside its config.toml, in the shape of `thread/start.config`."""
        tables: dict[str, JsonValue] = dict(self.told)
        for name, values in self.private.items():
            server: dict[str, JsonValue] = dict(self.told.get(name, {}))
            for (table, key), value in values.items():
                server[table] = {**_object(server.get(table)), key: value.reveal()}
            tables[name] = server
        return {"mcp_servers": tables} if tables else {}


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


class McpStatusTracker:
    """What one codex has said of the servers of its threads."""

    def __init__(self) -> None:
        self._said: dict[str | None, dict[str, McpServerStatus]] = {}
        self._over = False
        self._changed = anyio.Event()

    def update(self, params: JsonObject) -> None:
        """Read one notification; one of another shape says nothing."""
        match params:
            case {"name": str(name), "status": str(status), **rest}:
                thread_id = rest.get("threadId")
                known = self._said.setdefault(thread_id if isinstance(thread_id, str) else None, {})
                known[name] = McpServerStatus(_state(status), failure_reason(rest.get("error")))
                self._wake()
            case _:
                pass

    def close(self) -> None:
        """Take note that codex says nothing any more: whoever waits goes on."""
        self._over = True
        self._wake()

    def of(self, thread_id: str) -> Mapping[str, McpServerStatus]:
        """Return what is known of a thread's servers, by their names."""
        return {**self._said.get(None, {}), **self._said.get(thread_id, {})}

    async def wait_for(self, thread_id: str, names: Collection[str], within_s: float) -> Mapping[str, McpServerStatus]:
        """Wait until those servers of a thread have started or failed; return how far they are then."""
        with anyio.move_on_after(within_s):
            while not self._over and not all(self._is_settled(thread_id, name) for name in names):
                self._changed = anyio.Event() if self._changed.is_set() else self._changed
                await self._changed.wait()
        return self.of(thread_id)

    def _is_settled(self, thread_id: str, name: str) -> bool:
        known = self.of(thread_id).get(name)
        return known is not None and known.is_final

    def _wake(self) -> None:
        self._changed.set()


class McpClient(Protocol):
    """What is needed of the connection to codex."""

    @property
    def mcp_status(self) -> McpStatusTracker:
        """What it has said of MCP servers."""

    async def call(self, method: str, params: JsonObject, *, timeout_s: float = ...) -> JsonValue:
        """Send a request and return its result."""


@dataclass(frozen=True, slots=True)
class McpStatus:
    """A thread's servers: the names of the tools of those that have started, and a sentence on each of the others."""

    tools: Mapping[str, list[str]]
    missed: Mapping[str, str]


async def query_status(codex: McpClient, thread_id: str, expected: ExpectedServers, timeout_s: float) -> McpStatus:
    """Wait for a thread's servers, and return what they are.

    Raises:
        CodexRefused, CodexGone, CodexTimeout: as `McpClient.call`.
    """
    known = await codex.mcp_status.wait_for(thread_id, expected.names, expected.within_s)
    tools: dict[str, list[str]] = {}
    for name, startup in known.items():
        if startup.state is McpServerState.READY:
            # With its name, codex asks the server that runs; without it, it starts all of them once more.
            params: JsonObject = {"threadId": thread_id, "serverName": name, "detail": "toolsAndAuthOnly"}
            listed = await codex.call("mcpServerStatus/list", params, timeout_s=timeout_s + expected.within_s)
            tools[name] = _tools_in(listed, name)
    return McpStatus(tools, describe_problems(expected, known))


def _tools_in(listed: JsonValue, name: str) -> list[str]:
    data = listed.get("data") if isinstance(listed, dict) else None
    for server in data if isinstance(data, list) else []:
        match server:
            case {"name": str(found), "tools": dict(tools)} if found == name:
                return sorted(tools)
            case _:
                pass
    return []


def describe_problems(expected: ExpectedServers, known: Mapping[str, McpServerStatus]) -> dict[str, str]:
    """Return a sentence for each server that is not there, by its name."""
    found = {name: f"The MCP server {name} is not there: {why}." for name, why in expected.left_out.items()}
    for name, startup in known.items():
        if startup.state in (McpServerState.FAILED, McpServerState.CANCELLED):
            found[name] = f"The MCP server {name} is not there: {startup.error or startup.state}."
    for name in expected.names:
        if name not in known or not known[name].is_final:
            found[name] = f"The MCP server {name} is not there yet; it has not started within {expected.within_s:g} s."
    return found


MAX_FAILURE_CHARS: Final = 240
"""Of why a server is not there; codex names the whole chain of what has failed."""

_TYPES: Final = re.compile(r"\s*\[[\w:<>, ()]*::[^\]]*\]\s*")
"""Rust's name of the type that has failed, in brackets."""

_AROUND: Final = re.compile(r"^MCP client for `[^`]*` (failed to start: )?(MCP startup failed: )?|\. Add or adjust .*$")


def _state(word: str) -> McpServerState:
    try:
        return McpServerState(word)
    except ValueError:
        return McpServerState.STARTING


def failure_reason(error: JsonValue) -> str:
    """Return codex's sentence on one line: without the server's name, a full stop, advice on config.toml, and types."""
    if not isinstance(error, str):
        return ""
    said = _TYPES.sub(" ", _AROUND.sub("", " ".join(error.split()))).removesuffix(".")
    if len(said) <= MAX_FAILURE_CHARS:
        return said
    # The beginning says what was tried, the end why it failed.
    half = MAX_FAILURE_CHARS // 2
    return f"{said[:half].rstrip()} … {said[-half:].lstrip()}"
