"""How far a message has come, in databases of both kinds: every move there is, and every one that there is not."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import product

import pytest
from a2a.types import Message, Part, Role, SendMessageConfiguration, SendMessageRequest, TaskState
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codex_workspace.storage.database import Database, Work
from codex_workspace.storage.deliveries import (
    MOVES,
    Deliveries,
    Delivery,
    DeliveryKey,
    DeliveryState,
    InvalidTransition,
    MessageIdReused,
    message_digest,
)
from codex_workspace.storage.store import Store, open_database
from tests.unit.storage.test_store import ME, SUBMITTED, WORKING, execute, on_disk, opened, task_of

ACCEPTED, STARTED = DeliveryState.ACCEPTED, DeliveryState.STARTED
ANSWERED, ACKNOWLEDGED = DeliveryState.ANSWERED, DeliveryState.ACKNOWLEDGED

KEY = DeliveryKey("me", "message-1")
UNKNOWN = DeliveryKey("me", "nobody sent this")

Act = Callable[[Deliveries], Awaitable[object]]


def request_of(message_id: str = KEY.message_id, text: str = "Hello") -> SendMessageRequest:
    return SendMessageRequest(message=Message(role=Role.ROLE_USER, message_id=message_id, parts=[Part(text=text)]))


async def accept(
    deliveries: Deliveries, key: DeliveryKey = KEY, task_id: str = "task-1", text: str = "Hello"
) -> Delivery | None:
    request = request_of(key.message_id, text)
    return await deliveries.accept(key, request, message_digest(request), task_id, "context-1")


async def known(deliveries: Deliveries, key: DeliveryKey = KEY) -> Delivery | None:
    return await deliveries.find(key, message_digest(request_of(key.message_id)))


async def state_of(deliveries: Deliveries, key: DeliveryKey = KEY) -> DeliveryState | None:
    found = await known(deliveries, key)
    return None if found is None else found.state


def start(deliveries: Deliveries) -> Awaitable[object]:
    return deliveries.mark_started(KEY, "thread-1", "turn-1")


def answer(deliveries: Deliveries) -> Awaitable[object]:
    return deliveries.mark_answered(KEY, b"the end")


def acknowledge(deliveries: Deliveries) -> Awaitable[object]:
    return deliveries.acknowledge("task-1")


def settle(deliveries: Deliveries) -> Awaitable[object]:
    return deliveries.complete(KEY)


def withdraw(deliveries: Deliveries) -> Awaitable[object]:
    return deliveries.withdraw(KEY)


def die(deliveries: Deliveries) -> Awaitable[object]:
    return deliveries.count_codex_death(KEY)


WAY_TO: dict[DeliveryState, list[Act]] = {
    ACCEPTED: [],
    STARTED: [start],
    ANSWERED: [start, answer],
    ACKNOWLEDGED: [start, answer, acknowledge],
}
CHECKED: dict[DeliveryState, Act] = {STARTED: start, ANSWERED: answer}
"""The moves that are refused where they are illegal; the way to the end is open from everywhere."""


async def bring_to(deliveries: Deliveries, state: DeliveryState) -> Delivery:
    """Accept the message, take it to a state, and return it as it stands."""
    await accept(deliveries)
    for act in WAY_TO[state]:
        await act(deliveries)
    found = await known(deliveries)
    assert found is not None
    assert found.state == state
    return found


def rows(url: str) -> list[tuple[object, ...]]:
    """Return all that the file holds of deliveries, also what a `Delivery` does not show."""
    return on_disk(url, "select * from deliveries order by owner, message_id")


# --- Acceptance ---


async def test_an_accepted_message_is_found_as_it_came(url: str) -> None:
    async with opened(url) as store:
        assert await known(store.deliveries) is None
        accepted = await accept(store.deliveries)
        whole = request_of().SerializeToString()
        assert accepted == Delivery(KEY, "task-1", "context-1", ACCEPTED, whole, None, None, 0, b"")
        assert await known(store.deliveries) == accepted
        assert await store.deliveries.find_by_task("task-1") == accepted


async def test_the_whole_request_is_stored(url: str) -> None:
    request = request_of()
    request.configuration.return_immediately = True
    request.metadata["priority"] = "high"
    async with opened(url) as store:
        kept = await store.deliveries.accept(KEY, request, message_digest(request), "task-1", "context-1")
        assert kept is not None
        assert SendMessageRequest.FromString(kept.request) == request


async def test_the_same_message_again_is_not_accepted_and_changes_nothing(url: str) -> None:
    async with opened(url) as store:
        before = await bring_to(store.deliveries, STARTED)
        assert await accept(store.deliveries, task_id="task-2") is None
        assert await known(store.deliveries) == before
        assert await store.deliveries.find_by_task("task-2") is None


async def test_a_reused_message_id_is_rejected(url: str) -> None:
    async with opened(url) as store:
        first = await accept(store.deliveries)
        with pytest.raises(MessageIdReused, match="messageId message-1 was used for another message"):
            await accept(store.deliveries, task_id="task-2", text="Something else")
        with pytest.raises(MessageIdReused):
            await store.deliveries.find(KEY, message_digest(request_of(text="Something else")))
        assert await known(store.deliveries) == first


async def test_two_senders_may_use_the_same_id(url: str) -> None:
    async with opened(url) as store:
        yours = DeliveryKey("you", KEY.message_id)
        await accept(store.deliveries)
        assert await accept(store.deliveries, yours, "task-2", "Something else") is not None
        await store.deliveries.mark_started(yours, "thread-2", "turn-2")
        await store.deliveries.count_codex_death(yours)
        mine = await known(store.deliveries)
        assert mine is not None
        assert (mine.task_id, mine.state, mine.deaths) == ("task-1", ACCEPTED, 0)


async def accepted_at_once(stores: list[Store], texts: list[str]) -> list[Delivery | BaseException | None]:
    """Have each store accept the message with each of the texts, all at the same time, under a task of its own."""
    attempts = [
        accept(store.deliveries, task_id=f"task-{number}", text=text)
        for number, (store, text) in enumerate(product(stores, texts))
    ]
    return await asyncio.gather(*attempts, return_exceptions=True)


async def test_of_the_same_message_at_once_one_is_accepted(url: str) -> None:
    async with opened(url) as store:
        results = await accepted_at_once([store], ["Hello"] * 5)
        assert [result for result in results if result is not None] == [await known(store.deliveries)]
        assert len(await store.deliveries.unfinished()) == 1


async def test_of_two_bodies_at_once_one_is_refused(url: str) -> None:
    async with opened(url) as store:
        results = await accepted_at_once([store], ["Hello", "Something else"])
        assert sorted(type(result).__name__ for result in results) == ["Delivery", "MessageIdReused"]
        assert len(await store.deliveries.unfinished()) == 1


# --- What makes two bodies the same ---


# Protobuf keeps the entries of a map in an order of its own; with ten or more, the order of insertion shows in it.
NAMES = [f"name {number}" for number in range(50)]


def with_metadata(names: list[str]) -> SendMessageRequest:
    request = request_of()
    request.message.metadata.update({name: {"nested": name} for name in names})
    return request


def asked_in_another_way() -> SendMessageRequest:
    request = request_of()
    request.configuration.CopyFrom(SendMessageConfiguration(return_immediately=True, history_length=3))
    request.metadata["sent"] = "again"
    request.tenant = "another way in"
    return request


def test_the_transport_does_not_change_a_messages_identity() -> None:
    assert message_digest(asked_in_another_way()) == message_digest(request_of())
    assert len(message_digest(request_of())) == 32


def test_the_order_of_metadata_does_not_change_a_messages_identity() -> None:
    one, other = with_metadata(NAMES), with_metadata(NAMES[::-1])
    assert one.SerializeToString() != other.SerializeToString()
    assert message_digest(one) == message_digest(other)


OTHERS = [
    Message(message_id="message-2"),
    Message(context_id="context-2"),
    Message(task_id="task-2"),
    Message(role=Role.ROLE_AGENT),
    Message(parts=[Part(text="")]),
    Message(extensions=["https://example.com/extension"]),
    Message(reference_task_ids=["task-3"]),
]


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: change.ListFields()[0][0].name)
def test_every_field_changes_a_messages_identity(change: Message) -> None:
    other = request_of()
    other.message.MergeFrom(change)
    assert message_digest(other) != message_digest(request_of())


def test_metadata_changes_a_messages_identity() -> None:
    assert message_digest(with_metadata(["name"])) != message_digest(request_of())


@given(st.text(), st.text())
def test_two_texts_are_the_same_message_if_they_are_the_same_text(one: str, other: str) -> None:
    assert (message_digest(request_of(text=one)) == message_digest(request_of(text=other))) == (one == other)


# --- Moves ---


def test_only_these_moves_are_refused() -> None:
    """The drawing in the module's docstring, by what it does not have."""
    illegal = {(state, to) for state, to in product(DeliveryState, repeat=2) if to not in MOVES[state]}
    into_acceptance = {(state, ACCEPTED) for state in DeliveryState}
    after_the_answer = {(ANSWERED, STARTED), (ANSWERED, ANSWERED)}
    after_the_end = {(ACKNOWLEDGED, to) for to in DeliveryState}
    assert illegal == into_acceptance | after_the_answer | after_the_end


