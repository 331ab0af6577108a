"""The public stream of one run of `codex exec --json`, made of its lines."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from codex_workspace.agent_events import AgentEvent
from codex_workspace.agent_stream import NONE_USED, AgentStream
from codex_workspace.events import TokenCount, TurnEnded, TurnFailure
from codex_workspace.exec_reader import ExecReader, Told
from codex_workspace.failures import exited

if TYPE_CHECKING:
    from codex_workspace.wire import JsonObject


NO_SESSION: Final = "sessionNotFound"
"""The kind of failure of a run whose session there is not."""


class ExecLines:
    """Takes the lines of one run and gives its events; a further run needs another one. No method raises.

    Args:
        used_before: the `session_usage` of the session's run before; None where that is not known: codex tells the
            tokens of the whole session.
        clock: seconds, for the run's duration, which begins now.
    """

    def __init__(self, used_before: TokenCount | None = NONE_USED, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader: Final = ExecReader()
        self._stream: Final = AgentStream(used_before, clock)
        self._kept: dict[str | None, JsonObject] = {}

    @property
    def thread_id(self) -> str | None:
        """Codex's id of the session, by which it is resumed; None before codex says it."""
        return self._reader.thread_id

    @property
    def session_usage(self) -> TokenCount | None:
        """The tokens of the whole session, this run included; None before codex tells them, at a turn's end."""
        return self._stream.session_usage

    @property
    def ended(self) -> bool:
        """Whether codex has said that the turn is over; its process may take seconds more to end."""
        return self._stream.ended is not None

    @property
    def erred(self) -> bool:
        """Whether codex has said that it gave up."""
        return self._stream.erred

    @property
    def noise(self) -> deque[str]:
        """The last lines that were no events, each shortened."""
        return self._reader.noise

    def feed(self, line: bytes | str) -> list[AgentEvent]:
        """Return the events of a line, without its newline; none where it is no event."""
        told = self._reader.read(line)
        self._stream.session_id = self._reader.thread_id
        return [event for each in told for event in self._say(each)]

    def skipped(self, size: int) -> list[AgentEvent]:
        """Return what is said of a line of `size` bytes that was too long to be read."""
        return self._stream.see(self._reader.skipped(size))

    def finish(
        self, exit_code: int | None = None, failure: TurnFailure | None = None, *, stopped: bool = False
    ) -> list[AgentEvent]:
        """Return the last events of the run, with its `Done`; nothing where it was finished before.

        Args:
            exit_code: codex's, None where it is not known.
            failure: why the run was given up, such as TurnFailure("…", "watchdogTimeout", None, None); its details are
                told, too.
            stopped: whether the caller wanted no more of it.
        """
        if failure is not None and failure.kind == NO_SESSION:
            # What codex has begun instead is nothing that anybody asked for.
            self._stream.session_id = None
        if failure is not None and failure.details is not None:
            failure = replace(failure, message=f"{failure.message}: {failure.details}")
        extra = {key: value for kept in self._kept.values() for key, value in kept.items()}
        if self.ended or failure is not None or stopped:
            return self._stream.end(failure, stopped=stopped, extra=extra)
        if self._stream.erred:
            return self._stream.end(extra=extra)
        if not self._reader.tells_ends and exit_code == 0:
            return [*self._stream.see(TurnEnded("completed", None, None)), *self._stream.end(extra=extra)]
        return self._stream.end(exited(exit_code), extra=extra)

    def _say(self, told: Told) -> list[AgentEvent]:
        """Return what is said of it; fields of a line of which nothing is said wait for the next one of its item."""
        extra = {**self._kept.pop(told.item, {}), **told.extra}
        said = self._stream.see(told.event, extra)
        if extra and not said:
            self._kept[told.item] = extra
        return said
