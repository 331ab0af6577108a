"""A PostgreSQL server that goes away and comes back."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing, suppress

import psycopg
import pytest
from a2a.types import TaskPushNotificationConfig

from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import ConfigError, DatabaseTaken, StoreUnavailable
from codex_workspace.storage.database import PROBE_INTERVAL_S, Connection, Cursor, Database, DatabaseFailed, Value
from codex_workspace.storage.outbox import OutboxMessage, Route
from codex_workspace.storage.postgresql import PostgresqlEngine
from codex_workspace.storage.store import open_database, open_store, wait_until_free
from tests.support.databases import column
from tests.support.postgresql import PASSWORD, PostgresqlServer, running_postgresql
from tests.support.waiting import HANG_S, eventually
from tests.unit.storage.test_database import COUNTED, insert
from tests.unit.storage.test_deliveries import ACCEPTED, ANSWERED, KEY, accept, known
from tests.unit.storage.test_store import ME

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


async def test_a_server_that_has_just_gone_is_noticed_by_the_next_look(
    server: PostgresqlServer, database: Database
) -> None:
    assert await database.problem() is None
    server.stop()
    assert await database.problem() == "the database cannot be reached"
    server.start()


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("lost", ["table schema_version, deliveries", "schema public cascade"])
async def test_lost_tables_are_noticed_and_nothing_more_is_written(
    server: PostgresqlServer, lost: str, *, looks: bool
) -> None:
    gone = "the database's tables are gone; stop the agent and restore a backup"
    url = server.create_database()
    async with open_store(url) as store:
        with closing(psycopg.connect(url, autocommit=True)) as other:
            other.execute(f"drop {lost}".encode())
        if looks:
            assert await store.write_problem() == gone
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=gone):
                await accept(store.deliveries)
        assert await store.write_problem() == gone


async def test_the_turn_of_an_accepted_message_waits_until_the_server_is_back(server: PostgresqlServer) -> None:
    async with open_store(server.create_database()) as store:
        thread = store.context_thread("me", "context")
        await thread.save("thread", "digest")
        server.stop()
        reads = thread.load(), thread.instructions(), store.deliveries.count_restart("task")
        found = asyncio.gather(*reads)
        await eventually(store.write_problem)
        server.start()
        assert [*await found] == ["thread", "digest", 1]


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many further commits are not confirmed: the connection breaks after the server has made them."""
    run, lost = Connection.run, [0]

    def losing(connection: Connection, sql: str, values: Sequence[Value] = ()) -> Cursor:
        cursor = run(connection, sql, values)
        if sql == "commit" and lost[0]:
            lost[0] -= 1
            connection.close()
            raise psycopg.OperationalError("the connection is lost")
        return cursor

    monkeypatch.setattr(Connection, "run", losing)
    return lost


async def test_a_commit_that_was_not_confirmed_is_not_made_twice(server: PostgresqlServer, lost: list[int]) -> None:
    async with open_store(server.create_database()) as store:
        lost[0] = 1
        accepted = await accept(store.deliveries)
        assert accepted is not None
        assert accepted.state == ACCEPTED
        for count in (store.deliveries.count_codex_death(KEY), store.deliveries.count_restart("task-1")):
            lost[0] = 1
            assert await count == 1
        lost[0] = 1
        await store.deliveries.mark_answered(KEY, b"the end")
        found = await known(store.deliveries)
        assert found is not None
        assert (found.state, found.ending, found.deaths) == (ANSWERED, b"the end", 1)
        lost[0] = 1
        message = OutboxMessage("row-1", "me", "message-1", Route.USER)
        assert await store.outbox.add(message) is not None
        assert await store.outbox.add(message) is None
        await store.push_configs.set_info("task-1", TaskPushNotificationConfig(id="a", url="http://127.0.0.1/"), ME)
        lost[0] = 1
        await store.push_configs.delete_info("task-1", ME, "a")
        assert not store.push_configs.watched
        assert lost == [0]


async def test_a_message_whose_commit_was_not_confirmed_is_answered_when_it_is_sent_again(
    server: PostgresqlServer, lost: list[int]
) -> None:
    async with open_store(server.create_database()) as store:
        lost[0] = 2
        with pytest.raises(StoreUnavailable):
            await accept(store.deliveries)
        stored = await known(store.deliveries)
        assert stored is not None
        assert store.deliveries.is_forgotten(stored)
        store.deliveries.resume(stored)
        assert not store.deliveries.is_forgotten(stored)


async def test_several_agents_create_one_database_at_once(server: PostgresqlServer) -> None:
    for _ in range(5):
        url = server.create_database()

        async def main_context(url: str = url) -> str:
            while True:
                with suppress(ConfigError):
                    await wait_until_free(url)
                    async with open_store(url) as store:
                        return await store.main_context("me")

        assert len(set(await asyncio.gather(*(main_context() for _ in range(4))))) == 1


async def test_a_statement_that_is_cancelled_is_tried_again(server: PostgresqlServer) -> None:
    """As an administrator does, or a server that ends a deadlock."""
    cancel = "select pg_cancel_backend(pid) from pg_stat_activity where wait_event_type = 'Lock'"
    url = server.create_database()
    async with open_store(url) as store:
        await accept(store.deliveries)
        with closing(PostgresqlEngine(url).connect()) as other:
            other.begin()
            other.run("lock table deliveries in access exclusive mode")
            answering = asyncio.create_task(store.deliveries.mark_answered(KEY, b"the end"))

            async def is_reported() -> bool:
                server.execute(cancel)
                return await store.write_problem() == "the database is locked"

            await eventually(is_reported)
            other.run("commit")
        await answering
        found = await known(store.deliveries)
        assert found is not None
        assert found.state == ANSWERED


