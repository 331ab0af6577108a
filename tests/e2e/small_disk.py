"""The agent with a disk that is full while FILE exists. Usage: python -m tests.e2e.small_disk FILE.

SQLite's page limit is set, which causes the same error as a full disk.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import DBAPICursor

from codex_workspace.__main__ import main


@contextmanager
def small_disk(full: Path) -> Iterator[None]:
    """Prevent this process's databases from growing while the file `full` exists."""

    def limit(_connection: object, cursor: DBAPICursor, *_rest: object) -> None:
        cursor.execute(f"PRAGMA max_page_count = {1 if full.exists() else 1 << 30}")

    event.listen(Engine, "before_cursor_execute", limit)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", limit)


if __name__ == "__main__":
    with small_disk(Path(sys.argv[1])):
        sys.exit(main(["serve"]))
