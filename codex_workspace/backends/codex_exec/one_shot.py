"""The end of a codex that was started for one thing, with all that it has started, but not in mid-refresh of a login.

Who may begin is left to `exec_login`, what was said and done to those who started it.

A codex that does one thing and ends: what it has said, and nothing left of it.
"""

import signal
import subprocess
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream

from codex_workspace.backends.codex_exec.login_lock import LoginLock
from codex_workspace.common.errors import MAX_REASON_CHARS, CodexCannotStart
from codex_workspace.common.processes import kill_marked, kill_marked_nowait, kill_tree, kill_tree_nowait, process_tree
from codex_workspace.runtimes.launch import MARK, Launch
from codex_workspace.runtimes.process import DRAIN_S, KILL_GRACE_S, MASK, Process, spawn

TERM_GRACE_S: Final = 1.5
"""How long codex may take to end after SIGTERM before it gets SIGKILL."""

KILLED_S: Final = 1.0
"""How long a process that got SIGKILL is waited for where nothing else may run; it takes a few milliseconds."""


async def end_codex(process: Process, mark: str, gate: LoginLock | None, term_grace_s: float = TERM_GRACE_S) -> None:
    """End codex and all that it started, if it runs still; whoever is cancelled ends it too.

    Args:
        process: codex, the leader of its own group.
        mark: what its processes bear in their environment.
        gate: of the login that it goes by, and may be refreshing; None where it goes by none.
        term_grace_s: how long it may take after SIGTERM.
    """
    # Codex gives its MCP servers, and a command its own, an environment without the mark; killed, it ends none.
    kin = process_tree(process.popen.pid)
    is_ended = False
    try:
        with anyio.CancelScope(shield=True):
            if process.exit_code is None and gate is not None:
                await gate.spared(lambda: process.exit_code is not None)
                kin = process_tree(process.popen.pid, kin)
            if process.exit_code is None:
                process.signal_group(signal.SIGTERM)
                if not await process.ended_within(term_grace_s):
                    process.signal_group(signal.SIGKILL)
                    await process.ended_within(KILL_GRACE_S)
            await kill_tree(process.popen.pid, kin)
            await kill_marked(MARK, mark)
            is_ended = True
    finally:
        if not is_ended:
            # A shield does not hold what asyncio itself cancels, and there may be no further chance.
            process.signal_group(signal.SIGKILL)
            kill_tree_nowait(process.popen.pid, kin)
            kill_marked_nowait(MARK, mark)
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(KILLED_S)


KEPT_BYTES: Final = 64 * 1024
"""Of each output that much is kept, the end of it; codex says a few lines."""


async def run_once(launch: Launch, *arguments: str, within_s: float, late: str) -> "subprocess.CompletedProcess[bytes]":
    """Run codex with nothing to read, and return what it has said; whatever it has started ends with it.

    Of either output the last `KEPT_BYTES` come back, without the secrets that it was started with.

    Args:
        launch: how to start it.
        arguments: what stands behind its name.
        within_s: how long it may take.
        late: the sentence where it takes longer.

    Raises:
        CodexCannotStart: it is not there, or takes longer.
    """
    mark = f"{launch.family}.{uuid.uuid4().hex}"
    command = [str(launch.binary), *arguments]
    process, stdin, stdout, stderr = spawn(launch, command, mark)
    said, complained = _End(process.secrets), _End(process.secrets)
    try:
        await stdin.aclose()
        with anyio.fail_after(within_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(said.read, stdout)
                tasks.start_soon(complained.read, stderr)
                await process.watch()
                # A descendant of codex's may hold the pipes for ever.
                tasks.cancel_scope.deadline = anyio.current_time() + DRAIN_S
    except TimeoutError as error:
        raise CodexCannotStart(late) from error
    finally:
        try:
            # `codex mcp list` refreshes a login that is due, and others may come to do so.
            await end_codex(process, mark, LoginLock(launch.codex_home))
        finally:
            with anyio.CancelScope(shield=True):
                for stream in (stdin, stdout, stderr):
                    await stream.aclose()
            process.close()
    return subprocess.CompletedProcess(command, process.popen.returncode, said.shown(), complained.shown())


@dataclass(slots=True)
class _End:
    """The end of what is read, and what must not be shown of it: the longest secret first."""

    secrets: Sequence[bytes]
    kept: bytes = b""

    async def read(self, stream: ByteReceiveStream) -> None:
        """Read a stream to its end."""
        try:
            while True:
                self.kept = (self.kept + await stream.receive())[-(KEPT_BYTES + self._longest) :]
        except anyio.EndOfStream:
            pass

    def shown(self) -> bytes:
        """Return what may be shown of it."""
        text = self.kept
        for secret in self.secrets:
            text = text.replace(secret, MASK)
        # What is full may begin with the end of a secret.
        return text[self._longest :] if len(self.kept) > KEPT_BYTES else text

    @property
    def _longest(self) -> int:
        return max((len(secret) for secret in self.secrets), default=0)


def last_line(said: bytes) -> str:
    """Return the last line of what it has said, as warnings come first; "" where it has said nothing."""
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:MAX_REASON_CHARS]
