"""`scripts/code_size.py`: what it counts, and the limits of the product."""

import subprocess
import sys
from pathlib import Path

from scripts.code_size import functions_in, measure
from tests.support.paths import ROOT

SOURCE = '''
@decorator
def documented(a: int) -> int:
    """Has a docstring.

    Of three lines.
    """
    return a


class C:
    async def plain(self) -> None:
        await one()
        await two()
'''


def test_docstrings_and_decorators_do_not_count_as_function_lines() -> None:
    assert {name: length for length, name in functions_in(SOURCE)} == {"documented": 2, "plain": 3}


def test_devkit_does_not_count_and_init_files_are_no_modules(tmp_path: Path) -> None:
    for name in ("adapter.py", "codex_workspace/__init__.py", "codex_workspace/a.py", "codex_workspace/devkit/b.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def f():\n    pass\n")
    size = measure(tmp_path)
    assert (size.total_lines, len(size.modules)) == (6, 2)


def test_a_module_that_is_too_long_is_named(tmp_path: Path) -> None:
    (tmp_path / "codex_workspace").mkdir()
    (tmp_path / "adapter.py").write_text("def f():\n    pass\n" + "x = 1\n" * 500)
    assert measure(tmp_path).exceeded() == ["adapter.py: 502 lines are over the limit of 500"]


def test_the_product_is_within_its_limits() -> None:
    command = [sys.executable, "scripts/code_size.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
