"""Secrets that the model could find: its commands search everywhere, and its output repeats what they found."""

import importlib.util
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from a2a.types import TaskState

from codex_workspace.devkit.model import scripted_model
from codex_workspace.devkit.model_requests import Output
from tests.e2e.agent_process import SECRET, AgentProcess, AgentSetup, running_agent
from tests.e2e.client import peer, script

pytestmark = pytest.mark.slow

WITHOUT_CAPABILITIES = ("tests.e2e.without_capabilities", "codex_workspace", "serve")

TOKEN = "token-of-the-operator-0123"
ADA = "token-of-ada-0123456789"
PLATFORM = "token-for-the-platform-0123"
SECRETS = (SECRET, TOKEN, ADA, PLATFORM)

READ_ENVIRONMENTS = r"""
import glob, os
for file in sorted(glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/task/*/environ")):
    try:
        print(file, open(file, "rb").read())
    except OSError as error:
        print(file, error.strerror)
for file in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        print(file, open(file, "rb").read())
    except OSError as error:
        print(file, error.strerror)
print(dict(os.environ))
"""

SEARCH_MEMORY = r"""
import os, re
found = set()
for process in filter(str.isdigit, os.listdir("/proc")):
    if int(process) == os.getpid():
        continue
    try:
        maps, memory = open(f"/proc/{process}/maps").read(), open(f"/proc/{process}/mem", "rb", 0)
    except OSError:
        continue
    for line in maps.splitlines():
        begin, end, rights = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line).groups()
        if rights.startswith("rw") and int(end, 16) - int(begin, 16) < 1 << 28:
            try:
                memory.seek(int(begin, 16))
                data = memory.read(int(end, 16) - int(begin, 16))
            except (OSError, ValueError, OverflowError):
                continue
            # In two pieces, as this program is in codex's memory itself.
            if b"sk-scr" + b"ipted-0123456789" in data:
                found.add(process)
print("found in", *sorted(found))
"""
"""Searches the memory of every readable process for the provider's key."""


@pytest.fixture
def setup_with_secrets(setup: AgentSetup) -> AgentSetup:
    """An agent with every kind of secret."""
    (setup.root / "platform.token").write_text(f"{PLATFORM}\n")
    return replace(
        setup,
        environment={
            "A2A_TOKEN": TOKEN,
            "ADA_TOKEN": ADA,
            "MOLECULE_WORKSPACE_TOKEN_FILE": str(setup.root / "platform.token"),
            "PLATFORM_URL": "http://127.0.0.1:1/",
            "WORKSPACE_ID": "me",
            "DATABASE_URL": f"sqlite:///{setup.root}/tasks.sqlite3",
            "LOG_LEVEL": "DEBUG",
        },
        config={"principals": [{"name": "ada", "token_env": "ADA_TOKEN"}]},
    )


@pytest.fixture
def unreadable_codex(tmp_path: Path) -> Path:
    """A codex binary that can be executed but not read, as in the image, with its helper files beside it."""
    spec = importlib.util.find_spec("codex_cli_bin")
    assert spec is not None
    assert spec.origin is not None
    original = Path(os.environ.get("CODEX_BIN") or Path(spec.origin).parent / "bin" / "codex")

    def copy_binary_only(source: str, target: str) -> None:
        if Path(source) == original:
            shutil.copyfile(source, target)
        else:
            Path(target).symlink_to(source)

    copied = tmp_path / "codex-package"
    shutil.copytree(original.parent.parent, copied, copy_function=copy_binary_only)
    binary = copied / "bin" / "codex"
    binary.chmod(0o111)
    return binary


async def run_in_sandbox(setup: AgentSetup, agent: AgentProcess, program: str) -> str:
    """Let the model run a Python program in its workspace, and return the program's output."""
    (setup.workspace / "look.py").write_text(program)
    async with peer(agent.url, TOKEN) as client:
        seen = await client.ask(script({"run": f"{sys.executable} look.py > found 2>&1"}, {"say": "Looked."}))
    assert seen.answer == "Looked."
    return (setup.workspace / "found").read_text(errors="replace")


def environ_of(pid: int, found: str) -> str:
    """Return the program's output line about a process's environment."""
    (line,) = [line for line in found.splitlines() if line.startswith(f"/proc/{pid}/environ ")]
    return line


@pytest.mark.parametrize("sandbox", ["workspace-write", "container"])
async def test_no_command_sees_a_secret(setup_with_secrets: AgentSetup, sandbox: str) -> None:
    setup = replace(setup_with_secrets, codex={"sandbox": sandbox})
    async with running_agent(setup, WITHOUT_CAPABILITIES) as agent:
        found = await run_in_sandbox(setup, agent, READ_ENVIRONMENTS)
        in_memory = (await run_in_sandbox(setup, agent, SEARCH_MEMORY)).strip()
        agent_pid, codex_pid = agent.process.pid, agent.codex().pid
    for secret in (*SECRETS, "DATABASE_URL", "tasks.sqlite3"):
        assert secret not in found
    if sandbox == "container":
        assert environ_of(agent_pid, found).endswith("Permission denied")
        assert "CODEX_HOME=" in environ_of(codex_pid, found), "the program read no environment"
        assert in_memory == f"found in {codex_pid}", "see the README"
    else:
        assert f"/proc/{codex_pid}/" not in found, "a sandbox has its own process namespace"


