"""Polls the platform's inbox: rows become outbox messages, oldest first, no more than the agent has slots for.

Two positions are kept. The stored cursor is behind the last row before which all replies are sent. Reading starts at a
position ahead of it, and everything after that position is read again with each poll, less the rows already known. A
row is only passed when it has been known for some seconds: the platform may still show an earlier row, or one with the
same timestamp, which a read from that row on would leave out.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import anyio
from a2a.server.request_handlers import RequestHandler

from codex_workspace.common.concurrency import backoff
from codex_workspace.config.settings import Settings
from codex_workspace.platform.activity_rows import RESULT, SkippedRow, read_row
from codex_workspace.platform.client import MAX_PAGE, PlatformClient
from codex_workspace.platform.client_types import ActivityRow, CursorLost, PlatformError, WorkspaceRemoved
from codex_workspace.platform.dispatcher import OWNER, Dispatcher, message_from_row, open_dispatcher
from codex_workspace.platform.reply_sender import just_after, look_back, parse_time
from codex_workspace.storage.outbox import Cursor, Outbox, OutboxMessage, OutboxState

logger = logging.getLogger(__name__)

BUSY_POLL_S: Final = 0.2
IDLE_POLL_S: Final = 0.6
"""The poll intervals for `BUSY_S` after a new row, and later: a hundred requests a minute, where the platform allows
600, and a message starts within a second."""

RESULTS_POLL_S: Final = 2.0
"""The poll interval if only delegation results are read."""

BUSY_S: Final = 5.0

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 20.0

PAGE: Final = 30
"""Rows of one request: each may have 1 MB, a response 32."""

SETTLE_S: Final = 5.0

LAST_SETTLE_S: Final = 60.0
"""The same for the last row, if the platform orders rows by time alone: it skips rows with the cursor's timestamp."""

FIRST_WINDOW_S: Final = 600
"""How far a new agent looks back: to what came while it was created, not to what an earlier agent has answered."""

LONGEST_WINDOW_S: Final = 2_592_000
"""The platform's limit."""

CLOCK_SKEW_S: Final = 600.0

WARN_AFTER: Final = 3
"""Failures in a row after which the log warns."""


