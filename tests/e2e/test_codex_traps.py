"""Known pitfalls of codex, provoked against the real binary through the connection and the thread."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import psutil
import pytest

from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.codex.thread import CodexThread, ThreadOptions
from codex_workspace.codex.turn import Turn, TurnLimits
from codex_workspace.common.errors import CodexGone, CodexRefused
from codex_workspace.config.codex_toml import prepare_codex_home
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import choose_provider
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.launching import launch_of, thread_options
from codex_workspace.protocol.codex_events import TurnCompleted
from codex_workspace.runtimes.backend import text_input
from codex_workspace.runtimes.events import Done, Text, ToolResult
from codex_workspace.runtimes.launch import Launch
from tests.e2e.agent_process import AgentSetup
from tests.e2e.client import script
from tests.support.memory_codex import turn_of
from tests.support.waiting import HANG_S, eventually

pytestmark = pytest.mark.slow


class MemoryStub:
    """A thread memory without storage."""

    def __init__(self) -> None:
        self.thread_id: str | None = None

    async def load(self) -> str | None:
        return self.thread_id

    async def instructions(self) -> str | None:
        return None

    async def save(self, thread_id: str, instructions: str | None = None) -> None:
        self.thread_id = thread_id


@pytest.fixture
def launch(setup: AgentSetup) -> Launch:
    """How the agent starts codex."""
    environment = setup.prepare()
    settings = load_settings(environment)
    provider = choose_provider(settings, environment)
    prepare_codex_home(settings, provider)
    return launch_of(settings, provider, environment)


@pytest.fixture
def options(setup: AgentSetup, launch: Launch) -> ThreadOptions:
    """The agent's thread options."""
    environment = setup.prepare()
    settings = load_settings(environment)
    return thread_options(settings, choose_provider(settings, environment))