PAIRS = list(product(DeliveryState, CHECKED))
LEGAL = [pair for pair in PAIRS if pair[1] in MOVES[pair[0]]]
ILLEGAL = [pair for pair in PAIRS if pair[1] not in MOVES[pair[0]]]


@pytest.mark.parametrize(("state", "to"), LEGAL)
async def test_a_legal_move_is_made(url: str, state: DeliveryState, to: DeliveryState) -> None:
    async with opened(url) as store:
        await bring_to(store.deliveries, state)
        await CHECKED[to](store.deliveries)
        assert await state_of(store.deliveries) == to


@pytest.mark.parametrize(("state", "to"), ILLEGAL)
async def test_an_invalid_transition_is_rejected(url: str, state: DeliveryState, to: DeliveryState) -> None:
    async with opened(url) as store:
        await bring_to(store.deliveries, state)
        before = rows(url)
        with pytest.raises(InvalidTransition, match=f"^message-1: {state} -> {to}$"):
            await CHECKED[to](store.deliveries)
        assert rows(url) == before


async def test_an_unknown_message_has_no_transition(url: str) -> None:
    async with opened(url) as store:
        await accept(store.deliveries)
        with pytest.raises(InvalidTransition, match=r"^nobody sent this: None -> started$"):
            await store.deliveries.mark_started(UNKNOWN, "thread-1", "turn-1")
        with pytest.raises(InvalidTransition, match=r"^nobody sent this: None -> answered$"):
            await store.deliveries.mark_answered(UNKNOWN, b"the end")
        await store.deliveries.complete(UNKNOWN)
        await store.deliveries.withdraw(UNKNOWN)
        await store.deliveries.acknowledge("no such task")
        assert await state_of(store.deliveries) == ACCEPTED
        assert await known(store.deliveries, UNKNOWN) is None


