"""Several principals in one agent: the data of one does not exist for the others, on every transport."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import httpx
import pytest
from a2a.types import SendMessageRequest, Task
from a2a.utils.constants import TransportProtocol
from a2a.utils.errors import TaskNotFoundError

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.model_requests import Message
from tests.e2e.agent_process import AgentProcess, AgentSetup, running_agent
from tests.e2e.client import request
from tests.matrix.clients import OwnClient, own_client

pytestmark = pytest.mark.slow

ALICE: Final = "alice-0123456789abcdef"
BOB: Final = "bob-0123456789abcdef"
OPERATOR: Final = "operator-0123456789abcdef"
CONTEXT: Final = "the-same-for-both"


@pytest.fixture
async def agent(setup: AgentSetup) -> AsyncIterator[AgentProcess]:
    (setup.root / "config").mkdir()
    (setup.root / "config" / "bob.token").write_text(f"{BOB}\n")
    principals = [{"name": "alice", "token_env": "ALICE_TOKEN"}, {"name": "bob", "token_file": "bob.token"}]
    environment = {"A2A_TOKEN": OPERATOR, "ALICE_TOKEN": ALICE, "A2A_GRPC_PORT": "0"}
    async with running_agent(replace(setup, config={"principals": principals}, environment=environment)) as agent:
        yield agent


async def send(client: OwnClient, sent: SendMessageRequest) -> Task:
    """Send a message with the blocking client and return its task."""
    (event,) = [each async for each in client.send(sent)]
    return event.task


def user_texts(model: ScriptedModel) -> str:
    """Return the texts of the users in the model's last call."""
    return "\n".join(each.text for each in model.requests[-1].input if isinstance(each, Message))


@pytest.mark.parametrize("transport", [each.value for each in TransportProtocol])
async def test_principals_cannot_see_or_cancel_foreign_tasks(
    agent: AgentProcess, model: ScriptedModel, transport: str
) -> None:
    async with own_client(transport, agent.url, ALICE) as alice, own_client(transport, agent.url, BOB) as bob:
        alices_task = await send(alice, request("the word is violet", CONTEXT))
        for forbidden in (bob.get, bob.cancel):
            with pytest.raises(TaskNotFoundError):
                await forbidden(alices_task.id)
        with pytest.raises(TaskNotFoundError):
            _ = [event async for event in bob.subscribe(alices_task.id)]
        assert await bob.list(CONTEXT) == []
        # Context IDs are per principal: the same ID is another conversation, without her messages.
        bobs_task = await send(bob, request("which word?", CONTEXT))
        assert "violet" not in user_texts(model)
        assert [each.id for each in await bob.list(CONTEXT)] == [bobs_task.id]
        await send(alice, request("and now?", CONTEXT))
        assert "violet" in user_texts(model)
        assert "which word?" not in user_texts(model)
    async with own_client(transport, agent.url, OPERATOR) as operator:
        with pytest.raises(TaskNotFoundError):
            await operator.get(alices_task.id)


async def test_a_request_without_a_known_token_is_unauthorized(agent: AgentProcess) -> None:
    async with httpx.AsyncClient(base_url=agent.url, headers={"Authorization": "Bearer bobs-old-token"}) as http:
        refused = await http.get("/tasks", headers={"A2A-Version": "1.0"})
    assert refused.status_code == 401
    assert BOB not in agent.log.read_text()
    assert ALICE not in agent.log.read_text()
