"""The session of one context with `codex exec`: each turn is a process that starts or resumes it."""

import base64
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.backends.codex_exec.history import new_turn_id, offset_in, session_file, session_size, turn_outcome
from codex_workspace.backends.codex_exec.mcp_servers import ExecMcpServers, is_server_failure
from codex_workspace.backends.codex_exec.runtime import CodexExec
from codex_workspace.backends.codex_exec.turn import ExecTurn, FileRequests
from codex_workspace.common.errors import CodexCannotStart, CodexGone, is_config_error
from codex_workspace.config.prompts import Instructions
from codex_workspace.protocol.codex_events import LOST_THREAD, TurnCompleted
from codex_workspace.runtimes.backend import (
    CONTINUE_PROMPT,
    StartedTurn,
    ThreadIdStore,
    ToolCaller,
    TurnInput,
    TurnOptions,
    TurnRecord,
    input_texts,
)
from codex_workspace.runtimes.cli_run import CliRun
from codex_workspace.runtimes.launch import Launch, RunOptions
from codex_workspace.runtimes.process import run_folder

logger = logging.getLogger(__name__)

IMAGES_ONLY: Final = "The message consists of the attached images only."
"""The prompt of a message without text, which `codex exec` would reject."""


@dataclass(frozen=True, slots=True)
class ExecThreadOptions:
    """Options of every turn of a thread; codex's config.toml contains the others.

    instructions: those in config.toml. A session keeps the instructions that it started with; if they change, the next
        prompt contains the new ones.
    variables: the context's own environment variables; their values are secrets.
    """

    run: RunOptions
    instructions: Instructions = field(default_factory=Instructions)
    variables: Mapping[str, str] = field(default_factory=dict)
    total_s: float = 3600.0


class _SessionLost(Exception):
    """Codex cannot resume the session."""


class _ServersFailed(Exception):
    """MCP servers failed before a session started; the text is codex's stderr."""


