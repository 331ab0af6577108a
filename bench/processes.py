"""The processes of a run: the scripted model, the bare driver, the floor and our agent, each in its own process."""

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Final

import anyio
import psutil
from anyio.streams.buffered import BufferedByteReceiveStream

from bench.sides import BareSide, HttpSide, Side
from codex_workspace.app_server import UNWANTED_NOTIFICATIONS
from codex_workspace.runtimes.launch import MARK
from tests.e2e.agent_process import REPOSITORY, SECRET, AgentSetup, Backend, spawn
from tests.support.ports import free_port

BARE: Final = (sys.executable, str(Path(__file__).with_name("bare.py")))
FLOOR: Final = (sys.executable, "-m", "bench.floor")
LEAVE_S: Final = 10.0
POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Started:
    """A running side, and the seconds from the start of its process until it was ready.

    The bare driver is ready with codex's first answer, a server with its first 200 of /readyz.
    """

    side: Side
    ready_s: float


@dataclass(frozen=True, slots=True)
class Sides:
    """All three, running, with the same scripted model."""

    bare: BareSide
    floor: HttpSide
    ours: HttpSide


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start codex as a running agent has started it: its command, environment and config.toml."""

    command: Sequence[str]
    environment: Mapping[str, str]
    config: str

    @classmethod
    def of(cls, setup: AgentSetup, agent_pid: int) -> "Recipe":
        """Read it from the agent's codex, which is its child."""
        children = [child for child in psutil.Process(agent_pid).children() if "app-server" in child.cmdline()]
        (codex,) = children
        environment = {name: value for name, value in codex.environ().items() if name != MARK}
        # A library of the agent loads trio if it exists, so this hides it from every side: only the tests have it.
        path = os.pathsep.join([str(REPOSITORY), str(setup.root / "without-trio")])
        config = (Path(environment["CODEX_HOME"]) / "config.toml").read_text()
        # The agent hands its key over the pipe; the others read it from a variable.
        config = config.replace("requires_openai_auth = true", 'env_key = "SCRIPTED_KEY"')
        return cls(codex.cmdline(), {**environment, "PYTHONPATH": path, "SCRIPTED_KEY": SECRET}, config)

    def prepare(self, root: Path) -> tuple[dict[str, str], list[str]]:
        """Create codex's folders under `root`; return the environment, and the arguments of driver and floor."""
        home, cwd = root / "codex", root / "workspace"
        for folder in (home, cwd):
            folder.mkdir(parents=True)
        (home / "config.toml").write_text(self.config)
        hello = {
            "clientInfo": {"name": "bare", "title": "Bare driver", "version": "0"},
            "capabilities": {"experimentalApi": True, "optOutNotificationMethods": list(UNWANTED_NOTIFICATIONS)},
        }
        thread = {
            "cwd": str(cwd),
            "model": "gpt-5.5",
            "modelProvider": "scripted",
            "sandbox": "workspace-write",
            "approvalPolicy": "never",
        }
        return {**self.environment, "CODEX_HOME": str(home)}, [json.dumps(hello), json.dumps(thread), *self.command]


@asynccontextmanager
async def open_sides(root: Path, model_url: str) -> AsyncIterator[tuple[Sides, Recipe]]:
    """Run all three in folders under `root` while the block is open."""
    async with AsyncExitStack() as stack:
        setup = new_setup(root / "ours", model_url)
        ours, _ = await stack.enter_async_context(open_agent(setup))
        recipe = Recipe.of(setup, ours.pid)
        bare, _ = await stack.enter_async_context(open_bare(recipe, root / "bare"))
        floor, _ = await stack.enter_async_context(open_floor(recipe, root / "floor"))
        yield Sides(bare, floor, ours), recipe


def new_setup(root: Path, model_url: str, backend: Backend = "app-server") -> AgentSetup:
    """Create an agent's folder and return its setup.

    Its home folder is empty, because codex runs a login shell for every new thread, whose profile would be measured.
    """
    home = root / "home"
    home.mkdir(parents=True)
    return AgentSetup(root, model_url, backend, environment={"HOME": str(home)}, port=free_port())


@asynccontextmanager
async def open_model() -> AsyncIterator[str]:
    """Start the scripted model and return its base URL."""
    command = [sys.executable, "-m", "codex_workspace.devkit.model"]
    async with _running(command, {"PYTHONPATH": str(REPOSITORY)}) as process:
        yield (await _stdout(process).receive_until(b"\n", 1000)).decode()
        process.terminate()


@asynccontextmanager
async def open_bare(recipe: Recipe, root: Path) -> AsyncIterator[tuple[BareSide, float]]:
    """Start the bare driver; return it and its seconds to codex's first answer."""
    environment, arguments = recipe.prepare(root)
    start = time.perf_counter()
    async with _running([*BARE, *arguments], environment) as process:
        assert process.stdin is not None
        side = BareSide(process.pid, process.stdin, _stdout(process))
        await side.ready()
        yield side, time.perf_counter() - start


@asynccontextmanager
async def open_floor(recipe: Recipe, root: Path) -> AsyncIterator[tuple[HttpSide, float]]:
    """Start the floor; return it and its seconds until it was ready."""
    environment, arguments = recipe.prepare(root)
    port = free_port()
    start = time.perf_counter()
    async with _running([*FLOOR, str(port), *arguments], environment) as process:
        side = HttpSide(process.pid, port)
        await _ready(port)
        yield side, time.perf_counter() - start
        side.close()
        process.terminate()


@asynccontextmanager
async def open_agent(setup: AgentSetup) -> AsyncIterator[tuple[HttpSide, float]]:
    """Start the agent; return it and its seconds until it was ready."""
    start = time.perf_counter()
    process = spawn(setup)
    try:
        await _ready(setup.port)
        side = HttpSide(process.pid, setup.port)
        yield side, time.perf_counter() - start
        side.close()
    finally:
        process.terminate()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(LEAVE_S):
                await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
            with suppress(psutil.NoSuchProcess):
                process.kill()


async def _ready(port: int) -> None:
    """Wait until the server reports that it is ready, like a platform's probe."""
    with anyio.fail_after(60):
        while not await _is_ready(port):  # noqa: ASYNC110 - the state of another process
            await anyio.sleep(POLL_S)


async def _is_ready(port: int) -> bool:
    try:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return (await stream.receive()).startswith(b"HTTP/1.1 200 ")
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        return False


@asynccontextmanager
async def _running(command: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[anyio.abc.Process]:
    """Run a process while the block is open; then close its stdin and wait for at most `LEAVE_S` seconds."""
    async with await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=None, env=environment) as process:
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                assert process.stdin is not None
                await process.stdin.aclose()
                with anyio.move_on_after(LEAVE_S):
                    await process.wait()
                with suppress(ProcessLookupError):
                    process.kill()


def _stdout(process: anyio.abc.Process) -> BufferedByteReceiveStream:
    assert process.stdout is not None
    return BufferedByteReceiveStream(process.stdout)
