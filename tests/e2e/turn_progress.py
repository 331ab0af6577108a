"""Wait until a turn is at work, by whichever backend: `codex exec` tells no words before they are all there."""

import aiosqlite

from codex_workspace.devkit.model import ScriptedModel
from tests.e2e.agent_process import AgentSetup
from tests.support.waiting import eventually


def model_calls(model: ScriptedModel) -> int:
    """How often the model was asked."""
    return sum(request.path.endswith("/responses") for request in model.requests)


async def wait_for_model_calls(model: ScriptedModel, times: int = 1) -> None:
    """Wait until the model was asked so many times."""
    await eventually(lambda: model_calls(model) >= times)


async def wait_for_running_turn(setup: AgentSetup, model: ScriptedModel) -> None:
    """Wait until the model was asked, and the agent has written the first of its turns down."""
    await wait_for_model_calls(model)
    await eventually(lambda: _started(setup))


async def _started(setup: AgentSetup) -> int:
    async with (
        aiosqlite.connect(setup.root / "state" / "workspace.sqlite3") as database,
        database.execute("select count(*) from deliveries where state = 'started'") as rows,
    ):
        row = await rows.fetchone()
    assert row is not None
    return int(row[0])
