"""The stand-in of the platform, by the client that the agent has: the rules and traps of the platform."""

import json
import os
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.values import JsonObject
from codex_workspace.config.environment import Secret
from codex_workspace.devkit.platform.app import StandInOptions, StandInPlatform, running_platform
from codex_workspace.devkit.platform.faults import Fault, Faults, read_faults
from codex_workspace.devkit.platform.records import NewRow
from codex_workspace.platform.client import PlatformClient, WorkspaceToken, open_platform_client
from codex_workspace.platform.client_types import (
    CursorLost,
    PlatformBusy,
    PlatformRejected,
    PlatformUnauthorized,
    PlatformUnreachable,
    text_of_parts,
)
from codex_workspace.server.app import serving
from codex_workspace.server.sockets import bind
from tests.docs.test_docs import PLATFORM, path_with_curl, the_snippet
from tests.support.paths import ROOT

ADA = "11111111-1111-4111-8111-111111111111"
BOB = "22222222-2222-4222-8222-222222222222"
IDLE: JsonObject = {"active_tasks": 0, "error_rate": 0.0}


@asynccontextmanager
async def workspace(
    platform: StandInPlatform, workspace_id: str = ADA, token: str = "ada's"
) -> AsyncIterator[PlatformClient]:
    """A workspace that polls, and the calls that it makes."""
    platform.add_workspace(workspace_id, token, "poll")
    async with api_of(platform, workspace_id, token) as api:
        yield api


@asynccontextmanager
async def api_of(platform: StandInPlatform, workspace_id: str, token: str) -> AsyncIterator[PlatformClient]:
    async with open_platform_client(
        platform.url, workspace_id, WorkspaceToken(Path("/dev/null/token"), from_environment=Secret(token))
    ) as api:
        yield api


@dataclass
class Agent:
    """An agent at an address: answers each message as configured, and records it."""

    url: str
    answer: Response = field(default_factory=lambda: said("done"))
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    may_answer: anyio.Event = field(default_factory=anyio.Event)

    async def reply(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.headers.append(dict(request.headers))
        await self.may_answer.wait()
        return self.answer


def said(text: str) -> Response:
    return JSONResponse(
        {"id": 1, "jsonrpc": "2.0", "result": {"kind": "message", "parts": [{"kind": "text", "text": text}]}}
    )


@asynccontextmanager
async def agent_at_address() -> AsyncIterator[Agent]:
    with bind("127.0.0.1", 0) as listener:
        agent = Agent(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        agent.may_answer.set()
        app = Starlette(routes=[Route("/", agent.reply, methods=["POST"])])
        async with serving(app, listener):
            yield agent
            agent.may_answer.set()


# --- Being there ---


async def test_a_token_is_issued_once_and_required_afterwards(tmp_path: Path) -> None:
    async with running_platform() as platform:
        async with open_platform_client(platform.url, ADA, WorkspaceToken(tmp_path / "token")) as api:
            await api.register({"name": "ada"}, "http://127.0.0.1:1/", "push")
            first = (tmp_path / "token").read_text()
            await api.register({"name": "ada"}, "http://127.0.0.1:2/", None)
        assert (tmp_path / "token").read_text() == first
        assert platform.workspace(ADA).url == "http://127.0.0.1:2/"
        async with httpx.AsyncClient() as http:
            body = {"id": ADA, "agent_card": {}, "url": "http://127.0.0.1:1/"}
            refused = await http.post(f"{platform.url}/registry/register", json=body)
        assert (refused.status_code, refused.json()) == (401, {"error": "missing workspace auth token"})
        platform.revoke_tokens(ADA)
        async with open_platform_client(platform.url, ADA, WorkspaceToken(tmp_path / "token")) as api:
            await api.register({"name": "ada"}, "http://127.0.0.1:1/", None)
        assert (tmp_path / "token").read_text() != first


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"agent_card": None}, "id and agent_card are required"),
        ({"delivery_mode": "pull"}, "delivery_mode must be 'push' or 'poll'"),
        ({"url": ""}, "url is required for push-mode workspaces"),
        ({"url": "http://10.0.0.1/"}, "url resolves to a private address"),
        ({"url": "file:///etc"}, "invalid url"),
        ({"url": "", "delivery_mode": "poll"}, None),
        ({"url": "http://localhost:8000"}, None),
    ],
)
async def test_unregistered_workspaces_are_rejected(change: JsonObject, error: str | None) -> None:
    body: JsonObject = {"id": ADA, "agent_card": {}, "url": "http://127.0.0.1:1/", **change}
    async with running_platform() as platform, httpx.AsyncClient() as http:
        answer = await http.post(f"{platform.url}/registry/register", json=body)
    assert (answer.status_code, answer.json().get("error")) == (200 if error is None else 400, error)


