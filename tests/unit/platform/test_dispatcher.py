"""Late answers under a foreign host: sent once, to the sender that the platform names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from a2a.server.context import ServerCallContext
from a2a.types import Message, Part, Role, SendMessageRequest

from codex_workspace.common.a2a_terms import AuthenticatedUser
from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.config.settings import OPERATOR
from codex_workspace.devkit.platform.app import StandInPlatform, message_of, running_platform
from codex_workspace.devkit.platform.records import NewRow
from codex_workspace.platform.client import WorkspaceToken, open_platform_client
from codex_workspace.platform.dispatcher import Dispatcher, open_dispatcher
from codex_workspace.server.card import agent_card
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.storage.deliveries import Deliveries, Delivery, DeliveryKey
from codex_workspace.storage.outbox import Outbox, OutboxState
from codex_workspace.storage.store import open_store
from tests.unit.platform.test_host_adapter import Worker
from tests.unit.server.test_app import OPTIONS

ME, PEER = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
ASKED = Message(role=Role.ROLE_USER, message_id="m-1", parts=[Part(text="hello")])


@dataclass(frozen=True)
class Place:
    platform: StandInPlatform
    handler: IdempotentHandler
    worker: Worker
    late: Dispatcher
    mail: Outbox

    async def ask(self) -> None:
        """Have a message accepted, as a host does, and leave before it is answered."""
        request = SendMessageRequest(message=ASKED)
        request.configuration.return_immediately = True
        await self.handler.on_message_send(request, ServerCallContext(user=AuthenticatedUser(OPERATOR)))

    def write_row(self, source_id: str | None) -> None:
        """Write the message's row, as the platform does after our response."""
        request = message_of("hello", "m-1")
        self.platform.write(NewRow(ME, source_id=source_id, method="message/send", request=request))


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    async with (
        running_platform() as platform,
        open_store(f"sqlite:///{folder / 'store.sqlite3'}") as store,
    ):
        platform.add_workspace(ME, "token-of-me-0123456789", "push")
        platform.add_workspace(PEER, "token-of-peer-0123456789", "poll")
        (folder / "token").write_text("token-of-me-0123456789")
        (folder / "token").chmod(0o600)
        worker = Worker()
        handler = IdempotentHandler(worker, store, None, agent_card(OPTIONS), one_main_context=True)
        async with (
            open_platform_client(platform.url, ME, WorkspaceToken(folder / "token")) as api,
            open_dispatcher(api, store.outbox, handler) as dispatcher,
        ):
            yield Place(platform, handler, worker, dispatcher, store.outbox)
        await handler.aclose()


async def test_a_peer_gets_the_answer_although_its_row_appears_later(tmp_path: Path) -> None:
    async with place(tmp_path) as own:
        await own.ask()
        await own.late.defer(ASKED, OPERATOR)
        await own.late.defer(ASKED, OPERATOR)
        await own.platform.until(lambda: any(asked.method == "GET" for asked in own.platform.requests))
        own.write_row(PEER)
        await own.platform.until(lambda: bool(own.platform.activity(PEER)))
        (row,) = own.platform.activity(PEER)
        assert row["source_id"] == ME
        assert "You said: hello" in str(row)
        assert own.platform.notifications(ME) == []


@pytest.mark.parametrize("is_known", [True, False])
async def test_the_user_gets_the_answer_also_without_a_row(tmp_path: Path, is_known: bool) -> None:
    async with place(tmp_path) as own:
        await own.ask()
        if is_known:
            own.write_row(None)
        await own.late.defer(ASKED, OPERATOR)
        await own.platform.until(lambda: bool(own.platform.notifications(ME)))
        assert own.platform.notifications(ME) == ["You said: hello"]


async def test_a_failing_database_loses_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = 0
    find = Deliveries.find

    async def no_find(self: Deliveries, key: DeliveryKey, digest: bytes) -> Delivery | None:
        nonlocal failed
        if failed < 2:
            failed += 1
            raise StoreUnavailable("out of reach")
        return await find(self, key, digest)

    async with place(tmp_path) as own:
        await own.ask()
        own.write_row(None)
        monkeypatch.setattr(Deliveries, "find", no_find)
        await own.late.defer(ASKED, OPERATOR)
        await own.platform.until(lambda: own.platform.notifications(ME) == ["You said: hello"])
    assert failed == 2


async def test_a_message_to_itself_gets_no_reply(tmp_path: Path) -> None:
    async with place(tmp_path) as own:
        own.write_row(ME)
        await own.ask()
        await own.late.defer(ASKED, OPERATOR)
        while await own.mail.unfinished():
            await anyio.sleep(0.01)
        assert own.platform.notifications(ME) == []
        assert all(asked.method == "GET" for asked in own.platform.requests)


async def test_a_deferred_message_has_a_state_and_gets_one_answer(tmp_path: Path) -> None:
    async with place(tmp_path) as own:
        assert await own.late.state(ASKED, OPERATOR) is None
        await own.ask()
        await own.late.defer(ASKED, OPERATOR)
        own.write_row(None)
        await own.platform.until(lambda: bool(own.platform.notifications(ME)))
        assert await own.late.state(ASKED, OPERATOR) is not None
        assert await own.late.state(ASKED, "another") is None
        while await own.mail.unfinished():
            await anyio.sleep(0.01)
        assert await own.late.state(ASKED, OPERATOR) is OutboxState.DONE
        assert own.platform.notifications(ME) == ["You said: hello"]
