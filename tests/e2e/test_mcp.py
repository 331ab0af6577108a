"""MCP servers of config.yaml: the real codex, a real MCP server, and a model that calls its tools."""

import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import anyio
import httpx
import psutil
import pytest
from a2a.types import Part, TaskState
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value

from codex_workspace.cli.checks import Facts, Finding
from codex_workspace.cli.doctor import CHECKS, run_check
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.model_requests import Output
from tests.e2e.agent_process import REPOSITORY, AgentSetup, running_agent, spawn
from tests.e2e.client import Peer, Seen, peer, script
from tests.support.ports import free_port
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow

COMPLETED: Final = TaskState.TASK_STATE_COMPLETED
SERVER: Final = Path(__file__).with_name("mcp_server.py")
TOKEN: Final = "mcp-token-0123456789"
PARTNER: Final = "partner-0123456789"


def stdio(name: str, *arguments: str, **keys: object) -> Mapping[str, object]:
    """Return an entry of `mcp_servers` for the test server over stdio."""
    return {"name": name, "command": sys.executable, "args": [str(SERVER), *arguments], **keys}


def with_servers(setup: AgentSetup, *servers: Mapping[str, object], **environment: str) -> AgentSetup:
    return replace(setup, config={"mcp_servers": list(servers)}, environment=environment)


def call(server: str, tool: str, **arguments: object) -> dict[str, object]:
    """Return the step of a script that calls a tool."""
    return {"tool": {"name": tool, "namespace": f"mcp__{server}", "arguments": arguments}}


def tool_outputs(model: ScriptedModel) -> list[str]:
    """Return the tool outputs in the model's last request, the newest last."""
    return [item.text for item in model.requests[-1].input if isinstance(item, Output)]


def notices(seen: Seen) -> list[str]:
    return [part.text for note in seen.notes for part in note.status.message.parts if "MCP server" in part.text]