def inbox_slots(settings: Settings) -> int:
    """Return how many messages of the inbox may be active: half of the queue, so that other callers get in."""
    limits = settings.config.limits
    return max(1, min(limits.max_waiting_per_context, limits.max_waiting) // 2)


class Inbox:
    """One workspace's inbox.

    slots: messages that may be active at a time, twice as many while a task waits for input. owner: the principal of
    the messages. jitter: a factor for each pause.
    """

    def __init__(
        self,
        client: PlatformClient,
        outbox: Outbox,
        dispatcher: Dispatcher,
        slots: int,
        owner: str = OWNER,
        jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.25),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._outbox = outbox
        self._dispatcher = dispatcher
        self._slots = slots
        self._owner = owner
        self._jitter = jitter
        self._clock = clock
        self._position: _KnownRow | None = None
        self._cursor: Cursor | None = None
        self._passed: deque[_KnownRow] = deque()
        self._known: dict[str, _KnownRow] = {}
        self._search_before: str | None = None
        self._new_row_at = clock() - BUSY_S
        self._acknowledges = True
        self._failures = 0
        self._held: list[OutboxMessage] = []
        self._only_results = False

    @property
    def _cursor_name(self) -> str:
        return f"{self._client.workspace_id}/results" if self._only_results else self._client.workspace_id

    async def run(self, stopped: anyio.Event, *, only_results: bool = False) -> None:
        """Poll until `stopped` is set.

        `only_results`: read only the results of delegations, with a cursor of their own; other messages are pushed.

        Raises:
            WorkspaceRemoved: the workspace was removed from the platform.
        """
        self._known.clear()
        self._passed.clear()
        self._search_before = None
        self._only_results = only_results
        self._cursor = await self._outbox.load_cursor(self._cursor_name)
        self._position = None
        if self._cursor is not None:
            self._position = _KnownRow(self._cursor.row_id, self._cursor.created_at, None, self._clock())
        while not stopped.is_set():
            pause_s = await self._poll()
            with anyio.move_on_after(pause_s):
                await stopped.wait()

    async def _poll(self) -> float:
        """Poll once; return the pause before the next poll."""
        try:
            await self._release_held()
            if self._free_slots() > 0:
                await self._read()
            await self._advance_cursor()
        except CursorLost:
            logger.warning("the inbox's cursor is lost; reading again from its time on, without the completed rows")
            self._position = self._search_before = None
            self._known.clear()
            self._passed.clear()
        except WorkspaceRemoved:
            raise
        except PlatformError as error:
            return self._pause_after(error)
        if self._failures >= WARN_AFTER:
            logger.info("the inbox can be read again")
        self._failures = 0
        is_busy = self._clock() - self._new_row_at < BUSY_S
        return (RESULTS_POLL_S if self._only_results else BUSY_POLL_S if is_busy else IDLE_POLL_S) * self._jitter()

    def _pause_after(self, error: PlatformError) -> float:
        self._failures += 1
        pause_s = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._failures - 1) * self._jitter()
        pause_s = max(pause_s, error.retry_after_s)
        log = logger.warning if self._failures == WARN_AFTER else logger.info
        log("cannot read the inbox: %s Retrying in %.1f s", error, pause_s)
        return pause_s

    def _free_slots(self) -> int:
        # A message that answers a question may be behind others.
        return self._slots * (2 if self._dispatcher.has_questions else 1) - self._dispatcher.active

    async def _read(self) -> None:
        """Read from the position on, until there are no more rows or slots."""
        read: dict[str, _KnownRow] = {}
        is_all = False
        try:
            start = self._position or await self._read_first(read)
            is_all = start is not None and await self._read_after(start, read)
        finally:
            # What was read before an error is not read again.
            self._settle(read, is_all=is_all)

    async def _read_first(self, read: dict[str, "_KnownRow"]) -> "_KnownRow | None":
        """Take the rows of the oldest moment, without a position; return the last, None if there is none or no slot."""
        rows = await self._oldest_rows()
        has_slots = await self._take(rows)
        read |= {row.id: self._known[row.id] for row in rows if row.id in self._known}
        return self._remember(rows[-1]) if rows and has_slots else None

    async def _read_after(self, position: "_KnownRow", read: dict[str, "_KnownRow"]) -> bool:
        """Take all rows after `position` and add them to `read`; False if there are not enough slots."""
        limit = PAGE
        while True:
            page = await self._client.page(since_id=position.id, limit=limit)
            has_slots = await self._take(page.rows)
            read |= {row.id: self._known[row.id] for row in page.rows if row.id in self._known}
            if not has_slots:
                return False
            if page.is_last:
                return True
            following = _next_position(page.rows)
            if following is None and limit < MAX_PAGE and not (page.is_reduced and limit > PAGE):
                # All rows of the page have one timestamp, and the next page's may have it, too.
                limit = min(limit * 4, MAX_PAGE)
            else:
                position, limit = self._remember(following or page.rows[-1]), PAGE

    async def _take(self, rows: Sequence[ActivityRow]) -> bool:
        """Dispatch the new rows; False if there are not enough slots."""
        for row in rows:
            if row.id in self._known:
                continue
            if self._free_slots() <= 0:
                return False
            found = self._message(row)
            if isinstance(found, SkippedRow):
                logger.debug("skipping a row of the inbox: %s", found.reason)
            else:
                message = await self._outbox.add(found)
                if message is not None and message.state is OutboxState.RECEIVED:
                    if row.method == RESULT and message.delegation_id in self._client.awaited_delegations:
                        self._held.append(message)
                    else:
                        await self._dispatcher.dispatch(message)
            self._known[row.id] = self._remember(row)
            self._new_row_at = self._clock()
        return True

    def _message(self, row: ActivityRow) -> OutboxMessage | SkippedRow:
        if self._only_results and row.method != RESULT:
            return SkippedRow("it is pushed")
        try:
            found = read_row(row, self._client.workspace_id)
            if isinstance(found, SkippedRow):
                return found
            message = message_from_row(row.id, row.created_at, found, self._owner)
        except Exception:
            # Other agents write rows, and this one would come again with each poll.
            logger.exception("skipping a row of the inbox that cannot be read")
            return SkippedRow("unreadable")
        if row.method == RESULT and message.delegation_id in self._client.reported_delegations:
            return SkippedRow("a result that a tool has returned")
        return message

    async def _release_held(self) -> None:
        """Dispatch the results that a tool waited for and did not return; complete those that it returned."""
        for message in [each for each in self._held if each.delegation_id not in self._client.awaited_delegations]:
            if message.delegation_id in self._client.reported_delegations:
                await self._outbox.complete(message)
            elif message.id not in self._dispatcher.pending:
                await self._dispatcher.dispatch(message)
            self._held.remove(message)

    def _remember(self, row: ActivityRow) -> "_KnownRow":
        return self._known.get(row.id) or _KnownRow(row.id, row.created_at, row.seq, self._clock())

    def _settle(self, read: dict[str, "_KnownRow"], *, is_all: bool) -> None:
        """Move the position past the rows before which no row can appear any more."""
        rows = list(read.values())
        not_read = {row_id: row for row_id, row in self._known.items() if row_id not in read}
        settled = 0
        for number, row in enumerate(rows, 1):
            # Rows that were not read may have the last row's timestamp.
            is_edge = row.seq is None and row.created_at == rows[-1].created_at
            if (is_edge and not is_all) or self._clock() - row.since < (LAST_SETTLE_S if is_edge else SETTLE_S):
                break
            settled = number
        if settled:
            self._position, self._search_before = rows[settled - 1], None
            self._passed.extend(rows[:settled])
        self._known = {row.id: row for row in rows[settled:]} | not_read

    async def _advance_cursor(self) -> None:
        """Store the cursor behind the rows whose replies are sent."""
        done: _KnownRow | None = None
        pending = self._dispatcher.pending
        while self._passed and self._passed[0].id not in pending:
            done = self._passed.popleft()
        if done is None:
            return
        self._cursor = Cursor(done.id, done.created_at)
        await self._outbox.save_cursor(self._cursor_name, self._cursor)
        if done.seq is not None and self._acknowledges and not self._only_results:
            self._acknowledges = await self._client.acknowledge(done.seq)

    async def _oldest_rows(self) -> list[ActivityRow]:
        """Return the rows of the oldest moment that has to be read, in their order."""
        oldest: list[ActivityRow] = []

        def collect(row: ActivityRow) -> bool:
            if row.id not in {each.id for each in oldest}:
                oldest[:] = [row, *(each for each in oldest if each.created_at == row.created_at)]
            return False

        await look_back(self._client, collect, 0.0, before=self._search_before, since_s=self._window_s())
        # The next search begins here.
        self._search_before = just_after(oldest[0].created_at) if oldest else None
        return oldest

    def _window_s(self) -> int:
        """Return how far to look back: to the time of the cursor, if there was one."""
        read_until = 0.0 if self._cursor is None else parse_time(self._cursor.created_at)
        if not read_until:
            return FIRST_WINDOW_S
        return int(min(max(time.time() - read_until, 0.0) + CLOCK_SKEW_S, LONGEST_WINDOW_S))


