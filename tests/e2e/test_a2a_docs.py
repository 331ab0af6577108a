"""Runs every example of docs/a2a.md from top to bottom against the real agent."""

import ast
import re
import subprocess
from collections.abc import Iterator
from inspect import CO_COROUTINE
from pathlib import Path
from types import CodeType, FunctionType
from typing import Final

import anyio
import pytest
import yaml

from codex_workspace.devkit.model import scripted_model
from tests.e2e.agent_process import REPOSITORY, AgentSetup, running_agent
from tests.support.waiting import HANG_S
from tests.support.webhook_server import webhook

pytestmark = pytest.mark.slow

DOCUMENT: Final = REPOSITORY / "docs" / "a2a.md"
BLOCK: Final = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTSIDE: Final = "echo made > ../made.txt"
TESTS: Final = "for n in 1 2 3; do echo $n; sleep 0.4; done"
HAND_OVER: Final = {"name": "hand_over_file", "arguments": {"path": "report.txt"}}
REPORT: Final = "printf 'all well' > report.txt"

SCENARIO: Final[list[dict[str, object]]] = [
    {"match": "^What does this repository do", "steps": {"say": "It greets the world."}},
    {
        "match": "^Run the tests",
        "steps": [{"run": "for n in 1 2 3; do echo $n; sleep 0.4; done"}, {"say": "All tests pass."}],
    },
    {"match": "^Take your time", "steps": {"chunks": 10, "delay_ms": 100}},
    {"match": "^The word is", "steps": {"say": "I see."}},
    {"match": "^Which word", "steps": {"repeat": True}},
    {"match": "Hello$", "steps": {"say": "Hello."}},
    {"match": "^Count to a million", "steps": {"say": "One, two, three", "stall": True}},
    {"match": "^Add 2 and 3", "steps": {"say": '{"sum": 5}'}},
    {"match": "^What is in these", "steps": {"say": "A red dot, and three apples."}},
    {
        "match": "^Give me the report",
        "steps": [
            {"run": REPORT},
            {"tool": {"name": "hand_over_file", "arguments": {"path": "report.txt"}}},
            {"say": "There."},
        ],
    },
    {"match": "^Write it outside", "steps": [{"run": OUTSIDE, "escalate": True}, {"say": "Done."}]},
    {"match": "write it here", "steps": {"say": "Done here."}},
]
"""The scripted model's responses to the messages in the document."""


def blocks() -> Iterator[tuple[int, str, str]]:
    """Yield the line, language and code of each example."""
    text = DOCUMENT.read_text()
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start()) + 2, found[1], found[2]


async def run_python(code: str, line: int, names: dict[str, object]) -> None:
    """Run an example that may use `await` at the top level."""
    tree = ast.parse("\n" * (line - 1) + code)
    compiled: CodeType = compile(tree, str(DOCUMENT), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = FunctionType(compiled, names)()
    if compiled.co_flags & CO_COROUTINE:
        await result


async def run_shell(code: str) -> None:
    done = await anyio.run_process(["bash", "-euc", code], check=False, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout.decode()


async def test_every_example_works(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump(SCENARIO))
    async with scripted_model(scenario=scenario) as model, webhook() as hook:
        (tmp_path / "agent").mkdir()
        setup = AgentSetup(
            tmp_path / "agent",
            model.base_url,
            codex={"approval_policy": "on-request"},
            environment={"A2A_TOKEN": "my-token", "A2A_GRPC_PORT": "0"},
            push={"allow": ["127.0.0.1"]},
        )
        async with running_agent(setup) as agent:
            names: dict[str, object] = {"__name__": "a2a"}
            count = 0
            for line, language, code in blocks():
                here = code.replace("http://127.0.0.1:8000/", agent.url).replace("http://127.0.0.1:9000/hook", hook.url)
                with anyio.fail_after(HANG_S):
                    await (run_python(here, line, names) if language == "python" else run_shell(here))
                count += 1
            assert count > 15
            received = hook.received[-1]
            assert received.headers["x-a2a-notification-token"] == "my-webhook-secret"
    assert (setup.root / "made.txt").read_text() == "made\n"
