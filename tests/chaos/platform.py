"""Run `python -m tests.chaos.platform [--seed N] [--messages N] [--deaths N] [--folder F]`: random faults of the
platform of a polling agent, while the agent and the platform are killed and restarted.

The agent and codex are real, the platform is simulated. The exit code is 1 if a message was lost, answered or processed
twice, or if the answers to a sender were not in the order of its messages.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.common.values import JsonObject
from codex_workspace.devkit.model import scripted_model
from codex_workspace.devkit.platform.app import StandInOptions, StandInPlatform, running_platform
from codex_workspace.devkit.platform.faults import Faults
from tests.chaos.supervised import Supervised, end_processes_of, supervised
from tests.chaos.verdict import RESUMED_ANSWER
from tests.e2e.agent_process import AgentSetup
from tests.support.ports import free_port

ME: Final = "11111111-1111-4111-8111-111111111111"
PEERS: Final = tuple(f"2222222{number}-2222-4222-8222-222222222222" for number in range(1, 4))
SHARE: Final = 0.08
"""The probability of each fault: with nine faults, about every second request fails."""

LONGEST_PAUSE_S: Final = 0.2
CODEX: Final = {"max_restarts": 1000, "request_timeout_s": 5}
LOG_LINES: Final = 60


@dataclass(frozen=True, slots=True)
class Sent:
    """A message: its name and its sender, "" for the user."""

    name: str
    sender: str

    @property
    def text(self) -> str:
        """The text of the message."""
        return f"{self.name} @script {json.dumps([{'say': f'answer {self.name} .'}])}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All messages, and the strikes on agent or platform by number of sent messages."""

    seed: int
    messages: tuple[Sent, ...]
    strikes: tuple[tuple[int, str], ...]

    def of(self, sender: str) -> list[Sent]:
        """Return a sender's messages in order."""
        return [message for message in self.messages if message.sender == sender]


def make_plan(seed: int, messages: int, deaths: int) -> Plan:
    """Return the plan of a seed."""
    rng = random.Random(seed)
    senders = ["", *PEERS]
    kinds = ["platform", "SIGKILL", *(rng.choice(["SIGKILL", "SIGTERM", "platform"]) for _ in range(deaths))][:deaths]
    moments = sorted(rng.randrange(1, max(2, messages)) for _ in kinds)
    return Plan(
        seed,
        tuple(Sent(f"m{seed % 1000}-{number:04d}", rng.choice(senders)) for number in range(messages)),
        tuple(zip(moments, rng.sample(kinds, len(kinds)), strict=True)),
    )


