"""A disk that is full whenever a certain file is there. Usage: python -m tests.e2e.small_disk FILE.

SQLite is told not to grow its file any more, which ends in the same error as a disk without room.
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
    """Let no database of this process grow while the file `full` is there."""

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
