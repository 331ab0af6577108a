"""A message is answered with every send method, and the task stores the answer. Covers `agent`."""

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import anyio
import httpx
import pytest
from a2a.types import TaskState

from codex_workspace.common.a2a_terms import TERMINAL
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.script import numbered_text
from codex_workspace.tasks.scheduling import UPDATE_INTERVAL_S
from tests.e2e.agent_process import REPOSITORY, SECRET, AgentProcess, AgentSetup, Backend, running_agent
from tests.e2e.client import Peer, Seen, peer, script, tokens
from tests.e2e.turn_progress import wait_for_model_calls

pytestmark = [pytest.mark.both_backends, pytest.mark.slow]

COMPLETED = TaskState.TASK_STATE_COMPLETED


@pytest.mark.parametrize("send", [Peer.ask, Peer.ask_blocking])
async def test_blocking_and_streaming_sends_complete_and_the_task_keeps_the_answer(
    client: Peer, send: Callable[[Peer, str], Awaitable[Seen]]
) -> None:
    seen = await send(client, "hello there")
    assert (seen.state, seen.answer) == (COMPLETED, "You said: hello there")
    kept = await client.get(seen.task_id)
    assert (kept.state, kept.answer, kept.context_id) == (COMPLETED, seen.answer, seen.context_id)


async def test_a_non_blocking_send_can_be_polled_to_its_end(client: Peer) -> None:
    started = await client.begin(script({"chunks": 5, "delay_ms": 50}))
    assert started.state not in TERMINAL
    seen = await client.finished(started.task_id)
    assert (seen.state, seen.answer) == (COMPLETED, numbered_text(50))


@pytest.mark.versions
async def test_the_stream_has_one_task_one_answer_and_one_end(client: Peer) -> None:
    seen = await client.ask(script({"say": "On my way.", "run": "true"}, {"chunks": 20, "delay_ms": 5}))
    assert (seen.tasks, seen.terminals, seen.final_chunks) == (1, 1, 1)
    assert (seen.state, seen.answer) == (COMPLETED, numbered_text(200))


@pytest.mark.app_server_only(reason="codex exec tells a text when it is whole")
@pytest.mark.versions
async def test_the_answer_grows_at_the_configured_rate(client: Peer) -> None:
    seen = await client.ask(script({"chunks": 200, "delay_ms": 5}))
    assert seen.answer == numbered_text(2000)
    steps = [later - earlier for earlier, later in pairwise(seen.answer_updates[:-2])]
    assert len(steps) >= 5, "the answer did not stream"
    # The client receives the updates unevenly; the rate holds for the whole stream.
    assert sum(steps) / len(steps) >= UPDATE_INTERVAL_S * 0.95


@pytest.mark.app_server_only(reason="codex exec tells a text when it is whole")
async def test_the_first_words_arrive_while_the_model_still_writes(client: Peer) -> None:
    before_the_end = Seen()
    async for event in client.stream(script({"say": "first words", "stall": True})):
        if before_the_end.take(event).answer:
            break
    assert before_the_end.answer
    assert before_the_end.state not in TERMINAL
    await client.cancel(before_the_end.task_id)


@pytest.mark.versions
async def test_commands_files_reasoning_and_usage_are_shown(client: Peer, setup: AgentSetup, backend: Backend) -> None:
    patch = "*** Begin Patch\n*** Add File: made.txt\n+made\n*** End Patch"
    seen = await client.ask(
        script(
            {"reason": "think of it", "say": "On my way.", "run": "echo from the $((40 + 2))"},
            {"patch": patch},
            {"say": "Done."},
        )
    )
    assert (seen.state, seen.answer) == (COMPLETED, "Done.")
    assert seen.kinds() == ["reasoning", "commentary", "command", "command"]
    finished = seen.notes[-1].status.message
    assert "from the 42" in str(finished.metadata["output"])
    assert (finished.metadata["exitCode"], finished.metadata["status"]) == (0, "completed")
    # codex exec names a changed file without its changes.
    assert ("+made" if backend == "app-server" else "made.txt") in seen.artifacts["patch-1"]
    assert await anyio.Path(setup.workspace, "made.txt").read_text() == "made\n"
    usage = tokens(seen)
    assert usage["totalTokens"] > 0
    assert usage["totalTokens"] == usage["inputTokens"] + usage["outputTokens"]


async def test_usage_reports_the_turn_and_the_thread_total(client: Peer) -> None:
    usage = {"input_tokens": 100, "cached_tokens": 10, "output_tokens": 7, "reasoning_tokens": 2}
    first = await client.ask(script({"say": "one", "usage": usage}), "ctx")
    second = await client.ask(script({"say": "two", "usage": usage}), "ctx")
    assert tokens(first)["totalTokens"] == 107
    assert tokens(second)["totalTokens"] == 107
    assert tokens(second)["thread.totalTokens"] == 214


@pytest.mark.parametrize("text", ["", "   \n\t "])
async def test_a_message_without_text_is_rejected_before_a_turn(client: Peer, model: ScriptedModel, text: str) -> None:
    seen = await client.ask(text)
    assert seen.state == TaskState.TASK_STATE_REJECTED
    assert "no text" in seen.sentence
    assert not [request for request in model.requests if request.path.endswith("/responses")]


