"""Behavior of the exec backend (`backend.py` and `thread.py` of `backends/codex_exec`) over A2A.

The modules marked `both_backends` test what both backends have in common.

Covers `backends.codex_exec.backend` and `backends.codex_exec.thread`.
"""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import httpx
import psutil
import pytest
from a2a.types import Part, TaskState
from google.protobuf.json_format import ParseDict

from codex_workspace.common.errors import CONFIG_REJECTED
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.tasks.request import NO_STEERING, TURN
from tests.e2e.agent_process import SECRET, AgentProcess, AgentSetup, Backend, running_agent, spawn
from tests.e2e.client import Peer, peer, request, script, tokens
from tests.e2e.test_content import last_user_message, png, task
from tests.e2e.test_content import send as send_parts
from tests.e2e.test_deliveries import send
from tests.e2e.test_exec_process import binary
from tests.e2e.test_mcp import call, files_containing, notices, stdio, tool_outputs
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.with_exec

COMPLETED = TaskState.TASK_STATE_COMPLETED
FAILED, REJECTED = TaskState.TASK_STATE_FAILED, TaskState.TASK_STATE_REJECTED
MINIMAL_SERVER = Path(__file__).with_name("minimal_mcp_server.py")
REPEAT = script({"repeat": True})


def minimal_server(name: str, *arguments: str, **keys: object) -> dict[str, object]:
    """Return an entry of `mcp_servers` for the server that starts quickly."""
    return {"name": name, "command": sys.executable, "args": [str(MINIMAL_SERVER), *arguments], **keys}


@pytest.fixture
def backend() -> Backend:
    """The backend of this module's agents."""
    return "exec"


@pytest.fixture
def setup(setup: AgentSetup) -> AgentSetup:
    """The setup of an agent whose commands may write to `more` and not to all of /tmp."""
    (setup.root / "more").mkdir()
    file = setup.root / "state" / "codex" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[sandbox_workspace_write]\nexclude_slash_tmp = true\nexclude_tmpdir_env_var = true\n")
    return replace(setup, codex={"writable_folders": ["../more"]})


async def card_limits(agent: AgentProcess) -> str:
    """Return the limits of this agent that its card describes."""
    async with httpx.AsyncClient(base_url=agent.url) as http:
        card = (await http.get("/.well-known/agent-card.json")).json()
    (extension,) = [each for each in card["capabilities"]["extensions"] if each["uri"].endswith(":limits")]
    return str(extension["description"])


async def command(agent: AgentProcess, word: str) -> list[psutil.Process]:
    """Wait for a command of codex and return its processes."""
    return await eventually(lambda: agent.commands(word))


@pytest.mark.versions
async def test_commands_are_confined_to_codexs_sandbox(client: Peer, setup: AgentSetup) -> None:
    seen = await client.ask(script({"run": "touch in ../more/in; touch ../out; readlink /proc/self/ns/pid"}), "ctx")
    output = str(seen.notes[-1].status.message.metadata["output"])
    assert "Read-only file system" in output
    assert os.readlink("/proc/self/ns/pid") not in output
    assert (setup.workspace / "in").exists()
    assert (setup.root / "more" / "in").exists()
    assert not (setup.root / "out").exists()


@pytest.mark.versions
async def test_a_resumed_session_receives_new_instructions_and_keeps_its_token_count(setup: AgentSetup) -> None:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        assert await agent.stop() == 0
    (setup.root / "config" / "system-prompt.md").write_text("Speak like a pirate.\n")
    async with running_agent(setup) as agent, peer(agent.url) as client:
        seen = await client.ask(REPEAT, "ctx")
    usage = tokens(seen)
    assert 0 < usage["totalTokens"] < usage["thread.totalTokens"]
    assert "the word is apple" in seen.answer
    assert "Speak like a pirate." in seen.answer


