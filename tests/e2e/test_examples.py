"""The programs in `examples/` work with the real agent and the real codex, started by the commands of its README."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import pytest
import yaml

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.runtimes.launch import Launch
from tests.docs.test_docs import snippets_of
from tests.e2e.agent_process import REPOSITORY, AgentSetup, running_agent
from tests.e2e.client import peer, script
from tests.e2e.test_agent_tools import call, delegation_script, tool_outputs
from tests.e2e.test_exec_process import KEY, launch
from tests.matrix.clients import NODE_MODULES, there_is_node
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.slow

__all__ = ["launch"]

EXAMPLES: Final = REPOSITORY / "examples"
TOKEN: Final = "open-sesame-0123456789"
QUESTIONS: Final = ("What is in this folder?", "And how old is it?")


def command_with(word: str) -> str:
    """Return the command of the README that contains `word`."""
    (snippet,) = [each for each in snippets_of(EXAMPLES / "README.md") if word in each.text]
    assert snippet.mark == "runs in tests/e2e/test_examples.py"
    return snippet.text.replace("python ", f"{sys.executable} ")


async def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a shell command and return its output; it must exit with code 0."""
    passed = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    with anyio.fail_after(HANG_S):
        ran = await anyio.run_process(["sh", "-ec", command], cwd=folder, env=passed | environment, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode()


def client_shows_both_answers(printed: str) -> bool:
    """Whether a client has printed both answers as they streamed, each once and with its end."""
    first, second = QUESTIONS
    return printed.count(f"You said: {first}") == 1 and bool(
        re.search(rf"You said: {re.escape(first)}.*\[completed\].*{re.escape(second)}", printed, re.DOTALL)
    )


async def test_the_python_client(setup: AgentSetup) -> None:
    secured = AgentSetup(setup.root, setup.model_url, environment={"A2A_TOKEN": TOKEN})
    async with running_agent(secured) as agent:
        command = command_with("python_client.py").replace("http://127.0.0.1:8000", agent.url)
        assert client_shows_both_answers(await run(command, REPOSITORY, {"A2A_TOKEN": TOKEN}))


@pytest.mark.skipif(not there_is_node(), reason="needs npm and Node 20")
async def test_the_javascript_client(setup: AgentSetup, tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "javascript_client"
    folder.mkdir(parents=True)
    (folder / "client.mjs").write_bytes((EXAMPLES / "javascript_client" / "client.mjs").read_bytes())
    (folder / "node_modules").symlink_to(NODE_MODULES)
    secured = AgentSetup(setup.root, setup.model_url, environment={"A2A_TOKEN": TOKEN})
    async with running_agent(secured) as agent:
        command = command_with("client.mjs").replace("http://127.0.0.1:8000", agent.url).replace("npm install\n", "")
        assert client_shows_both_answers(await run(command, tmp_path, {"A2A_TOKEN": TOKEN}))


@pytest.mark.parametrize("name", ["codex", "codex-exec"])
async def test_the_embedding_program(launch: Launch, name: str) -> None:
    prompt = script({"run": "echo found it"}, {"say": "There it is."})
    command = command_with("embedding.py").replace('"List the files here."', f"'{prompt}' {name}")
    command = command.replace("examples/", f"{EXAMPLES}/").replace("sk-your-key", KEY)
    codex = {"CODEX_HOME": str(launch.codex_home), "CODEX_BIN": str(launch.binary)}
    printed = await run(command, launch.cwd, {**launch.environment, **codex})
    lines = [line for line in printed.splitlines() if line]
    assert [line.partition(" ")[0] for line in lines] == ["->", "<-", "There", "[completed]"]
    assert lines[1:3] == ["<- found it", "There it is."]


@dataclass(frozen=True)
class Composed(AgentSetup):
    """The setup of one agent of `two_agents`, with its own config.yaml.

    name: the service and its configuration. reviewer: the URL of the reviewer, instead of its container's.
    """

    name: str = "coordinator"
    reviewer: str = ""

    def prepare(self) -> dict[str, str]:
        environment = super().prepare()
        text = (EXAMPLES / "two_agents" / f"{self.name}.yaml").read_text()
        (self.root / "config" / "config.yaml").write_text(text.replace("http://reviewer:8000", self.reviewer))
        return environment | {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": self.model_url}


async def test_the_two_agents(tmp_path: Path, model: ScriptedModel) -> None:
    for name in ("reviewer", "coordinator"):
        (tmp_path / name).mkdir()
    reviewer = Composed(tmp_path / "reviewer", model.base_url, environment={"A2A_TOKEN": TOKEN}, name="reviewer")
    async with running_agent(reviewer) as other:
        tokens = {"REVIEWER_TOKEN": TOKEN}
        coordinator = Composed(tmp_path / "coordinator", model.base_url, environment=tokens, reviewer=other.url)
        async with running_agent(coordinator) as agent, peer(agent.url) as client:
            work = call("delegate_task", peer="reviewer", task=script({"say": "The change is good."}))
            assert (await client.ask(delegation_script(work, {"say": "Reviewed."}))).answer == "Reviewed."
            assert "The change is good." in tool_outputs(model)[0]


@pytest.mark.parametrize("file", [REPOSITORY / "compose.yaml", EXAMPLES / "two_agents" / "compose.yaml"], ids=str)
def test_a_compose_file_is_valid_and_grants_no_privileges(file: Path) -> None:
    schema = ["--builtin-schema", "vendor.compose-spec", str(file)]
    checked = subprocess.run([sys.executable, "-m", "check_jsonschema", *schema], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for service in yaml.safe_load(file.read_text())["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["user"] == "1000:1000"
        (profile,) = [each.partition("=")[2] for each in service["security_opt"] if each.startswith("seccomp=")]
        assert (file.parent / profile).resolve() == REPOSITORY / "deploy" / "seccomp.json"
        # Codex's sandbox is a condition, also without `codex.sandbox`.
        assert service["environment"]["SANDBOX_FALLBACK"] == ""
