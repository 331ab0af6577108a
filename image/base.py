"""A stand-in for the base image, where no image registry is in reach: Debian bookworm with Debian's own Python 3.11."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from image.engine import BASE, Engine, NoEngine, say

HOOKS: Final = Path("/usr/share/mmdebstrap/hooks/maybe-merged-usr")
"""Without it bookworm comes with all of perl."""

LEFT_OUT: Final = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
APT: Final = (
    'Apt::Install-Recommends "false"',
    'Acquire::Languages "none"',
    'Dir::Cache::pkgcache ""',
    'Dir::Cache::srcpkgcache ""',
    'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || :"; }',
)
"""What the slim images of the registry have set as well: nothing of an installation stays but what was asked for."""


def provide(engine: Engine) -> None:
    """See that the engine has the base image: it is there, its registry has it, or a stand-in is made.

    Raises:
        NoEngine: no registry is in reach, and no stand-in can be made.
    """
    if engine.has(BASE):
        return
    say(f"fetching {BASE}")
    if engine.pull(BASE):
        return
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        raise NoEngine(
            f"{BASE} cannot be fetched, and a stand-in is made by root with mmdebstrap; "
            "as root on Debian `python3 -m image install` installs it"
        )
    say(f"its registry is not in reach: making a stand-in from Debian's packages, named {BASE} on this machine")
    with tempfile.TemporaryDirectory(prefix="codex-workspace-base-") as folder:
        archive = Path(folder) / "base.tar"
        _make(archive)
        engine.take(archive, BASE)


def _make(archive: Path) -> None:
    words = ["--quiet", "--variant=minbase", "--include=ca-certificates,python3,python3-venv"]
    if HOOKS.is_dir():
        words.append(f"--hook-dir={HOOKS}")
    words += [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    words += [f"--aptopt={setting}" for setting in APT]
    # Who flushes each file of a tree that is thrown away anyway waits for most of the time.
    words.append("--dpkgopt=force-unsafe-io")
    made = subprocess.run(
        ["mmdebstrap", *words, "bookworm", str(archive)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if made.returncode != 0:
        raise NoEngine(f"mmdebstrap could not make the stand-in: {made.stderr.strip()[-1000:]}")
