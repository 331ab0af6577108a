"""Instructions and skills as codex sends them to the model: at the start of a conversation, and after a change."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
import yaml

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.model_requests import Message, Output, Request
from tests.e2e.agent_process import AgentSetup, running_agent, spawn
from tests.e2e.client import peer, script

pytestmark = pytest.mark.slow

OLD_INSTRUCTIONS = "Speak like a pirate."
NEW_INSTRUCTIONS = "Speak like a librarian."
CHANGED = "The operator has changed"
SKILL = "---\nname: notes\ndescription: Writes release notes from tags\n---\n\nBegin with the newest tag.\n"


@dataclass(frozen=True)
class SetupWithPrompt(AgentSetup):
    """A setup with a prompt file or other keys in config.yaml."""

    config_keys: Mapping[str, object] = field(default_factory=lambda: {"prompt_files": ["how.md"]})

    @property
    def folder(self) -> Path:
        return self.root / "config"

    def write_prompt(self, text: str) -> None:
        """Write the prompt file."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "how.md").write_text(text)

    def prepare(self) -> dict[str, str]:
        environment = super().prepare()
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | dict(self.config_keys)))
        return environment


@pytest.fixture
def setup(tmp_path: Path, model: ScriptedModel) -> SetupWithPrompt:
    return SetupWithPrompt(tmp_path, model.base_url)


async def ask(setup: AgentSetup, *texts: str) -> None:
    """Start the agent, send messages to its main conversation, and stop it."""
    async with running_agent(setup) as agent, peer(agent.url) as client:
        for text in texts:
            await client.ask(text)


def occurrences(request: Request, words: str, role: str = "developer") -> list[int]:
    """Return the positions of `words` in a model call's input, once per occurrence."""
    return [
        index
        for index, item in enumerate(request.input)
        if isinstance(item, Message) and item.role == role
        for _ in range(item.text.count(words))
    ]


def position_of(request: Request, text: str) -> int:
    (index,) = [n for n, item in enumerate(request.input) if isinstance(item, Message) and item.text == text]
    return index


async def test_a_conversation_receives_each_instruction_change_once(
    setup: SetupWithPrompt, model: ScriptedModel
) -> None:
    setup.write_prompt("")
    await ask(setup, "one")
    setup.write_prompt(OLD_INSTRUCTIONS)
    await ask(setup, "two", "three")
    # The same instructions again: nothing is added.
    await ask(setup, "four")
    last = model.requests[-1]
    (position,) = occurrences(last, OLD_INSTRUCTIONS)
    assert position_of(last, "one") < position < position_of(last, "two")
    assert occurrences(last, CHANGED) == [position]
    setup.write_prompt(NEW_INSTRUCTIONS)
    # A conversation of this length is compacted before its next turn.
    long = script({"say": "a lot", "usage": {"input_tokens": 1_000_000}})
    await ask(setup, "five", long, "six")
    before = next(request for request in model.requests if occurrences(request, "five", "user"))
    (position,) = occurrences(before, NEW_INSTRUCTIONS)
    assert position_of(before, "four") < position < position_of(before, "five")
    assert len(occurrences(before, OLD_INSTRUCTIONS)) == 1
    compacted = model.requests[-1]
    assert len(occurrences(compacted, NEW_INSTRUCTIONS)) == 1, "codex itself adds the current instructions"
    assert occurrences(compacted, OLD_INSTRUCTIONS) == occurrences(compacted, CHANGED) == []
    setup.write_prompt("")
    await ask(setup, "seven")
    last = model.requests[-1]
    (position,) = occurrences(last, "no longer apply")
    assert occurrences(last, NEW_INSTRUCTIONS)[0] < position < position_of(last, "seven")


async def test_skills_and_memory_files_reach_the_model_and_the_card(
    setup: SetupWithPrompt, model: ScriptedModel
) -> None:
    setup = replace(setup, config_keys={"skills": ["notes"]})
    home = setup.root / "state" / "codex"
    for folder, name, text in (
        (setup.folder / "skills" / "notes", "SKILL.md", SKILL),
        (setup.folder, "AGENTS.md", "The platform's rule."),
        (home, "AGENTS.md", "The rule of every workspace."),
        (setup.workspace, "AGENTS.md", "The rule of this workspace."),
        (setup.workspace / ".agents" / "skills" / "deploy", "SKILL.md", SKILL.replace("notes", "deploy")),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    file = setup.folder / "skills" / "notes" / "SKILL.md"
    async with running_agent(setup) as agent, peer(agent.url) as client, httpx.AsyncClient() as http:
        card = (await http.get(f"{agent.url}.well-known/agent-card.json")).json()
        assert [skill["id"] for skill in card["skills"]] == ["code", "review", "explain", "notes"]
        await client.ask("Please use $notes.")
        await client.ask(script({"run": f"cat {file}"}, text="Read it. "))
    first, last = model.requests[0], model.requests[-1]
    assert len(occurrences(first, "The platform's rule.")) == 1
    assert len(occurrences(first, "Writes release notes from tags")) == 1
    assert len(occurrences(first, "Writes release deploy from tags")) == 1
    outputs = [item for item in last.input if isinstance(item, Output) and "Begin with the newest tag." in item.text]
    assert len(outputs) == 1, "the sandbox must allow reading the skill"
    (thread,) = (home / "sessions").glob("**/*.jsonl")
    recorded = thread.read_text()
    assert "The rule of every workspace." in recorded
    assert "The rule of this workspace." in recorded
    assert "<name>notes</name>" in recorded, "the skill named by the message must be included"


def test_a_missing_prompt_file_prevents_the_start(setup: SetupWithPrompt) -> None:
    process = spawn(setup)
    assert process.wait(20) == 2
    assert f"{setup.folder}/config.yaml: prompt_files[0]: names {setup.folder}/how.md" in setup.log.read_text()
