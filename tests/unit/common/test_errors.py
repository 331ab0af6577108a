"""What codex says of its configuration: where it went wrong, and no value that stands there."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.errors import (
    CONFIG_REJECTED,
    CodexRefused,
    is_config_error,
    redact_config_error,
    redact_config_values,
)

CANARY = "sk-operator-secret"
FILE = "/state/codex/config.toml"
SAID = {
    f'Error loading config.toml: invalid type: string "Bearer {CANARY}", expected a map\nin `mcp_servers.own.head`': (
        "Error loading config.toml: invalid type: string …, expected a map\nin `mcp_servers.own.head`"
    ),
    f"Error loading config.toml:\n{FILE}:3:55: unclosed inline table, expected `}}`\n  |\n"
    f'3 | headers = {{"A" = "Bearer {CANARY}"\n  |     ^\n': (
        f"Error loading config.toml:\n{FILE}:3:55: unclosed inline table, expected `}}`\n"
    ),
    "Error: failed to load bootstrap configuration\n\nCaused by:\n"
    f"    0: {FILE}:3:1: duplicate key\n    1: TOML parse error at line 3, column 1\n         |\n"
    f'       3 | url="{CANARY}"\n         | ^^^\n       duplicate key\n': (
        "Error: failed to load bootstrap configuration\n\nCaused by:\n"
        f"    0: {FILE}:3:1: duplicate key\n    1: TOML parse error at line 3, column 1\n       duplicate key\n"
    ),
    f"failed to load configuration: {FILE}:1:16: unknown variant `{CANARY}`, expected one of `read-only`, `on`": (
        f"failed to load configuration: {FILE}:1:16: unknown variant …, expected one of `read-only`, `on`"
    ),
    f"failed to read configuration layers: {FILE}:1:9: invalid type: integer `12`, expected a string": (
        f"failed to read configuration layers: {FILE}:1:9: invalid type: integer …, expected a string"
    ),
    "invalid configuration: bearer_token is not supported for streamable_http\nin `mcp_servers.own`\n": (
        "invalid configuration: bearer_token is not supported for streamable_http\nin `mcp_servers.own`\n"
    ),
    f'failed to load configuration: legacy `profile = "{CANARY}"` config is gone; use `--profile {CANARY}` instead': (
        "failed to load configuration: legacy … instead"
    ),
    f"Error: Model provider `{CANARY}` not found\n": "Error: Model provider … not found\n",
}


@pytest.mark.parametrize(("said", "expected"), SAID.items())
def test_codexs_message_keeps_the_position_without_the_value(said: str, expected: str) -> None:
    before = 'WARNING: proceeding (home: "/state")\n'
    assert is_config_error(said)
    assert redact_config_error(before + said) == before + expected
    assert is_config_error(expected)
    assert CANARY not in redact_config_values(said)


def test_other_messages_are_unchanged() -> None:
    said = 'Error: thread/resume: no rollout found for "x"\n3 | x'
    assert not is_config_error(said)
    assert redact_config_error(said) == said
    assert CodexRefused("thread/resume", -1, said).public == f"codex rejected thread/resume: {said} (-1)"


@given(st.text(), st.text())
def test_no_value_is_shown_in_any_surrounding(before: str, behind: str) -> None:
    value = f"{before}{CANARY}{behind}"
    debug = json.dumps(value, ensure_ascii=False)
    for quoted in (f"string {debug}, expected a map\nin `a.b`", f"unknown variant `{value}`, expected `a` or `b`"):
        refused = CodexRefused("thread/start", -32600, f"failed to load configuration: {FILE}:1:9: {quoted}")
        assert CANARY not in str(refused)
        assert refused.public == CONFIG_REJECTED
