"""Talking to an agent: the command as a person runs it, against the real agent and against others."""

import io
import os
import pty
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import cast

import anyio
import pytest
from a2a.client import A2AClientError, Client
from a2a.helpers import new_task_from_user_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    CancelTaskRequest,
    GetTaskRequest,
    Part,
    SendMessageRequest,
    StreamResponse,
    Task,
)
from anyio.abc import SocketAttribute, SocketStream
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route

from codex_workspace.cli.chat import ChatError, Conversation, open_client
from codex_workspace.cli.terminal import TurnView
from codex_workspace.devkit.model import ScriptedModel, scripted_model
from codex_workspace.runtimes.backend import CONTINUE_PROMPT
from codex_workspace.server.app import serving
from codex_workspace.server.sockets import bind
from tests.e2e.agent_process import REPOSITORY, AgentProcess, AgentSetup, running_agent
from tests.e2e.client import script
from tests.support.memory_codex import in_virtual_time
from tests.support.ports import free_port
from tests.support.waiting import HANG_S

TOKEN = "a-token-for-the-tests"
COMMAND = (sys.executable, "-m", "codex_workspace", "chat")


@dataclass(frozen=True)
class ChatRun:
    """The exit code and output of a chat process."""

    code: int
    out: str
    err: str


async def chat(*arguments: str, typed: str = "", env: Mapping[str, str] | None = None) -> ChatRun:
    """Run the command, away from any terminal."""
    with anyio.fail_after(HANG_S):
        done = await anyio.run_process(
            [*COMMAND, *arguments], input=typed.encode(), env=environment(env), cwd=REPOSITORY, check=False
        )
    return ChatRun(done.returncode, done.stdout.decode(), done.stderr.decode())


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "A2A_TOKEN": TOKEN, **(env or {})}


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    async with scripted_model() as model:
        yield model


@pytest.fixture
async def agent(model: ScriptedModel, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    async with running_agent(AgentSetup(tmp_path, model.base_url, environment={"A2A_TOKEN": TOKEN})) as agent:
        yield agent


async def test_one_message_shows_its_result_and_exits_with_0_or_1(agent: AgentProcess) -> None:
    said = await chat(agent.url, "-m", script({"run": "echo sum $((40+2))"}, {"say": "Forty-two it is."}))
    assert said.err == ""
    assert said.code == 0
    assert said.out.startswith(
        "**Bash**\n\n```bash\necho sum $((40+2))\n```\n\n```\nsum 42\n```\n\nForty-two it is.\n\n[completed, "
    )
    assert "\x1b" not in said.out
    failed = await chat(agent.url, "-m", script({"fail": 401}))
    assert (failed.code, failed.err) == (1, "")
    assert "The model provider rejected the credential (HTTP 401)" in failed.out
    assert "\n[failed, " in failed.out


async def test_lines_are_one_conversation_until_a_new_one_begins(agent: AgentProcess) -> None:
    lines = ["the word is apple", "", script({"repeat": True}), "/new", script({"repeat": True}), "/quit", "not sent"]
    said = await chat(agent.url, typed="\n".join(lines))
    assert (said.code, said.err) == (0, "")
    before, after = said.out.split("[a new conversation]\n")
    assert "You said: the word is apple\n\n[completed, " in before
    assert "user: the word is apple\nassistant: You said: the word is apple\n" in before
    assert "apple" not in after
    assert "not sent" not in said.out


async def test_the_last_line_needs_no_end_and_a_file_can_be_the_input(tmp_path: Path) -> None:
    typed = tmp_path / "typed"
    typed.write_text("from a file")
    async with other_agent(streaming=True) as url:
        with typed.open("rb") as stdin, anyio.fail_after(HANG_S):
            done = await anyio.run_process([*COMMAND, url], stdin=stdin, env=environment(), cwd=REPOSITORY)
    assert done.stdout.decode().startswith("from a file: in task ")


async def test_a_wrong_token_and_a_missing_one_are_one_sentence(agent: AgentProcess, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    for env in ({"A2A_TOKEN": "wrong"}, {"A2A_TOKEN": ""}):
        said = await chat(agent.url, "-m", "hello", env=env)
        assert (said.code, said.out) == (1, "")
        assert said.err.startswith("the agent rejects the token (HTTP 401)")
        assert said.err.count("\n") == 1
    by_file = {"A2A_TOKEN": "", "A2A_TOKEN_FILE": str(token)}
    assert (await chat(agent.url, "-m", "hello", env=by_file)).code == 0


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://127.0.0.1:{free}", "no A2A agent at http://127.0.0.1:{free}: Network communication error"),
        ("127.0.0.1:{free}", "no A2A agent at http://127.0.0.1:{free}: Network communication error"),
        ("ftp://127.0.0.1", "no A2A agent at ftp://127.0.0.1: "),
        ("http://127.0.0.1:x", "no A2A agent at http://127.0.0.1:x: Invalid port: 'x'"),
        (
            "{other}",
            "no A2A agent at {other}: Failed to fetch agent card from {other}/.well-known/agent-card.json (HTTP 404)",
        ),
        ("{other}/text", "no A2A agent at {other}/text: Failed to parse JSON for agent card"),
    ],
)
async def test_an_address_without_an_agent_is_one_sentence(url: str, sentence: str) -> None:
    async with somewhere() as names:
        with pytest.raises(ChatError) as caught:
            async with open_client(url.format(**names)):
                pass
    assert str(caught.value).startswith(sentence.format(**names))


