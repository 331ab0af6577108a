"""The floor: what every A2A server with this SDK costs. The bare driver behind the SDK's defaults, and nothing else.

    python -m bench.floor PORT INITIALIZE_PARAMS THREAD_PARAMS CODEX app-server …

uvicorn, the SDK's default request handler and its task store in memory. The executor echoes codex's text: what has
arrived since its last event is the next one. `/readyz` answers 200 from the start, and codex has started by then.
Like the bare driver it stores nothing on disk, validates nothing and handles no failures.
"""

import asyncio
import json
import sys

import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    Artifact,
    Part,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.bare import Codex, open_codex


class Echo(AgentExecutor):
    """Runs each message as a turn and passes the text on."""

    def __init__(self, codex: Codex) -> None:
        self._codex = codex

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Run a turn: the task, the pieces of its one artifact, the end."""
        assert context.task_id
        assert context.context_id
        assert context.message
        task_id, context_id = context.task_id, context.context_id
        working = TaskStatus(state=TaskState.TASK_STATE_WORKING)
        await event_queue.enqueue_event(
            Task(id=task_id, context_id=context_id, status=working, history=[context.message])
        )
        turn = await self._codex.start_turn(context_id, context.get_user_input())
        sent = 0
        while not turn.ended.done() or sent < len(turn.pieces):
            await turn.changed.wait()
            turn.changed.clear()
            if text := "".join(turn.pieces[sent:]):
                artifact = Artifact(artifact_id="answer", parts=[Part(text=text)])
                update = TaskArtifactUpdateEvent(
                    task_id=task_id, context_id=context_id, artifact=artifact, append=sent > 0
                )
                sent = len(turn.pieces)
                await event_queue.enqueue_event(update)
        completed = TaskStatus(state=TaskState.TASK_STATE_COMPLETED)
        await event_queue.enqueue_event(TaskStatusUpdateEvent(task_id=task_id, context_id=context_id, status=completed))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Do nothing: the benchmark cancels no task."""


async def ready(_: Request) -> Response:
    """Answer 200."""
    return Response()


async def serve(port: int, codex: Codex) -> None:
    """Serve until SIGTERM."""
    url = f"http://127.0.0.1:{port}/"
    card = AgentCard(
        name="floor",
        description="echoes codex",
        version="0",
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="echo", name="echo", description="echoes codex", tags=["echo"])],
        supported_interfaces=[AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")],
        capabilities=AgentCapabilities(streaming=True),
    )
    handler = DefaultRequestHandler(Echo(codex), InMemoryTaskStore(), card)
    app = Starlette(routes=[Route("/readyz", ready), *create_jsonrpc_routes(handler, "/")])
    await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False)).serve()


async def main(port: int, params: list[str], command: list[str]) -> None:
    """Start codex, then serve."""
    async with open_codex(json.loads(params[0]), json.loads(params[1]), command) as codex:
        await serve(port, codex)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:4], sys.argv[4:]))
