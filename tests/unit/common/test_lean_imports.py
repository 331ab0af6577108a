"""What `serve` leaves out of its imports, compared with what the installed SDK imports."""

import ast
import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import a2a
import anyio
import pytest
from a2a.utils import _async_queue_compat as sdk_queues

from codex_workspace.common import lean_imports
from codex_workspace.common.lean_imports import QUEUES, TELEMETRY, ClosableQueue, SpanKind

SDK: Final = Path(a2a.__file__).parent

SHUT_DOWN: Final = (lean_imports.QueueShutDown, sdk_queues.QueueShutDown)

Queue = ClosableQueue[int]


@pytest.fixture(params=[ClosableQueue, sdk_queues.create_async_queue], ids=["ours", "the SDK's"])
def create(request: pytest.FixtureRequest) -> Callable[..., Queue]:
    """Our queue, and the SDK's, which must behave in the same way."""
    return cast("Callable[..., Queue]", request.param)


async def started(work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
    """Start a task and let it run until it waits."""
    task = asyncio.create_task(work)
    await anyio.wait_all_tasks_blocked()
    return task


async def test_items_come_out_in_order(create: Callable[..., Queue]) -> None:
    queue = create()
    for number in range(3):
        await queue.put(number)
    assert (queue.qsize(), queue.empty(), queue.full()) == (3, False, False)
    assert [await queue.get() for _ in range(3)] == [0, 1, 2]
    assert queue.empty()
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()


async def test_a_reader_waits_for_an_item_and_a_writer_for_room(create: Callable[..., Queue]) -> None:
    queue = create(maxsize=1)
    reader = await started(queue.get())
    await queue.put(1)
    assert await reader == 1
    await queue.put(2)
    assert queue.full()
    with pytest.raises(asyncio.QueueFull):
        queue.put_nowait(3)
    writer = await started(queue.put(3))
    assert not writer.done()
    assert await queue.get() == 2
    await writer
    assert queue.get_nowait() == 3


async def test_a_cancelled_reader_loses_no_item(create: Callable[..., Queue]) -> None:
    queue = create()
    first, second = await started(queue.get()), await started(queue.get())
    queue.put_nowait(1)
    # The first reader is woken and cancelled at once.
    first.cancel()
    with anyio.fail_after(1):
        assert await second == 1
    third = await started(queue.get())
    third.cancel()
    await anyio.wait_all_tasks_blocked()
    queue.put_nowait(2)
    assert queue.get_nowait() == 2


async def test_join_waits_until_all_items_are_processed(create: Callable[..., Queue]) -> None:
    queue = create()
    await queue.join()
    queue.put_nowait(1)
    joined = await started(queue.join())
    await queue.get()
    assert not joined.done()
    queue.task_done()
    await joined
    with pytest.raises(ValueError, match="too many times"):
        queue.task_done()


async def test_a_shut_down_queue_is_read_to_its_end(create: Callable[..., Queue]) -> None:
    queue = create()
    queue.put_nowait(1)
    queue.shutdown()
    for refused in (queue.put(2), _now(queue)):
        with pytest.raises(SHUT_DOWN):
            await refused
    assert await queue.get() == 1
    for ended in (queue.get(), started(queue.get())):
        with pytest.raises(SHUT_DOWN):
            await cast("asyncio.Task[object]", await ended)
    with pytest.raises(SHUT_DOWN):
        queue.get_nowait()


async def _now(queue: Queue) -> None:
    queue.put_nowait(2)


async def test_a_shutdown_ends_all_waiting_calls(create: Callable[..., Queue]) -> None:
    empty, full = create(), create(maxsize=1)
    full.put_nowait(1)
    waiting = [await started(each) for each in (empty.get(), empty.get(), full.put(2), full.put(3))]
    empty.shutdown()
    full.shutdown()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, SHUT_DOWN) for result in results)
    assert full.qsize() == 1


async def test_an_immediate_shutdown_drops_the_items(create: Callable[..., Queue]) -> None:
    queue = create()
    for number in range(3):
        queue.put_nowait(number)
    joined = await started(queue.join())
    await queue.get()
    queue.shutdown(immediate=True)
    assert queue.empty()
    with pytest.raises(SHUT_DOWN):
        await queue.get()
    # The item that is being processed still counts.
    await anyio.wait_all_tasks_blocked()
    assert not joined.done()
    queue.task_done()
    await joined


async def test_a_shutdown_ends_calls_that_were_woken_and_have_not_run(create: Callable[..., Queue]) -> None:
    empty, full = create(), create(maxsize=1)
    full.put_nowait(1)
    reader, writer = await started(empty.get()), await started(full.put(2))
    empty.put_nowait(1)
    empty.shutdown(immediate=True)
    full.get_nowait()
    full.shutdown(immediate=True)
    with anyio.fail_after(5):
        results = await asyncio.gather(reader, writer, return_exceptions=True)
    assert all(isinstance(result, SHUT_DOWN) for result in results)


def test_the_queue_has_what_asyncios_has() -> None:
    assert {name for name in dir(asyncio.Queue) if not name.startswith("_")} <= set(dir(ClosableQueue))


def names_imported_from(module: str) -> Iterator[str]:
    """Yield the names that the SDK imports from one of its modules."""
    for file in SDK.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == module:
                yield from (name.name for name in node.names)


def in_new_process(program: str, env: Mapping[str, str] | None = None) -> str:
    """Run a program after `make_imports_lean`, in an interpreter of its own, and return its output."""
    lean = f"from codex_workspace.common.lean_imports import *; make_imports_lean({env or {}!r})\n"
    done = subprocess.run([sys.executable, "-c", lean + program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", [TELEMETRY, QUEUES])
def test_a_replaced_module_has_every_name_that_the_sdk_imports(module: str) -> None:
    if module == QUEUES and sys.version_info >= (3, 13):
        pytest.skip("the SDK uses asyncio's queues")
    names = set(names_imported_from(module))
    assert names, f"the SDK does not import {module} any more"
    in_new_process(f"from {module} import {', '.join(names)}")


def test_the_replaced_decorators_are_used_as_the_sdk_uses_them() -> None:
    kinds = {kind for file in SDK.rglob("*.py") for kind in re.findall(r"SpanKind\.([A-Z]+)", file.read_text())}
    assert kinds <= {kind.name for kind in SpanKind}

    decorator = cast("Callable[[object], object]", lean_imports.trace_function(span_name="queue.put"))
    assert [decorate(len) for decorate in (lean_imports.trace_function, decorator)] == [len, len]
    assert lean_imports.trace_class(include_list=["get"], kind=SpanKind.SERVER)(int) is int


def test_the_operator_can_turn_the_sdks_spans_on() -> None:
    env = {lean_imports.SDK_SPANS: "true"}
    in_new_process("import a2a.utils.telemetry as t; assert t.otel_installed", env)
    in_new_process("import a2a.utils.telemetry as t; assert not hasattr(t, 'otel_installed')")


def test_grpc_is_hidden_unless_it_is_on() -> None:
    program = "import a2a.server.request_handlers as h, sys; print(bool(sys.modules['grpc']))"
    assert in_new_process(program) == "False\n"
    assert in_new_process(program, {"A2A_GRPC_PORT": "0"}) == "True\n"


def test_a_module_that_was_imported_before_stays() -> None:
    in_new_process("import httpx\nimport culsans, sys; make_imports_lean({}); assert sys.modules['culsans'] is culsans")
