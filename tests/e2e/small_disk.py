"""The agent with a disk that is full while FILE exists. Usage: python -m tests.e2e.small_disk FILE.

SQLite's page limit is set, which causes the same error as a full disk.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from codex_workspace.__main__ import main
from codex_workspace.storage.database import Connection, Cursor, Value


@contextmanager
def small_disk(full: Path) -> Iterator[None]:
    """Prevent this process's databases from growing while the file `full` exists."""
    run = Connection.run

    def limited(connection: Connection, sql: str, values: Sequence[Value] = ()) -> Cursor:
        run(connection, f"PRAGMA max_page_count = {1 if full.exists() else 1 << 30}")
        return run(connection, sql, values)

    setattr(Connection, "run", limited)  # noqa: B010
    try:
        yield
    finally:
        setattr(Connection, "run", run)  # noqa: B010


if __name__ == "__main__":
    with small_disk(Path(sys.argv[1])):
        sys.exit(main(["serve"]))
