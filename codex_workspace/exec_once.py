"""A codex that does one thing and ends: what it has said, and nothing left of it."""

import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream

from app_server import DRAIN_S, MASK, Launch, spawn
from codex_workspace.errors import MAX_REASON_CHARS, CodexCannotStart
from codex_workspace.exec_end import end_codex
from codex_workspace.exec_login import LoginGate

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
            await end_codex(process, mark, LoginGate(launch.codex_home))
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
