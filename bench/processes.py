"""The processes of a run: the scripted model, our agent, and the bare driver, each in its own process."""

import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Final

import anyio
import httpx
import psutil
from anyio.streams.buffered import BufferedByteReceiveStream

from bench.sides import BareSide, OurSide, RuntimeSide, plain_blocking, plain_streaming, sdk_blocking, sdk_streaming
from codex_workspace.app_server import UNWANTED_NOTIFICATIONS, command_line
from codex_workspace.codex.thread import ThreadOptions
from codex_workspace.config.loading import load_settings
from codex_workspace.runtimes import create_runtime
from codex_workspace.runtimes.launch import Launch, child_environment
from tests.e2e.agent_process import REPOSITORY, SECRET, AgentSetup, running_agent
from tests.e2e.client import peer

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject

BARE: Final = Path(__file__).with_name("bare.py")
LEAVE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Bench:
    """Both sides, running, with the same scripted model."""

    setup: AgentSetup
    agent: psutil.Process
    agents_codex: psutil.Process
    bare_driver: psutil.Process
    bare: BareSide
    streaming: OurSide
    blocking: OurSide
    plain_streaming: OurSide
    plain_blocking: OurSide


@dataclass(frozen=True, slots=True)
class BareDriver:
    """A running bare driver, and the seconds from its start to codex's first response."""

    side: BareSide
    process: psutil.Process
    ready_s: float


@asynccontextmanager
async def open_bench(root: Path) -> AsyncIterator[Bench]:
    """Run the model and both sides in folders under `root` while the block is open."""
    async with AsyncExitStack() as stack:
        setup = new_setup(root / "ours", await stack.enter_async_context(open_model()))
        agent = await stack.enter_async_context(running_agent(setup))
        driver = await stack.enter_async_context(open_bare(setup, root / "bare"))
        client = await stack.enter_async_context(peer(agent.url))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=120))
        yield Bench(
            setup,
            agent.process,
            agent.codex(),
            driver.process,
            driver.side,
            OurSide(sdk_streaming(client)),
            OurSide(sdk_blocking(client)),
            OurSide(plain_streaming(http, agent.url)),
            OurSide(plain_blocking(http, agent.url)),
        )


def new_setup(root: Path, model_url: str, port: int = 0) -> AgentSetup:
    """Create an agent's folder and return its setup; port 0 picks a free port.

    Its home folder is empty, because codex runs a login shell for every new thread, whose profile would be measured.
    """
    home = root / "home"
    home.mkdir(parents=True)
    return AgentSetup(root, model_url, environment={"HOME": str(home), "A2A_PORT": str(port)})


@asynccontextmanager
async def open_model() -> AsyncIterator[str]:
    """Start the scripted model and return its base URL."""
    command = [sys.executable, "-m", "codex_workspace.devkit.model"]
    async with _running(command, {"PYTHONPATH": str(REPOSITORY)}) as process:
        yield (await _stdout(process).receive_until(b"\n", 1000)).decode()
        process.terminate()


@asynccontextmanager
async def open_bare(setup: AgentSetup, root: Path) -> AsyncIterator[BareDriver]:
    """Start the bare driver with the codex, the settings and the thread options of the agent of `setup`.

    It has its own home and working folder. The agent must have been started before, because it writes the settings.
    """
    settings, launch = load_settings(setup.prepare()), _launch(setup, root)
    codex = settings.config.codex
    threads = ThreadOptions(launch.cwd, "gpt-5.5", "scripted", codex.sandbox, codex.approval_policy)
    hello: JsonObject = {
        "clientInfo": {"name": "bare", "title": "Bare driver", "version": "0"},
        "capabilities": {"experimentalApi": True, "optOutNotificationMethods": list(UNWANTED_NOTIFICATIONS)},
    }
    params = [json.dumps(hello), json.dumps(threads.params())]
    command = [sys.executable, str(BARE), *params, *command_line(launch, "bench")]
    start = time.perf_counter()
    async with _running(command, child_environment(launch, "bench")) as process:
        assert process.stdin is not None
        side = BareSide(process.stdin, _stdout(process))
        await side.ready()
        yield BareDriver(side, psutil.Process(process.pid), time.perf_counter() - start)


@asynccontextmanager
async def open_exec_agent(setup: AgentSetup, root: Path) -> AsyncIterator[OurSide]:
    """Start another agent, with the same model and `codex exec`."""
    other = replace(new_setup(root, setup.model_url), codex={"backend": "exec"})
    async with running_agent(other) as agent, peer(agent.url) as client:
        yield OurSide(sdk_streaming(client))


@asynccontextmanager
async def open_runtime(setup: AgentSetup, root: Path, name: str) -> AsyncIterator[RuntimeSide]:
    """Open a runtime with the codex and the settings of the agent of `setup`, which must have been started before."""
    async with create_runtime(name, _launch(setup, root)) as runtime:
        yield RuntimeSide(runtime)


def _launch(setup: AgentSetup, root: Path) -> Launch:
    """Return the launch of the codex of `setup`, with its own home and working folder."""
    home, cwd = root / "codex", root / "workspace"
    for folder in (home, cwd):
        folder.mkdir(parents=True)
    # There is no login here, so codex gets its key from a variable.
    config = (setup.root / "state" / "codex" / "config.toml").read_text()
    (home / "config.toml").write_text(config.replace("requires_openai_auth = true", 'env_key = "SCRIPTED_KEY"'))
    environment = setup.prepare()
    binary = load_settings(environment).codex_bin
    assert binary is not None
    return Launch(binary, home, cwd, environment, handed={"SCRIPTED_KEY": SECRET})


@asynccontextmanager
async def _running(command: Sequence[str], environment: dict[str, str]) -> AsyncIterator[anyio.abc.Process]:
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
