"""Task groups, pauses, and byte streams over pipes."""

import asyncio
import os
from collections.abc import Awaitable, Callable

import anyio
import pytest

from codex_workspace.common.concurrency import PipeReader, PipeWriter, backoff, task_group


async def fail(error: Exception) -> None:
    raise error


async def run(*errors: Exception) -> None:
    async with task_group() as tasks:
        for error in errors:
            tasks.start_soon(fail, error)
        await anyio.sleep_forever()


async def test_a_lone_error_arrives_plain_from_the_block_and_from_a_task() -> None:
    with pytest.raises(KeyError):
        async with task_group():
            raise KeyError
    with pytest.raises(KeyError) as raised:
        await run(KeyError())
    assert raised.value.__cause__ is None


async def test_the_cause_is_kept() -> None:
    with pytest.raises(KeyError) as raised:
        async with task_group():
            raise KeyError from OSError("why")
    assert isinstance(raised.value.__cause__, OSError)


async def test_several_errors_stay_together() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await run(KeyError(), OSError())
    assert raised.group_contains(KeyError)
    assert raised.group_contains(OSError)


async def test_a_cancelled_group_raises_nothing() -> None:
    with anyio.move_on_after(0.01) as scope:
        async with task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
    assert scope.cancelled_caught


# --- Pauses that grow ---


@pytest.mark.parametrize(("tries", "pause_s"), [(0, 0.5), (1, 1.0), (2, 2.0), (5, 16.0), (6, 30.0), (5000, 30.0)])
def test_a_pause_doubles_up_to_its_bound(tries: int, pause_s: float) -> None:
    assert backoff(0.5, 30.0, tries) == pause_s


# --- Byte streams over real pipes ---


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


async def write_without_reader() -> None:
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


async def cancel_when_data_arrives() -> None:
    reader, writer = pipe()
    received: list[bytes] = []

    async def receive() -> None:
        received.append(await reader.receive())

    async with reader, writer:
        # Before, while and after the event loop reads the pipe.
        for rounds in range(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                await anyio.lowlevel.checkpoint()
                await writer.send(b"x")
                for _ in range(rounds):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            if len(received) == rounds:
                await receive()
    assert received == [b"x"] * 5


async def leave_data_unread() -> None:
    reading, writing = os.pipe()
    async with PipeReader(reading) as reader, PipeWriter(writing) as writer:
        await writer.send(b"a")
        assert await reader.receive() == b"a"
        await writer.send(b"b")
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        assert not asyncio.get_running_loop().remove_reader(reading), "the pipe is watched although nobody reads it"
        assert await reader.receive() == b"b"


@pytest.mark.parametrize(
    "case",
    [
        write_much,
        write_without_reader,
        lose_the_reader_in_the_middle,
        close_while_it_waits,
        cancel_a_wait,
        read_no_more_than_asked,
        cancel_when_data_arrives,
        leave_data_unread,
    ],
)
async def test_a_pipe(case: Callable[[], Awaitable[None]]) -> None:
    await case()
