"""The real agent with the real codex, and a model that does as it is told."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from codex_workspace.scripted_model import ScriptedModel, scripted_model
from tests.e2e.agent_process import AgentProcess, Place, running_agent
from tests.e2e.client import Peer, peer


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    """The scripted model."""
    async with scripted_model() as model:
        yield model


@pytest.fixture
def place(tmp_path: Path, model: ScriptedModel) -> Place:
    """The folders of an agent that uses the scripted model."""
    return Place(tmp_path, model.base_url)


@pytest.fixture
async def agent(place: Place) -> AsyncIterator[AgentProcess]:
    """A running agent."""
    async with running_agent(place) as agent:
        yield agent


@pytest.fixture
async def client(agent: AgentProcess) -> AsyncIterator[Peer]:
    """A peer of that agent."""
    async with peer(agent.url) as client:
        yield client
