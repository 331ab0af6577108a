"""Who gets a place, who has to wait, and who hears when to come back."""

from contextlib import AsyncExitStack, ExitStack

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.config.settings import LimitsConfig
from codex_workspace.tasks.scheduling import (
    MAX_RETRY_S,
    MAX_UPDATE_INTERVAL_S,
    MIN_RETRY_S,
    PROMISE_S,
    REMEMBERED_TURNS,
    UNKNOWN_TURN_S,
    UPDATE_INTERVAL_S,
    UPDATES_PER_S,
    AdmissionControl,
    QueueFull,
)
from tests.support.memory_codex import in_virtual_time


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def entered(admission: AdmissionControl, *messages: str, context: str = "c", owner: str = "o") -> None:
    """Have messages accepted, one after the other."""
    for message in messages:
        with admission.enter(owner, context, message):
            pass


def refused(
    admission: AdmissionControl, *, context: str = "c", owner: str = "o", message: str = "one too many"
) -> QueueFull:
    with pytest.raises(QueueFull) as refusal, admission.enter(owner, context, message):
        pass
    return refusal.value


# --- Places ---


def test_a_full_context_queue_rejects_the_next_message() -> None:
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=2), Clock())
    entered(admission, "1", "2")
    assert str(refused(admission)) == (
        "The agent is busy: the queue of this context is full (2 messages). Try again in 10 s."
    )
    entered(admission, "3", context="another")
    entered(admission, "1", owner="another owner")
    assert admission.waiting == 4


def test_all_contexts_together_have_so_many_places() -> None:
    admission = AdmissionControl(LimitsConfig(max_waiting=2), Clock())
    entered(admission, "1", context="a")
    entered(admission, "2", context="b")
    assert "its queue is full (2 messages)." in str(refused(admission, context="c"))


def test_the_same_message_again_is_never_refused_and_never_counted_twice() -> None:
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=1), Clock())
    entered(admission, "1", "1", "1")
    assert admission.waiting == 1
    with pytest.raises(ZeroDivisionError), admission.enter("o", "c", "1"):
        raise ZeroDivisionError
    assert admission.waiting == 1, "the first one's place is its own"


def test_a_message_that_cannot_be_stored_releases_its_slot() -> None:
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=1), Clock())
    with pytest.raises(ZeroDivisionError), admission.enter("o", "c", "1"):
        raise ZeroDivisionError
    entered(admission, "2")


def test_an_unclaimed_reservation_expires() -> None:
    clock = Clock()
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=1), clock)
    entered(admission, "never executed")
    clock.now += PROMISE_S - 1
    refused(admission)
    clock.now += 1
    entered(admission, "2")


def test_a_place_that_is_claimed_lasts_as_long_as_it_is_needed() -> None:
    clock = Clock()
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=1), clock)
    entered(admission, "1")
    with admission.claim("o", "c", "1"):
        clock.now += 100 * PROMISE_S
        refused(admission)
    entered(admission, "2")


def test_a_message_of_an_earlier_process_counts_and_is_not_refused() -> None:
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=2), Clock())
    with ExitStack() as places:
        for message in "1234":
            places.enter_context(admission.claim("o", "c", message))
        assert admission.waiting == 4
        refused(admission)
    entered(admission, "5")


def test_an_error_in_a_claimed_place_frees_it() -> None:
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=1), Clock())
    with pytest.raises(ZeroDivisionError), admission.claim("o", "c", "1"):
        raise ZeroDivisionError
    assert admission.waiting == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("123456"))))
def test_no_order_of_messages_brings_more_than_the_bounds(messages: list[tuple[str, str]]) -> None:
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=2, max_waiting=4), Clock())
    accepted = set()
    for context, message in messages:
        try:
            entered(admission, message + context, context=context)
        except QueueFull:
            continue
        accepted.add((context, message))
    assert admission.waiting == len(accepted) <= 4
    assert all(sum(context == each for each, _ in accepted) <= 2 for context in "abc")


# --- Turns ---


async def test_running_turns_share_the_updates() -> None:
    admission = AdmissionControl(LimitsConfig(max_running_turns=200))
    intervals = [admission.update_interval_s]
    async with AsyncExitStack() as stack:
        for number in range(200):
            slot = stack.enter_context(admission.claim("o", str(number), str(number)))
            await stack.enter_async_context(admission.turn(slot))
            intervals.append(admission.update_interval_s)
    assert intervals[:17] == [UPDATE_INTERVAL_S] * 17
    assert intervals[100] == 100 / UPDATES_PER_S
    assert intervals[200] == MAX_UPDATE_INTERVAL_S


