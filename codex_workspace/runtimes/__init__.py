"""The public Python API: runtimes by name, run options, and the events of a run.

A runtime is built in, or another package declares it as an entry point.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol, TypeAlias

from codex_workspace.common.errors import ConfigError
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.runtimes.events import AgentEvent, Done, as_json
from codex_workspace.runtimes.launch import DEFAULT_OPTIONS, INACTIVITY_S, NO_SERVERS, Launch, RunOptions
from codex_workspace.runtimes.process import end_leftovers

__all__ = [
    "AgentEvent",
    "Done",
    "Launch",
    "Run",
    "RunOptions",
    "Runtime",
    "as_json",
    "create_runtime",
    "end_leftovers",
]

GROUP: Final = "codex_workspace.runtimes"
"""The group of the entry points of runtimes."""


class Run(Protocol):
    """The events of one run; the last one is its `Done`."""

    @property
    def session_id(self) -> str | None:
        """The id that `RunOptions.resume` takes; None until the CLI reports it."""

    def abort(self) -> None:
        """Stop the run; may be called from any task. The stream then ends with a `Done` "interrupted"."""

    def __aiter__(self) -> AsyncIterator[AgentEvent]:
        """Return the events as they arrive."""


class Runtime(Protocol):
    """Runs prompts; may be used several times, and by several tasks. Runs of one session wait for each other."""

    def run(self, prompt: str, options: RunOptions = DEFAULT_OPTIONS) -> AbstractAsyncContextManager[Run]:
        """Run a prompt; leaving the block stops the run.

        Raises:
            InputRefused: the runtime cannot accept the prompt or an option.
            CodexCannotStart: the CLI cannot be started.
        """


Factory: TypeAlias = Callable[[Launch, McpServers, float], AbstractAsyncContextManager[Runtime]]
"""Creates a runtime, with the MCP servers of every run, and the seconds that the CLI may be silent before a run fails
with WATCHDOG_TIMEOUT; leaving the block ends all processes that the runtime has started."""

_BUILT_IN: Final = {
    name: EntryPoint(name, value, GROUP)
    for name, value in (
        ("codex", "codex_workspace.codex.runtime:create"),
        ("codex-exec", "codex_workspace.backends.codex_exec.runtime:create"),
    )
}


def create_runtime(
    name: str, launch: Launch, servers: McpServers = NO_SERVERS, inactivity_s: float = INACTIVITY_S
) -> AbstractAsyncContextManager[Runtime]:
    """Return a block that holds the runtime `name`; the case of letters does not matter.

    Raises:
        ConfigError: no such runtime exists, or it cannot be loaded.
    """
    wanted = name.strip().casefold()
    known = {found.name.casefold(): found for found in entry_points(group=GROUP)} | _BUILT_IN
    if wanted not in known:
        names = ", ".join((*_BUILT_IN, *sorted(known.keys() - _BUILT_IN.keys())))
        raise ConfigError(f"runtime: must be one of {names}, but is {name!r}")
    return _load(known[wanted])(launch, servers, inactivity_s)


def _load(found: EntryPoint) -> Factory:
    try:
        factory: Factory = found.load()
    except Exception as error:
        # The import runs another package's code, which may raise anything.
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"runtime: {found.name} ({found.value}) cannot be loaded: {reason}") from error
    if not callable(factory):
        raise ConfigError(f"runtime: {found.name} ({found.value}) is not a function")
    return factory
