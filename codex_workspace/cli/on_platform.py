"""Put our own host on the platform."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

import anyio
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.files import replace_file
from codex_workspace.common.telemetry import TaskOutcome
from codex_workspace.config.environment import Secret
from codex_workspace.config.settings import OPERATOR, PlatformSettings, Settings
from codex_workspace.platform.active_tasks import TrackedExecutor
from codex_workspace.platform.client import PlatformClient, read_secret
from codex_workspace.platform.deadline_reply import DeadlineReplyHandler
from codex_workspace.platform.dispatcher import OWNER
from codex_workspace.platform.inbox import inbox_slots
from codex_workspace.platform.registration import Membership, join_platform
from codex_workspace.server.app import Application
from codex_workspace.storage.outbox import Outbox
from codex_workspace.tasks.scheduling import AdmissionControl


@dataclass(frozen=True, slots=True)
class PlatformMember:
    """What an agent needs to be on the platform.

    executor: replaces the agent's executor. task_counts: how tasks have ended. lasting_problem: why no message can be
    answered, for a lasting reason.
    """

    handler_class: ClassVar = DeadlineReplyHandler

    settings: Settings
    platform: PlatformSettings
    client: PlatformClient
    outbox: Outbox
    admission: AdmissionControl | None
    executor: TrackedExecutor
    task_counts: Callable[[], Mapping[TaskOutcome, int]]
    lasting_problem: Callable[[], Awaitable[str | None]]

    @asynccontextmanager
    async def joined(self, app: Application, url: str, stop: anyio.Event) -> AsyncIterator[None]:
        """Be on the platform while the block is open; `stop` is set when the workspace is removed."""
        admission, tasks = self.admission, self.executor.tasks

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
            frozenset({OWNER} if self.settings.tokens else {OWNER, OPERATOR}),
            accept,
            tasks,
            self.task_counts,
            self.lasting_problem,
            (lambda: len(tasks.texts)) if admission is None else (lambda: admission.running),
        )
        assert isinstance(app.handler, DeadlineReplyHandler)
        async with join_platform(member, self.client, self.outbox, app.front, app.handler, stop):
            yield