async def test_a_turn_that_asks_does_not_count_as_running() -> None:
    admission = AdmissionControl()
    with admission.claim("o", "c", "1") as slot:
        assert admission.running == 0
        async with admission.turn(slot):
            assert admission.running == 1
            admission.release_slot(slot)
            admission.release_slot(slot)
            assert (admission.running, admission.asking) == (0, 1)
            await admission.reacquire_slot(slot)
            await admission.reacquire_slot(slot)
            assert (admission.running, admission.asking) == (1, 0)
            admission.release_slot(slot)
        assert admission.running == 0


async def test_a_turn_that_has_ended_does_not_count_as_running_while_its_answer_is_stored() -> None:
    admission = AdmissionControl(LimitsConfig(max_running_turns=1))
    with admission.claim("o", "first", "1") as ended:
        async with admission.turn(ended):
            pass
        with admission.claim("o", "second", "2") as begun:
            async with admission.turn(begun):
                assert admission.running == 1


@in_virtual_time
async def test_turns_beyond_the_bound_wait_in_the_order_they_came() -> None:
    admission = AdmissionControl(LimitsConfig(max_running_turns=2))
    log: list[tuple[float, str]] = []
    start = anyio.current_time()

    async def run(message: str) -> None:
        with admission.claim("o", message, message) as place:
            async with admission.turn(place):
                log.append((anyio.current_time() - start, message))
                assert admission.running <= 2
                await anyio.sleep(10)

    async with anyio.create_task_group() as tasks:
        for number, message in enumerate("abcde"):
            tasks.start_soon(run, message)
            await anyio.sleep(0.1 * (number < 4))
        await anyio.sleep(1)
        assert (admission.running, admission.waiting) == (2, 3)
    assert [message for _, message in log] == list("abcde")
    assert [round(when) for when, _ in log] == [0, 0, 10, 10, 20]
    assert (admission.running, admission.waiting) == (0, 0)


@in_virtual_time
async def test_a_running_turn_does_not_count_as_waiting() -> None:
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=1))
    entered(admission, "1")
    with admission.claim("o", "c", "1") as place:
        async with admission.turn(place):
            entered(admission, "2")
            refused(admission)


@in_virtual_time
async def test_a_cancelled_waiter_releases_only_its_slot() -> None:
    admission = AdmissionControl(LimitsConfig(max_waiting_per_context=1, max_running_turns=1))
    scopes: dict[str, anyio.CancelScope] = {}
    ran: list[str] = []

    async def run(message: str) -> None:
        with anyio.CancelScope() as scope, admission.claim("o", message, message) as place:
            scopes[message] = scope
            async with admission.turn(place):
                ran.append(message)
                await anyio.sleep(10)

    async with anyio.create_task_group() as tasks:
        for message in ("first", "cancelled", "third"):
            tasks.start_soon(run, message)
            await anyio.sleep(0.1)
        refused(admission, context="cancelled")
        scopes["cancelled"].cancel()
        await anyio.sleep(0.1)
        entered(admission, "again", context="cancelled")
        scopes["first"].cancel()
    assert ran == ["first", "third"]


# --- When to come back ---


async def _turns(admission: AdmissionControl, *seconds: float) -> None:
    for number, duration in enumerate(seconds):
        with admission.claim("o", "c", str(number)) as place:
            async with admission.turn(place):
                await anyio.sleep(duration)


def retry_after(bounds: LimitsConfig, *seconds: float, context: str = "c", full: str = "c") -> int:
    """Return the Retry-After, in seconds, of a refused message after turns of these durations."""
    answers: list[int] = []

    @in_virtual_time
    async def scene() -> None:
        admission = AdmissionControl(bounds)
        await _turns(admission, *seconds)
        entered(admission, "waits", context=full)
        answers.append(refused(admission, context=context).retry_after_s)

    scene()
    return answers[0]


CONTEXT = LimitsConfig(max_waiting_per_context=1, max_running_turns=4)
ALL = LimitsConfig(max_waiting=1, max_running_turns=4)


@pytest.mark.parametrize(
    ("bounds", "seconds", "retry_after_s"),
    [
        pytest.param(CONTEXT, [], UNKNOWN_TURN_S, id="nothing known"),
        pytest.param(CONTEXT, [4, 6], 5, id="a full context waits for a turn"),
        pytest.param(ALL, [18, 22], 5, id="a full agent for one of its turns"),
        pytest.param(CONTEXT, [0.01], MIN_RETRY_S, id="at least"),
        pytest.param(CONTEXT, [3000], MAX_RETRY_S, id="at most"),
        pytest.param(CONTEXT, [3000, *[7] * REMEMBERED_TURNS], 7, id="long ago is forgotten"),
    ],
)
def test_the_time_to_come_back_follows_the_last_turns(
    bounds: LimitsConfig, seconds: list[float], retry_after_s: int
) -> None:
    assert retry_after(bounds, *seconds) == retry_after_s
