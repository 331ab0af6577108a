"""Which MCP servers a run of codex exec has: what codex says as it ends for one's sake, and what comes of that."""

import re

import pytest

from codex_workspace.backends.codex_exec.mcp_servers import NOT_TOLD, ExecMcpServers, failures_in, has_failed
from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.protocol.mcp_status import RETRY_S, ExpectedServers

SAID = (
    "WARNING: proceeding, even though\n"
    "ERROR codex_core::session: Failed to create session: required MCP servers failed to initialize: b: no; c: gone\n"
    "Error: thread/start: thread/start failed: error creating thread: Fatal error: Failed to initialize session: "
    "required MCP servers failed to initialize: b: handshaking with MCP server failed: connection closed; "
    "c: No such file or directory (os error 2) (code -32603)"
)
GONE = "No such file or directory (os error 2)"


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_names_and_reasons_are_those_of_the_last_line() -> None:
    assert has_failed(SAID)
    assert not has_failed("no rollout found for thread id")
    assert failures_in(SAID, ["a", "b", "c"]) == {
        "b": "handshaking with MCP server failed: connection closed",
        "c": GONE,
    }
    assert failures_in(SAID, ["c"]) == {"c": GONE}
    assert failures_in("required MCP servers failed to initialize: ", ["a"]) == {}
    assert failures_in(SAID, []) == {}
    (long,) = failures_in(f"required MCP servers failed to initialize: a: {'x' * 9000}", ["a"]).values()
    assert len(long) < 300


def test_what_has_failed_is_left_out_until_it_is_tried_again() -> None:
    clock = Clock()
    servers = ExecMcpServers(ExpectedServers(("a", "b", "c"), left_out={"d": "no key"}), clock=clock)
    with servers.attempt() as first:
        assert first.config() == {("mcp_servers", name, "required"): True for name in "abc"}
        first.failed(SAID)
        assert first.left_out == {"b", "c"}
        assert first.config() == {
            ("mcp_servers", "a", "required"): True,
            ("mcp_servers", "b", "enabled"): False,
            ("mcp_servers", "c", "enabled"): False,
        }
        first.began()
    assert servers.missed() == {
        "d": "The MCP server d is not available: no key.",
        "b": "The MCP server b is not available: handshaking with MCP server failed: connection closed.",
        "c": f"The MCP server c is not available: {GONE}.",
    }
    with servers.attempt() as soon:
        assert soon.left_out == {"b", "c"}
    clock.now += RETRY_S
    with servers.attempt() as later:
        assert later.left_out == frozenset()
        assert servers.missed().keys() == {"b", "c", "d"}
        later.began()
    assert servers.missed().keys() == {"d"}


def test_what_has_failed_is_tried_again_by_one_run_at_a_time() -> None:
    clock = Clock()
    servers = ExecMcpServers(ExpectedServers(("a", "b", "c")), clock=clock)
    with servers.attempt() as first:
        first.failed(SAID)
        first.began()
    clock.now += RETRY_S
    with servers.attempt() as one, servers.attempt() as other:
        assert one.left_out == frozenset()
        assert other.left_out == {"b", "c"}
        one.began()
        other.began()
        assert servers.missed() == {}
    with servers.attempt() as first:
        first.failed(SAID)
    clock.now += RETRY_S
    with servers.attempt():
        pass
    with servers.attempt() as after_one_that_was_left:
        assert after_one_that_was_left.left_out == frozenset()


def test_a_required_one_is_an_error_with_codex_s_words() -> None:
    servers = ExecMcpServers(ExpectedServers(("a", "b", "c")), ["b", "c"])
    attempt = servers.of_those_required()
    assert attempt.left_out == servers.optional == {"a"}
    with pytest.raises(CodexCannotStart, match=r"\(mcp_servers of config\.yaml\): b: .* closed; c: .*\(os error 2\)$"):
        attempt.failed(SAID)


@pytest.mark.parametrize("said", [SAID, f"{SAID}: required MCP servers failed to initialize: c: no; x"])
def test_a_server_cannot_make_a_required_one_fail_by_its_words(said: str) -> None:
    servers = ExecMcpServers(ExpectedServers(("a", "b", "c")), ["c"])
    with servers.attempt() as attempt:
        attempt.failed(said)
        assert "b" in attempt.left_out
        assert "c" not in attempt.left_out
        attempt.began()
    assert "b" in servers.missed()
    with servers.attempt() as again:
        assert "b" in again.left_out


def test_one_that_is_required_and_fails_is_believed_where_none_else_runs() -> None:
    servers = ExecMcpServers(ExpectedServers(("c", "fine", "finer")), ["c"])
    with servers.attempt() as attempt:
        attempt.failed(SAID)
        assert attempt.left_out == {"fine", "finer"}
        with pytest.raises(CodexCannotStart, match=r"\(mcp_servers of config\.yaml\): c: No such file"):
            attempt.failed(SAID)
    assert servers.missed() == {}


@pytest.mark.parametrize(
    ("required", "where"),
    [((), "(mcp_servers of codex's config.toml)"), (("x",), "(mcp_servers of config.yaml, or of codex's config.toml)")],
)
def test_one_that_is_not_ours_is_an_error_and_none_of_ours_is_blamed_for_it(
    required: tuple[str, ...], where: str
) -> None:
    servers = ExecMcpServers(ExpectedServers(("x", "y", "z")), required)
    with servers.attempt() as attempt:
        attempt.failed(SAID)
        assert attempt.left_out == servers.optional
        with pytest.raises(CodexCannotStart, match=f"{re.escape(where)}: b: handshaking"):
            attempt.failed(SAID)
    assert servers.missed() == {}


@pytest.mark.parametrize("required", [(), ("x",)])
def test_names_that_are_hidden_cost_all_that_can_be_done_without(required: tuple[str, ...]) -> None:
    servers = ExecMcpServers(ExpectedServers(("x", "y", "z")), required)
    with servers.attempt() as attempt:
        attempt.failed(SAID)
        assert attempt.left_out == servers.optional
        attempt.began()
    assert servers.missed()["y"] == f"The MCP server y is not available: {NOT_TOLD}."
    with servers.attempt() as again:
        assert again.left_out == servers.optional
