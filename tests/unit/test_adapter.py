"""The adapter, without the platform's runtime; tests/e2e/test_adapter.py runs it under each generation."""

from pathlib import Path

import pytest

from adapter import Adapter
from codex_workspace.codex.transcript import transcript_page
from codex_workspace.common.errors import ConfigError
from codex_workspace.platform.runtime_contract import AdapterConfig


def test_the_runtime_finds_its_name_and_memory_file() -> None:
    adapter = Adapter()
    assert (adapter.name(), adapter.memory_filename()) == ("codex", "AGENTS.md")


async def test_before_the_start_there_is_no_state_and_no_transcript() -> None:
    adapter = Adapter()
    adapter.restore_state({"adapter": {"session_id": "11111111-1111-4111-8111-111111111111"}})
    assert adapter.pre_stop_state() == {}
    assert await adapter.transcript_lines(since=3) == transcript_page(since=3)
    await adapter.close()


async def test_a_configuration_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\nruntime: codex\nplatform:\n  delivery: sometimes\n")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        await Adapter().create_executor(AdapterConfig(model="x", config_path=str(tmp_path)))
