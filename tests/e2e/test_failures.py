"""Failures end in one clear sentence: an exit code or a failed task, without a traceback and without a hang."""

import json
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import psutil
import pytest
from a2a.types import TaskState

from codex_workspace.common.errors import CONFIG_REJECTED
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.tasks.replies import FAILURE
from tests.e2e.agent_process import SECRET, AgentSetup, running_agent
from tests.e2e.client import Peer, peer, plain, script
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow

FAILED = TaskState.TASK_STATE_FAILED
CANARY = "sk-operator-secret-0123"
"""An operator's value in config.toml that the agent does not know."""


async def _start(setup: AgentSetup, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "codex_workspace", "serve"]
    with anyio.fail_after(HANG_S):
        return await anyio.run_process(command, env=setup.prepare() | environment, check=False)


def _fake_codex(folder: Path, body: str) -> str:
    program = folder / "codex"
    program.write_text(f"#!{sys.executable}\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


TOO_OLD = """
import json, sys
if "--version" in sys.argv:
    sys.exit(print("codex-cli 0.72.0"))
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        print(json.dumps({"id": message["id"], "result": {"userAgent": "codex_cli_rs/0.72.0 (x)"}}), flush=True)
"""


@pytest.mark.both_backends
async def test_codex_is_missing(setup: AgentSetup) -> None:
    done = await _start(setup, CODEX_BIN=str(setup.root / "nowhere"))
    assert done.returncode == 3
    assert b"Traceback" not in done.stderr
    last = done.stderr.decode().splitlines()[-1]
    assert "CODEX_BIN: " in last
    assert "nowhere: No such file or directory; set CODEX_BIN to a codex executable" in last


@pytest.mark.both_backends
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (TOO_OLD, "0.72.0 is too old: this agent needs 0.158.0 or newer"),
        ("import sys; sys.exit('the reason why')", "the reason why"),
        ("print('hello')", "exit code 0"),
        ("print('hello')", "CODEX_BIN"),
    ],
)
async def test_codex_cannot_start(setup: AgentSetup, tmp_path: Path, body: str, expected: str) -> None:
    done = await _start(setup, CODEX_BIN=_fake_codex(tmp_path, body))
    assert done.returncode == 3
    assert expected in done.stderr.decode()
    assert b"Traceback" not in done.stderr


CRASHES_ON_USE = """
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "command/exec":
        os.kill(os.getpid(), 9)
    if "id" in message:
        print(json.dumps({"id": message["id"], "result": {"userAgent": "codex_cli_rs/0.163.0 (x)"}}), flush=True)
"""


async def test_codex_dies_after_its_first_answers(setup: AgentSetup, tmp_path: Path) -> None:
    done = await _start(setup, CODEX_BIN=_fake_codex(tmp_path, CRASHES_ON_USE))
    assert "codex cannot start: codex was ended by signal 9 (SIGKILL)" in done.stderr.decode()
    assert done.returncode == 3
    assert b"Traceback" not in done.stderr


@pytest.mark.both_backends
@pytest.mark.parametrize(
    "setting", ['profile = "p"', f"[features]\nfoo = '{CANARY}'", "[tui]\nnotifications = 17"], ids=["p", "f", "t"]
)
async def test_a_config_toml_that_codex_rejects(setup: AgentSetup, setting: str) -> None:
    setup.prepare()
    file = setup.root / "state" / "codex" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(f"{setting}\n")
    done = await _start(setup)
    assert done.returncode == 3
    assert f"codex rejects {file}: " in done.stderr.decode()
    assert CANARY not in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert b"ready" not in done.stderr


@pytest.mark.both_backends
async def test_a_config_toml_broken_at_run_time_fails_messages_without_leaking_it(
    setup: AgentSetup,
) -> None:
    file = setup.root / "state" / "codex" / "config.toml"
    server = "[mcp_servers.own]\nurl = 'http://127.0.0.1:9/'\nhttp_headers = "
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert (await client.ask("the word is apple", "ctx")).answer
        good = file.read_text()
        spoilt = (f"'Bearer {CANARY}'\n", f"{{A = '{CANARY}'\n")
        for context_id, setting in zip(("new", "newer"), spoilt, strict=True):
            file.write_text(f"{good}\n{server}{setting}")
            seen = await client.ask("hello", context_id)
            assert (seen.state, seen.sentence) == (FAILED, CONFIG_REJECTED)
        file.write_text(good)
        assert "the word is apple" in (await client.ask(script({"repeat": True}), "ctx")).answer
    log = setup.log.read_text()
    assert f"{file.name}:" in log
    assert CANARY not in log