async def test_the_delivery_mode_is_the_given_or_the_stored_one(tmp_path: Path) -> None:
    async with running_platform() as platform:
        platform.add_workspace(ADA, delivery="poll")
        async with open_platform_client(platform.url, ADA, WorkspaceToken(tmp_path / "token")) as api:
            assert (await api.register({}, "", None))[0] == "poll"
            assert (await api.register({}, "http://127.0.0.1:1", "push"))[0] == "push"
            assert (await api.register({}, "http://127.0.0.1:1", None))[0] == "push"


async def test_a_removed_workspace_stays_removed_despite_registration(tmp_path: Path) -> None:
    async with running_platform() as platform:
        platform.add_workspace(ADA, "ada's", "poll")
        async with open_platform_client(
            platform.url, ADA, WorkspaceToken(tmp_path / "token", from_environment=Secret("ada's"))
        ) as api:
            assert not await api.is_removed()
            platform.remove(ADA)
            assert await api.is_removed()
            with pytest.raises(PlatformUnauthorized):
                await api.heartbeat(IDLE)
            await api.register({}, "", "poll")
            with pytest.raises(PlatformUnauthorized):
                await api.heartbeat(IDLE)
        assert platform.workspace(ADA).status == "removed"


async def test_a_heartbeat_reports_the_agents_state() -> None:
    async with running_platform() as platform, workspace(platform) as api:
        await api.heartbeat({"active_tasks": 2, "current_task": "thinking", "error_rate": 0.6})
        seen = platform.workspace(ADA)
        assert (seen.beats, seen.active_tasks, seen.status) == (1, 2, "degraded")
        await api.heartbeat(IDLE)
        assert platform.workspace(ADA).status == "online"


async def test_parents_children_and_siblings_may_communicate(tmp_path: Path) -> None:
    carol = "33333333-3333-4333-8333-333333333333"
    async with running_platform() as platform, workspace(platform) as api:
        platform.add_workspace(BOB, "bob's", "poll", name="bob", role="reviewer", parent_id=ADA)
        platform.add_workspace(carol, "carol's", "poll", name="carol")
        assert {peer.name for peer in await api.peers()} == {"bob", "carol"}
        headers = {"Authorization": "Bearer bob's", "X-Workspace-ID": BOB}
        async with httpx.AsyncClient(base_url=platform.url, headers=headers) as http:
            assert (await http.get(f"/registry/discover/{ADA}")).status_code == 200
            assert (await http.get(f"/registry/discover/{carol}")).status_code == 403
        async with api_of(platform, BOB, "bob's") as of_bob:
            assert [peer.id for peer in await of_bob.peers()] == [ADA]
            for refused in (of_bob.send(carol, "hello", "m1"), of_bob.delegate(carol, "work")):
                with pytest.raises(PlatformRejected) as raised:
                    await refused
                assert raised.value.status == 403


async def test_stored_state_survives_a_restart(tmp_path: Path) -> None:
    async with running_platform(tmp_path / "platform.db") as platform:
        platform.add_workspace(ADA, "ada's", "poll")
        await platform.canvas_message(ADA, "hello")
    async with running_platform(tmp_path / "platform.db") as platform, api_of(platform, ADA, "ada's") as api:
        assert len(await api.activity()) == 1


# --- The inbox ---


