"""Runs the agent with the real codex and a scripted model, without a key or a network: `codex-workspace demo`.

Everything is real but the model: the agent runs as the process that an operator would start, codex is codex, the client
is the A2A SDK's. Only the model is scripted (`scripted_model`), on loopback. All files are in a temporary folder, and
nothing of it stays behind.
"""

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.cli.chat import Conversation, open_client
from codex_workspace.cli.terminal import TurnView
from codex_workspace.devkit.model import scripted_model
from codex_workspace.devkit.staging import (
    DemoAgent,
    DemoEnvironment,
    DemoFailed,
    DemoSteps,
    running,
    set_up,
    shown,
    write_scenario,
)

TURN_TIMEOUT_S: Final = 60.0

WRITE: Final = "Please write a small file and show me its content."
RECALL: Final = "What have we said so far?"
RECALL_AGAIN: Final = "You were restarted. What have we said so far?"

GREETING: Final = "hello from the sandbox"
ANSWER: Final = "Done: I wrote greeting.txt with a patch and read it with a command."

SCENARIO: Final[list[dict[str, object]]] = [
    {
        "match": "write a small file",
        "steps": [
            {
                "say": "I will write the file, then read it.",
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
"""The scripted model's responses to the messages; its module describes the keys."""


async def demo(env: Mapping[str, str]) -> int:
    """Show an answer, a command in the sandbox, memory, and memory after a restart.

    Returns:
        The exit code: 0 if every result was as expected, 1 if not, 130 after an interrupt.
    """
    return await shown(partial(_demo, env=env), env)


async def _demo(steps: DemoSteps, folder: Path, env: Mapping[str, str]) -> str:
    token = secrets.token_urlsafe(24)
    async with scripted_model(scenario=write_scenario(folder, SCENARIO)) as model:
        return await _play(steps, set_up(folder, model.base_url, env, {"A2A_TOKEN": token}), token)


async def _play(steps: DemoSteps, stage: DemoEnvironment, token: str) -> str:
    """Run the demo's steps and return a summary.

    Raises:
        AgentError: a step was not as expected.
    """
    steps.step("Start the agent with the real codex and a scripted model in place of OpenAI")
    async with running(stage) as agent:
        steps.done(agent.ready)
        steps.step("Send an A2A message that makes codex change a file and run a command")
        worked = await _turn(steps, agent, token, WRITE)
        _check_work(worked, stage)
        steps.step("Send a second message in the same context; codex remembers the first")
        recalled = await _turn(steps, agent, token, RECALL, worked.context_id)
        _check_memory(recalled, (WRITE, ANSWER))
        steps.step("Stop the agent with SIGTERM and start it again")
        await agent.stop()
    async with running(stage) as agent:
        steps.done(agent.ready)
        steps.step("Send a third message; codex still remembers the conversation")
        recalled = await _turn(steps, agent, token, RECALL_AGAIN, worked.context_id)
        _check_memory(recalled, (WRITE, ANSWER, RECALL))
        await agent.stop()
    return (
        f"text streamed in {worked.text_updates} pieces, a file written by a patch, a command run, "
        "a conversation continued after a restart"
    )


async def _turn(steps: DemoSteps, agent: DemoAgent, token: str, text: str, context_id: str = "") -> TurnView:
    """Send a message and print its events.

    Raises:
        AgentError: the agent was lost, or the task did not complete.
    """
    steps.console.out(f"> {text}\n")
    view = TurnView(steps.console)
    with anyio.move_on_after(TURN_TIMEOUT_S) as scope:
        async with open_client(agent.url, token) as client:
            await Conversation(client, steps.console, context_id).send(text, view)
    if scope.cancelled_caught:
        raise DemoFailed(f"the task did not end within {TURN_TIMEOUT_S:g} s")
    if not view.completed:
        raise DemoFailed(f"the task ended as {view.outcome}")
    if context_id and view.context_id != context_id:
        raise DemoFailed("the answer belongs to another context")
    return view


def _check_work(view: TurnView, stage: DemoEnvironment) -> None:
    match [note for note in view.notes if "exitCode" in note]:
        case [{"exitCode": 0, "output": str(output)}] if GREETING in output:
            pass
        case notes:
            raise DemoFailed(f"the command did not print the file: {notes}; does codex's sandbox work here?")
    if not (stage.workspace / "greeting.txt").is_file():
        raise DemoFailed("the patch's file is not in the workspace")
    if view.answer != ANSWER:
        raise DemoFailed(f"the answer is {view.answer!r}, not what the model said")
    if view.text_updates < 2:
        raise DemoFailed("the text came in one piece, not as a stream")


def _check_memory(view: TurnView, earlier: tuple[str, ...]) -> None:
    for text in earlier:
        if text not in view.answer:
            raise DemoFailed(f"it does not remember: {text!r}")
