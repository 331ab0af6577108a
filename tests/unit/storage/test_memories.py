"""What the agent chose to remember, and what was said lately."""

import pytest
from a2a.types import Artifact, Message, Part, Role, Task, TaskState, TaskStatus

from codex_workspace.common.errors import StoreUnavailable
from codex_workspace.storage import memories
from codex_workspace.storage.database import Database
from codex_workspace.storage.memories import ConversationLog, Memories
from tests.support.databases import insert_task


async def recalled(database: Database, query: str, owner: str = "me", limit: int = 10) -> list[str]:
    return [memory.content for memory in await Memories(database).recall(owner, query, limit)]


async def test_the_best_match_comes_first_and_then_the_newest(database: Database) -> None:
    for content in ("The deployment runs on Friday.", "Ada likes tea.", "Deploy with make; never on Friday."):
        await Memories(database).commit("me", content)
    assert await recalled(database, "deploy") == [
        "Deploy with make; never on Friday.",
        "The deployment runs on Friday.",
    ]
    assert await recalled(database, "ADA friday tea") == [
        "Ada likes tea.",
        "Deploy with make; never on Friday.",
        "The deployment runs on Friday.",
    ]
    assert await recalled(database, "lunch") == []
    assert await recalled(database, "", limit=2) == ["Deploy with make; never on Friday.", "Ada likes tea."]


async def test_memories_are_visible_to_their_owner_only(database: Database) -> None:
    await Memories(database).commit("me", "The door's code is 1234.")
    assert await recalled(database, "code", owner="you") == []


async def test_a_repeated_memory_is_stored_once(database: Database) -> None:
    for content in ("one", "two", "one"):
        await Memories(database).commit("me", content)
    assert await recalled(database, "") == ["one", "two"]


async def test_the_oldest_memories_over_the_limit_are_removed_per_owner(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memories, "MAX_MEMORIES", 3)
    await Memories(database).commit("you", "yours")
    for number in range(5):
        await Memories(database).commit("me", f"number {number}")
    assert await recalled(database, "") == ["number 4", "number 3", "number 2"]
    assert await recalled(database, "", owner="you") == ["yours"]


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


async def unavailable() -> None:
    raise StoreUnavailable("The disk is full.")


async def test_the_newest_exchanges_of_a_context_come_oldest_first(database: Database) -> None:
    for number in range(3):
        await insert_task(database, task(number, TaskState.TASK_STATE_COMPLETED))
    await insert_task(database, task(7, TaskState.TASK_STATE_COMPLETED, "another"))
    await insert_task(database, task(8, TaskState.TASK_STATE_SUBMITTED))

    async def flush() -> None:
        await insert_task(database, task(3, TaskState.TASK_STATE_COMPLETED))

    conversations = ConversationLog(database, flush)
    found = await conversations.newest("me", "c", 2)
    assert [(each.request, each.reply) for each in found] == [("question 2", "answer 2"), ("question 3", "answer 3")]
    assert (found[0].state, found[0].ended_at) == ("TASK_STATE_COMPLETED", "2023-11-14T22:13:22Z")


async def test_conversations_are_visible_to_their_owner_only(database: Database) -> None:
    await insert_task(database, task(0, TaskState.TASK_STATE_COMPLETED))
    assert await ConversationLog(database, unavailable).newest("you", "c", 2) == []


async def test_conversations_can_be_read_while_nothing_can_be_stored(database: Database) -> None:
    """A task without an answer has its reason in its status."""
    failed = task(0, TaskState.TASK_STATE_FAILED)
    del failed.artifacts[:]
    failed.status.message.CopyFrom(Message(role=Role.ROLE_AGENT, parts=[Part(text="It was "), Part(text="cut off.")]))
    failed.status.ClearField("timestamp")
    await insert_task(database, failed)
    (found,) = await ConversationLog(database, unavailable).newest("me", "c", 2)
    assert (found.reply, found.state, found.ended_at) == ("It was cut off.", "TASK_STATE_FAILED", "")
