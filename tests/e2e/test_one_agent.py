"""Two agents with different state folders but one database, or one CODEX_HOME: one of them is refused."""

import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import anyio
import httpx
import psutil
import psycopg
import pytest
from a2a.types import TaskState

from tests.e2e.agent_process import AgentProcess, AgentSetup, running_agent, spawn
from tests.e2e.client import peer, script
from tests.e2e.test_adapter import HOST, hosted_by, message, platform
from tests.support.postgresql import PASSWORD, PostgresqlServer, running_postgresql
from tests.support.waiting import HANG_S, eventually

COMPLETED = TaskState.TASK_STATE_COMPLETED

LOCKS = "from pg_locks where locktype = 'advisory' and classid = 7077"
END_LOCK = f"select pg_terminate_backend(pid, 5000) {LOCKS} and granted"
WAITING = f"select 1 {LOCKS} and not granted"
TAKE_LOCK = "select pg_advisory_lock(7077, (select oid from pg_namespace where nspname = current_schema())::int)"


def other_agent(setup: AgentSetup, name: str = "other", **environment: str) -> AgentSetup:
    """Return the setup of an agent with folders of its own."""
    (setup.root / name).mkdir()
    return replace(setup, root=setup.root / name, environment={**setup.environment, **environment})


async def refusal(setup: AgentSetup, *command: str) -> str:
    """Start an agent, which must exit with code 2; return its last line."""
    words = [sys.executable, "-m", "codex_workspace", *(command or ("serve",))]
    with anyio.fail_after(HANG_S):
        done = await anyio.run_process(words, env=setup.prepare(), cwd=setup.root, check=False)
    assert done.returncode == 2, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return done.stderr.decode().splitlines()[-1]


async def assert_answers(agent: AgentProcess) -> None:
    async with peer(agent.url) as client:
        assert (await client.ask("Hello")).state == COMPLETED


# --- One folder or file ---


@pytest.mark.slow
async def test_a_second_agent_with_the_same_codex_home_is_refused(setup: AgentSetup, agent: AgentProcess) -> None:
    home = setup.root / "state" / "codex"
    before = (home / "config.toml").read_bytes()
    error = await refusal(replace(other_agent(setup, CODEX_HOME=str(home)), codex={"web_search": "live"}))
    assert f"CODEX_HOME: another agent uses {home} (pid {agent.process.pid}, since 2" in error
    assert (home / "config.toml").read_bytes() == before
    await assert_answers(agent)


@pytest.mark.slow
@pytest.mark.parametrize("command", [("serve",), ("serve", "--executor", "tests.conformance.sut:executor")])
async def test_a_second_agent_with_the_same_database_file_is_refused(
    setup: AgentSetup, agent: AgentProcess, command: tuple[str, ...]
) -> None:
    file, link = setup.root / "state" / "workspace.sqlite3", setup.root / "link.sqlite3"
    link.symlink_to(file)
    second = other_agent(setup, DATABASE_URL=f"sqlite:///{link}")
    error = await refusal(second, *command)
    assert f"DATABASE_URL: another agent uses {file} (pid {agent.process.pid}, since 2" in error
    await assert_answers(agent)
    async with running_agent(replace(second, environment={})) as neighbour:
        await assert_answers(neighbour)


# --- One PostgreSQL database ---


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as server:
        yield server


@pytest.fixture
def on_postgresql(setup: AgentSetup, server: PostgresqlServer) -> AgentSetup:
    """The setup of an agent with an empty database."""
    return replace(setup, environment={"DATABASE_URL": server.create_database()})


@contextmanager
def starting(setup: AgentSetup) -> Iterator[psutil.Popen]:
    """Start an agent that may wait for another one, and kill it at the end of the block."""
    process = spawn(setup)
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait()


def waits(setup: AgentSetup) -> bool:
    return setup.log.exists() and "another agent uses the database; waiting up to 30 s" in setup.log.read_text()


