"""A PostgreSQL server that goes away and comes back."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import psycopg
import pytest

from codex_workspace.common.errors import ConfigError, StoreUnavailable
from codex_workspace.storage.database import PROBE_INTERVAL_S, Connection, Cursor, Database, DatabaseFailed, Value
from codex_workspace.storage.postgresql import PostgresqlEngine
from codex_workspace.storage.store import Store, open_database, open_store
from tests.support.databases import column
from tests.support.postgresql import PASSWORD, PostgresqlServer, running_postgresql
from tests.support.waiting import eventually
from tests.unit.storage.test_database import COUNTED, insert
from tests.unit.storage.test_deliveries import ACCEPTED, ANSWERED, KEY, accept, known

pytestmark = pytest.mark.postgresql


@pytest.fixture
def server() -> Iterator[PostgresqlServer]:
    """A server of this test alone, so that it can be stopped."""
    with running_postgresql() as server:
        yield server


@pytest.fixture
async def database(server: PostgresqlServer) -> AsyncIterator[Database]:
    async with open_database(server.create_database()) as database:
        yield database


async def test_a_server_that_restarts_between_two_works_is_not_noticed(
    server: PostgresqlServer, database: Database
) -> None:
    await database.write(insert("a"))
    for name in ("b", "c"):
        server.stop()
        server.start()
        await database.write(insert(name))
        assert await database.problem() is None
    server.stop()
    server.start()
    assert await column(database, COUNTED) == ["of a", "of b", "of c"]


async def test_a_server_that_is_gone_refuses_messages_until_it_is_back(
    server: PostgresqlServer, database: Database
) -> None:
    await database.write(insert("a"))
    server.stop()
    with pytest.raises(StoreUnavailable, match="the database cannot be reached"):
        await database.write(insert("b"))
    with pytest.raises(StoreUnavailable):
        await database.read(lambda rows: rows.all(str, COUNTED))
    assert await database.problem() == "the database cannot be reached"
    server.start()

    async def is_back() -> bool:
        return await database.problem() is None

    await eventually(is_back, PROBE_INTERVAL_S / 3)
    await database.write(insert("b"))
    assert await column(database, COUNTED) == ["of a", "of b"]


async def test_a_commit_that_was_not_confirmed_is_not_made_twice(
    server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks after the server has committed, and before its answer arrives."""
    run, lost = Connection.run, [0]

    def losing(connection: Connection, sql: str, values: Sequence[Value] = ()) -> Cursor:
        cursor = run(connection, sql, values)
        if sql == "commit" and lost[0]:
            lost[0] -= 1
            connection.close()
            raise psycopg.OperationalError("the connection is lost")
        return cursor

    async with open_store(server.create_database()) as store:
        monkeypatch.setattr(Connection, "run", losing)
        lost[0] = 1
        accepted = await accept(store.deliveries)
        assert accepted is not None
        assert accepted.state == ACCEPTED
        lost[0] = 1
        await store.deliveries.mark_answered(KEY, b"the end")
        found = await known(store.deliveries)
        assert found is not None
        assert (found.state, found.ending) == (ANSWERED, b"the end")
        assert lost == [0]


async def test_several_agents_create_and_use_one_database(server: PostgresqlServer) -> None:
    url = server.create_database()

    async def main_context(store: Store) -> str:
        return await store.main_context("me")

    async with open_store(url) as one, open_store(url) as two:
        assert len(set(await asyncio.gather(*(main_context(store) for store in (one, two, one, two))))) == 1


async def test_an_error_of_a_statement_is_told_as_such(database: Database) -> None:
    with pytest.raises(DatabaseFailed, match='relation "no_such_table" does not exist'):
        await database.write(lambda rows: rows.change("insert into no_such_table values (1)"))
    assert await database.problem() is None


async def test_a_server_that_cannot_be_reached_is_one_sentence_without_the_password(server: PostgresqlServer) -> None:
    server.stop()
    with pytest.raises(ConfigError) as refused:
        async with open_database(server.url("x")):
            pytest.fail("it is open")
    assert str(refused.value).startswith("DATABASE_URL: the database x at 127.0.0.1 cannot be opened: ")
    assert PASSWORD not in str(refused.value)
    assert "\n" not in str(refused.value)
    server.start()


def test_a_url_that_the_driver_cannot_read_is_refused_without_its_content() -> None:
    with pytest.raises(ConfigError, match=r"^DATABASE_URL: must be a URL such as [^ ]*password@host/name$"):
        PostgresqlEngine("postgresql://me:secret@host:port/name?no_such_option=1")
