"""Shared parts of the demos: agents as processes, in a temporary folder, and the output on the terminal.

What is shown is left to `demo` and `demo_platform`.
"""

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import yaml
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from rich.console import Console

from codex_workspace.cli.terminal import open_console
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import AgentError
from codex_workspace.config.settings import CONFIG_NAME, PACKAGE_DIR
from codex_workspace.runtimes.markdown import clean

PROGRAM_DIR: Final = PACKAGE_DIR.parent
"""The folder from which `python -m codex_workspace` finds the package, whether it is installed or not."""

START_TIMEOUT_S: Final = 120.0
"""Only a hang takes so long; a busy machine takes tens of seconds."""

STOP_TIMEOUT_S: Final = 15.0
"""The agent's shutdown takes less than 10 s."""

MAX_LOG_LINE_BYTES: Final = 1 << 20

PASSED_ENVIRONMENT: Final = frozenset(("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "CODEX_BIN", "SANDBOX_FALLBACK"))
"""Variables that the demo's agent inherits: no key, no proxy, and no settings of another agent."""


class DemoFailed(AgentError):
    """A step of the demo had an unexpected result."""


@dataclass(frozen=True, slots=True)
class DemoAgent:
    """A running agent: where it listens, and what it said when it was ready."""

    url: str
    ready: str
    process: Process

    async def stop(self) -> None:
        """Stop the agent with SIGTERM, as Docker does.

        Raises:
            Unexpected: it did not end in time, or not with exit code 0.
        """
        self.process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_TIMEOUT_S):
            code = await self.process.wait()
            if code != 0:
                raise DemoFailed(f"the agent ended with exit code {code} when it was asked to stop")
            return
        raise DemoFailed(f"the agent did not end within {STOP_TIMEOUT_S:g} s after SIGTERM")


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    """An agent's temporary folder, and the environment in which it runs."""

    folder: Path
    environment: Mapping[str, str]

    @property
    def workspace(self) -> Path:
        """Codex's working folder."""
        return self.folder / "workspace"


class DemoSteps:
    """Prints each step of a demo, and its duration."""

    def __init__(self, console: Console) -> None:
        self.console: Final = console
        self._number = 0
        self._began = 0.0

    def step(self, what: str) -> None:
        """Start a step."""
        self._number += 1
        self._began = anyio.current_time()
        gap = "\n" if self._number > 1 else ""
        self.console.out(f"{gap}{self._number}. {what}", style="bold")

    def done(self, what: str) -> None:
        """Print the result of the step."""
        self.console.out(f"[{clean(what)}, {anyio.current_time() - self._began:.1f} s]")


Play = Callable[[DemoSteps, Path], Awaitable[str]]
"""Runs in a folder and returns a summary; raises `AgentError` if a result is unexpected."""


async def shown(play: Play, env: Mapping[str, str]) -> int:
    """Run a demo in a temporary folder until it ends or a signal arrives.

    Returns:
        The exit code: 0 if every result was as expected, 1 if not, 130 after an interrupt.
    """
    console = open_console()
    # The demo prints its own messages; the SDK's log would repeat them.
    logging.basicConfig(handlers=[logging.NullHandler()])
    code = 130
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with task_group() as tasks:

            async def leave_when_told() -> None:
                async for _ in signals:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(leave_when_told)
            code = await _shown(play, console)
            tasks.cancel_scope.cancel()
    if code == 130:
        console.out("\nInterrupted; all processes of the demo have been stopped.")
    return code


async def _shown(play: Play, console: Console) -> int:
    started = anyio.current_time()
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        console.out("The demo needs a writable temporary folder; add --tmpfs /tmp, or set TMPDIR", style="red")
        return 1
    try:
        with tempfile.TemporaryDirectory(prefix="codex-workspace-demo-") as folder:
            seen = await play(DemoSteps(console), Path(folder))
    except AgentError as error:
        console.out(f"\nNot as expected: {clean(str(error))}", style="red")
        return 1
    console.out(f"\nCompleted in {anyio.current_time() - started:.1f} s: {seen}.", style="green")
    return 0


def write_scenario(folder: Path, scenario: Sequence[Mapping[str, object]]) -> Path:
    """Write the scripted model's scenario; its module describes the keys."""
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump(list(scenario)), encoding="utf-8")
    return file


