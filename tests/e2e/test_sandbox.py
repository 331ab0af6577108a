"""A machine on which codex cannot create a sandbox, as under Docker's default seccomp profile."""

import sys
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.e2e.agent_process import AgentSetup, running_agent, spawn
from tests.e2e.client import peer, script

pytestmark = pytest.mark.slow

IN_DOCKER = ("tests.e2e.docker_seccomp", "codex_workspace", "serve")
IMAGE = {"SANDBOX_FALLBACK": "container"}
TOKEN = "token-0123456789abcdef"


@pytest.mark.parametrize(
    ("codex", "environment"),
    [
        ({}, {}),
        ({"sandbox": "auto"}, {"SANDBOX_FALLBACK": ""}),
        ({"sandbox": "workspace-write"}, IMAGE),
        ({"hide_secrets": True}, IMAGE),
        ({"approval_policy": "on-request"}, IMAGE),
    ],
)
def test_an_unavailable_sandbox_is_rejected_with_the_remedies(
    setup: AgentSetup, codex: dict[str, object], environment: dict[str, str]
) -> None:
    process = spawn(replace(setup, codex=codex, environment=environment), IN_DOCKER)
    assert process.wait(20) == 3
    log = setup.log.read_text()
    last = log.strip().splitlines()[-1]
    for word in ("codex.sandbox: workspace-write", "bwrap: ", "--security-opt seccomp=", "codex.sandbox to container"):
        assert word in last
    assert "Traceback" not in log
    assert "ready" not in log


async def test_the_container_is_the_sandbox_if_configured(setup: AgentSetup) -> None:
    alone = replace(setup, codex={"sandbox": "container"})
    async with running_agent(alone, IN_DOCKER) as agent, peer(agent.url) as client:
        seen = await client.ask(script({"run": "echo from > file; cat file"}, {"say": "Done."}))
    assert seen.answer == "Done."
    assert (setup.workspace / "file").read_text() == "from\n"


@pytest.mark.both_backends
async def test_in_the_image_the_container_is_the_sandbox_with_one_warning(setup: AgentSetup) -> None:
    in_image = replace(setup, environment={**IMAGE, "A2A_TOKEN": TOKEN})
    async with running_agent(in_image, IN_DOCKER) as agent, peer(agent.url, TOKEN) as client:
        for word in ("before", "after"):
            seen = await client.ask(script({"run": f"echo {word} > file; cat file"}, {"say": "Done."}))
            assert seen.answer == "Done."
            assert (setup.workspace / "file").read_text() == f"{word}\n"
            # Another codex has the same sandbox.
            for codex in agent.codexes():
                codex.kill()
                psutil.wait_procs([codex])
        bearer = {"Authorization": f"Bearer {TOKEN}", "A2A-Version": "1.0"}
        async with httpx.AsyncClient(base_url=agent.url, headers=bearer) as http:
            card = (await http.get("/extendedAgentCard")).json()
        (sandbox,) = [each["params"]["sandbox"] for each in card["capabilities"]["extensions"] if "params" in each]
        assert sandbox == "container"
    log = setup.log.read_text()
    (warning,) = [line for line in log.splitlines() if "WARNING" in line and "codex.sandbox: auto" in line]
    for word in ("bwrap: ", "the network", "all files of the agent's user", "seccomp=deploy/seccomp.json"):
        assert word in warning
    assert "sandbox container, A2A at" in log


@pytest.mark.both_backends
async def test_in_the_image_codex_s_sandbox_is_used_where_it_works(setup: AgentSetup) -> None:
    async with running_agent(replace(setup, environment=IMAGE)) as agent, peer(agent.url) as client:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {urlsplit(agent.url).port}))"
        seen = await client.ask(script({"run": f'touch inside; {sys.executable} -c "{connect}" && touch out'}))
    assert seen.answer
    assert [each.name for each in setup.workspace.iterdir()] == ["inside"]
    assert "codex.sandbox: auto" not in setup.log.read_text()
    assert "sandbox workspace-write, A2A at" in setup.log.read_text()