async def test_without_a_cursor_the_newest_come_first_with_one_the_oldest(tmp_path: Path) -> None:
    async with running_platform() as platform, workspace(platform) as api:
        for number in range(5):
            await platform.canvas_message(ADA, f"m{number}")
        assert [text_of(row) for row in await api.activity(limit=2)] == ["m3", "m4"]
        first = (await api.activity())[0]
        assert [text_of(row) for row in await api.activity(since_id=first.id, limit=2)] == ["m1", "m2"]
        assert await api.activity(since_secs=1, before_ts="2020-01-01T00:00:00Z") == []
        with pytest.raises(CursorLost):
            await api.activity(since_id="00000000-0000-0000-0000-000000000000")
        platform.prune(ADA)
        with pytest.raises(CursorLost):
            await api.activity(since_id=first.id)


@pytest.mark.parametrize(("era", "seen"), [("may", []), ("august", ["second"])])
async def test_paging_by_id_may_skip_one_of_two_rows_of_the_same_moment(era: str, seen: list[str]) -> None:
    options = StandInOptions(era="may" if era == "may" else "august")
    async with running_platform(options=options) as platform, workspace(platform) as api:
        await platform.canvas_message(ADA, "first")
        platform.faults.next_time(Fault.SAME_TIME)
        await platform.canvas_message(ADA, "second")
        first, second = await api.activity()
        assert first.created_at == second.created_at
        assert [text_of(row) for row in await api.activity(since_id=first.id)] == seen
        assert await api.acknowledge(second.seq or 0) == (era == "august")


@pytest.mark.parametrize(
    "query",
    [{"since_secs": "0"}, {"since_secs": "x"}, {"source": "x"}, {"peer_id": "x"}, {"before_ts": "yesterday"}],
)
async def test_unlisted_rows(query: dict[str, str]) -> None:
    async with running_platform() as platform:
        platform.add_workspace(ADA, "ada's", "poll")
        async with httpx.AsyncClient(headers={"Authorization": "Bearer ada's"}) as http:
            answer = await http.get(f"{platform.url}/workspaces/{ADA}/activity", params=query)
    assert answer.status_code == 400


async def test_the_rows_that_are_no_work() -> None:
    async with running_platform() as platform, workspace(platform) as api:
        await api.notify("hello")
        async with httpx.AsyncClient(headers={"Authorization": "Bearer ada's"}) as http:
            row = {"activity_type": "a2a_receive", "summary": "delegated", "source_id": ADA}
            body = {**row, "request_body": {"task": "review"}}
            answer = await http.post(f"{platform.url}/workspaces/{ADA}/activity", json=body)
            assert answer.status_code == 200
        file_id = platform.upload(ADA, "a.txt", b"content")
        await platform.peer_message(ADA, ADA, "wake up")
        notified, reported, upload, prompt = await api.activity()
    assert (notified.method, notified.source_id, notified.request) == ("notify", None, None)
    assert (reported.source_id, reported.request) == (ADA, {"task": "review"})
    assert upload.method == "chat_upload_receive"
    assert upload.request is not None
    assert upload.request["uri"] == f"platform-pending:{ADA}/{file_id}"
    assert (prompt.source_id, text_of(prompt)) == (ADA, "wake up")


async def test_a_file_is_there_until_it_was_fetched() -> None:
    async with running_platform() as platform:
        platform.add_workspace(ADA, "ada's", "poll")
        file_id = platform.upload(ADA, "a.txt", b"content")
        path = f"{platform.url}/workspaces/{ADA}/pending-uploads/{file_id}"
        async with httpx.AsyncClient(headers={"Authorization": "Bearer ada's"}) as http:
            assert (await http.get(f"{path}/content")).content == b"content"
            await http.post(f"{path}/ack")
            assert (await http.get(f"{path}/content")).status_code == 404


