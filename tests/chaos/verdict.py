"""Judges a run: whether something was lost, duplicated or left over, and its figures."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from codex_workspace.runtimes.backend import CONTINUE_PROMPT
from tests.chaos.clients import Responses
from tests.chaos.plan import Message, Plan
from tests.chaos.strikes import StrikeRecord
from tests.chaos.task_responses import TERMINAL, Answer

LOG_LINES: Final = 60

SENDS: Final = 2
"""How often each message is sent until it is answered: during the strikes, and after them."""

RESUMED_ANSWER: Final = f"You said: {CONTINUE_PROMPT}"
"""The scripted model's answer if an interrupted turn is resumed."""

UNJUSTIFIED_FAILURES: Final = frozenset(
    {"", "None", "internal", "unknown", "CodexGone", "CodexCannotStart", "CodexRefused", "StoreUnavailable"}
)
"""Failure codes that no strike justifies: a single death of codex must not fail a message."""


@dataclass(frozen=True, slots=True)
class Report:
    """A run and its findings. `wrong` is empty if nothing was lost; `log` holds the agent's last lines."""

    plan: Plan
    seconds: float
    strike_log: Sequence[StrikeRecord]
    exits: Sequence[int]
    responses: Responses
    wrong: Sequence[str]
    log: str

    @property
    def figures(self) -> str:
        """The figures of the run."""
        answers = self.responses.answers.values()
        ends = [each[0] for each in answers if each]
        states = Counter(end.state if end.state != "failed" else f"failed {end.failure}" for end in ends)
        resumed = sum(end.text == RESUMED_ANSWER for end in ends)
        return "\n".join(
            (
                f"seed {self.plan.seed}: {len(self.plan.messages)} messages from {self.plan.clients} clients, "
                f"{len(self.strike_log)} strikes, {'PostgreSQL' if self.plan.postgresql else 'SQLite'}, "
                f"{self.seconds:.1f} s",
                f"strikes: {_counted(str(each.strike.kind) for each in self.strike_log)}",
                f"ends of the agent, by exit code: {_counted(str(code) for code in self.exits)}",
                f"tries: {_listed(self.responses.tries)}",
                f"tries again: {_listed(self.responses.retries)}",
                f"answers heard: {sum(map(len, answers))}; tasks: {_listed(states)}; {resumed} went on",
            )
        )

    def __str__(self) -> str:
        """Return all information that helps to find a fault; begins and ends with the command that repeats the run."""
        size = f"MESSAGES={len(self.plan.messages)} STRIKES={len(self.plan.strikes)}"
        size += " DATABASE=postgresql" if self.plan.postgresql else ""
        strike_log = [f"  {each}" for each in self.strike_log]
        found = [f"- {each}" for each in self.wrong]
        again = f"make chaos SEED={self.plan.seed} {size}"
        return "\n".join((again, self.figures, *strike_log, "the agent's log:", self.log, "WRONG:", *found, again))


def judge(plan: Plan, answers: Mapping[int, Sequence[Answer]], histories: Mapping[str, str]) -> Iterator[str]:
    """Yield the faults in the clients' answers and in the threads' histories."""
    for message in plan.messages:
        responses = answers.get(message.number, ())
        different = set(responses)
        if len(different) != 1:
            yield f"{_description(message)}: {len(different)} different answers: {different}"
            continue
        if len(responses) != SENDS:
            yield f"{_description(message)}: {len(responses)} answers, although it was sent {SENDS} times"
        (answer,) = different
        yield from (f"{_description(message)}: {fault}" for fault in _judge_answer(message, answer))
        wanted = {1} if answer.state == "completed" else {0, 1}
        times = {context: history.count(f"user: {message.name} ") for context, history in histories.items()}
        if times[message.context_id] not in wanted or sum(times.values()) != times[message.context_id]:
            yield f"{_description(message)}: {answer.state}, and the threads' memory holds it so often: {times}"


def _judge_answer(message: Message, answer: Answer) -> Iterator[str]:
    match answer.state:
        case "completed":
            if answer.text not in (message.answer, RESUMED_ANSWER):
                yield f"the answer is {answer.text!r}, not {message.answer!r}"
        case "failed":
            if answer.failure in UNJUSTIFIED_FAILURES:
                yield f"failed without need ({answer.failure}): {answer.sentence}"
        case state:
            yield f"ended as {state}: {answer.sentence}"


def judge_strikes(plan: Plan, strike_log: Sequence[StrikeRecord]) -> Iterator[str]:
    """Yield a finding if strikes of the plan did not happen."""
    if len(strike_log) != len(plan.strikes):
        yield f"{len(strike_log)} of {len(plan.strikes)} strikes happened"


def judge_list(plan: Plan, listed: Sequence[str]) -> Iterator[str]:
    """Yield the faults in the list of all tasks: each message and review has one."""
    expected = len(plan.messages) + len(plan.reviews)
    if not len(listed) == len(set(listed)) == expected:
        yield f"ListTasks returned {len(listed)} tasks, {len(set(listed))} different ones, for {expected} messages"


def judge_database(place: Path | str, plan: Plan) -> Iterator[str]:
    """Yield the faults in the store of a stopped agent: a file of SQLite, or a URL of PostgreSQL."""
    with closing(sqlite3.connect(place) if isinstance(place, Path) else psycopg.connect(place)) as database:
        deliveries = database.execute("select message_id, state, task_id from deliveries").fetchall()
        tasks = {row[0]: row[1] for row in database.execute("select id, state from tasks").fetchall()}
    known = Counter(message_id for message_id, _, _ in deliveries)
    for message in plan.messages:
        if known[message.message_id] != 1:
            yield f"{_description(message)}: written down {known[message.message_id]} times"
    for message_id, state, task_id in deliveries:
        if state != "acknowledged":
            yield f"the delivery of {message_id} is {state}, its task {task_id} {tasks.get(task_id)}"
    for task_id, state in tasks.items():
        if str(state).removeprefix("TASK_STATE_").lower() not in TERMINAL:
            yield f"task {task_id} is {state}"
    if len(tasks) != len(deliveries):
        yield f"{len(tasks)} tasks for {len(deliveries)} messages"


def judge_exits(exits: Sequence[int], *, postgresql: bool = False) -> Iterator[str]:
    """Yield unexpected exit codes of the agent.

    Expected are SIGKILL, 3 if its codex was killed during the start, 2 if the PostgreSQL server was away then, and 0 at
    the final stop.
    """
    *before, last = exits
    if last != 0:
        yield f"the agent was told to stop and ended with exit code {last}"
    if unexpected := [code for code in before if code not in ((-9, 3, 2) if postgresql else (-9, 3))]:
        yield f"the agent ended by itself, with {unexpected}"


def judge_log(log: str) -> Iterator[str]:
    """Yield the faults in the agent's log."""
    if "Traceback" in log:
        start = log.index("Traceback")
        yield f"the agent's log holds a traceback: {log[max(0, start - 300) : start + 3000]}"


def _description(message: Message) -> str:
    context = message.context_id or "the main context"
    return f"{message.name} ({message.kind}, client {message.client}, {context}, {message.mode})"


def _counted(words: Iterable[str]) -> str:
    return _listed(Counter(words))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in sorted(counts.items(), key=lambda each: -each[1])) or "none"
