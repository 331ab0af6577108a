"""The files of pinned requirements have a hash for every package, and the extra for PostgreSQL is optional."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.support.paths import ROOT

FILES: Final = sorted(path.name for path in ROOT.glob("requirements*.txt"))
REQUIREMENT: Final = re.compile(r"[a-z0-9-]+==[\w.]+( \\\n    --hash=sha256:[0-9a-f]{64})+")
"""One requirement: a name in its normal form, a version, and a hash for each of its files."""


def requirements(name: str) -> list[str]:
    """Return the requirements in a file, each with its hashes."""
    text = "".join(line for line in (ROOT / name).read_text().splitlines(keepends=True) if line.strip()[:1] != "#")
    return re.split(r"\n(?=\S)", text.rstrip())


@pytest.mark.parametrize("name", FILES)
def test_every_requirement_has_a_version_and_hashes_and_no_file_has_an_address(name: str) -> None:
    assert [each for each in requirements(name) if not REQUIREMENT.fullmatch(each)] == []
    assert "://" not in (ROOT / name).read_text()


def test_all_files_of_requirements_are_tested() -> None:
    assert {"requirements.txt", "requirements-dev.txt", "requirements-codex.txt"} < set(FILES)


def test_what_pip_installs_in_the_makefile_and_the_image_is_checked_against_hashes() -> None:
    """Except pip's install of the platform's runtime, whose hashes are not known."""
    files = ("Makefile", "Dockerfile", "scripts/pip_install.py")
    uses = [line for name in files for line in (ROOT / name).read_text().splitlines() if re.search(r"\B-r\b", line)]
    assert len(uses) > 3
    assert [line for line in uses if "--require-hashes" not in line] == []


def test_only_the_extra_for_postgresql_needs_its_driver() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [each for each in project["dependencies"] if each.startswith("psycopg")] == []
    assert [each.partition("[")[0] for each in project["optional-dependencies"]["postgres"]] == ["psycopg"]
    assert any(each.startswith("psycopg==") for each in requirements("requirements.txt"))


def test_without_the_driver_a_postgresql_url_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['psycopg'] = None; from codex_workspace.__main__ import main; sys.exit(main())"
    environment = {"DATABASE_URL": "postgresql://me:hidden-word@127.0.0.1:1/x", "OPENAI_API_KEY": "sk-scripted-0"}
    environment |= {"WORKSPACE_STATE_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code, "serve"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.endswith("; run: pip install 'codex-workspace[postgres]'\n")
    assert "hidden-word" not in ran.stderr
