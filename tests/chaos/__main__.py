"""Run one chaos test: `python -m tests.chaos [--seed N] [--messages N] [--strikes N] [--database D] [--folder F]`.

Each message goes over JSON-RPC, HTTP+JSON or gRPC; another try can go over another. With `--database postgresql`, the
run starts Debian's PostgreSQL and strikes it too. The exit code is 1 if something was lost, duplicated or left over.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from tests.chaos.plan import make_plan
from tests.chaos.run import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one chaos test and print its report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="the plan's; random by default")
    parser.add_argument("--messages", type=int, default=500)
    parser.add_argument("--strikes", type=int, default=100)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--folder", type=Path, help="where the agent works, empty and kept; a temporary one by default")
    options = parser.parse_args(arguments)
    plan = make_plan(options.seed, options.messages, options.strikes, postgresql=options.database == "postgresql")
    sys.stdout.write(f"seed {plan.seed}: {options.messages} messages, {options.strikes} strikes\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        report = anyio.run(run, plan, options.folder or Path(folder))
    sys.stdout.write(f"{report if report.wrong else report.figures}\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
