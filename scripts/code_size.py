"""Measures the size of the product: lines, modules, the largest modules, and the lengths of functions.

    python scripts/code_size.py            print the table
    python scripts/code_size.py --check    also exit with 1 if a limit is exceeded

The product is `codex_workspace` without `devkit`, and `adapter.py`. `__init__.py` files count as lines, not as modules.
A function's length is its lines without the docstring and the decorators.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

MAX_LINES: Final = 28_700
MAX_MODULES: Final = 125
MAX_MODULE_LINES: Final = 500
MAX_MEDIAN: Final = 5
MAX_P90: Final = 16
MAX_FUNCTION_LINES: Final = 60


@dataclass(frozen=True, slots=True)
class Size:
    """The figures of a source tree. `functions` are (length, name) pairs, shortest first."""

    lines: dict[Path, int]
    functions: list[tuple[int, str]]

    @property
    def total_lines(self) -> int:
        """The raw lines of all files."""
        return sum(self.lines.values())

    @property
    def modules(self) -> dict[Path, int]:
        """The lines of each module."""
        return {file: count for file, count in self.lines.items() if file.name != "__init__.py"}

    def percentile(self, share: float) -> int:
        """Return the function length that `share` of all functions do not exceed."""
        return self.functions[min(len(self.functions) - 1, int(len(self.functions) * share))][0]

    def exceeded(self) -> list[str]:
        """Return one sentence for each limit that is exceeded."""
        found = [
            f"{what}: {value} is over the limit of {limit}"
            for what, value, limit in (
                ("lines", self.total_lines, MAX_LINES),
                ("modules", len(self.modules), MAX_MODULES),
                ("median function length", self.percentile(0.5), MAX_MEDIAN),
                ("90th percentile of function lengths", self.percentile(0.9), MAX_P90),
            )
            if value > limit
        ]
        found += [
            f"{file}: {count} lines are over the limit of {MAX_MODULE_LINES}"
            for file, count in self.modules.items()
            if count > MAX_MODULE_LINES
        ]
        found += [
            f"{name}: {length} lines are over the limit of {MAX_FUNCTION_LINES}"
            for length, name in self.functions
            if length > MAX_FUNCTION_LINES
        ]
        return found


def measure(root: Path = ROOT) -> Size:
    """Measure the product in the checkout `root`."""
    package = root / "codex_workspace"
    files = sorted(file for file in package.rglob("*.py") if file.relative_to(package).parts[0] != "devkit")
    lines, functions = dict[Path, int](), list[tuple[int, str]]()
    for file in [root / "adapter.py", *files]:
        text, name = file.read_text(), file.relative_to(root)
        lines[name] = len(text.splitlines())
        functions += [(length, f"{name}: {function}") for length, function in functions_in(text)]
    return Size(lines, sorted(functions))


def functions_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield the length and the name of every function and method."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node, clean=False) is not None and first.end_lineno is not None:
                length -= first.end_lineno - first.lineno + 1
            yield length, node.name


def table(size: Size) -> str:
    """Return the figures as text."""
    packages = Counter[str]()
    for file, count in size.lines.items():
        packages[str(Path(*file.parts[:2]))] += count
    rows = [
        f"lines                {size.total_lines:6}   limit {MAX_LINES}",
        f"modules              {len(size.modules):6}   limit {MAX_MODULES}",
        f"functions            {len(size.functions):6}",
        f"  median length      {size.percentile(0.5):6}   limit {MAX_MEDIAN}",
        f"  90th percentile    {size.percentile(0.9):6}   limit {MAX_P90}",
        f"  longest            {size.functions[-1][0]:6}   limit {MAX_FUNCTION_LINES}   {size.functions[-1][1]}",
        f"largest modules                limit {MAX_MODULE_LINES}",
        *(
            f"  {count:6}  {file}"
            for file, count in sorted(size.modules.items(), key=lambda item: item[1], reverse=True)[:10]
        ),
        "lines by package",
        *(f"  {count:6}  {package}" for package, count in packages.most_common()),
    ]
    return "\n".join(rows)


def main() -> int:
    """Print the table; with `--check`, report exceeded limits and return 1."""
    parser = argparse.ArgumentParser(description="Measure the size of the product.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    check = parser.parse_args().check
    size = measure()
    print(table(size))
    exceeded = size.exceeded() if check else []
    for sentence in exceeded:
        print(sentence, file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
