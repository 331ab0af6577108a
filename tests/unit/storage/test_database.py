"""Works share commits and keep their order, and one that fails takes no other with it; on both kinds of databases.

Covers `storage.engine`.
"""

import asyncio
import time

import pytest

from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage.database import DELAY_S, Connection, DatabaseFailed, Work
from codex_workspace.storage.store import open_database
from tests.support.databases import column
from tests.support.waiting import eventually
from tests.unit.storage.test_store import on_disk

COUNTED = "select context_id from main_contexts order by owner"


def insert(owner: str) -> Work[str]:
    def work(rows: Connection) -> str:
        rows.change("insert into main_contexts (owner, context_id) values (?, ?)", owner, f"of {owner}")
        return owner

    return work


def insert_and_fail(owner: str) -> Work[str]:
    def work(rows: Connection) -> str:
        insert(owner)(rows)
        raise LookupError(owner)

    return work


def fail_in_sql(rows: Connection) -> int:
    return rows.change("insert into main_contexts (no_such_column) values (1)")


async def test_a_write_returns_its_result_and_is_on_disk(url: str) -> None:
    async with open_database(url) as database:
        assert await database.write(insert("one")) == "one"
        assert on_disk(url, COUNTED) == [("of one",)]


async def test_works_that_wait_share_a_commit(url: str, committed: list[int]) -> None:
    async with open_database(url) as database:
        names = [f"{number:02}" for number in range(50)]
        assert await asyncio.gather(*(database.write(insert(name)) for name in names)) == names
        assert sum(committed) == 50
        assert len(committed) < 10
        assert len(on_disk(url, COUNTED)) == 50


async def test_a_work_that_fails_takes_no_other_with_it(url: str) -> None:
    async with open_database(url) as database:
        works = [insert("a"), insert_and_fail("b"), insert("c"), fail_in_sql, insert("d")]
        results = await asyncio.gather(*(database.write(work) for work in works), return_exceptions=True)
        assert [type(result) for result in results] == [str, LookupError, str, DatabaseFailed, str]
        assert on_disk(url, COUNTED) == [("of a",), ("of c",), ("of d",)]


async def test_a_deferred_work_is_committed_with_the_next_write(url: str, committed: list[int]) -> None:
    async with open_database(url) as database:
        database.write_later(insert("a"))
        assert on_disk(url, COUNTED) == []
        await database.write(insert("b"))
        assert committed == [2]
        assert on_disk(url, COUNTED) == [("of a",), ("of b",)]


async def test_a_deferred_work_is_committed_after_the_delay(url: str) -> None:
    async with open_database(url) as database:
        before = time.monotonic()
        database.write_later(insert("a"))
        await eventually(lambda: bool(on_disk(url, COUNTED)))
        assert time.monotonic() - before >= DELAY_S * 0.9


async def test_a_read_sees_deferred_works_and_closing_commits_them(url: str) -> None:
    async with open_database(url) as database:
        database.write_later(insert("a"))
        assert await column(database, COUNTED) == ["of a"]
        database.write_later(insert("b"))
    assert on_disk(url, COUNTED) == [("of a",), ("of b",)]


async def test_a_deferred_work_that_fails_is_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with open_database(url) as database:
        database.write_later(fail_in_sql)
        await database.flush()
    assert "a deferred write was not made: " in caplog.text
    assert "no_such_column" in caplog.text


async def test_a_cancelled_caller_does_not_stop_its_write(url: str) -> None:
    async with open_database(url) as database:
        writing = asyncio.create_task(database.write(insert("a")))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await database.write(insert("b"))
        assert on_disk(url, COUNTED) == [("of a",), ("of b",)]


async def test_a_closed_database_refuses_writes(url: str) -> None:
    async with open_database(url) as database:
        pass
    with pytest.raises(StoreUnavailable, match="The agent is stopping; send the request again later"):
        await database.write(insert("a"))


async def test_a_lookup_sees_what_was_written(url: str) -> None:
    async with open_database(url) as database:
        query = "select context_id from main_contexts where owner = 'a'"
        assert await database.lookup(lambda rows: rows.first(str, query)) is None
        await database.write(insert("a"))
        assert await database.lookup(lambda rows: rows.first(str, query)) == "of a"
        with pytest.raises(DatabaseFailed, match="no_such_column"):
            await database.lookup(lambda rows: rows.first(str, "select no_such_column from main_contexts"))


async def test_an_unexpected_error_of_the_driver_ends_no_thread(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, errors = Connection.begin, [MemoryError("no memory")]

    def failing(connection: Connection) -> None:
        if errors:
            raise errors.pop()
        begin(connection)

    async with open_database(url) as database:
        monkeypatch.setattr(Connection, "begin", failing)
        with pytest.raises(DatabaseFailed, match="no memory"):
            await database.write(insert("a"))
        await database.write(insert("b"))
        assert on_disk(url, COUNTED) == [("of b",)]
