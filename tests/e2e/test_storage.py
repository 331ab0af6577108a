"""The state folder: used by two agents, damaged, of another version, on a full disk, lost while the agent runs."""

import json
import re
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import anyio
import grpc.aio
import httpx
import psycopg
import pytest
from a2a.types import Task, TaskState, TaskStatus, a2a_pb2_grpc
from a2a.utils.errors import InternalError
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.files import LOCK_NAME, LOCK_TIMEOUT_S
from codex_workspace.storage.database import PROBE_INTERVAL_S
from codex_workspace.storage.schema import SCHEMA_VERSION
from codex_workspace.storage.store import open_store
from tests.e2e.agent_process import AgentProcess, AgentSetup, running_agent
from tests.e2e.client import Seen, peer, request, script
from tests.support.postgresql import running_postgresql
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow

COMPLETED = TaskState.TASK_STATE_COMPLETED
LONG_ANSWER = "x" * 400_000 + "The end."
REPEAT = script({"repeat": True})


def database(setup: AgentSetup) -> Path:
    return setup.root / "state" / "workspace.sqlite3"


def rows(setup: AgentSetup, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database(setup))) as connection:
        return list(connection.execute(query))


async def run(setup: AgentSetup, *command: str) -> CompletedProcess[bytes]:
    """Run a command of the agent until it exits."""
    words = [sys.executable, "-m", "codex_workspace", *command]
    with anyio.fail_after(HANG_S):
        return await anyio.run_process(words, env=setup.prepare(), check=False)


async def startup_error(setup: AgentSetup) -> str:
    """Start the agent, which must exit with code 2, and return its last line of output."""
    done = await run(setup, "serve")
    assert done.returncode == 2, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return done.stderr.decode().splitlines()[-1]


async def doctor_reports(setup: AgentSetup) -> dict[str, dict[str, str]]:
    done = await run(setup, "doctor", "--json")
    return {report["check"]: report for report in json.loads(done.stdout)}


# --- Two agents ---


@pytest.mark.alone
async def test_a_second_agent_refuses_to_start_and_names_the_first(setup: AgentSetup, agent: AgentProcess) -> None:
    before = time.monotonic()
    await run(setup, "prepare")
    loading_s, before = time.monotonic() - before, time.monotonic()
    error = await startup_error(setup)
    assert time.monotonic() - before < LOCK_TIMEOUT_S + 1 + 4 * loading_s
    assert f"another agent uses {setup.root / 'state'} (pid {agent.process.pid}, since 2" in error
    assert agent.url in error
    async with peer(agent.url) as client:
        assert (await client.ask("Hello")).state == COMPLETED
    found = await doctor_reports(setup)
    assert found["lock"]["status"] == "ok"
    assert f"pid {agent.process.pid}" in found["lock"]["finding"]


