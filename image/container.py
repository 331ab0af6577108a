"""A container of the image, for its tests: started as an operator would, looked at from outside."""

import json
import os
import re
import socket
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

IMAGE: Final = os.environ.get("IMAGE", "codex-workspace:test")
TOKEN: Final = "token-of-the-operator-0123456789"
SECRET: Final = "sk-scripted-0123456789"
READY: Final = re.compile(r"A2A at (\S+)")
START_S: Final = 30.0
HARDENED: Final = (
    *("--user", "1000:1000", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges"),
)


@dataclass(frozen=True)
class Place:
    """The two volumes of one agent, as folders of this machine; `owner` None leaves them root's."""

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
        """Make the folders and config.yaml, and return the options that mount them."""
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
    """A container that was started."""

    engine: Engine
    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def ask_engine(self, *words: str, check: bool = True) -> CompletedProcess[str]:
        """Run a command of the engine's while everything else goes on."""
        return await anyio.to_thread.run_sync(partial(self.engine.run, *words, check=check))

    async def inspect(self) -> dict[str, object]:
        """What the engine tells of the container's state."""
        (told,) = json.loads((await self.ask_engine("inspect", "--type", "container", self.name)).stdout)
        return dict(told["State"])

    async def log(self) -> str:
        """All that it has said."""
        said = await self.ask_engine("logs", self.name)
        return said.stdout + said.stderr

    async def inside(self, *words: str, user: str = "0") -> CompletedProcess[str]:
        """Run a command in it."""
        return await self.ask_engine("exec", "--user", user, self.name, *words, check=False)

    async def healthy(self) -> bool:
        """Run what the image's HEALTHCHECK says, as the engine does."""
        return (await self.inside(*health_command(self.engine), user="")).returncode == 0

    async def processes(self) -> list[psutil.Process]:
        """Its processes, the first one first."""
        first = psutil.Process(int(str((await self.inspect())["Pid"])))
        return [first, *first.children(recursive=True)]

    async def codex(self) -> psutil.Process:
        """The codex that answers."""
        (found,) = [each for each in await self.processes() if "app-server" in each.cmdline()]
        return found

    async def ready(self, starts: int = 1) -> None:
        """Wait until it has said `starts` times that it is ready."""
        with anyio.fail_after(START_S):
            while len(READY.findall(said := await self.log())) < starts:
                assert (await self.inspect())["Status"] != "exited", said
                await anyio.sleep(0.05)

    async def stop(self) -> tuple[int, float]:
        """Stop it as an operator would; returns the exit code and the seconds that it took."""
        begun = time.monotonic()
        await self.ask_engine("stop", "--time", "10", self.name)
        return int(str((await self.inspect())["ExitCode"])), time.monotonic() - begun


def health_command(engine: Engine) -> Sequence[str]:
    """Return the command of the image's HEALTHCHECK."""
    (told,) = json.loads(engine.run("inspect", "--type", "image", IMAGE).stdout)
    # Docker and podman tell it in different places.
    kind, *words = (told["Config"].get("Healthcheck") or told["Healthcheck"])["Test"]
    assert kind == "CMD"
    return [str(word) for word in words]


class ImageConfig(TypedDict):
    """What is used of an image's configuration."""

    Entrypoint: list[str]
    Env: list[str]
    ExposedPorts: dict[str, object]
    Volumes: dict[str, object]


def image_config(engine: Engine) -> ImageConfig:
    """Return the image's configuration: Env, Entrypoint, Volumes, …"""
    (told,) = json.loads(engine.run("inspect", "--type", "image", IMAGE).stdout)
    config: ImageConfig = told["Config"]
    return config


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@asynccontextmanager
async def started(
    options: Sequence[str], environment: Mapping[str, str] | None = None, image: str = IMAGE
) -> AsyncIterator[Container]:
    """Start a container with these options and environment; it is removed with the block."""
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


async def ended(
    options: Sequence[str], environment: Mapping[str, str] | None = None, image: str = IMAGE
) -> tuple[int, str]:
    """Start a container that is to end by itself; returns its exit code and all that it has said."""
    async with started(options, environment, image) as container:
        with anyio.fail_after(START_S):
            while (state := await container.inspect())["Status"] != "exited":
                await anyio.sleep(0.05)
        return int(str(state["ExitCode"])), await container.log()