@pytest.mark.parametrize("act", [start, answer, acknowledge, settle, die])
async def test_every_transition_has_a_timestamp(url: str, act: Act) -> None:
    """What is forgotten by age goes by this date: a message that was old when it was finished stays its time."""
    async with opened(url) as store:
        await accept(store.deliveries)
        execute(url, "update deliveries set accepted_at = 1, changed_at = 1")
        before = time.time()
        await act(store.deliveries)
        [(accepted_at, changed_at)] = on_disk(url, "select accepted_at, changed_at from deliveries")
        assert accepted_at == 1
        assert isinstance(changed_at, float)
        assert before <= changed_at <= time.time()


async def test_a_second_acknowledgement_keeps_the_first_timestamp(url: str) -> None:
    async with opened(url) as store:
        await bring_to(store.deliveries, ACKNOWLEDGED)
        before = rows(url)
        await acknowledge(store.deliveries)
        assert rows(url) == before


async def test_a_start_records_its_turn_and_replaces_the_last(url: str) -> None:
    async with opened(url) as store:
        await accept(store.deliveries)
        for turn_id in ("turn-1", "turn-2"):
            await store.deliveries.mark_started(KEY, "thread-1", turn_id)
            found = await known(store.deliveries)
            assert found is not None
            assert (found.thread_id, found.turn_id, found.ending) == ("thread-1", turn_id, b"")


async def test_a_start_that_codex_records_too_is_deferred(url: str) -> None:
    async with open_database(url) as database:
        deliveries = Deliveries(database, stores_starts=False)
        await accept(deliveries)
        await start(deliveries)
        assert on_disk(url, "select state from deliveries") == [(ACCEPTED,)]
        await database.flush()
        found = await known(deliveries)
        assert found is not None
        assert (found.state, found.thread_id, found.turn_id) == (STARTED, "thread-1", "turn-1")


async def test_the_tasks_that_a_new_process_would_resume_are_known(url: str) -> None:
    async with opened(url) as store:
        deliveries = store.deliveries
        accepted = await accept(deliveries)
        assert accepted is not None
        assert deliveries.accepted_tasks == {"task-1"}
        assert not deliveries.is_forgotten(accepted)
        await answer(deliveries)
        assert deliveries.answered_tasks == {"task-1"}
        await acknowledge(deliveries)
        assert not deliveries.accepted_tasks | deliveries.answered_tasks
        await accept(deliveries, UNKNOWN, "task-2")
        await deliveries.withdraw(UNKNOWN)
        assert not deliveries.accepted_tasks


