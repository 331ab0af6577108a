"""Several `codex exec` and one login of a ChatGPT subscription: one at a time begins where codex will refresh it.

Codex refreshes an access token that holds for less than five minutes before it asks the model (0.136 to 0.169), and a
refresh token is good for once. Of two processes that do so at the same time, the second is refused and asks with what
it has. One that finds the token refreshed on disk takes that, so nothing else has to wait.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.groups import plain_task_group
from codex_workspace.subscription import expires_at

AHEAD_S: Final = 302.0
"""Codex's five minutes, and what it takes to start."""

PATIENCE_S: Final = 10.0
"""How long the others wait for the one that refreshes; it takes a second as a rule, and may fail."""

LOOK_AGAIN_S: Final = 0.02


class LoginGate:
    """Lets the runs of one CODEX_HOME in; each keeps the others out for `patience_s` seconds at the most."""

    def __init__(self, codex_home: Path, patience_s: float = PATIENCE_S) -> None:
        self._home = codex_home
        self._patience_s = patience_s
        self._alone = anyio.Lock()

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Wait until no other run is about to refresh the login; the block is a run of codex."""
        async with plain_task_group() as tasks:
            let_in = anyio.Event()
            tasks.start_soon(self._keep_others_out, let_in)
            await let_in.wait()
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _keep_others_out(self, let_in: anyio.Event) -> None:
        """Let one in, and keep others out while its login is an old one, for a while."""
        async with self._alone:
            let_in.set()
            with anyio.move_on_after(self._patience_s):
                # The file is another process's, which tells nobody of its writing.
                while await anyio.to_thread.run_sync(self._is_old):  # noqa: ASYNC110
                    await anyio.sleep(LOOK_AGAIN_S)

    def _is_old(self) -> bool:
        until = expires_at(self._home)
        return until is not None and until < time.time() + AHEAD_S
