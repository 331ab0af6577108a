"""Wait for a running turn with either backend: `codex exec` reports no text before the answer is complete."""

import sqlite3
from contextlib import closing

from a2a.types import GetTaskRequest, Role

from codex_workspace.devkit.model import ScriptedModel
from tests.e2e.agent_process import AgentSetup
from tests.e2e.client import Peer, Seen
from tests.support.waiting import eventually


def model_calls(model: ScriptedModel) -> int:
    """Return the number of model calls."""
    return sum(request.path.endswith("/responses") for request in model.requests)


async def wait_for_model_calls(model: ScriptedModel, times: int = 1) -> None:
    """Wait for `times` model calls."""
    await eventually(lambda: model_calls(model) >= times)


async def wait_for_text(client: Peer, started: Seen, text: str = "") -> None:
    """Wait until a task has shown a text, as its answer or as a remark, that contains `text`."""

    async def has_arrived() -> bool:
        task = await client.blocking.get_task(GetTaskRequest(id=started.task_id))
        notes = [each for each in (*task.history, task.status.message) if each.role == Role.ROLE_AGENT]
        remarks = [each for each in notes if dict(each.metadata).get("kind") == "commentary"]
        shown = [
            each.text
            for parts in ([each.parts for each in task.artifacts] + [each.parts for each in remarks])
            for each in parts
        ]
        return any(each and text in each for each in shown)

    await eventually(has_arrived)


async def wait_for_running_turn(setup: AgentSetup, model: ScriptedModel) -> None:
    """Wait until the model was called and the agent has stored a started turn."""
    await wait_for_model_calls(model)
    await eventually(lambda: _started(setup))


def _started(setup: AgentSetup) -> int:
    query = "select count(*) from deliveries where state = 'started'"
    with closing(sqlite3.connect(setup.root / "state" / "workspace.sqlite3")) as database:
        return int(database.execute(query).fetchone()[0])
