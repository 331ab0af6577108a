"""The wheel and the sdist are complete, and the installed program works from any folder without the checkout.

The wheel is installed into a fresh virtual environment without a network: its dependencies come from the environment of
the tests, by a `.pth` file.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

import pytest

import codex_workspace
from codex_workspace.config.settings import TEMPLATE_DIR

pytestmark = pytest.mark.slow

ROOT: Final = TEMPLATE_DIR
VERSION: Final = codex_workspace.__version__
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COPIED: Final = {"codex_workspace/adapter.py": "adapter.py", "codex_workspace/config.yaml": "config.yaml"}
"""Files of the wheel that are at the top level of the checkout."""


def tracked(*folders: str) -> set[str]:
    """Return the files of the repository; skips the test outside a repository."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a new wheel, built from a new sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (found,) = built.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console script in a fresh virtual environment with the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = ["--python", str(folder / "bin" / "python"), "install", "--no-index", "--no-deps", "--quiet", str(wheel)]
    done = subprocess.run([sys.executable, "-m", "pip", *install], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "codex-workspace"


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Run a command in a folder, with a new home, and return its output; it must exit with code 0."""
    passed = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(folder)}
    ran = subprocess.run(command, cwd=folder, env=passed | environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


# --- What is in the packages ---


def test_the_wheel_contains_the_package_and_nothing_beside_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == tracked("codex_workspace") | set(COPIED)
    assert "codex_workspace/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.parametrize("name", COPIED)
def test_the_wheel_has_the_checkouts_file(wheel: Path, name: str) -> None:
    assert zipfile.ZipFile(wheel).read(name) == (ROOT / COPIED[name]).read_bytes()


def test_the_sdist_contains_the_whole_repository(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() - names == set()
    assert {name for name in names if name.startswith((".git/", ".venv", ".node-a2a", "build/"))} == set()


def test_the_metadata_has_the_version_the_license_and_the_pinned_codex(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = HeaderParser().parsestr(archive.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == ("codex-workspace", VERSION)
    assert metadata["License-Expression"] == "Apache-2.0"
    pinned = re.findall(r"^openai-codex-cli-bin==\S+", (ROOT / "requirements-codex.txt").read_text(), re.MULTILINE)
    assert [each for each in metadata.get_all("Requires-Dist", []) if each.startswith("openai-codex")] == pinned


def test_the_version_is_stated_once() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert "version" not in PROJECT
    files = {name for name in tracked("*.py", "*.yaml", "*.toml", "*.json") if not name.startswith("tests/")}
    shape = re.compile(rf"""(?<![\w:.]){re.escape(VERSION)}["'\s]""")
    stated = {name for name in files if shape.search((ROOT / name).read_text())}
    assert stated == {"codex_workspace/__init__.py"}


# --- The installed program ---


def test_the_installed_program_prints_its_version(program: Path, tmp_path: Path) -> None:
    assert run([program, "--version"], tmp_path) == f"codex-workspace {VERSION}\n"


def test_the_installed_program_has_a_configuration_and_a_state_folder(program: Path, tmp_path: Path) -> None:
    run([program, "prepare"], tmp_path, OPENAI_API_KEY="sk-x")
    assert (tmp_path / ".local/state/codex-workspace/codex/config.toml").is_file()


def test_the_installed_package_is_imported_from_the_environment_and_has_the_adapter(
    program: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter.py").write_text("Adapter = 'of another project'\n")
    code = "import adapter, codex_workspace.adapter as ours; print(adapter.Adapter); print(ours.__file__, ours.Adapter)"
    other, ours = run([program.with_name("python"), "-c", code], tmp_path).splitlines()
    assert other == "of another project"
    assert ours.startswith(str(program.parent.parent))
    assert ours.endswith("<class 'codex_workspace.adapter.CodexAdapter'>")


def test_the_installed_demo_works_from_another_folder(program: Path, tmp_path: Path) -> None:
    assert "a conversation continued after a restart." in run([program, "demo"], tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- start.sh in a checkout that was never set up ---


def unprepared(folder: Path, *programs: str) -> tuple[Path, dict[str, str]]:
    """Return a checkout without .venv, and an environment with a Python without packages and `programs`."""
    checkout = folder / "checkout"
    (checkout / "bin").mkdir(parents=True)
    (checkout / "start.sh").write_bytes((ROOT / "start.sh").read_bytes())
    for name, text in {"python3": "exit 1", "make": MAKE}.items():
        if name in ("python3", *programs):
            (checkout / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (checkout / "bin" / name).chmod(0o700)
    (checkout / "bin" / "dirname").symlink_to("/usr/bin/dirname")
    return checkout, {"PATH": str(checkout / "bin")}


MAKE: Final = """\
[ "$*" = "--no-print-directory .venv/runtime" ] || exit 3
/bin/mkdir -p .venv/bin
printf '#!/bin/sh\\necho "started with: $*"\\n' > .venv/bin/python
/bin/chmod 700 .venv/bin/python
: > .venv/runtime
"""
"""Replaces `make .venv/runtime`."""


def test_start_sh_sets_up_a_checkout(tmp_path: Path) -> None:
    checkout, environment = unprepared(tmp_path, "make")
    ran = subprocess.run(["/bin/sh", checkout / "start.sh", "doctor"], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "started with: -m codex_workspace doctor\n"), ran.stderr
    assert re.fullmatch(r"start\.sh: this checkout is not set up; running 'make \.venv/runtime' first .*\n", ran.stderr)


def test_start_sh_says_what_to_run_if_there_is_no_make(tmp_path: Path) -> None:
    checkout, environment = unprepared(tmp_path)
    ran = subprocess.run(["/bin/sh", checkout / "start.sh"], env=environment, capture_output=True, text=True)
    assert ran.returncode == 2
    assert re.fullmatch(r"start\.sh: this checkout is not set up; install make .*: pipx install \.\n", ran.stderr)


@pytest.mark.parametrize(("arguments", "command"), [((), "serve"), (("--version",), "--version"), (("chat",), "chat")])
def test_start_sh_runs_serve_unless_a_command_is_named(
    tmp_path: Path, arguments: tuple[str, ...], command: str
) -> None:
    checkout, environment = unprepared(tmp_path, "make")
    ran = subprocess.run(
        ["/bin/sh", checkout / "start.sh", *arguments], env=environment, capture_output=True, text=True
    )
    assert ran.stdout == f"started with: -m codex_workspace {command}\n"
