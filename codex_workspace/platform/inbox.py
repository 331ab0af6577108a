"""The platform's inbox, polled: rows become letters, oldest first, no more than can be worked on.

The cursor of the database stands behind the last row before which all answers are out. What is read goes ahead of it:
from the place up to which the platform can show nothing new any more. Rows of one moment, and rows that become visible
after later ones, are why that place stands back: a row is behind it when it was seen for `SETTLED_S`.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio

from codex_workspace.common.concurrency import backoff
from codex_workspace.platform.activity_rows import RESULT, SkippedRow, read_row
from codex_workspace.platform.client import MAX_PAGE, PlatformClient
from codex_workspace.platform.client_types import ActivityPage, ActivityRow, CursorLost, PlatformError, WorkspaceRemoved
from codex_workspace.platform.dispatcher import message_from_row
from codex_workspace.platform.reply_sender import instant, just_after
from codex_workspace.storage.outbox import Cursor, Outbox, OutboxMessage, OutboxState

logger = logging.getLogger(__name__)

BUSY_POLL_S: Final = 0.2
IDLE_POLL_S: Final = 0.6
"""Between two looks: while there is something new, and when nothing has come for a while. The platform takes 600
requests a minute of a workspace; this is a hundred, and a message is begun within a second."""

RESULTS_POLL_S: Final = 2.0
"""The same where all else is pushed."""

LIVELY_S: Final = 5.0
"""After the last new row it is looked at the shorter interval for so long."""

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 20.0
"""After the first failure, and at the most; in between it doubles."""

PAGE: Final = 30
"""Rows of one look: each may have 1 MB, and an answer of the platform's 32."""

SETTLED_S: Final = 5.0

LAST_SETTLED_S: Final = 60.0
"""The same for the last row of all, where the platform orders by time alone: one more of its moment would be lost."""

FIRST_WINDOW_S: Final = 600
"""How far back is looked where nothing was ever read: what came while the agent was being made, and not what an
earlier agent with another state folder has answered long ago."""

LONGEST_WINDOW_S: Final = 2_592_000
"""The platform's bound."""

CLOCKS_S: Final = 600.0
"""By how much our clock and the platform's may differ."""

EARLIER: Final = 3
"""Rows before the place that are tried where the platform has forgotten the row there."""

WORTH_TELLING: Final = 3
"""Failures in a row after which the log warns."""


class MessageDispatcher(Protocol):
    """Works on letters; `letters.Clerk` in the agent."""

    @property
    def open(self) -> frozenset[str]:
        """The letters whose answers are not out."""

    @property
    def at_work(self) -> int:
        """How many of them take a place: not those that wait for a person, or for a peer to take its answer."""

    @property
    def is_asking(self) -> bool:
        """Whether somebody is asked something; a letter may be what they say to it."""

    async def work_on(self, letter: OutboxMessage) -> None:
        """Give a letter to the agent; returns when it is the agent's, in its order."""


