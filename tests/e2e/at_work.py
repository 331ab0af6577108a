"""Wait until a turn is at work, by whichever backend: `codex exec` tells no words before they are all there."""

import aiosqlite

from codex_workspace.devkit.model import ScriptedModel
from tests.e2e.agent_process import Place
from tests.support.waiting import eventually


def turns(model: ScriptedModel) -> int:
    """How often the model was asked."""
    return sum(request.path.endswith("/responses") for request in model.requests)


async def asked(model: ScriptedModel, times: int = 1) -> None:
    """Wait until the model was asked so many times."""
    await eventually(lambda: turns(model) >= times)


async def at_work(place: Place, model: ScriptedModel) -> None:
    """Wait until the model was asked, and the agent has written the first of its turns down."""
    await asked(model)
    await eventually(lambda: _started(place))


async def _started(place: Place) -> int:
    async with (
        aiosqlite.connect(place.root / "state" / "workspace.sqlite3") as database,
        database.execute("select count(*) from deliveries where state = 'started'") as rows,
    ):
        row = await rows.fetchone()
    assert row is not None
    return int(row[0])
