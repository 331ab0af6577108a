"""Runs two agents on a simulated platform, without a key or a network: `codex-workspace demo --platform`.

The agents run as the processes that an operator would start, with real codexes; the platform is the stand-in
(`platform_stand_in`), the model scripted. One agent reads its inbox, the other is pushed to. All files are in a
temporary folder, and nothing of it stays behind.
"""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from codex_workspace.devkit.model import scripted_model
from codex_workspace.devkit.platform.app import StandInOptions, StandInPlatform, running_platform
from codex_workspace.devkit.staging import (
    DemoEnvironment,
    DemoFailed,
    DemoSteps,
    running,
    set_up,
    shown,
    write_scenario,
)
from codex_workspace.runtimes.markdown import clean

ANSWER_TIMEOUT_S: Final = 60.0

PLANNER: Final = "3b0a9c52-7d0e-4c59-9a3e-5d0c1f6f2a11"
REVIEWER: Final = "c7de1f80-1f0b-4f0e-8f57-0b6f3d2a9e22"
"""Workspace IDs must be UUIDs."""

WISH: Final = "Please have the reviewer count the lines of notes.txt, and tell me what it says."
WORK: Final = "Count the lines of notes.txt in your workspace."
NOTES: Final = "one\ntwo\nthree\n"
FOUND: Final = "notes.txt has 3 lines; I have counted them with wc."

SCENARIO: Final[list[dict[str, object]]] = [
    # The work is named in the wish as well, and the first scene that matches is played.
    {
        "match": "have the reviewer count",
        "steps": [
            {"tool": {"name": "list_peers", "namespace": "mcp__agent", "arguments": {}}},
            {
                "tool": {
                    "name": "delegate_task",
                    "namespace": "mcp__agent",
                    "arguments": {"peer": "reviewer", "task": WORK},
                }
            },
            {"relay": True, "phase": "final_answer"},
        ],
    },
    {"match": "Count the lines", "steps": [{"run": "wc -l notes.txt"}, {"say": FOUND, "phase": "final_answer"}]},
]
"""The scripted model's responses to the two messages; its module describes the keys."""


async def demo_platform(env: Mapping[str, str]) -> int:
    """Show a user's message that one agent delegates to another, and the answer on the user's canvas.

    Returns:
        The exit code: 0 if every result was as expected, 1 if not, 130 after an interrupt.
    """
    return await shown(partial(_play, env=env), env)


async def _play(steps: DemoSteps, folder: Path, env: Mapping[str, str]) -> str:
    steps.step("Start a simulated platform, and a scripted model in place of OpenAI")
    async with (
        scripted_model(scenario=write_scenario(folder, SCENARIO)) as model,
        running_platform(options=StandInOptions(mode="push")) as platform,
    ):
        platform.add_workspace(PLANNER, delivery="poll", name="planner", role="plans")
        platform.add_workspace(REVIEWER, delivery="push", name="reviewer", role="reviews")
        steps.done(f"platform at {platform.url}")
        stages = {
            name: set_up(folder / name, model.base_url, env, _place(platform, workspace_id), name)
            for name, workspace_id in (("planner", PLANNER), ("reviewer", REVIEWER))
        }
        (stages["reviewer"].workspace / "notes.txt").write_text(NOTES)
        await _ask(steps, platform, stages)
    return "a user's message in one agent's inbox, work delegated to the other agent, and the answer on the canvas"


def _place(platform: StandInPlatform, workspace_id: str) -> dict[str, str]:
    return {"PLATFORM_URL": platform.url, "WORKSPACE_ID": workspace_id}


async def _ask(steps: DemoSteps, platform: StandInPlatform, stages: Mapping[str, DemoEnvironment]) -> None:
    async with AsyncExitStack() as agents:
        for name, stage in stages.items():
            steps.step(f"Start the agent {name} with its own codex")
            agent = await agents.enter_async_context(running(stage))
            agents.push_async_callback(agent.stop)
            steps.done(agent.ready)
        steps.step("Both agents register and send heartbeats")
        await _until(
            platform, "an agent did not register", lambda: all(_there(platform, each) for each in (PLANNER, REVIEWER))
        )
        steps.done(", ".join(f"{each.name} by {each.delivery}" for each in platform.store.workspaces()))
        steps.step("Send the planner a message on the canvas")
        steps.console.out(f"> {WISH}\n")
        await platform.canvas_message(PLANNER, WISH)
        await _until(platform, "the planner did not delegate work", lambda: bool(platform.delegations))
        given = platform.delegations[0]
        steps.console.out(f"  planner → reviewer: {clean(given.task)}")
        await _until(platform, "no answer appeared on the canvas", lambda: bool(platform.notifications(PLANNER)))
        steps.console.out(f"  reviewer → planner: {clean(platform.delegations[0].result)}\n")
        (answer,) = platform.notifications(PLANNER)
        steps.console.out(f"planner answers on the canvas:\n\n{clean(answer)}\n")
        _check(platform, answer)
        steps.done("on the canvas")


def _there(platform: StandInPlatform, workspace_id: str) -> bool:
    return platform.workspace(workspace_id).beats > 0


async def _until(platform: StandInPlatform, otherwise: str, holds: Callable[[], bool]) -> None:
    with anyio.move_on_after(ANSWER_TIMEOUT_S) as scope:
        await platform.until(holds)
    if scope.cancelled_caught:
        raise DemoFailed(f"{otherwise} within {ANSWER_TIMEOUT_S:g} s")


def _check(platform: StandInPlatform, answer: str) -> None:
    (given,) = platform.delegations
    if (given.source_id, given.target_id) != (PLANNER, REVIEWER):
        raise DemoFailed("the work was delegated to the wrong agent")
    if given.result != FOUND:
        raise DemoFailed(f"the reviewer answered {given.result!r}")
    if FOUND not in answer:
        raise DemoFailed(f"the canvas shows {answer!r}, without the reviewer's answer")
