"""A machine on which codex cannot create a sandbox, as under Docker's default seccomp profile."""

from dataclasses import replace

import pytest

from tests.e2e.agent_process import AgentSetup, running_agent, spawn
from tests.e2e.client import peer, script

pytestmark = pytest.mark.slow

IN_DOCKER = ("tests.e2e.docker_seccomp", "codex_workspace", "serve")


def test_an_unavailable_sandbox_is_rejected_with_the_remedies(setup: AgentSetup) -> None:
    process = spawn(setup, IN_DOCKER)
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
