"""The measurements and their targets: each function creates one table of the report."""

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import psutil

from bench.figures import AtLeast, AtMostMore, AtMostTimes, Below, Row, Table, Unit, median, percentile
from bench.processes import Bench, new_setup, open_bare, open_exec_agent, open_runtime
from bench.sides import Outcome, Side
from codex_workspace.devkit.script import numbered_text
from tests.e2e.agent_process import running_agent
from tests.support.ports import free_port

WORD_CHARS: Final = 10
"""The length of the scripted model's deltas."""

POLL_S: Final = 0.005
MEGABYTE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the measurements; with the defaults they take less than a minute."""

    turns: int = 30
    bursts: int = 6
    deltas: int = 5000
    parallel_rounds: int = 3
    contexts: int = 8
    turns_each: int = 4
    streams: int = 16
    stream_deltas: int = 200
    starts: int = 5


SMALLEST: Final = Sizes(1, 1, 50, 1, 2, 2, 2, 20, 1)
"""For a test of the benchmark itself."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its expected answer."""

    text: str
    answer: str


HELLO: Final = Prompt("Hello", "You said: Hello")


def numbered(deltas: int, delay_ms: int = 0) -> Prompt:
    """Return a prompt whose answer has `deltas` deltas at intervals of `delay_ms`."""
    step = {"chunks": deltas, "delay_ms": delay_ms}
    return Prompt(f"@script {json.dumps(step)}", numbered_text(deltas * WORD_CHARS))


async def warm_turns(bench: Bench, sizes: Sizes) -> list[Table]:
    """Measure turns of existing conversations, alternating between the sides so that noise affects both."""
    sides: Mapping[str, Side] = {
        "blocking": bench.blocking,
        "streaming": bench.streaming,
        "blocking, plain client": bench.plain_blocking,
        "streaming, plain client": bench.plain_streaming,
    }
    first_s: dict[str, list[float]] = {name: [] for name in (*sides, "bare")}
    whole_s: dict[str, list[float]] = {name: [] for name in (*sides, "bare")}
    await _alternate(sizes.turns + 1, sides, bench.bare, first_s, whole_s)
    bare, rows = whole_s["bare"], []
    for name, aim in (("blocking", AtMostMore(8)), ("streaming", AtMostMore(8))):
        rows += [
            Row(f"warm turn, {name}: median", _ms(median(whole_s[name])), _ms(median(bare)), aim=aim),
            Row(f"warm turn, {name}: p90", _ms(percentile(whole_s[name], 90)), _ms(percentile(bare, 90))),
        ]
    bare = first_s["bare"]
    rows += [
        Row("first text: median", _ms(median(first_s["streaming"])), _ms(median(bare)), aim=AtMostMore(10)),
        Row("first text: p90", _ms(percentile(first_s["streaming"], 90)), _ms(percentile(bare, 90))),
    ]
    plain = [
        Row(f"warm turn, {name}", _ms(median(whole_s[name])), _ms(median(whole_s["bare"])))
        for name in ("blocking, plain client", "streaming, plain client")
    ]
    name = "streaming, plain client"
    plain.append(Row("first text, plain client", _ms(median(first_s[name])), _ms(median(bare))))
    return [
        Table("Warm turn", f"{sizes.turns} turns each way, as a peer with the a2a-sdk's client sees them", rows),
        Table("The same without the a2a-sdk's client", "a plain HTTP client beside it: the rest is the SDK's", plain),
    ]


async def backends(bench: Bench, sizes: Sizes, root: Path) -> Table:
    """Measure both backends, with and without A2A, alternating with the bare driver so that noise affects all."""
    async with AsyncExitStack() as stack:
        sides: dict[str, Side] = {
            label: await stack.enter_async_context(open_runtime(bench.setup, root / name, name))
            for label, name in (("app-server", "codex"), ("codex exec", "codex-exec"))
        }
        sides["app-server, A2A"] = bench.streaming
        sides["codex exec, A2A"] = await stack.enter_async_context(open_exec_agent(bench.setup, root / "exec agent"))
        first_s: dict[str, list[float]] = {name: [] for name in (*sides, "bare")}
        whole_s: dict[str, list[float]] = {name: [] for name in (*sides, "bare")}
        await _alternate(sizes.turns + 1, sides, bench.bare, first_s, whole_s)
    rows = [
        row
        for name in sides
        for row in (
            Row(f"{name}: warm turn, median", _ms(median(whole_s[name])), _ms(median(whole_s["bare"]))),
            Row(f"{name}: first text, median", _ms(median(first_s[name])), _ms(median(first_s["bare"]))),
        )
    ]
    note = f"{sizes.turns} turns each; codex exec starts a process for each, and has no deltas"
    return Table("The backends", note, rows)


