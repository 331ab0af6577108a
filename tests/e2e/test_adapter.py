"""The adapter under a host that is not ours: setup, create_executor, a message, and the end."""

import json
import os
from pathlib import Path

import pytest

from adapter import Adapter
from codex_workspace.contract import AdapterConfig
from codex_workspace.scripted_model import ScriptedModel
from codex_workspace.server import ServerOptions, bind, build_app, serving
from codex_workspace.store import open_store
from tests.e2e.agent_process import Place
from tests.e2e.client import peer


async def test_a_foreign_host_gets_an_executor_that_answers(
    place: Place, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.prepare().items():
        monkeypatch.setenv(name, value)
    adapter = Adapter()
    config = AdapterConfig(model="gpt-5.5", config_path=os.environ["WORKSPACE_CONFIG_PATH"])
    await adapter.setup(config)
    nothing = {"runtime": "codex", "supported": True, "lines": [], "cursor": 0, "more": False, "source": None}
    assert await adapter.transcript_lines() == nothing
    executor = await adapter.create_executor(config)
    assert await adapter.transcript_lines() == nothing

    async def ready() -> None:
        return None

    try:
        with bind("127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            options = ServerOptions("host", "another host", "1", url)
            async with (
                open_store(f"sqlite+aiosqlite:///{place.root}/host.sqlite3") as store,
                build_app(options, executor, store, ready) as app,
                serving(app.asgi, listener),
                peer(url) as client,
            ):
                assert (await client.ask("hello")).answer == "You said: hello"
                first = await adapter.transcript_lines(since=0, limit=2)
                assert (first["cursor"], first["more"]) == (2, True)
                rest = await adapter.transcript_lines(since=2)
                assert "You said: hello" in json.dumps(rest["lines"])
    finally:
        await adapter.close()


async def test_wrong_configuration_is_a_runtime_error_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\nruntime: langgraph\n")
    with pytest.raises(RuntimeError, match=r"config\.yaml.*runtime"):
        await Adapter().setup(AdapterConfig(model="x", config_path=str(tmp_path)))