class ExecThread:
    """One context: its session, and the queue for it. It is its own `ThreadLease`.

    Args:
        codex: runs prompts.
        memory: stores this context's session id.
        options: options of every turn.
        servers: the MCP servers of every turn.
        file_requests: connects calls of the file tool to the running turn.
        caller: the context on whose behalf the tools are called.
    """

    def __init__(
        self,
        codex: CodexExec,
        memory: ThreadIdStore,
        options: ExecThreadOptions,
        servers: ExecMcpServers,
        file_requests: FileRequests,
        caller: ToolCaller,
    ) -> None:
        self._codex = codex
        self._memory = memory
        self._options = options
        self._servers = servers
        self._reported_problems: dict[str, str] = {}
        self._file_requests = file_requests
        self._caller = caller
        self._lock = anyio.Lock(fast_acquire=True)

    @property
    def busy(self) -> bool:
        """Whether a turn runs or waits."""
        return self._lock.locked()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator["ExecThread"]:
        """Wait for exclusive access to the session, and hold it while the block is open."""
        async with self._lock:
            yield self

    @asynccontextmanager
    async def turn(
        self, turn_input: TurnInput, client_message_id: str | None = None, options: TurnOptions | None = None
    ) -> AsyncIterator[StartedTurn[ExecTurn]]:
        """Start a turn; leaving the block ends its process.

        Raises:
            InputRefused: codex would reject an image or an option.
            CodexCannotStart: codex cannot be started, or exits before its session starts.
            CodexGone: codex was killed before its session started.
        """
        own = options or TurnOptions()
        with ExitStack() as files:
            config = dict(self._options.run.config)
            if own.effort is not None:
                config["model_reasoning_effort",] = own.effort
            run = replace(
                self._options.run,
                model=own.model or self._options.run.model,
                cwd=own.cwd or self._options.run.cwd,
                output_schema=own.output_schema,
                images=await _write_images(turn_input, self._codex.launch, files),
                config=config,
            )
            with self._file_requests.expecting(self._caller) as calls:
                async with AsyncExitStack() as stack:
                    started = await self._start_with_servers(_prompt(turn_input), run, stack)
                    started.turn.accept(calls)
                    with self._counted():
                        yield started

    async def recorded_end(
        self, client_message_id: str, turn_input: TurnInput, turn_id: str | None = None
    ) -> TurnCompleted | TurnRecord:
        """Return from the session's file how the turn `turn_id` ended, or that it has no end."""
        session_id = await self._memory.load()
        if session_id is None or turn_id is None:
            return TurnRecord.MISSING
        offset = offset_in(turn_id)
        if offset is None:
            # The app-server started the turn.
            return TurnRecord.INTERRUPTED
        file = await anyio.to_thread.run_sync(session_file, self._codex.launch.codex_home, session_id)
        if file is None:
            return TurnRecord.MISSING
        return await anyio.to_thread.run_sync(turn_outcome, file, offset, (_prompt(turn_input), CONTINUE_PROMPT))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._codex.counts.running += 1
        try:
            yield
        except CodexGone:
            self._codex.counts.died += 1
            raise
        finally:
            self._codex.counts.running -= 1

    async def _start_with_servers(self, prompt: str, run: RunOptions, stack: AsyncExitStack) -> StartedTurn[ExecTurn]:
        """Start a turn, and retry without the MCP servers that fail."""
        left_out = self._servers.unavailable()
        while True:
            config = {**run.config, **self._servers.settings(left_out)}
            try:
                started = await self._start_or_resume(prompt, replace(run, config=config), stack)
            except _ServersFailed as failed:
                await stack.aclose()
                left_out = self._servers.leave_out_failed(str(failed), left_out)
            else:
                self._servers.started(left_out)
                problems = self._servers.problems()
                new = [sentence for name, sentence in problems.items() if name not in self._reported_problems]
                self._reported_problems = problems
                return replace(started, note="\n".join(filter(None, (started.note, *new))) or None)

    async def _start_or_resume(self, prompt: str, run: RunOptions, stack: AsyncExitStack) -> StartedTurn[ExecTurn]:
        known = await self._memory.load()
        if known is None:
            return StartedTurn(await self._start(prompt, run, stack), None)
        instructions = self._options.instructions
        amended = prompt
        if await self._memory.instructions() != instructions.digest:
            logger.info("sending changed instructions to session %s", known)
            amended = f"{instructions.amendment}\n\n{prompt}"
        try:
            return StartedTurn(await self._start(amended, replace(run, resume=known), stack), None)
        except _SessionLost as lost:
            await stack.aclose()
            logger.warning("session %s cannot be resumed: %s", known, lost)
            note = f"The earlier conversation cannot be resumed ({lost}); a new one begins."
            return StartedTurn(await self._start(prompt, run, stack), note)

    async def _start(self, prompt: str, options: RunOptions, stack: AsyncExitStack) -> ExecTurn:
        """Start a process, and wait until it reports its session's id.

        Raises:
            CodexCannotStart, CodexGone, _SessionLost, _ServersFailed: it ended before.
        """
        offset = 0
        if options.resume is not None:
            offset = await anyio.to_thread.run_sync(session_size, self._codex.launch.codex_home, options.resume)
        self._codex.counts.started += 1
        run = await stack.enter_async_context(self._codex.run(prompt, options, self._options.variables))
        session_id = await run.wait_for_session()
        if session_id is None:
            raise self._start_error(run, is_resumed=options.resume is not None)
        # Without its id, the session would be lost.
        with anyio.CancelScope(shield=True):
            await self._memory.save(session_id, self._options.instructions.digest)
        return ExecTurn(run, session_id, new_turn_id(offset), self._options.total_s)

    def _start_error(
        self, run: CliRun, *, is_resumed: bool
    ) -> CodexCannotStart | CodexGone | _SessionLost | _ServersFailed:
        if is_server_failure(run.full_diagnostics):
            return _ServersFailed(run.full_diagnostics)
        failure = run.lines.ended.failure if run.lines.ended is not None else None
        sentence = failure.message if failure is not None else "codex ended before its session started"
        diagnostics = run.diagnostics
        lost = [line for line in (sentence, *diagnostics.splitlines()) if LOST_THREAD.search(line)]
        if is_resumed and lost and not is_config_error(diagnostics):
            return _SessionLost(lost[-1])
        self._codex.counts.died += 1
        # A shell that runs codex reports a signal as an exit code above 128.
        if run.exit_code is None or not 0 <= run.exit_code <= 128:
            return CodexGone(sentence, diagnostics)
        return CodexCannotStart(sentence, diagnostics)


def _prompt(turn_input: TurnInput) -> str:
    return "\n\n".join(input_texts(turn_input)) or IMAGES_ONLY


async def _write_images(turn_input: TurnInput, launch: Launch, files: ExitStack) -> tuple[Path, ...]:
    """Write the images of a message, which are data URLs, to files: `codex exec` accepts no other form."""
    urls = [url for item in turn_input if isinstance(url := item.get("url"), str)]
    if not urls:
        return ()
    folder = files.enter_context(run_folder(launch))
    images = tuple(folder / str(number) for number in range(len(urls)))
    await anyio.to_thread.run_sync(_write_data_urls, images, urls)
    return images


def _write_data_urls(files: Iterable[Path], urls: Iterable[str]) -> None:
    for file, url in zip(files, urls, strict=True):
        file.write_bytes(base64.b64decode(url.partition(",")[2]))
