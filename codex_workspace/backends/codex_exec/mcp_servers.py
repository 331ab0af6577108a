"""Which MCP servers the runs of `codex exec` have: all of them are waited for, and those that fail are named.

By itself codex exec says nothing of servers that do not start, and calls the model after a second without those that
are slow (0.158 and later). For one that is required it waits as long as that may take to start, and where it fails
codex ends before its session has begun, with the names of all that have failed. So every server is required of a run;
those that fail are left out of the next try, and tried again later.

What a server answers stands among those names, so one may name others. A required server is believed to fail where it
does so while none of ours runs that can be done without; another one that is named for nothing is missing for a minute.
Words: 0.136 to 0.169.
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.common.values import KeyPath, TomlValue
from codex_workspace.protocol.mcp_status import (
    REQUIRED_FAILED,
    RETRY_S,
    ExpectedServers,
    McpServerState,
    McpServerStatus,
    describe_problems,
    failure_reason,
)

logger = logging.getLogger(__name__)

NOT_TOLD: Final = "one of the MCP servers has failed, and codex does not say which"
"""Why a server is left out where a server's own words hide the names."""

_CODE: Final = re.compile(r" \(code -?\d+\)\s*$")


class ExecMcpServers:
    """The servers of every run, of all contexts.

    Args:
        expected: their names, and those that are not even tried.
        required: the names of those without which nothing is answered.
        clock: seconds.
    """

    def __init__(
        self, expected: ExpectedServers, required: Collection[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected = expected
        self.required: Final = frozenset(required)
        self._clock = clock
        self._failed: dict[str, tuple[str, float]] = {}
        self._tried_again: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all that are tried."""
        return self._expected.names

    @property
    def optional(self) -> frozenset[str]:
        """The names of those that can be done without."""
        return frozenset(self.names) - self.required

    @contextmanager
    def attempt(self) -> Iterator["StartAttempt"]:
        """Try to begin a run, without the servers that have failed lately or that another attempt tries just now."""
        now = self._clock()
        again = {name for name, (_, at) in self._failed.items() if now >= at + RETRY_S} - self._tried_again
        self._tried_again |= again
        try:
            yield StartAttempt(self, frozenset(self._failed).difference(again))
        finally:
            self._tried_again -= again

    def of_those_required(self) -> "StartAttempt":
        """Return an attempt with the required servers alone."""
        return StartAttempt(self, self.optional)

    def works_without(self, left_out: Collection[str]) -> None:
        """Take note that a run has begun, and so has all servers but those `left_out`."""
        self._failed = {name: failed for name, failed in self._failed.items() if name in left_out}

    def fails(self, failures: Mapping[str, str]) -> None:
        """Take note of servers that have failed, by their names, and why."""
        now = self._clock()
        for name, why in failures.items():
            logger.warning("the MCP server %s has not started: %s", name, why)
            self._failed[name] = (why, now)

    def missed(self) -> dict[str, str]:
        """Return a sentence for each server that is not there, by its name."""
        known = {name: McpServerStatus(McpServerState.READY) for name in self.names}
        known |= {name: McpServerStatus(McpServerState.FAILED, why) for name, (why, _) in self._failed.items()}
        return describe_problems(self._expected, known)


class StartAttempt:
    """The servers of a run that is to begin, which is tried with fewer of them where some fail."""

    def __init__(self, servers: ExecMcpServers, left_out: frozenset[str]) -> None:
        self.left_out = left_out
        self._servers = servers
        self._not_told: frozenset[str] = frozenset()

    def config(self) -> dict[KeyPath, TomlValue]:
        """Return the settings of a run that waits for all servers but those left out, which it does not start."""
        return {
            ("mcp_servers", name, "enabled" if name in self.left_out else "required"): name not in self.left_out
            for name in self._servers.names
        }

    def failed(self, said: str) -> None:
        """Leave out what has failed, by what codex said last as it ended.

        Raises:
            CodexCannotStart: one fails that cannot be left out: it is required, or not of ours.
        """
        found = failures_in(said, [name for name in self._servers.names if name not in self.left_out])
        dispensable = self._servers.optional - self.left_out
        if not dispensable:
            raise _blamed(said, found, self._servers.required)
        named = {name: why for name, why in found.items() if name in dispensable}
        self._servers.fails(named)
        self._not_told = frozenset() if named else dispensable
        self.left_out |= named.keys() or dispensable

    def began(self) -> None:
        """Take note that the run has begun, and so has all servers but those left out."""
        self._servers.fails(dict.fromkeys(sorted(self._not_told), NOT_TOLD))
        self._servers.works_without(self.left_out)


def _blamed(said: str, found: Mapping[str, str], required: Collection[str]) -> CodexCannotStart:
    whys = [f"{name}: {found[name]}" for name in sorted(found) if name in required]
    if whys:
        where = "mcp_servers of config.yaml"
    elif required:
        where = "mcp_servers of config.yaml, or of codex's config.toml"
    else:
        where = "mcp_servers of codex's config.toml"
    why = "; ".join(whys) or failure_reason(_last_failure(said))
    return CodexCannotStart(f"a required MCP server does not start ({where}): {why}")


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
    return {head[1]: failure_reason(listed[head.end() : end]) for head, end in zip(heads, ends, strict=False)}


def _last_failure(said: str) -> str:
    return _CODE.sub("", said.rpartition(REQUIRED_FAILED)[2].removeprefix(" to initialize: "))
