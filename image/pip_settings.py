"""Passes this machine's pip settings and CA bundle to the image build of the tests, as build secrets."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PIP_SETTINGS: Final = ("index-url", "extra-index-url", "trusted-host", "default-timeout", "timeout", "retries", "proxy")
"""The settings that a build needs. Settings that name a local file are left out: the build cannot read that file."""

MARK: Final = "# pip settings for one build"
"""The first line of the build's pip.conf. An image that contains it has kept a build secret."""


def write_build_secrets(folder: Path, env: Mapping[str, str]) -> None:
    """Write `pip.conf` and `ca_bundle` (empty if this machine sets none) into `folder`."""
    settings = read_pip_settings(listed_pip_settings())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [f"{name} = {settings[name]}" for name in PIP_SETTINGS if name in settings]
    (folder / "pip.conf").write_text("\n".join([MARK, "[global]", *lines, ""]))
    bundle = settings.get("cert") or env.get("SSL_CERT_FILE")
    if bundle and Path(bundle).is_file():
        shutil.copyfile(bundle, folder / "ca_bundle")
    else:
        (folder / "ca_bundle").write_text("")


def listed_pip_settings() -> str:
    """Return the output of `pip config list`."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return listed.stdout


def read_pip_settings(listed: str) -> dict[str, str]:
    """Parse `pip config list` into values by setting name; `install` and the environment override `global`.

    The lines of a value are joined the way pip.conf expects them: a line break and a space.
    """
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}.") and value:
                found[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value)).strip().replace("\n", "\n ")
    return found
