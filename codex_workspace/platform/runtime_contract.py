"""The platform runtime's adapter contract: its own classes if it is installed, else the part of them that we use.

This is the only module that knows `molecule_runtime`. Every generation has `adapters.base` with `AdapterConfig` and
`BaseAdapter`; every other function is looked up when it is called, and skipped if the generation lacks it.
"""

import importlib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import anyio

from codex_workspace.platform.active_tasks import ActiveTasks

logger = logging.getLogger(__name__)

PACKAGE: Final = "molecule_runtime"

SMOKE_MODE: Final = "MOLECULE_SMOKE_MODE"
"""Set to 1 when the platform's CI tries an image: one call of the executor, without a platform and a valid key."""

HEARTBEAT_TIMEOUT_S: Final = 5.0
"""The time for reporting a task at once; the heartbeat repeats it within 30 s."""


@dataclass
class OwnAdapterConfig:
    """What the runtime passes to an adapter.

    model: the runtime's choice, which is ignored: config.yaml and the environment name the model. heartbeat: the
    runtime's heartbeat, None if there is none.
    """

    model: str
    system_prompt: str | None = None
    config_path: str = "/configs"
    workspace_id: str = ""
    a2a_port: int = 8000
    prompt_files: list[str] = field(default_factory=list)
    heartbeat: object = None


class OwnBaseAdapter:
    """The base of the adapter if the runtime is not installed."""


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


def is_smoke_test(env: Mapping[str, str]) -> bool:
    """Tell whether the platform's CI tries the image."""
    return env.get(SMOKE_MODE) == "1"


@runtime_checkable
class Heartbeat(Protocol):
    """The part of the runtime's heartbeat that we use."""

    active_tasks: int
    current_task: str


async def update_heartbeat(heartbeat: object, tasks: ActiveTasks) -> None:
    """Keep the heartbeat's active tasks current until cancelled; the platform pushes queued messages to idle agents.

    The runtime's helper reports to the platform at once, but in April it only knows none and one. It is called when the
    first task starts and the last one ends; in between the number is set, and reported with the next heartbeat.
    """
    while isinstance(heartbeat, Heartbeat):
        changed, texts = tasks.changed, tasks.texts
        if texts and not heartbeat.active_tasks:
            await _report_task(heartbeat, texts[0])
        elif heartbeat.active_tasks and not texts:
            heartbeat.active_tasks = 1
            await _report_task(heartbeat, "")
        heartbeat.active_tasks, heartbeat.current_task = len(texts), texts[-1] if texts else ""
        await changed.wait()


async def _report_task(heartbeat: Heartbeat, text: str) -> None:
    with anyio.move_on_after(HEARTBEAT_TIMEOUT_S):
        result = _call("executor_helpers", "set_current_task", heartbeat, text)
        if inspect.isawaitable(result):
            try:
                await result
            except Exception as error:
                logger.warning("cannot report a task to the platform: %r", error)


def report_wedge(reason: str | None) -> None:
    """Have the heartbeat report why the agent cannot work; None: it can work again."""
    _call("runtime_wedge", "clear_wedge") if reason is None else _call("runtime_wedge", "mark_wedged", reason)


def _call(module: str, name: str, *arguments: object) -> object:
    """Call a function of the runtime; None if it does not exist, or fails: no turn ends because of that."""
    try:
        function = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name, None)
        return function(*arguments) if callable(function) else None
    except ImportError as error:
        logger.debug("cannot import %s.%s: %s", PACKAGE, module, error)
    except Exception:
        logger.exception("%s.%s.%s failed", PACKAGE, module, name)
    return None
