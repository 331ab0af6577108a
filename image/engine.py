"""Runs docker or podman commands for the image tests."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).resolve().parent.parent
BASE: Final = "docker.io/library/python:3.11-slim"
"""The full name of the Dockerfile's `FROM python:3.11-slim`."""


class NoEngineError(Exception):
    """No engine can run containers here; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A container engine, and the environment variables that it needs on this machine."""

    name: Literal["docker", "podman"]
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *words: str, timeout_s: float | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of the engine.

        Raises:
            subprocess.CalledProcessError: the command failed and `check` is set.
            subprocess.TimeoutExpired: the command took longer than `timeout_s` seconds.
        """
        return subprocess.run(
            [self.name, *words],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=check,
        )

    def has(self, image: str) -> bool:
        return self.run("inspect", "--type", "image", image, check=False).returncode == 0

    def works(self) -> bool:
        return shutil.which(self.name) is not None and self.run("info", check=False).returncode == 0


def working_engine() -> Engine:
    """Return docker or podman.

    Raises:
        NoEngineError: neither works.
    """
    for engine in (Engine("docker"), Engine("podman")):
        if engine.works():
            return engine
    raise NoEngineError("neither docker nor podman works; on Debian, run `python3 -m image install` as root")


@cache
def runner() -> Engine:
    """Return an engine that can run a container of the base image, with the settings that it needs here.

    Raises:
        NoEngineError: neither docker nor podman can.
    """
    podman_with_settings = Engine("podman", {"CONTAINERS_CONF": str(ROOT / "image" / "containers.conf")})
    reason = ""
    for engine in (Engine("docker"), Engine("podman"), podman_with_settings):
        if engine.works() and engine.has(BASE):
            tried = engine.run("run", "--rm", "--network", "host", BASE, "python3", "--version", check=False)
            if tried.returncode == 0:
                return engine
            reason = f": {engine.name}: {tried.stderr.strip()[-300:]}"
    raise NoEngineError(f"neither docker nor podman can run a container of {BASE}{reason}")
