"""Polls the platform's inbox: rows become outbox messages, oldest first, no more than the agent has slots for.

Each poll reads a page after the stored cursor, less the rows already known. The cursor passes a row only some seconds
after the row was read: the platform may still show an earlier row, or one with the same timestamp. The outbox drops a
row that an earlier process has stored.
"""

import logging
import math
import random
import time
from typing import Final

import anyio
from a2a.server.request_handlers import RequestHandler

from codex_workspace.common.concurrency import backoff
from codex_workspace.config.settings import OPERATOR, Settings
from codex_workspace.platform.activity_rows import RESULT, SkippedRow, read_row
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.client_types import ActivityRow, CursorLost, PlatformError, WorkspaceRemoved, parse_time
from codex_workspace.platform.deadline_reply import DeadlineReplies
from codex_workspace.platform.dispatcher import OWNER, Dispatcher, open_dispatcher
from codex_workspace.platform.reply_sender import look_back
from codex_workspace.storage.outbox import Cursor, Outbox, OutboxMessage, OutboxState

logger = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""The poll interval: 120 requests a minute, where the platform allows 600, and a message starts within a second."""

RESULTS_POLL_S: Final = 2.0
"""The poll interval if only delegation results are read."""

LONGEST_PAUSE_S: Final = 20.0

PAGE: Final = 100

SETTLE_S: Final = 5.0

LAST_SETTLE_S: Final = 60.0
"""The same for rows with the last timestamp: the platform of May leaves out rows with the cursor's timestamp."""

FIRST_WINDOW_S: Final = 600.0
"""How far a new agent looks back: to what came while it was created, not to what an earlier agent has answered."""

LONGEST_WINDOW_S: Final = 2_592_000.0
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
    the messages.
    """

    def __init__(
        self, client: PlatformClient, outbox: Outbox, dispatcher: Dispatcher, slots: int, owner: str = OWNER
    ) -> None:
        self._client = client
        self._outbox = outbox
        self._dispatcher = dispatcher
        self._slots = slots
        self._owner = owner
        self._cursor: Cursor | None = None
        self._since = 0.0
        self._read_at: dict[str, float] = {}
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
        self._only_results = only_results
        self._read_at.clear()
        self._since = time.time() - FIRST_WINDOW_S
        self._cursor = await self._outbox.load_cursor(self._cursor_name)
        while not stopped.is_set():
            pause_s = await self._poll()
            with anyio.move_on_after(pause_s * random.uniform(0.75, 1.25)):
                await stopped.wait()

    async def _poll(self) -> float:
        """Poll once; return the pause before the next poll."""
        try:
            await self._release_held()
            if self._dispatcher.free_slots(self._slots) > 0:
                await self._read()
        except WorkspaceRemoved:
            raise
        except PlatformError as error:
            if self._cursor is None or not isinstance(error, CursorLost):
                return self._pause_after(error)
            logger.warning(
                "the inbox's cursor is invalid; reading again from its timestamp and skipping completed rows"
            )
            self._since, self._cursor = parse_time(self._cursor.created_at) - CLOCK_SKEW_S, None
        self._failures = 0
        return RESULTS_POLL_S if self._only_results else POLL_S

    def _pause_after(self, error: PlatformError) -> float:
        pause_s = max(backoff(POLL_S, LONGEST_PAUSE_S, self._failures), error.retry_after_s)
        self._failures += 1
        log = logger.warning if self._failures == WARN_AFTER else logger.info
        log("cannot read the inbox: %s Retrying in about %.1f s", error, pause_s)
        return pause_s

    async def _read(self) -> None:
        """Read the rows after the cursor and take the new ones, as far as there are slots."""
        if self._cursor is not None:
            rows = await self._client.activity(since_id=self._cursor.row_id, limit=PAGE)
        else:
            window_s = min(time.time() - self._since, LONGEST_WINDOW_S)
            # The rest of the window is read after the cursor, once there is one.
            rows = (await look_back(self._client, lambda _row: True, since_s=int(window_s), keep=PAGE))[::-1]
        for row in rows:
            if row.id not in self._read_at:
                if self._dispatcher.free_slots(self._slots) <= 0:
                    break
                await self._take(row)
                self._read_at[row.id] = time.monotonic()
        self._read_at = {row.id: self._read_at[row.id] for row in rows if row.id in self._read_at}
        await self._move_cursor(rows)

    async def _take(self, row: ActivityRow) -> None:
        """Store a row's message, and dispatch it unless a tool waits for it."""
        if self._only_results and row.method != RESULT:
            return
        try:
            message = read_row(row, self._client.workspace_id, self._owner)
        except SkippedRow as skipped:
            logger.debug("skipping a row of the inbox: %s", skipped)
            return
        except Exception:
            # Other agents write rows, and this one would come again with each poll.
            logger.exception("skipping a row of the inbox that cannot be read")
            return
        added = await self._outbox.add(message)
        if added is None or added.state is not OutboxState.RECEIVED:
            return
        if row.method == RESULT:
            self._held.append(added)
            await self._release_held()
        else:
            await self._dispatcher.dispatch(added)

    async def _release_held(self) -> None:
        """Complete the results that a tool has returned; dispatch the others for which no tool waits."""
        for message in [each for each in self._held if each.delegation_id not in self._client.awaited_delegations]:
            self._held.remove(message)
            if message.delegation_id in self._client.reported_delegations:
                await self._outbox.complete(message)
            else:
                await self._dispatcher.dispatch(message)

    async def _move_cursor(self, rows: list[ActivityRow]) -> None:
        """Store the last row before which no row can appear any more."""
        settled: ActivityRow | None = None
        for row in rows:
            age_s = time.monotonic() - self._read_at.get(row.id, math.inf)
            if age_s < (LAST_SETTLE_S if row.created_at == rows[-1].created_at else SETTLE_S):
                break
            settled = row
        if settled is None:
            return
        self._cursor = Cursor(settled.id, settled.created_at)
        await self._outbox.save_cursor(self._cursor_name, self._cursor)
        if settled.seq is not None and self._acknowledges and not self._only_results:
            self._acknowledges = await self._client.acknowledge(settled.seq)


class PlatformInbox:
    """The inbox as the executor's `InboxSource`: sends answers that are late, and polls if so configured."""

    def __init__(self, client: PlatformClient, outbox: Outbox, replies: DeadlineReplies, settings: Settings) -> None:
        self._client = client
        self._outbox = outbox
        self._replies = replies
        self._settings = settings

    async def run(self, handler: RequestHandler) -> None:
        """Resume the messages of an earlier process, then poll; until cancelled."""
        config = self._settings.config.platform
        async with open_dispatcher(self._client, self._outbox, handler) as dispatcher:
            self._replies.late, self._replies.deadline_s = dispatcher, config.answer_within_s
            try:
                await dispatcher.resume()
                if config.delivery == "poll":
                    await self._poll(dispatcher)
            except WorkspaceRemoved:
                logger.warning("the workspace was removed from the platform; its inbox is no longer read")
            await anyio.sleep_forever()

    async def _poll(self, dispatcher: Dispatcher) -> None:
        """Read the inbox. Its messages belong to the same principal, and so the same thread, as the runtime's."""
        inbox = Inbox(self._client, self._outbox, dispatcher, inbox_slots(self._settings), OPERATOR)
        await inbox.run(anyio.Event())
