"""Our own host on the stand-in platform: `registration`, `inbox`, `dispatcher`, and pushed messages.

Covers `platform.inbox`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from a2a.server.context import ServerCallContext
from a2a.types import Message, SendMessageRequest, Task
from a2a.utils.errors import InternalError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route as StarletteRoute

from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.devkit.platform.app import StandInOptions, StandInPlatform, running_platform
from codex_workspace.devkit.platform.delivery import result_row
from codex_workspace.devkit.platform.faults import Fault
from codex_workspace.devkit.platform.records import NewRow
from codex_workspace.platform.activity_rows import read_row
from codex_workspace.platform.client_types import ActivityRow, DeliveryMode
from codex_workspace.platform.deadline_reply import STILL_WORKING
from codex_workspace.platform.dispatcher import Dispatcher
from codex_workspace.protocol.jsonrpc import nested, objects, text
from codex_workspace.server.app import serving
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.server.sockets import bind
from codex_workspace.storage import outbox
from codex_workspace.storage.database import Connection, Value
from codex_workspace.storage.deliveries import Deliveries, Delivery, DeliveryKey
from codex_workspace.storage.outbox import OutboxMessage
from tests.support.platform_agent import ME, PEER, PlatformAgentSetup, running_platform_agent
from tests.unit.platform.test_activity_rows import ROWS


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[tuple[StandInPlatform, PlatformAgentSetup]]:
    """A platform of May with two workspaces, and where an agent lives on it."""
    async with running_platform(folder / "platform.sqlite3") as platform:
        platform.add_workspace(ME, delivery="poll", name="me")
        platform.add_workspace(PEER, "peer's", "poll", name="peer")
        setup = PlatformAgentSetup(folder, platform)
        setup.echo.gate.set()
        yield platform, setup


@asynccontextmanager
async def pushing_world(folder: Path) -> AsyncIterator[StandInPlatform]:
    """A platform that pushes and has little patience."""
    options = StandInOptions(wait_s=5.0, tells_secret=True)
    async with running_platform(folder / "platform.sqlite3", options=options) as platform:
        platform.add_workspace(ME, delivery="push", name="me")
        platform.add_workspace(PEER, "peer's", "poll", name="peer")
        yield platform


async def test_a_users_message_is_answered_on_the_canvas(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        async with running_platform_agent(setup):
            await platform.canvas_message(ME, "hello")
            await platform.until(lambda: platform.notifications(ME) == ["echo: hello"])
        assert setup.echo.heard == ["hello"]


async def test_messages_before_the_start_are_answered_in_order(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        for number in range(5):
            await platform.canvas_message(ME, str(number))
        async with running_platform_agent(setup):
            await platform.until(lambda: len(platform.notifications(ME)) == 5)
        assert platform.notifications(ME) == [f"echo: {number}" for number in range(5)]


async def test_a_backlog_of_several_pages_is_read(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        for number in range(75):
            await platform.canvas_message(ME, str(number))
        async with running_platform_agent(setup):
            await platform.until(lambda: len(platform.notifications(ME)) == 75)
        assert platform.notifications(ME) == [f"echo: {number}" for number in range(75)]
        assert setup.echo.heard == [str(number) for number in range(75)]


async def test_a_reply_to_a_peer_names_the_message_it_answers(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        async with running_platform_agent(setup):
            await platform.peer_message(PEER, ME, "do it", "work-1", {"delegation_id": "work-1"})
            await platform.until(lambda: len(platform.activity(PEER)) == 1)
        [row] = platform.activity(PEER)
        said = nested(nested(nested(row, "request_body"), "params"), "message")
        assert said["metadata"] == {"in_reply_to": "work-1", "delegation_id": "work-1"}
        assert "do it" in text(objects(said, "parts")[0], "text")
        assert setup.echo.heard[0].startswith(f"A message from the agent {PEER}")
        assert platform.notifications(ME) == []


@pytest.mark.parametrize("about", [{"in_reply_to": "m-0"}, {"delegation_id": "work-1"}])
async def test_a_peers_answer_is_reported_to_the_user_and_not_answered(tmp_path: Path, about: dict[str, str]) -> None:
    async with world(tmp_path) as (platform, setup):
        async with running_platform_agent(setup):
            await platform.peer_message(PEER, ME, "it is done", "m-1", {**about})
            await platform.until(lambda: len(platform.notifications(ME)) == 1)
            await platform.canvas_message(ME, "and now?")
            await platform.until(lambda: len(platform.notifications(ME)) == 2)
        assert "it is done" in platform.notifications(ME)[0]
        assert setup.echo.heard[0].startswith(f"The agent {PEER} answers")
        assert platform.activity(PEER) == []


async def test_two_polling_agents_do_not_answer_each_other_for_ever(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / ".auth_token").write_text("peer's")
        other = PlatformAgentSetup(tmp_path / "other", platform, workspace_id=PEER)
        other.echo.gate.set()
        async with running_platform_agent(setup), running_platform_agent(other):
            await platform.peer_message(PEER, ME, "ping", "m-1")
            await platform.until(lambda: len(platform.notifications(PEER)) == 1)
            await platform.canvas_message(ME, "still there?")
            await platform.until(lambda: len(platform.notifications(ME)) == 1)
        assert len(setup.echo.heard) == 2
        assert len(other.echo.heard) == 1


async def test_rows_of_all_kinds_are_answered_or_skipped(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup), running_platform_agent(setup):
        for _, row, _ in ROWS:
            platform.write(row)
        await platform.canvas_message(ME, "and this")
        await platform.until(lambda: "echo: and this" in platform.notifications(ME))
        work = [heard for _, _, heard in ROWS if heard is not None]
        assert [text.rpartition(chr(10))[2] for text in setup.echo.heard] == [*work, "and this"]
        # What it has told itself is answered nowhere.
        assert len([text for text in platform.notifications(ME) if text.startswith("echo")]) == len(work)


async def test_a_result_that_a_tool_has_returned_is_skipped(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup), running_platform_agent(setup) as agent:
        agent.api.reported_delegations.append("work-1")
        platform.write(result_row(ME, PEER, "work-1", "told"))
        platform.write(result_row(ME, PEER, "work-2", "new"))
        await platform.until(lambda: len(platform.notifications(ME)) == 1)
        assert [text.rpartition(chr(10))[2] for text in setup.echo.heard] == ["new"]


@pytest.mark.parametrize("is_told", [True, False])
async def test_an_awaited_result_is_reported_by_the_tool_or_by_the_inbox(tmp_path: Path, *, is_told: bool) -> None:
    async with world(tmp_path) as (platform, setup), running_platform_agent(setup) as agent:
        agent.api.awaited_delegations.append("work-1")
        platform.write(result_row(ME, PEER, "work-1", "it is done"))
        await platform.canvas_message(ME, "hello")
        await platform.until(lambda: platform.notifications(ME) == ["echo: hello"])
        assert setup.echo.heard == ["hello"]
        if is_told:
            agent.api.reported_delegations.append("work-1")
        agent.api.awaited_delegations.clear()
        if not is_told:
            await platform.until(lambda: len(platform.notifications(ME)) == 2)
        while await agent.store.outbox.unfinished():
            await anyio.sleep(0.02)
        heard = ["hello"] if is_told else ["hello", "it is done"]
        assert [text.rpartition(chr(10))[2] for text in setup.echo.heard] == heard


async def test_nothing_is_repeated_after_a_restart(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        for life in range(3):
            async with running_platform_agent(setup):
                await platform.canvas_message(ME, f"life {life}")
                await platform.until(lambda: len(platform.notifications(ME)) == life + 1)  # noqa: B023
        assert setup.echo.heard == [f"life {life}" for life in range(3)]


async def test_a_lost_cursor_repeats_nothing_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codex_workspace.platform.inbox.SETTLE_S", 0.1)
    async with world(tmp_path) as (platform, setup):
        async with running_platform_agent(setup) as agent:
            for number in range(3):
                await platform.canvas_message(ME, str(number))
            await platform.until(lambda: len(platform.notifications(ME)) == 3)
            while await agent.store.outbox.load_cursor(ME) is None:
                await anyio.sleep(0.02)
        platform.faults.next_time(Fault.PRUNED, times=2)
        await platform.canvas_message(ME, "3")
        async with running_platform_agent(setup):
            await platform.canvas_message(ME, "4")
            await platform.until(lambda: len(platform.notifications(ME)) == 5)
        assert platform.faults.met[Fault.PRUNED]
        assert setup.echo.heard == [str(number) for number in range(5)]


async def test_a_killed_process_loses_no_reply(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        platform.faults.next_time(Fault.FAILING, "/notify", times=100)
        async with running_platform_agent(setup):
            await platform.canvas_message(ME, "hello")
            while not platform.faults.met[Fault.FAILING]:
                await anyio.sleep(0.02)
        platform.faults.stop()
        async with running_platform_agent(setup):
            await platform.until(lambda: bool(platform.notifications(ME)))
        assert (setup.echo.heard, platform.notifications(ME)) == (["hello"], ["echo: hello"])


async def test_a_reply_that_arrived_despite_a_broken_connection_is_not_repeated(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        platform.faults.next_time(Fault.LOST, "/notify")
        async with running_platform_agent(setup):
            await platform.canvas_message(ME, "hello", "m-1")
            await platform.canvas_message(ME, "hello", "m-2")
            await platform.canvas_message(ME, "other", "m-3")
            await platform.until(lambda: "echo: other" in platform.notifications(ME))
        assert platform.notifications(ME) == ["echo: hello", "echo: hello", "echo: other"]


async def test_a_failed_lookup_of_a_reply_proves_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        platform.faults.next_time(Fault.LOST, "/notify")
        async with running_platform_agent(setup):
            await platform.canvas_message(ME, "hello")
            await platform.until(lambda: bool(platform.notifications(ME)))
            # The inbox's own requests meet some of them.
            platform.faults.next_time(Fault.UNAUTHORIZED, "/activity", times=4)
            await platform.canvas_message(ME, "other")
            await platform.until(lambda: "echo: other" in platform.notifications(ME))
        assert platform.notifications(ME) == ["echo: hello", "echo: other"]


async def test_rows_with_the_same_timestamp_are_all_read(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        platform.faults.by_chance(1.0, Fault.SAME_TIME)
        async with running_platform_agent(setup):
            for number in range(40):
                await platform.canvas_message(ME, str(number))
            await platform.until(lambda: len(platform.notifications(ME)) == 40)
        assert sorted(setup.echo.heard, key=int) == [str(number) for number in range(40)]


@pytest.mark.parametrize("odd", [{"metadata": {"a": 10**400}}, {"messageId": "\ud800"}, {"contextId": "\x00"}])
async def test_no_invalid_row_stops_the_inbox(tmp_path: Path, odd: dict[str, JsonValue]) -> None:
    said: JsonObject = {"messageId": "m-1", "parts": [{"kind": "text", "text": "odd"}], **odd}
    async with world(tmp_path) as (platform, setup), running_platform_agent(setup):
        platform.faults.by_chance(1.0, Fault.TEXT_BODY)
        platform.write(NewRow(ME, source_id=PEER, method="message/send", request={"params": {"message": said}}))
        await platform.canvas_message(ME, "hello")
        await platform.until(lambda: "echo: hello" in platform.notifications(ME))


async def test_a_row_that_cannot_be_read_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(row: ActivityRow, own_id: str, owner: str) -> OutboxMessage:
        if row.source_id == PEER:
            raise KeyError("unforeseen")
        return read_row(row, own_id, owner)

    monkeypatch.setattr("codex_workspace.platform.inbox.read_row", read)
    async with world(tmp_path) as (platform, setup), running_platform_agent(setup):
        await platform.peer_message(PEER, ME, "odd", "m-1")
        await platform.canvas_message(ME, "hello")
        await platform.until(lambda: "echo: hello" in platform.notifications(ME))
    assert "unforeseen" in caplog.text


@asynccontextmanager
async def peer_that_answers(status: int) -> AsyncIterator[str]:
    """Run an agent that refuses each message so; give its address."""

    async def refuse(_request: Request) -> JSONResponse:
        return JSONResponse({"error": "no"}, status)

    app = Starlette(routes=[StarletteRoute("/", refuse, methods=["POST"])])
    with bind("127.0.0.1", 0) as listener:
        async with serving(app, listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"


@pytest.mark.parametrize("status", [410, 401, 429, 503, 404])
async def test_a_peer_that_rejects_replies_stops_neither_agent_nor_inbox(tmp_path: Path, status: int) -> None:
    async with peer_that_answers(status) as url, running_platform(tmp_path / "platform.sqlite3") as platform:
        platform.add_workspace(ME, delivery="poll", name="me")
        platform.add_workspace(PEER, "peer's", "push", name="peer", url=url)
        setup = PlatformAgentSetup(tmp_path, platform, at_once=3)
        setup.echo.gate.set()
        async with running_platform_agent(setup) as agent:
            for number in range(5):
                await platform.peer_message(PEER, ME, f"do {number}", f"m-{number}")
            await platform.until(lambda: len(setup.echo.heard) == 5)
            await platform.canvas_message(ME, "hello")
            await platform.until(lambda: platform.notifications(ME) == ["echo: hello"])
            assert not agent.stop.is_set()


async def test_large_rows_do_not_stop_the_inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codex_workspace.platform.client.MAX_BODY_BYTES", 50_000)
    async with world(tmp_path) as (platform, setup):
        for number in range(4):
            await platform.peer_message(PEER, ME, "x" * 20_000, f"m-{number}")
        await platform.canvas_message(ME, "hello")
        async with running_platform_agent(setup):
            await platform.until(lambda: platform.notifications(ME) == ["echo: hello"])
        assert len(setup.echo.heard) == 5


async def test_with_one_slot_the_answer_to_a_question_is_still_read(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        setup.at_once = 1
        async with running_platform_agent(setup):
            await platform.canvas_message(ME, "please ask")
            await platform.until(lambda: platform.notifications(ME) == ["which one?"])
            await platform.canvas_message(ME, "the second")
            await platform.until(lambda: platform.notifications(ME) == ["which one?", "echo: the second"])


async def test_a_sent_reply_is_found_behind_many_later_rows(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        platform.faults.next_time(Fault.LOST, "/notify")
        async with running_platform_agent(setup):
            await platform.canvas_message(ME, "hello")
            await platform.until(lambda: bool(platform.notifications(ME)))
            for _ in range(120):
                platform.write(NewRow(ME, method="message/send", request={"x": 1}))
            await platform.canvas_message(ME, "other")
            await platform.until(lambda: "echo: other" in platform.notifications(ME))
        assert platform.notifications(ME) == ["echo: hello", "echo: other"]


async def test_a_switch_of_the_delivery_mode_loses_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = anyio.Event(), anyio.Event()
    real = Dispatcher._submit

    async def slow(self: Dispatcher, message: OutboxMessage) -> None:
        entered.set()
        await go.wait()
        await real(self, message)

    monkeypatch.setattr(Dispatcher, "_submit", slow)
    async with world(tmp_path) as (platform, setup):
        setup.delivery = "auto"
        async with running_platform_agent(setup) as agent:
            await platform.canvas_message(ME, "one")
            await entered.wait()
            modes: tuple[DeliveryMode, ...] = ("push", "poll")
            for mode in modes:
                await agent.api.register({"name": "me"}, agent.url, mode)
                # The next beat fails, and the host registers again.
                platform.revoke_tokens(ME)
                await platform.until(lambda: bool(agent.handler.senders) == (mode == "push"))  # noqa: B023
            go.set()
            await platform.canvas_message(ME, "two")
            await platform.until(lambda: platform.notifications(ME) == ["echo: one", "echo: two"])


async def test_a_failing_database_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    select, find = outbox._select, Deliveries.find

    def no_select(rows: Connection, condition: str, *values: Value) -> list[OutboxMessage]:
        if failed.count("mail") < 2:
            failed.append("mail")
            raise StoreUnavailable("out of reach")
        return select(rows, condition, *values)

    async def no_find(self: Deliveries, key: DeliveryKey, digest: bytes) -> Delivery | None:
        if failed.count("deliveries") < 2:
            failed.append("deliveries")
            raise StoreUnavailable("out of reach")
        return await find(self, key, digest)

    monkeypatch.setattr(outbox, "_select", no_select)
    monkeypatch.setattr(Deliveries, "find", no_find)
    async with world(tmp_path) as (platform, setup), running_platform_agent(setup):
        await platform.canvas_message(ME, "hello")
        await platform.until(lambda: platform.notifications(ME) == ["echo: hello"])
    assert len(failed) == 4


async def test_a_task_that_cannot_be_followed_for_a_while_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codex_workspace.platform.dispatcher.LONGEST_PAUSE_S", 0.01)
    failed = 0
    send = IdempotentHandler.on_message_send

    async def failing(
        self: IdempotentHandler, params: SendMessageRequest, context: ServerCallContext
    ) -> Message | Task:
        nonlocal failed
        if not params.configuration.return_immediately and failed < 30:
            failed += 1
            raise InternalError(message="not now")
        return await send(self, params, context)

    monkeypatch.setattr(IdempotentHandler, "on_message_send", failing)
    async with world(tmp_path) as (platform, setup), running_platform_agent(setup):
        await platform.canvas_message(ME, "hello")
        await platform.until(lambda: platform.notifications(ME) == ["echo: hello"])
    assert failed == 30


async def test_a_late_row_of_the_oldest_timestamp_is_read(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        platform.write(NewRow(ME, method="notify", summary="old", request={"message": "old"}))
        async with running_platform_agent(setup):
            await platform.until(lambda: sum(each.path.endswith("/activity") for each in platform.requests) > 1)
            platform.faults.by_chance(1.0, Fault.SAME_TIME)
            await platform.canvas_message(ME, "late")
            await platform.until(lambda: "echo: late" in platform.notifications(ME))


async def test_the_same_message_in_two_rows_is_answered_once(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        async with running_platform_agent(setup):
            for _ in range(2):
                await platform.peer_message(PEER, ME, "once", "m-1")
            await platform.peer_message(PEER, ME, "another with its id", "m-1")
            await platform.until(lambda: len(platform.activity(PEER)) == 2)
        assert len(setup.echo.heard) == 2


async def test_no_more_messages_are_fetched_than_there_are_slots(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        setup.at_once = 3
        setup.echo.gate = anyio.Event()
        for number in range(10):
            await platform.canvas_message(ME, str(number))
        async with running_platform_agent(setup) as agent:
            while len(setup.echo.heard) < 1:
                await anyio.sleep(0.02)
            await anyio.sleep(1.0)
            assert len(await agent.store.outbox.unfinished()) == 3
            setup.echo.gate.set()
            await platform.until(lambda: len(platform.notifications(ME)) == 10)


async def test_a_failed_task_is_reported_as_failed(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        async with running_platform_agent(setup):
            await platform.canvas_message(ME, "please fail")
            await platform.until(lambda: bool(platform.notifications(ME)))
        assert platform.notifications(ME) == ["The task failed: the work went wrong"]


async def test_a_question_is_sent_and_the_next_message_answers_it(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup), running_platform_agent(setup) as agent:
        await platform.canvas_message(ME, "please ask")
        await platform.until(lambda: platform.notifications(ME) == ["which one?"])
        await platform.canvas_message(ME, "the second")
        await platform.until(lambda: len(platform.notifications(ME)) == 2)
        assert platform.notifications(ME) == ["which one?", "echo: the second"]
        while await agent.store.outbox.unfinished():
            await anyio.sleep(0.02)


async def test_an_idle_agent_reacts_quickly_with_few_requests(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup), running_platform_agent(setup):
        await platform.until(lambda: any(each.path.endswith("/activity") for each in platform.requests))
        before = sum(each.path.endswith("/activity") for each in platform.requests)
        await anyio.sleep(2.0)
        asked = sum(each.path.endswith("/activity") for each in platform.requests) - before
        assert asked <= 6
        start = anyio.current_time()
        await platform.canvas_message(ME, "hello")
        while not setup.echo.heard:
            await anyio.sleep(0.01)
        assert anyio.current_time() - start < 1.0


async def test_a_removed_workspace_stops_the_agent(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, setup):
        async with running_platform_agent(setup) as agent:
            await platform.until(lambda: platform.workspace(ME).heartbeat != {})
            platform.remove(ME)
            await agent.stop.wait()
        async with running_platform_agent(setup) as agent:
            await agent.stop.wait()


async def test_a_rotated_token_is_found(tmp_path: Path) -> None:
    async with world(tmp_path) as (platform, _place):
        other = "33333333-3333-4333-8333-333333333333"
        platform.add_workspace(other, "first", "poll", token_file=tmp_path / ".auth_token")
        (tmp_path / ".auth_token").write_text("first")
        setup = PlatformAgentSetup(tmp_path, platform, workspace_id=other)
        setup.echo.gate.set()
        async with running_platform_agent(setup):
            await platform.canvas_message(other, "one")
            await platform.until(lambda: len(platform.notifications(other)) == 1)
            platform.rotate_token(other)
            await platform.canvas_message(other, "two")
            await platform.until(lambda: len(platform.notifications(other)) == 2)


async def test_the_agent_registers_again_after_an_outage(tmp_path: Path) -> None:
    file = tmp_path / "platform.sqlite3"
    async with anyio.create_task_group() as tasks:
        async with running_platform(file) as platform:
            platform.add_workspace(ME, delivery="poll")
            setup = PlatformAgentSetup(tmp_path, platform)
            setup.echo.gate.set()
            tasks.start_soon(live, setup)
            await platform.canvas_message(ME, "one")
            await platform.until(lambda: len(platform.notifications(ME)) == 1)
        await anyio.sleep(1.0)
        port = int(platform.url.rsplit(":", 1)[1])
        async with running_platform(file, port=port) as again:
            await again.canvas_message(ME, "two")
            await again.until(lambda: len(again.notifications(ME)) == 2)
            await again.until(lambda: any(each.path == "/registry/register" for each in again.requests))
            assert again.notifications(ME) == ["echo: one", "echo: two"]
        tasks.cancel_scope.cancel()


async def live(setup: PlatformAgentSetup) -> None:
    async with running_platform_agent(setup):
        await anyio.sleep_forever()


# --- Pushed ---


async def test_a_pushed_message_is_answered_by_one_message(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as pusher:
        setup = PlatformAgentSetup(tmp_path, pusher, "auto")
        setup.echo.gate.set()
        async with running_platform_agent(setup) as agent:
            await pusher.until(lambda: pusher.workspace(ME).heartbeat != {})
            outcome = await pusher.canvas_message(ME, "hello")
            assert agent.secrets
        assert outcome.result is not None
        assert outcome.result["parts"] == [{"kind": "text", "text": "echo: hello"}]
        assert pusher.shown(ME) == ["echo: hello"]


@pytest.mark.parametrize("sender", [None, PEER])
async def test_a_long_turn_gets_a_promise_and_the_answer(tmp_path: Path, sender: str | None) -> None:
    async with pushing_world(tmp_path) as pusher:
        setup = PlatformAgentSetup(tmp_path, pusher, "push", answer_within_s=0.3)
        async with running_platform_agent(setup):
            await pusher.until(lambda: pusher.workspace(ME).heartbeat != {})
            if sender is None:
                outcome = await pusher.canvas_message(ME, "long")
            else:
                outcome = await pusher.peer_message(sender, ME, "long", "m-1")
            assert outcome.result is not None
            assert outcome.result["parts"] == [{"kind": "text", "text": STILL_WORKING}]
            await pusher.until(lambda: pusher.workspace(ME).active_tasks == 1)
            setup.echo.gate.set()
            if sender is None:
                await pusher.until(lambda: pusher.notifications(ME) == ["echo: long"])
            else:
                await pusher.until(lambda: bool(pusher.activity(PEER)))
                assert pusher.notifications(ME) == []
        assert setup.echo.heard == ["long"]


async def test_a_reply_to_a_peer_waits_for_the_row_that_names_the_peer(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as pusher:
        setup = PlatformAgentSetup(tmp_path, pusher, "push", answer_within_s=0.3)
        async with running_platform_agent(setup):
            await pusher.until(lambda: pusher.workspace(ME).heartbeat != {})
            pusher.faults.next_time(Fault.FAILING, "/activity", times=3)
            await pusher.peer_message(PEER, ME, "secret", "m-1")
            for _ in range(120):
                pusher.write(NewRow(ME, method="notify", summary="x", request={"message": "hi"}))
            setup.echo.gate.set()
            await pusher.until(lambda: bool(pusher.activity(PEER)))
        assert set(pusher.notifications(ME)) <= {"hi"}


async def test_a_pushed_answer_of_a_peers_gets_no_late_answer(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as pusher:
        setup = PlatformAgentSetup(tmp_path, pusher, "push", answer_within_s=0.3)
        async with running_platform_agent(setup):
            await pusher.until(lambda: pusher.workspace(ME).heartbeat != {})
            await pusher.peer_message(PEER, ME, "it is done", "m-1", {"in_reply_to": "m-0"})
            setup.echo.gate.set()
            await pusher.until(lambda: bool(pusher.notifications(ME)))
        assert "it is done" in pusher.notifications(ME)[0]
        assert pusher.activity(PEER) == []


async def test_two_pushed_agents_do_not_answer_each_other_for_ever(tmp_path: Path) -> None:
    options = StandInOptions(wait_s=5.0, tells_secret=True)
    async with running_platform(tmp_path / "platform.sqlite3", options=options) as platform:
        platform.add_workspace(ME, delivery="push", name="me")
        platform.add_workspace(PEER, "peer's", "push", name="peer")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / ".auth_token").write_text("peer's")
        setup = PlatformAgentSetup(tmp_path, platform, "push", answer_within_s=0.1)
        other = PlatformAgentSetup(tmp_path / "other", platform, "push", workspace_id=PEER, answer_within_s=0.1)
        async with running_platform_agent(setup), running_platform_agent(other):
            await platform.until(lambda: all(platform.workspace(each).heartbeat for each in (ME, PEER)))
            await platform.peer_message(PEER, ME, "ping", "m-1")
            setup.echo.gate.set()
            await platform.until(lambda: len(other.echo.heard) == 1)
            other.echo.gate.set()
            await platform.until(lambda: len(platform.notifications(PEER)) == 1)
            # Whatever it would still send would be there before the answer to this.
            await platform.canvas_message(ME, "still there?")
        assert ["ping" in text for text in setup.echo.heard] == [True, False]
        assert len(other.echo.heard) == 1
        assert "ping" in platform.notifications(PEER)[0]


async def test_a_long_turn_survives_a_kill(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as pusher:
        setup = PlatformAgentSetup(tmp_path, pusher, "push", answer_within_s=0.3)
        async with running_platform_agent(setup):
            await pusher.until(lambda: pusher.workspace(ME).heartbeat != {})
            await pusher.canvas_message(ME, "long")
        setup.echo.gate.set()
        async with running_platform_agent(setup):
            await pusher.until(lambda: pusher.notifications(ME) == ["echo: long"])


async def test_a_redelivered_message_joins_its_turn(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as pusher:
        setup = PlatformAgentSetup(tmp_path, pusher, "push", answer_within_s=30.0)
        async with running_platform_agent(setup):
            await pusher.until(lambda: pusher.workspace(ME).heartbeat != {})
            outcome = await pusher.canvas_message(ME, "long")
            assert outcome.status == 202
            setup.echo.gate.set()
            await pusher.until(lambda: bool(pusher.shown(ME)))
        assert (setup.echo.heard, pusher.shown(ME)) == (["long"], ["echo: long"])
        assert len(pusher.pushes) == 2
