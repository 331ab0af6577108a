"""Carries out a plan's strikes and records them."""

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, assert_never

import anyio
import psutil

from codex_workspace.devkit.model import ScriptedModel
from tests.chaos.clients import Client, Responses
from tests.chaos.plan import Strike, StrikeKind
from tests.chaos.supervised import Supervised
from tests.support.postgresql import PostgresqlServer
from tests.support.waiting import eventually

STARTED_S: Final = 1.0
"""A codex of this age has answered `initialize`; for one that is frozen earlier, the agent waits much longer."""

BUSY_WITHIN_S: Final = 2.0
"""Without a request in progress for this long, all clients are done and no connection can be dropped."""


@dataclass(frozen=True, slots=True)
class StrikeRecord:
    """A strike that happened: its time in the run, and its target."""

    at_s: float
    strike: Strike
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.strike.kind:10}  {self.what}"


@dataclass(slots=True)
class Killer:
    """Strikes an agent, its codex, its model, its clients and its PostgreSQL server, while they send `messages`."""

    agent: Supervised
    model: ScriptedModel
    clients: list[Client]
    responses: Responses
    messages: int
    server: PostgresqlServer | None = None
    strike_log: list[StrikeRecord] = field(default_factory=list)
    start: float = field(default_factory=anyio.current_time)

    async def strike_all(self, strikes: tuple[Strike, ...]) -> None:
        """Carry out the strikes in order, each at its time; pauses and outages run concurrently with later strikes."""
        async with anyio.create_task_group() as lasting:
            for strike in strikes:
                await self.responses.reach(strike.after)
                await anyio.sleep(strike.delay_s)
                try:
                    await self._strike(strike, lasting)
                except TimeoutError:
                    # A finding, so that the report shows the agent's log.
                    self.responses.faults.append(f"{strike.kind} after {strike.after} answers: no process to strike")

    async def _strike(self, strike: Strike, lasting: anyio.abc.TaskGroup) -> None:
        match strike.kind:
            case StrikeKind.CODEX:
                self._signal(strike, signal.SIGKILL, await self._codex())
            case StrikeKind.AGENT:
                self._signal(strike, signal.SIGKILL, await self._agent())
            case StrikeKind.BOTH:
                self._signal(strike, signal.SIGKILL, await self._codex(), await self._agent())
            case StrikeKind.FREEZE:
                self._signal(strike, signal.SIGSTOP, await self._codex(STARTED_S))
            case StrikeKind.PAUSE:
                lasting.start_soon(self._pause, strike, await self._codex())
            case StrikeKind.MODEL:
                lasting.start_soon(self._outage, strike)
            case StrikeKind.DROP:
                await self._drop(strike)
            case StrikeKind.RESTART | StrikeKind.DISCONNECT:
                assert self.server is not None, "the plan is one for PostgreSQL"
                await self._strike_server(strike, self.server)
            case _:
                assert_never(strike.kind)

    async def _agent(self) -> psutil.Process:
        return await eventually(lambda: self.agent.process)

    async def _codex(self, age_s: float = 0.0) -> psutil.Process | None:
        """Wait for a codex; None once all messages are answered, because an agent without work restarts none."""

        def old_enough() -> psutil.Process | bool:
            codex = self.agent.codex()
            if codex is not None and time.time() - codex.create_time() >= age_s:
                return codex
            return len(self.responses.answers) == self.messages

        found = await eventually(old_enough)
        return found if isinstance(found, psutil.Process) else None

    def _signal(self, strike: Strike, number: signal.Signals, *processes: psutil.Process | None) -> None:
        found = [process for process in processes if process is not None]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        self._note(strike, f"{number.name} to {' and '.join(str(process.pid) for process in found) or 'no process'}")

    async def _pause(self, strike: Strike, codex: psutil.Process | None) -> None:
        self._signal(strike, signal.SIGSTOP, codex)
        await anyio.sleep(strike.lasts_s)
        if codex is not None:
            with suppress(psutil.NoSuchProcess):
                codex.send_signal(signal.SIGCONT)

    async def _outage(self, strike: Strike) -> None:
        self._note(strike, f"{strike.outage} for {strike.lasts_s:g} s")
        with self.model.failing(strike.outage):
            await anyio.sleep(strike.lasts_s)

    async def _drop(self, strike: Strike) -> None:
        clients = [*self.clients[strike.victim :], *self.clients[: strike.victim]]
        with anyio.move_on_after(BUSY_WITHIN_S):
            scope = await eventually(lambda: next((each.request_scope for each in clients if each.request_scope), None))
            scope.cancel()
            self._note(strike, "the connection of a client")
            return
        self._note(strike, "no connection: no client has a request in progress")

    async def _strike_server(self, strike: Strike, server: PostgresqlServer) -> None:
        # A stop that was begun is completed, so that the server can be stopped again at the end of the run.
        with anyio.CancelScope(shield=True):
            if strike.kind is StrikeKind.DISCONNECT:
                self._note(strike, "all connections of the database")
                await anyio.to_thread.run_sync(server.disconnect)
                return
            self._note(strike, f"the database server, for {strike.lasts_s:g} s")
            await anyio.to_thread.run_sync(server.stop)
            await anyio.sleep(strike.lasts_s)
            await anyio.to_thread.run_sync(server.start)

    def _note(self, strike: Strike, what: str) -> None:
        self.strike_log.append(StrikeRecord(anyio.current_time() - self.start, strike, what))
