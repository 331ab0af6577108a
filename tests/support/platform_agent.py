"""An agent on the simulated platform, with an executor that echoes messages instead of codex."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
from a2a.helpers import new_task_from_user_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.tasks import TaskUpdater
from a2a.types import Part
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.telemetry import TaskOutcome
from codex_workspace.config.environment import Secret
from codex_workspace.config.settings import PlatformConfig
from codex_workspace.devkit.platform.app import StandInPlatform
from codex_workspace.platform.active_tasks import TrackedExecutor
from codex_workspace.platform.client import PlatformClient, WorkspaceToken, open_platform_client
from codex_workspace.platform.deadline_reply import DeadlineReplyHandler
from codex_workspace.platform.dispatcher import OWNER
from codex_workspace.platform.registration import Membership, join_platform
from codex_workspace.server.app import ServerOptions, build_app, serving
from codex_workspace.server.sockets import bind
from codex_workspace.storage.store import Store, open_store

ME = "11111111-1111-4111-8111-111111111111"
PEER = "22222222-2222-4222-8222-222222222222"


@dataclass
class Echo(AgentExecutor):
    """Echoes each message after `gate` opens; fails or asks if the message says so."""

    heard: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    gate: anyio.Event = field(default_factory=anyio.Event)

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.message is not None
        text = "".join(part.text for part in context.message.parts)
        self.heard.append(text)
        self.tasks.append(context.task_id or "")
        task = context.current_task or new_task_from_user_message(context.message)
        task.id, task.context_id = context.task_id or task.id, context.context_id or task.context_id
        await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        await updater.start_work()
        await self.gate.wait()
        if "please ask" in text:
            await updater.requires_input(updater.new_agent_message([Part(text="which one?")]))
            return
        if "please fail" in text:
            await updater.failed(updater.new_agent_message([Part(text="the work went wrong")]))
            return
        await updater.add_artifact([Part(text=f"echo: {text}")], artifact_id="answer", name="answer", last_chunk=True)
        await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Do nothing: no test cancels."""


@dataclass
class PlatformAgentSetup:
    """The folder and settings of an agent; they outlive its processes."""

    folder: Path
    platform: StandInPlatform
    delivery: Literal["push", "poll", "auto"] = "poll"
    workspace_id: str = ME
    echo: Echo = field(default_factory=Echo)
    answer_within_s: float = 60.0
    at_once: int = 10
    tokens: dict[str, str] = field(default_factory=dict)
    running: Callable[[], int] | None = None


@dataclass
class PlatformAgent:
    """A running agent."""

    store: Store
    api: PlatformClient
    url: str
    stop: anyio.Event
    handler: DeadlineReplyHandler
    secrets: list[Secret]


@asynccontextmanager
async def running_platform_agent(setup: PlatformAgentSetup) -> AsyncIterator[PlatformAgent]:
    """Run an agent until the block ends, without a graceful stop."""
    tracked = TrackedExecutor(setup.echo)
    stop, secrets = anyio.Event(), list[Secret]()
    token = WorkspaceToken(setup.folder / "token", [setup.folder / ".auth_token"])
    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        options = ServerOptions("echo", "echoes", "1", url, tokens=setup.tokens)

        async def ready() -> None:
            return None

        async with (
            open_store(f"sqlite:///{setup.folder / 'store.sqlite3'}") as store,
            build_app(options, tracked, store, ready, handler_class=DeadlineReplyHandler) as app,
            open_platform_client(setup.platform.url, setup.workspace_id, token) as api,
        ):
            await app.resume()
            assert isinstance(app.handler, DeadlineReplyHandler)

            def let_in(secret: Secret) -> None:
                secrets.append(secret)
                app.add_principal(OWNER, secret.reveal())

            member = Membership(
                PlatformConfig(delivery=setup.delivery, heartbeat_s=1.0, answer_within_s=setup.answer_within_s),
                url,
                MessageToDict(app.card),
                setup.at_once,
                frozenset({OWNER, "operator"}),
                let_in,
                tracked.tasks,
                lambda: dict.fromkeys(TaskOutcome, 0),
                ready,
                setup.running or (lambda: len(tracked.tasks.texts)),
            )
            async with (
                serving(app.asgi, listener),
                join_platform(member, api, store.outbox, app.front, app.handler, stop),
            ):
                yield PlatformAgent(store, api, url, stop, app.handler, secrets)
