"""How often and how many at once, in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.server.overload import BURST_S, ConcurrencyLimiter, LimitExceeded, RateLimiter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_let_through_and_then_the_rate() -> None:
    clock = Clock()
    rates = RateLimiter(60, clock)
    assert [rates.take("ada") for _ in range(int(BURST_S))] == [0] * int(BURST_S)
    assert rates.take("ada") == 1
    assert rates.take("bob") == 0, "everybody has their own"
    clock.now += 1
    assert [rates.take("ada"), rates.take("ada")] == [0, 1]


def test_who_comes_back_when_told_to_is_let_in() -> None:
    clock = Clock()
    rates = RateLimiter(1, clock)
    assert rates.take("ada") == 0
    wait_s = rates.take("ada")
    assert wait_s == 60
    clock.now += wait_s
    assert rates.take("ada") == 0


@given(st.integers(1, 6000), st.lists(st.floats(0, 5), max_size=200))
def test_no_more_are_let_in_than_may(per_minute: int, pauses: list[float]) -> None:
    clock = Clock()
    rates = RateLimiter(per_minute, clock)
    let_in = 0
    for pause in pauses:
        clock.now += pause
        let_in += rates.take("ada") == 0
    assert let_in <= max(1, per_minute / 60 * BURST_S) + per_minute / 60 * sum(pauses) + 1e-6


def test_places_are_counted_by_one_and_by_all_and_given_back() -> None:
    places = ConcurrencyLimiter(per_principal=1, total=2)
    with places.hold("ada", "streams"):
        with (
            pytest.raises(LimitExceeded, match="you have 1 streams open, and may have 1"),
            places.hold("ada", "streams"),
        ):
            pass
        with (
            places.hold("bob", "streams"),
            pytest.raises(LimitExceeded, match=r"as many streams are open as may \(2\)"),
            places.hold("cy", "streams"),
        ):
            pass
        assert places.count == 1
    assert places.count == 0
    with places.hold("ada", "streams"):
        assert places.count == 1
