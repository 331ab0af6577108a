"""The platform's responses as values, and its errors; also covers `client_types`.

Covers `platform.client_types`.
"""

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
import pytest

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.environment import Secret
from codex_workspace.devkit.platform.app import running_platform
from codex_workspace.platform.client import MAX_BODY_BYTES, PlatformClient, WorkspaceToken, open_platform_client
from codex_workspace.platform.client_types import (
    ActivityRow,
    CursorLost,
    PlatformBusy,
    PlatformError,
    PlatformRejected,
    PlatformUnauthorized,
    PlatformUnreachable,
    WorkspaceRemoved,
    text_of_result,
)

ME = "11111111-1111-4111-8111-111111111111"


@dataclass
class Far:
    """Returns prepared responses and records the requests."""

    answers: list[httpx.Response] = field(default_factory=list)
    seen: list[httpx.Request] = field(default_factory=list)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        return self.answers.pop(0)


@asynccontextmanager
async def api_to(far: Far, token: WorkspaceToken) -> AsyncIterator[PlatformClient]:
    async with open_platform_client("http://platform.test", ME, token, httpx.MockTransport(far)) as api:
        yield api


@pytest.fixture
def token(tmp_path: Path) -> WorkspaceToken:
    return WorkspaceToken(tmp_path / "token")


async def test_an_issued_token_is_stored_once_with_mode_0600(tmp_path: Path, token: WorkspaceToken) -> None:
    async with running_platform() as platform:
        async with open_platform_client(platform.url, ME, token) as api:
            delivery, inbound_secret = await api.register({"name": "a"}, "http://127.0.0.1:1", "poll")
            minted = (tmp_path / "token").read_text()
            await api.register({"name": "a"}, "http://127.0.0.1:1", "poll")
            await api.notify("hello")
        assert platform.notifications(ME) == ["hello"]
        assert (delivery, inbound_secret is not None) == ("poll", True)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert WorkspaceToken(tmp_path / "token").current == Secret(minted)
    assert minted not in repr(token.current)


async def test_tokens_are_reported_for_redaction(tmp_path: Path) -> None:
    learned: list[Secret] = []
    provisioned = tmp_path / ".auth_token"
    async with running_platform() as platform:
        platform.add_workspace(ME, None, "poll", token_file=provisioned)
        token = WorkspaceToken(tmp_path / "token", [provisioned])
        token.on_secret = learned.append
        async with open_platform_client(platform.url, ME, token) as api:
            _, inbound_secret = await api.register({"name": "a"}, "http://127.0.0.1:1", "poll")
            platform.rotate_token(ME)
            await api.notify("hello")
    assert inbound_secret is not None
    learned.remove(inbound_secret)
    kept = [Secret(file.read_text().strip()) for file in (tmp_path / "token", provisioned)]
    assert learned == kept