@dataclass(slots=True)
class PlatformRunner:
    """Runs the platform and restarts it; `platform` is None during a restart."""

    file: Path
    port: int
    faults: Faults
    platform: StandInPlatform | None = None
    restart: anyio.Event = field(default_factory=anyio.Event)
    started: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> None:
        """Run one platform after another on the same file and port."""
        options = StandInOptions(mode="poll", rate_per_minute=1_000_000)
        while True:
            async with running_platform(self.file, port=self.port, options=options, faults=self.faults) as platform:
                self.platform = platform
                self.started.set()
                await self.restart.wait()
                self.restart = anyio.Event()
            await anyio.sleep(0.3)

    def begin_restart(self) -> None:
        """End the platform and start it again; from now on, `current` waits for the new one."""
        self.platform, self.started = None, anyio.Event()
        self.restart.set()

    async def current(self) -> StandInPlatform:
        """Wait for the platform and return it."""
        while self.platform is None:
            await self.started.wait()
        return self.platform


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run; `wrong` is empty if it passed."""

    plan: Plan
    seconds: float
    faults: dict[str, int]
    exits: Sequence[int]
    wrong: Sequence[str]
    log: str

    @property
    def figures(self) -> str:
        """The figures of the run."""
        strikes = Counter(kind for _, kind in self.plan.strikes)
        return (
            f"seed {self.plan.seed}: {len(self.plan.messages)} messages, {dict(strikes)}, exits {list(self.exits)}, "
            f"{self.seconds:.1f} s; faults met: {self.faults}"
        )

    def __str__(self) -> str:
        """Return all information that helps to find a fault."""
        size = f"--messages {len(self.plan.messages)} --deaths {len(self.plan.strikes)}"
        again = f"python -m tests.chaos.platform --seed {self.plan.seed} {size}"
        return "\n".join((self.log, self.figures, *(f"WRONG: {each}" for each in self.wrong), again))


def longest_s(plan: Plan) -> float:
    """Return the time limit of a run.

    A run takes 0.5 s per message, also at four times the load that the machine has processors: the agent waits most of
    the time, after requests that failed. Such pauses double, so a run can take twice as long by chance.
    """
    return 60 + 1.5 * len(plan.messages) + 15 * len(plan.strikes)


async def run(plan: Plan, root: Path) -> Report:
    """Run a plan in an empty folder."""
    start, faults = anyio.current_time(), Faults(seed=plan.seed)
    runner = PlatformRunner(root / "platform.sqlite3", free_port(), faults)
    wrong: list[str] = []
    notifications, history, rows = list[str](), "", dict[str, list[JsonObject]]()
    async with scripted_model() as model, _running_platforms(runner):
        (root / "config").mkdir()
        platform = await runner.current()
        platform.add_workspace(ME, "first", "poll", token_file=root / "config" / ".auth_token")
        (root / "config" / ".auth_token").write_text("first")
        for peer in PEERS:
            platform.add_workspace(peer, "peer's", "poll")
        environment = {"PLATFORM_URL": f"http://127.0.0.1:{runner.port}", "WORKSPACE_ID": ME}
        config = {"agent_tools": "never", "platform": {"heartbeat_s": 2, "delivery": "auto"}}
        setup = AgentSetup(root, model.base_url, codex=CODEX, config=config, environment=environment)
        async with supervised(setup) as agent:
            with anyio.move_on_after(longest_s(plan)) as bound:
                await platform.until(lambda: platform.workspace(ME).heartbeat != {})
                faults.by_chance(SHARE)
                await _send_and_strike(plan, runner, agent)
                await _until(runner, plan)
                faults.stop()
                # One more message, whose answer is the thread's whole input; meanwhile, duplicates can arrive.
                platform = await runner.current()
                count = len(platform.notifications(ME))
                await platform.canvas_message(ME, '@script [{"repeat": true}]')
                await platform.until(lambda: len(platform.notifications(ME)) > count)
            if bound.cancelled_caught:
                wrong.append("not over in time")
        platform = await runner.current()
        notifications = platform.notifications(ME)
        if not wrong:
            *notifications, history = notifications
        rows = {peer: platform.activity(peer) for peer in PEERS}
    wrong += [f"left over: {process}" for process in await end_processes_of(root)]
    wrong += [*_judge_user(plan, notifications), *_judge_peers(plan, rows), *_judge_history(plan, history)]
    log = "\n".join(setup.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    met = {str(fault): count for fault, count in faults.met.items()}
    return Report(plan, anyio.current_time() - start, met, agent.exits, wrong, log)


@asynccontextmanager
async def _running_platforms(runner: PlatformRunner) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        yield
        tasks.cancel_scope.cancel()


async def _send_and_strike(plan: Plan, runner: PlatformRunner, agent: Supervised) -> None:
    rng, strikes = random.Random(plan.seed), list(plan.strikes)
    for number, message in enumerate(plan.messages):
        platform = await runner.current()
        if message.sender:
            await platform.peer_message(message.sender, ME, message.text, message.name)
        else:
            await platform.canvas_message(ME, message.text, message.name)
        await anyio.sleep(rng.uniform(0, LONGEST_PAUSE_S))
        while strikes and strikes[0][0] <= number:
            await _strike(strikes.pop(0)[1], runner, agent)


async def _strike(kind: str, runner: PlatformRunner, agent: Supervised) -> None:
    if kind == "platform":
        runner.begin_restart()
    elif agent.process is not None:
        agent.process.send_signal(signal.Signals[kind])


async def _until(runner: PlatformRunner, plan: Plan) -> None:
    """Wait until the number of answers equals the number of messages."""
    platform = await runner.current()

    def is_complete() -> bool:
        user_complete = len(platform.notifications(ME)) >= len(plan.of(""))
        return user_complete and all(len(_answers(platform.activity(peer))) >= len(plan.of(peer)) for peer in PEERS)

    await platform.until(is_complete)


def _judge_user(plan: Plan, notifications: Sequence[str]) -> Iterator[str]:
    return _judge_answers("the user", plan.of(""), notifications)


def _judge_peers(plan: Plan, rows: dict[str, list[JsonObject]]) -> Iterator[str]:
    for peer, found in rows.items():
        answers = _answers(found)
        yield from _judge_answers(peer, plan.of(peer), [text for _, text in answers])
        replied = [name for name, _ in answers]
        if replied != [message.name for message in plan.of(peer)]:
            yield f"{peer}: answers to {replied}"


def _answers(rows: Sequence[JsonObject]) -> list[tuple[str, str]]:
    """Return the message that each answer in a peer's inbox replies to, and its text, without repeated deliveries."""
    answers: dict[str, tuple[str, str]] = {}
    for row in rows:
        message = json.loads(json.dumps(row["request_body"]))["params"]["message"]
        answers[message["messageId"]] = message["metadata"]["in_reply_to"], message["parts"][0]["text"]
    return list(answers.values())


def _judge_answers(sender: str, sent: Sequence[Sent], answers: Sequence[str]) -> Iterator[str]:
    expected = [f"answer {message.name} ." for message in sent]
    resumed = sum(text == RESUMED_ANSWER for text in answers)
    found = [text for text in answers if text != RESUMED_ANSWER]
    if len(answers) != len(expected):
        yield f"{sender}: {len(expected)} messages and {len(answers)} answers"
    if [text for text in expected if text in found] != found or len(expected) - len(found) != resumed:
        missing = [text for text in expected if text not in found]
        doubled = [text for text, times in Counter(found).items() if times > 1]
        other = [text for text in found if text not in expected]
        yield f"{sender}: missing {missing}, doubled {doubled}, not asked for {other}, or not in order: {found}"


def _judge_history(plan: Plan, history: str) -> Iterator[str]:
    for message in plan.messages:
        times = history.count(f"{message.name} @script")
        if times != 1:
            yield f"{message.name}: the thread has heard it {times} times"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one chaos test and print its report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.platform", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="the plan's; random by default")
    parser.add_argument("--messages", type=int, default=300)
    parser.add_argument("--deaths", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where the agent works, empty and kept; a temporary one by default")
    options = parser.parse_args(arguments)
    plan = make_plan(options.seed, options.messages, options.deaths)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        report = anyio.run(run, plan, options.folder or Path(folder))
    sys.stdout.write(f"{report if report.wrong else report.figures}\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
