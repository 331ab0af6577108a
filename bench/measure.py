"""The measurements and their aims: each function makes a group of the report's rows."""

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import anyio

from bench.figures import All, AtMost, AtMostTimes, Row, Unit
from bench.processes import Recipe, Sides, new_setup, open_agent, open_bare, open_floor, open_sides
from bench.sides import Side, cpu_s, rss_mb
from codex_workspace.devkit.script import numbered_text

WORD_CHARS: Final = 10
"""The length of the scripted model's deltas."""

BURST_DELTAS: Final = 5000
STREAM_DELTAS: Final = 200
CONTEXTS: Final = 50
AT_ONCE: Final = 10

REST_S: Final = 0.02
"""Before each measured turn: what the side before it does after its answer must not count as the next one's."""

SETTLE_S: Final = 2.0
"""Before memory is read: what a process does right after its start, or after its last answer, is part of it."""

OURS, FLOOR, BARE = "ours", "floor", "bare"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its expected answer."""

    text: str
    answer: str


def scripted(step: dict[str, object], answer: str) -> Prompt:
    """Return a prompt whose answer is marked as one, as OpenAI's models do; other text may wait for a second."""
    return Prompt(f"@script {json.dumps({**step, 'phase': 'final_answer'})}", answer)


HELLO: Final = scripted({"say": "You said: Hello"}, "You said: Hello")


def numbered(deltas: int, delay_ms: int = 0) -> Prompt:
    """Return a prompt whose answer has `deltas` deltas at intervals of `delay_ms`."""
    return scripted({"chunks": deltas, "delay_ms": delay_ms}, numbered_text(deltas * WORD_CHARS))


@dataclass(frozen=True, slots=True)
class Round:
    """One side's share of a round. Times are of the slowest turn; `whole` turns had the expected answer."""

    first_ms: float
    wall_ms: float
    whole: int


@dataclass(slots=True)
class Samples:
    """The rounds of one side, and its CPU time in ms from each round's start to the next's."""

    rounds: list[Round]
    cpu_ms: list[float]

    @property
    def first_ms(self) -> list[float]:
        return [each.first_ms for each in self.rounds]

    @property
    def wall_ms(self) -> list[float]:
        return [each.wall_ms for each in self.rounds]

    @property
    def whole(self) -> list[float]:
        return [each.whole for each in self.rounds]


@dataclass(frozen=True, slots=True)
class Run:
    """What a group of rows needs: the running sides, how to start more, a folder of its own, the number of rounds."""

    sides: Sides
    recipe: Recipe
    model_url: str
    root: Path
    rounds: int


Contexts = Sequence[str]
"""The contexts of one round, which run at the same time."""


async def interleaved(sides: Mapping[str, Side], prompt: Prompt, rounds: Sequence[Contexts]) -> dict[str, Samples]:
    """Send the prompt in the contexts of each round, to one side after the other, so that noise affects all."""
    samples = {name: Samples([], []) for name in sides}
    used: dict[str, list[float]] = {name: [] for name in sides}
    for contexts in rounds:
        for name, side in sides.items():
            await anyio.sleep(REST_S)
            used[name].append(cpu_s(side))
            turns = await side.run(dict.fromkeys(contexts, prompt.text))
            first_s = max((turn.first_s or 0) for turn in turns)
            wall_s = max(turn.whole_s for turn in turns)
            whole = sum(turn.text == prompt.answer for turn in turns)
            samples[name].rounds.append(Round(first_s * 1000, wall_s * 1000, whole))
    await anyio.sleep(REST_S)
    for name, side in sides.items():
        used[name].append(cpu_s(side))
        samples[name].cpu_ms += [(end - start) * 1000 for start, end in pairwise(used[name])]
    return samples


async def all_whole(sides: Mapping[str, Side], prompt: Prompt, rounds: Sequence[Contexts]) -> dict[str, Samples]:
    """Do as `interleaved`.

    Raises:
        RuntimeError: an answer is not the expected one.
    """
    samples = await interleaved(sides, prompt, rounds)
    for name, each in samples.items():
        if each.whole != [len(contexts) for contexts in rounds]:
            raise RuntimeError(f"{name}: an answer is not whole")
    return samples


def row(label: str, samples: Mapping[str, Samples], value: Callable[[Samples], Sequence[float]]) -> Row:
    """Return a row of one value of all sides."""
    ours, floor, bare = (value(samples[name]) if name in samples else () for name in (OURS, FLOOR, BARE))
    return Row(label, ours, floor, bare)


def _sides(sides: Sides) -> dict[str, Side]:
    return {BARE: sides.bare, FLOOR: sides.floor, OURS: sides.ours}


def _blocking(sides: Sides) -> dict[str, Side]:
    floor, ours = (replace(side, method="SendMessage") for side in (sides.floor, sides.ours))
    return {BARE: sides.bare, FLOOR: floor, OURS: ours}


def _new_contexts(number: int) -> Contexts:
    return [str(uuid.uuid4()) for _ in range(number)]


async def warm_turns(run: Run) -> list[Row]:
    """Measure turns of an existing conversation, one at a time."""
    rows = []
    for way, sides in (("blocking", _blocking(run.sides)), ("streaming", _sides(run.sides))):
        context = _new_contexts(1)
        await all_whole(sides, HELLO, [context] * 2)
        samples = await all_whole(sides, HELLO, [context] * run.rounds)
        rows.append(replace(row(f"warm turn, {way}", samples, lambda each: each.wall_ms), aim=AtMostTimes(1.15)))
        if way == "streaming":
            rows.append(replace(row("first text", samples, lambda each: each.first_ms), aim=AtMostTimes(1.12)))
        rows.append(replace(row(f"CPU of a warm turn, {way}", samples, lambda each: each.cpu_ms), aim=AtMostTimes(5)))
    return rows


