"""How long messages are kept."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from codex_workspace.storage.outbox import KEEP_S, Outbox, OutboxMessage, Route
from codex_workspace.storage.store import open_store


@pytest.fixture
async def mail(tmp_path: Path) -> AsyncIterator[Outbox]:
    async with open_store(f"sqlite+aiosqlite:///{tmp_path / 'store.sqlite3'}") as store:
        yield store.outbox


def letter(name: str) -> OutboxMessage:
    return OutboxMessage(name, "me", name, Route.USER, digest=name.encode(), request=b"x")


async def tell(mail: Outbox, name: str) -> None:
    taken = await mail.add(letter(name))
    assert taken is not None
    await mail.complete(await mail.set_reply(taken, "yes"))


async def test_completed_messages_stay_known_until_the_platform_shows_them_no_longer(mail: Outbox) -> None:
    now = time.time()
    await tell(mail, "a")
    await mail.delete_expired(now + KEEP_S - 60)
    assert await mail.add(letter("a")) is None
    await mail.delete_expired(now + KEEP_S + 60)
    assert await mail.add(letter("a")) is not None
