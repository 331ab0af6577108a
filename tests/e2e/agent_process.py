"""Start the agent as a child process on a free port, with the scripted model as its provider."""

import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

import anyio
import psutil
import yaml

from tests.support.waiting import HANG_S, eventually

REPOSITORY: Final = Path(__file__).resolve().parents[2]
Backend: TypeAlias = Literal["app-server", "exec"]

SECRET: Final = "sk-scripted-0123456789"
READY: Final = re.compile(r"A2A at ([^\s\"]+)")


@dataclass(frozen=True)
class AgentSetup:
    """The folders and settings of one agent; they outlive its processes.

    config: further sections of config.yaml. port: 0 picks a free port at each start.
    """

    root: Path
    model_url: str
    backend: Backend = "app-server"
    codex: Mapping[str, object] = field(default_factory=dict)
    limits: Mapping[str, object] = field(default_factory=dict)
    push: Mapping[str, object] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def log(self) -> Path:
        """The log file of all its processes."""
        return self.root / "agent.log"

    def prepare(self) -> dict[str, str]:
        """Write config.yaml and return the agent's whole environment."""
        for name in ("workspace", "config", "state", "home"):
            (self.root / name).mkdir(exist_ok=True)
        config = {
            "name": "test-agent",
            "runtime": "codex",
            "template_schema_version": 1,
            "runtime_config": {"model": "gpt-5.5", "provider": "scripted"},
            "providers": [
                {
                    "name": "scripted",
                    "auth_mode": "openai_compat_responses",
                    "base_url": self.model_url,
                    "auth_env": ["SCRIPTED_KEY"],
                    "wire_api": "responses",
                    "model_prefixes": ["gpt-"],
                }
            ],
            "codex": {"backend": self.backend, **self.codex},
            "limits": dict(self.limits),
            "push": dict(self.push),
            **self.config,
        }
        (self.root / "config" / "config.yaml").write_text(yaml.safe_dump(config))
        own = {
            "WORKSPACE_CONFIG_PATH": str(self.root / "config"),
            "WORKSPACE_STATE_DIR": str(self.root / "state"),
            "WORKSPACE_DIR": str(self.workspace),
            "A2A_PORT": str(self.port),
            "SCRIPTED_KEY": SECRET,
            # Commands run in a login shell, and the profile of a developer's own home can be slow.
            "HOME": str(self.root / "home"),
            "PYTHONPATH": str(REPOSITORY),
        }
        passed = {name: os.environ[name] for name in ("PATH", "LANG", "CODEX_BIN") if name in os.environ}
        return passed | own | dict(self.environment)


@dataclass(frozen=True)
class AgentProcess:
    """A running agent."""

    process: psutil.Popen
    url: str
    log: Path

    def codex(self) -> psutil.Process:
        """The codex process of this agent."""
        (codex,) = self.codexes()
        return codex

    def codexes(self) -> list[psutil.Process]:
        """The running codex processes: zero or two while codex is being replaced."""
        found = []
        for child in self.process.children():
            # A process that has ended but was not reaped has no command line.
            with suppress(psutil.NoSuchProcess):
                if not {"app-server", "exec"}.isdisjoint(child.cmdline()):
                    found.append(child)
        return found

    def commands(self, word: str) -> list[psutil.Process]:
        """The descendant processes whose first argument is `word`, without the shells and sandboxes around them."""
        found = []
        for child in self.process.children(recursive=True):
            with suppress(psutil.Error):
                if word in child.cmdline()[1:2]:
                    found.append(child)
        return found

    async def ended(self, within_s: float = HANG_S) -> int:
        """Wait until the process ends, and return its exit code."""
        with anyio.fail_after(within_s):
            return int(await anyio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True))

    async def stop(self) -> int:
        """Send SIGTERM, as a container engine does, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()


def spawn(setup: AgentSetup, module: Sequence[str] = ("codex_workspace", "serve")) -> psutil.Popen:
    """Start the agent and return its process without waiting until it is ready; the caller must end it."""
    environment = setup.prepare()
    with setup.log.open("ab") as output:
        return psutil.Popen(
            [sys.executable, "-m", *module], env=environment, cwd=setup.root, stdout=output, stderr=output
        )


@asynccontextmanager
async def running_agent(
    setup: AgentSetup, module: Sequence[str] = ("codex_workspace", "serve")
) -> AsyncIterator[AgentProcess]:
    """Start the agent, wait until it is ready, and stop it at the end of the block."""
    start = setup.log.stat().st_size if setup.log.exists() else 0
    process = spawn(setup, module)
    try:
        yield AgentProcess(process, await _url(process, setup.log, start), setup.log)
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(10):
                await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
            with suppress(psutil.NoSuchProcess):
                process.kill()


async def _url(process: psutil.Popen, log: Path, start: int) -> str:
    def ready() -> str | None:
        output = log.read_bytes()[start:].decode(errors="replace")
        if found := READY.search(output):
            return found.group(1)
        assert process.poll() is None, f"the agent ended before it was ready:\n{output}"
        return None

    return await eventually(ready)
