"""What the stand-in of the platform does wrong, on demand: the next time, or by chance.

Which request meets a fault is decided here; what it looks like, `platform_stand_in` knows.
"""

import random
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from codex_workspace.common.errors import ConfigError


class Fault(StrEnum):
    """Something that goes wrong."""

    UNAUTHORIZED = "401"
    """The token is refused this once, although it is good."""

    ROTATED = "rotate"
    """The token is void from now on; the new one is in the workspace's token file. None where it has no such file."""

    TOO_MANY = "429"
    """Refused as one request too many, with `Retry-After`."""

    FAILING = "5xx"
    """Answered by 500, 502 or 503; nothing was done."""

    LATE = "latency"
    """Answered late."""

    LOST = "lost"
    """Done, and the connection ends before the answer is sent."""

    PRUNED = "pruned"
    """The row that the cursor names is forgotten before the request is looked at."""

    SAME_TIME = "same-time"
    """A new row has the time of the row before."""

    TEXT_BODY = "text-body"
    """A row's request body is given as a text that holds its JSON."""


class Faults:
    """Which faults there are, and how often; by the same seed the same ones, for the same requests in the same order.

    late_s: how late an answer is at most. retry_after_s: what a request too many is told.
    """

    def __init__(self, shares: Mapping[Fault, float] | None = None, seed: int = 0) -> None:
        self.late_s = 0.3
        self.retry_after_s = 1
        self.random: Final = random.Random(seed)
        self.met: Final[dict[Fault, int]] = dict.fromkeys(Fault, 0)
        self._shares = dict(shares or {})
        self._next: list[tuple[Fault, str]] = []

    def by_chance(self, share: float, *faults: Fault) -> None:
        """Let faults happen to a share of the requests, between 0 and 1; all faults where none is named."""
        for fault in faults or tuple(Fault):
            self._shares[fault] = share

    def next_time(self, fault: Fault, path: str = "", times: int = 1) -> None:
        """Let a fault happen to the next so many requests whose path holds `path`."""
        self._next += [(fault, path)] * times

    def stop(self) -> None:
        """Do all right from now on."""
        self._shares.clear()
        self._next.clear()

    def happens(self, fault: Fault, path: str) -> bool:
        """Tell whether a fault happens now."""
        planned = next((each for each in self._next if each[0] == fault and each[1] in path), None)
        if planned is not None:
            self._next.remove(planned)
        share = self._shares.get(fault, 0.0)
        happens = planned is not None or (share > 0 and self.random.random() < share)
        self.met[fault] += happens
        return happens


def read_faults(text: str) -> dict[Fault, float]:
    """Read faults and their shares: `429,lost=0.2`; a share that is not named is 0.1, and `all` are all.

    Raises:
        ConfigError: there is no such fault, or the share is none.
    """
    shares: dict[Fault, float] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, _, share = each.partition("=")
        try:
            value = float(share or "0.1")
            faults = list(Fault) if name == "all" else [Fault(name)]
        except ValueError as error:
            known = ", ".join(("all", *Fault))
            raise ConfigError(f"--faults: {each!r} is none; write names out of {known}, each with =SHARE") from error
        if not 0 <= value <= 1:
            raise ConfigError(f"--faults: the share of {name} is not between 0 and 1")
        shares |= dict.fromkeys(faults, value)
    return shares
