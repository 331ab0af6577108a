"""Wait until a turn is at work, by whichever backend: `codex exec` tells no words before they are all there."""

import aiosqlite
import anyio

from codex_workspace.devkit.model import ScriptedModel
from tests.e2e.agent_process import Place


def turns(model: ScriptedModel) -> int:
    """How often the model was asked."""
    return sum(request.path.endswith("/responses") for request in model.requests)


async def asked(model: ScriptedModel, times: int = 1, within_s: float = 10.0) -> None:
    """Wait until the model was asked so many times."""
    with anyio.fail_after(within_s):
        while turns(model) < times:
            await anyio.sleep(0.01)


async def at_work(place: Place, model: ScriptedModel) -> None:
    """Wait until the model was asked, and the agent has written the first of its turns down."""
    await asked(model)
    with anyio.fail_after(10):
        while not await _started(place):
            await anyio.sleep(0.01)


async def _started(place: Place) -> int:
    async with (
        aiosqlite.connect(place.root / "state" / "workspace.sqlite3") as database,
        database.execute("select count(*) from deliveries where state = 'started'") as rows,
    ):
        row = await rows.fetchone()
    assert row is not None
    return int(row[0])
