"""See the whole thing at work, without a key and without a network: `python -m codex_workspace demo`.

Everything is real but the model: the agent runs as the process that an operator would start, codex is codex, the client
is the A2A SDK's. Only the model is scripted (`scripted_model`), on loopback. All files are in a temporary folder, and
nothing of it stays behind.
"""

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import yaml
from a2a.types import StreamResponse
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from codex_workspace.chat import Outgoing, open_peer
from codex_workspace.errors import AgentError
from codex_workspace.groups import plain_task_group
from codex_workspace.scripted_model import scripted_model
from codex_workspace.settings import CONFIG_NAME, TEMPLATE_DIR
from codex_workspace.terminal import Console, TurnView, clean, state_word

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 15.0
"""The agent's own steps to an end sum up to less than 10 s."""

TURN_TIMEOUT_S: Final = 60.0
MAX_LOG_LINE_BYTES: Final = 1 << 20

PASSED_ENVIRONMENT: Final = frozenset(("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "CODEX_BIN"))
"""What the demo's agent gets of our environment: no key, no proxy, nothing of an agent that is configured here."""

WRITE: Final = "Please write a small file and show me that it is there."
RECALL: Final = "What have we said so far?"
RECALL_AGAIN: Final = "You were restarted. What have we said so far?"

GREETING: Final = "hello from the sandbox"
ANSWER: Final = "There it is: greeting.txt, written by a patch and read by a command in codex's sandbox."

SCENARIO: Final = [
    {
        "match": "write a small file",
        "steps": [
            {
                "say": "I write the file first, then I look.",
                "phase": "commentary",
                "delay_ms": 20,
                "patch": f"*** Begin Patch\n*** Add File: greeting.txt\n+{GREETING}\n*** End Patch",
            },
            {"run": "uname -sr && ls && cat greeting.txt"},
            {"say": ANSWER, "phase": "final_answer", "delay_ms": 45},
        ],
    },
    {"match": "said so far", "steps": [{"repeat": True, "delay_ms": 8}]},
]
"""What the scripted model does on our messages; its module's table explains the keys."""


class Unexpected(AgentError):
    """Something was not as the demo expects; the sentence says what."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A running agent: where it listens, and what it said when it was ready."""

    url: str
    ready: str
    process: Process

    async def stop(self) -> None:
        """Ask the agent to end by SIGTERM, as Docker would.

        Raises:
            Unexpected: it did not end in time, or not with exit code 0.
        """
        self.process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_TIMEOUT_S):
            code = await self.process.wait()
            if code != 0:
                raise Unexpected(f"the agent ended with exit code {code} when it was asked to stop")
            return
        raise Unexpected(f"the agent did not end within {STOP_TIMEOUT_S:g} s after SIGTERM")


@dataclass(frozen=True, slots=True)
class Stage:
    """The demo's temporary folder, and the environment in which its agent runs."""

    folder: Path
    token: str
    environment: Mapping[str, str]

    @property
    def workspace(self) -> Path:
        """The folder that codex works in."""
        return self.folder / "workspace"


async def demo(env: Mapping[str, str]) -> int:
    """Show an answer, a command in the sandbox, memory, and memory after a restart.

    Returns:
        The exit code: 0 when all was as expected, 1 when something was not, 130 when interrupted.
    """
    console = Console(sys.stdout, env)
    # What the SDK logs is said in fewer words where it matters.
    logging.basicConfig(handlers=[logging.NullHandler()])
    code = 130
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with plain_task_group() as tasks:

            async def leave_when_told() -> None:
                async for _ in signals:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(leave_when_told)
            code = await _demo(console, env)
            tasks.cancel_scope.cancel()
    if code == 130:
        console.line("\nInterrupted; everything that was started has been ended.")
    return code


async def _demo(console: Console, env: Mapping[str, str]) -> int:
    started = anyio.current_time()
    show = _Show(console)
    try:
        with tempfile.TemporaryDirectory(prefix="codex-workspace-demo-") as folder:
            async with scripted_model(scenario=_write_scenario(Path(folder))) as model:
                stage = _set_up(Path(folder), model.base_url, env)
                seen = await _play(show, stage)
    except AgentError as error:
        console.line(console.style.bad(f"\nNot as expected: {clean(str(error))}"))
        return 1
    console.line(console.style.good(f"\nSeen in {anyio.current_time() - started:.1f} s: {seen}."))
    return 0


async def _play(show: "_Show", stage: Stage) -> str:
    """Play the demo's steps; returns what was seen.

    Raises:
        AgentError: a step was not as expected.
    """
    show.step("Start the agent, with the real codex behind it and a scripted model in place of OpenAI")
    async with _agent(stage) as agent:
        show.done(agent.ready)
        show.step("Ask it, as an A2A client, to change and run something")
        worked = await show.turn(agent, stage.token, WRITE, None)
        _check_work(worked, stage)
        show.step("Send a second message in the same context: does it remember?")
        recalled = await show.turn(agent, stage.token, RECALL, worked.context_id)
        _check_memory(recalled, (WRITE, ANSWER))
        show.step("Stop the agent with SIGTERM and start it again")
        await agent.stop()
    async with _agent(stage) as agent:
        show.done(agent.ready)
        show.step("Send a third message in that context: does it still remember?")
        recalled = await show.turn(agent, stage.token, RECALL_AGAIN, worked.context_id)
        _check_memory(recalled, (WRITE, ANSWER, RECALL))
        await agent.stop()
    return (
        f"text streamed in {worked.text_updates} pieces, a file written by a patch, a command run in codex's sandbox, "
        "memory from message to message and across a restart"
    )


class _Show:
    """Tells what happens, step by step, with the time that each step took."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._number = 0
        self._step_started = 0.0

    def step(self, what: str) -> None:
        self._number += 1
        self._step_started = anyio.current_time()
        gap = "\n" if self._number > 1 else ""
        self._console.line(self._console.style.bold(f"{gap}{self._number}. {what}"))

    def done(self, what: str) -> None:
        self._console.line(f"[{clean(what)}, {anyio.current_time() - self._step_started:.1f} s]")

    async def turn(self, agent: Agent, token: str, text: str, context_id: str | None) -> TurnView:
        """Send a message and show what comes of it.

        Raises:
            AgentError: the agent was lost, or the task did not complete.
        """
        self._console.line(f"> {text}\n")
        view = TurnView(self._console.style, anyio.current_time())

        def on_event(event: StreamResponse) -> None:
            self._console.write(view.apply(event, anyio.current_time()))

        with anyio.move_on_after(TURN_TIMEOUT_S) as scope:
            async with open_peer(agent.url, token) as peer:
                await peer.send(Outgoing(text, context_id), on_event)
        if scope.cancelled_caught:
            raise Unexpected(f"the task did not end within {TURN_TIMEOUT_S:g} s")
        if not view.completed:
            raise Unexpected(f"the task ended as {state_word(view.state) if view.state else 'nothing'}")
        if context_id is not None and view.context_id != context_id:
            raise Unexpected("the answer came in another context")
        return view


def _check_work(view: TurnView, stage: Stage) -> None:
    if not view.commands:
        raise Unexpected("no command was run")
    command = view.commands[-1]
    if command.exit_code != 0:
        raise Unexpected(f"the command ended with exit code {command.exit_code}; does codex's sandbox work here?")
    if GREETING not in command.output:
        raise Unexpected("the command's output is not what the file holds")
    if not (stage.workspace / "greeting.txt").is_file():
        raise Unexpected("the patch's file is not in the workspace")
    if view.answer != ANSWER:
        raise Unexpected(f"the answer is {view.answer!r}, not what the model said")
    if view.text_updates < 2:
        raise Unexpected("the text came in one piece, not as a stream")


def _check_memory(view: TurnView, earlier: tuple[str, ...]) -> None:
    for text in earlier:
        if text not in view.answer:
            raise Unexpected(f"it does not remember: {text!r}")


def _write_scenario(folder: Path) -> Path:
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump(SCENARIO), encoding="utf-8")
    return file


def _set_up(folder: Path, model_url: str, env: Mapping[str, str]) -> Stage:
    """Write the agent's configuration, as an operator would for any Responses endpoint."""
    stage = Stage(folder, secrets.token_urlsafe(24), {})
    config, home, temporary = folder / "config", folder / "home", folder / "tmp"
    for made in (config, home, temporary, stage.workspace):
        made.mkdir()
    content = {
        "name": "demo-agent",
        "runtime": "codex",
        # A model whose abilities codex knows, apply_patch among them.
        "runtime_config": {"model": "gpt-5.5", "provider": "demo"},
        "providers": [
            {
                "name": "demo",
                "auth_mode": "openai_compat_responses",
                "base_url": model_url,
                "auth_env": ["DEMO_KEY"],
            }
        ],
    }
    (config / CONFIG_NAME).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    passed = {name: value for name, value in env.items() if name in PASSED_ENVIRONMENT}
    own = {
        "HOME": str(home),
        # Codex's sandbox leaves a lock file there.
        "TMPDIR": str(temporary),
        "WORKSPACE_CONFIG_PATH": str(config),
        "WORKSPACE_STATE_DIR": str(folder / "state"),
        "WORKSPACE_DIR": str(stage.workspace),
        "A2A_PORT": "0",
        "A2A_TOKEN": stage.token,
        "LOG_FORMAT": "json",
        "DEMO_KEY": secrets.token_urlsafe(24),
    }
    return Stage(folder, stage.token, passed | own)


@asynccontextmanager
async def _agent(stage: Stage) -> AsyncIterator[Agent]:
    """Run the agent as a process of its own, ready when the block begins, ended when it is left.

    Raises:
        Unexpected: it did not become ready.
    """
    process = await anyio.open_process(
        [sys.executable, "-m", "codex_workspace", "serve"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=TEMPLATE_DIR,
        env=stage.environment,
        # Ctrl-C on the terminal is for us; we stop the agent in good order.
        start_new_session=True,
    )
    try:
        async with plain_task_group() as tasks:
            log = _Log(process)
            tasks.start_soon(log.read)
            yield await _when_ready(process, log)
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _when_ready(process: Process, log: "_Log") -> Agent:
    with anyio.move_on_after(START_TIMEOUT_S):
        await log.ready_or_ended.wait()
    if log.url is None:
        raise Unexpected(f"the agent did not start; its last words: {log.last or 'none'}")
    return Agent(log.url, log.ready, process)


async def _end(process: Process) -> None:
    """End the agent in good order, or at last without; codex ends with the pipe that it loses."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await process.wait()
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
    await process.aclose()


class _Log:
    """The agent's log: says when the agent is ready and where, and keeps the last line."""

    def __init__(self, process: Process) -> None:
        assert process.stderr is not None
        self._lines = BufferedByteReceiveStream(process.stderr)
        self.ready_or_ended = anyio.Event()
        self.ready = ""
        self.url: str | None = None
        self.last = ""

    async def read(self) -> None:
        """Read to the end, so that the agent never waits for us."""
        try:
            while True:
                self._take((await self._lines.receive_until(b"\n", MAX_LOG_LINE_BYTES)).decode("utf-8", "replace"))
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            pass
        finally:
            self.ready_or_ended.set()

    def _take(self, line: str) -> None:
        self.last = _log_message(line)
        ready, found, url = self.last.partition(", A2A at ")
        if found and ready.startswith("ready: "):
            self.ready, self.url = self.last, url
            self.ready_or_ended.set()


def _log_message(line: str) -> str:
    """Return a JSON log line's message; a line of another kind as it is."""
    try:
        record = json.loads(line)
    except ValueError:
        return line.strip()
    message = record.get("message") if isinstance(record, dict) else None
    return message if isinstance(message, str) else line.strip()
