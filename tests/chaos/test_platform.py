"""On a platform with random faults, each message is answered once and in order; the short form."""

import random
import sys
from pathlib import Path

import anyio
import pytest

from codex_workspace.devkit.platform.faults import Faults
from tests.chaos.platform import PlatformRunner, make_plan, run
from tests.support.ports import free_port

MESSAGES = 30
DEATHS = 3


async def test_a_platform_that_is_being_restarted_is_not_the_current_one(tmp_path: Path) -> None:
    runner = PlatformRunner(tmp_path / "platform.sqlite3", free_port(), Faults())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        first = await runner.current()
        runner.begin_restart()
        assert await runner.current() is not first
        tasks.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.alone
async def test_every_platform_message_is_answered_once(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"make chaos-platform SEED={seed} MESSAGES={MESSAGES} DEATHS={DEATHS}\n")
    report = await run(make_plan(seed, MESSAGES, DEATHS), tmp_path)
    assert not report.wrong, str(report)