@pytest.mark.versions
async def test_attachments_and_turn_options_reach_codex(client: Peer, model: ScriptedModel, setup: AgentSetup) -> None:
    seen = await send_parts(client, Part(text="What is this?"), Part(raw=png(), media_type="image/png"))
    assert seen.state == COMPLETED
    (url,) = last_user_message(model).images
    assert url.startswith("data:image/png;base64,")
    assert "What is this?" in last_user_message(model).text
    assert (await send_parts(client, Part(raw=png(), media_type="image/png"))).state == COMPLETED
    (setup.workspace / "sub").mkdir()
    schema = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
    options = {"model": "gpt-5.4", "effort": "high", "workingFolder": "sub", "outputSchema": {**schema}}
    sent = request(script({"run": "pwd"}, {"say": '{"n": 1}'}), "own")
    ParseDict({TURN: options}, sent.message.metadata)
    seen = await send(client, sent)
    assert (seen.state, seen.answer) == (COMPLETED, '{"n": 1}')
    assert str(setup.workspace / "sub") in str(seen.notes[-1].status.message.metadata["output"])
    body = model.requests[-1]
    assert body.model == "gpt-5.4"


@pytest.mark.versions
async def test_mcp_servers_and_built_in_tools_work_and_their_secrets_stay_hidden(
    setup: AgentSetup, model: ScriptedModel
) -> None:
    token = "mcp-token-0123456789"
    trusted = stdio("trusted", trusted=True, env={"API_TOKEN": "Bearer ${MY_TOKEN}"})
    setup = replace(setup, config={"mcp_servers": [trusted], "agent_tools": "always"}, environment={"MY_TOKEN": token})
    remember: dict[str, object] = {
        "tool": {"name": "commit_memory", "namespace": "mcp__agent", "arguments": {"content": "apples"}}
    }
    (setup.workspace / "sub").mkdir(parents=True)
    (setup.root / "secret.txt").write_text("secret")
    (setup.workspace / "link").symlink_to(setup.root / "secret.txt")
    (setup.workspace / "keys").write_text(SECRET)
    hand = [call("agent", "hand_over_file", path=path) for path in ("link", "nothing", "keys", "sub/out.txt")]
    steps: list[dict[str, object]] = [
        # First: the model can be faster than the record of its session.
        call("agent", "hand_over_file", path="out.txt", name="Report.txt"),
        call("trusted", "echo", text="hello"),
        remember,
        {"run": "echo all well > sub/out.txt; env"},
        *hand,
        {"say": "Done."},
    ]
    async with running_agent(setup) as agent, peer(agent.url) as client:
        assert "files cannot be sent" not in (await card_limits(agent))
        (setup.workspace / "out.txt").write_text("hi")
        seen = await client.ask(script(*steps), "ctx")
        whole = await task(client, seen)
    assert (seen.state, seen.answer) == (COMPLETED, "Done.")
    first, echoed, remembered, environment, *refused, handed = tool_outputs(model)
    assert "Sent as Report.txt (text/plain, 2 bytes)." in first
    assert "Sent as out.txt (text/plain, 9 bytes)." in handed
    for reason, expected in zip(
        refused, ("inside the workspace", "no such file", "contains a credential"), strict=True
    ):
        assert expected in reason
    files = {each.artifact_id: each.parts[0].raw for each in whole.artifacts if each.artifact_id.startswith("file-")}
    assert files == {"file-1": b"hi", "file-2": b"all well\n"}
    assert "echo hello" in echoed
    assert "apples" in remembered or "emember" in remembered, remembered
    assert "PATH=" in environment
    assert token not in environment
    assert SECRET not in environment
    assert files_containing(setup, token) == []


