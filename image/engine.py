"""Whatever builds and runs containers on this machine: docker, podman or buildah."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).resolve().parent.parent
BASE: Final = "docker.io/library/python:3.11-slim"
"""What the Dockerfile's `FROM python:3.11-slim` means, by its whole name."""

PULL_TIMEOUT_S: Final = 300.0

Name = Literal["docker", "podman", "buildah"]
NAMES: Final[tuple[Name, ...]] = ("docker", "podman", "buildah")


class NoEngine(Exception):
    """There is nothing that builds or runs containers; the sentence says what to install."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that builds images; `environment` is what it needs beside ours to run containers here."""

    name: Name
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *words: str, timeout_s: float | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of the engine's and return what it said.

        Raises:
            subprocess.CalledProcessError: it failed, and `check` is set.
            subprocess.TimeoutExpired: it took longer than `timeout_s` seconds.
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

    def show(self, *words: str) -> None:
        """Run a command of the engine's whose output is for people.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        environment = {**os.environ, **self.environment}
        subprocess.run([self.name, *words], env=environment, stdin=subprocess.DEVNULL, check=True)

    def has(self, image: str) -> bool:
        """Tell whether an image is there."""
        return self.run("inspect", "--type", "image", image, check=False).returncode == 0

    def pull(self, image: str) -> bool:
        """Fetch an image from its registry and tell whether that worked."""
        try:
            return self.run("pull", image, timeout_s=PULL_TIMEOUT_S, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def take(self, archive: Path, image: str) -> None:
        """Make an image of a file system in a tar archive."""
        if self.name == "buildah":
            container = self.run("from", "scratch").stdout.strip()
            self.run("add", container, str(archive), "/")
            self.run("config", "--cmd", "python3", container)
            self.run("commit", "--rm", container, image)
        else:
            self.run("import", "--change", 'CMD ["python3"]', str(archive), image)

    def build(self, tag: str, secrets: Mapping[str, Path], arguments: Mapping[str, str], *more: str) -> None:
        """Build the Dockerfile, showing how it goes on.

        Raises:
            subprocess.CalledProcessError: a step failed; its own words were shown.
        """
        words = [word for name, file in secrets.items() for word in ("--secret", f"id={name},src={file}")]
        words += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        self.show(*_BUILD[self.name], *words, *more, "--tag", tag, str(ROOT))


_BUILD: Final[Mapping[Name, Sequence[str]]] = {
    "docker": ("build",),
    # Without a container for each step there is nothing that could want cgroups or a network of its own. Only Docker's
    # format has a HEALTHCHECK.
    "podman": ("build", "--isolation", "chroot", "--network", "host", "--layers", "--format", "docker", "--pull=never"),
    "buildah": ("bud", "--isolation", "chroot", "--network", "host", "--layers", "--format", "docker", "--pull-never"),
}


def builder(wanted: str | None = None) -> Engine:
    """Return what builds images here: the `wanted` one, else the first of docker, podman and buildah that works.

    Raises:
        NoEngine: none does.
    """
    for name in NAMES:
        if wanted in (None, name) and _works(Engine(name)):
            return Engine(name)
    which = wanted or "none of docker, podman and buildah"
    raise NoEngine(f"{which} works here; as root on Debian `python3 -m image install` installs what is needed")


@cache
def runner() -> Engine:
    """Return what runs containers here, docker or podman, with settings under which the base image does.

    Raises:
        NoEngine: none does.
    """
    podman_here = Engine("podman", {"CONTAINERS_CONF": str(ROOT / "image" / "containers.conf")})
    said = ""
    for engine in (Engine("docker"), Engine("podman"), podman_here):
        if _works(engine) and engine.has(BASE):
            tried = engine.run("run", "--rm", "--network", "host", BASE, "python3", "--version", check=False)
            if tried.returncode == 0:
                return engine
            said = f": {engine.name} says: {tried.stderr.strip()[-300:]}"
    raise NoEngine(f"neither docker nor podman runs a container of {BASE}{said}")


def _works(engine: Engine) -> bool:
    return shutil.which(engine.name) is not None and engine.run("info", check=False).returncode == 0


def say(text: str) -> None:
    """Tell whoever waits for the build what it does now."""
    sys.stderr.write(f"image: {text}\n")
    sys.stderr.flush()