async def test_an_agent_that_is_not_there_is_no_traceback() -> None:
    async with somewhere() as names:
        said = await chat("127.0.0.1:{free}".format(**names), "-m", "hello")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("no A2A agent at ")
    assert said.err.count("\n") == 1


@asynccontextmanager
async def somewhere() -> AsyncIterator[dict[str, str | int]]:
    """Addresses without an agent."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        card = Route("/text/.well-known/agent-card.json", lambda _request: PlainTextResponse("<html>"))
        async with serving_at([card]) as other:
            yield {"free": reserved.getsockname()[1], "other": other}


class Terminal:
    """A chat under a pseudo-terminal: what a person sees and types."""

    def __init__(self, master: int) -> None:
        self._master = master
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def until(self, text: str, after: int = 0) -> None:
        """Wait until `text` is seen, `after` that many characters."""
        with anyio.fail_after(HANG_S):
            while text not in self.seen[after:]:
                await anyio.wait_readable(self._master)
                self.seen += os.read(self._master, 65536).decode()


@asynccontextmanager
async def terminal(url: str) -> AsyncIterator[tuple[Terminal, anyio.abc.Process]]:
    master, slave = pty.openpty()
    try:
        process = await anyio.open_process(
            # `setsid --ctty` makes the pseudo-terminal the one whose Ctrl-C reaches the process.
            ["setsid", "--ctty", "--wait", *COMMAND, url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment({"TERM": "xterm"}),
            cwd=REPOSITORY,
        )
        os.close(slave)
        async with process:
            try:
                yield Terminal(master), process
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
    finally:
        os.close(master)


async def test_ctrl_c_cancels_the_turn_and_at_the_prompt_leaves(agent: AgentProcess) -> None:
    async with terminal(agent.url) as (screen, process):
        await screen.until("> ")
        screen.type(script({"run": "sleep 86422"}) + "\n")
        await screen.until("Bash")
        mark = len(screen.seen)
        screen.type("\x03")
        await screen.until("canceled", mark)
        await screen.until("> ", mark)
        assert agent.commands("86422") == []
        mark = len(screen.seen)
        screen.type(script({"repeat": True}) + "\n")
        await screen.until("completed", mark)
        await screen.until("> ", mark)
        assert "user: @script" in screen.seen[mark:]
        screen.type("\x03")
        with anyio.fail_after(HANG_S):
            assert await process.wait() == 0
    assert "Traceback" not in screen.seen
    assert "\x1b[1mBash\x1b[0m" in screen.seen
    assert "Stopped" in screen.seen


async def test_ctrl_c_during_a_streamed_answer_cancels_it(agent: AgentProcess) -> None:
    process = await anyio.open_process(
        [*COMMAND, agent.url, "-m", script({"chunks": 2000, "delay_ms": 20})],
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=environment(),
        cwd=REPOSITORY,
    )
    async with process:
        assert process.stdout is not None
        with anyio.fail_after(HANG_S):
            out = ""
            while "no 000003." not in out:
                out += (await process.stdout.receive()).decode()
            process.send_signal(signal.SIGINT)
            async for data in process.stdout:
                out += data.decode()
            assert await process.wait() == 1
    assert "\n[canceled, " in out


class Proxy:
    """A way to an agent that can be cut."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._scopes: list[anyio.CancelScope] = []

    def cut(self) -> None:
        """Drop all connections that are open."""
        for scope in self._scopes:
            scope.cancel()

    async def serve(self, stream: SocketStream) -> None:
        async with stream, await anyio.connect_tcp("127.0.0.1", self.target) as far, anyio.create_task_group() as tasks:
            self._scopes.append(tasks.cancel_scope)
            tasks.start_soon(_pump, stream, far)
            await _pump(far, stream)
            tasks.cancel_scope.cancel()


