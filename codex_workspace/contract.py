"""The platform runtime's adapter contract: its own classes where it is installed, the part we use of them elsewhere.

The one place that knows `molecule_runtime`. Every generation of it has `adapters.base` with `AdapterConfig` and
`BaseAdapter`; whatever else is used of it is looked for when it is needed, and done without where it is missing. A
platform image always has the runtime; a checkout, and our own host, never.
"""

import importlib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio
from a2a.server.agent_execution import AgentExecutor

from codex_workspace.groups import plain_task_group

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


@asynccontextmanager
async def shown_at_work(heartbeat: object, task: str) -> AsyncIterator[None]:
    """Have the platform see, while the block runs, that one more task is at work, and what it is about.

    Without this the platform takes the agent for idle and sends it what it keeps for idle agents. A platform that is
    slow, or away, holds nothing up.
    """
    if heartbeat is None:
        yield
        return
    begin = " ".join(task.split())[:MAX_TASK_CHARS] or "a message"
    async with plain_task_group() as beside:
        told = anyio.Event()

        async def tell_begin() -> None:
            await _tell_current_task(heartbeat, begin)
            told.set()

        beside.start_soon(tell_begin)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await told.wait()
                await _tell_current_task(heartbeat, "")


def mark_wedged(reason: str) -> None:
    """Have the heartbeat say that the agent cannot work, and why; the platform shows it as degraded."""
    if mark := _of_runtime("runtime_wedge", "mark_wedged"):
        mark(reason)


def clear_wedge() -> None:
    """Take that back."""
    if clear := _of_runtime("runtime_wedge", "clear_wedge"):
        clear()


def delegation_results() -> str:
    """Return, once, what peers have answered to work that was delegated to them; empty where there is nothing new."""
    read = _of_runtime("executor_helpers", "read_delegation_results")
    results = read() if read is not None else None
    return results if isinstance(results, str) else ""


async def _tell_current_task(heartbeat: object, task: str) -> None:
    tell = _of_runtime("executor_helpers", "set_current_task")
    if tell is None:
        _count(heartbeat, task)
        return
    with anyio.move_on_after(HEARTBEAT_TIMEOUT_S):
        try:
            said = tell(heartbeat, task)
            if inspect.isawaitable(said):
                await said
        except (OSError, RuntimeError) as error:
            logger.warning("the platform could not be told of a task: %s", type(error).__name__)


def _count(heartbeat: object, task: str) -> None:
    """Do what the runtime's helper does of it in memory; its next beat says it."""
    active = getattr(heartbeat, "active_tasks", None)
    if isinstance(active, int):
        vars(heartbeat).update(active_tasks=max(0, active + (1 if task else -1)), current_task=task)


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
