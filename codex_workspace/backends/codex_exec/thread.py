"""One context's session of `codex exec`: begun or resumed by a process for each turn, one at a time.

The life of a turn that runs is left to `exec_turn`, what codex keeps of it to `exec_record`.
"""

import base64
import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.backends.codex_exec.file_requests import FileRequests
from codex_workspace.backends.codex_exec.history import file_of, new_turn_id, place_in, size_of, tokens_of, turn_outcome
from codex_workspace.backends.codex_exec.mcp_servers import ExecMcpServers, has_failed
from codex_workspace.backends.codex_exec.run_files import Folder, written_run_files
from codex_workspace.backends.codex_exec.runtime import CodexExec
from codex_workspace.backends.codex_exec.turn import ExecTurn, TurnLines
from codex_workspace.common.errors import CodexCannotStart, CodexGone, is_config_error
from codex_workspace.common.values import KeyPath, TomlValue
from codex_workspace.config.prompts import Instructions
from codex_workspace.protocol.codex_events import TokenUsage, TurnCompleted, TurnEvent
from codex_workspace.protocol.failures import LOST_THREAD
from codex_workspace.runtimes.backend import (
    CONTINUE_PROMPT,
    StartedTurn,
    ThreadIdStore,
    ToolCaller,
    TurnInput,
    TurnOptions,
    TurnRecord,
    check_input,
    input_texts,
)
from codex_workspace.runtimes.cli_run import CliRun
from codex_workspace.runtimes.options import RunOptions

logger = logging.getLogger(__name__)

IMAGES_ALONE: Final = "The message is what the images show."
"""What is said with a message of images alone: codex exec takes none without words."""

