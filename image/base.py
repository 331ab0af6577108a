"""Provides the base image on a test machine; without a registry, builds a substitute from Debian's packages."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from image.engine import BASE, Engine, NoEngineError

PULL_TIMEOUT_S: Final = 300.0
HOOKS: Final = Path("/usr/share/mmdebstrap/hooks/maybe-merged-usr")
"""Without this hook, bookworm's minimal variant includes all of perl."""

EXCLUDED: Final = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
APT_OPTIONS: Final = (
    'Apt::Install-Recommends "false"',
    'Acquire::Languages "none"',
    'Dir::Cache::pkgcache ""',
    'Dir::Cache::srcpkgcache ""',
    'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || :"; }',
)
"""The apt settings of the registry's slim images."""


def provide(engine: Engine) -> None:
    """Make sure that the engine has the base image: locally, from its registry, or as a substitute.

    Raises:
        NoEngineError: the registry is not reachable, and no substitute can be built.
    """
    if engine.has(BASE) or _pull(engine):
        return
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        raise NoEngineError(
            f"{BASE} cannot be pulled, and only root with mmdebstrap can build a substitute; "
            "on Debian, run `python3 -m image install` as root"
        )
    sys.stderr.write(f"image: {BASE} cannot be pulled; building a substitute with this name from Debian's packages\n")
    with tempfile.TemporaryDirectory(prefix="codex-workspace-base-") as folder:
        archive = Path(folder) / "base.tar"
        _bootstrap(archive)
        engine.run("import", "--change", 'CMD ["python3"]', str(archive), BASE)


def _pull(engine: Engine) -> bool:
    try:
        return engine.run("pull", BASE, timeout_s=PULL_TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _bootstrap(archive: Path) -> None:
    words = ["--quiet", "--variant=minbase", "--include=ca-certificates,python3,python3-venv"]
    if HOOKS.is_dir():
        words.append(f"--hook-dir={HOOKS}")
    words += [f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED]
    words += [f"--aptopt={option}" for option in APT_OPTIONS]
    # The tree is temporary, so dpkg need not flush each file to disk.
    words.append("--dpkgopt=force-unsafe-io")
    made = subprocess.run(
        ["mmdebstrap", *words, "bookworm", str(archive)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if made.returncode != 0:
        raise NoEngineError(f"mmdebstrap cannot build the substitute: {made.stderr.strip()[-1000:]}")