async def test_a_rows_body_may_be_text() -> None:
    async with running_platform() as platform:
        platform.add_workspace(ADA, "ada's", "poll")
        await platform.canvas_message(ADA, "hello")
        platform.faults.next_time(Fault.TEXT_BODY)
        async with httpx.AsyncClient(headers={"Authorization": "Bearer ada's"}) as http:
            rows = [(await http.get(f"{platform.url}/workspaces/{ADA}/activity")).json()[0] for _ in range(2)]
    assert json.loads(rows[0]["request_body"]) == rows[1]["request_body"]


async def test_a_workspace_cannot_act_for_another() -> None:
    async with running_platform() as platform, workspace(platform):
        platform.add_workspace(BOB, "bob's", "poll")
        async with httpx.AsyncClient(base_url=platform.url, headers={"Authorization": "Bearer ada's"}) as http:
            body = {"activity_type": "a2a_receive", "source_id": BOB}
            assert (await http.post(f"/workspaces/{ADA}/activity", json=body)).status_code == 403
            assert (await http.get(f"/workspaces/{BOB}/activity")).status_code == 401
            spoofed = await http.post(f"/workspaces/{ADA}/a2a", json={}, headers={"X-Workspace-ID": BOB})
            assert spoofed.status_code == 401


async def test_user_notifications_may_be_disabled() -> None:
    async with running_platform() as platform, workspace(platform) as api:
        platform.store.let_talk_to_user(ADA, allowed=False)
        with pytest.raises(PlatformRejected, match="talk_to_user_disabled"):
            await api.notify("hello")
        assert platform.notifications(ADA) == []


# --- Push ---


async def test_a_pushed_message_is_a_post_and_its_answer_is_shown() -> None:
    async with running_platform() as platform, agent_at_address() as agent:
        platform.add_workspace(ADA, "ada's", "push", url=agent.url)
        outcome = await platform.canvas_message(ADA, "hello", "m1")
        assert platform.shown(ADA) == ["done"]
        (row,) = platform.activity(ADA)
    assert outcome.status == 200
    assert {"authorization", "a2a-version", "x-workspace-id"}.isdisjoint(agent.headers[0])
    request = json.loads(agent.bodies[0])
    assert (request["method"], request["params"]["message"]["messageId"]) == ("message/send", "m1")
    assert row["response_body"] == outcome.body
    assert isinstance(row["duration_ms"], int)


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (Response(status_code=200), 200, "agent returned empty response body"),
        (JSONResponse({"error": "not configured"}, 503), 503, "not configured"),
        (JSONResponse({"error": {"code": 1}}, 503), 503, "Service Unavailable"),
    ],
)
async def test_a_failure_is_reported_to_the_caller(answer: Response, status: int, error: str) -> None:
    async with running_platform() as platform, agent_at_address() as agent:
        agent.answer = answer
        platform.add_workspace(ADA, "ada's", "push", url=agent.url)
        outcome = await platform.canvas_message(ADA, "hello")
        assert platform.shown(ADA) == []
    assert (outcome.status, outcome.body, outcome.failed) == (status, {"error": error}, True)


async def test_an_unreachable_and_a_missing_address() -> None:
    async with running_platform() as platform:
        platform.add_workspace(ADA, delivery="push", url="http://127.0.0.1:9/")
        platform.add_workspace(BOB, delivery="push")
        assert (await platform.canvas_message(ADA, "hello")).status == 502
        assert (await platform.canvas_message(BOB, "hello")).status == 503


async def test_a_timed_out_message_is_redelivered_when_idle() -> None:
    options = StandInOptions(wait_s=0.2)
    async with running_platform(options=options) as platform, agent_at_address() as agent:
        platform.add_workspace(ADA, "ada's", "push", url=agent.url)
        agent.may_answer = anyio.Event()
        outcome = await platform.canvas_message(ADA, "hello", "m1")
        assert outcome.status == 202
        again = await platform.canvas_message(ADA, "hello", "m1")
        assert _queue_id(again.body) == _queue_id(outcome.body), "a message waits once"
        agent.may_answer.set()
        async with api_of(platform, ADA, "ada's") as api:
            await api.heartbeat({"active_tasks": 1})
            assert len(agent.bodies) == 2
            await api.heartbeat(IDLE)
            await platform.until(lambda: platform.shown(ADA) == ["done"])
    assert agent.bodies[0] == agent.bodies[2]
    assert [push.busy for push in platform.pushes] == [True, True, False]


