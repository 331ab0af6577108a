"""The platform runtime's adapter contract: its own classes where it is installed, the part we use of them elsewhere.

The one place that knows `molecule_runtime`. Every generation of it has `adapters.base` with `AdapterConfig` and
`BaseAdapter`; whatever else is used of it is looked for when it is needed, and done without where it is missing. A
platform image always has the runtime; a checkout, and our own host, never.
"""

import importlib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import anyio
from a2a.server.agent_execution import AgentExecutor

logger = logging.getLogger(__name__)

PACKAGE: Final = "molecule_runtime"

SMOKE_MODE: Final = "MOLECULE_SMOKE_MODE"
"""Set to 1 where an image is tried out: the executor is called once, without a platform and without a real key."""

HEARTBEAT_TIMEOUT_S: Final = 5.0
"""What telling the platform of a turn may take; the heartbeat says it again within 30 s."""

MAX_TASK_CHARS: Final = 200
"""Of a message, this much is shown as the current task."""


@dataclass
class OwnAdapterConfig:
    """What the runtime tells an adapter about its workspace.

    model: the runtime's idea of it, with a default that no provider of codex's has; config.yaml and the environment say
        which it is. heartbeat: what tells the platform of us, None where nothing does.
    """

    model: str
    system_prompt: str | None = None
    config_path: str = "/configs"
    workspace_id: str = ""
    a2a_port: int = 8000
    prompt_files: list[str] = field(default_factory=list)
    heartbeat: object = None


class OwnBaseAdapter(ABC):
    """What the runtime calls on an adapter."""

    @staticmethod
    @abstractmethod
    def name() -> str:
        """Return the runtime's id."""

    @staticmethod
    @abstractmethod
    def display_name() -> str:
        """Return the name for people."""

    @staticmethod
    @abstractmethod
    def description() -> str:
        """Return what it is, in a sentence."""

    @abstractmethod
    async def setup(self, config: OwnAdapterConfig) -> None:
        """Check and prepare; a RuntimeError says what the operator has to mend."""

    @abstractmethod
    async def create_executor(self, config: OwnAdapterConfig) -> AgentExecutor:
        """Return the executor that answers messages."""


if TYPE_CHECKING:
    AdapterConfig = OwnAdapterConfig
    BaseAdapter = OwnBaseAdapter
else:
    try:
        from molecule_runtime.adapters.base import AdapterConfig, BaseAdapter
    except ModuleNotFoundError as missing:
        if missing.name is None or not missing.name.startswith(PACKAGE):
            raise
        AdapterConfig, BaseAdapter = OwnAdapterConfig, OwnBaseAdapter


def is_smoke(env: Mapping[str, str]) -> bool:
    """Tell whether the image is only tried out."""
    return env.get(SMOKE_MODE) == "1"


@runtime_checkable
class Heartbeat(Protocol):
    """What we know of the runtime's heartbeat."""

    active_tasks: int
    current_task: str


class AtWork:
    """How many tasks are at work, as the platform's heartbeat tells it.

    Without this the platform takes the agent for idle, and sends it what it keeps for idle agents.
    """

    def __init__(self, heartbeat: object) -> None:
        self._heartbeat = heartbeat if isinstance(heartbeat, Heartbeat) else None
        self._tasks: dict[object, str] = {}
        self._changed = anyio.Event()

    @contextmanager
    def shown(self, task: str) -> Iterator[None]:
        """Count one more task while the block runs; `task` is what it is about. Nothing here waits for the platform."""
        key = object()
        self._tasks[key] = " ".join(task.split())[:MAX_TASK_CHARS] or "a message"
        self._changed.set()
        try:
            yield
        finally:
            del self._tasks[key]
            self._changed.set()

    async def tell(self) -> None:
        """Keep the heartbeat up to date, until cancelled.

        The runtime's helper is called for the first task that begins and the last that ends: it tells the platform at
        once, but knows in April only none and one. In between the number itself is set, and told with the next beat.
        """
        heartbeat = self._heartbeat
        while heartbeat is not None:
            self._changed = anyio.Event()
            tasks = list(self._tasks.values())
            if tasks and not heartbeat.active_tasks:
                await _tell_current_task(heartbeat, tasks[0])
            elif heartbeat.active_tasks and not tasks:
                heartbeat.active_tasks = 1
                await _tell_current_task(heartbeat, "")
            heartbeat.active_tasks, heartbeat.current_task = len(tasks), tasks[-1] if tasks else ""
            await self._changed.wait()


async def _tell_current_task(heartbeat: Heartbeat, task: str) -> None:
    with anyio.move_on_after(HEARTBEAT_TIMEOUT_S):
        said = _run("executor_helpers", "set_current_task", heartbeat, task)
        if inspect.isawaitable(said):
            try:
                await said
            except Exception as error:
                logger.warning("the platform could not be told of a task: %r", error)


def mark_wedged(reason: str) -> None:
    """Have the heartbeat say that the agent cannot work, and why; the platform shows it as degraded."""
    _run("runtime_wedge", "mark_wedged", reason)


def clear_wedge() -> None:
    """Take that back."""
    _run("runtime_wedge", "clear_wedge")


def delegation_results() -> str:
    """Return, once, what peers have answered to work that was delegated to them; empty where there is nothing new.

    In the runtime's own words, each answer cut to its first 200 characters.
    """
    results = _run("executor_helpers", "read_delegation_results")
    return results if isinstance(results, str) else ""


def _run(module: str, name: str, *arguments: object) -> object:
    """Call a function of the runtime; None where it has none of this name, or it fails: no turn ends over that."""
    function = _of_runtime(module, name)
    if function is None:
        return None
    try:
        return function(*arguments)
    except Exception:
        logger.exception("%s.%s.%s failed", PACKAGE, module, name)
        return None


def _of_runtime(module: str, name: str) -> Callable[..., object] | None:
    """Return a function of the runtime; None in a generation that has none of this name."""
    try:
        found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name, None)
    except ImportError as error:
        if not _is_absent(error):
            logger.warning("%s.%s cannot be used: %s", PACKAGE, module, error)
        return None
    return found if callable(found) else None


def _is_absent(error: ImportError) -> bool:
    return isinstance(error, ModuleNotFoundError) and str(error.name).startswith(PACKAGE)
