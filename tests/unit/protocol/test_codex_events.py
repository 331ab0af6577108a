"""Token counts."""

from codex_workspace.protocol.codex_events import TokensUpdated, TokenUsage


def test_token_counts_subtract() -> None:
    usage = TokensUpdated(TokenUsage(214, 200, 20, 14, 4), TokenUsage(107, 100, 10, 7, 2))
    assert usage.thread.minus(usage.last) == TokenUsage(107, 100, 10, 7, 2)
