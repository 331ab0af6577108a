"""The packages of `codex_workspace` import downwards only, and only the packages listed here import a third party.

`docs/architecture.md` explains the packages.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

from tests.support.paths import ROOT

PACKAGE: Final = ROOT / "codex_workspace"

LAYERS: Final = (
    ("__main__",),
    ("devkit",),
    ("cli", "adapter"),
    ("runtime_host",),
    ("agent",),
    ("launching",),
    ("platform",),
    ("tools",),
    ("server", "executor"),
    ("tasks",),
    ("backends",),
    ("codex",),
    ("app_server",),
    ("runtimes",),
    ("protocol",),
    ("config", "storage"),
    ("common",),
)
"""The packages and top-level modules, from the top; each may import from the layers below it."""

DEPTH: Final = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}

KNOWN_BY: Final = {
    "a2a": {
        "adapter",
        "agent",
        "cli",
        "common",
        "devkit",
        "executor",
        "platform",
        "server",
        "storage",
        "tasks",
        "tools",
    },
    "cryptography": {"server"},
    "grpc": {"server"},
    "httpcore": {"common", "tools"},
    "mcp": {"tools"},
    "molecule_runtime": {"platform"},
    "opentelemetry": {"common"},
    "prometheus_client": {"common"},
    "rich": {"cli", "devkit"},
    "starlette": {"devkit", "server", "tools"},
    "tomlkit": {"backends", "codex", "config"},
}
"""The packages that may import a third party's library."""

FILES: Final = sorted([*PACKAGE.rglob("*.py"), ROOT / "adapter.py"])


def place_of(file: Path) -> str:
    """Return the package, or the top-level module, that a file belongs to."""
    return "adapter" if file.parent == ROOT else file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[str]:
    """Return the dotted names of all modules that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{name.name}" for name in names)
            case _:
                pass


def places_imported_by(file: Path) -> set[str]:
    """Return the packages and top-level modules of `codex_workspace` that a file imports."""
    names = (name.split(".") for name in imports_of(file))
    return {parts[1] for parts in names if parts[0] == "codex_workspace" and len(parts) > 1} & set(DEPTH)


def test_every_package_has_its_layer() -> None:
    assert {place_of(file) for file in FILES} - {"__init__"} == set(DEPTH)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_downwards(file: Path) -> None:
    own = place_of(file)
    upwards = {name for name in places_imported_by(file) if name != own and DEPTH[name] <= DEPTH.get(own, -1)}
    assert not upwards


@pytest.mark.parametrize("party", KNOWN_BY)
def test_only_the_named_packages_import_an_outside_party(party: str) -> None:
    importers = {place_of(file) for file in FILES if any(name.split(".")[0] == party for name in imports_of(file))}
    assert importers <= KNOWN_BY[party]


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def run_at_import(file: Path) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, except in functions and `TYPE_CHECKING` blocks."""
    pending: list[ast.stmt] = list(ast.parse(file.read_text()).body)
    for node in pending:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_type_checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            pending += (
                []
                if is_type_checking
                else [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            )


def modules_imported_by(file: Path, modules: set[str]) -> set[str]:
    """Return the modules of `codex_workspace` that importing a file imports."""
    found = set[str]()
    for node in run_at_import(file):
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {f"{module}.{name.name}" for name in names} | {module}
            case _:
                pass
    return (found & modules) - {module_name(file)}


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    files = {module_name(file): file for file in FILES}
    graph = {name: modules_imported_by(file, set(files)) for name, file in files.items()}
    # A package's __init__ is imported with each of its modules; it imports none of them, or only to export names.
    graph = {name: {each for each in imported if not name.startswith(f"{each}.")} for name, imported in graph.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
