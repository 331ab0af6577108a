"""Sending replies: peers that accept nothing, and searches in the activity."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest

from codex_workspace.devkit.platform.app import StandInPlatform, running_platform
from codex_workspace.devkit.platform.faults import Fault
from codex_workspace.devkit.platform.records import NewRow
from codex_workspace.platform import reply_sender
from codex_workspace.platform.client import PlatformClient, WorkspaceToken, open_platform_client
from codex_workspace.platform.client_types import PlatformError
from codex_workspace.platform.reply_sender import ReplySender, look_back
from codex_workspace.storage.outbox import Outbox, OutboxMessage, Route
from codex_workspace.storage.store import open_store
from tests.support.platform_agent import ME, PEER
from tests.unit.platform.test_client import Far


@dataclass
class Setup:
    """A reply sender whose peer is unreachable."""

    platform: StandInPlatform
    api: PlatformClient
    mail: Outbox
    sender: ReplySender

    async def enqueue(self, name: str, peer: str, route: Route = Route.PEER) -> None:
        taken = await self.mail.add(OutboxMessage(name, "me", name, route, peer, digest=name.encode()))
        assert taken is not None
        self.sender.enqueue(await self.mail.set_reply(taken, name))

    def tries(self) -> int:
        return sum(each.path.endswith("/a2a") for each in self.platform.requests)


@asynccontextmanager
async def sending_to_silent_peer(folder: Path) -> AsyncIterator[Setup]:
    async with (
        running_platform() as platform,
        open_store(f"sqlite:///{folder / 'store.sqlite3'}") as store,
    ):
        platform.add_workspace(ME, "mine", "poll")
        platform.add_workspace(PEER, "peer's", "push", url="http://127.0.0.1:9/")
        (folder / "token").write_text("mine")
        async with (
            open_platform_client(platform.url, ME, WorkspaceToken(folder / "token")) as api,
            anyio.create_task_group() as tasks,
        ):
            yield Setup(platform, api, store.outbox, ReplySender(api, store.outbox, tasks))
            tasks.cancel_scope.cancel()


async def test_replies_to_a_silent_peer_are_dropped_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_sender, "FIRST_PAUSE_S", 0.02)
    async with sending_to_silent_peer(tmp_path) as setup:
        for name in ("a", "b"):
            await setup.enqueue(name, PEER)
        await setup.platform.until(lambda: setup.tries() >= 3)
        assert len(await setup.mail.unfinished()) == 2
        monkeypatch.setattr(reply_sender, "PEER_TIMEOUT_S", 0.0)
        while await setup.mail.unfinished():
            await anyio.sleep(0.01)


async def test_the_user_is_notified_of_a_silent_peers_messages_in_their_order(tmp_path: Path) -> None:
    async with sending_to_silent_peer(tmp_path) as setup:
        await setup.enqueue("a", PEER)
        await setup.platform.until(lambda: setup.tries() >= 1)
        for name, peer in (("b", PEER), ("c", ""), ("d", PEER)):
            await setup.enqueue(name, peer, Route.USER)
        with anyio.fail_after(5):
            await setup.platform.until(lambda: len(setup.platform.notifications(ME)) == 3)
        assert setup.platform.notifications(ME) == ["b", "c", "d"]
        assert [message.id for message in await setup.mail.unfinished()][:1] == ["a"]


async def test_a_notification_of_the_user_does_not_prolong_a_peers_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FIRST_PAUSE_S": 0.02, "LONGEST_PAUSE_S": 0.2, "PEER_TIMEOUT_S": 0.5}.items():
        monkeypatch.setattr(reply_sender, name, value)
    async with sending_to_silent_peer(tmp_path) as setup:
        await setup.enqueue("a", PEER)
        with anyio.fail_after(5):
            while "a" in [message.id for message in await setup.mail.unfinished()]:
                await setup.enqueue(str(time.monotonic()), PEER, Route.USER)
                await anyio.sleep(0.02)


async def test_of_too_many_replies_to_one_peer_the_oldest_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_sender, "MAX_WAITING", 2)
    async with sending_to_silent_peer(tmp_path) as setup:
        await setup.enqueue("sent now", PEER)
        await setup.platform.until(lambda: setup.tries() >= 1)
        for name in "abcd":
            await setup.enqueue(name, PEER)
        with anyio.fail_after(5):
            while [each.id for each in await setup.mail.unfinished()] != ["sent now", "c", "d"]:
                await anyio.sleep(0.01)


async def test_a_reply_that_cannot_be_looked_up_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_sender, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(reply_sender, "LONGEST_PAUSE_S", 0.001)
    async with sending_to_silent_peer(tmp_path) as setup:
        setup.platform.faults.next_time(Fault.FAILING, "/activity", times=1000)
        setup.platform.faults.next_time(Fault.LOST, "/notify")
        await setup.enqueue("a", "", Route.USER)
        with anyio.fail_after(5):
            await setup.platform.until(lambda: len(setup.platform.notifications(ME)) == 2)
        assert setup.platform.faults.met[Fault.FAILING] == reply_sender.ECHO_LOOKUPS


async def test_look_back_ends_at_the_given_time_or_with_the_first_match(tmp_path: Path) -> None:
    async with sending_to_silent_peer(tmp_path) as setup:
        for number in range(230):
            setup.platform.write(NewRow(ME, method="message/send", summary=str(number), request={"x": number}))

        async def summaries(since: float, *, only_newest: bool = False) -> list[str]:
            rows = await look_back(setup.api, lambda row: row.summary < "2", since, only_newest=only_newest)
            return [row.summary for row in rows]

        expected = [str(number) for number in range(229, -1, -1) if str(number) < "2"]
        assert await summaries(0.0) == expected
        assert (await summaries(0.0, only_newest=True))[0] == "199"
        assert len(await summaries(time.time() + 60)) < len(expected)


@pytest.mark.parametrize("created_at", ["2026-08-01T00:00:00Z", "no time"])
async def test_look_back_ends_if_the_platform_shows_the_same_rows_again(tmp_path: Path, created_at: str) -> None:
    pages = [[{"id": "a", "created_at": created_at}]] * 5
    far = Far([httpx.Response(200, json=page) for page in pages])
    async with open_platform_client(
        "http://platform.test", ME, WorkspaceToken(tmp_path / "token"), httpx.MockTransport(far)
    ) as api:
        assert [row.id for row in await look_back(api, lambda _row: True)] == ["a"]


async def test_look_back_reads_a_limited_number_of_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_sender, "MAX_PAGES", 3)
    far = Far([httpx.Response(200, json=[{"id": str(number), "created_at": "no time"}]) for number in range(10)])
    async with open_platform_client(
        "http://platform.test", ME, WorkspaceToken(tmp_path / "token"), httpx.MockTransport(far)
    ) as api:
        assert [row.id for row in await look_back(api, lambda _row: True, keep=2)] == ["1", "2"]


async def test_look_back_goes_on_at_a_page_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_sender, "FIRST_PAUSE_S", 0.001)
    pages = [httpx.Response(200, json=[{"id": str(number), "created_at": "2026-08-01T00:00:00Z"}]) for number in "12"]
    failures = [httpx.Response(503) for _ in range(reply_sender.PAGE_FAILURES + 1)]
    far = Far([pages[0], *failures[1:], pages[1], failures[0], httpx.Response(200, json=[]), failures[0]])
    async with open_platform_client(
        "http://platform.test", ME, WorkspaceToken(tmp_path / "token"), httpx.MockTransport(far)
    ) as api:
        assert [row.id for row in await look_back(api, lambda _row: True)] == ["1", "2"]
        with pytest.raises(PlatformError):
            await look_back(api, lambda _row: True)
        far.answers = [pages[0], *failures]
        with pytest.raises(PlatformError):
            await look_back(api, lambda _row: True)