def set_up(
    folder: Path, model_url: str, env: Mapping[str, str], own: Mapping[str, str], name: str = "demo-agent"
) -> DemoEnvironment:
    """Write an agent's configuration, as an operator would for any Responses endpoint.

    own: what this agent has of an environment beside what all have.
    """
    stage = DemoEnvironment(folder, {})
    config, home, temporary = folder / "config", folder / "home", folder / "tmp"
    for made in (config, home, temporary, stage.workspace):
        made.mkdir(parents=True)
    content = {
        "name": name,
        "runtime": "codex",
        # A model whose abilities codex knows, apply_patch among them.
        "runtime_config": {"model": "gpt-5.5", "provider": "demo"},
        "providers": [
            {
                "name": "demo",
                "auth_mode": "openai_compat_responses",
                "base_url": model_url,
                "auth_env": ["DEMO_KEY"],
            }
        ],
    }
    (config / CONFIG_NAME).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    passed = {name: value for name, value in env.items() if name in PASSED_ENVIRONMENT}
    common = {
        "HOME": str(home),
        # Codex's sandbox leaves a lock file there.
        "TMPDIR": str(temporary),
        "WORKSPACE_CONFIG_PATH": str(config),
        "WORKSPACE_STATE_DIR": str(folder / "state"),
        "WORKSPACE_DIR": str(stage.workspace),
        "A2A_PORT": "0",
        "LOG_FORMAT": "json",
        "DEMO_KEY": secrets.token_urlsafe(24),
    }
    return DemoEnvironment(folder, passed | common | dict(own))


@asynccontextmanager
async def running(stage: DemoEnvironment) -> AsyncIterator[DemoAgent]:
    """Run the agent as a process. It is ready when the block starts, and stopped when the block ends.

    Raises:
        Unexpected: it did not become ready.
    """
    process = await anyio.open_process(
        [sys.executable, "-m", "codex_workspace", "serve"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=PROGRAM_DIR,
        env=stage.environment,
        # Ctrl-C on the terminal is for us; we stop the agent in good order.
        start_new_session=True,
    )
    try:
        async with task_group() as tasks:
            log = _Log(process)
            tasks.start_soon(log.read)
            yield await _when_ready(process, log)
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _when_ready(process: Process, log: "_Log") -> DemoAgent:
    with anyio.move_on_after(START_TIMEOUT_S):
        await log.ready_or_ended.wait()
    if log.url is None:
        raise DemoFailed(f"the agent did not start; its last words: {log.last or 'none'}")
    return DemoAgent(log.url, log.ready, process)


async def _end(process: Process) -> None:
    """Stop the agent, with SIGKILL if necessary; codex exits when its pipe is closed."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await process.wait()
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
    await process.aclose()


class _Log:
    """Reads the agent's log: finds the address when the agent is ready, and keeps the last line."""

    def __init__(self, process: Process) -> None:
        assert process.stderr is not None
        self._lines = BufferedByteReceiveStream(process.stderr)
        self.ready_or_ended = anyio.Event()
        self.ready = ""
        self.url: str | None = None
        self.last = ""

    async def read(self) -> None:
        """Read to the end, so that the agent never blocks on its log."""
        try:
            while True:
                self._take((await self._lines.receive_until(b"\n", MAX_LOG_LINE_BYTES)).decode("utf-8", "replace"))
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            pass
        finally:
            self.ready_or_ended.set()

    def _take(self, line: str) -> None:
        self.last = _log_message(line)
        ready, found, url = self.last.partition(", A2A at ")
        if found and ready.startswith("ready: "):
            self.ready, self.url = self.last, url
            self.ready_or_ended.set()


def _log_message(line: str) -> str:
    """Return the message of a JSON log line, or the line itself if it is not JSON."""
    try:
        record = json.loads(line)
    except ValueError:
        return line.strip()
    message = record.get("message") if isinstance(record, dict) else None
    return message if isinstance(message, str) else line.strip()
