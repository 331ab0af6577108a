"""`python -m bench`: run the measurements and print each table when it is complete."""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from bench.figures import Table, render, summary
from bench.measure import (
    SMALLEST,
    Memory,
    Sizes,
    backends,
    burst,
    cold_start,
    memory,
    parallel_contexts,
    streams,
    warm_turns,
)
from bench.processes import open_bench


async def run(sizes: Sizes) -> list[Table]:
    """Run all measurements, print the tables, and return them."""
    tables: list[Table] = []

    def show(*new: Table) -> None:
        for table in new:
            tables.append(table)
            print(f"\n{render(table)}", flush=True)

    print(_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        async with open_bench(root) as bench:
            idle = Memory.now(bench)
            show(*await warm_turns(bench, sizes))
            show(await burst(bench, sizes))
            show(await parallel_contexts(bench, sizes))
            show(await streams(bench, sizes))
            show(memory(idle, Memory.now(bench)))
            show(await backends(bench, sizes, root))
            show(await cold_start(bench, sizes, root))
    print(f"\n{summary(tables)}\n{_machine()}")
    return tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0: a missed aim is a finding, not an error."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="What the agent costs over bare codex.")
    parser.add_argument(
        "--smallest", action="store_true", help="only to see that everything runs; the figures are void"
    )
    options = parser.parse_args(arguments)
    anyio.run(run, SMALLEST if options.smallest else Sizes())
    return 0


def _machine() -> str:
    """Return the relevant properties of the machine; other programs show in its load."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, load {load}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
