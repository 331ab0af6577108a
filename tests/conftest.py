"""What tests of every kind may ask for."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from hypothesis import settings

# How long an example takes is the machine's business: other tests run at the same time.
settings.register_profile("beside others", deadline=None)
settings.load_profile("beside others")

HANG_S = 10.0


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Fail a test that takes longer than `HANG_S` seconds, whatever it does: wait, spin, or stand in virtual time."""

    def fail(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"the test did not end within {HANG_S:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