def files_containing(setup: AgentSetup, secret: str) -> list[Path]:
    """Return the files of an agent, including its log and codex's files, that contain a secret."""
    return [file for file in setup.root.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


@asynccontextmanager
async def running_client(setup: AgentSetup) -> AsyncIterator[Peer]:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        yield client


@pytest.mark.versions
async def test_a_trusted_server_works_and_keeps_its_secret(setup: AgentSetup, model: ScriptedModel) -> None:
    trusted = stdio(
        "trusted",
        trusted=True,
        disabled_tools=["crash"],
        env={"API_TOKEN": "Bearer ${MY_TOKEN}", "PLAIN": "in the open"},
    )
    setup = with_servers(setup, trusted, stdio("other"), MY_TOKEN=TOKEN)
    steps: list[dict[str, object]] = [
        call("trusted", "echo", text="hello"),
        call("trusted", "digest_of", variable="API_TOKEN"),
        call("trusted", "digest_of", variable="PLAIN"),
        call("trusted", "digest_of", variable="SCRIPTED_KEY"),
        call("trusted", "crash"),
        call("other", "echo", text="hello"),
        call("other", "digest_of", variable="API_TOKEN"),
        {"run": "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'"},
    ]
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert (await client.ask(script(*steps, {"say": "Done."}))).answer == "Done."
        codex = agent.codex()
        assert TOKEN not in "\n".join((*codex.environ().values(), *codex.cmdline()))
    echoed, token, plain, key, disabled, refused, none, seen = tool_outputs(model)
    assert "echo hello" in echoed
    assert hashlib.sha256(f"Bearer {TOKEN}".encode()).hexdigest() in token
    assert hashlib.sha256(b"in the open").hexdigest() in plain
    assert "none" in key
    assert "echo" not in disabled
    assert "crash" in disabled or "unsupported" in disabled
    assert "echo hello" not in refused
    assert "none" in none
    assert TOKEN not in seen
    assert files_containing(setup, TOKEN) == []


async def test_an_untrusted_server_asks_for_approval(setup: AgentSetup, model: ScriptedModel) -> None:
    setup = replace(with_servers(setup, stdio("other")), codex={"approval_policy": "on-request"})
    async with running_client(setup) as client:
        asked = await client.ask(script(call("other", "echo", text="hello"), {"say": "Done."}))
        assert 'Allow the other MCP server to run tool "echo"?' in asked.sentence
        assert (await client.answer(asked, Part(text="yes"))).answer == "Done."
    assert "echo hello" in tool_outputs(model)[-1]


ANSWERS: Final = (
    (
        Part(data=ParseDict({"content": {"colour": "blue", "coats": 2}}, Value())),
        "painted blue, 2 coats",
    ),
    (Part(text="no"), "not painted: decline"),
)


@pytest.mark.versions
@pytest.mark.parametrize(("answer", "result"), ANSWERS)
async def test_a_servers_form_reaches_the_user(
    setup: AgentSetup, model: ScriptedModel, answer: Part, result: str
) -> None:
    setup = replace(with_servers(setup, stdio("wall", trusted=True)), codex={"approval_policy": "on-request"})
    async with running_client(setup) as client:
        asked = await client.ask(script(call("wall", "paint"), {"say": "Done."}))
        assert "Which colour shall the wall have?" in asked.sentence
        unclear = await client.answer(asked, Part(text="green, I think"))
        assert unclear.state == TaskState.TASK_STATE_INPUT_REQUIRED
        assert (await client.answer(unclear, answer)).answer == "Done."
    assert result in tool_outputs(model)[-1]


async def test_a_server_can_send_the_user_to_a_url(setup: AgentSetup, model: ScriptedModel) -> None:
    setup = replace(with_servers(setup, stdio("wall", trusted=True)), codex={"approval_policy": "on-request"})
    async with running_client(setup) as client:
        asked = await client.ask(script(call("wall", "sign_in"), {"say": "Done."}))
        assert "https://login.example/start" in asked.sentence
        assert (await client.answer(asked, Part(text="yes"))).answer == "Done."
    assert "accept" in tool_outputs(model)[-1]


async def test_an_http_servers_token_is_sent_to_that_server_only(
    setup: AgentSetup, model: ScriptedModel, tmp_path: Path
) -> None:
    seen = tmp_path / "headers.txt"
    async with http_server(seen) as url:
        server = {
            "name": "web",
            "url": url,
            "bearer_token_env": "MY_TOKEN",
            "headers": {"X-Partner": "id ${PARTNER}", "X-Plain": "agent"},
            "required": True,
        }
        setup = with_servers(setup, server, MY_TOKEN=TOKEN, PARTNER=PARTNER)
        look: dict[str, object] = {"run": "env; cat /proc/*/environ | tr '\\0' '\\n'"}
        async with running_client(setup) as client:
            answer = await client.ask(script(call("web", "remember_headers"), look, {"say": "Done."}))
        assert answer.answer == "Done."
    headers = seen.read_text().splitlines()
    assert {f"authorization: Bearer {TOKEN}", f"x-partner: id {PARTNER}", "x-plain: agent"} <= set(headers)
    for secret in (TOKEN, PARTNER):
        assert secret not in tool_outputs(model)[-1]
        assert files_containing(setup, secret) == [seen]


async def test_a_slow_server_is_ready_before_the_first_model_call(setup: AgentSetup, model: ScriptedModel) -> None:
    setup = with_servers(setup, stdio("slow", "--delay-s", "2", trusted=True))
    async with running_client(setup) as client:
        seen = await client.ask(script(call("slow", "echo", text="late"), {"say": "Done."}))
    assert (seen.answer, notices(seen)) == ("Done.", [])
    assert "echo late" in tool_outputs(model)[-1]


@pytest.mark.versions
async def test_a_server_that_exits_is_restarted(setup: AgentSetup, model: ScriptedModel) -> None:
    frail = stdio("frail", trusted=True, env={"API_TOKEN": "${MY_TOKEN}"})
    setup = with_servers(setup, frail, stdio("steady", trusted=True), MY_TOKEN=TOKEN)
    steady = call("steady", "echo", text="one")
    crash = script(steady, call("frail", "crash"), {"say": "Oh."})
    async with running_client(setup) as client:
        assert (await client.ask(crash, "ctx")).answer == "Oh."
        first, ended = tool_outputs(model)
        assert "Transport closed" in ended
        seen = await client.ask(script(call("frail", "echo", text="two"), steady, {"say": "Back."}), "ctx")
    assert (seen.answer, notices(seen)) == ("Back.", [])
    _, _, back, still = tool_outputs(model)
    assert "echo two" in back
    assert files_containing(setup, TOKEN) == []
    assert still.splitlines()[-1] == first.splitlines()[-1]


async def test_a_missing_server_is_reported_once_and_the_turn_continues(setup: AgentSetup) -> None:
    keyless_server = {"name": "keyless", "url": "http://127.0.0.1:9/mcp", "bearer_token_env": "NOBODY_SET_THIS"}
    setup = with_servers(
        setup, stdio("broken", "--fail"), keyless_server, stdio("late", "--delay-s", "30", startup_timeout_s=1)
    )
    async with running_client(setup) as client:
        seen = await client.ask("hello", "ctx")
        assert seen.state == COMPLETED
        keyless, *others = notices(seen)[0].splitlines()
        broken, late = sorted(others)
        assert keyless.endswith("not set; set it (or NOBODY_SET_THIS_FILE).")
        assert broken.startswith("The MCP server broken is not available: handshaking with MCP server failed")
        assert late == "The MCP server late is not available: timed out after 1 seconds."
        again = await client.ask("hello again", "ctx")
        assert (again.state, notices(again)) == (COMPLETED, [])
    assert "skipping the MCP server keyless: mcp_servers[1].bearer_token_env names" in setup.log.read_text()


async def test_without_a_required_server_the_agent_does_not_start(setup: AgentSetup) -> None:
    setup = with_servers(setup, stdio("needed", "--fail", required=True))
    process = spawn(setup)
    with anyio.fail_after(HANG_S):
        assert await anyio.to_thread.run_sync(process.wait) == 3
    last_line = setup.log.read_text().splitlines()[-1]
    assert "a required MCP server does not start (mcp_servers of config.yaml): needed: " in last_line


def test_the_doctor_reports_each_servers_state(setup: AgentSetup) -> None:
    keyless_server = {"name": "keyless", "url": "http://127.0.0.1:9/mcp", "bearer_token_env": "NOBODY_SET_THIS"}
    fine = stdio("fine", required=True, disabled_tools=["crash"])
    finding = mcp_finding(with_servers(setup, fine, stdio("broken", "--fail"), keyless_server))
    assert (finding.status, "mcp_servers in config.yaml" in finding.remedy) == ("warning", True)
    keyless, broken, tools = finding.finding.splitlines()
    assert "NOBODY_SET_THIS, which is not set" in keyless
    assert broken.startswith("The MCP server broken is not available: ")
    assert tools == "fine: 5 tools (digest_of, echo, paint, remember_headers, sign_in)"
    finding = mcp_finding(with_servers(setup, stdio("needed", "--fail", required=True)))
    assert (finding.status, "needed is not available" in finding.finding) == ("failed", True)


def mcp_finding(setup: AgentSetup) -> Finding:
    """Return the doctor's finding about the MCP servers."""
    facts, findings = Facts(setup.prepare()), dict[str, Finding]()
    for check in CHECKS:
        if check.name in ("config", "provider", "codex", "handshake", "mcp servers"):
            findings[check.name], _ = run_check(check, facts, findings)
    return findings["mcp servers"]


async def test_a_restarted_http_server_is_reconnected(setup: AgentSetup, model: ScriptedModel, tmp_path: Path) -> None:
    port = free_port()
    setup = with_servers(setup, {"name": "web", "url": f"http://127.0.0.1:{port}/mcp", "trusted": True})
    echo = script(call("web", "echo", text="hello"), {"say": "Done."})
    async with http_server(tmp_path / "headers.txt", port), AsyncExitStack() as held:
        client = await held.enter_async_context(running_client(setup))
        assert (await client.ask(echo, "ctx")).answer == "Done."
        ran = held.pop_all()
    async with ran:
        assert (await client.ask(echo, "ctx")).answer == "Done."
        async with http_server(tmp_path / "headers.txt", port):
            assert (await client.ask(echo, "ctx")).answer == "Done."
    first, down, again = tool_outputs(model)
    assert ["echo hello" in each for each in (first, down, again)] == [True, False, True]


@asynccontextmanager
async def http_server(headers: Path, port: int | None = None) -> AsyncIterator[str]:
    """Run the server over HTTP and return its URL."""
    port = port or free_port()
    command = [sys.executable, str(SERVER), "--http", str(port), "--headers", str(headers)]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=REPOSITORY)
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        async with httpx.AsyncClient() as http:
            await eventually(lambda: answers(http, url))
        yield url
    finally:
        process.kill()
        process.wait()


async def answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        await http.get(url)
    except httpx.ConnectError:
        return False
    return True
