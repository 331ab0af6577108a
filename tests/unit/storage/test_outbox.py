"""How long messages are kept, and what is stored of them."""

import time
from dataclasses import replace

import pytest

from codex_workspace.storage.database import Database
from codex_workspace.storage.outbox import KEEP_S, Cursor, Outbox, OutboxMessage, OutboxState, Route


@pytest.fixture
def mail(database: Database) -> Outbox:
    return Outbox(database)


def letter(name: str, message_id: str = "") -> OutboxMessage:
    return OutboxMessage(name, "me", message_id or name, Route.USER, digest=name.encode(), request=b"x")


async def add(mail: Outbox, message: OutboxMessage) -> OutboxMessage:
    added = await mail.add(message)
    assert added is not None
    return added


async def tell(mail: Outbox, name: str) -> None:
    await mail.complete(await mail.set_reply(await add(mail, letter(name)), "yes"))


async def test_completed_messages_stay_known_until_the_platform_shows_them_no_longer(mail: Outbox) -> None:
    now = time.time()
    await tell(mail, "a")
    await mail.delete_expired(now + KEEP_S - 60)
    assert await mail.add(letter("a")) is None
    await mail.delete_expired(now + KEEP_S + 60)
    assert await mail.add(letter("a")) is not None


async def test_a_message_is_read_as_it_was_stored(mail: Outbox) -> None:
    first, second = await add(mail, letter("a")), await add(mail, letter("b"))
    await add(mail, letter("c"))
    await tell(mail, "d")
    first = await mail.set_reply(first, "no", is_failure=True)
    first = await mail.mark_sending(first, may_be_sent=True)
    assert await mail.find("a") == first
    assert await mail.find("e") is None
    unfinished = await mail.unfinished()
    assert [message.id for message in unfinished] == ["a", "b", "c"]
    assert unfinished[:2] == [first, second]
    assert [type(value) for value in (unfinished[0].route, unfinished[0].state, unfinished[0].is_failure)] == [
        Route,
        OutboxState,
        bool,
    ]


async def test_a_repeated_message_is_done_and_another_with_its_id_gets_an_id_of_its_own(mail: Outbox) -> None:
    await add(mail, letter("a"))
    repeated = await add(mail, replace(letter("b", message_id="a"), digest=b"a"))
    assert (repeated.state, repeated.request) == (OutboxState.DONE, b"")
    assert (await add(mail, letter("c", message_id="a"))).message_id == "c"
    assert [message.id for message in await mail.unfinished()] == ["a", "c"]


async def test_only_sent_replies_with_the_text_are_counted(mail: Outbox) -> None:
    now = time.time()
    await tell(mail, "a")
    await tell(mail, "b")
    await mail.set_reply(await add(mail, letter("c")), "yes")
    assert await mail.count_sent("yes", now - 1) == 2
    assert await mail.count_sent("no", now - 1) == 0
    assert await mail.count_sent("yes", now + 60) == 0


async def test_each_workspace_has_its_own_cursor(mail: Outbox) -> None:
    assert await mail.load_cursor("one") is None
    for row in ("1", "2"):
        await mail.save_cursor("one", Cursor(row, f"at {row}"))
        await mail.save_cursor("two", Cursor("7", "at 7"))
    assert await mail.load_cursor("one") == Cursor("2", "at 2")
    assert await mail.load_cursor("two") == Cursor("7", "at 7")
