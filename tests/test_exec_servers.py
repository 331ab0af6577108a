"""Which MCP servers a run of codex exec has: what codex says as it ends for one's sake, and what comes of that."""

import pytest

from codex_workspace.errors import CodexCannotStart
from codex_workspace.exec_servers import NOT_TOLD, RunServers, failures_in, has_failed
from codex_workspace.mcp_startup import RETRY_S, Expected

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
    servers = RunServers(Expected(("a", "b", "c"), left_out={"d": "no key"}), clock=clock)
    assert servers.config(servers.left_out()) == {("mcp_servers", name, "required"): True for name in "abc"}
    left_out = servers.failed(SAID, frozenset())
    assert left_out == servers.left_out() == {"b", "c"}
    assert servers.config(left_out) == {
        ("mcp_servers", "a", "required"): True,
        ("mcp_servers", "b", "enabled"): False,
        ("mcp_servers", "c", "enabled"): False,
    }
    servers.began(left_out)
    assert servers.missed() == {
        "d": "The MCP server d is not there: no key.",
        "b": "The MCP server b is not there: handshaking with MCP server failed: connection closed.",
        "c": f"The MCP server c is not there: {GONE}.",
    }
    clock.now += RETRY_S
    assert servers.left_out() == frozenset()
    assert servers.missed().keys() == {"b", "c", "d"}
    servers.began(frozenset())
    assert servers.missed().keys() == {"d"}


def test_a_required_one_is_an_error_with_codex_s_words() -> None:
    servers = RunServers(Expected(("a", "b", "c")), ["b", "c"])
    with pytest.raises(CodexCannotStart, match=r"\(mcp_servers of config\.yaml\): b: .* closed; c: .*\(os error 2\)$"):
        servers.failed(SAID, frozenset())
    assert servers.optional == {"a"}


def test_a_server_cannot_make_a_required_one_fail_by_its_words() -> None:
    servers = RunServers(Expected(("b", "c", "d")), ["c"])
    left_out = servers.failed(SAID, frozenset())
    assert left_out == {"b"}
    with pytest.raises(CodexCannotStart, match="c: No such file"):
        servers.failed(SAID.replace("b: handshaking with MCP server failed: connection closed; ", ""), left_out)


@pytest.mark.parametrize("required", [(), ("x",)])
def test_names_that_are_hidden_cost_all_that_can_be_done_without_and_no_endless_tries(
    required: tuple[str, ...],
) -> None:
    servers = RunServers(Expected(("x", "y", "z")), required)
    left_out = servers.failed(SAID, frozenset())
    assert left_out == servers.optional
    assert servers.missed()["y"] == f"The MCP server y is not there: {NOT_TOLD}."
    with pytest.raises(CodexCannotStart, match="b: handshaking"):
        servers.failed(SAID, left_out)
