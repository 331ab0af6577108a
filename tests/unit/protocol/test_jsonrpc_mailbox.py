"""What waits for a thread's reader."""

import anyio
import pytest

from codex_workspace.common.errors import CodexGone
from codex_workspace.protocol.jsonrpc import Mailbox, Notification


def said(number: int) -> Notification:
    return Notification("said", {"n": number})


async def test_take_returns_all_unread_messages_in_order() -> None:
    mailbox = Mailbox()
    for number in range(3):
        mailbox.put(said(number), 10)
    assert await mailbox.receive() == [said(0), said(1), said(2)]


async def test_take_waits_for_a_message() -> None:
    mailbox = Mailbox()
    assert not mailbox.has_received
    async with anyio.create_task_group() as tasks:

        async def take() -> None:
            assert await mailbox.receive() == [said(1)]

        tasks.start_soon(take)
        await anyio.lowlevel.checkpoint()
        mailbox.put(said(1), 10)
    assert mailbox.has_received


async def test_a_cancelled_take_loses_no_message() -> None:
    mailbox = Mailbox()
    with anyio.move_on_after(0.001):
        await mailbox.receive()
    mailbox.put(said(1), 10)
    assert await mailbox.receive() == [said(1)]


async def test_the_end_follows_the_earlier_messages_and_stays() -> None:
    mailbox = Mailbox()
    mailbox.put(said(1), 10)
    mailbox.fail(CodexGone("first", "tail"))
    mailbox.fail(CodexGone("second"))
    mailbox.put(said(2), 10)
    assert await mailbox.receive() == [said(1)]
    for _ in range(2):
        with pytest.raises(CodexGone, match="first") as raised:
            await mailbox.receive()
        assert raised.value.tail == "tail"


async def test_an_end_wakes_a_waiter() -> None:
    mailbox = Mailbox()
    async with anyio.create_task_group() as tasks:

        async def take() -> None:
            with pytest.raises(CodexGone):
                await mailbox.receive()

        tasks.start_soon(take)
        await anyio.lowlevel.checkpoint()
        mailbox.fail(CodexGone("gone"))


async def test_wake_lets_take_return_empty_once() -> None:
    mailbox = Mailbox()
    mailbox.wake()
    assert await mailbox.receive() == []
    with anyio.move_on_after(0.001) as waiting:
        await mailbox.receive()
    assert waiting.cancelled_caught
    mailbox.wake()
    mailbox.put(said(1), 10)
    assert await mailbox.receive() == [said(1)]


async def test_an_overflow_ends_the_mailbox_and_keeps_what_fits() -> None:
    mailbox = Mailbox(max_unread_bytes=100)
    for number in range(3):
        mailbox.put(said(number), 40)
    assert await mailbox.receive() == [said(0), said(1)]
    with pytest.raises(CodexGone, match="more than 100 bytes that were not read"):
        await mailbox.receive()


async def test_read_messages_do_not_count() -> None:
    mailbox = Mailbox(max_unread_bytes=100)
    for number in range(100):
        mailbox.put(said(number), 100)
        assert await mailbox.receive() == [said(number)]
