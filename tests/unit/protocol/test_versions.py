"""The version of codex: the oldest supported one, and the version in the result of `initialize`."""

import pytest

from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.common.values import JsonValue
from codex_workspace.protocol.versions import initialized_version, require_supported


def test_an_unsupported_version_is_rejected_with_a_remedy() -> None:
    require_supported((0, 158, 0))
    require_supported((1, 0, 0))
    with pytest.raises(CodexCannotStart, match=r"0\.157\.9 is too old: this agent needs 0\.158\.0 or newer; install"):
        require_supported((0, 157, 9))


@pytest.mark.parametrize(
    ("agent", "version"),
    [
        ("codex_workspace/0.163.0 (Debian 12; x86_64) unknown", (0, 163, 0)),
        ("codex_workspace/0.170.0-alpha.2 (Mac OS 15)", (0, 170, 0)),
        ("me/10.20.30", (10, 20, 30)),
    ],
)
def test_the_version_is_read_from_the_user_agent(agent: str, version: tuple[int, int, int]) -> None:
    assert initialized_version({"userAgent": agent}) == version


@pytest.mark.parametrize("answer", [{}, {"userAgent": 1}, {"userAgent": "codex"}, None, []])
def test_an_answer_without_a_version_is_not_codex(answer: JsonValue) -> None:
    with pytest.raises(CodexCannotStart, match="CODEX_BIN"):
        initialized_version(answer)