async def test_an_error_of_a_statement_is_told_as_such(database: Database) -> None:
    with pytest.raises(DatabaseFailed, match='column "no_such_column" of relation "deliveries"'):
        await database.write(lambda rows: rows.change("update deliveries set no_such_column = 1"))
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


# --- One agent for a database ---

LOCKS = "from pg_locks where locktype = 'advisory' and classid = 7077 and granted"
END_LOCK = f"select pg_terminate_backend(pid, 5000) {LOCKS}"
TAKE_LOCK = "select pg_advisory_lock(7077, (select oid from pg_namespace where nspname = current_schema())::int)"


def lock_holders(url: str) -> list[int]:
    """Return the server's processes that hold the lock of a database."""
    with psycopg.connect(url) as connection:
        query = f"select pid {LOCKS} and database = (select oid from pg_database where datname = current_database())"
        return [pid for (pid,) in connection.execute(query.encode())]


async def test_a_second_agent_is_refused_and_told_of_the_first(server: PostgresqlServer) -> None:
    url = server.create_database()
    async with open_store(url) as store:
        with pytest.raises(DatabaseTaken) as late:
            await wait_until_free(url, 0.0)
        with pytest.raises(DatabaseTaken) as refused:
            async with open_store(url):
                pytest.fail("both use it")
        assert await store.main_context("me")
        for error in (late, refused):
            text = str(error.value)
            assert text.startswith(
                "DATABASE_URL: another agent uses the database test_1 at 127.0.0.1 (codex-workspace "
            )
            assert f", pid {os.getpid()} on {socket.gethostname()}, server process " in text
            assert ", from 127.0.0.1, since 2" in text
            assert PASSWORD not in text
    await wait_until_free(url, 0.0)
    async with open_store(url):
        pass


async def test_a_second_agent_waits_for_the_first(server: PostgresqlServer, caplog: pytest.LogCaptureFixture) -> None:
    url = server.create_database()
    async with asyncio.TaskGroup() as tasks:
        async with open_store(url):
            waiting = tasks.create_task(wait_until_free(url, HANG_S))
            await eventually(lambda: "another agent uses the database" in caplog.text)
            assert not waiting.done()
        await waiting
    assert caplog.text.count("waiting up to 120 s for its end: codex-workspace ") == 1


async def test_agents_with_schemas_of_their_own_share_a_database(server: PostgresqlServer) -> None:
    url = server.create_database()
    with psycopg.connect(url) as connection:
        connection.execute("create schema other")
    async with open_store(url), open_store(f"{url}?options=-csearch_path%3Dother"):
        assert len(lock_holders(url)) == 2


async def test_an_agent_whose_lock_is_lost_takes_it_again_by_itself(server: PostgresqlServer) -> None:
    url = server.create_database()
    async with open_store(url) as store, task_group() as tasks:
        tasks.start_soon(store.keep_lock)
        before = lock_holders(url)
        server.execute(END_LOCK)
        await eventually(lambda: lock_holders(url))
        assert lock_holders(url) != before
        tasks.cancel_scope.cancel()


async def test_an_agent_whose_lock_is_lost_writes_only_after_it_has_taken_it_again(server: PostgresqlServer) -> None:
    url = server.create_database()
    async with open_store(url) as store:
        for _ in range(3):
            server.execute(END_LOCK)
            await accept(store.deliveries)
            assert len(lock_holders(url)) == 1


async def test_an_agent_whose_lock_was_taken_writes_nothing_and_ends(server: PostgresqlServer) -> None:
    url = server.create_database()
    async with open_store(url) as store:
        with psycopg.connect(url) as other:
            server.execute(END_LOCK)
            other.execute(TAKE_LOCK.encode())
            with pytest.raises(StoreUnavailable, match=r"\(another agent uses the database\)"):
                await accept(store.deliveries)
            assert await store.write_problem() == "another agent uses the database"
            with pytest.raises(DatabaseTaken, match=r"another agent uses the database test_1 at .*\(server process "):
                await store.keep_lock()


async def test_an_agent_ends_if_another_one_has_used_the_database_meanwhile(server: PostgresqlServer) -> None:
    url = server.create_database()
    async with open_store(url) as store:
        with psycopg.connect(url) as other:
            other.execute("update write_probe set filler = 'another agent' where id = 0")
        server.execute(END_LOCK)
        with pytest.raises(StoreUnavailable):
            await accept(store.deliveries)
        with pytest.raises(DatabaseTaken, match="it took it while this agent's connection was lost"):
            await store.keep_lock()


async def test_a_connection_that_only_the_agent_has_lost_keeps_it_from_nothing(server: PostgresqlServer) -> None:
    """The server can hold a connection for long that does not exist for the agent any more."""
    engine = PostgresqlEngine(server.create_database())
    engine.has_claimed = False
    async with open_database(engine.url):
        pass
    with closing(engine.connect_for_writing()):
        before = lock_holders(engine.url)
        second = await eventually(lambda: reconnected(engine))
        with closing(second):
            assert lock_holders(engine.url) != before


def reconnected(engine: PostgresqlEngine) -> Connection | None:
    with suppress(psycopg.OperationalError):
        return engine.connect_for_writing()
    return None
