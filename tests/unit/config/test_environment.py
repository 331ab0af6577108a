"""Secrets inside of credentials, headers and URLs."""

import json

from codex_workspace.config.environment import header_secrets, secrets_in_url, tokens_in

TOKEN = "t" * 20


def test_long_texts_of_a_json_credential_are_tokens() -> None:
    login = {"kind": "short", "tokens": {"access": TOKEN, "others": [TOKEN + "2", 1, None]}}
    assert sorted(tokens_in(json.dumps(login))) == [TOKEN, TOKEN + "2"]
    assert tokens_in("{" + TOKEN) == tokens_in(TOKEN) == []


def test_a_url_with_a_password_is_secret() -> None:
    url = "postgresql://me:p%40ss@db/agent"
    assert secrets_in_url(url) == [url, "p%40ss", "p@ss"]
    assert "p@ss" in secrets_in_url("postgresql://db/agent?user=me&password=p%40ss")
    assert secrets_in_url("sqlite:////state/agent.db") == []
    assert secrets_in_url("not a url") == ["not a url"]


def test_long_values_of_headers_and_their_tokens_are_secrets() -> None:
    assert header_secrets("Authorization=Bearer%20k-123456,x-tenant=7") == ["Bearer k-123456", "k-123456"]
