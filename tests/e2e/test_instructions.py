"""Instructions and skills, as the real codex shows them to the model: at a conversation's beginning, and once more."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
import yaml

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.model_requests import Message, Output, Request
from tests.e2e.agent_process import Place, running_agent, spawn
from tests.e2e.client import peer, script

pytestmark = pytest.mark.slow

OF_OLD = "Speak like a pirate."
OF_TODAY = "Speak like a librarian."
CHANGED = "The operator has changed"
SKILL = "---\nname: notes\ndescription: Writes release notes from tags\n---\n\nBegin with the newest tag.\n"


@dataclass(frozen=True)
class Told(Place):
    """An agent's folders, with files beside config.yaml that tell it how to work."""

    keys: Mapping[str, object] = field(default_factory=lambda: {"prompt_files": ["how.md"]})

    @property
    def folder(self) -> Path:
        return self.root / "config"

    def tell(self, text: str) -> None:
        """Write the prompt file."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "how.md").write_text(text)

    def prepare(self) -> dict[str, str]:
        environment = super().prepare()
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | dict(self.keys)))
        return environment


@pytest.fixture
def place(tmp_path: Path, model: ScriptedModel) -> Told:
    return Told(tmp_path, model.base_url)


async def ask(place: Place, *texts: str) -> None:
    """Start the agent, send messages to its one conversation, and stop it."""
    async with running_agent(place) as agent, peer(agent.url) as client:
        for text in texts:
            await client.ask(text)


def heard(request: Request, words: str, role: str = "developer") -> list[int]:
    """Return where in a model call's input `words` stand, once for each time."""
    return [
        index
        for index, item in enumerate(request.input)
        if isinstance(item, Message) and item.role == role
        for _ in range(item.text.count(words))
    ]


def where(request: Request, text: str) -> int:
    (index,) = [n for n, item in enumerate(request.input) if isinstance(item, Message) and item.text == text]
    return index


async def test_a_conversation_receives_each_instruction_change_once(place: Told, model: ScriptedModel) -> None:
    place.tell("")
    await ask(place, "one")
    place.tell(OF_OLD)
    await ask(place, "two", "three")
    # The same again: nothing is added.
    await ask(place, "four")
    last = model.requests[-1]
    (told,) = heard(last, OF_OLD)
    assert where(last, "one") < told < where(last, "two")
    assert heard(last, CHANGED) == [told]
    place.tell(OF_TODAY)
    # A conversation that long is compacted before its next turn.
    long = script({"say": "a lot", "usage": {"input_tokens": 1_000_000}})
    await ask(place, "five", long, "six")
    before = next(request for request in model.requests if heard(request, "five", "user"))
    (told,) = heard(before, OF_TODAY)
    assert where(before, "four") < told < where(before, "five")
    assert len(heard(before, OF_OLD)) == 1
    compacted = model.requests[-1]
    assert len(heard(compacted, OF_TODAY)) == 1, "codex itself says those of today"
    assert heard(compacted, OF_OLD) == heard(compacted, CHANGED) == []
    place.tell("")
    await ask(place, "seven")
    last = model.requests[-1]
    (told,) = heard(last, "no longer in force")
    assert heard(last, OF_TODAY)[0] < told < where(last, "seven")


async def test_skills_and_memory_files_reach_the_model_and_the_card(place: Told, model: ScriptedModel) -> None:
    place = replace(place, keys={"skills": ["notes"]})
    home = place.root / "state" / "codex"
    for folder, name, text in (
        (place.folder / "skills" / "notes", "SKILL.md", SKILL),
        (place.folder, "AGENTS.md", "The platform's rule."),
        (home, "AGENTS.md", "The rule of every workspace."),
        (place.workspace, "AGENTS.md", "The rule of this workspace."),
        (place.workspace / ".agents" / "skills" / "deploy", "SKILL.md", SKILL.replace("notes", "deploy")),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    file = place.folder / "skills" / "notes" / "SKILL.md"
    async with running_agent(place) as agent, peer(agent.url) as client, httpx.AsyncClient() as http:
        card = (await http.get(f"{agent.url}.well-known/agent-card.json")).json()
        assert [skill["id"] for skill in card["skills"]] == ["code", "review", "explain", "notes"]
        await client.ask("Please use $notes.")
        await client.ask(script({"run": f"cat {file}"}, text="Read it. "))
    first, last = model.requests[0], model.requests[-1]
    assert len(heard(first, "The platform's rule.")) == 1
    assert len(heard(first, "Writes release notes from tags")) == 1
    assert len(heard(first, "Writes release deploy from tags")) == 1
    read = [item for item in last.input if isinstance(item, Output) and "Begin with the newest tag." in item.text]
    assert len(read) == 1, "the sandbox lets it be read"
    (thread,) = (home / "sessions").glob("**/*.jsonl")
    remembered = thread.read_text()
    assert "The rule of every workspace." in remembered
    assert "The rule of this workspace." in remembered
    assert "<name>notes</name>" in remembered, "what the message named is there in full"


def test_a_missing_prompt_file_prevents_the_start(place: Told) -> None:
    process = spawn(place)
    assert process.wait(20) == 2
    assert f"{place.folder}/config.yaml: prompt_files[0]: names {place.folder}/how.md" in place.log.read_text()