async def test_a_rotated_token_is_read_again(tmp_path: Path) -> None:
    provisioned = tmp_path / ".auth_token"
    async with running_platform() as platform:
        platform.add_workspace(ME, "old", "poll", token_file=provisioned)
        provisioned.write_text("old\n")
        token = WorkspaceToken(tmp_path / "token", [provisioned], Secret("of the environment"))
        platform.rotate_token(ME)
        async with open_platform_client(platform.url, ME, token) as api:
            await api.notify("hello")
            assert [asked.status for asked in platform.requests] == [401, 200]
            platform.revoke_tokens(ME)
            with pytest.raises(PlatformUnauthorized):
                await api.notify("hello")
        assert [asked.status for asked in platform.requests][2:] == [401, 401], "each token is tried once"


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "ümläut", "x" * 5000])
async def test_a_file_without_a_valid_token_is_skipped(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    token = WorkspaceToken(tmp_path / "token", from_environment=Secret("given"))
    assert token.current == Secret("given")


@pytest.mark.parametrize(
    ("status", "said", "headers", "error"),
    [
        (401, {"error": "missing workspace auth token"}, {}, PlatformUnauthorized),
        (410, {"error": "workspace removed", "hint": "x"}, {}, WorkspaceRemoved),
        (410, {"error": "since_id cursor not found (x); omit since_id to reset"}, {}, CursorLost),
        (429, {"error": "rate limit exceeded"}, {"Retry-After": "7"}, PlatformBusy),
        (503, {"error": "x", "busy": True, "retry_after": 7}, {}, PlatformBusy),
        (503, {"error": "x", "code": "platform_unavailable"}, {}, PlatformUnreachable),
        (500, None, {}, PlatformUnreachable),
        (302, None, {"Location": "http://elsewhere.test"}, PlatformRejected),
        (400, {"error": "since_secs"}, {}, PlatformRejected),
        (200, None, {}, PlatformUnreachable),
    ],
)
async def test_each_error_status_has_its_exception(
    token: WorkspaceToken, status: int, said: JsonValue, headers: dict[str, str], error: type[PlatformError]
) -> None:
    answer = httpx.Response(status, json=said, headers=headers) if said else httpx.Response(status, headers=headers)
    async with api_to(Far([answer]), token) as api:
        with pytest.raises(error) as raised:
            await api.activity(since_id="x")
    if isinstance(raised.value, PlatformBusy):
        assert raised.value.retry_after_s == 7


async def test_rows_come_oldest_first_and_bodies_may_be_texts(token: WorkspaceToken) -> None:
    newest_first = [
        {"id": "3", "created_at": "t3", "request_body": '{"params": {}}', "seq": 3},
        {"created_at": "without an id"},
        "no row",
        {"id": "2", "created_at": "t2", "request_body": "no json", "duration_ms": 5},
    ]
    far = Far([httpx.Response(200, json=newest_first)])
    async with api_to(far, token) as api:
        rows = await api.activity(since_secs=600, limit=10_000)
    assert rows == [ActivityRow("2", "t2", has_response=True), ActivityRow("3", "t3", request={"params": {}}, seq=3)]
    assert far.seen[0].url.params["limit"] == "10000"


async def test_a_message_to_another_agent_names_its_sender(token: WorkspaceToken) -> None:
    far = Far([httpx.Response(200, json={"status": "queued", "delivery_mode": "poll"})])
    async with api_to(far, token) as api:
        await api.send("a/b", "hello", "m1", {"in_reply_to": "m0"})
    assert far.seen[0].url.raw_path == b"/workspaces/a%2Fb/a2a"
    assert far.seen[0].headers["x-workspace-id"] == ME


async def test_an_error_of_another_agent_is_a_rejection(token: WorkspaceToken) -> None:
    far = Far([httpx.Response(200, json={"error": {"code": -32603, "message": "agent\nnot configured"}})])
    async with api_to(far, token) as api:
        with pytest.raises(PlatformRejected, match="agent not configured"):
            await api.send("b", "hello", "m1")


@pytest.mark.parametrize(
    ("status", "error"),
    [(410, PlatformRejected), (404, PlatformRejected), (401, PlatformUnreachable), (500, PlatformUnreachable)],
)
async def test_another_agents_status_is_not_the_platforms(
    token: WorkspaceToken, status: int, error: type[PlatformError]
) -> None:
    token.store(Secret("good"))
    far = Far([httpx.Response(status, json={"error": "gone"}), httpx.Response(200, json=[])])
    async with api_to(far, token) as api:
        with pytest.raises(error):
            await api.send("another", "hello", "m-1")
    assert token.current == Secret("good")


async def test_a_rotated_token_is_found_when_sending_to_another_agent(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("old")
    token = WorkspaceToken(tmp_path / "token")
    (tmp_path / "token").write_text("new")
    refused = httpx.Response(401, json={"error": "invalid workspace auth token"})
    queued = httpx.Response(200, json={"status": "queued"})
    far = Far([refused, refused, httpx.Response(200, json=[]), queued])
    async with api_to(far, token) as api:
        await api.send("another", "hello", "m-1")
    assert [each.headers["authorization"] for each in far.seen][-1] == "Bearer new"


async def test_no_row_makes_a_page_unreadable(token: WorkspaceToken) -> None:
    deep = "[" * 5000 + "]" * 5000
    page = f'[{{"id": "a", "request_body": {{"x": {deep}, "y": "{{[", "z": 7}}}}, {{"id": "b", "summary": "c",'
    page += f' "request_body": {{"n": {"9" * 5000}, "m": "\\""}}}}]'
    async with api_to(Far([httpx.Response(200, content=page.encode())]), token) as api:
        second, first = await api.activity()
    assert first.request is not None
    assert (first.request["y"], first.request["z"]) == ("{[", 7)
    assert (second.summary, second.request) == ("c", {"n": int("9" * 300), "m": '"'})


async def test_too_large_a_page_is_read_in_smaller_ones(token: WorkspaceToken) -> None:
    large = httpx.Response(200, content=b"x" * (MAX_BODY_BYTES + 1))
    far = Far([large, large, httpx.Response(200, json=[{"id": "a"}])])
    async with api_to(far, token) as api:
        rows = await api.activity(limit=5)
    assert [row.id for row in rows] == ["a"]
    assert [each.url.params["limit"] for each in far.seen] == ["5", "2", "1"]


class Drip(httpx.AsyncByteStream):
    """A response that arrives byte by byte and never ends."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await anyio.sleep(0.01)
            yield b" "


async def test_a_response_byte_by_byte_times_out(token: WorkspaceToken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codex_workspace.platform.client.CONNECT_S", 0.1)
    async with api_to(Far([httpx.Response(200, stream=Drip())]), token) as api:
        with anyio.fail_after(5), pytest.raises(PlatformUnreachable):
            await api.send("another", "hello", "m-1", timeout_s=0.1)


async def test_too_large_a_response_is_not_read(token: WorkspaceToken) -> None:
    async with api_to(Far([httpx.Response(200, content=b" " * MAX_BODY_BYTES + b"[]")]), token) as api:
        with pytest.raises(PlatformUnreachable, match=f"more than {MAX_BODY_BYTES} bytes"):
            await api.peers()


async def test_a_peer_without_an_id_is_left_out(token: WorkspaceToken) -> None:
    rows = [{"id": "", "name": "x"}, {"name": "y"}, "no row", {"id": "b", "name": "z"}]
    async with api_to(Far([httpx.Response(200, json=rows)]), token) as api:
        assert [peer.id for peer in await api.peers()] == ["b"]


async def test_a_refused_connection_has_no_effect(token: WorkspaceToken) -> None:
    async with open_platform_client("http://127.0.0.1:9", ME, token) as api:
        with pytest.raises(PlatformUnreachable) as raised:
            await api.notify("hello")
    assert not raised.value.outcome_unknown


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"kind": "message", "parts": [{"type": "text", "text": "hi"}]}, "hi"),
        ({"kind": "task", "artifacts": [{"parts": [{"kind": "text", "text": "a"}]}]}, "a"),
        ({}, ""),
        ({"parts": 5}, ""),
        ({"artifacts": [1, {"parts": [None]}]}, ""),
        ({"status": "x"}, ""),
    ],
)
def test_the_text_of_a_result_is_in_its_parts_or_artifacts(result: JsonObject, text: str) -> None:
    assert text_of_result(result) == text
