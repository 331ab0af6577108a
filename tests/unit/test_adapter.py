"""The platform's door, as far as it can be tried without the platform's runtime."""

from dataclasses import replace
from pathlib import Path

from adapter import inbox_unread
from codex_workspace.config.loading import load_settings


def test_who_wants_the_inbox_polled_is_told_that_nobody_does(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\nruntime: codex\nplatform:\n  delivery: poll\n")
    settings = load_settings(
        {"WORKSPACE_CONFIG_PATH": str(tmp_path), "HOME": str(tmp_path), "MODEL": "gpt-5.5"}, cwd=tmp_path, root=tmp_path
    )
    said = inbox_unread(settings)
    assert said is not None
    assert str(tmp_path / "config.yaml") in said
    pushed = replace(settings.config.platform, delivery="auto")
    assert inbox_unread(replace(settings, config=replace(settings.config, platform=pushed))) is None
