"""Every module has a test file of its name, or is named in the first lines of the test file that covers it."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.paths import ROOT

PACKAGE: Final = ROOT / "codex_workspace"

MODULES: Final = [
    file.relative_to(ROOT)
    for file in sorted(PACKAGE.rglob("*.py"))
    if file.name != "__init__.py" and "devkit" not in file.parts
]


def _covered() -> set[str]:
    """Return the modules that the docstrings of test files name after "Covers"."""
    named = set[str]()
    for file in (ROOT / "tests").rglob("test_*.py"):
        docstring = file.read_text().split('"""', 2)[1]
        for sentence in re.findall(r"Covers ([^.]*(?:\.\w[^.]*)*)", docstring):
            named.update(re.findall(r"`([\w.]+)`", sentence))
    return named


COVERED: Final = _covered()


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_has_a_test_file(module: Path) -> None:
    test = (
        ROOT / "tests" / "unit" / module.relative_to("codex_workspace").with_name(f"test_{module.stem.strip('_')}.py")
    )
    name = ".".join(module.relative_to("codex_workspace").with_suffix("").parts)
    assert test.exists() or name in COVERED, f"no test file names {name}; write {test.relative_to(ROOT)}"


def test_covered_modules_exist() -> None:
    modules = {".".join(module.relative_to("codex_workspace").with_suffix("").parts) for module in MODULES}
    assert modules >= COVERED
