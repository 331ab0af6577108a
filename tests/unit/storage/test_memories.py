"""What the agent chose to remember, and what was said lately."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from a2a.types import Artifact, Message, Part, Role, Task, TaskState, TaskStatus

from codex_workspace.storage import memories
from codex_workspace.storage.store import Store, open_store
from tests.unit.storage.test_store import ME


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite+aiosqlite:///{tmp_path / 'store.sqlite3'}") as store:
        yield store


async def recalled(store: Store, query: str, owner: str = "me", limit: int = 10) -> list[str]:
    return [memory.content for memory in await store.memories.recall(owner, query, limit)]


async def test_the_best_match_comes_first_and_then_the_newest(store: Store) -> None:
    for content in ("The deployment runs on Friday.", "Ada likes tea.", "Deploy with make; never on Friday."):
        await store.memories.commit("me", content)
    assert await recalled(store, "deploy") == ["Deploy with make; never on Friday.", "The deployment runs on Friday."]
    assert await recalled(store, "ADA friday tea") == [
        "Ada likes tea.",
        "Deploy with make; never on Friday.",
        "The deployment runs on Friday.",
    ]
    assert await recalled(store, "lunch") == []
    assert await recalled(store, "", limit=2) == ["Deploy with make; never on Friday.", "Ada likes tea."]


async def test_memories_are_visible_to_their_owner_only(store: Store) -> None:
    await store.memories.commit("me", "The door's code is 1234.")
    assert await recalled(store, "code", owner="you") == []


async def test_a_repeated_memory_is_stored_once(store: Store) -> None:
    for content in ("one", "two", "one"):
        await store.memories.commit("me", content)
    assert await recalled(store, "") == ["one", "two"]


async def test_the_oldest_memories_over_the_limit_are_removed_per_owner(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memories, "MAX_MEMORIES", 3)
    await store.memories.commit("you", "yours")
    for number in range(5):
        await store.memories.commit("me", f"number {number}")
    assert await recalled(store, "") == ["number 4", "number 3", "number 2"]
    assert await recalled(store, "", owner="you") == ["yours"]


async def test_memories_outlive_the_process(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'store.sqlite3'}"
    async with open_store(url) as store:
        await store.memories.commit("me", "kept")
    async with open_store(url) as store:
        assert await recalled(store, "kept") == ["kept"]


def task(number: int, state: TaskState, context_id: str = "c") -> Task:
    status = TaskStatus(state=state)
    status.timestamp.FromSeconds(1_700_000_000 + number)
    return Task(
        id=f"task-{number}",
        context_id=context_id,
        status=status,
        history=[Message(role=Role.ROLE_USER, message_id=str(number), parts=[Part(text=f"question {number}")])],
        artifacts=[Artifact(artifact_id="answer", parts=[Part(text=f"answer {number}")])],
    )


async def test_the_newest_exchanges_of_a_context_come_oldest_first(store: Store) -> None:
    for number in range(4):
        await store.tasks.save(task(number, TaskState.TASK_STATE_COMPLETED), ME)
    await store.tasks.save(task(7, TaskState.TASK_STATE_COMPLETED, "another"), ME)
    await store.tasks.save(task(8, TaskState.TASK_STATE_SUBMITTED), ME)
    found = await store.conversations.newest("me", "c", 2)
    assert [(each.request, each.reply) for each in found] == [("question 2", "answer 2"), ("question 3", "answer 3")]
    assert found[0].ended_at == "2023-11-14T22:13:22Z"
    assert await store.conversations.newest("you", "c", 2) == []
