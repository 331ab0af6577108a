"""Keeps modules that `serve` does not use from being imported, for a fast start and less memory.

Only a process that belongs to this agent calls `make_imports_lean`; a host that imports the adapter is left as it is.
`docs/adr/0033-lean-imports-and-early-start.md` gives the reasons, and `tests/unit/common/test_lean_imports.py` compares
the replacements with the SDK.
"""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final, TypeVar

T = TypeVar("T")

HIDDEN: Final[Mapping[str, str]] = {
    "httpx._main": "httpx's command line, with click, rich and pygments; httpx works without it",
    "sqlalchemy": "the SDK's own stores, which it imports if SQLAlchemy is installed; the agent has its own",
    "trio": "another event loop, which httpcore imports if it is installed; the agent runs on asyncio",
}
"""Modules that libraries import only if they exist, with the reason why they are hidden."""

GRPC: Final = "grpc"
"""Hidden unless `GRPC_PORT` is set: the SDK imports it if it is installed, also when it does not serve gRPC."""

GRPC_PORT: Final = "A2A_GRPC_PORT"

SDK_SPANS: Final = "OTEL_INSTRUMENTATION_A2A_SDK_ENABLED"
"""The SDK's own switch for its spans; `codex_workspace` turns them off unless the operator sets it."""

TELEMETRY: Final = "a2a.utils.telemetry"
QUEUES: Final = "a2a.utils._async_queue_compat"
"""The replaced modules of the SDK: the decorators for its spans, and its queues."""


def make_imports_lean(env: Mapping[str, str] = os.environ) -> None:
    """Hide and replace modules in this process, except those that are already imported."""
    for name in (*HIDDEN, *([] if env.get(GRPC_PORT) else [GRPC])):
        # `import` raises ImportError for a module that is None.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    replaced: dict[str, Mapping[str, object]] = {}
    if env.get(SDK_SPANS, "false").lower() != "true":
        replaced[TELEMETRY] = {"SpanKind": SpanKind, "trace_class": trace_class, "trace_function": trace_function}
    # From Python 3.13 on, the SDK uses asyncio's own queues.
    if sys.version_info < (3, 13):
        names = {"AsyncQueue": ClosableQueue, "QueueShutDown": QueueShutDown, "create_async_queue": ClosableQueue}
        replaced[QUEUES] = names
    sys.meta_path.insert(0, _Replacing(replaced))


class _Replacing:
    """Imports the given modules with other content. A finder and loader by its methods: importlib.abc takes 11 ms."""

    def __init__(self, replaced: Mapping[str, Mapping[str, object]]) -> None:
        self._replaced = replaced

    def find_spec(self, name: str, _path: object, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self._replaced else None  # type: ignore[arg-type]

    def create_module(self, _spec: ModuleSpec) -> None:
        """Let the import create the module."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._replaced[module.__name__])


class SpanKind(Enum):
    """The kinds that the SDK passes to its decorators."""

    INTERNAL = 0
    SERVER = 1
    CLIENT = 2
    PRODUCER = 3
    CONSUMER = 4


def trace_class(*_arguments: object, **_options: object) -> Callable[[T], T]:
    """Return a decorator that changes nothing. The SDK's wraps each method, also when its spans are off."""
    return _unchanged


def trace_function(func: object = None, **_options: object) -> object:
    """Return the function as it is, or a decorator that changes nothing."""
    return _unchanged if func is None else func


def _unchanged(decorated: T) -> T:
    return decorated


class QueueShutDown(Exception):
    """The queue was shut down."""


class ClosableQueue(asyncio.Queue[T]):
    """`asyncio.Queue` as of Python 3.13, which can be shut down, for Python 3.11 and 3.12.

    The SDK's own replacement, culsans, also works between threads, which takes 3 MB and three times as long.
    """

    _getters: deque[asyncio.Future[None]]
    _putters: deque[asyncio.Future[None]]
    _is_shut_down = False

    def put_nowait(self, item: T) -> None:
        """Add an item, or raise QueueFull, or QueueShutDown after a shutdown."""
        self._refuse_if(self._is_shut_down)
        super().put_nowait(item)

    def get_nowait(self) -> T:
        """Remove and return the first item, or raise QueueEmpty, or QueueShutDown after a shutdown."""
        self._refuse_if(self._is_shut_down and self.empty())
        return super().get_nowait()

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse further items, and end waiting calls; `immediate` drops the remaining items as processed."""
        while immediate and not self.empty():
            self.get_nowait()
            self.task_done()
        self._is_shut_down = True
        for waiter in (*self._getters, *self._putters):
            if not waiter.done():
                waiter.set_exception(QueueShutDown())

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        # `get` and `put` call this before each wait, also if they were woken for an item that is gone.
        self._refuse_if(self._is_shut_down)
        return super()._get_loop()  # type: ignore[misc,no-any-return]

    def _refuse_if(self, is_over: bool) -> None:
        if is_over:
            raise QueueShutDown