async def test_a_message_that_is_just_being_accepted_is_not_forgotten(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up sees the row as soon as it is written, and the request that accepts it goes on a little later."""
    write, stored, go = Database.write, asyncio.Event(), asyncio.Event()

    async def slow(self: Database, work: Work[bool]) -> bool:
        done = await write(self, work)
        stored.set()
        await go.wait()
        return done

    monkeypatch.setattr(Database, "write", slow)
    async with opened(url) as store:
        accepting = asyncio.create_task(accept(store.deliveries))
        await stored.wait()
        found = await known(store.deliveries)
        assert found is not None
        assert not store.deliveries.is_forgotten(found)
        go.set()
        assert await accepting == found
        assert not store.deliveries.is_forgotten(found)


async def test_the_end_of_an_answer_is_stored_exactly(url: str) -> None:
    ending = bytes(range(256)) * 100
    async with opened(url) as store:
        await bring_to(store.deliveries, STARTED)
        await store.deliveries.mark_answered(KEY, ending)
        await acknowledge(store.deliveries)
        found = await known(store.deliveries)
        assert found is not None
        assert found.ending == ending


@pytest.mark.parametrize("end", [acknowledge, settle])
@pytest.mark.parametrize("state", DeliveryState)
async def test_the_end_can_be_reached_from_every_state(url: str, state: DeliveryState, end: Act) -> None:
    async with opened(url) as store:
        before = await bring_to(store.deliveries, state)
        await end(store.deliveries)
        after = await known(store.deliveries)
        assert after is not None
        assert after.state == ACKNOWLEDGED
        assert (after.thread_id, after.turn_id, after.ending) == (before.thread_id, before.turn_id, before.ending)
        assert await store.deliveries.unfinished() == []


async def test_completing_a_reply_leaves_its_tasks_message_open(url: str) -> None:
    async with opened(url) as store:
        word = DeliveryKey("me", "a word on it")
        await bring_to(store.deliveries, STARTED)
        await accept(store.deliveries, word)
        await store.deliveries.complete(word)
        assert await state_of(store.deliveries, word) == ACKNOWLEDGED
        assert await state_of(store.deliveries) == STARTED


TERMINAL_STATES = [
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_REJECTED,
]


@pytest.mark.parametrize("end", TERMINAL_STATES)
@pytest.mark.parametrize("state", DeliveryState)
async def test_a_tasks_end_in_the_store_acknowledges_all_its_messages_and_no_others(
    url: str, state: DeliveryState, end: TaskState
) -> None:
    async with opened(url) as store:
        other, second = DeliveryKey("me", "of another task"), DeliveryKey("me", "of the same task")
        await accept(store.deliveries, other, "task-2")
        await bring_to(store.deliveries, state)
        await accept(store.deliveries, second)
        for task_state in (SUBMITTED, WORKING, TaskState.TASK_STATE_INPUT_REQUIRED, WORKING):
            await store.tasks.save(task_of(task_state), ME)
            assert await state_of(store.deliveries) == state
        await store.tasks.save(task_of(end), ME)
        await store.tasks.flush()
        assert await state_of(store.deliveries) == ACKNOWLEDGED
        assert await state_of(store.deliveries, second) == ACKNOWLEDGED
        assert await state_of(store.deliveries, other) == ACCEPTED


async def test_a_message_is_withdrawn_as_if_it_had_never_come(url: str) -> None:
    async with opened(url) as store:
        other = DeliveryKey("me", "message-2")
        await accept(store.deliveries, other)
        await accept(store.deliveries)
        await withdraw(store.deliveries)
        assert await known(store.deliveries) is None
        assert await state_of(store.deliveries, other) == ACCEPTED
        assert await accept(store.deliveries, task_id="task-2") is not None


@pytest.mark.parametrize("state", [STARTED, ANSWERED, ACKNOWLEDGED])
async def test_a_started_message_is_not_withdrawn(url: str, state: DeliveryState) -> None:
    async with opened(url) as store:
        await bring_to(store.deliveries, state)
        before = rows(url)
        await withdraw(store.deliveries)
        assert rows(url) == before


async def test_crashes_are_counted_without_a_transition(url: str) -> None:
    async with opened(url) as store:
        await bring_to(store.deliveries, STARTED)
        assert [await store.deliveries.count_codex_death(KEY) for _ in range(3)] == [1, 2, 3]
        await store.deliveries.mark_started(KEY, "thread-1", "turn-2")
        assert await store.deliveries.count_codex_death(KEY) == 4
        found = await known(store.deliveries)
        assert found is not None
        assert (found.state, found.deaths) == (STARTED, 4)


async def test_deaths_at_the_same_time_all_count(url: str) -> None:
    async with opened(url) as store:
        await bring_to(store.deliveries, STARTED)
        counts = await asyncio.gather(*(store.deliveries.count_codex_death(KEY) for _ in range(10)))
        assert sorted(counts) == list(range(1, 11))


# --- What is left to do ---


async def test_a_tasks_newest_message_is_the_one_it_answers(url: str) -> None:
    async with opened(url) as store:
        assert await store.deliveries.find_by_task("task-1") is None
        for message_id in ("z", "a", "m"):
            await accept(store.deliveries, DeliveryKey("me", message_id))
            await accept(store.deliveries, DeliveryKey("me", f"other {message_id}"), "task-2")
            newest = await store.deliveries.find_by_task("task-1")
            assert newest is not None
            assert newest.key.message_id == message_id


async def test_unfinished_messages_are_listed_in_order_of_acceptance(url: str) -> None:
    keys = [DeliveryKey(owner, message_id) for message_id in ("z", "a", "m", "b") for owner in ("you", "me")]
    async with opened(url) as store:
        for key in keys:
            await accept(store.deliveries, key, f"task of {key}")
        # Later moves change nothing of the order.
        for key in reversed(keys[2:]):
            await store.deliveries.mark_started(key, "thread-1", "turn-1")
        await store.deliveries.mark_answered(keys[3], b"the end")
        await store.deliveries.complete(keys[4])
        await store.deliveries.acknowledge(f"task of {keys[5]}")
        left = [*keys[:4], *keys[6:]]
        assert [delivery.key for delivery in await store.deliveries.unfinished()] == left


async def test_the_order_is_that_of_time_not_that_of_the_file(url: str) -> None:
    keys = [DeliveryKey("me", message_id) for message_id in ("z", "a", "m")]
    async with opened(url) as store:
        for key in keys:
            await accept(store.deliveries, key)
        execute(url, "update deliveries set accepted_at = -accepted_at")
        assert [delivery.key for delivery in await store.deliveries.unfinished()] == keys[::-1]
        newest = await store.deliveries.find_by_task("task-1")
        assert newest is not None
        assert newest.key == keys[0]


@pytest.mark.parametrize("state", DeliveryState)
async def test_the_next_process_finds_a_messages_state(url: str, state: DeliveryState) -> None:
    async with opened(url) as store:
        await accept(store.deliveries)
        await die(store.deliveries)
        for act in WAY_TO[state]:
            await act(store.deliveries)
        before = await known(store.deliveries)
    async with opened(url) as store:
        assert before is not None
        assert (before.state, before.deaths) == (state, 1)
        assert await known(store.deliveries) == before == await store.deliveries.find_by_task("task-1")
        assert await store.deliveries.unfinished() == ([] if state == ACKNOWLEDGED else [before])


# --- Any sequence ---


@pytest.fixture
async def deliveries(url: str) -> AsyncIterator[Deliveries]:
    async with opened(url) as store:
        yield store.deliveries


async def after(deliveries: Deliveries, url: str, act: Act, before: Delivery) -> DeliveryState | None:
    """Act, see that it is refused if and only if it is illegal, and return the state that must come of it.

    None stands for a message that is not known any more.
    """
    to = next((state for state, checked in CHECKED.items() if checked is act), None)
    if to is not None and to not in MOVES[before.state]:
        kept = rows(url)
        with pytest.raises(InvalidTransition):
            await act(deliveries)
        assert rows(url) == kept
        return before.state
    await act(deliveries)
    if act is withdraw and before.state == ACCEPTED:
        return None
    if act in (acknowledge, settle):
        return ACKNOWLEDGED
    return to or before.state


# One file for all examples, each beginning with an empty table: opening one takes longer than the moves.
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(st.sampled_from([start, answer, acknowledge, settle, withdraw, die]), max_size=8))
async def test_any_sequence_moves_by_the_table_or_is_refused(deliveries: Deliveries, url: str, acts: list[Act]) -> None:
    execute(url, "delete from deliveries")
    before = await accept(deliveries)
    for act in acts:
        assert before is not None
        expected = await after(deliveries, url, act, before)
        found = await known(deliveries)
        assert (None if found is None else found.state) == expected
        if found is None:
            return
        assert found.deaths == before.deaths + (act is die)
        assert found.ending == (b"the end" if act is answer and found != before else before.ending)
        before = found


async def test_restarts_of_the_agent_are_counted_per_task(url: str) -> None:
    async with opened(url) as store:
        assert [await store.deliveries.count_restart("one") for _ in range(3)] == [1, 2, 3]
        assert await store.deliveries.count_restart("other") == 1
