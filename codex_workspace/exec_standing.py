"""How codex stands where each turn has a process of its own: nothing runs in between, so what can be told is whether
the binary is there and its sandbox works.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app_server import MAX_REASON_CHARS, MINIMUM_VERSION, Launch
from codex_workspace.codex_home import CONFIG_NAME
from codex_workspace.errors import CodexCannotStart
from codex_workspace.exec_conversation import Tally
from codex_workspace.exec_once import run_once
from codex_workspace.exec_process import CodexExec
from codex_workspace.sandbox import PROBE_TIMEOUT_S, WITHOUT, blocked
from codex_workspace.supply import SupplyFigures
from codex_workspace.versions import Version, dotted

if TYPE_CHECKING:
    import subprocess


@dataclass(frozen=True, slots=True)
class Found:
    """A codex that was looked at."""

    version: Version


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
        """Ask codex for its version, have it read its configuration, and run a command in its sandbox.

        Raises:
            CodexCannotStart: it is not there or too old, does not take its config.toml, or has no sandbox that works on
                this machine.
        """
        version = await self._codex.version()
        if version < MINIMUM_VERSION:
            raise CodexCannotStart(
                f"codex {dotted(version)} is too old for backend exec; install {dotted(MINIMUM_VERSION)} or newer"
            )
        await refuse_broken_config(self._launch)
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


async def refuse_broken_config(launch: Launch) -> None:
    """Let codex read its config.toml, by a command that does nothing else and asks no model.

    Raises:
        CodexCannotStart: it does not take the file; with codex's own words.
    """
    ran = await _run(launch, "mcp", "list")
    if ran.returncode != 0:
        said = (ran.stderr or ran.stdout).decode("utf-8", "replace")
        why = " ".join(said.partition("Error:")[2].split() or said.split())
        raise CodexCannotStart(
            f"codex does not take {launch.codex_home / CONFIG_NAME}: {why[:MAX_REASON_CHARS]}; mend the file"
        )


async def refuse_blocked(launch: Launch, mode: str) -> None:
    """Have `codex sandbox` run a command, in its strictest sandbox; nothing where `mode` (of config.yaml) has none.

    Raises:
        CodexCannotStart: the sandbox cannot work here; with codex's own words, and the two ways out.
    """
    if mode in WITHOUT:
        return
    ran = await _run(launch, "sandbox", "--", "true")
    if ran.returncode != 0:
        raise blocked(mode, _last_line(ran.stderr or ran.stdout) or f"exit code {ran.returncode}")


async def _run(launch: Launch, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    late = f"codex {arguments[0]} did not end within {PROBE_TIMEOUT_S:g} s"
    return await run_once(launch, *arguments, within_s=PROBE_TIMEOUT_S, late=late)


def _last_line(said: bytes) -> str:
    """Return the last line, as warnings come first."""
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
