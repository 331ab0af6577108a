"""What is measured, and the aims: each function makes one table of the report."""

import json
import math
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import psutil

from bench.figures import AtLeast, AtMostOver, AtMostTimes, Row, Table, Under, Unit, median, percentile
from bench.processes import Bench, new_setup, open_bare, open_exec_agent, open_runtime
from bench.sides import Side, Talk
from codex_workspace.devkit.script import numbered_text
from tests.e2e.agent_process import running_agent

WORD_CHARS: Final = 10
"""The length of a delta of the scripted model."""

POLL_S: Final = 0.005
MEGABYTE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; the defaults take less than a minute."""

    turns: int = 30
    bursts: int = 6
    deltas: int = 5000
    crowds: int = 3
    contexts: int = 8
    turns_each: int = 4
    streams: int = 16
    stream_deltas: int = 200
    starts: int = 5


SMALLEST: Final = Sizes(1, 1, 50, 1, 2, 2, 2, 20, 1)
"""For a test that all of it runs."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent, and the one right answer to it."""

    text: str
    answer: str


HELLO: Final = Prompt("Hello", "You said: Hello")


def numbered(deltas: int, delay_ms: int = 0) -> Prompt:
    """Return a prompt that is answered with `deltas` deltas, each one `delay_ms` after the one before."""
    step = {"chunks": deltas, "delay_ms": delay_ms}
    return Prompt(f"@script {json.dumps(step)}", numbered_text(deltas * WORD_CHARS))