def open_thread(codex: Connection, options: ThreadOptions, memory: MemoryStub | None = None) -> CodexThread:
    """Return a thread on a running codex."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[Connection]:
        yield codex

    return CodexThread(connect, memory or MemoryStub(), options, TurnLimits(inactivity_s=10, total_s=20))


async def run(conversation: CodexThread, prompt: str) -> tuple[TurnCompleted, str]:
    """Run a turn and return its end and its answer."""
    answer = ""
    async with turn_of(conversation, text_input(prompt)) as started:
        while started.turn.ended is None:
            for event in await started.turn.receive():
                answer = event.text if isinstance(event, Done) else answer
    assert started.turn.ended is not None
    return started.turn.ended, answer


async def test_one_codex_starts_stops_and_leaves_nothing(launch: Launch, options: ThreadOptions) -> None:
    async with open_app_server(launch) as codex:
        ended, answer = await run(open_thread(codex, options), "hello")
        assert (ended.status, answer) == ("completed", "You said: hello")
        children = psutil.Process().children(recursive=True)
    assert not [process for process in children if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.versions
async def test_turns_on_one_thread_never_overlap(launch: Launch, options: ThreadOptions) -> None:
    """Codex does not complete a second `turn/start` by itself."""
    async with open_app_server(launch) as codex:
        conversation = open_thread(codex, options)
        ended: list[tuple[TurnCompleted, str]] = []

        async def one(number: int) -> None:
            ended.append(await run(conversation, script({"chunks": 5, "delay_ms": 20}, text=f"{number} ")))

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(one, number)
    assert [each.status for each, _ in ended] == ["completed"] * 4


@pytest.mark.alone
async def test_an_interrupt_right_after_the_start_stops_the_turn(launch: Launch, options: ThreadOptions) -> None:
    """Codex rejects an interrupt before `turn/started` and continues the turn."""
    async with open_app_server(launch) as codex:
        conversation = open_thread(codex, options)
        for _ in range(10):
            async with turn_of(conversation, text_input(script({"say": "At work.", "stall": True}))) as started:
                started.turn.interrupt()
                with anyio.fail_after(3):
                    while started.turn.ended is None:
                        await started.turn.receive()
            assert started.turn.ended == TurnCompleted("interrupted", None, started.turn.ended.last_message)


@pytest.mark.versions
async def test_an_interrupted_command_is_killed_and_closed(launch: Launch, options: ThreadOptions) -> None:
    """Codex leaves the command running and its item open."""
    async with open_app_server(launch) as codex:
        conversation = open_thread(codex, options)
        async with turn_of(conversation, text_input(script({"run": "sleep 86424"}))) as started:
            seen: list[object] = []
            with anyio.fail_after(HANG_S):
                sleeping = await eventually(lambda: _processes_running("86424"))
                started.turn.interrupt()
                while started.turn.ended is None:
                    seen += await started.turn.receive()
        _, alive = psutil.wait_procs(sleeping, timeout=2)
        assert not alive
        closings = [event for event in seen if isinstance(event, ToolResult)]
        assert len(closings) <= 1
        assert isinstance(seen[-1], Done)


def _codex() -> psutil.Process:
    (codex,) = [child for child in psutil.Process().children() if "app-server" in child.cmdline()]
    return codex


def _processes_running(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if word in process.cmdline()[1:2]:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.versions
async def test_leaving_a_turn_early_frees_the_thread(launch: Launch, options: ThreadOptions) -> None:
    async with open_app_server(launch) as codex:
        conversation = open_thread(codex, options)
        async with turn_of(conversation, text_input(script({"say": "At work.", "stall": True}))):
            pass
        assert (await run(conversation, "next"))[1] == "You said: next"


@pytest.mark.versions
async def test_self_started_turns_and_sub_agents_are_off(
    launch: Launch, options: ThreadOptions, model: ScriptedModel
) -> None:
    async with open_app_server(launch) as codex:
        await run(open_thread(codex, options), "hello")
    offered = {tool.name for tool in model.requests[-1].tools}
    assert not offered & {"create_goal", "update_goal", "get_goal", "spawn_agent", "web_search"}


async def test_a_burst_of_requests_loses_no_request(launch: Launch, options: ThreadOptions) -> None:
    """Codex silently drops requests beyond about 128 at once."""
    answered = 0
    async with open_app_server(launch) as codex:

        async def one() -> None:
            nonlocal answered
            await codex.call("thread/loaded/list", {})
            answered += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(500):
                tasks.start_soon(one)
    assert answered == 500


@pytest.mark.versions
async def test_a_lone_surrogate_is_accepted(launch: Launch, options: ThreadOptions) -> None:
    """Codex drops a request that contains an unescaped lone surrogate."""
    async with open_app_server(launch) as codex:
        ended, answer = await run(open_thread(codex, options), "half a pair: \ud83d.")
    assert ended.status == "completed"
    assert answer.startswith("You said: half a pair: ")


async def test_input_over_the_limit_is_rejected(launch: Launch, options: ThreadOptions) -> None:
    async with open_app_server(launch) as codex:
        with pytest.raises(CodexRefused, match="1048576 characters"):
            await run(open_thread(codex, options), "x" * 1_048_577)
        assert (await run(open_thread(codex, options), "x" * 1_000_000))[0].status == "completed"


async def test_a_rejected_request_says_why(launch: Launch) -> None:
    async with open_app_server(launch) as codex:
        with pytest.raises(CodexRefused, match="unknown variant"):
            await codex.call("no/such/method", {})


@pytest.mark.parametrize("policy", ["on-request", "untrusted"])
async def test_abandoning_a_turn_that_asks_declines_and_frees_the_thread(
    launch: Launch, options: ThreadOptions, policy: str
) -> None:
    asking = replace(options, approval_policy=policy)
    async with open_app_server(launch) as codex:
        conversation = open_thread(codex, asking)
        with anyio.fail_after(HANG_S):
            async with turn_of(conversation, text_input(script({"run": "touch outside", "escalate": True}))) as started:
                while started.turn.pending is None:
                    await started.turn.receive()
            assert (await run(conversation, "next"))[1] == "You said: next"
    assert not await anyio.Path(options.cwd, "outside").exists()


@pytest.mark.alone
async def test_the_death_of_codex_fails_all_pending_calls_at_once(launch: Launch, options: ThreadOptions) -> None:
    async with open_app_server(launch) as codex:
        async with turn_of(
            open_thread(codex, options), text_input(script({"say": "At work.", "stall": True}))
        ) as started:
            while not any(isinstance(event, Text) for event in await started.turn.receive()):
                pass
            begin = anyio.current_time()
            _codex().kill()
            with pytest.raises(CodexGone, match="SIGKILL"):
                await _to_its_end(started.turn)
            assert anyio.current_time() - begin < 0.5
        with pytest.raises(CodexGone, match="SIGKILL"):
            await codex.call("thread/loaded/list", {})


async def _to_its_end(turn: Turn) -> None:
    while turn.ended is None:
        await turn.receive()


async def test_a_thread_resumes_in_another_codex(launch: Launch, options: ThreadOptions) -> None:
    memory = MemoryStub()
    for text in ("the word is apple", "the word is pear"):
        async with open_app_server(launch) as codex:
            await run(open_thread(codex, options, memory), text)
    async with open_app_server(launch) as codex:
        _, answer = await run(open_thread(codex, options, memory), script({"repeat": True}))
    assert "apple" in answer
    assert "pear" in answer


@pytest.mark.versions
async def test_another_writer_is_awaited(launch: Launch, options: ThreadOptions) -> None:
    """The codex of a killed agent can hold its threads for some seconds."""
    memory = MemoryStub()
    async with open_app_server(launch) as second, open_app_server(launch) as first:
        await run(open_thread(first, options, memory), "the word is apple")

        async with anyio.create_task_group() as tasks:

            async def leave_soon() -> None:
                await anyio.sleep(0.5)
                first.kill()

            tasks.start_soon(leave_soon)
            _, answer = await run(open_thread(second, options, memory), script({"repeat": True}))
    assert "apple" in answer


@pytest.mark.versions
async def test_an_api_key_stays_off_the_disk(launch: Launch, options: ThreadOptions) -> None:
    async with open_app_server(launch) as codex:
        await run(open_thread(codex, options), "hello")
    assert launch.api_key is not None
    secret = launch.api_key.encode()
    for file in [file for file in launch.codex_home.rglob("*") if file.is_file()]:
        assert secret not in file.read_bytes(), file


def test_the_launch_matches_the_documented_command(launch: Launch) -> None:
    from codex_workspace.app_server import LAUNCH_OVERRIDES, command_line

    line = command_line(launch, "mark")
    for key, value in LAUNCH_OVERRIDES.items():
        assert f"{key}={value}" in line
    assert json.dumps(line)