async def _pump(source: SocketStream, sink: SocketStream) -> None:
    async for data in source:
        await sink.send(data)


class Output(io.StringIO):
    """Calls `on_write` with all that was written, after each write."""

    on_write: Callable[[str], None] = lambda _written: None

    def write(self, text: str) -> int:
        done = super().write(text)
        self.on_write(self.getvalue())
        return done


@pytest.mark.slow
async def test_a_broken_stream_is_resumed_and_shown_once(model: ScriptedModel, tmp_path: Path) -> None:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}/"
    proxy = Proxy(free_port())
    behind = {"A2A_PUBLIC_URL": url, "A2A_PORT": str(proxy.target)}
    setup = AgentSetup(tmp_path, model.base_url, environment=behind)
    async with running_agent(setup), listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, proxy.serve)
        output, cuts = Output(), 0

        def cut_after_more_text(written: str) -> None:
            nonlocal cuts
            if written.count("no ") > 8 * (cuts + 1) and cuts < 2:
                cuts += 1
                proxy.cut()

        output.on_write = cut_after_more_text
        view = TurnView(Console(file=output))
        async with open_client(url) as client:
            with anyio.fail_after(HANG_S):
                await Conversation(client, Console()).send(script({"chunks": 100, "delay_ms": 12}), view)
        tasks.cancel_scope.cancel()
    assert cuts == 2
    assert view.completed
    assert output.getvalue().split("\n")[0] == "".join(f"no {number:06d}." for number in range(100))


@pytest.mark.slow
async def test_a_restarted_agent_is_asked_for_the_task(model: ScriptedModel, tmp_path: Path) -> None:
    setup = AgentSetup(tmp_path, model.base_url, environment={"A2A_PORT": str(free_port()), "A2A_TOKEN": TOKEN})
    async with running_agent(setup) as agent:
        process = await anyio.open_process(
            [*COMMAND, agent.url, "-m", script({"chunks": 2000, "delay_ms": 10})],
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=environment(),
            cwd=REPOSITORY,
        )
        async with process:
            assert process.stdout is not None
            await process.stdout.receive()
            agent.process.kill()
            async with running_agent(setup):
                with anyio.fail_after(HANG_S):
                    out = "".join([data.decode() async for data in process.stdout])
                    assert await process.wait() == 0
    assert f"You said: {CONTINUE_PROMPT}" in out
    assert "[completed, " in out


class Echo(AgentExecutor):
    """An agent of another vendor: works until its task is canceled, asks, or echoes when `may_end` is set."""

    def __init__(self, running: anyio.Event, may_end: anyio.Event | None) -> None:
        self._at_work = running
        self._may_end = may_end

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.message is not None
        task = context.current_task or new_task_from_user_message(context.message)
        if context.current_task is None:
            await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, task.id, task.context_id)
        await updater.start_work()
        text = context.get_user_input()
        if text == "for ever":
            self._at_work.set()
            await anyio.sleep_forever()
        if text == "ask":
            await updater.requires_input(updater.new_agent_message([Part(text="Which one?")]))
            return
        if self._may_end is not None:
            await self._may_end.wait()
        await updater.complete(updater.new_agent_message([Part(text=f"{text}: in task {task.id}")]))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id is not None
        assert context.context_id is not None
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


