"""A simulated main of the platform's runtime: it loads the adapter and calls it in the same order.

The stand-in that is first on PYTHONPATH provides `molecule_runtime`. Without one, set
`CONTRACT=codex_workspace.platform.runtime_contract`. `python -m tests.e2e.simulated_runtime` prints its address, and
stops at SIGTERM as the runtime does, without calling `close`. It serves the SDK's routes and keeps tasks in memory.
"""

import asyncio
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import Event, EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore
from a2a.types import AgentCapabilities, AgentCard, Message, Part, Role, SendMessageRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

SMOKE_PASSED, SMOKE_FAILED = 0, 1


async def main() -> int:
    """Host the adapter that ADAPTER_MODULE names; return the exit code."""
    configs = Path(os.environ["WORKSPACE_CONFIG_PATH"])
    heartbeat = _heartbeat()
    adapter = importlib.import_module(os.environ["ADAPTER_MODULE"]).Adapter()
    contract = importlib.import_module(os.environ.get("CONTRACT", "molecule_runtime.adapters.base"))
    config = contract.AdapterConfig(
        model="anthropic:claude-opus-4-7",
        system_prompt=None,
        config_path=str(configs),
        workspace_id=os.environ["WORKSPACE_ID"],
        heartbeat=heartbeat,
    )
    # The runtime calls these hooks first, if its generation has them.
    for name in ("capabilities", "idle_timeout_override", "memory_filename"):
        if hasattr(adapter, name):
            print(f"{name}: {getattr(adapter, name)()}", flush=True)
    await adapter.setup(config)
    executor: AgentExecutor = await adapter.create_executor(config)
    if os.environ.get("MOLECULE_SMOKE_MODE") == "1":
        return await _smoke(executor)
    snapshot = configs / ".agent_snapshot.json"
    if snapshot.exists() and hasattr(adapter, "restore_state"):
        adapter.restore_state(json.loads(snapshot.read_text()))
    try:
        await _serve(executor, adapter)
    finally:
        if hasattr(adapter, "pre_stop_state"):
            snapshot.write_text(json.dumps({"version": 1, "adapter": adapter.pre_stop_state()}))
    return 0


def _heartbeat() -> Any:
    try:
        return importlib.import_module("molecule_runtime.executor_helpers").HeartbeatLoop()
    except ModuleNotFoundError:
        return None


async def _smoke(executor: AgentExecutor) -> int:
    """Call the executor once; only a failed import and a wedge are failures."""
    message = Message(role=Role.ROLE_USER, message_id="smoke", parts=[Part(text="smoke test")])
    context = RequestContext(ServerCallContext(), SendMessageRequest(message=message))
    try:
        async with asyncio.timeout(float(os.environ["MOLECULE_SMOKE_TIMEOUT_SECS"])):
            await executor.execute(context, _DiscardingQueue())
    except ImportError as error:
        print(f"smoke failed: {error}")
        return SMOKE_FAILED
    except Exception as error:
        print(f"smoke passed with {type(error).__name__}")
    else:
        print("smoke passed")
    wedge = importlib.import_module("molecule_runtime.runtime_wedge")
    return SMOKE_FAILED if wedge.is_wedged() else SMOKE_PASSED


class _DiscardingQueue(EventQueue):
    """An event queue whose events are never read."""

    async def enqueue_event(self, event: Event) -> None:
        del event


async def _serve(executor: AgentExecutor, adapter: Any) -> None:
    card = AgentCard(name="hosted", capabilities=AgentCapabilities(streaming=True))
    handler = DefaultRequestHandler(agent_executor=executor, task_store=InMemoryTaskStore(), agent_card=card)

    async def transcript(request: Request) -> JSONResponse:
        query = {name: int(value) for name, value in request.query_params.items()}
        return JSONResponse(await adapter.transcript_lines(**query))

    async def wedge(request: Request) -> JSONResponse:
        del request
        return JSONResponse(importlib.import_module("molecule_runtime.runtime_wedge").wedge_reason())

    routes = [
        *create_jsonrpc_routes(handler, "/", enable_v0_3_compat=True),
        Route("/transcript", transcript),
        Route("/wedge", wedge),
    ]
    app = Starlette(routes=routes)
    server = _Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"A2A at http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)
        await server.serve([listener])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