@pytest.mark.versions
async def test_slow_servers_are_awaited_and_missing_ones_reported_once(setup: AgentSetup, model: ScriptedModel) -> None:
    keyless_server = {"name": "keyless", "url": "http://127.0.0.1:9/mcp", "bearer_token_env": "NOBODY_SET_THIS"}
    servers = [
        {"name": "broken", "command": "false"},
        keyless_server,
        minimal_server("late", "30", startup_timeout_s=0.5),
        minimal_server("slow", "1.8", trusted=True),
    ]
    echo = script(call("slow", "echo", text="hello"), {"say": "Done."})
    # The time limit for silence is shorter than the slow server's start, which must not count as silence.
    setup = replace(setup, codex={"turn_inactivity_timeout_s": 1.5}, config={"mcp_servers": servers})
    async with running_agent(setup) as agent, peer(agent.url) as client:
        seen = await client.ask(echo, "ctx")
        assert (seen.state, seen.answer) == (COMPLETED, "Done.")
        assert "echo hello" in tool_outputs(model)[-1]
        keyless, broken, late = notices(seen)[0].splitlines()
        assert keyless.endswith("not set; set it (or NOBODY_SET_THIS_FILE).")
        assert broken.startswith("The MCP server broken is not available: handshaking with MCP server failed")
        assert late.startswith("The MCP server late is not available: timed out handshaking with MCP server after")
        again = await client.ask(echo, "ctx")
        assert (again.answer, notices(again)) == ("Done.", [])
        assert "echo hello" in tool_outputs(model)[-1]
        assert len(notices(await client.ask("hello", "elsewhere"))[0].splitlines()) == 3


@pytest.mark.versions
async def test_without_a_required_server_the_agent_does_not_start(setup: AgentSetup, model: ScriptedModel) -> None:
    needed = {"name": "needed", "command": "false", "required": True}
    process = spawn(replace(setup, config={"mcp_servers": [needed, minimal_server("slow", "30")]}))
    with anyio.fail_after(HANG_S):
        assert await anyio.to_thread.run_sync(process.wait) == 3
    output = setup.log.read_text().splitlines()[-1]
    assert "a required MCP server does not start (mcp_servers of config.yaml): needed: " in output
    assert not model.requests
    assert not list(setup.root.rglob("rollout-*"))