async def test_an_answer_that_is_late_twice_is_lost() -> None:
    async with running_platform(options=StandInOptions(wait_s=0.2)) as platform, agent_at_address() as agent:
        platform.add_workspace(ADA, "ada's", "push", url=agent.url)
        agent.may_answer = anyio.Event()
        queue_id = _queue_id((await platform.canvas_message(ADA, "hello")).body)
        async with api_of(platform, ADA, "ada's") as api:
            await api.heartbeat(IDLE)
            await platform.until(lambda: platform.store.queued(ADA, queue_id) is not None and len(platform.pushes) == 2)
            await platform.until(lambda: (platform.store.queued(ADA, queue_id) or {})["status"] == "completed")
            agent.may_answer.set()
            await api.heartbeat(IDLE)
        assert platform.shown(ADA) == []


async def test_an_agent_with_its_own_queue_gets_no_redelivery() -> None:
    async with running_platform(options=StandInOptions(wait_s=0.1)) as platform, agent_at_address() as agent:
        platform.add_workspace(ADA, "ada's", "push", url=agent.url)
        agent.may_answer = anyio.Event()
        async with api_of(platform, ADA, "ada's") as api:
            await api.heartbeat({**IDLE, "runtime_metadata": {"capabilities": {"session": True}}})
        outcome = await platform.canvas_message(ADA, "hello")
    assert outcome.status == 503
    assert isinstance(outcome.body, dict)
    assert outcome.body["native_session"] is True


# --- Work ---


async def test_a_delegation_is_sent_once_and_its_result_listed() -> None:
    async with running_platform(options=StandInOptions(result_rows=True)) as platform, agent_at_address() as agent:
        platform.add_workspace(BOB, "bob's", "push", url=agent.url)
        async with workspace(platform) as api:
            delegation_id = await api.delegate(BOB, "review it", "key")
            assert await api.delegate(BOB, "review it", "key") == delegation_id
            await platform.until(lambda: platform.delegations[0].status == "completed")
            (listed,) = await api.delegations()
            (row,) = await api.activity()
    assert (listed.id, listed.status, listed.result) == (delegation_id, "completed", "done")
    message = json.loads(agent.bodies[0])["params"]["message"]
    assert message["messageId"] == message["metadata"]["delegation_id"] == delegation_id
    assert message["parts"] == [{"type": "text", "text": "review it"}]
    assert len(agent.bodies) == 1
    assert (row.method, row.source_id) == ("delegate_result", ADA)
    assert row.response == {"text": "done", "delegation_id": delegation_id}


async def test_the_list_cuts_a_long_result_and_its_row_has_all() -> None:
    long = "ö" * 1000
    async with running_platform() as platform, agent_at_address() as agent:
        agent.answer = said(long)
        platform.add_workspace(BOB, "bob's", "push", url=agent.url)
        async with workspace(platform) as api:
            delegation_id = await api.delegate(BOB, "review it")
            await platform.until(lambda: platform.delegations[0].status == "completed")
            assert (await api.delegations())[0].result == "ö" * 150
            (row,) = await api.activity(type="delegation")
            assert await api.activity() == []
    assert (row.method, row.source_id) == ("delegate_result", ADA)
    assert row.response == {"text": long, "delegation_id": delegation_id}


async def test_work_that_did_not_reach_its_agent_is_given_once_more_and_fails() -> None:
    async with running_platform(options=StandInOptions(retry_s=0.01)) as platform, workspace(platform) as api:
        platform.add_workspace(BOB, "bob's", "push", url="http://127.0.0.1:9/")
        await api.delegate(BOB, "review it")
        await platform.until(lambda: platform.delegations[0].status == "failed")
        assert len(platform.pushes) == 2
        assert (await api.delegations())[0].error == "failed to reach workspace agent"


