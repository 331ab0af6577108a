"""Tests `runtimes/launch.py`: what every runtime rejects."""

import pytest

from codex_workspace.common.errors import InputRefused
from codex_workspace.runtimes.launch import RunOptions, check_run


@pytest.mark.parametrize(
    ("prompt", "options", "problem"),
    [
        (" \n", RunOptions(), "has no text"),
        ("four", RunOptions(), "has 4 characters"),
        ("hi", RunOptions(full_auto=True, sandbox="read-only"), "workspace-write, not in read-only"),
        ("hi", RunOptions(ephemeral=True, resume="x"), "cannot resume"),
    ],
)
def test_contradictions_are_rejected(prompt: str, options: RunOptions, problem: str) -> None:
    with pytest.raises(InputRefused, match=problem):
        check_run(prompt, options, 3)


def test_full_auto_is_a_sandbox() -> None:
    assert RunOptions(full_auto=True).effective_sandbox == "workspace-write"
    assert RunOptions(sandbox="read-only").effective_sandbox == "read-only"
    assert RunOptions().effective_sandbox is None
