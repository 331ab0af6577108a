"""Fixtures: one agent per client with all features that a client can use, and the scripted model."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
import yaml

from codex_workspace.devkit.model import ScriptedModel, scripted_model
from tests.e2e.agent_process import AgentSetup, running_agent
from tests.matrix.clients import KINDS, Client, Kind

TOKEN = "open-sesame"


@dataclass(frozen=True)
class OpenAgentSetup(AgentSetup):
    """A setup whose agent may send webhooks to this machine."""

    def prepare(self) -> dict[str, str]:
        environment = super().prepare()
        file = self.root / "config" / "config.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"push": {"allow": ["127.0.0.1"]}}))
        return environment


@dataclass(frozen=True, slots=True)
class Scene:
    """A client, the agent at `url`, and its model."""

    kind: Kind
    client: Client
    url: str
    setup: AgentSetup
    model: ScriptedModel


@pytest_asyncio.fixture(params=KINDS, ids=str, scope="module", loop_scope="module")
async def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """A client of each kind, with its own agent for all rows."""
    kind = request.param
    assert isinstance(kind, Kind)
    async with scripted_model() as model:
        setup = OpenAgentSetup(
            tmp_path_factory.mktemp("matrix"),
            model.base_url,
            codex={"approval_policy": "on-request"},
            environment={"A2A_GRPC_PORT": "0", "A2A_TOKEN": TOKEN},
        )
        async with running_agent(setup) as agent, kind.opened(agent.url, TOKEN) as client:
            yield Scene(kind, client, agent.url, setup, model)
