"""How codex stands where each turn has a process of its own: nothing runs in between, so what can be told is whether
the binary is there and its sandbox works.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import anyio

from app_server import MINIMUM_VERSION, Launch, child_environment
from codex_workspace.errors import CodexCannotStart
from codex_workspace.exec_conversation import Tally
from codex_workspace.exec_process import CodexExec
from codex_workspace.sandbox import PROBE_TIMEOUT_S, WITHOUT, blocked
from codex_workspace.supply import SupplyFigures


@dataclass(frozen=True, slots=True)
class Found:
    """A codex that was looked at."""

    version: tuple[int, int, int]


class ExecStanding:
    """Looks at the codex that turns will be run by.

    Args:
        codex: what runs prompts.
        launch: how codex is started.
        sandbox: codex.sandbox of config.yaml.
        tally: counts the processes.
    """

    def __init__(self, codex: CodexExec, launch: Launch, sandbox: str, tally: Tally) -> None:
        self._codex = codex
        self._launch = launch
        self._sandbox = sandbox
        self._tally = tally

    async def start(self) -> Found:
        """Ask codex for its version, and have it run a command in its sandbox.

        Raises:
            CodexCannotStart: it is not there or too old, or its sandbox does not work on this machine.
        """
        version = await self._codex.version()
        if version < MINIMUM_VERSION:
            raise CodexCannotStart(
                f"codex {_dotted(version)} is too old for backend exec; install {_dotted(MINIMUM_VERSION)} or newer"
            )
        await refuse_blocked(self._launch, self._sandbox)
        return Found(version)

    @property
    def broken(self) -> str | None:
        """Why codex counts as broken; None while its binary is there."""
        if os.access(self._launch.binary, os.X_OK):
            return None
        return f"codex cannot be started: {self._launch.binary} is no program"

    async def not_ready(self, within_s: float) -> str | None:
        """Return why no turn could be begun, as far as that can be told without beginning one."""
        return self.broken

    def figures(self) -> SupplyFigures:
        """Return how many processes there were and are; each has one thread. Their memory is not measured."""
        return SupplyFigures(
            self._tally.started, self._tally.died, self.broken is None, self._tally.running, resident_bytes=0
        )

    async def close(self) -> None:
        """Do nothing: each turn ends its own process."""


async def refuse_blocked(launch: Launch, mode: str) -> None:
    """Have `codex sandbox` run a command, in its strictest sandbox; nothing where `mode` (of config.yaml) has none.

    Raises:
        CodexCannotStart: the sandbox cannot work here; with codex's own words, and the two ways out.
    """
    if mode in WITHOUT:
        return
    command = [str(launch.binary), "sandbox", "--", "true"]
    try:
        with anyio.fail_after(PROBE_TIMEOUT_S):
            ran = await anyio.run_process(
                command,
                stdin=subprocess.DEVNULL,
                cwd=launch.cwd,
                env=child_environment(launch, f"{launch.family}.probe"),
                check=False,
                start_new_session=True,
            )
    except TimeoutError as error:
        raise blocked(mode, f"a command did not end within {PROBE_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise CodexCannotStart(f"codex cannot be started: {Path(command[0])}: {error.strerror}") from error
    if ran.returncode != 0:
        raise blocked(mode, _last_line(ran.stderr or ran.stdout) or f"exit code {ran.returncode}")


def _last_line(said: bytes) -> str:
    """Return the last line, as warnings come first."""
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
