"""Secrets inside of credentials, headers and URLs."""

import json
from pathlib import Path

import pytest

from codex_workspace.config.environment import header_secrets, secrets_in_url, sqlite_file, tokens_in
from codex_workspace.storage.database import sqlite_file as storage_sqlite_file

TOKEN = "t" * 20


def test_long_texts_of_a_json_credential_are_tokens() -> None:
    login = {"kind": "short", "tokens": {"access": TOKEN, "others": [TOKEN + "2", 1, None]}}
    assert sorted(tokens_in(json.dumps(login))) == [TOKEN, TOKEN + "2"]
    assert tokens_in("{" + TOKEN) == tokens_in(TOKEN) == []


def test_a_url_with_a_password_is_secret() -> None:
    url = "postgresql+asyncpg://me:p%40ss@db/agent"
    assert secrets_in_url(url) == [url, "p%40ss", "p@ss"]
    assert secrets_in_url("sqlite+aiosqlite:////state/agent.db") == []
    assert secrets_in_url("not a url") == ["not a url"]


def test_long_values_of_headers_and_their_tokens_are_secrets() -> None:
    assert header_secrets("Authorization=Bearer%20k-123456,x-tenant=7") == ["Bearer k-123456", "k-123456"]


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite+aiosqlite:////state/agent%20b.db?timeout=5", Path("/state/agent b.db")),
        ("sqlite+aiosqlite:///agent.db", Path("agent.db")),
        ("sqlite+aiosqlite:///:memory:", None),
        ("sqlite+aiosqlite://", None),
        ("sqlite+aiosqlite:///file:agent.db?uri=true", None),
        ("postgresql+asyncpg://me:p%40ss@db/agent", None),
    ],
)
def test_the_file_of_a_database(url: str, file: Path | None) -> None:
    assert sqlite_file(url) == file
    assert sqlite_file(url) == storage_sqlite_file(url)
