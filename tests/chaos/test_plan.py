"""The plan of a chaos run is reproducible and complete."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.devkit.model_requests import MARKER, Message, Request, choose_step
from tests.chaos.plan import WEIGHTS, MessageKind, SendMode, StrikeKind, make_plan


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 20))
def test_a_seed_reproduces_its_plan(seed: int, messages: int, strikes: int) -> None:
    assert make_plan(seed, messages, strikes) == make_plan(seed, messages, strikes)


def test_another_seed_gives_a_different_plan() -> None:
    assert make_plan(1, 30, 8) != make_plan(2, 30, 8)


@given(st.integers(0, 2**32))
def test_the_short_form_has_every_kind_of_strike(seed: int) -> None:
    plan = make_plan(seed, 30, 8)
    assert {strike.kind for strike in plan.strikes} == set(WEIGHTS)
    assert len(plan.strikes) == 8
    assert all(strike.after < 27 for strike in plan.strikes)
    assert [strike.after for strike in plan.strikes] == sorted(strike.after for strike in plan.strikes)


@given(st.integers(0, 2**32))
def test_with_postgresql_every_kind_of_strike_happens(seed: int) -> None:
    assert {strike.kind for strike in make_plan(seed, 30, 9, postgresql=True).strikes} == set(StrikeKind)


def test_the_long_form_has_every_kind_of_message_sent_in_every_way() -> None:
    plan = make_plan(3, 500, 100)
    assert len({message.message_id for message in plan.messages}) == 500
    assert set(Counter((message.kind, message.mode) for message in plan.messages)) == {
        (kind, mode) for kind in set(MessageKind) - {MessageKind.REPEAT} for mode in SendMode
    }
    assert sorted(m.number for client in range(plan.clients) for m in plan.of_client(client)) == list(range(500))


def test_the_model_can_parse_every_message() -> None:
    for message in make_plan(1, 100, 0).messages:
        assert message.text.startswith(f"{message.name} {MARKER}")
        request = Request("/v1/responses", None, 0.0, input=(Message("user", message.text),))
        assert choose_step(request).step.fault is not None or message.kind not in (
            MessageKind.HICCUP,
            MessageKind.REFUSED,
        )
