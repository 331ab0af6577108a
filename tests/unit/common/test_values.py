"""Versions of codex, as it tells them and as they are shown."""

import pytest

from codex_workspace.common.values import Version, find_version, format_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("codex-cli 0.163.0\n", (0, 163, 0)),
        ("codex_workspace/0.169.2 (Debian 12.0.1)", (0, 169, 2)),
        ("codex-cli 1.10.100-alpha.3", (1, 10, 100)),
        ("codex-cli 0.163", None),
        ("", None),
    ],
)
def test_the_first_version_is_found(text: str, version: Version | None) -> None:
    assert find_version(text) == version


def test_a_version_is_shown_with_dots() -> None:
    assert format_version((0, 72, 0)) == "0.72.0"
