"""A subscription's login: what is one, and which of two stays."""

import base64
import json
import math
import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from codex_workspace.common.errors import ConfigError
from codex_workspace.config.environment import Secret
from codex_workspace.config.login import (
    AUTH_NAME,
    MAX_BYTES,
    REFRESH_AHEAD_S,
    configured_login,
    read_login,
    refresh_due_at,
    stored_login,
    update_login,
)
from tests.e2e.login_server import token
from tests.e2e.test_providers import login

TOKENS = {"id_token": "i", "access_token": "a", "refresh_token": "r"}


def made(mark: str, at: str | None, account: str | None = "one") -> str:
    tokens = {**TOKENS, "access_token": mark} | ({"account_id": account} if account else {})
    return json.dumps({"tokens": tokens} | ({"last_refresh": at} if at else {}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "must have at most"),
        ("[" * 60_000, "is not JSON"),
        ("[]", "has no valid tokens"),
        ("{}", "has no valid tokens"),
        ('{"tokens": null}', "has no valid tokens"),
        ('{"OPENAI_API_KEY": "sk-secret"}', "holds an API key and no subscription's login; set OPENAI_API_KEY instead"),
        ('{"OPENAI_API_KEY": "sk-secret", "tokens": null}', "holds an API key"),
        ('{"OPENAI_API_KEY": null, "tokens": null}', "has no valid tokens"),
        (json.dumps({"tokens": {**TOKENS, "refresh_token": ""}}), "has no valid tokens.refresh_token"),
        (json.dumps({"tokens": {**TOKENS, "access_token": 7}}), "has no valid tokens.access_token"),
        (made("x" * MAX_BYTES, None), "must have at most"),
    ],
)
def test_an_invalid_login_is_reported_without_its_content(content: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        read_login(content)
    assert "sk-secret" not in str(refused.value)
    with (
        pytest.raises(ConfigError, match=f"CODEX_AUTH_JSON: {words}.*; run `codex login`")
        if content
        else (pytest.raises(AssertionError))
    ):
        assert configured_login({"CODEX_AUTH_JSON": content}, ["CODEX_AUTH_JSON"]) is not None


def test_account_and_time_of_a_login_are_read() -> None:
    found = read_login(login("one"))
    assert found.tokens.account == "one"
    assert found.last_refresh is not None
    for account_id in (None, ""):
        named = json.dumps({"tokens": {**TOKENS, "id_token": token("two", "x"), "account_id": account_id}})
        assert read_login(named).tokens.account == "two"
    for odd in ("-", "a", "a.b", "a.!!.c", "a.W10.c", "a.bnVsbA.c", "a.e30.c"):
        assert read_login(json.dumps({"tokens": {**TOKENS, "id_token": odd}})).tokens.account is None


@pytest.mark.parametrize("odd", ["yesterday", "2026-01-01T00:00:00", "", True, {}])
def test_an_account_and_time_that_are_invalid_are_unknown(odd: object) -> None:
    found = read_login(json.dumps({"tokens": {**TOKENS, "account_id": {"id": odd}}, "last_refresh": odd}))
    assert (found.tokens.account_id, found.last_refresh) == (None, None)


def test_when_codex_refreshes_the_login_on_disk(tmp_path: Path) -> None:
    def due_at(content: str) -> float | None:
        (tmp_path / AUTH_NAME).write_text(content)
        return refresh_due_at(tmp_path)

    assert refresh_due_at(tmp_path) is None
    due = due_at(login())
    assert due is not None
    assert 86_000 < due + REFRESH_AHEAD_S - time.time() <= 86_400
    endless = base64.urlsafe_b64encode(b'{"exp": 1' + b"0" * 400 + b"}").decode()
    # {}, [], no JWT, and more than a number of seconds can be.
    for odd in ("a.e30.c", "a.W10.c", "a", f"a.{endless}.c"):
        tokens = {"tokens": {**TOKENS, "access_token": odd}}
        assert due_at(json.dumps(tokens)) is None
        refreshed = datetime(2026, 1, 1, tzinfo=UTC)
        expected = (refreshed + timedelta(days=8)).timestamp()
        assert due_at(json.dumps({**tokens, "last_refresh": refreshed.isoformat()})) == expected
    for without in ("[]", "{}", '{"OPENAI_API_KEY": "sk-0123456789"}', '{"tokens": {"access_token": "a"}}'):
        assert due_at(without) is None
    for being_written in ("", '{"tokens": {', "[" * 60_000):
        assert due_at(being_written) == -math.inf


EARLY, LATE = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00.123456789Z"


@pytest.mark.parametrize(
    ("first", "held", "then", "stays"),
    [
        (made("f", EARLY), made("codex", LATE), made("f", EARLY), "codex"),  # the same again
        (made("f", EARLY), made("codex", LATE), made("t", EARLY), "codex"),  # another, but older
        (made("f", EARLY), made("codex", EARLY), made("t", LATE), "t"),
        (made("f", EARLY), made("codex", LATE), made("t", EARLY, "two"), "t"),
        (made("f", None), made("codex", LATE), made("f", None), "codex"),
        (made("f", None), made("codex", LATE), made("t", None), "t"),  # of unknown age
        (made("f", EARLY), made("codex", "2026-02-01T00:00:00"), made("f", EARLY), "codex"),
        (made("f", EARLY, None), made("codex", LATE, None), made("t", EARLY, None), "codex"),
        (made("f", EARLY), "damaged", made("f", EARLY), "f"),
        (made("f", EARLY), '{"OPENAI_API_KEY": "sk"}', made("t", EARLY), "t"),
    ],
)
def test_the_newer_login_stays(tmp_path: Path, first: str, held: str, then: str, stays: str) -> None:
    update_login(tmp_path, Secret(first))
    (tmp_path / AUTH_NAME).write_text(held)
    update_login(tmp_path, Secret(then))
    kept = stored_login(tmp_path)
    assert kept is not None
    assert json.loads(kept.reveal())["tokens"]["access_token"] == stays


def test_a_login_is_written_for_this_user_only_and_once(tmp_path: Path) -> None:
    update_login(tmp_path, Secret(made("f", EARLY)))
    files = sorted(tmp_path.iterdir())
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    before = [file.stat().st_ino for file in files]
    (tmp_path / AUTH_NAME).chmod(0o644)
    update_login(tmp_path, Secret(made("f", EARLY)))
    assert [file.stat().st_ino for file in sorted(tmp_path.iterdir())] == before
    assert stat.S_IMODE((tmp_path / AUTH_NAME).stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CODEX_HOME: cannot write the login to .*gone"):
        update_login(tmp_path / "gone", Secret(made("f", EARLY)))