async def test_a_killed_agent_and_its_codex_hold_no_locks(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.begin(script({"run": "sleep 30"}))
        await eventually(lambda: agent.commands("30"))
        agent.process.send_signal(signal.SIGKILL)
        await agent.ended()
        assert str(agent.process.pid) in (setup.root / "state" / LOCK_NAME).read_text()
        async with running_agent(setup) as second:
            assert second.process.pid != agent.process.pid


# --- Files that are not the store ---


@pytest.mark.parametrize("content", [b"no database at all " * 500, bytes(8192)])
async def test_a_foreign_database_is_reported_and_replaced_on_request(setup: AgentSetup, content: bytes) -> None:
    setup.prepare()
    database(setup).write_bytes(content)
    error = await startup_error(setup)
    assert error.startswith(
        f"configuration: DATABASE_URL: {database(setup)} is not a SQLite database; restore a backup"
    )
    assert database(setup).read_bytes() == content
    found = await doctor_reports(setup)
    assert found["schema"]["status"] == "failed"
    assert "doctor --set-aside" in found["schema"]["remedy"]
    assert database(setup).read_bytes() == content

    done = await run(setup, "doctor", "--set-aside")
    assert done.returncode == 0, done.stderr
    (aside,) = database(setup).parent.glob("*.damaged-*")
    assert str(aside) in done.stdout.decode()
    assert aside.read_bytes() == content
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert (await client.ask("Hello")).state == COMPLETED


async def test_a_valid_database_and_one_in_use_are_not_replaced(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent:
        done = await run(setup, "doctor", "--set-aside")
        assert done.returncode == 2
        assert f"pid {agent.process.pid}" in done.stderr.decode()
        assert await agent.stop() == 0
    done = await run(setup, "doctor", "--set-aside")
    assert done.returncode == 2
    assert "is intact, so it was not renamed" in done.stderr.decode()
    assert database(setup).exists()


# --- Versions ---


async def test_the_doctor_shows_the_schema_version_and_a_newer_one_is_rejected(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent:
        assert await agent.stop() == 0
    assert (await doctor_reports(setup))["schema"]["finding"] == f"version {SCHEMA_VERSION}"
    with closing(sqlite3.connect(database(setup))) as connection, connection:
        connection.execute("insert into schema_version values (99, 0)")
    error = await startup_error(setup)
    assert "has schema version 99, and this agent supports only version 2" in error
    assert (await doctor_reports(setup))["schema"]["status"] == "failed"


# --- A full disk ---


async def readiness(agent: AgentProcess) -> tuple[int, str]:
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{agent.url}readyz")
    return answer.status_code, str(answer.json().get("reason"))


async def test_a_full_disk_rejects_messages_loses_nothing_and_recovers(setup: AgentSetup, tmp_path: Path) -> None:
    full = tmp_path / "full"
    async with running_agent(setup, ("tests.e2e.small_disk", str(full))) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        running = await client.begin(script({"run": "sleep 1.5"}, {"say": LONG_ANSWER}), "ctx")
        await eventually(lambda: agent.commands("1.5"))
        full.touch()
        big = "the word is pear " * 30_000
        with pytest.raises(
            InternalError, match=r"the disk is full\); the request was not accepted, send it again later"
        ):
            await client.ask(big, "other")
        assert await readiness(agent) == (503, "the disk is full")
        await anyio.sleep(2)
        assert (await client.get(running.task_id)).state != COMPLETED
        full.unlink()
        ended: Seen = await client.finished(running.task_id)
        assert (ended.state, ended.answer) == (COMPLETED, LONG_ANSWER)
        with anyio.fail_after(PROBE_INTERVAL_S + 2):
            while (await readiness(agent))[0] != 200:
                await anyio.sleep(0.1)
        assert (await client.ask(big, "other")).state == COMPLETED
        assert await agent.stop() == 0
        assert "Traceback" not in agent.log.read_text()
    assert rows(setup, "pragma integrity_check") == [("ok",)]
    assert rows(setup, "select count(*) from tasks where updated_at = 0") == [(0,)]


async def test_an_agent_with_a_full_disk_stops_in_time_and_answers_after_a_restart(
    setup: AgentSetup, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    async with running_agent(setup, ("tests.e2e.small_disk", str(full))) as agent, peer(agent.url) as client:
        running = await client.begin(script({"run": "sleep 0.5"}, {"say": LONG_ANSWER}), "ctx")
        await eventually(lambda: agent.commands("0.5"))
        full.touch()
        await anyio.sleep(1.5)
        assert await agent.stop() == 0
    async with running_agent(setup) as agent, peer(agent.url) as client:
        ended = await client.finished(running.task_id)
    assert (ended.state, ended.answer) == (COMPLETED, LONG_ANSWER)


async def test_an_agent_started_on_a_full_disk_stops_on_sigterm(setup: AgentSetup, tmp_path: Path) -> None:
    """It waits for disk space to complete the earlier process's tasks, and still stops on SIGTERM."""
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask("Hello")
        assert await agent.stop() == 0
    insert_working_tasks(setup, 300)
    full = tmp_path / "full"
    full.touch()
    words = [sys.executable, "-m", "tests.e2e.small_disk", str(full)]
    log = tmp_path / "agent.log"
    with log.open("wb") as output, anyio.fail_after(HANG_S):
        process = await anyio.open_process(words, env=setup.prepare(), cwd=tmp_path, stdout=output, stderr=output)
        await eventually(lambda: "the disk is full" in log.read_text())
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0, log.read_text()
    assert "ready" not in log.read_text()
    async with running_agent(setup):
        assert rows(setup, "select count(*) from tasks where state like '%WORKING%'") == [(0,)]


def insert_working_tasks(setup: AgentSetup, count: int) -> None:
    """Insert working tasks that have no delivery."""
    with closing(sqlite3.connect(database(setup))) as connection, connection:
        connection.execute("create temp table one as select * from tasks limit 1")
        for number in range(count):
            task = Task(id=f"left-{number}", status=TaskStatus(state=TaskState.TASK_STATE_WORKING))
            row = task.id, "TASK_STATE_WORKING", task.SerializeToString()
            connection.execute("update one set id = ?, state = ?, body = ?", row)
            connection.execute("insert into tasks select * from one")


# --- A PostgreSQL server ---


@pytest.mark.postgresql
async def test_a_database_that_fails_during_the_start_is_a_sentence(setup: AgentSetup) -> None:
    with running_postgresql() as server:
        url = server.create_database()
        async with open_store(url):
            pass
        with psycopg.connect(url) as connection:
            connection.execute("lock table deliveries in access exclusive mode")
            error = await startup_error(
                replace(setup, environment={"DATABASE_URL": f"{url}?options=-clock_timeout%3D1"})
            )
    assert "DATABASE_URL: the database failed during the start" in error


# --- Old tasks ---


async def test_a_repeated_message_gets_its_answer_until_retention_removes_it(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        old = await client.ask("the word is apple", "ctx")
        new = await client.ask("the word is pear", "ctx")
        assert await agent.stop() == 0
    with closing(sqlite3.connect(database(setup))) as connection, connection:
        connection.execute("update tasks set updated_at = 1577836800000000000 where id = ?", (old.task_id,))
        connection.execute("update deliveries set state = 'acknowledged'")
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await eventually(lambda: rows(setup, "select id from tasks") == [(new.task_id,)])
        assert rows(setup, "select task_id from deliveries") == [(new.task_id,)]
        assert "the word is apple" in (await client.ask(REPEAT, "ctx")).answer


async def test_an_emptied_database_is_not_treated_as_new(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask_blocking("hello")
    for name in ("workspace.sqlite3-wal", "workspace.sqlite3-shm"):
        (setup.root / "state" / name).unlink(missing_ok=True)
    database(setup).write_bytes(b"")
    sentence = await startup_error(setup)
    assert f"{database(setup)} is empty, although" in sentence
    assert "remove the empty file to start without" in sentence
    database(setup).unlink()
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert (await client.ask_blocking("hello")).state == COMPLETED


# --- Folders that are lost while the agent runs ---

LOST_STATE = "WORKSPACE_STATE_DIR was deleted, moved or replaced; restore it and restart the agent"
LOST_HOME = "CODEX_HOME was deleted, moved or replaced; restore it and restart the agent"
LOST_SESSIONS = "CODEX_HOME/sessions was deleted, moved or replaced; restore it and restart the agent"


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders, as `rm -rf` does."""
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.mark.parametrize(
    ("folder", "problem"), [("state", LOST_STATE), ("state/codex", LOST_HOME), ("state/codex/*", LOST_SESSIONS)]
)
async def test_without_its_folders_the_agent_is_not_ready_and_accepts_nothing(
    setup: AgentSetup, folder: str, problem: str
) -> None:
    own = replace(setup, environment={"A2A_GRPC_PORT": "0"})
    async with running_agent(own) as agent, peer(agent.url) as client, httpx.AsyncClient(base_url=agent.url) as http:
        await client.ask("the word is apple", "ctx")
        assert await readiness(agent) == (200, "None")
        remove(setup.root.glob(folder))
        assert await readiness(agent) == (503, problem)
        assert (await http.get("healthz")).status_code == 200
        expected = f"The agent cannot store data now ({problem}); the request was not accepted, send it again later."
        for ask in (client.ask, client.ask_blocking, client.begin):
            with pytest.raises(InternalError, match=re.escape(expected)):
                await ask("hello", "ctx")
        rest = MessageToDict(request("hello"))
        answer = await http.post("/message:send", json=rest, headers={"A2A-Version": "1.0"})
        assert (answer.status_code, expected in answer.text) == (500, True)
        (address,) = re.findall(r"gRPC at ([^,\s]+)", setup.log.read_text())
        async with grpc.aio.insecure_channel(address) as channel:
            stub = a2a_pb2_grpc.A2AServiceStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.SendMessage(request("hello"), metadata=(("a2a-version", "1.0"),))
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.INTERNAL, expected)
        assert await agent.stop() == 0
    log = setup.log.read_text()
    assert log.count(f"ERROR   codex_workspace.storage.database: {problem}") == 1
    assert "Traceback" not in log
    assert "cannot write" not in log
    assert not (setup.root / folder / "workspace.sqlite3").exists()


async def test_a_turn_whose_state_folder_is_moved_away_is_answered_when_it_is_back(setup: AgentSetup) -> None:
    state, away = setup.root / "state", setup.root / "away"
    async with running_agent(setup) as agent, peer(agent.url) as client:
        running = await client.begin(script({"run": "sleep 1"}, {"say": "The end."}), "ctx")
        await eventually(lambda: agent.commands("1"))
        state.rename(away)
        await eventually(lambda: not agent.commands("1"))
        assert await readiness(agent) == (503, LOST_STATE)
        # codex makes a part of its folder again.
        shutil.rmtree(state, ignore_errors=True)
        away.rename(state)
        ended = await client.finished(running.task_id)
        assert (ended.state, ended.answer) == (COMPLETED, "The end.")

        async def is_ready() -> bool:
            return await readiness(agent) == (200, "None")

        await eventually(is_ready)
        assert (await client.ask("Hello", "ctx")).state == COMPLETED
        assert await agent.stop() == 0


@pytest.mark.parametrize("content", [b"", b"no database at all " * 5000, None])
async def test_an_overwritten_database_is_reported_and_replaced_by_a_backup(
    setup: AgentSetup, content: bytes | None
) -> None:
    """None stands for a copy from before the start."""
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        assert await agent.stop() == 0
    backup = database(setup).read_bytes()
    async with running_agent(setup) as agent, peer(agent.url) as client:
        database(setup).write_bytes(backup if content is None else content)
        code, reason = await readiness(agent)
        assert (code, reason.partition(";")[0]) == (503, "the database was overwritten")
        with pytest.raises(InternalError, match=r"the database (was overwritten|is damaged); stop the agent"):
            await client.ask("hello", "ctx")
        assert await agent.stop() == 0
    assert "Traceback" not in setup.log.read_text()
    for file in database(setup).parent.glob("workspace.sqlite3*"):
        file.unlink()
    database(setup).write_bytes(backup)
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert "the word is apple" in (await client.ask(REPEAT, "ctx")).answer
