"""Pauses that grow."""

import pytest

from codex_workspace.common.concurrency import backoff


@pytest.mark.parametrize(("tries", "pause_s"), [(0, 0.5), (1, 1.0), (2, 2.0), (5, 16.0), (6, 30.0), (5000, 30.0)])
def test_a_pause_doubles_up_to_its_bound(tries: int, pause_s: float) -> None:
    assert backoff(0.5, 30.0, tries) == pause_s