class Inbox:
    """One workspace's inbox.

    at_once: letters that may be at work at a time, twice as many while somebody is asked. jitter: a factor of each
    pause.
    """

    def __init__(
        self,
        api: PlatformClient,
        mail: Outbox,
        desk: MessageDispatcher,
        at_once: int,
        jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.25),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._mail = mail
        self._desk = desk
        self._at_once = at_once
        self._jitter = jitter
        self._clock = clock
        self._place: _Row | None = None
        self._kept: Cursor | None = None
        self._behind: deque[_Row] = deque()
        self._tail: dict[str, _Row] = {}
        self._earlier: deque[_Row] = deque(maxlen=EARLIER)
        self._back: _Back | None = None
        self._news_at = clock() - LIVELY_S
        self._acknowledges = True
        self._failures = 0
        self._held: list[OutboxMessage] = []
        self._only_results = False

    @property
    def _cursor_name(self) -> str:
        return f"{self._api.workspace_id}/results" if self._only_results else self._api.workspace_id

    async def run(self, switched: anyio.Event, *, only_results: bool = False) -> None:
        """Read until the platform delivers in another way; what was begun is handed over before.

        `only_results`: all else is pushed; results of our own delegations stand in the inbox alone. The place of the
        whole inbox stays where it is meanwhile.

        Raises:
            Removed: it is not any more.
        """
        self._tail.clear()
        self._behind.clear()
        self._earlier.clear()
        self._back = None
        self._only_results = only_results
        self._place, self._kept = None, await self._mail.load_cursor(self._cursor_name)
        if self._kept is not None:
            self._place = _Row(self._kept.row_id, self._kept.created_at, None, self._clock())
        while not switched.is_set():
            pause_s = await self._look()
            with anyio.move_on_after(pause_s):
                await switched.wait()

    async def _look(self) -> float:
        """Look once; return how long to wait before the next time."""
        try:
            await self._let_go()
            if self._room() > 0:
                await self._read()
            await self._advance()
        except CursorLost:
            self._step_back()
        except WorkspaceRemoved:
            raise
        except PlatformError as error:
            return self._pause_after(error)
        is_lively = self._clock() - self._news_at < LIVELY_S
        if self._only_results:
            return RESULTS_POLL_S * self._jitter()
        return (BUSY_POLL_S if is_lively else IDLE_POLL_S) * self._jitter()

    def _step_back(self) -> None:
        """Read from an earlier row on that may still be there; without one, from the cursor's time."""
        self._tail.clear()
        if self._earlier:
            self._place = self._earlier.pop()
            return
        if self._place is not None:
            logger.warning("the inbox's cursor is lost; it is read again from that time on, less what is done")
        self._place = self._back = None
        self._behind.clear()

    async def _page(self, since: "_Row | None", before: str | None, window_s: int | None, limit: int) -> ActivityPage:
        page = await self._api.page(
            since_id=None if since is None else since.id, since_s=window_s, before=before, limit=limit
        )
        if self._failures >= WORTH_TELLING:
            logger.info("the inbox can be read again")
        self._failures = 0
        return page

    def _room(self) -> int:
        # What the asked one says may stand behind what others say, and that behind the question.
        return self._at_once * (2 if self._desk.is_asking else 1) - self._desk.at_work

    def _pause_after(self, error: PlatformError) -> float:
        self._failures += 1
        grown_s = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._failures - 1) * self._jitter()
        pause_s = max(grown_s, error.retry_after_s)
        log = logger.warning if self._failures == WORTH_TELLING else logger.info
        log("the inbox cannot be read: %s Tried again in %.1f s", error, pause_s)
        return pause_s

    async def _read(self) -> None:
        """Read from the place on until there is nothing more, or no room."""
        tail: dict[str, _Row] = {}
        is_all = False
        try:
            start = self._place or await self._first(tail)
            is_all = start is not None and await self._walk(start, tail)
        finally:
            # Where reading breaks off, what was read is not read again.
            self._settle(tail, is_all=is_all)

    async def _first(self, tail: dict[str, "_Row"]) -> "_Row | None":
        """Have the rows of the first moment taken, and return the last of them; None without such, or without room.

        The place is theirs when they have settled, like that of all others.
        """
        first = await self._oldest()
        has_room = await self._take(first)
        tail |= {row.id: self._tail[row.id] for row in first if row.id in self._tail}
        return self._seen(first[-1]) if first and has_room else None

    async def _walk(self, place: "_Row", tail: dict[str, "_Row"]) -> bool:
        """Have all rows after `place` taken, and put them into `tail` as they come; False where there is no room."""
        limit = PAGE
        while True:
            page = await self._page(place, None, None, limit)
            has_room = await self._take(page.rows)
            tail |= {row.id: self._tail[row.id] for row in page.rows if row.id in self._tail}
            if not has_room:
                return False
            if page.is_last:
                return True
            ahead = _ahead(page.rows)
            if ahead is None and limit < MAX_PAGE and not (page.is_reduced and limit > PAGE):
                # All of a page is of one moment, and so may be what follows.
                limit = min(limit * 4, MAX_PAGE)
            else:
                place, limit = self._seen(ahead or page.rows[-1]), PAGE

    async def _take(self, rows: Sequence[ActivityRow]) -> bool:
        """Have the rows worked on that are new; False where there is no room for all of them."""
        for row in rows:
            if row.id in self._tail:
                continue
            if self._room() <= 0:
                return False
            found = self._letter(row)
            if isinstance(found, SkippedRow):
                logger.debug("a row of the inbox is passed over: %s", found.why)
            else:
                letter = await self._mail.add(found)
                if letter is not None and letter.state is OutboxState.RECEIVED:
                    if row.method == RESULT and letter.delegation_id in self._api.awaited_delegations:
                        self._held.append(letter)
                    else:
                        await self._desk.work_on(letter)
            self._tail[row.id] = self._seen(row)
            self._news_at = self._clock()
        return True

    def _letter(self, row: ActivityRow) -> OutboxMessage | SkippedRow:
        if self._only_results and row.method != RESULT:
            return SkippedRow("it is pushed")
        try:
            found = read_row(row, self._api.workspace_id)
            if isinstance(found, SkippedRow):
                return found
            letter = message_from_row(row.id, row.created_at, found)
        except Exception:
            # It is what others have written, and comes again with each look: one row must not stop all others.
            logger.exception("a row of the inbox cannot be read, and is passed over")
            return SkippedRow("unreadable")
        if row.method == RESULT and letter.delegation_id in self._api.reported_delegations:
            return SkippedRow("a result that a tool has told")
        return letter

    async def _let_go(self) -> None:
        """Have the held results worked on whose tools have ended without telling them; what they have told is done."""
        for letter in [each for each in self._held if each.delegation_id not in self._api.awaited_delegations]:
            if letter.delegation_id in self._api.reported_delegations:
                await self._mail.complete(letter)
            elif letter.id not in self._desk.open:
                await self._desk.work_on(letter)
            self._held.remove(letter)

    def _seen(self, row: ActivityRow) -> "_Row":
        return self._tail.get(row.id) or _Row(row.id, row.created_at, row.seq, self._clock())

    def _settle(self, tail: dict[str, "_Row"], *, is_all: bool) -> None:
        """Move the place over rows that nothing can come before any more."""
        rows = list(tail.values())
        last = rows[-1] if rows else None
        unread = {row_id: row for row_id, row in self._tail.items() if row_id not in tail}
        settled = 0
        for number, row in enumerate(rows, 1):
            # Where more was there than was taken, some of it may be of the last row's moment.
            is_edge = last is not None and row.seq is None and row.created_at == last.created_at
            settled_s = LAST_SETTLED_S if is_edge else SETTLED_S
            if (is_edge and not is_all) or self._clock() - row.since < settled_s:
                break
            settled = number
        if settled:
            self._earlier.extend([row for row in (self._place,) if row is not None])
            self._place, self._back = rows[settled - 1], None
            self._behind.extend(rows[:settled])
        self._tail = {row.id: row for row in rows[settled:]} | unread

    async def _advance(self) -> None:
        """Move the cursor of the database behind what is done."""
        done: _Row | None = None
        is_open = self._desk.open
        while self._behind and self._behind[0].id not in is_open:
            done = self._behind.popleft()
        if done is None:
            return
        self._kept = Cursor(done.id, done.created_at)
        await self._mail.save_cursor(self._cursor_name, self._kept)
        if done.seq is not None and self._acknowledges and not self._only_results:
            self._acknowledges = await self._api.acknowledge(done.seq)

    async def _oldest(self) -> list[ActivityRow]:
        """Return the rows of the first moment that has to be looked at; there is no cursor."""
        back = self._back = self._back or _Back(self._window_s())
        while True:
            page = await self._page(None, back.before, back.window_s, back.limit)
            if page.rows:
                back.first = [row for row in page.rows if row.created_at == page.rows[0].created_at]
            moment = None if page.is_last else just_after(page.rows[0].created_at)
            is_stuck = moment is not None and moment == back.before
            if is_stuck and page.is_reduced:
                # More of this moment cannot be read; earlier ones can.
                moment = page.rows[0].created_at
            elif is_stuck and back.limit < MAX_PAGE:
                back.limit = min(back.limit * 4, MAX_PAGE)
            elif moment is None or is_stuck:
                back.before = just_after(back.first[0].created_at) if back.first else None
                return back.first
            back.before = moment

    def _window_s(self) -> int:
        """Return how far back to look: to where the cursor stood, if there was one."""
        if self._kept is None or not instant(self._kept.created_at):
            return FIRST_WINDOW_S
        return int(min(max(time.time() - instant(self._kept.created_at), 0.0) + CLOCKS_S, LONGEST_WINDOW_S))


@dataclass(slots=True)
class _Back:
    """How far back the inbox was looked through for its first row: a search that goes on where it broke off, or at the
    first moment, for what may still be seen of it or before it."""

    window_s: int
    before: str | None = None
    limit: int = PAGE
    first: list[ActivityRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    """What is kept of a row: its place, and since when it is known."""

    id: str
    created_at: str
    seq: int | None
    since: float


def _ahead(page: Sequence[ActivityRow]) -> ActivityRow | None:
    """Return the row of a page behind which reading on leaves nothing out; None where there is none.

    A platform without `seq` orders by time alone, and passes over what has the cursor's own.
    """
    if not page or page[-1].seq is not None:
        return page[-1] if page else None
    return next((row for row in reversed(page) if row.created_at != page[-1].created_at), None)