_DATA: Final = re.compile(r"data:image/([a-z0-9]+)[^,]*;base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ExecThreadOptions:
    """What every run of a session is told; what is not here stands in codex's config.toml.

    instructions: those that config.toml holds. A session keeps those that it began with, so one that was told others
        hears of it.
    config: settings of this context's own. handed: variables of codex's environment, each of them a secret.
    """

    run: RunOptions
    instructions: Instructions = field(default_factory=Instructions)
    config: Mapping[KeyPath, TomlValue] = field(default_factory=dict)
    handed: Mapping[str, str] = field(default_factory=dict)
    total_s: float = 3600.0
    max_text_chars: int = 1 << 20


@dataclass(slots=True)
class ProcessCounts:
    """How many processes were started, how many of them ended against everybody's wish, and how many run."""

    started: int = 0
    died: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class _First:
    """Where in a session the first of a message's turns began."""

    client_message_id: str
    session_id: str
    place: int


class _SessionLost(Exception):
    """Codex cannot resume the session."""


class _ServersFailed(Exception):
    """Codex has begun no session, as MCP servers have failed; the text is what it wrote last."""


class ExecThread:
    """One context: its session, and the queue before it.

    Args:
        codex: runs prompts.
        codex_home: where codex keeps the sessions.
        memory: keeps this context's session id.
        options: what every run is told.
        servers: the MCP servers of every run.
        errands: brings calls of our own tools to the turn. caller: on whose behalf those of this context are made.
        tally: counts the processes.
    """

    def __init__(
        self,
        codex: CodexExec,
        codex_home: Path,
        memory: ThreadIdStore,
        options: ExecThreadOptions,
        servers: ExecMcpServers,
        errands: FileRequests,
        caller: ToolCaller,
        tally: ProcessCounts,
    ) -> None:
        self._codex = codex
        self._home = codex_home
        self._memory = memory
        self._options = options
        self._servers = servers
        self._missed: dict[str, str] = {}
        self._errands = errands
        self._caller = caller
        self._tally = tally
        self._one_at_a_time = anyio.Lock()
        self._first: _First | None = None
        self._has_run = False

    @property
    def busy(self) -> bool:
        """Whether a turn runs or waits."""
        return self._one_at_a_time.locked()

    def check(self, turn_input: TurnInput) -> None:
        """Refuse what codex would refuse, before it waits in line.

        Raises:
            InputRefused: there is nothing in it, or more text than codex takes.
        """
        check_input(turn_input, self._options.max_text_chars)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator["ExecThreadLease"]:
        """Wait until nobody else speaks in this context; while the block is open, nobody else does."""
        async with self._one_at_a_time:
            yield ExecThreadLease(self)

    @asynccontextmanager
    async def _turn(
        self, turn_input: TurnInput, client_message_id: str, own: TurnOptions
    ) -> AsyncIterator[StartedTurn[ExecTurn]]:
        async with written_run_files(partial(_lay_down, turn_input)) as images:
            run = replace(
                self._options.run,
                model=own.model or self._options.run.model,
                cwd=own.cwd or self._options.run.cwd,
                output_schema=own.output_schema,
                images=images,
                config={**self._options.config, **_effort(own.effort)},
            )
            prompt = _prompt(turn_input)
            with self._errands.expecting(self._caller) as expected:
                async with AsyncExitStack() as held:
                    begun = await self._begin(prompt, run, client_message_id, held)
                    expected.begun(begun.turn)
                    with self._counted():
                        yield begun

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._tally.running += 1
        try:
            yield
        except CodexGone:
            self._tally.died += 1
            raise
        finally:
            self._tally.running -= 1

    async def _begin(
        self, prompt: str, run: RunOptions, client_message_id: str, held: AsyncExitStack
    ) -> StartedTurn[ExecTurn]:
        with self._servers.attempt() as attempt:
            while True:
                config = {**run.config, **attempt.config()}
                try:
                    begun = await self._resume(prompt, replace(run, config=config), client_message_id, held)
                except _ServersFailed as failed:
                    await held.aclose()
                    attempt.failed(str(failed))
                else:
                    attempt.began()
                    note = "\n".join(each for each in (begun.note, *self._newly_missed()) if each is not None)
                    return replace(begun, note=note or None)

    def _newly_missed(self) -> list[str]:
        """Return what has to be said of MCP servers that are not there, and was not yet."""
        missed = self._servers.missed()
        new = [sentence for name, sentence in missed.items() if name not in self._missed]
        self._missed = missed
        return new

    async def _resume(
        self, prompt: str, run: RunOptions, client_message_id: str, held: AsyncExitStack
    ) -> StartedTurn[ExecTurn]:
        known = await self._memory.load()
        if known is None:
            return StartedTurn(await self._start(prompt, run, client_message_id, held), None)
        instructions = self._options.instructions
        amended = prompt
        if await self._memory.instructions() != instructions.digest:
            logger.info("session %s is told the instructions, which have changed", known)
            amended = f"{instructions.amendment}\n\n{prompt}"
        try:
            return StartedTurn(await self._start(amended, replace(run, resume=known), client_message_id, held), None)
        except _SessionLost as lost:
            await held.aclose()
            logger.warning("session %s cannot be resumed: %s", known, lost)
            note = f"The earlier conversation cannot be resumed ({lost}); a new one begins."
            return StartedTurn(await self._start(prompt, run, client_message_id, held), note)

    async def _start(self, prompt: str, options: RunOptions, client_message_id: str, held: AsyncExitStack) -> ExecTurn:
        """Start a process, and wait until it has said which session it writes.

        Raises:
            CodexCannotStart: it has ended before.
            CodexGone: something has killed it before.
        """
        place, recorded = 0, None
        if options.resume is not None:
            place = await anyio.to_thread.run_sync(size_of, self._home, options.resume)
            if not self._has_run:
                recorded = await anyio.to_thread.run_sync(tokens_of, self._home, options.resume)
        made: list[TurnLines] = []

        def reads(used_before: TokenUsage | None) -> TurnLines:
            made.append(TurnLines(recorded if used_before is None else used_before))
            return made[0]

        self._tally.started += 1
        following: AbstractAsyncContextManager[CliRun[TurnEvent]] = self._codex.follow(
            prompt, options, reads, self._options.handed
        )
        run = await held.enter_async_context(following)
        events: list[TurnEvent] = []
        while run.session_id is None and not run.is_over:
            events += await run.take()
        if run.session_id is None:
            raise self._why_not(run, events, is_resumed=options.resume is not None)
        # A session whose id is not kept would be lost.
        with anyio.CancelScope(shield=True):
            await self._memory.save(run.session_id, self._options.instructions.digest)
        self._has_run = True
        turn_id = new_turn_id(self._first_place(client_message_id, run.session_id, place))
        return ExecTurn(run, made[0], run.session_id, turn_id, self._options.total_s, events)

    def _first_place(self, client_message_id: str, session_id: str, place: int) -> int:
        """Return where the first of a message's turns began in the session; `place` is where the newest did."""
        if self._first is None or (self._first.client_message_id, self._first.session_id) != (
            client_message_id,
            session_id,
        ):
            self._first = _First(client_message_id, session_id, place)
        return self._first.place

    async def _recorded(
        self, client_message_id: str, turn_input: TurnInput, turn_id: str | None
    ) -> TurnCompleted | TurnRecord:
        session_id = await self._memory.load()
        if session_id is None or turn_id is None:
            return TurnRecord.MISSING
        place = place_in(turn_id)
        if place is None:
            # The app-server has begun with it.
            return TurnRecord.INTERRUPTED
        self._first = _First(client_message_id, session_id, place)
        file = await anyio.to_thread.run_sync(file_of, self._home, session_id)
        if file is None:
            return TurnRecord.MISSING
        return await anyio.to_thread.run_sync(turn_outcome, file, place, (_prompt(turn_input), CONTINUE_PROMPT))

    def _why_not(
        self, run: CliRun[TurnEvent], events: list[TurnEvent], *, is_resumed: bool
    ) -> CodexCannotStart | CodexGone | _SessionLost | _ServersFailed:
        if has_failed(run.full_diagnostics):
            return _ServersFailed(run.full_diagnostics)
        failure = next((event.failure for event in events if isinstance(event, TurnCompleted)), None)
        sentence = failure.message if failure is not None else "codex ended before it had begun"
        diagnostics = run.diagnostics
        lost = [line for line in (sentence, *diagnostics.splitlines()) if LOST_THREAD.search(line)]
        if is_resumed and lost and not is_config_error(diagnostics):
            return _SessionLost(lost[-1])
        self._tally.died += 1
        # A shell that stands before codex says a signal as a code beyond 128.
        if run.exit_code is None or not 0 <= run.exit_code <= 128:
            return CodexGone(sentence, diagnostics)
        return CodexCannotStart(sentence, diagnostics)


class ExecThreadLease:
    """The word in one context: whoever holds it may speak as often as is needed."""

    def __init__(self, conversation: ExecThread) -> None:
        self._conversation = conversation

    def turn(
        self, turn_input: TurnInput, client_message_id: str | None = None, options: TurnOptions | None = None
    ) -> AbstractAsyncContextManager[StartedTurn[ExecTurn]]:
        """Start a turn, and stop it if it still runs when the block is left.

        `client_message_id`: its part before the first slash identifies the message; it is not sent to codex.

        Raises:
            InputRefused: an image or a wish that cannot be given to codex.
            CodexCannotStart: codex is not there, or ends at once.
            CodexGone: something has killed it at once.
        """
        return self._conversation._turn(turn_input, _task_in(client_message_id or ""), options or TurnOptions())

    async def recorded_end(
        self, client_message_id: str, turn_input: TurnInput, turn_id: str | None = None
    ) -> TurnCompleted | TurnRecord:
        """Return how the turn `turn_id` ended by codex's own record, or its trace; none where the id is not known."""
        return await self._conversation._recorded(_task_in(client_message_id), turn_input, turn_id)


def _task_in(client_message_id: str) -> str:
    return client_message_id.partition("/")[0]


def _prompt(turn_input: TurnInput) -> str:
    return "\n\n".join(input_texts(turn_input)) or IMAGES_ALONE


def _effort(effort: str | None) -> dict[KeyPath, TomlValue]:
    return {} if effort is None else {("model_reasoning_effort",): effort}


def _lay_down(turn_input: TurnInput, folder: Folder) -> tuple[Path, ...]:
    """Write the images of a message to files, as `codex exec` takes no others."""
    images: list[Path] = []
    for number, item in enumerate(turn_input):
        match item:
            case {"type": "image", "url": str(url)} if (found := _DATA.match(url)) is not None:
                file = folder() / f"{number}.{found[1].lower()}"
                file.write_bytes(base64.b64decode(url[found.end() :]))
                images.append(file)
            case {"type": "localImage", "path": str(path)}:
                images.append(Path(path))
            case _:
                pass
    return tuple(images)
