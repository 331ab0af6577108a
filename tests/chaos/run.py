"""One chaos run: clients send messages during the strikes, then send all of them again, and the result is judged."""

from collections.abc import Iterator
from contextlib import AsyncExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.devkit.model import scripted_model
from tests.chaos.clients import Client, Responses, client
from tests.chaos.plan import Plan, SendMode
from tests.chaos.strikes import Killer
from tests.chaos.supervised import end_processes_of, supervised
from tests.chaos.verdict import (
    LOG_LINES,
    Report,
    judge,
    judge_database,
    judge_exits,
    judge_list,
    judge_log,
    judge_strikes,
)
from tests.e2e.agent_process import AgentSetup
from tests.support.ports import free_port
from tests.support.postgresql import PostgresqlServer, running_postgresql

CODEX: Final = {"max_restarts": 1000, "request_timeout_s": 3, "turn_inactivity_timeout_s": 5}
"""No number of deaths counts as a crash loop, and a hanging codex is detected within seconds."""

LIMITS: Final = {"max_running_turns": 3, "max_waiting_per_context": 1, "max_waiting": 3}
"""Low limits, so that some requests are rejected."""


def longest_s(plan: Plan) -> float:
    """Return the time limit of a run."""
    return 60 + 1.5 * len(plan.messages) + 8 * len(plan.strikes)


async def run(plan: Plan, root: Path) -> Report:
    """Run a plan in an empty folder and return the report."""
    with running_postgresql() if plan.postgresql else nullcontext() as server:
        return await _run(plan, root, server)


async def _run(plan: Plan, root: Path, server: PostgresqlServer | None) -> Report:
    responses, histories, start = Responses(), dict[str, str](), anyio.current_time()
    wrong, listed, grpc_port = list[str](), list[str](), free_port()
    environment = {"A2A_GRPC_PORT": str(grpc_port)} | ({"DATABASE_URL": server.create_database()} if server else {})
    async with scripted_model() as model:
        setup = AgentSetup(root, model.base_url, codex=CODEX, limits=LIMITS, environment=environment, port=free_port())
        async with AsyncExitStack() as opened:
            agent = await opened.enter_async_context(supervised(setup))
            clients = [
                await opened.enter_async_context(client(setup.port, grpc_port, responses)) for _ in range(plan.clients)
            ]
            killer = Killer(agent, model, clients, responses, len(plan.messages), server)
            with anyio.move_on_after(longest_s(plan)) as bound:
                await _send_and_strike(plan, clients, killer)
                await _resend_all(plan, clients)
                histories = {each.context_id: (await clients[0].deliver(each)).text for each in plan.reviews}
                listed = await clients[0].list_tasks()
            if bound.cancelled_caught:
                wrong.append(f"not over within {longest_s(plan):g} s; answered: {sorted(responses.answers)}")
    wrong += [f"left over: {process}" for process in await end_processes_of(root)]
    wrong += _findings(killer, plan, histories, listed)
    log = "\n".join(setup.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    seconds = anyio.current_time() - start
    return Report(plan, seconds, killer.strike_log, agent.exits, responses, wrong, log)


async def _send_and_strike(plan: Plan, clients: list[Client], killer: Killer) -> None:
    async with anyio.create_task_group() as tasks:
        for number, each in enumerate(clients):
            tasks.start_soon(each.send_all, plan.of_client(number))
        tasks.start_soon(killer.strike_all, plan.strikes)


async def _resend_all(plan: Plan, clients: list[Client]) -> None:
    """Send every message again in another mode: the answers must be the same."""
    modes = list(SendMode)

    async def one(number: int) -> None:
        for message in plan.of_client(number):
            other = modes[(modes.index(message.mode) + 1 + message.number % (len(modes) - 1)) % len(modes)]
            clients[number].responses.add(message, await clients[number].deliver(message, other))

    async with anyio.create_task_group() as tasks:
        for number in range(len(clients)):
            tasks.start_soon(one, number)


def _findings(killer: Killer, plan: Plan, histories: dict[str, str], listed: list[str]) -> Iterator[str]:
    agent, responses, setup = killer.agent, killer.responses, killer.agent.setup
    database = setup.environment.get("DATABASE_URL") or setup.root / "state" / "workspace.sqlite3"
    return chain(
        responses.faults,
        judge(plan, responses.answers, {context: histories.get(context, "") for context in plan.contexts}),
        judge_database(database, plan),
        judge_list(plan, listed),
        judge_strikes(plan, killer.strike_log),
        judge_exits(agent.exits, postgresql=plan.postgresql),
        judge_log(setup.log.read_text(errors="replace")),
    )