async def warm_turns(bench: Bench, sizes: Sizes) -> list[Table]:
    """Measure single turns of conversations that have begun. Both sides' turns alternate, so that noise hits both."""
    ways: Mapping[str, Side] = {
        "blocking": bench.blocking,
        "streaming": bench.streaming,
        "blocking, plain client": bench.plain_blocking,
        "streaming, plain client": bench.plain_streaming,
    }
    first_s: dict[str, list[float]] = {name: [] for name in (*ways, "bare")}
    whole_s: dict[str, list[float]] = {name: [] for name in (*ways, "bare")}
    await _alternate(sizes.turns + 1, ways, bench.bare, first_s, whole_s)
    bare, rows = whole_s["bare"], []
    for name, aim in (("blocking", AtMostOver(8)), ("streaming", AtMostOver(8))):
        rows += [
            Row(f"warm turn, {name}: median", _ms(median(whole_s[name])), _ms(median(bare)), aim=aim),
            Row(f"warm turn, {name}: p90", _ms(percentile(whole_s[name], 90)), _ms(percentile(bare, 90))),
        ]
    bare = first_s["bare"]
    rows += [
        Row("first text: median", _ms(median(first_s["streaming"])), _ms(median(bare)), aim=AtMostOver(10)),
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
    """Measure both backends, without A2A and by it; all of them and the bare driver take turns, as noise hits all."""
    async with AsyncExitStack() as stack:
        ways: dict[str, Side] = {
            label: await stack.enter_async_context(open_runtime(bench.setup, root / name, name))
            for label, name in (("app-server", "codex"), ("codex exec", "codex-exec"))
        }
        ways["app-server, A2A"] = bench.streaming
        ways["codex exec, A2A"] = await stack.enter_async_context(open_exec_agent(bench.setup, root / "exec agent"))
        first_s: dict[str, list[float]] = {name: [] for name in (*ways, "bare")}
        whole_s: dict[str, list[float]] = {name: [] for name in (*ways, "bare")}
        await _alternate(sizes.turns + 1, ways, bench.bare, first_s, whole_s)
    rows = [
        row
        for name in ways
        for row in (
            Row(f"{name}: warm turn, median", _ms(median(whole_s[name])), _ms(median(whole_s["bare"]))),
            Row(f"{name}: first text, median", _ms(median(first_s[name])), _ms(median(first_s["bare"]))),
        )
    ]
    note = f"{sizes.turns} turns each; codex exec starts a process for each, and has no deltas"
    return Table("The backends", note, rows)


async def _alternate(
    rounds: int,
    ways: Mapping[str, Side],
    bare: Side,
    first_s: Mapping[str, list[float]],
    whole_s: Mapping[str, list[float]],
) -> None:
    """Take turn after turn: one way of ours, bare, the next way of ours, bare, … The first round starts the threads."""
    names = {name: str(uuid.uuid4()) for name in ways}
    for number in range(rounds):
        for name, side in ways.items():
            for whose, talk in (
                (name, await _checked(side, {names[name]: [HELLO]})),
                ("bare", await _checked(bare, {names[name]: [HELLO]})),
            ):
                if number > 0:
                    whole_s[whose] += [turn.whole_s for turn in talk.turns]
                    first_s[whose] += _first_s(talk)


async def burst(bench: Bench, sizes: Sizes) -> Table:
    """Measure an answer that comes as fast as codex gives it: wall time, and CPU of our process alone."""
    prompt = numbered(sizes.deltas)
    ours: list[float] = []
    bare: list[float] = []
    before = [_cpu_s(process) for process in (bench.agent, bench.bare_driver)]
    for _ in range(sizes.bursts):
        context_id = str(uuid.uuid4())
        ours += [turn.whole_s for turn in (await _checked(bench.streaming, {context_id: [prompt]})).turns]
        bare += [turn.whole_s for turn in (await _checked(bench.bare, {context_id: [prompt]})).turns]
    after = [_cpu_s(process) for process in (bench.agent, bench.bare_driver)]
    # The kernel counts CPU in steps of 10 ms, so all bursts are counted together.
    our_cpu, bare_cpu = (_ms(end - start) / sizes.bursts for start, end in zip(before, after, strict=True))
    rows = [
        Row("burst: wall, median", _ms(median(ours)), _ms(median(bare)), aim=AtMostTimes(1.3)),
        Row("burst: CPU, mean", our_cpu, bare_cpu, aim=AtMostTimes(4)),
    ]
    note = f"{sizes.bursts} answers of {sizes.deltas} deltas, each in a new context; CPU without codex's"
    return Table("Burst", note, rows)


async def crowd(bench: Bench, sizes: Sizes) -> Table:
    """Measure contexts that talk at the same time, their threads' start included."""
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(sizes.crowds):
        talks = {str(uuid.uuid4()): [HELLO] * sizes.turns_each for _ in range(sizes.contexts)}
        ours.append((await _checked(bench.streaming, talks)).wall_s)
        bare.append((await _checked(bench.bare, talks)).wall_s)
    rows = [Row("parallel contexts: wall, median", _ms(median(ours)), _ms(median(bare)))]
    note = f"{sizes.contexts} new contexts of {sizes.turns_each} turns each, {sizes.crowds} times"
    return Table("Parallel contexts", note, rows)


async def streams(bench: Bench, sizes: Sizes) -> Table:
    """Measure streams at a model's speed that run at the same time: are they whole, and when do they begin.

    The first time in new contexts, whose threads codex has to start; then once more in the same ones.
    """
    prompt = numbered(sizes.stream_deltas, delay_ms=10)
    talks = {str(uuid.uuid4()): [prompt.text] for _ in range(sizes.streams)}
    rows: list[Row] = []
    for when in ("new", "begun"):
        ours, bare = await bench.streaming.talk(talks), await bench.bare.talk(talks)
        our_whole, bare_whole = (sum(turn.text == prompt.answer for turn in talk.turns) for talk in (ours, bare))
        our_first, bare_first = _first_s(ours), _first_s(bare)
        rows += [
            Row(f"streams, {when}: whole", our_whole, bare_whole, Unit.COUNT, AtLeast(sizes.streams)),
            Row(f"streams, {when}: first text, median", _ms(median(our_first)), _ms(median(bare_first))),
            Row(f"streams, {when}: first text, slowest", _ms(max(our_first)), _ms(max(bare_first)), aim=Under(500)),
            Row(f"streams, {when}: wall", _ms(ours.wall_s), _ms(bare.wall_s)),
        ]
    note = f"{sizes.streams} contexts, {sizes.stream_deltas} deltas each, one every 10 ms; new: with the thread's start"
    return Table("Streams at a model's speed", note, rows)


@dataclass(frozen=True, slots=True)
class Memory:
    """The resident memory of every process at one time, in MB."""

    agent: float
    bare: float
    agents_codex: float

    @classmethod
    def now(cls, bench: Bench) -> "Memory":
        """Read it."""
        return cls(*(_rss_mb(process) for process in (bench.agent, bench.bare_driver, bench.agents_codex)))


def memory(idle: Memory, loaded: Memory) -> Table:
    """Compare the memory before the first message with that behind all the others."""
    rows = [
        Row("our process: idle", idle.agent, idle.bare, Unit.MB, Under(80)),
        Row("our process: after the load", loaded.agent, loaded.bare, Unit.MB, Under(80)),
        Row("codex under us: idle", idle.agents_codex, None, Unit.MB),
        Row("codex under us: after the load", loaded.agents_codex, None, Unit.MB),
    ]
    return Table("Memory", "resident, before the first message and after everything above", rows)


async def cold_start(bench: Bench, sizes: Sizes, root: Path) -> Table:
    """Measure from the start of the process to its first 200 at /readyz, in a new state folder each time."""
    ours: list[float] = []
    bare: list[float] = []
    for number in range(sizes.starts):
        ours.append(await _our_start(root / f"ours-{number}", bench.setup.model_url))
        async with open_bare(bench.setup, root / f"bare-{number}") as driver:
            bare.append(driver.ready_s)
    rows = [
        Row("cold start: median", _ms(median(ours)), _ms(median(bare)), aim=Under(1000)),
        Row("cold start: slowest", _ms(max(ours)), _ms(max(bare))),
    ]
    note = f"process start to ready, {sizes.starts} starts with empty state; bare: to codex's first answer"
    return Table("Cold start", note, rows)


async def _our_start(root: Path, model_url: str) -> float:
    """Return how many seconds after its start a new agent says that it is ready."""
    port = _free_port()
    setup = new_setup(root, model_url, port)
    began, ready_at = time.perf_counter(), math.inf

    async def watch() -> None:
        nonlocal ready_at
        await _ready(port)
        ready_at = time.perf_counter()

    # The watcher cannot wait for the block: its begin is what a log line says, up to 20 ms later.
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        async with running_agent(setup):
            await _ready(port)
    return ready_at - began


async def _ready(port: int) -> None:
    """Return once the agent says so, as a platform's probe asks."""
    while not await _is_ready(port):  # noqa: ASYNC110 - it is another process that changes
        await anyio.sleep(POLL_S)


async def _is_ready(port: int) -> bool:
    try:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return (await stream.receive()).startswith(b"HTTP/1.1 200 ")
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


async def _checked(side: Side, conversations: Mapping[str, Sequence[Prompt]]) -> Talk:
    """Run conversations and return their times, which mean something only where every answer is whole.

    Raises:
        RuntimeError: an answer is not what the model said.
    """
    talk = await side.talk({name: [prompt.text for prompt in prompts] for name, prompts in conversations.items()})
    expected = sorted(prompt.answer for prompts in conversations.values() for prompt in prompts)
    if sorted(turn.text for turn in talk.turns) != expected:
        raise RuntimeError("an answer is not whole")
    return talk


def _first_s(talk: Talk) -> list[float]:
    return [turn.first_s for turn in talk.turns if turn.first_s is not None]


def _cpu_s(process: psutil.Process) -> float:
    """Return what the process has used itself; the codex under it is not in it."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _rss_mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss / MEGABYTE)


def _ms(seconds: float) -> float:
    return seconds * 1000