async def test_a_message_over_codexs_limit_is_rejected_with_a_reason(client: Peer) -> None:
    seen = await client.ask_blocking("x" * 1_048_577)
    assert seen.state == TaskState.TASK_STATE_REJECTED
    assert "1048577 characters" in seen.sentence
    assert (await client.ask("and on we go")).state == COMPLETED


async def test_a_peers_invalid_request_logs_no_traceback(agent: AgentProcess) -> None:
    async with httpx.AsyncClient(base_url=agent.url) as http:
        for body in (
            b"{",
            b"[]",
            b'{"jsonrpc": "2.0"}',
            b'{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{"x":1}}',
            b'{"jsonrpc":"2.0","id":1,"method":"message/send","params":{"x":1}}',
        ):
            for version in ("1.0", "0.3"):
                answer = await http.post("/", content=body, headers={"A2A-Version": version})
                assert "error" in answer.json()
    assert "Traceback" not in agent.log.read_text()


async def test_state_files_are_readable_by_the_user_only(setup: AgentSetup) -> None:
    state, home = setup.root / "fresh" / "state", setup.root / "elsewhere"
    folders = {"WORKSPACE_STATE_DIR": str(state), "CODEX_HOME": str(home)}
    elsewhere = replace(setup, environment=folders)
    async with running_agent(elsewhere) as agent, peer(agent.url) as client:
        await client.ask("hello")
        kept = [state, *state.glob("workspace.sqlite3*"), home]
        assert len(kept) >= 3
        assert [oct(path.stat().st_mode & 0o077) for path in kept] == ["0o0"] * len(kept)


async def test_the_0_3_sdk_works_blocking_and_streaming(agent: AgentProcess) -> None:
    old_python = REPOSITORY / ".venv-a2a-0.3" / "bin" / "python"
    command = [str(old_python), str(Path(__file__).with_name("old_client.py")), agent.url, "hello from 0.3"]
    done = await anyio.run_process(command, check=False)
    assert done.returncode == 0, done.stderr.decode()
    seen = json.loads(done.stdout)
    for way in ("blocking", "streaming"):
        assert seen[way]["state"] == seen[way]["kept_state"] == "completed"
        assert seen[way]["kept_answer"] == "You said: hello from 0.3"
    assert seen["blocking"]["answer"] == "You said: hello from 0.3"
    assert seen["streaming"]["events"] >= 4
    assert seen["streaming"]["context"] == seen["blocking"]["context"]


async def test_the_token_protects_everything_but_the_card_and_probes(setup: AgentSetup) -> None:
    guarded = replace(setup, environment={"A2A_TOKEN": "open-sesame"})
    async with running_agent(guarded) as agent:
        async with httpx.AsyncClient(base_url=agent.url) as http:
            for path in ("/.well-known/agent-card.json", "/healthz", "/readyz"):
                assert (await http.get(path)).status_code == 200
            card = (await http.get("/.well-known/agent-card.json")).json()
            assert card["securitySchemes"]["bearer"]
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open-sesame"}):
                refused = await http.post("/", json={}, headers=headers)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        async with peer(agent.url, "open-sesame") as client:
            assert (await client.ask("hi")).state == COMPLETED
        assert "open-sesame" not in agent.log.read_text()


@pytest.mark.versions
async def test_secrets_reach_neither_commands_nor_log_nor_tasks(setup: AgentSetup, model: ScriptedModel) -> None:
    canaries = {
        "ANTHROPIC_API_KEY": "canary-anthropic",
        "MOLECULE_WORKSPACE_TOKEN": "canary-molecule",
        "ADMIN_TOKEN": "canary-admin",
    }
    dirty = replace(setup, environment={**canaries, "A2A_TOKEN": "canary-a2a", "LOG_LEVEL": "DEBUG"})
    async with running_agent(dirty) as agent, peer(agent.url, "canary-a2a") as client:
        seen = await client.ask(script({"run": "env; cat /proc/[0-9]*/environ | tr '\\0' '\\n'"}, {"say": "looked"}))
        shown = str(seen.notes) + str(seen.metadata) + seen.answer
        stalled = await client.begin(script({"stall": True}))
        await wait_for_model_calls(model, 3)
        codex_environment = " ".join(agent.codex().environ().values())
        await client.cancel(stalled.task_id)
    assert "PATH=" in shown, "the command printed no environment"
    for secret in [*canaries.values(), "canary-a2a"]:
        assert secret not in shown
        assert secret not in codex_environment
        assert secret not in agent.log.read_text()
    assert SECRET not in shown
    assert SECRET not in agent.log.read_text()


async def test_body_limit(setup: AgentSetup) -> None:
    small = replace(setup, limits={"max_message_bytes": 4096})
    async with running_agent(small) as agent, httpx.AsyncClient(base_url=agent.url) as http:
        refused = await http.post("/", content=b"x" * 5000)
        assert (refused.status_code, "4096 bytes" in refused.text) == (413, True)


def test_the_start_script_starts_the_agent_and_reports_errors(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\nruntime: codex\ntemplate_schema_version: 1\nmodell: gpt\n")
    environment = {
        "PATH": str(Path(sys.executable).parent),
        "WORKSPACE_CONFIG_PATH": str(tmp_path),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [REPOSITORY / "start.sh"],
        env={**environment, "PATH": f"{environment['PATH']}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 2
    assert "modell" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