@asynccontextmanager
async def serving_at(routes: Sequence[BaseRoute]) -> AsyncIterator[str]:
    """Serve routes on a free port."""
    with bind("127.0.0.1", 0) as listener:
        async with serving(Starlette(routes=list(routes)), listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def other_agent(
    *,
    streaming: bool,
    version: str = "1.0",
    running: anyio.Event | None = None,
    may_end: anyio.Event | None = None,
) -> AsyncIterator[str]:
    """Serve an agent of another vendor, built with the SDK alone."""
    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        card = AgentCard(
            name="echo",
            description="echoes",
            version="1",
            capabilities=AgentCapabilities(streaming=streaming),
            supported_interfaces=[AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version=version)],
            default_input_modes=["text/plain"],
            default_output_modes=["text/plain"],
        )
        handler = DefaultRequestHandler(Echo(running or anyio.Event(), may_end), InMemoryTaskStore(), card)
        routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/", enable_v0_3_compat=True)]
        async with serving(Starlette(routes=routes), listener):
            try:
                yield url
            finally:
                await handler.aclose()


@pytest.mark.parametrize(("streaming", "version"), [(True, "1.0"), (False, "1.0"), (True, "0.3"), (False, "0.3")])
async def test_other_agents_work_with_and_without_streaming(streaming: bool, version: str) -> None:
    output = io.StringIO()
    view = TurnView(Console(file=output))
    async with other_agent(streaming=streaming, version=version) as url, open_client(url) as client:
        with anyio.fail_after(HANG_S):
            await Conversation(client, Console()).send("hello", view)
    assert re.fullmatch(rf"hello: in task {view.task_id}\n\n\[completed, \d\.\d s\]\n", output.getvalue())


async def test_an_answer_to_an_agents_question_belongs_to_its_task() -> None:
    async with other_agent(streaming=True) as url:
        said = await chat(url, typed="ask\nthe red one\n")
    assert "Which one?\n\n[input required, " in said.out
    assert "the red one: in task " in said.out


async def test_a_task_of_an_agent_that_does_not_stream_can_be_canceled_too() -> None:
    running = anyio.Event()
    async with other_agent(streaming=False, running=running) as url:
        process = await anyio.open_process(
            [*COMMAND, url, "-m", "for ever"], stdin=DEVNULL, stdout=PIPE, env=environment(), cwd=REPOSITORY
        )
        async with process:
            with anyio.fail_after(HANG_S):
                await running.wait()
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            with anyio.fail_after(HANG_S):
                out = "".join([data.decode() async for data in process.stdout])
                assert await process.wait() == 1
    assert out.startswith("[canceled, ")


async def test_a_message_that_is_refused_is_one_sentence() -> None:
    async with other_agent(streaming=True) as url, open_client(url) as client:
        console = Console(file=io.StringIO())
        conversation, asked = Conversation(client, console), TurnView(console)
        await conversation.send("ask", asked)
        await client.cancel_task(CancelTaskRequest(id=asked.task_id))
        with pytest.raises(ChatError, match=r"^the agent rejected the message: .*terminal state"):
            await conversation.turn("hello")


class BrokenAgent:
    """An agent of another vendor that reports a task and is then unreachable."""

    def __init__(self, task_id: str) -> None:
        self._task = Task(id=task_id, context_id="c")

    async def send_message(self, _request: SendMessageRequest) -> AsyncIterator[StreamResponse]:
        yield StreamResponse(task=self._task)

    async def get_task(self, _request: GetTaskRequest) -> Task:
        raise A2AClientError("down \x1b[2J")


@in_virtual_time
async def test_no_task_id_or_error_controls_the_terminal() -> None:
    agent, console = cast("Client", BrokenAgent("\x1b]0;owned\x07\nt")), Console(file=io.StringIO())
    with pytest.raises(ChatError) as failed:
        await Conversation(agent, console).send("hello", TurnView(console))
    assert str(failed.value) == r"the state of task \x1b]0;owned\x07 t is unknown: down \x1b[2J"
