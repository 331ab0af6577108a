"""Creates runtimes by name: built-in ones, and those that other packages declare as entry points."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

from codex_workspace.common.errors import ConfigError
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.runtimes.events import AgentEvent
from codex_workspace.runtimes.launch import Launch
from codex_workspace.runtimes.options import DEFAULT_OPTIONS, RunOptions

GROUP: Final = "codex_workspace.runtimes"
"""The group of the entry points of runtimes."""

INACTIVITY_S: Final = 300.0
"""How long a CLI may write nothing. codex exec writes nothing while a command runs, so this limits commands too."""

NO_SERVERS: Final = McpServers()


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


class Factory(Protocol):
    """Creates a runtime; leaving the block ends all processes that the runtime has started."""

    def __call__(
        self, launch: Launch, servers: McpServers, inactivity_s: float
    ) -> AbstractAsyncContextManager[Runtime]:
        """Return the block.

        Args:
            launch: how to start the CLI.
            servers: the MCP servers of every run.
            inactivity_s: how long the CLI may be silent before a run fails with WATCHDOG_TIMEOUT.
        """


_BUILT_IN: Final[Mapping[str, EntryPoint]] = {
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
    if wanted in _BUILT_IN:
        return _load(_BUILT_IN[wanted])(launch, servers, inactivity_s)
    others = {found.name.casefold(): found for found in entry_points(group=GROUP)}
    if wanted not in others:
        known = ", ".join((*_BUILT_IN, *sorted(others.keys() - _BUILT_IN.keys())))
        raise ConfigError(f"runtime: must be one of {known}, but is {name!r}")
    return _load(others[wanted])(launch, servers, inactivity_s)


def _load(found: EntryPoint) -> Factory:
    try:
        factory: Factory = found.load()
    except Exception as error:
        # The import runs another package's code, which may raise anything.
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"runtime: {found.name} ({found.value}) cannot be loaded: {reason}") from error
    if not callable(factory):
        raise ConfigError(f"runtime: {found.name} ({found.value}) is no function")
    return factory