async def test_august_lists_work_that_was_received_too() -> None:
    async with running_platform(options=StandInOptions(era="august")) as platform, agent_at_address() as agent:
        platform.add_workspace(BOB, "bob's", "push", url=agent.url)
        async with workspace(platform) as api, api_of(platform, BOB, "bob's") as of_bob:
            delegation_id = await api.delegate(BOB, "review it")
            await platform.until(lambda: platform.delegations[0].status == "completed")
            assert [each.id for each in await of_bob.delegations()] == [delegation_id]
    assert json.loads(agent.bodies[0])["params"]["message"]["parts"] == [{"kind": "text", "text": "review it"}]


async def test_the_result_of_an_inbox_delegation_is_the_inbox_acknowledgement() -> None:
    async with running_platform() as platform, workspace(platform) as api:
        platform.add_workspace(BOB, "bob's", "poll")
        await api.delegate(BOB, "review it")
        await platform.until(lambda: platform.delegations[0].status == "completed")
        (listed,) = await api.delegations()
    assert json.loads(listed.result)["status"] == "queued"


async def test_a_timed_out_delegation_completes_later() -> None:
    async with running_platform(options=StandInOptions(wait_s=0.1)) as platform, agent_at_address() as agent:
        platform.add_workspace(BOB, "bob's", "push", url=agent.url)
        agent.may_answer = anyio.Event()
        async with workspace(platform) as api, api_of(platform, BOB, "bob's") as of_bob:
            await api.delegate(BOB, "review it")
            await platform.until(lambda: platform.delegations[0].status == "queued")
            agent.may_answer.set()
            await of_bob.heartbeat(IDLE)
            await platform.until(lambda: platform.delegations[0].status == "completed")
            assert (await api.delegations())[0].result == "done"


async def test_memories_are_found_by_their_text() -> None:
    async with running_platform() as platform, workspace(platform) as api:
        await api.commit_memory("The build needs Node 20.")
        await api.commit_memory("The user likes tea.")
        assert [memory.content for memory in await api.recall_memories("user tea")] == ["The user likes tea."]
        assert len(await api.recall_memories()) == 2


# --- Faults ---


@pytest.mark.parametrize(
    ("fault", "error", "done"),
    [
        (Fault.UNAUTHORIZED, PlatformUnauthorized, False),
        (Fault.TOO_MANY, PlatformBusy, False),
        (Fault.FAILING, PlatformUnreachable, False),
        (Fault.LOST, PlatformUnreachable, True),
    ],
)
async def test_each_fault_has_a_status_and_may_have_taken_effect(
    fault: Fault, error: type[Exception], done: bool
) -> None:
    async with running_platform() as platform, workspace(platform) as api:
        platform.faults.next_time(fault, "/notify")
        with pytest.raises(error):
            await api.notify("hello")
        assert platform.notifications(ADA) == (["hello"] if done else [])
        await api.notify("once more")
        assert platform.notifications(ADA)[-1] == "once more"
    assert platform.faults.met[fault] == 1


async def test_a_reply_that_is_lost_on_purpose_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with running_platform() as platform, workspace(platform) as api:
        platform.faults.next_time(Fault.LOST, "/notify")
        with pytest.raises(PlatformUnreachable):
            await api.notify("hello")
    assert "without completing response" not in caplog.text


async def test_a_reply_may_be_delayed() -> None:
    async with running_platform() as platform, workspace(platform) as api:
        platform.faults.late_s = 0.05
        platform.faults.next_time(Fault.LATE)
        await api.notify("hello")
        assert (platform.notifications(ADA), platform.faults.met[Fault.LATE]) == (["hello"], 1)


async def test_a_token_that_is_rotated_is_in_the_provisioners_file(tmp_path: Path) -> None:
    async with running_platform() as platform:
        platform.add_workspace(ADA, "old", "poll", token_file=tmp_path / ".auth_token")
        platform.faults.next_time(Fault.ROTATED)
        token = WorkspaceToken(tmp_path / "token", [tmp_path / ".auth_token"], Secret("old"))
        async with open_platform_client(platform.url, ADA, token) as api:
            await api.notify("hello")
        assert [asked.status for asked in platform.requests] == [401, 200]


