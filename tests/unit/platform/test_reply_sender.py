"""Sending replies: peers that accept nothing, and searches in the activity."""

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
class Setup:
    """A reply sender whose peer is unreachable."""

    platform: StandInPlatform
    api: PlatformClient
    mail: Outbox
    sender: ReplySender
    now_s: float = 0.0
    completed: list[str] = field(default_factory=list)

    async def enqueue(self, name: str, peer: str) -> None:
        taken = await self.mail.add(OutboxMessage(name, "me", name, Route.PEER, peer, digest=name.encode()))
        assert taken is not None
        self.sender.enqueue(await self.mail.set_reply(taken, name))

    async def wait_for_completed(self, *names: str) -> None:
        while self.completed != [*names]:
            await anyio.sleep(0.01)

    def tries(self) -> int:
        return sum(each.path.endswith("/a2a") for each in self.platform.requests)


@asynccontextmanager
async def sending_to_silent_peer(folder: Path) -> AsyncIterator[Setup]:
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
            completed: list[str] = []
            sender = ReplySender(
                api,
                store.outbox,
                tasks,
                on_sent=lambda message: completed.append(message.id),
                on_removed=lambda: None,
                jitter=lambda: 0.02,
                clock=lambda: place.now_s,
            )
            place = Setup(platform, api, store.outbox, sender, completed=completed)
            yield place
            tasks.cancel_scope.cancel()


async def test_replies_to_a_silent_peer_are_dropped_after_a_while(tmp_path: Path) -> None:
    async with sending_to_silent_peer(tmp_path) as place:
        for name in ("a", "b"):
            await place.enqueue(name, PEER)
        await place.platform.until(lambda: place.tries() >= 3)
        assert place.completed == []
        place.now_s = PEER_TIMEOUT_S
        await place.wait_for_completed("a", "b")
        assert await place.mail.unfinished() == []


async def test_the_replies_waiting_for_one_peer_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codex_workspace.platform.reply_sender.MAX_WAITING", 2)
    async with sending_to_silent_peer(tmp_path) as place:
        await place.enqueue("a", PEER)
        await place.platform.until(lambda: place.tries() >= 1)
        for name in ("b", "c", "d"):
            await place.enqueue(name, PEER)
        await place.wait_for_completed("b")
        assert [each.id for each in await place.mail.unfinished()] == ["a", "c", "d"]


@pytest.mark.parametrize("is_same_moment", [True, False])
async def test_look_back_ends_at_the_given_time_or_count(tmp_path: Path, is_same_moment: bool) -> None:
    async with sending_to_silent_peer(tmp_path) as place:
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
