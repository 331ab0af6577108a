"""Models that codex does not know: what the operator declares about them, and codex's notice."""

from dataclasses import replace
from typing import Final

import pytest
from google.protobuf.json_format import ParseDict

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.tasks.request import TURN
from tests.e2e.agent_process import REPOSITORY, AgentSetup, running_agent, spawn
from tests.e2e.client import Peer, Seen, peer, request, script

pytestmark = [pytest.mark.both_backends, pytest.mark.slow, pytest.mark.versions]

MODEL: Final = "my-model"
LOGGED: Final = f"codex does not know the model '{MODEL}'"


def documented_catalog() -> str:
    """Return the model catalog of docs/configuration.md."""
    text = (REPOSITORY / "docs" / "configuration.md").read_text()
    return text.partition("<!-- models.json -->\n```json\n")[2].partition("```")[0]


def with_model(setup: AgentSetup, **declared: object) -> AgentSetup:
    """Return the setup of an agent whose model codex does not know; `declared` are further keys of its provider."""
    entry = {"name": "scripted", "auth_mode": "openai_compat_responses", "base_url": setup.model_url, **declared}
    config = {"runtime_config": {"model": MODEL, "provider": "scripted"}, "providers": [entry]}
    return replace(setup, config=config)


async def ask_with_model(client: Peer, model: str) -> Seen:
    sent = request("hello", "ctx")
    ParseDict({TURN: {"model": model}}, sent.message.metadata)
    seen = Seen()
    async for event in client.streaming.send_message(sent):
        seen.take(event)
    return seen


async def test_the_notice_is_logged_once_for_each_model_and_not_shown(setup: AgentSetup) -> None:
    async with running_agent(with_model(setup)) as agent, peer(agent.url) as client:
        told = [await client.ask("hello", "ctx"), await client.ask("hello", "other"), await client.ask("hello", "ctx")]
        told += [await ask_with_model(client, "another") for _ in range(2)]
    assert [seen.answer for seen in told] == ["You said: hello"] * 5
    notices = [note.status.message.parts[0].text for seen in told for note in seen.notes]
    # `codex exec` says that the resumed session had another model.
    assert [notice for notice in notices if "resuming with" not in notice] == []
    log = setup.log.read_text()
    assert log.count("does not know the model") == 2
    assert log.count(LOGGED) == 1
    assert log.count("codex does not know the model 'another'") == 1
    assert "Model metadata" not in log


@pytest.mark.parametrize(
    ("declared", "calls"),
    [
        pytest.param({}, 2, id="nothing"),
        pytest.param({"context_window": 10_000}, 3, id="window"),
        pytest.param({"auto_compact_token_limit": 8000}, 3, id="limit"),
        pytest.param({"context_window": 10_000, "auto_compact_token_limit": 5000}, 3, id="both"),
    ],
)
async def test_codex_compacts_as_declared(
    setup: AgentSetup, model: ScriptedModel, declared: dict[str, object], calls: int
) -> None:
    full = script({"say": "Much.", "usage": {"input_tokens": 9100, "output_tokens": 10}})
    async with running_agent(with_model(setup, **declared)) as agent, peer(agent.url) as client:
        assert [(await client.ask(full, "ctx")).answer for _ in range(2)] == ["Much."] * 2
    assert len(model.requests) == calls


async def test_a_model_in_a_catalog_is_known(setup: AgentSetup, model: ScriptedModel) -> None:
    setup.prepare()
    (setup.root / "config" / "models.json").write_text(documented_catalog())
    setup = with_model(setup, model_catalog_file="models.json")
    # More than the window that codex assumes for a model that it does not know.
    full = script({"say": "Much.", "usage": {"input_tokens": 800_000, "output_tokens": 10}})
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert [(await client.ask(full, "ctx")).answer for _ in range(2)] == ["Much."] * 2
    assert len(model.requests) == 2
    assert "does not know the model" not in setup.log.read_text()


async def test_a_catalog_that_codex_rejects_stops_the_start(setup: AgentSetup) -> None:
    setup.prepare()
    (setup.root / "config" / "models.json").write_text('{"models": [{}]}')
    assert spawn(with_model(setup, model_catalog_file="models.json")).wait(30) == 3
    assert "failed to parse model_catalog_json path" in setup.log.read_text()