async def test_a_cursor_is_pruned_between_two_polls() -> None:
    async with running_platform() as platform, workspace(platform) as api:
        await platform.canvas_message(ADA, "first")
        await platform.canvas_message(ADA, "second")
        first = (await api.activity())[0]
        platform.faults.next_time(Fault.PRUNED)
        with pytest.raises(CursorLost):
            await api.activity(since_id=first.id)
        assert [text_of(row) for row in await api.activity()] == ["second"]


async def test_too_many_requests_are_too_many() -> None:
    options = StandInOptions(rate_per_minute=2)
    async with running_platform(options=options) as platform, workspace(platform) as api:
        await api.peers()
        await api.peers()
        with pytest.raises(PlatformBusy) as raised:
            await api.peers()
        assert 0 < raised.value.retry_after_s <= 61


async def test_random_faults_spare_the_user_and_stop_on_request() -> None:
    async with running_platform(faults=Faults(seed=7)) as platform, workspace(platform) as api:
        platform.faults.by_chance(1.0, Fault.FAILING)
        await platform.canvas_message(ADA, "hello")
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{platform.url}/stand-in/shown/{ADA}")).json() == []
        with pytest.raises(PlatformUnreachable):
            await api.activity()
        platform.faults.stop()
        assert len(await api.activity()) == 1


def test_faults_are_read_by_their_names() -> None:
    assert read_faults("429, lost=0.5") == {Fault.TOO_MANY: 0.1, Fault.LOST: 0.5}
    assert set(read_faults("all=0.2")) == set(Fault)
    assert read_faults("") == {}
    for wrong in ("418", "lost=2", "lost=often"):
        with pytest.raises(ConfigError, match="--faults"):
            read_faults(wrong)


async def test_rows_of_any_kind_can_be_written() -> None:
    async with running_platform() as platform, workspace(platform) as api:
        platform.write(NewRow(ADA, method="odd", request={"parts": []}))
        (row,) = await api.activity()
    assert (row.method, row.request) == ("odd", {"parts": []})


def text_of(row: object) -> str:
    request = getattr(row, "request", None)
    assert isinstance(request, dict)
    return text_of_parts(request["params"]["message"]["parts"])


def _queue_id(body: object) -> str:
    assert isinstance(body, dict)
    queue_id = body["queue_id"]
    assert isinstance(queue_id, str)
    return queue_id


async def test_documented_platform_commands_work(tmp_path: Path) -> None:
    here = {".venv/bin/python": sys.executable, "--port 8080": f"--port 0 --file {tmp_path / 'p.db'}"}
    command = the_snippet(PLATFORM, "platform").replace("\n", "")
    for told, meant in here.items():
        command = command.replace(told, meant)
    env = os.environ | {"PATH": path_with_curl(tmp_path)}
    async with await anyio.open_process(shlex.split(command), stderr=None, cwd=ROOT, env=env) as process:
        assert process.stdout is not None
        lines = BufferedByteReceiveStream(process.stdout)
        url = (await lines.receive_until(b"\n", 1000)).decode().removeprefix("platform at ")
        canvas = the_snippet(PLATFORM, "canvas").replace("http://127.0.0.1:8080", url)
        workspace_id = canvas.partition("/workspaces/")[2].partition("/")[0]
        async with open_platform_client(url, workspace_id, WorkspaceToken(tmp_path / "token")) as api:
            assert (await api.register({"name": "ada"}, "", None))[0] == "poll"
            asked = await anyio.run_process(["sh", "-ec", canvas], env=env)
            assert json.loads(asked.stdout)["status"] == "queued"
            assert [text_of(row) for row in await api.activity()] == ["What is in this folder?"]
            await api.notify("hello \x1b[31myourself")
            assert await lines.receive_until(b"\n", 1000) == rb"ada: hello \x1b[31myourself"
        process.terminate()
        assert await process.wait() == 0
