"""Sending what is owed: how long a peer that takes nothing is waited for, and how far back is looked."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from codex_workspace.devkit.platform.app import StandInPlatform, running_platform
from codex_workspace.devkit.platform.faults import Fault
from codex_workspace.devkit.platform.records import NewRow
from codex_workspace.platform.client import PlatformClient, open_platform_client
from codex_workspace.platform.reply_sender import PEER_TIMEOUT_S, ReplySender, look_back
from codex_workspace.platform.token import WorkspaceToken
from codex_workspace.storage.outbox import Outbox, OutboxMessage, Route
from codex_workspace.storage.store import open_store
from tests.support.platform_place import ME, PEER


@dataclass
class Office:
    """A reply sender on the stand-in, whose peer is out of reach."""

    platform: StandInPlatform
    api: PlatformClient
    mail: Outbox
    sender: ReplySender
    now_s: float = 0.0
    over: list[str] = field(default_factory=list)

    async def owe(self, name: str, peer: str) -> None:
        taken = await self.mail.add(OutboxMessage(name, "me", name, Route.PEER, peer, digest=name.encode()))
        assert taken is not None
        self.sender.enqueue(await self.mail.set_reply(taken, name))

    async def told_over(self, *names: str) -> None:
        while self.over != [*names]:
            await anyio.sleep(0.01)

    def tries(self) -> int:
        return sum(each.path.endswith("/a2a") for each in self.platform.requests)


@asynccontextmanager
async def office(folder: Path) -> AsyncIterator[Office]:
    async with (
        running_platform() as platform,
        open_store(f"sqlite+aiosqlite:///{folder / 'store.sqlite3'}") as store,
    ):
        platform.add_workspace(ME, "mine", "poll")
        platform.add_workspace(PEER, "peer's", "push", url="http://127.0.0.1:9/")
        (folder / "token").write_text("mine")
        async with (
            open_platform_client(platform.url, ME, WorkspaceToken(folder / "token")) as api,
            anyio.create_task_group() as tasks,
        ):
            over: list[str] = []
            sender = ReplySender(
                api,
                store.outbox,
                tasks,
                on_sent=lambda message: over.append(message.id),
                on_removed=lambda: None,
                jitter=lambda: 0.02,
                clock=lambda: place.now_s,
            )
            place = Office(platform, api, store.outbox, sender, over=over)
            yield place
            tasks.cancel_scope.cancel()


async def test_a_peer_that_takes_nothing_is_given_up_after_a_while(tmp_path: Path) -> None:
    async with office(tmp_path) as place:
        for name in ("a", "b"):
            await place.owe(name, PEER)
        await place.platform.until(lambda: place.tries() >= 3)
        assert place.over == []
        place.now_s = PEER_TIMEOUT_S
        await place.told_over("a", "b")
        assert await place.mail.unfinished() == []


async def test_only_so_many_answers_wait_for_one_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codex_workspace.platform.reply_sender.MAX_WAITING", 2)
    async with office(tmp_path) as place:
        await place.owe("a", PEER)
        await place.platform.until(lambda: place.tries() >= 1)
        for name in ("b", "c", "d"):
            await place.owe(name, PEER)
        await place.told_over("b")
        assert [each.id for each in await place.mail.unfinished()] == ["a", "c", "d"]


@pytest.mark.parametrize("is_same_moment", [True, False])
async def test_rows_are_looked_for_as_far_back_as_is_asked(tmp_path: Path, is_same_moment: bool) -> None:
    async with office(tmp_path) as place:
        if is_same_moment:
            place.platform.faults.by_chance(1.0, Fault.SAME_TIME)
        for number in range(230):
            place.platform.write(NewRow(ME, method="message/send", summary=str(number), request={"x": number}))

        async def summaries(since: float, enough: int) -> list[str]:
            return [row.summary for row in await look_back(place.api, lambda row: row.summary < "2", since, enough)]

        expected = [str(number) for number in range(229, -1, -1) if str(number) < "2"]
        assert sorted(await summaries(0.0, 500)) == sorted(expected)
        if not is_same_moment:
            assert await summaries(0.0, 500) == expected
            assert (await summaries(0.0, 1))[0] == "199"
            assert len(await summaries(time.time() + 60, 500)) < len(expected)
