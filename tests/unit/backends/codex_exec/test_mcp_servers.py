"""Tests which MCP servers a run has after some of them failed."""

import time

import pytest

from codex_workspace.backends.codex_exec.mcp_servers import NOT_NAMED, ExecMcpServers, find_failures, is_server_failure
from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.protocol.app_server_reader import RETRY_S, ExpectedServers

SAID = (
    "WARNING: proceeding, even though\n"
    "ERROR codex_core::session: Failed to create session: required MCP servers failed to initialize: b: no; c: gone\n"
    "Error: thread/start: thread/start failed: error creating thread: Fatal error: Failed to initialize session: "
    "required MCP servers failed to initialize: b: handshaking with MCP server failed: connection closed; "
    "c: No such file or directory (os error 2) (code -32603)"
)
GONE = "No such file or directory (os error 2)"


def test_the_names_and_reasons_are_found_in_the_message() -> None:
    assert is_server_failure(SAID)
    assert not is_server_failure("no rollout found for thread id")
    assert find_failures("b: no; c: gone", ["a", "b", "c"]) == {"b": "no", "c": "gone"}
    assert find_failures("b: no; c: gone", ["c"]) == {"c": "gone"}
    assert find_failures("", ["a"]) == {}
    assert find_failures("b: no", []) == {}
    (long,) = find_failures(f"a: {'x' * 9000}", ["a"]).values()
    assert len(long) < 300


def test_failed_servers_are_left_out_until_they_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = ExecMcpServers(ExpectedServers(("a", "b", "c"), left_out={"d": "no key"}))
    assert servers.unavailable() == frozenset()
    assert servers.settings(()) == {("mcp_servers", name, "required"): True for name in "abc"}
    left_out = servers.leave_out_failed(SAID, frozenset())
    assert left_out == {"b", "c"}
    assert servers.settings(left_out) == {
        ("mcp_servers", "a", "required"): True,
        ("mcp_servers", "b", "enabled"): False,
        ("mcp_servers", "c", "enabled"): False,
    }
    servers.started(left_out)
    assert servers.problems() == {
        "d": "The MCP server d is not available: no key.",
        "b": "The MCP server b is not available: handshaking with MCP server failed: connection closed.",
        "c": f"The MCP server c is not available: {GONE}.",
    }
    assert servers.unavailable() == {"b", "c"}
    later = time.monotonic() + RETRY_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert servers.unavailable() == frozenset()
    assert servers.problems().keys() == {"b", "c", "d"}
    servers.started(frozenset())
    assert servers.problems().keys() == {"d"}


def test_a_required_server_that_fails_is_an_error_with_codex_message() -> None:
    servers = ExecMcpServers(ExpectedServers(("a", "b", "c")), ["b", "c"])
    assert servers.optional == {"a"}
    with pytest.raises(CodexCannotStart, match=r"\(mcp_servers of config\.yaml\): b: .* closed; c: .*\(os error 2\)$"):
        servers.leave_out_failed(SAID, servers.optional)


@pytest.mark.parametrize("stderr", [SAID, f"{SAID}: required MCP servers failed to initialize: c: no; x"])
def test_a_server_cannot_make_a_required_one_fail_by_its_message(stderr: str) -> None:
    servers = ExecMcpServers(ExpectedServers(("a", "b", "c")), ["c"])
    left_out = servers.leave_out_failed(stderr, frozenset())
    assert "b" in left_out
    assert "c" not in left_out
    servers.started(left_out)
    assert "b" in servers.problems()
    assert "b" in servers.unavailable()


def test_a_required_failure_is_trusted_if_no_optional_server_runs() -> None:
    servers = ExecMcpServers(ExpectedServers(("c", "fine", "finer")), ["c"])
    left_out = servers.leave_out_failed(SAID, frozenset())
    assert left_out == {"fine", "finer"}
    with pytest.raises(CodexCannotStart, match=r"\(mcp_servers of config\.yaml\): c: No such file"):
        servers.leave_out_failed(SAID, left_out)
    assert servers.problems() == {}


@pytest.mark.parametrize("required", [(), ("x",)])
def test_a_failure_of_a_server_in_config_toml_is_an_error_and_blames_no_other(required: tuple[str, ...]) -> None:
    servers = ExecMcpServers(ExpectedServers(("x", "y", "z")), required)
    left_out = servers.leave_out_failed(SAID, frozenset())
    assert left_out == servers.optional
    with pytest.raises(CodexCannotStart, match=r"\(mcp_servers of codex's config.toml\): b: handshaking"):
        servers.leave_out_failed(SAID, left_out)
    assert servers.problems() == {}


@pytest.mark.parametrize("required", [(), ("x",)])
def test_all_optional_servers_are_left_out_if_none_is_named(required: tuple[str, ...]) -> None:
    servers = ExecMcpServers(ExpectedServers(("x", "y", "z")), required)
    left_out = servers.leave_out_failed(SAID, frozenset())
    assert left_out == servers.optional
    servers.started(left_out)
    assert servers.problems()["y"] == f"The MCP server y is not available: {NOT_NAMED}."
    assert servers.unavailable() == servers.optional
