"""Protects the login of a ChatGPT subscription while one of several `codex exec` processes refreshes it.

Codex refreshes an access token in its last five minutes, before it calls the model; each refresh token is valid once.
If two processes refresh at the same time, the provider rejects the second one. If a process is ended between the
request and the response, the token on disk is already used, and the login is lost. So runs start one at a time while a
refresh is due, and no process is ended during one.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.common.concurrency import task_group
from codex_workspace.config.login import LoginOnDisk, login_on_disk

logger = logging.getLogger(__name__)

MARGIN_S: Final = 2.0
"""How long codex takes to start: it may refresh a login that becomes due within this time."""

PATIENCE_S: Final = 10.0
"""How long other runs wait for a refresh, which usually takes a second and may fail."""

SPARE_S: Final = 3.0
"""How long to delay the end of a process that may be refreshing the login."""

LOOK_AGAIN_S: Final = 0.02


class LoginLock:
    """Delays starts and ends of the runs of one CODEX_HOME.

    While a refresh is due, a start waits up to `patience_s` seconds for the previous one; a login that is not refreshed
    within that time delays no further run. An end waits up to `spare_s` seconds.
    """

    def __init__(self, codex_home: Path, patience_s: float = PATIENCE_S, spare_s: float = SPARE_S) -> None:
        self._home = codex_home
        self._patience_s = patience_s
        self._spare_s = spare_s
        self._alone = anyio.Lock()
        self._given_up: str | None = None

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Wait until no other run is about to refresh the login; the block is a run."""
        async with task_group() as tasks:
            let_in = anyio.Event()
            # A cancelled run may refresh the login until its process has ended.
            run = anyio.CancelScope(shield=True)
            tasks.start_soon(self._keep_others_out, let_in, run)
            try:
                await let_in.wait()
                yield
            finally:
                run.cancel()
                tasks.cancel_scope.cancel()

    async def spared(self, is_over: Callable[[], bool]) -> None:
        """Wait while codex may be refreshing the login: until it is fresh, `is_over` returns True, or time is up.

        A cancellation is raised after the wait.
        """
        cancelled: BaseException | None = None
        ends = anyio.current_time() + self._spare_s
        with anyio.CancelScope(shield=True):
            while not is_over() and anyio.current_time() < ends:
                try:
                    if await self._due() is None:
                        break
                    await anyio.sleep(LOOK_AGAIN_S)
                except anyio.get_cancelled_exc_class() as error:
                    # asyncio's own cancellation passes the shield.
                    cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _keep_others_out(self, let_in: anyio.Event, run: anyio.CancelScope) -> None:
        """Let one run start, and delay others while its refresh is due."""
        async with self._alone:
            let_in.set()
            with run:
                await self._refreshed()

    async def _refreshed(self) -> None:
        begun, login = time.time(), await self._due()
        with anyio.move_on_after(self._patience_s):
            while login is not None and login.mark != self._given_up:
                # Another process writes the file, so it is polled.
                await anyio.sleep(LOOK_AGAIN_S)
                login = await self._due()
        if login is not None and login.mark != self._given_up and login.due_at + MARGIN_S < begun:
            logger.warning("codex has not refreshed the login within %g s; further runs do not wait", self._patience_s)
            self._given_up = login.mark

    async def _due(self) -> LoginOnDisk | None:
        """Return the login if its refresh is due; None if it is fresh or missing."""
        login = await anyio.to_thread.run_sync(login_on_disk, self._home)
        return login if login is not None and login.due_at - MARGIN_S < time.time() else None
