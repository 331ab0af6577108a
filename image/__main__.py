"""`python -m image build | install`; needs Python and nothing else, so that `make image` works in a fresh clone."""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from image.base import provide
from image.engine import NoEngine, builder, say

PACKAGES: Final = ("buildah", "podman", "runc", "mmdebstrap", "uidmap")
PIP_SETTINGS: Final = ("index-url", "extra-index-url", "trusted-host", "default-timeout", "timeout", "retries", "proxy")
"""What of the builder's own pip settings a build needs; files that they name are not there in it."""

MARK: Final = "# the builder's own settings, for one build"
"""Stands in what is handed to a build; an image that holds it has kept what it should not."""


def main() -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m image", description="The agent's container image")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build it with docker, podman or buildah")
    build.add_argument("--tag", default="codex-workspace", help="the image's name (default: %(default)s)")
    build.add_argument("--engine", choices=("docker", "podman", "buildah"), help="instead of the first that works")
    build.add_argument("--runtime-version", default="", help="version of the platform's runtime to install")
    commands.add_parser("install", help="install by apt what builds and runs images (root on Debian)")
    chosen = parser.parse_args()
    try:
        if chosen.command == "install":
            return install()
        return build_image(chosen.tag, chosen.engine, chosen.runtime_version)
    except NoEngine as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{error.cmd[0]} failed with exit code {error.returncode}\n")
        return 1


def build_image(tag: str, wanted: str | None, runtime_version: str) -> int:
    """Build the image; the base is fetched or made before.

    Raises:
        NoEngine: there is nothing to build it with.
        subprocess.CalledProcessError: the build failed.
    """
    engine = builder(wanted)
    provide(engine)
    say(f"building {tag} with {engine.name}")
    with pip_secrets(os.environ) as secrets:
        engine.build(tag, secrets, {"RUNTIME_VERSION": runtime_version})
    return 0


@contextmanager
def pip_secrets(env: Mapping[str, str]) -> Iterator[dict[str, Path]]:
    """Give the builder's pip settings and CA bundle as files for the build's secrets; those that there are."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    settings = pip_settings(asked.stdout)
    with tempfile.TemporaryDirectory(prefix="codex-workspace-pip-") as folder:
        kept = [f"{name} = {settings[name]}" for name in PIP_SETTINGS if name in settings]
        secrets = {"pip_conf": Path(folder) / "pip.conf"}
        secrets["pip_conf"].write_text("\n".join([MARK, "[global]", *kept, ""]))
        bundle = settings.get("cert") or env.get("SSL_CERT_FILE")
        if bundle and Path(bundle).is_file():
            secrets["ca_bundle"] = Path(bundle)
        yield secrets


def pip_settings(listed: str) -> dict[str, str]:
    """Return what `pip config list` tells, by the settings' names: those of `install` and of the environment win.

    Lines of a value are joined as pip.conf has them, by a line break and a blank.
    """
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}.") and value:
                found[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value)).strip().replace("\n", "\n ")
    return found


def install() -> int:
    """Install by apt what is needed; returns apt's exit code."""
    apt = ["apt-get", "--quiet", "--quiet"]
    updated = subprocess.run([*apt, "update"], stdin=subprocess.DEVNULL)
    if updated.returncode != 0:
        return updated.returncode
    words = ["install", "--yes", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0", *PACKAGES]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run([*apt, *words], env=environment, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
