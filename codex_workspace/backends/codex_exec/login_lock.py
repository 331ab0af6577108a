"""Several `codex exec` and one login of a ChatGPT subscription: one at a time begins where codex will refresh it, and
none is ended in the middle of that.

Codex refreshes an access token that holds for less than five minutes before it asks the model (0.136 to 0.169), and a
refresh token is good for once. Of two processes that do so at the same time, the second is refused and asks with what
it has. One that finds the token refreshed on disk takes that, so nothing else has to wait. One that is ended between
the question and the answer leaves a token on disk that is used up: the login is lost, and a person has to log in anew.
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
"""What codex takes to start: it may refresh what is due so much later; what is due for longer it does refresh."""

PATIENCE_S: Final = 10.0
"""How long the others wait for the one that refreshes; it takes a second as a rule, and may fail."""

SPARE_S: Final = 3.0
"""How long the end of a codex that may be refreshing is put off: a caller waits for it, and so does a stop."""

LOOK_AGAIN_S: Final = 0.02


class LoginLock:
    """Lets the runs of one CODEX_HOME in, and says when one may be ended.

    Runs wait for one another for `patience_s` seconds with a login that is due for a refresh. Where none comes, that
    login holds nobody up any more. Ending waits for `spare_s` seconds.
    """

    def __init__(self, codex_home: Path, patience_s: float = PATIENCE_S, spare_s: float = SPARE_S) -> None:
        self._home = codex_home
        self._patience_s = patience_s
        self._spare_s = spare_s
        self._alone = anyio.Lock()
        self._given_up: str | None = None

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Wait until no other run is about to refresh the login; the block is a run of codex."""
        async with task_group() as tasks:
            let_in = anyio.Event()
            # A run that is cancelled goes on until it is ended, and may be refreshing until then.
            run = anyio.CancelScope(shield=True)
            tasks.start_soon(self._keep_others_out, let_in, run)
            try:
                await let_in.wait()
                yield
            finally:
                run.cancel()
                tasks.cancel_scope.cancel()

    async def spared(self, is_over: Callable[[], bool]) -> None:
        """Wait while a codex may be refreshing the login: until the one on disk is fresh, `is_over`, or time is up.

        Nothing cuts that short: what cancels it is raised afterwards.
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
                    # A shield does not hold what asyncio itself cancels.
                    cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _keep_others_out(self, let_in: anyio.Event, run: anyio.CancelScope) -> None:
        """Let one in, and keep others out while its login is due, for a while."""
        async with self._alone:
            let_in.set()
            with run:
                await self._refreshed()

    async def _refreshed(self) -> None:
        begun, login = time.time(), await self._due()
        with anyio.move_on_after(self._patience_s):
            while login is not None and login.mark != self._given_up:
                # The file is another process's, which tells nobody of its writing.
                await anyio.sleep(LOOK_AGAIN_S)
                login = await self._due()
        if login is not None and login.mark != self._given_up and login.due_at + MARGIN_S < begun:
            logger.warning("codex has not refreshed the subscription's login in %g s; nobody waits", self._patience_s)
            self._given_up = login.mark

    async def _due(self) -> LoginOnDisk | None:
        """Return the login that is due for a refresh, None where there is none or it is fresh."""
        login = await anyio.to_thread.run_sync(login_on_disk, self._home)
        return login if login is not None and login.due_at - MARGIN_S < time.time() else None