async def new_contexts(run: Run) -> list[Row]:
    """Measure the first turn of a conversation, which starts its thread."""
    samples = await all_whole(_sides(run.sides), HELLO, [_new_contexts(1) for _ in range(run.rounds)])
    return [row("first turn of a new context", samples, lambda each: each.wall_ms)]


async def burst(run: Run) -> list[Row]:
    """Measure an answer at codex's full speed, each time in another context, so that the history stays short."""
    sides, rounds = _sides(run.sides), [_new_contexts(1) for _ in range(run.rounds)]
    await all_whole(sides, HELLO, rounds)
    samples = await all_whole(sides, numbered(BURST_DELTAS), rounds)
    label = f"burst of {BURST_DELTAS:,} deltas"
    return [
        replace(row(label, samples, lambda each: each.wall_ms), aim=AtMostTimes(1.15)),
        replace(row(f"CPU of a {label}", samples, lambda each: each.cpu_ms), aim=AtMostTimes(1.6)),
    ]


async def streams(run: Run, number: int) -> list[Row]:
    """Measure streams at a model's speed, all at once, in existing contexts."""
    contexts, prompt = _new_contexts(number), numbered(STREAM_DELTAS, delay_ms=10)
    async with open_sides(run.root, run.model_url) as (sides, _):
        await all_whole(_sides(sides), HELLO, [contexts])
        samples = await interleaved(_sides(sides), prompt, [contexts] * run.rounds)
    label = f"{number} live streams"
    return [
        replace(row(f"{label}: whole", samples, lambda each: each.whole), unit=Unit.COUNT, aim=All(number)),
        replace(row(f"{label}: slowest first text", samples, lambda each: each.first_ms), aim=AtMostTimes(1.1)),
        replace(row(f"{label}: wall", samples, lambda each: each.wall_ms), aim=AtMostTimes(1.1)),
        row(f"{label}: CPU", samples, lambda each: each.cpu_ms),
    ]


async def streams_16(run: Run) -> list[Row]:
    """Measure as many streams as a busy agent has."""
    return await streams(run, 16)


async def streams_100(run: Run) -> list[Row]:
    """Measure nearly as many streams as the default configuration runs at once."""
    return await streams(run, 100)


async def start(run: Run) -> list[Row]:
    """Measure starts with empty state, and the memory of the idle processes."""
    ready_ms: dict[str, list[float]] = {BARE: [], FLOOR: [], OURS: []}
    idle_mb: dict[str, list[float]] = {BARE: [], FLOOR: [], OURS: []}
    for number in range(run.rounds):
        root = run.root / str(number)
        for name, opened in (
            (BARE, open_bare(run.recipe, root / BARE)),
            (FLOOR, open_floor(run.recipe, root / FLOOR)),
            (OURS, open_agent(new_setup(root / OURS, run.model_url))),
        ):
            async with opened as (side, ready_s):
                ready_ms[name].append(ready_s * 1000)
                await anyio.sleep(SETTLE_S)
                idle_mb[name].append(rss_mb(side))
    return [
        Row("start to ready", ready_ms[OURS], ready_ms[FLOOR], ready_ms[BARE], aim=AtMostTimes(4)),
        Row("idle memory", idle_mb[OURS], idle_mb[FLOOR], idle_mb[BARE], Unit.MB, AtMost(80)),
    ]


async def growth(run: Run) -> list[Row]:
    """Measure how much memory further contexts take; the first ones fill what every process has once."""
    grown: dict[str, list[float]] = {BARE: [], FLOOR: [], OURS: []}
    async with open_sides(run.root, run.model_url) as (sides, _):
        named = _sides(sides)
        before = await _after_contexts(named)
        for _ in range(run.rounds):
            after = await _after_contexts(named)
            for name in named:
                grown[name].append(after[name] - before[name])
            before = after
    label = f"memory of {CONTEXTS} further contexts"
    return [Row(label, grown[OURS], grown[FLOOR], grown[BARE], Unit.MB, AtMost(1))]


async def _after_contexts(sides: Mapping[str, Side]) -> dict[str, float]:
    """Run a turn in each of `CONTEXTS` new contexts, and return the memory afterwards."""
    await all_whole(sides, HELLO, [_new_contexts(AT_ONCE) for _ in range(CONTEXTS // AT_ONCE)])
    await anyio.sleep(SETTLE_S)
    return {name: rss_mb(side) for name, side in sides.items()}


async def exec_backend(run: Run) -> list[Row]:
    """Measure warm turns with `codex exec`, which starts a process for each and has no deltas."""
    async with open_agent(new_setup(run.root, run.model_url, "exec")) as (ours, _):
        sides: dict[str, Side] = {BARE: run.sides.bare, OURS: ours}
        context = _new_contexts(1)
        await all_whole(sides, HELLO, [context])
        samples = await all_whole(sides, HELLO, [context] * run.rounds)
    return [
        row("`codex exec`: warm turn", samples, lambda each: each.wall_ms),
        row("`codex exec`: first text", samples, lambda each: each.first_ms),
    ]


Measurement = Callable[[Run], Awaitable[list[Row]]]

GROUPS: Final[Mapping[str, tuple[Measurement, int]]] = {
    "warm": (warm_turns, 40),
    "new": (new_contexts, 10),
    "burst": (burst, 10),
    "streams16": (streams_16, 5),
    "streams100": (streams_100, 3),
    "start": (start, 5),
    "memory": (growth, 3),
    "exec": (exec_backend, 10),
}
"""The groups of rows by name, in the report's order, each with its number of rounds."""
