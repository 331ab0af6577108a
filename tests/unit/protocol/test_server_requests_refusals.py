"""The refusals of codex's own requests, held against what codex really asked. Each kind's shape: `test_app_server`."""

import json
from collections.abc import Iterator

import pytest

from codex_workspace.protocol.jsonrpc import Request, decode
from codex_workspace.protocol.server_requests import default_response
from tests.support.paths import RECORDINGS


def requests_of_codex() -> Iterator[Request]:
    for file in sorted(RECORDINGS.glob("*/*.ndjson")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            if entry.get("dir") == "<" and isinstance(entry.get("msg"), dict):
                message = decode(json.dumps(entry["msg"]).encode())
                if isinstance(message, Request):
                    yield message


def test_everything_that_codex_was_heard_to_ask_has_a_refusal() -> None:
    asked = {request.method: request for request in requests_of_codex()}
    assert len(asked) >= 6
    assert [method for method, request in asked.items() if default_response(request) is None] == []


@pytest.mark.parametrize("method", ["account/chatgptAuthTokens/refresh", "new/kind", ""])
def test_what_is_not_known_has_none(method: str) -> None:
    assert default_response(Request(0, method, {})) is None