async def test_the_port_is_in_use(setup: AgentSetup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = await _start(setup, A2A_PORT=str(taken.getsockname()[1]))
    assert done.returncode == 2
    _assert_one_sentence(done.stderr, "A2A_PORT", "already in use")


async def test_a_json_log_ends_with_a_json_line(setup: AgentSetup, tmp_path: Path) -> None:
    for expected, environment in {2: {"SCRIPTED_KEY": ""}, 3: {"CODEX_BIN": _fake_codex(tmp_path, "exit(7)")}}.items():
        done = await _start(setup, LOG_FORMAT="json", **environment)
        assert done.returncode == expected
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        assert lines[-1]["level"] == "error"


async def test_listening_beyond_loopback_needs_a_token(setup: AgentSetup) -> None:
    done = await _start(setup, A2A_HOST="0.0.0.0")
    assert done.returncode == 2
    _assert_one_sentence(done.stderr, "A2A_TOKEN")


async def test_no_credential(setup: AgentSetup) -> None:
    done = await _start(setup, SCRIPTED_KEY="")
    assert done.returncode == 2
    _assert_one_sentence(done.stderr, "SCRIPTED_KEY")


async def test_an_unusable_state_folder(setup: AgentSetup) -> None:
    (setup.root / "file").write_text("")
    done = await _start(setup, WORKSPACE_STATE_DIR=str(setup.root / "file" / "state"))
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"file" in done.stderr


async def test_a_file_that_is_no_database(setup: AgentSetup) -> None:
    done = await _start(setup, DATABASE_URL=f"sqlite:///{setup.root}/config/config.yaml")
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"database" in done.stderr.lower()


def _assert_one_sentence(stderr: bytes, *words: str) -> None:
    text = stderr.decode()
    assert "Traceback" not in text
    for word in words:
        assert word in text
    assert len(text.strip().splitlines()) == 1, text
    assert SECRET not in text


FAULTS: tuple[tuple[dict[str, object], str], ...] = (
    ({"fail": 401}, "rejected the credential (HTTP 401)"),
    ({"fail": 403}, "HTTP 403"),
    ({"fail": 429}, "rate limit is reached (HTTP 429)"),
    ({"fail": 500}, "internal error (HTTP 500)"),
    ({"fail": 503}, "HTTP 503"),
    ({"say": "one two three four", "cut": True}, "stream disconnected"),
    ({"fail": "context_length_exceeded"}, "context window"),
)


@pytest.mark.both_backends
async def test_model_errors_fail_the_task_with_an_accurate_message(client: Peer) -> None:
    for fault, expected in FAULTS:
        with anyio.fail_after(HANG_S):
            seen = await client.ask_blocking(script(fault), expected)
        assert (seen.state, expected in seen.sentence) == (FAILED, True), seen.sentence
        assert "http://" not in seen.sentence
        assert (plain(seen.metadata[FAILURE])["code"] == "unauthorized") == (fault == {"fail": 401})
        assert (await client.ask("go on", expected)).answer == "You said: go on"


@pytest.mark.both_backends
@pytest.mark.versions
async def test_a_model_stream_that_is_retried_is_not_duplicated(client: Peer) -> None:
    seen = await client.ask(script({"say": "one two three four", "cut": True, "times": 1}))
    assert (seen.state, seen.answer) == (TaskState.TASK_STATE_COMPLETED, "one two three four")
    assert seen.kinds() == ["notice"]


@pytest.mark.both_backends
async def test_an_unreachable_model_fails_quickly(setup: AgentSetup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
    async with running_agent(replace(setup, model_url=address)) as agent, peer(agent.url) as client:
        with anyio.fail_after(20):
            seen = await client.ask("hello")
    assert seen.state == FAILED
    assert "127.0.0.1" not in seen.sentence


@pytest.mark.both_backends
async def test_a_disconnected_peer_does_not_stop_its_turn(client: Peer, model: ScriptedModel) -> None:
    async for event in client.stream(script({"chunks": 20, "delay_ms": 20}), "ctx"):
        task_id = event.task.id
        break
    assert (await client.finished(task_id)).state == TaskState.TASK_STATE_COMPLETED


async def test_readiness_follows_codex(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent, httpx.AsyncClient(base_url=agent.url) as http:
        assert (await http.get("/readyz")).json() == {"status": "ready"}
        (codex := agent.codex()).kill()
        await anyio.to_thread.run_sync(codex.wait, 5)
        # A request starts it again.
        assert (await http.get("/readyz")).status_code == 200
        assert agent.codex().pid != codex.pid


@pytest.mark.both_backends
@pytest.mark.alone
async def test_sigterm_while_codex_fails_to_start_stops_the_agent_at_once(setup: AgentSetup, tmp_path: Path) -> None:
    silent = _fake_codex(tmp_path, "import time; time.sleep(60)")
    environment = setup.prepare() | {"CODEX_BIN": silent}
    process = psutil.Popen([sys.executable, "-m", "codex_workspace", "serve"], env=environment, stderr=subprocess.PIPE)
    # A library starts a program when it is imported.
    children = await eventually(lambda: [child for child in process.children() if silent in child.cmdline()])
    process.terminate()
    with anyio.fail_after(15):
        assert await anyio.to_thread.run_sync(process.wait) == 0
    _, alive = psutil.wait_procs(children, timeout=1)
    assert not alive
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.parametrize("url", ["sqlite:///x.db", "postgresql+asyncpg://u:p@127.0.0.1:1/x", "nonsense"])
async def test_a_database_url_of_another_form(setup: AgentSetup, url: str) -> None:
    done = await _start(setup, DATABASE_URL=url)
    assert done.returncode == 2, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert b"DATABASE_URL" in done.stderr
