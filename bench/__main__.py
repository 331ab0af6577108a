"""`python -m bench`: measure, print the table, and write it into docs/performance.md if it is the whole one."""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio

from bench.figures import Row, render, summary, warning, written
from bench.measure import GROUPS, Run
from bench.processes import open_model, open_sides
from tests.e2e.agent_process import REPOSITORY

DOCUMENT: Final = REPOSITORY / "docs" / "performance.md"

ON_DISK: Final = "/var/tmp"
"""The state folders are here: /tmp is often in memory."""


async def run(groups: Sequence[str], rounds: int | None = None) -> tuple[list[Row], str]:
    """Run groups of measurements and print their rows; return them, and the version of codex."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=ON_DISK, ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        async with open_model() as model_url, open_sides(root, model_url) as (sides, recipe):
            codex = (await anyio.run_process([recipe.command[0], "--version"])).stdout.decode().strip()
            for name in groups:
                measurement, usual = GROUPS[name]
                new = await measurement(Run(sides, recipe, model_url, root / name, rounds or usual))
                print(f"\n{name}\n{render(new)}", flush=True)
                rows += new
    return rows, codex


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0: a missed aim is a finding, not an error."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="What the agent costs over bare codex.")
    parser.add_argument("--rows", default=",".join(GROUPS), help=f"groups of rows (default: {','.join(GROUPS)})")
    parser.add_argument("--rounds", type=int, help="rounds of each group; by default each has its own number")
    options = parser.parse_args(arguments)
    groups = options.rows.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    load = os.getloadavg()[0]
    busy = warning(load)
    print(busy or f"load average {load:.2f} before the run", flush=True)
    rows, codex = anyio.run(run, groups, options.rounds)
    machine = (
        f"{os.cpu_count()} cores, load average {load:.2f} before the run, Python {platform.python_version()}, {codex}."
    )
    report = f"{render(rows)}\n\n{machine}"
    print(f"\n{report}\n\n{summary(rows)}")
    if busy:
        print(busy)
    elif groups == list(GROUPS) and options.rounds is None:
        DOCUMENT.write_text(written(DOCUMENT.read_text(), report))
        print(f"written: {DOCUMENT.relative_to(REPOSITORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
