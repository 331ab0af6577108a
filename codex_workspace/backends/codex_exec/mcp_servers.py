"""Which MCP servers a run of `codex exec` has: it waits for all of them, and is retried without those that fail.

`codex exec` ignores optional servers that fail or are slow. If a required one fails, it exits before its session starts
and names all required servers that failed. So every server is marked as required; those that fail are left out for
`RETRY_S` seconds.

The names are parsed from a message that also contains the servers' own words, so a server can name another one. A
required server's failure is therefore trusted only if no optional server runs.
"""

import logging
import re
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.common.values import KeyPath, TomlValue
from codex_workspace.protocol.app_server_reader import REQUIRED_FAILED, RETRY_S, ExpectedServers, failure_reason

logger = logging.getLogger(__name__)

NOT_NAMED: Final = "an MCP server failed, but codex does not report which one"
"""The reason of a server that was left out because codex's message names none of our servers."""

_CODE: Final = re.compile(r" \(code -?\d+\)\s*$")


class ExecMcpServers:
    """The servers of all runs.

    Args:
        expected: their names, and the reasons of those that are never started.
        required: the names of those without which no message is answered.
    """

    def __init__(self, expected: ExpectedServers, required: Iterable[str] = ()) -> None:
        self._expected = expected
        self.required: Final = frozenset(required)
        self.optional: Final = frozenset(expected.names) - self.required
        self._failed: dict[str, tuple[str, float]] = {}

    def unavailable(self) -> frozenset[str]:
        """Return the servers that failed less than `RETRY_S` seconds ago."""
        return frozenset(name for name, (_, at) in self._failed.items() if time.monotonic() < at + RETRY_S)

    def settings(self, left_out: Collection[str]) -> dict[KeyPath, TomlValue]:
        """Return the settings of a run that waits for all servers but those left out."""
        return {
            ("mcp_servers", name, "enabled" if name in left_out else "required"): name not in left_out
            for name in self._expected.names
        }

    def leave_out_failed(self, stderr: str, left_out: frozenset[str]) -> frozenset[str]:
        """Return the servers to leave out of the next try, after codex exited with `stderr`.

        Raises:
            CodexCannotStart: a server failed that cannot be left out: it is required, or configured by others.
        """
        listed = _CODE.sub("", stderr.rpartition(REQUIRED_FAILED)[2].removeprefix(" to initialize: "))
        failures = find_failures(listed, [name for name in self._expected.names if name not in left_out])
        optional = self.optional - left_out
        if not optional:
            where = "config.yaml" if failures else "codex's config.toml"
            why = "; ".join(f"{name}: {reason}" for name, reason in failures.items()) or failure_reason(listed)
            raise CodexCannotStart(f"a required MCP server does not start (mcp_servers of {where}): {why}")
        named = {name: reason for name, reason in failures.items() if name in optional}
        self._record(named)
        return left_out | (named.keys() or optional)

    def started(self, left_out: Collection[str]) -> None:
        """Record that a run has started with all servers but those left out."""
        self._record(dict.fromkeys(sorted(set(left_out) - self._failed.keys()), NOT_NAMED))
        self._failed = {name: failed for name, failed in self._failed.items() if name in left_out}

    def problems(self) -> dict[str, str]:
        """Return a sentence for each server that is missing, by its name."""
        reasons = {**self._expected.left_out, **{name: reason for name, (reason, _) in self._failed.items()}}
        return {name: f"The MCP server {name} is not available: {reason}." for name, reason in reasons.items()}

    def _record(self, failures: Mapping[str, str]) -> None:
        for name, reason in failures.items():
            logger.warning("the MCP server %s has not started: %s", name, reason)
            self._failed[name] = (reason, time.monotonic())


def is_server_failure(stderr: str) -> bool:
    """Return whether codex exited because a required server failed."""
    return REQUIRED_FAILED in stderr


def find_failures(listed: str, names: Collection[str]) -> Mapping[str, str]:
    """Return why servers among `names` failed, by their names; `listed` has the form `one: why; two: why`."""
    heads = list(re.finditer(rf"(?:^|; )({'|'.join(map(re.escape, names))}): ", listed)) if names else []
    ends = [*(head.start() for head in heads[1:]), len(listed)]
    return {head[1]: failure_reason(listed[head.end() : end]) for head, end in zip(heads, ends, strict=False)}
