"""A machine on which codex can make no sandbox, as under Docker's default seccomp profile."""

from dataclasses import replace

import pytest

from tests.e2e.agent_process import Place, running_agent, spawn
from tests.e2e.client import peer, script

pytestmark = pytest.mark.slow

IN_DOCKER = ("tests.e2e.as_in_docker", "codex_workspace", "serve")


def test_an_unavailable_sandbox_is_rejected_with_the_remedies(place: Place) -> None:
    process = spawn(place, IN_DOCKER)
    assert process.wait(20) == 3
    said = place.log.read_text()
    last = said.strip().splitlines()[-1]
    for word in ("codex.sandbox: workspace-write", "bwrap: ", "--security-opt seccomp=", "codex.sandbox to container"):
        assert word in last
    assert "Traceback" not in said
    assert "ready" not in said


async def test_the_container_is_the_sandbox_if_configured(place: Place) -> None:
    alone = replace(place, codex={"sandbox": "container"})
    async with running_agent(alone, IN_DOCKER) as agent, peer(agent.url) as client:
        seen = await client.ask(script({"run": "echo from > file; cat file"}, {"say": "Done."}))
    assert seen.answer == "Done."
    assert (place.workspace / "file").read_text() == "from\n"
