"""Both backends report the same work by the same events, with the real codex."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from codex_workspace.backends.codex_exec.runtime import CodexExec
from codex_workspace.codex.runtime import create
from codex_workspace.runtimes.events import AgentEvent, FileChange, Plan, ToolResult, ToolUse
from codex_workspace.runtimes.launch import INACTIVITY_S, NO_SERVERS, Launch
from tests.e2e.test_exec_process import UNSANDBOXED, launch, model, script
from tests.unit.runtimes.test_convert import check_balance, done, texts_of

__all__ = ["launch", "model"]

LOOK = {"say": "I look first.", "reason": "hm", "run": "echo hi"}
ADD = {"patch": "*** Begin Patch\n*** Add File: a.txt\n+one\n*** End Patch"}
CHANGE = {"patch": "*** Begin Patch\n*** Update File: a.txt\n@@\n-one\n+two\n*** End Patch"}
FAIL = {"run": "echo no >&2; exit 3"}
SEARCH = {"search": "basalt", "say": "It is 3 g/cm3."}
REFUSED = {"fail": 401}


async def run_exec(launch: Launch, prompt: str) -> list[AgentEvent]:
    async with CodexExec(launch).run(prompt, UNSANDBOXED) as run:
        return [event async for event in run]


async def run_app_server(launch: Launch, prompt: str) -> list[AgentEvent]:
    async with create(launch, NO_SERVERS, INACTIVITY_S) as runs, runs.run(prompt, UNSANDBOXED) as run:
        return [event async for event in run]


def summary(events: Sequence[AgentEvent], cwd: Path) -> str:
    """Return what both backends must report alike: all but IDs, times, tokens, and events of the app-server only."""
    report: list[object] = []
    results = {event.id: event for event in events if isinstance(event, ToolResult)}
    for event in events:
        match event:
            case ToolUse(id=id_, name=name, tool=tool, input=arguments):
                result = results[id_]
                arguments = {key: value for key, value in arguments.items() if key != "cwd"}
                report.append((name, tool, arguments, result.output, result.is_error, result.exit_code))
            case FileChange(changes=changes):
                report.append([(each.path, each.kind) for each in changes])
            case Plan(steps=steps):
                report.append([step.text for step in steps])
            case _:
                pass
    end = done(events)
    report += [list(texts_of(events).values()), end.text, end.stop_reason, end.error.code if end.error else None]
    return json.dumps(report, indent=1).replace(str(cwd), "")


@pytest.mark.versions
@pytest.mark.parametrize(
    "steps",
    [(LOOK, ADD, CHANGE, FAIL, {"say": "Done so far."}), (SEARCH,), (REFUSED,)],
    ids=["work", "search", "refused"],
)
async def test_both_backends_report_the_same_work_alike(launch: Launch, steps: Sequence[Mapping[str, object]]) -> None:
    report = []
    for backend, name in ((run_exec, "one"), (run_app_server, "two")):
        setup = replace(launch, cwd=launch.cwd / name)
        setup.cwd.mkdir()
        events = await backend(setup, script(*steps))
        check_balance(events)
        report.append(summary(events, setup.cwd))
    assert report[0] == report[1]
