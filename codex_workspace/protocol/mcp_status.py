"""Tracks the start of the MCP servers of codex's threads, and describes those that are unavailable."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.environment import Secret

STARTUP: Final = "mcpServer/startupStatus/updated"
"""The notification about a server's start."""

REQUIRED_FAILED: Final = "required MCP servers failed"
"""Part of the error with which codex rejects a thread if a required server does not start."""

RETRY_S: Final = 60.0
"""A server that has not started is retried by the first turn that starts this long after the last try."""

MAX_FAILURE_CHARS: Final = 240
"""Longer reasons are shortened; codex reports the whole chain of errors."""

_TYPES: Final = re.compile(r"\s*\[[\w:<>, ()]*::[^\]]*\]\s*")
"""The name of a Rust type in brackets."""

_AROUND: Final = re.compile(r"^MCP client for `[^`]*` (failed to start: )?(MCP startup failed: )?|\. Add or adjust .*$")


@dataclass(frozen=True, slots=True)
class ExpectedServers:
    """The servers that a thread should have.

    within_s: how long to wait for their start.
    left_out: the names of servers that are not started, each with the reason.
    told: the configurations that are in no file, by the server's name.
    private: the values that are sent over codex's pipe only, by the server's name: table and key, and the secret.
    """

    names: tuple[str, ...] = ()
    within_s: float = 0.0
    left_out: Mapping[str, str] = field(default_factory=dict)
    private: Mapping[str, Mapping[tuple[str, str], Secret]] = field(default_factory=dict)
    told: Mapping[str, JsonObject] = field(default_factory=dict)

    def config(self) -> JsonObject:
        """Return the servers' configuration that is not in config.toml, in the shape of `thread/start.config`."""
        tables: dict[str, JsonValue] = dict(self.told)
        for name, values in self.private.items():
            server: dict[str, JsonValue] = dict(self.told.get(name, {}))
            for (table, key), value in values.items():
                before = server.get(table)
                server[table] = {**(before if isinstance(before, dict) else {}), key: value.reveal()}
            tables[name] = server
        return {"mcp_servers": tables} if tables else {}


class McpStatusTracker:
    """The status of the MCP servers of one codex's threads: None while one starts, "" when it is ready, else why not.

    Codex starts a set of servers for each thread, and delays the first model call for one second only.
    """

    def __init__(self) -> None:
        self.by_thread: dict[str, dict[str, str | None]] = {}
        self._closed = False
        self._changed = anyio.Event()

    def update(self, params: JsonObject) -> None:
        """Read a notification; one of another shape is ignored."""
        match params:
            case {"threadId": str(thread_id), "name": str(name), "status": str(status), **rest}:
                error = {"ready": "", "failed": failure_reason(rest.get("error")) or status, "cancelled": status}
                self.by_thread.setdefault(thread_id, {})[name] = error.get(status)
                self._changed.set()
            case _:
                pass

    def close(self) -> None:
        """End all waits; codex sends no further notifications."""
        self._closed = True
        self._changed.set()

    def of(self, thread_id: str) -> Mapping[str, str | None]:
        """Return the known status of a thread's servers, by their names."""
        return dict(self.by_thread.get(thread_id, {}))

    async def wait_for(self, thread_id: str, names: Collection[str], within_s: float) -> Mapping[str, str | None]:
        """Wait until these servers of a thread have started or failed; return the status of all of its servers."""
        with anyio.move_on_after(within_s):
            while not self._closed and any(self.of(thread_id).get(name) is None for name in names):
                self._changed = anyio.Event() if self._changed.is_set() else self._changed
                await self._changed.wait()
        return self.of(thread_id)


def describe_problems(expected: ExpectedServers, known: Mapping[str, str | None]) -> dict[str, str]:
    """Return a sentence about each server that is unavailable, by its name."""
    reasons = {**expected.left_out, **{name: reason for name, reason in known.items() if reason}}
    late = [name for name in expected.names if known.get(name) is None]
    return {
        **{name: f"The MCP server {name} is not available: {reason}." for name, reason in reasons.items()},
        **{name: f"The MCP server {name} did not start within {expected.within_s:g} s." for name in late},
    }


def failure_reason(error: JsonValue) -> str:
    """Return codex's reason on one line, without the server's name, the advice on config.toml, and Rust types."""
    if not isinstance(error, str):
        return ""
    reason = _TYPES.sub(" ", _AROUND.sub("", " ".join(error.split()))).removesuffix(".")
    if len(reason) <= MAX_FAILURE_CHARS:
        return reason
    # The beginning names the attempt, the end the cause.
    half = MAX_FAILURE_CHARS // 2
    return f"{reason[:half].rstrip()} … {reason[-half:].lstrip()}"
