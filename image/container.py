"""Starts containers of the image as an operator would, and inspects them from outside."""

import json
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Final, TypedDict

import anyio
import psutil
import yaml

from image.engine import Engine, runner
from tests.support.ports import free_port
from tests.support.waiting import eventually

IMAGE: Final = os.environ.get("IMAGE", "codex-workspace:test")
TOKEN: Final = "token-of-the-operator-0123456789"
SECRET: Final = "sk-scripted-0123456789"
READY: Final = re.compile(r"A2A at (\S+)")
HARDENED: Final = (
    *("--user", "1000:1000", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges"),
)


@dataclass(frozen=True)
class AgentVolumes:
    """The two volumes of one agent, as folders of this machine. With `owner` None, they belong to root."""

    root: Path
    model_url: str
    owner: int | None = 1000
    codex: Mapping[str, object] = field(default_factory=dict)

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    def prepare(self) -> list[str]:
        """Create the folders and config.yaml, and return the options that mount them."""
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
                }
            ],
            "codex": dict(self.codex),
        }
        for folder in (self.configs, self.workspace):
            folder.mkdir(parents=True, exist_ok=True)
        file = self.configs / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        file.chmod(0o600)
        if self.owner is not None:
            for path in (self.configs, self.workspace, file):
                os.chown(path, self.owner, self.owner)
        return ["--volume", f"{self.configs}:/configs", "--volume", f"{self.workspace}:/workspace"]


@dataclass(frozen=True)
class Container:
    """A started container."""

    engine: Engine
    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def ask_engine(self, *words: str, check: bool = True) -> CompletedProcess[str]:
        """Run a command of the engine without blocking the event loop."""
        return await anyio.to_thread.run_sync(partial(self.engine.run, *words, check=check))

    async def inspect(self) -> dict[str, object]:
        """Return the state that the engine reports."""
        (inspected,) = json.loads((await self.ask_engine("inspect", "--type", "container", self.name)).stdout)
        return dict(inspected["State"])

    async def log(self) -> str:
        """Return everything that the container has printed."""
        logs = await self.ask_engine("logs", self.name)
        return logs.stdout + logs.stderr

    async def inside(self, *words: str, user: str = "0") -> CompletedProcess[str]:
        """Run a command in the container."""
        return await self.ask_engine("exec", "--user", user, self.name, *words, check=False)

    async def healthy(self) -> bool:
        """Run the image's HEALTHCHECK, as the engine does."""
        return (await self.inside(*health_command(self.engine), user="")).returncode == 0

    async def processes(self) -> list[psutil.Process]:
        """Return the container's processes, PID 1 first."""
        first = psutil.Process(int(str((await self.inspect())["Pid"])))
        return [first, *first.children(recursive=True)]

    async def codex(self) -> psutil.Process:
        """Return the process of codex app-server."""
        (found,) = [each for each in await self.processes() if "app-server" in each.cmdline()]
        return found

    async def ready(self, starts: int = 1) -> None:
        """Wait until the log states `starts` times that the agent is ready."""

        async def is_ready() -> bool:
            log = await self.log()
            assert not await self.has_exited(), log
            return len(READY.findall(log)) >= starts

        await eventually(is_ready, poll_s=0.05)

    async def has_exited(self) -> bool:
        return (await self.inspect())["Status"] == "exited"

    async def stop(self) -> tuple[int, float]:
        """Stop it as an operator would; return the exit code and the duration in seconds."""
        started_at = time.monotonic()
        await self.ask_engine("stop", "--time", "10", self.name)
        return int(str((await self.inspect())["ExitCode"])), time.monotonic() - started_at


def health_command(engine: Engine) -> Sequence[str]:
    """Return the command of the image's HEALTHCHECK."""
    (inspected,) = json.loads(engine.run("inspect", "--type", "image", IMAGE).stdout)
    # Docker and podman report it under different keys.
    kind, *words = (inspected["Config"].get("Healthcheck") or inspected["Healthcheck"])["Test"]
    assert kind == "CMD"
    return [str(word) for word in words]


class ImageConfig(TypedDict):
    """The parts of an image's configuration that the tests check."""

    Entrypoint: list[str]
    Env: list[str]
    ExposedPorts: dict[str, object]
    Volumes: dict[str, object]
    Labels: dict[str, str]


def image_config(engine: Engine) -> ImageConfig:
    """Return the image's configuration: Env, Entrypoint, Labels, …"""
    (inspected,) = json.loads(engine.run("inspect", "--type", "image", IMAGE).stdout)
    config: ImageConfig = inspected["Config"]
    return config


@asynccontextmanager
async def started(
    options: Sequence[str], environment: Mapping[str, str] | None = None, image: str = IMAGE
) -> AsyncIterator[Container]:
    """Start a container with these options and environment, and remove it when the block ends."""
    engine = await anyio.to_thread.run_sync(runner)
    container = Container(engine, f"codex-workspace-test-{uuid.uuid4().hex[:12]}", free_port())
    own = {"A2A_PORT": str(container.port), "A2A_TOKEN": TOKEN, "SCRIPTED_KEY": SECRET}
    variables = [word for name, value in (own | dict(environment or {})).items() for word in ("-e", f"{name}={value}")]
    try:
        words = ["run", "--detach", "--name", container.name, "--network", "host", *options, *variables, image]
        await container.ask_engine(*words)
        yield container
    finally:
        with anyio.CancelScope(shield=True):
            await container.ask_engine("rm", "--force", "--volumes", container.name, check=False)


async def run_to_exit(
    options: Sequence[str], environment: Mapping[str, str] | None = None, image: str = IMAGE
) -> tuple[int, str]:
    """Start a container that should exit by itself; return its exit code and its log."""
    async with started(options, environment, image) as container:
        await eventually(container.has_exited, poll_s=0.05)
        return int(str((await container.inspect())["ExitCode"])), await container.log()
