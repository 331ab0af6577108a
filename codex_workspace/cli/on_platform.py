"""Put our own host on the platform."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

import anyio
from google.protobuf.json_format import MessageToDict

from codex_workspace.agent import Agent
from codex_workspace.common.files import replace_file
from codex_workspace.config.environment import Secret
from codex_workspace.config.settings import OPERATOR, PlatformSettings, Settings
from codex_workspace.platform.active_tasks import TrackedExecutor
from codex_workspace.platform.client import PlatformClient, read_secret
from codex_workspace.platform.deadline_reply import DeadlineReplyHandler
from codex_workspace.platform.dispatcher import OWNER
from codex_workspace.platform.inbox import inbox_slots
from codex_workspace.platform.registration import Membership, join_platform
from codex_workspace.server.app import Application


@dataclass(frozen=True, slots=True)
class PlatformMember:
    """An agent on the platform; `executor` replaces its executor."""

    handler_class: ClassVar = DeadlineReplyHandler

    settings: Settings
    platform: PlatformSettings
    client: PlatformClient
    agent: Agent
    executor: TrackedExecutor

    @asynccontextmanager
    async def joined(self, app: Application, url: str, stop: anyio.Event) -> AsyncIterator[None]:
        """Be on the platform while the block is open; `stop` is set when the workspace is removed."""
        agent = self.agent

        def accept(secret: Secret) -> None:
            if read_secret(self.platform.secret_file) != secret:
                replace_file(self.platform.secret_file, secret.reveal().encode())
            app.add_principal(OWNER, secret.reveal())

        known = read_secret(self.platform.secret_file)
        if known is not None:
            accept(known)
        member = Membership(
            self.settings.config.platform,
            url,
            MessageToDict(app.card),
            inbox_slots(self.settings),
            # If callers need no token, the platform's messages cannot be told from others.
            frozenset({OWNER} if self.settings.tokens or self.settings.own_token else {OWNER, OPERATOR}),
            accept,
            self.executor.tasks,
            agent.telemetry.metrics.task_counts.copy,
            agent.lasting_problem,
            lambda: agent.admission.running,
        )
        assert isinstance(app.handler, DeadlineReplyHandler)
        async with join_platform(member, self.client, agent.store.outbox, app.front, app.handler, stop):
            yield