async def _alternate(
    rounds: int,
    sides: Mapping[str, Side],
    bare: Side,
    first_s: Mapping[str, list[float]],
    whole_s: Mapping[str, list[float]],
) -> None:
    """Run one turn on each of our sides in turn, and after each one on bare. The first round starts the threads."""
    names = {name: str(uuid.uuid4()) for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            for column, run in (
                (name, await _run_checked(side, {names[name]: [HELLO]})),
                ("bare", await _run_checked(bare, {names[name]: [HELLO]})),
            ):
                if number > 0:
                    whole_s[column] += [turn.whole_s for turn in run.turns]
                    first_s[column] += _first_s(run)


async def burst(bench: Bench, sizes: Sizes) -> Table:
    """Measure an answer at codex's full speed: wall time, and CPU time of our process only."""
    prompt = numbered(sizes.deltas)
    ours: list[float] = []
    bare: list[float] = []
    before = [_cpu_s(process) for process in (bench.agent, bench.bare_driver)]
    for _ in range(sizes.bursts):
        context_id = str(uuid.uuid4())
        ours += [turn.whole_s for turn in (await _run_checked(bench.streaming, {context_id: [prompt]})).turns]
        bare += [turn.whole_s for turn in (await _run_checked(bench.bare, {context_id: [prompt]})).turns]
    after = [_cpu_s(process) for process in (bench.agent, bench.bare_driver)]
    # The kernel counts CPU time in steps of 10 ms, so all bursts are measured together.
    our_cpu, bare_cpu = (_ms(end - start) / sizes.bursts for start, end in zip(before, after, strict=True))
    rows = [
        Row("burst: wall, median", _ms(median(ours)), _ms(median(bare)), aim=AtMostTimes(1.3)),
        Row("burst: CPU, mean", our_cpu, bare_cpu, aim=AtMostTimes(4)),
    ]
    note = f"{sizes.bursts} answers of {sizes.deltas} deltas, each in a new context; CPU without codex's"
    return Table("Burst", note, rows)


async def parallel_contexts(bench: Bench, sizes: Sizes) -> Table:
    """Measure contexts that run at the same time, including the start of their threads."""
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(sizes.parallel_rounds):
        conversations = {str(uuid.uuid4()): [HELLO] * sizes.turns_each for _ in range(sizes.contexts)}
        ours.append((await _run_checked(bench.streaming, conversations)).wall_s)
        bare.append((await _run_checked(bench.bare, conversations)).wall_s)
    rows = [Row("parallel contexts: wall, median", _ms(median(ours)), _ms(median(bare)))]
    note = f"{sizes.contexts} new contexts of {sizes.turns_each} turns each, {sizes.parallel_rounds} times"
    return Table("Parallel contexts", note, rows)


async def streams(bench: Bench, sizes: Sizes) -> Table:
    """Measure concurrent streams at the speed of a real model: completeness and time to the first text.

    First in new contexts, including the start of their threads, then again in the same contexts.
    """
    prompt = numbered(sizes.stream_deltas, delay_ms=10)
    conversations = {str(uuid.uuid4()): [prompt.text] for _ in range(sizes.streams)}
    rows: list[Row] = []
    for when in ("new", "begun"):
        ours, bare = await bench.streaming.run(conversations), await bench.bare.run(conversations)
        our_whole, bare_whole = (sum(turn.text == prompt.answer for turn in run.turns) for run in (ours, bare))
        our_first, bare_first = _first_s(ours), _first_s(bare)
        rows += [
            Row(f"streams, {when}: whole", our_whole, bare_whole, Unit.COUNT, AtLeast(sizes.streams)),
            Row(f"streams, {when}: first text, median", _ms(median(our_first)), _ms(median(bare_first))),
            Row(f"streams, {when}: first text, slowest", _ms(max(our_first)), _ms(max(bare_first)), aim=Below(500)),
            Row(f"streams, {when}: wall", _ms(ours.wall_s), _ms(bare.wall_s)),
        ]
    note = f"{sizes.streams} contexts, {sizes.stream_deltas} deltas each, one every 10 ms; new: with the thread's start"
    return Table("Streams at a model's speed", note, rows)


@dataclass(frozen=True, slots=True)
class Memory:
    """The resident memory of all processes, in MB."""

    agent: float
    bare: float
    agents_codex: float

    @classmethod
    def now(cls, bench: Bench) -> "Memory":
        """Measure the memory now."""
        return cls(*(_rss_mb(process) for process in (bench.agent, bench.bare_driver, bench.agents_codex)))


def memory(idle: Memory, loaded: Memory) -> Table:
    """Compare the memory before the first message with that after all the others."""
    rows = [
        Row("our process: idle", idle.agent, idle.bare, Unit.MB, Below(80)),
        Row("our process: after the load", loaded.agent, loaded.bare, Unit.MB, Below(80)),
        Row("codex under us: idle", idle.agents_codex, None, Unit.MB),
        Row("codex under us: after the load", loaded.agents_codex, None, Unit.MB),
    ]
    return Table("Memory", "resident, before the first message and after everything above", rows)


async def cold_start(bench: Bench, sizes: Sizes, root: Path) -> Table:
    """Measure the time from the process's start to its first 200 of /readyz, each time with new state."""
    ours: list[float] = []
    bare: list[float] = []
    for number in range(sizes.starts):
        ours.append(await _our_start(root / f"ours-{number}", bench.setup.model_url))
        async with open_bare(bench.setup, root / f"bare-{number}") as driver:
            bare.append(driver.ready_s)
    rows = [
        Row("cold start: median", _ms(median(ours)), _ms(median(bare)), aim=Below(1000)),
        Row("cold start: slowest", _ms(max(ours)), _ms(max(bare))),
    ]
    note = f"process start to ready, {sizes.starts} starts with empty state; bare: to codex's first answer"
    return Table("Cold start", note, rows)


async def _our_start(root: Path, model_url: str) -> float:
    """Return the seconds from a new agent's start until it is ready."""
    port = free_port()
    setup = new_setup(root, model_url, port)
    start, ready_at = time.perf_counter(), math.inf

    async def watch() -> None:
        nonlocal ready_at
        await _ready(port)
        ready_at = time.perf_counter()

    # The agent's context manager waits for a log line, which it polls every 20 ms; the watcher polls more often.
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        async with running_agent(setup):
            await _ready(port)
    return ready_at - start


async def _ready(port: int) -> None:
    """Wait until the agent reports that it is ready, like a platform's probe."""
    while not await _is_ready(port):  # noqa: ASYNC110 - the state of another process
        await anyio.sleep(POLL_S)


async def _is_ready(port: int) -> bool:
    try:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return (await stream.receive()).startswith(b"HTTP/1.1 200 ")
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        return False


async def _run_checked(side: Side, conversations: Mapping[str, Sequence[Prompt]]) -> Outcome:
    """Run conversations, check the answers, and return their times.

    Raises:
        RuntimeError: an answer differs from the expected one.
    """
    run = await side.run({name: [prompt.text for prompt in prompts] for name, prompts in conversations.items()})
    expected = sorted(prompt.answer for prompts in conversations.values() for prompt in prompts)
    if sorted(turn.text for turn in run.turns) != expected:
        raise RuntimeError("an answer is not whole")
    return run


def _first_s(run: Outcome) -> list[float]:
    return [turn.first_s for turn in run.turns if turn.first_s is not None]


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of the process itself, without its codex."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _rss_mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss / MEGABYTE)


def _ms(seconds: float) -> float:
    return seconds * 1000