@contextmanager
def failing_mcp_server(words: str) -> Iterator[str]:
    """Serve an MCP server that fails with this text, and yield its URL."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(500)
            self.send_header("Content-Length", str(len(words)))
            self.end_headers()
            self.wfile.write(words.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/mcp"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.versions
async def test_only_a_required_servers_own_failure_fails_messages(setup: AgentSetup) -> None:
    server_file = setup.root / "server.py"
    server_file.write_text(MINIMAL_SERVER.read_text())
    needed = {
        "name": "needed",
        "command": sys.executable,
        "args": [str(server_file)],
        "required": True,
        "trusted": True,
    }
    file = setup.root / "state" / "codex" / "config.toml"
    with failing_mcp_server("oops; needed: gone for ever; x") as url, socket.create_server(("127.0.0.1", 0)) as silent:
        # Requests to loopback must not use the proxy: neither those to the model nor those of the agent's start.
        proxy = {"HTTP_PROXY": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        config = {"mcp_servers": [needed, minimal_server("fine"), {"name": "evil", "url": url}]}
        setup = replace(setup, config=config, environment=proxy)
        async with running_agent(setup) as agent, peer(agent.url) as client:
            assert not list(setup.root.rglob("rollout-*"))
            echo = script(call("needed", "echo", text="hello"), {"say": "Done."})
            seen = await client.ask(echo, "ctx")
            assert seen.answer == "Done."
            (notice,) = notices(seen)
            assert notice.startswith("The MCP server evil is not available: ")
            assert "\n" not in notice
            server_file.unlink()
            seen = await client.ask("hello", "ctx")
            assert seen.state == FAILED
            assert "a required MCP server does not start (mcp_servers of config.yaml): needed: " in seen.sentence
            server_file.write_text(MINIMAL_SERVER.read_text())
            good = file.read_text()
            file.write_text(f'{good}\n[mcp_servers.own]\ncommand = "false"\nrequired = true\n')
            seen = await client.ask("hello", "ctx")
            assert seen.state == FAILED
            assert "config.toml): own: handshaking" in seen.sentence
            file.write_text(good)
            seen = await client.ask(REPEAT, "ctx")
            assert "echo" in seen.answer
            assert not notices(seen)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
    assert "the MCP server fine has not started" not in setup.log.read_text()


def with_fault_script(setup: AgentSetup) -> AgentSetup:
    """Return the setup of an agent whose `codex exec` first runs the shell script `fault`, if it exists."""
    wrapper = setup.root / "codex"
    fault_script = setup.root / "fault"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = exec ] && [ -e {fault_script} ] && . {fault_script}\nexec {binary()} "$@"\n'
    )
    wrapper.chmod(0o700)
    return replace(setup, codex={"recovery": "fail"}, environment={"CODEX_BIN": str(wrapper)})


EXIT_LIKE_KILLED = "exit 137\n"
"""The exit code of a shell whose program was killed."""


async def test_a_codex_that_exits_before_its_session_is_retried_once(setup: AgentSetup) -> None:
    fault_script = setup.root / "fault"
    killed = "kill -9 $$\n"

    def sessions() -> int:
        return len(list(setup.root.rglob("rollout-*")))

    async with running_agent(with_fault_script(setup)) as agent, peer(agent.url) as client:
        await client.ask("the word is apple", "ctx")
        # The policy does not matter: codex has not received the message.
        for how, context_id in ((killed, "ctx"), (killed, "new"), (EXIT_LIKE_KILLED, "ctx")):
            fault_script.write_text(f"rm {fault_script}\n{how}")
            seen = await client.ask(REPEAT, context_id)
            assert (seen.state, "the word is apple" in seen.answer) == (COMPLETED, context_id == "ctx"), seen.sentence
        assert sessions() == 2
        for what, sentence in (
            (killed, "Codex ended 2 times while it worked on this message, most recently: codex was ended by"),
            ("echo boom >&2; exit 7\n", "codex ended with exit code 7"),
            ("echo 'Error: Model provider `mine` not found' >&2; exit 1\n", CONFIG_REJECTED),
            ("exit 0\n", "codex ended with exit code 0 before its turn ended"),
        ):
            fault_script.write_text(what)
            seen = await client.ask("hello", "ctx")
            assert (seen.state, sentence in seen.sentence) == (FAILED, True), seen.sentence
            assert "boom" not in seen.sentence
        assert "\\nboom" in setup.log.read_text()
        fault_script.unlink()
        assert "the word is apple" in (await client.ask(REPEAT, "ctx")).answer
        fault_script.write_text("sleep 86435\n")
        started = await client.begin("the word is pear", "ctx")
        waiting = await command(agent, "86435")
        agent.process.kill()
        await agent.ended()
        fault_script.unlink()
    async with running_agent(with_fault_script(setup)) as agent, peer(agent.url) as client:
        ended = await client.finished(started.task_id)
        assert (ended.state, ended.answer) == (COMPLETED, "You said: the word is pear")
        _, alive = psutil.wait_procs(waiting, timeout=2)
        assert not alive
    assert sessions() == 2
    assert "Traceback" not in setup.log.read_text()


async def test_unsupported_features_are_rejected_and_stated_in_the_card(agent: AgentProcess, client: Peer) -> None:
    sent = request("join in", "ctx")
    ParseDict({TURN: {"midTurn": "steer"}}, sent.message.metadata)
    refused = await send(client, sent)
    assert (refused.state, refused.sentence) == (REJECTED, NO_STEERING)
    async with httpx.AsyncClient(base_url=agent.url) as http:
        assert (await http.get("/readyz")).status_code == 200
    limits = await card_limits(agent)
    assert "no questions are asked" in limits
    assert "files cannot be sent" in limits
