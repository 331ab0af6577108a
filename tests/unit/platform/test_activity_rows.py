"""Rows of the platform's inbox of every kind, as the stand-in lists them."""

from pathlib import Path

import httpx
import pytest
from a2a.types import Message, SendMessageRequest

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.devkit.platform.delivery import result_row
from codex_workspace.devkit.platform.records import NewRow
from codex_workspace.devkit.platform.store import PlatformStore
from codex_workspace.platform.activity_rows import SkippedRow, read_row
from codex_workspace.platform.client import WorkspaceToken, open_platform_client
from codex_workspace.platform.client_types import ActivityRow
from codex_workspace.storage.outbox import OutboxMessage, Route
from tests.support.platform_agent import ME, PEER

ROWS: list[tuple[str, NewRow, str | None]] = [
    ("echo", NewRow(ME, method="notify", summary="Agent message: hi", request={"message": "hi"}), None),
    (
        "self-report",
        NewRow(ME, source_id=ME, method="delegate_task", request={"task": "x"}, response={"result": "y"}),
        None,
    ),
    ("self-report without an answer", NewRow(ME, source_id=ME, request={"task": "x"}), None),
    ("upload", NewRow(ME, method="chat_upload_receive", request={"file_id": "f", "name": "a.txt"}), None),
    (
        "pushed and answered",
        NewRow(
            ME,
            method="message/send",
            request={"params": {"message": {"parts": [{"kind": "text", "text": "pushed"}]}}},
            response={"result": {}},
            duration_ms=5,
        ),
        None,
    ),
    (
        "prompt of its own",
        NewRow(
            ME,
            source_id=ME,
            method="message/send",
            request={"params": {"message": {"parts": [{"kind": "text", "text": "begin"}]}}},
        ),
        "begin",
    ),
    (
        "type for kind",
        NewRow(
            ME, method="message/send", request={"params": {"message": {"parts": [{"type": "text", "text": "typed"}]}}}
        ),
        "typed",
    ),
    ("bare", NewRow(ME, method="message/send", request={"parts": [{"text": "bare", "kind": "text"}]}), "bare"),
    (
        "body as text",
        NewRow(
            ME, method="message/send", request='{"params": {"message": {"parts": [{"kind": "text", "text": "s"}]}}}'
        ),
        "s",
    ),
    ("summary", NewRow(ME, method="message/send", summary="only a summary"), "only a summary"),
    ("result", result_row(ME, PEER, "work-1", "it is done"), "it is done"),
    (
        "result of who polls",
        result_row(ME, PEER, "work-2", '{"status": "queued", "delivery_mode": "poll", "method": "message/send"}'),
        None,
    ),
]


async def given(row: NewRow) -> ActivityRow:
    """Return a row as the agent's client gets it."""
    store = PlatformStore(None)
    store.add_workspace(ME, delivery="poll")
    store.write(row)
    page = store.page(ME, "may")
    store.close()
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=page))
    async with open_platform_client("http://platform.test", ME, WorkspaceToken(Path("/none")), transport) as api:
        (found,) = await api.activity()
    return found


def message_in(stored: OutboxMessage) -> Message:
    return SendMessageRequest.FromString(stored.request).message


@pytest.mark.parametrize(("row", "heard"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
async def test_a_row_is_a_message_or_skipped(row: NewRow, heard: str | None) -> None:
    given_row = await given(row)
    if heard is None:
        with pytest.raises(SkippedRow):
            read_row(given_row, ME, "me")
    else:
        found = read_row(given_row, ME, "me")
        assert message_in(found).parts[-1].text == heard
        assert found.message_id


PARTS: JsonValue = [{"kind": "text", "text": "x"}]


def message(said_id: str, parts: JsonValue, metadata: JsonValue = None, context_id: str = "") -> ActivityRow:
    said: JsonObject = {"messageId": said_id, "parts": parts, "metadata": metadata, "contextId": context_id}
    return ActivityRow("row-1", "2026-05-01T00:00:00Z", "message/send", PEER, request={"params": {"message": said}})


@pytest.mark.parametrize(
    ("metadata", "route"),
    [
        ({}, Route.PEER),
        ({"delegation_id": "m-1"}, Route.PEER),
        ({"delegation_id": "work-1"}, Route.USER),
        ({"in_reply_to": "m-0"}, Route.USER),
    ],
)
def test_a_peers_answer_is_for_the_user(metadata: dict[str, str], route: Route) -> None:
    found = read_row(message("m-1", PARTS, {**metadata}), ME, "me")
    assert (found.route, found.peer, found.message_id) == (route, PEER, f"{PEER}/m-1")


@pytest.mark.parametrize("said_id", ["", "x" * 300])
def test_a_message_without_a_valid_id_gets_the_rows_id(said_id: str) -> None:
    found = read_row(message(said_id, PARTS), ME, "me")
    assert found.message_id == "row-1"


@pytest.mark.parametrize(
    "odd",
    [
        {"metadata": {"a": 10**400}},
        {"metadata": {"a": float("inf")}},
        {"metadata": {"\ud800": "\ud800", "delegation_id": "\ud800"}},
        {"metadata": {"in_reply_to": {"a": 1}}},
        {"messageId": "\ud800"},
        {"messageId": "\x00"},
        {"contextId": "\ud800"},
        {"parts": [{"kind": "data", "data": {"a": 10**400}}, {"kind": "text", "text": "x"}]},
        {
            "parts": [
                {"kind": ["text"]},
                {"kind": "file", "file": {"uri": "http://\ud800"}},
                {"kind": "text", "text": "x"},
            ]
        },
    ],
)
@pytest.mark.parametrize("method", ["message/send", "delegate_result"])
def test_invalid_values_of_a_peer_still_make_an_outbox_message(odd: dict[str, JsonValue], method: str) -> None:
    said: JsonObject = {"messageId": "m-1", "parts": PARTS, **odd}
    row = ActivityRow("row-1", "2026-05-01T00:00:00Z", method, PEER, request={"params": {"message": said}})
    stored = read_row(row, ME, "me")
    for text in (stored.message_id, stored.source_id, stored.delegation_id):
        assert text.isprintable()


def test_parts_of_all_kinds_are_converted_and_others_left_out() -> None:
    parts: list[JsonValue] = [
        {"kind": "text", "text": "a\ud800b"},
        {"kind": "data", "data": {"k": [1]}},
        {"kind": "file", "file": {"bytes": "aGk=", "name": "a.txt", "mimeType": "text/plain"}},
        {"kind": "file", "file": {"uri": "https://a.test/b.png", "name": "b.png", "mimeType": "image/png"}},
        {"kind": "file", "file": {"uri": "platform-pending:x/y", "name": "c.txt"}},
        {"kind": "file", "file": {"bytes": "no base64!", "name": "d.txt"}},
        {"kind": "other"},
        "none",
    ]
    found = read_row(message("m-1", parts, {"a": [[1]]}, "c" * 37), ME, "me")
    _mark, text, data, held, linked, pending, *broken = message_in(found).parts
    assert (text.text, held.raw, linked.url) == ("a\ufffdb", b"hi", "https://a.test/b.png")
    assert data.WhichOneof("content") == "data"
    assert "c.txt" in pending.text
    assert ["d.txt" in part.text for part in broken] == [True]
    assert not message_in(found).context_id