class PlatformInbox:
    """The inbox as an `InboxSource` of the executor: dispatches messages, sends replies, and polls if `polls`.

    Without `polls` only the replies of earlier messages, and those that missed their deadline, are sent.
    """

    def __init__(self, client: PlatformClient, outbox: Outbox, slots: int, owner: str, *, polls: bool) -> None:
        self._client = client
        self._outbox = outbox
        self._slots = slots
        self._owner = owner
        self._polls = polls
        self.dispatcher: Dispatcher | None = None

    async def run(self, handler: RequestHandler) -> None:
        """Resume the messages of an earlier process, then poll; until cancelled."""
        async with open_dispatcher(self._client, self._outbox, handler, _log_removal) as dispatcher:
            self.dispatcher = dispatcher
            try:
                await dispatcher.resume()
                if self._polls:
                    await Inbox(self._client, self._outbox, dispatcher, self._slots, self._owner).run(anyio.Event())
                await anyio.sleep_forever()
            except WorkspaceRemoved:
                _log_removal()
            finally:
                self.dispatcher = None


def _log_removal() -> None:
    logger.warning("the workspace was removed from the platform; no more messages are read or answered there")


@dataclass(frozen=True, slots=True)
class _KnownRow:
    """What is remembered of a row; `since`: when it was first read."""

    id: str
    created_at: str
    seq: int | None
    since: float


def _next_position(page: Sequence[ActivityRow]) -> ActivityRow | None:
    """Return the last row of a page from which reading on leaves out no row; None if there is none.

    A platform without `seq` leaves out the rows with the cursor's own timestamp.
    """
    if not page or page[-1].seq is not None:
        return page[-1] if page else None
    return next((row for row in reversed(page) if row.created_at != page[-1].created_at), None)
