"""Calls to the platform's runtime, in each of its generations and without it; also covers `active_tasks`.

Covers `platform.active_tasks`.
"""

import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import anyio
import pytest

from codex_workspace.platform.active_tasks import MAX_TASK_CHARS, ActiveTasks
from codex_workspace.platform.runtime_contract import report_wedge, update_heartbeat
from tests.support.paths import ROOT

RUNTIMES: Final = ROOT / "tests" / "runtimes"
GENERATIONS: Final = ("april", "may", "august")


@contextmanager
def hosted_by(generation: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a generation of the runtime in this process."""
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(RUNTIMES / generation))
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "molecule_runtime"]:
                del sys.modules[name]


def helpers() -> Any:
    return importlib.import_module("molecule_runtime.executor_helpers")


@asynccontextmanager
async def telling(heartbeat: object) -> AsyncIterator[ActiveTasks]:
    active = ActiveTasks()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(update_heartbeat, heartbeat, active)
            yield active
            tasks.cancel_scope.cancel()


async def settled() -> None:
    await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("generation", GENERATIONS)
async def test_the_platform_sees_how_many_tasks_are_active(
    generation: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BEATS", str(tmp_path / "beats"))
    with hosted_by(generation, monkeypatch):
        heartbeat = helpers().HeartbeatLoop()
        async with telling(heartbeat) as active:
            with active.track("first"):
                await settled()
                with active.track("second\nof two"):
                    await settled()
                    assert (heartbeat.active_tasks, heartbeat.current_task) == (2, "second of two")
                await settled()
                assert (heartbeat.active_tasks, heartbeat.current_task) == (1, "first")
            await settled()
            assert (heartbeat.active_tasks, heartbeat.current_task) == (0, "")
            with active.track("x" * 1000):
                await settled()
                assert heartbeat.current_task == "x" * MAX_TASK_CHARS
            await settled()
    assert (tmp_path / "beats").read_text().splitlines() == ["1 first", "0 ", "1 " + "x" * MAX_TASK_CHARS, "0 "]


async def test_a_platform_that_does_not_respond_delays_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def set_current_task(heartbeat: Any, task: str) -> None:
        heartbeat.active_tasks += 1 if task else -1
        await anyio.sleep_forever()

    with hosted_by("may", monkeypatch):
        monkeypatch.setattr(helpers(), "set_current_task", set_current_task)
        heartbeat = helpers().HeartbeatLoop()
        async with telling(heartbeat) as active:
            with active.track("first"):
                await settled()
                assert heartbeat.active_tasks == 1
            # It leaves at once; who tells the platform is still waiting for it.
            assert heartbeat.active_tasks == 1


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("odd"), KeyError("token")])
async def test_a_failing_helper_ends_no_task(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async def set_current_task(heartbeat: object, task: str) -> None:
        raise error

    with hosted_by("may", monkeypatch):
        monkeypatch.setattr(helpers(), "set_current_task", set_current_task)
        heartbeat = helpers().HeartbeatLoop()
        async with telling(heartbeat) as active:
            with active.track("first"):
                await settled()
                assert heartbeat.active_tasks == 1
            await settled()
            assert heartbeat.active_tasks == 0


@pytest.mark.parametrize("heartbeat", [None, object()], ids=["none", "of another kind"])
async def test_without_a_heartbeat_nothing_is_reported(heartbeat: object) -> None:
    async with telling(heartbeat) as active:
        with active.track("first"):
            await settled()


def wedge() -> ModuleType:
    return importlib.import_module("molecule_runtime.runtime_wedge")


@pytest.mark.parametrize("generation", ["may", "august"])
def test_a_wedge_is_marked_and_cleared(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted_by(generation, monkeypatch):
        report_wedge("codex is broken")
        assert wedge().wedge_reason() == "codex is broken"
        report_wedge(None)
        assert not wedge().is_wedged()


def test_a_generation_without_wedges_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted_by("april", monkeypatch):
        report_wedge("codex is broken")
        report_wedge(None)
    report_wedge("and without any generation")