async def test_an_unreadable_codex_file_means_unreadable_process_memory(
    setup_with_secrets: AgentSetup, unreadable_codex: Path
) -> None:
    setup = replace(
        setup_with_secrets,
        codex={"sandbox": "container"},
        environment={**setup_with_secrets.environment, "CODEX_BIN": str(unreadable_codex)},
    )
    async with running_agent(setup, WITHOUT_CAPABILITIES) as agent:
        assert (await run_in_sandbox(setup, agent, SEARCH_MEMORY)).strip() == "found in"
        found = await run_in_sandbox(setup, agent, READ_ENVIRONMENTS)
        assert environ_of(agent.codex().pid, found).endswith("Permission denied")


async def test_an_unreadable_codex_binary_still_has_a_sandbox(
    setup_with_secrets: AgentSetup, unreadable_codex: Path
) -> None:
    setup = replace(
        setup_with_secrets, environment={**setup_with_secrets.environment, "CODEX_BIN": str(unreadable_codex)}
    )
    async with running_agent(setup, WITHOUT_CAPABILITIES) as agent:
        found = await run_in_sandbox(setup, agent, READ_ENVIRONMENTS)
        assert f"/proc/{agent.codex().pid}/" not in found


PATCH = f"*** Begin Patch\n*** Add File: keys\n+key={SECRET}\n*** End Patch"

SCENARIO = [
    {
        "match": "tell",
        "steps": [
            {
                "say": f"I found {SECRET} here.",
                "chunk_chars": 7,
                "phase": "commentary",
                "run": f"echo {SECRET[:9]}''{SECRET[9:]}",
            },
            {"reason": f"It must be {TOKEN} or {ADA}.", "patch": PATCH},
            {"tool": {"name": "hand_over_file", "arguments": {"path": "keys"}}},
            {"say": f"The keys are {SECRET}, {TOKEN} and {PLATFORM}", "chunk_chars": 5},
        ],
    },
    {"match": "ask", "steps": [{"run": f"echo {SECRET}", "escalate": True}, {"say": "done"}]},
    {"match": "fail", "steps": [{"fail": 400, "message": f"bad key {SECRET}"}]},
]


async def test_secrets_in_model_output_are_redacted_everywhere(setup_with_secrets: AgentSetup, tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump(SCENARIO))
    async with scripted_model(scenario=scenario) as model:
        setup = replace(setup_with_secrets, model_url=model.base_url, codex={"approval_policy": "on-request"})
        async with running_agent(setup) as agent, peer(agent.url, TOKEN) as client:
            received = ""
            async for event in client.stream("tell"):
                received += str(event)
            leaked = await client.ask("tell")
            assert "credential of this agent" in str(model.requests[-1].input)
            failed = await client.ask("fail")
            # Last, because it waits for an answer.
            asked = await client.ask("ask")
            received += str(leaked) + str(asked) + str(failed)
            received += str([await client.get(each.task_id) for each in (leaked, asked, failed)])
            received += await client.history(leaked.task_id)
        stored = (setup.root / "tasks.sqlite3").read_bytes()
    assert leaked.answer == "The keys are ***, *** and ***"
    assert "echo ***" in str(asked.question)
    assert failed.state == TaskState.TASK_STATE_FAILED
    for secret in SECRETS:
        assert secret not in received
        assert secret.encode() not in stored
        assert secret not in setup.log.read_text()


@pytest.mark.versions
@pytest.mark.parametrize("sandbox", ["workspace-write", "read-only"])
async def test_commands_cannot_read_hidden_files_and_otherwise_work(setup: AgentSetup, sandbox: str) -> None:
    (setup.root / "ada.token").write_text(ADA)
    skill = setup.root / "config" / "skills" / "greet"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: greet\ndescription: Greets\n---\nSay hello.\n")
    (setup.workspace / "below").mkdir(parents=True)
    setup = replace(
        setup,
        codex={"sandbox": sandbox, "hide_secrets": True},
        config={"principals": [{"name": "ada", "token_file": str(setup.root / "ada.token")}], "skills": ["greet"]},
        environment={"A2A_TOKEN": TOKEN},
    )
    home = setup.root / "state" / "codex"
    home.mkdir(parents=True)
    (home / "auth.json").write_text("{}")
    commands = [
        f"cat {home}/auth.json",
        f"cat {home}/config.toml",
        f"ls {home}/sessions",
        f"cat {home}/thread_history_1.sqlite",
        f"cat {setup.root}/state/workspace.sqlite3",
        f"cat {setup.root}/state/workspace.sqlite3-wal",
        f"cat {setup.root}/ada.token",
    ]
    reads: list[dict[str, object]] = [
        {"run": f"{command} > /dev/null 2>&1 && echo READ || echo CLOSED"} for command in commands
    ]
    write = "touch made && echo WRITTEN || echo NOT"
    async with scripted_model() as model:
        setup = replace(setup, model_url=model.base_url)
        for _ in range(2):
            async with running_agent(setup) as agent, peer(agent.url, TOKEN) as client:
                work: list[dict[str, object]] = [
                    *reads,
                    {"run": f"cat {home}/skills/codex-workspace/greet/SKILL.md"},
                    {"run": write},
                ]
                answered = await client.ask(script(*work, {"say": "Tried."}))
                assert answered.answer == "Tried."
                outputs = [item.text for item in model.requests[-1].input if isinstance(item, Output)][-len(work) :]
                assert all("CLOSED" in each for each in outputs[: len(reads)]), outputs
                assert "Say hello." in outputs[len(reads)]
                assert ("WRITTEN" in outputs[-1]) == (sandbox == "workspace-write")
    stored = (home / "sessions").rglob("*.jsonl")
    assert any(file.stat().st_size for file in stored), "codex itself must be able to write its record"
