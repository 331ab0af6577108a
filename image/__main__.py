"""`python -m image install | prepare`: prepares a machine for `make image-test`."""

import argparse
import os
import subprocess
import sys
from typing import Final

from image.base import provide
from image.engine import ROOT, NoEngineError, working_engine
from image.pip_settings import write_build_secrets

PACKAGES: Final = ("podman", "runc", "mmdebstrap", "uidmap")
SECRETS_DIR: Final = ROOT / "build" / "image"
"""Where `make image-test` finds the build secrets."""


def main() -> int:
    """Run a command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m image", description="Prepare a machine for `make image-test`")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install podman and what the tests need with apt (root on Debian)")
    commands.add_parser("prepare", help="provide the base image and write the build secrets to build/image")
    if parser.parse_args().command == "install":
        return install()
    try:
        provide(working_engine())
    except NoEngineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    write_build_secrets(SECRETS_DIR, os.environ)
    return 0


def install() -> int:
    """Install `PACKAGES` with apt and return apt's exit code."""
    apt = [str(ROOT / "image" / "apt-get"), "--quiet", "--quiet"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ["install", "--yes", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0"]
    for command in ([*apt, "update"], [*apt, *options, *PACKAGES]):
        if code := subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