@pytest.mark.postgresql
async def test_the_next_agent_of_a_database_starts_when_the_first_has_stopped(on_postgresql: AgentSetup) -> None:
    second = other_agent(on_postgresql)
    async with running_agent(on_postgresql) as agent:
        with starting(second) as process:
            await eventually(lambda: waits(second))
            assert await agent.stop() == 0
            await eventually(lambda: "A2A at" in second.log.read_text() or process.poll() is not None)
    log = second.log.read_text()
    assert f", pid {agent.process.pid} on " in log
    assert "A2A at" in log
    assert PASSWORD not in log


@pytest.mark.postgresql
async def test_an_agent_that_waits_for_another_one_can_be_stopped(on_postgresql: AgentSetup) -> None:
    second = other_agent(on_postgresql)
    async with running_agent(on_postgresql) as agent:
        with starting(second) as process:
            await eventually(lambda: waits(second))
            process.send_signal(signal.SIGTERM)
            await eventually(lambda: process.poll() is not None)
            assert process.poll() == 0
        await assert_answers(agent)


@pytest.mark.postgresql
async def test_an_agent_whose_lock_is_lost_goes_on(on_postgresql: AgentSetup, server: PostgresqlServer) -> None:
    async with running_agent(on_postgresql) as agent, peer(agent.url) as client:
        running = await client.begin(script({"run": "sleep 1"}, {"say": "done"}))
        server.execute(END_LOCK)
        assert (await client.finished(running.task_id)).state == COMPLETED
        assert (await client.ask("Hello")).state == COMPLETED
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{agent.url}readyz")).status_code == 200


@asynccontextmanager
async def taken(url: str, server: PostgresqlServer) -> AsyncIterator[None]:
    """End the connection that locks a database, and hold its lock instead."""
    async with await psycopg.AsyncConnection.connect(url, application_name="other") as other:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.execute, TAKE_LOCK.encode())
            await eventually(lambda: server.select(WAITING))
            server.execute(END_LOCK)
        yield


@pytest.mark.postgresql
async def test_an_agent_whose_database_was_taken_ends_its_turns_and_itself(
    on_postgresql: AgentSetup, server: PostgresqlServer
) -> None:
    async with running_agent(on_postgresql) as agent, peer(agent.url) as client:
        await client.begin(script({"run": "sleep 777"}))
        (command,) = await eventually(lambda: agent.commands("777"))
        async with taken(on_postgresql.environment["DATABASE_URL"], server):
            assert await agent.ended() == 2
        assert not command.is_running()
    error = on_postgresql.log.read_text().splitlines()[-1]
    assert "DATABASE_URL: another agent uses the database" in error
    assert "(other, server process " in error


@pytest.mark.postgresql
async def test_under_the_platforms_runtime_an_agent_whose_database_was_taken_is_wedged(
    setup: AgentSetup, server: PostgresqlServer
) -> None:
    url = server.create_database()
    async with running_agent(hosted_by("may", setup, DATABASE_URL=url), HOST) as agent, platform(agent) as host:
        assert await host.reply("Hello") == "You said: Hello"
        async with taken(url, server):

            async def is_wedged() -> bool:
                return "DATABASE_URL: another agent uses the database" in await host.wedge_reason()

            await eventually(is_wedged)
            assert "You said" not in str(await host.push(message("Hello again", "message-2")))
            assert agent.process.is_running()


@pytest.mark.postgresql
async def test_the_doctor_names_the_agent_that_uses_a_database(on_postgresql: AgentSetup) -> None:
    words = [sys.executable, "-m", "codex_workspace", "doctor"]
    async with running_agent(on_postgresql) as agent:
        done = await anyio.run_process(words, env=on_postgresql.prepare(), check=False)
    assert "an agent uses it: codex-workspace " in done.stdout.decode()
    assert f", pid {agent.process.pid} on " in done.stdout.decode()
