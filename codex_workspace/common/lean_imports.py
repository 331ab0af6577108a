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
from typing import Final, Generic, TypeVar

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


class ClosableQueue(Generic[T]):
    """`asyncio.Queue` of Python 3.13, which can be shut down, for earlier Pythons.

    The SDK's own replacement, culsans, also works between threads, which takes 3 MB and three times as long.
    """

    def __init__(self, maxsize: int = 0) -> None:
        self._maxsize = maxsize
        self._items: deque[T] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()
        self._unfinished = 0
        self._finished = asyncio.Event()
        self._finished.set()
        self._is_shut_down = False

    @property
    def maxsize(self) -> int:
        """The maximum number of items; 0 or less for no limit."""
        return self._maxsize

    def qsize(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def empty(self) -> bool:
        """Return whether there are no items."""
        return not self._items

    def full(self) -> bool:
        """Return whether there are `maxsize` items."""
        return 0 < self._maxsize <= len(self._items)

    async def put(self, item: T) -> None:
        """Add an item; wait while the queue is full."""
        while self.full() and not self._is_shut_down:
            await _wait_in(self._putters)
        self.put_nowait(item)

    def put_nowait(self, item: T) -> None:
        """Add an item, or raise QueueFull, or QueueShutDown after a shutdown."""
        if self._is_shut_down:
            raise QueueShutDown
        if self.full():
            raise asyncio.QueueFull
        self._items.append(item)
        self._unfinished += 1
        self._finished.clear()
        _wake_one(self._getters)

    async def get(self) -> T:
        """Remove and return the first item; wait while there is none."""
        while not self._items and not self._is_shut_down:
            await _wait_in(self._getters)
        return self.get_nowait()

    def get_nowait(self) -> T:
        """Remove and return the first item, or raise QueueEmpty, or QueueShutDown after a shutdown."""
        if not self._items:
            raise QueueShutDown if self._is_shut_down else asyncio.QueueEmpty
        item = self._items.popleft()
        _wake_one(self._putters)
        return item

    def task_done(self) -> None:
        """Count an item as processed; ValueError if there were fewer items."""
        if self._unfinished <= 0:
            raise ValueError("task_done() called too many times")
        self._unfinished -= 1
        if self._unfinished == 0:
            self._finished.set()

    async def join(self) -> None:
        """Wait until all items are processed."""
        await self._finished.wait()

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse further items, and end waiting calls; `immediate` drops the remaining items as processed."""
        self._is_shut_down = True
        if immediate:
            self._unfinished = max(0, self._unfinished - len(self._items))
            self._items.clear()
            if self._unfinished == 0:
                self._finished.set()
        for waiters in (self._getters, self._putters):
            while waiters:
                _wake_one(waiters)


async def _wait_in(waiters: deque[asyncio.Future[None]]) -> None:
    """Wait until `_wake_one` chooses this caller; if it is then cancelled, the next one is woken."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(waiter)
    try:
        await waiter
    except BaseException:
        if waiter.cancelled():
            if waiter in waiters:
                waiters.remove(waiter)
        else:
            _wake_one(waiters)
        raise


def _wake_one(waiters: deque[asyncio.Future[None]]) -> None:
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            waiter.set_result(None)
            return
