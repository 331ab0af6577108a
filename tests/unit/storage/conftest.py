"""The databases that the storage tests run with."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from codex_workspace.common.database_url import sqlite_url
from codex_workspace.storage.database import Database, _Job, _Writer
from codex_workspace.storage.store import open_database
from tests.support.postgresql import PostgresqlServer, running_postgresql


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    with running_postgresql() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "store.sqlite3")
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.create_database()


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    async with open_database(url) as database:
        yield database


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of works in each commit."""
    commits: list[int] = []
    run_jobs = _Writer._run_jobs

    def note(writer: _Writer, jobs: Sequence[_Job[object]]) -> None:
        commits.append(len(jobs))
        run_jobs(writer, jobs)

    monkeypatch.setattr(_Writer, "_run_jobs", note)
    return commits
