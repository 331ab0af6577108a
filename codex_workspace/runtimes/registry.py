"""Ways to run codex, by name: `create_runtime("codex")` is the app-server, "codex-exec" a process for each prompt.

Both take the same options and tell the same events (docs/events.md). Others come by an entry point of the group
`codex_workspace.runtimes`: its name, and a function with the arguments of a `Factory`.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

from codex_workspace.app_server import Launch
from codex_workspace.backends.codex_exec.command import ExecOptions
from codex_workspace.backends.codex_exec.process import INACTIVITY_S, NO_SERVERS, CodexExec, ExecLimits
from codex_workspace.codex.runtime import open_app_server_runtime
from codex_workspace.codex.turn import TurnLimits
from codex_workspace.common.errors import ConfigError
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.runtimes.events import AgentEvent

GROUP: Final = "codex_workspace.runtimes"
"""The entry points of others' runtimes."""


class Run(Protocol):
    """The events of one run; the last one is its `Done`."""

    def abort(self) -> None:
        """Stop the run, from any task."""

    def __aiter__(self) -> AsyncIterator[AgentEvent]:
        """Return the events as they come."""


class Runtime(Protocol):
    """Runs prompts; may be used again, and by several tasks."""

    def run(self, prompt: str, options: ExecOptions = ...) -> AbstractAsyncContextManager[Run]:
        """Let codex answer; leaving the block stops it."""


class Factory(Protocol):
    """Makes the block in which a runtime is there; leaving it ends whatever the runtime has started."""

    def __call__(
        self, launch: Launch, servers: McpServers, inactivity_s: float
    ) -> AbstractAsyncContextManager[Runtime]:
        """Return that block.

        Args:
            launch: how to start codex.
            servers: the MCP servers of every run.
            inactivity_s: how long codex may be silent before a run is given up with WATCHDOG_TIMEOUT.
        """


def create_runtime(
    name: str, launch: Launch, servers: McpServers = NO_SERVERS, inactivity_s: float = INACTIVITY_S
) -> AbstractAsyncContextManager[Runtime]:
    """Return the block in which the runtime `name` is there; upper and lower case are the same.

    Raises:
        ConfigError: there is no such runtime, which names those that there are; or another's cannot be loaded.
    """
    wanted = name.strip().casefold()
    if wanted in _BUILT_IN:
        return _BUILT_IN[wanted](launch, servers, inactivity_s)
    others = _others()
    if wanted not in others:
        known = ", ".join((*_BUILT_IN, *sorted(others)))
        raise ConfigError(f"runtime: must be one of {known}, but is {name!r}")
    return _loaded(others[wanted])(launch, servers, inactivity_s)


def _app_server(launch: Launch, servers: McpServers, inactivity_s: float) -> AbstractAsyncContextManager[Runtime]:
    return open_app_server_runtime(launch, servers, TurnLimits(inactivity_s=inactivity_s))


def _exec(launch: Launch, servers: McpServers, inactivity_s: float) -> AbstractAsyncContextManager[Runtime]:
    return nullcontext(CodexExec(launch, ExecLimits(inactivity_s=inactivity_s), servers))


_BUILT_IN: Final[Mapping[str, Factory]] = {"codex": _app_server, "codex-exec": _exec}


def _others() -> dict[str, EntryPoint]:
    return {found.name.casefold(): found for found in entry_points(group=GROUP)}


def _loaded(found: EntryPoint) -> Factory:
    try:
        factory: Factory = found.load()
    except Exception as error:
        # Somebody else's code runs here, and may raise anything.
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"runtime: {found.name} ({found.value}) cannot be loaded: {reason}") from error
    if not callable(factory):
        raise ConfigError(f"runtime: {found.name} ({found.value}) is no function")
    return factory
