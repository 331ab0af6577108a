"""Which MCP servers the runs of `codex exec` have: all of them are waited for, and those that fail are named.

By itself codex exec says nothing of servers that do not start, and calls the model after a second without those that
are slow (0.158 and later). For one that is required it waits as long as that may take to start, and where it fails
codex ends before its session has begun, with the names of all that have failed. So every server is required of a run;
those that fail are left out of the next try, and tried again later. Words: 0.136 to 0.169.
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from codex_workspace.errors import CodexCannotStart
from codex_workspace.mcp_startup import REQUIRED_FAILED, RETRY_S, Expected, Startup, State, reason, troubles
from codex_workspace.toml_text import KeyPath, TomlValue

logger = logging.getLogger(__name__)

NOT_TOLD: Final = "one of the MCP servers has failed, and codex does not say which"
"""Why a server is left out where a server's own words hide the names."""

_CODE: Final = re.compile(r" \(code -?\d+\)\s*$")


class RunServers:
    """The servers of every run, of all contexts.

    Args:
        expected: their names, and those that are not even tried.
        required: the names of those without which nothing is answered.
        clock: seconds.
    """

    def __init__(
        self, expected: Expected, required: Collection[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected = expected
        self.required: Final = frozenset(required)
        self._clock = clock
        self._failed: dict[str, tuple[str, float]] = {}

    @property
    def optional(self) -> frozenset[str]:
        """The names of those that can be done without."""
        return frozenset(self._expected.names) - self.required

    def left_out(self) -> frozenset[str]:
        """Return those that have failed so lately that they are not tried."""
        now = self._clock()
        return frozenset(name for name, (_, at) in self._failed.items() if now < at + RETRY_S)

    def config(self, left_out: Collection[str]) -> dict[KeyPath, TomlValue]:
        """Return the settings of a run that waits for all servers but those `left_out`, which it does not start."""
        return {
            ("mcp_servers", name, "enabled" if name in left_out else "required"): name not in left_out
            for name in self._expected.names
        }

    def began(self, left_out: Collection[str]) -> None:
        """Take note that a run has begun, and so has all servers but those `left_out`."""
        self._failed = {name: failed for name, failed in self._failed.items() if name in left_out}

    def failed(self, said: str, left_out: Collection[str]) -> frozenset[str]:
        """Return those to be left out of the next try, by what codex said last as it ended.

        Raises:
            CodexCannotStart: one of them is required.
        """
        tried = [name for name in self._expected.names if name not in left_out]
        found = failures_in(said, tried)
        # Names behind the first one may be words of that server's: a required one is believed to fail where it stands
        # first, which it does at last.
        if next(iter(found), None) in self.required or not self.optional.difference(left_out):
            needed = self.required.intersection(found)
            whys = [f"{name}: {found[name]}" for name in sorted(needed)] or [reason(_last_failure(said))]
            raise CodexCannotStart(
                f"a required MCP server does not start (mcp_servers of config.yaml): {'; '.join(whys)}"
            )
        found = {name: why for name, why in found.items() if name not in self.required}
        found = found or dict.fromkeys(self.optional.difference(left_out), NOT_TOLD)
        now = self._clock()
        for name, why in found.items():
            logger.warning("the MCP server %s has not started: %s", name, why)
            self._failed[name] = (why, now)
        return frozenset((*left_out, *found))

    def missed(self) -> dict[str, str]:
        """Return a sentence for each server that is not there, by its name."""
        known = {name: Startup(State.READY) for name in self._expected.names}
        known |= {name: Startup(State.FAILED, why) for name, (why, _) in self._failed.items()}
        return troubles(self._expected, known)


def has_failed(said: str) -> bool:
    """Tell whether codex has ended for a server's sake, by what it said last."""
    return REQUIRED_FAILED in said


def failures_in(said: str, names: Collection[str]) -> Mapping[str, str]:
    """Return why servers have failed, by their names, as far as codex's last words say it of one of `names`.

    The shape is `required MCP servers failed to initialize: one: why; two: why (code -32603)`; a beginning that was cut
    off costs the names in it.
    """
    if not names:
        return {}
    listed = _last_failure(said)
    heads = list(re.finditer(rf"(?:^|; )({'|'.join(map(re.escape, names))}): ", listed))
    ends = [*(head.start() for head in heads[1:]), len(listed)]
    return {head[1]: reason(listed[head.end() : end]) for head, end in zip(heads, ends, strict=False)}


def _last_failure(said: str) -> str:
    return _CODE.sub("", said.rpartition(REQUIRED_FAILED)[2].removeprefix(" to initialize: "))
