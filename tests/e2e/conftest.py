"""Fixtures: the real agent with the real codex and the scripted model."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from codex_workspace.devkit.model import ScriptedModel, scripted_model
from tests.e2e.agent_process import AgentProcess, AgentSetup, Backend, running_agent
from tests.e2e.client import Peer, peer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked `both_backends` with each backend, except those marked `app_server_only`."""
    if "backend" not in metafunc.fixturenames or metafunc.definition.get_closest_marker("both_backends") is None:
        return
    backends = [pytest.param("app-server"), pytest.param("exec", marks=pytest.mark.with_exec)]
    alone = metafunc.definition.get_closest_marker("app_server_only") is not None
    metafunc.parametrize("backend", backends[:1] if alone else backends)


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    """The scripted model."""
    async with scripted_model() as model:
        yield model


@pytest.fixture
def backend() -> Backend:
    """The backend that runs codex; tests marked `both_backends` run with each."""
    return "app-server"


@pytest.fixture
def setup(tmp_path: Path, model: ScriptedModel, backend: Backend) -> AgentSetup:
    """The setup of an agent that uses the scripted model."""
    return AgentSetup(tmp_path, model.base_url, backend)


@pytest.fixture
async def agent(setup: AgentSetup) -> AsyncIterator[AgentProcess]:
    """A running agent."""
    async with running_agent(setup) as agent:
        yield agent


@pytest.fixture
async def client(agent: AgentProcess) -> AsyncIterator[Peer]:
    """A peer of that agent."""
    async with peer(agent.url) as client:
        yield client
