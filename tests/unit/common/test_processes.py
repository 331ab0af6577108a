"""Processes that outlived the one that started them."""

import os
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest

from codex_workspace.common.processes import PipeReader, PipeWriter, find_marked, kill_marked, resident_bytes
from tests.e2e.agent_process import REPOSITORY

NAME = "CODEX_WORKSPACE_TEST"


@contextmanager
def sleeper(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of the mark that only a SIGKILL ends, and that has said so."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    environment = {**os.environ, NAME: mark}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_only_the_mark_with_its_whole_value_counts() -> None:
    mark = uuid.uuid4().hex
    with sleeper(mark) as process, sleeper(f"{mark}-longer"):
        assert find_marked(NAME, mark) == [process.pid]
        assert find_marked(NAME, mark[:-1]) == []
        assert find_marked(NAME[1:], mark) == []
        assert len(find_marked(NAME, mark, or_longer=True)) == 2
        assert len(find_marked(NAME, mark[:-1], or_longer=True)) == 2
        assert find_marked(NAME, mark[1:], or_longer=True) == []


async def test_sweep_kills_what_is_marked_and_nothing_else() -> None:
    mark = uuid.uuid4().hex
    with sleeper(mark) as one, sleeper(mark) as two, sleeper("another") as other:
        assert await kill_marked(NAME, mark) == 2
        assert [one.wait(), two.wait()] == [-9, -9]
        assert other.poll() is None
        assert find_marked(NAME, mark) == []


def test_a_zombie_is_no_process() -> None:
    mark = uuid.uuid4().hex
    with sleeper(mark) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert find_marked(NAME, mark) == []


def test_the_memory_of_a_process_is_that_of_the_kernel_and_nothing_of_one_that_is_gone() -> None:
    ours = resident_bytes(os.getpid())
    ballast = b"x" * (64 << 20)
    assert resident_bytes(os.getpid()) - ours >= len(ballast) * 0.9
    with sleeper(uuid.uuid4().hex) as process:
        assert 1 << 20 < resident_bytes(process.pid) < 1 << 30
    process.wait()
    assert resident_bytes(process.pid) == 0


HIDE = (
    "import sys; from codex_workspace.common.processes import protect_from_inspection as protect; "
    "protect(); print(flush=True)"
)

# As root, this test could read everything; so who looks has no capabilities.
LOOK = """
import os, sys
from tests.e2e.without_capabilities import drop_all
drop_all()
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def test_a_program_that_cannot_be_read_is_found_by_its_arguments() -> None:
    mark = uuid.uuid4().hex
    arguments = [sys.executable, "-c", f"{HIDE}; sys.stdin.read()", f'a.{NAME}="{mark}"']
    wanted = (f"{mark!r}", f"{mark[:9]!r}", f"{mark[:9]!r}, or_longer=True")
    calls = ", ".join(f"find_marked({NAME!r}, {each})" for each in wanted)
    look = f"from codex_workspace.common.processes import find_marked; print({calls})"
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        process.stdout.readline()
        looked = [sys.executable, "-c", LOOK, look]
        said = subprocess.run(looked, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
        process.communicate()
    assert said == f"[{process.pid}] [] [{process.pid}]\n"


# --- Byte streams over real pipes, on both event loops that anyio knows ---


def pipe() -> tuple[PipeReader, PipeWriter]:
    reading, writing = os.pipe()
    return PipeReader(reading), PipeWriter(writing)


async def whole(reader: PipeReader) -> bytes:
    data = b""
    try:
        while True:
            data += await reader.receive()
    except anyio.EndOfStream:
        return data


async def write_much() -> None:
    reader, writer = pipe()
    data = os.urandom(1024) * 5000
    async with reader, anyio.create_task_group() as tasks:

        async def write() -> None:
            async with writer:
                await writer.send(data)
                await writer.send(b"")
                await writer.send(b"end")

        tasks.start_soon(write)
        assert await whole(reader) == data + b"end"
        with pytest.raises(anyio.EndOfStream):
            await reader.receive()


async def write_to_nobody() -> None:
    reader, writer = pipe()
    async with writer:
        await reader.aclose()
        with pytest.raises(anyio.BrokenResourceError):
            await writer.send(b"x")


async def lose_the_reader_in_the_middle() -> None:
    reader, writer = pipe()
    async with writer, anyio.create_task_group() as tasks:

        async def write() -> None:
            with pytest.raises(anyio.BrokenResourceError):
                await writer.send(b"x" * 1_000_000)

        tasks.start_soon(write)
        await reader.receive(10)
        await reader.aclose()


async def close_while_it_waits() -> None:
    reader, writer = pipe()
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await reader.receive()

        async def write() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await full.send(b"x" * 1_000_000)

        other, full = pipe()
        tasks.start_soon(read)
        tasks.start_soon(write)
        await anyio.sleep(0.01)
        await reader.aclose()
        await full.aclose()
    for stream in (reader, writer, other, full):
        await stream.aclose()
        await stream.aclose()
    with pytest.raises(anyio.ClosedResourceError):
        await reader.receive()
    with pytest.raises(anyio.ClosedResourceError):
        await writer.send(b"x")


async def cancel_a_wait() -> None:
    reader, writer = pipe()
    async with reader, writer:
        with anyio.move_on_after(0.01):
            await reader.receive()
        await writer.send(b"after")
        assert await reader.receive() == b"after"


async def read_no_more_than_asked() -> None:
    reader, writer = pipe()
    async with reader, writer:
        await writer.send(b"abcdef")
        assert [await reader.receive(4), await reader.receive(4)] == [b"abcd", b"ef"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    "case",
    [
        write_much,
        write_to_nobody,
        lose_the_reader_in_the_middle,
        close_while_it_waits,
        cancel_a_wait,
        read_no_more_than_asked,
    ],
)
def test_a_pipe(backend: str, case: Callable[[], Awaitable[None]]) -> None:
    anyio.run(case, backend=backend)
