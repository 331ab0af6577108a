"""How many modules a plain second message runs through."""

import sys
from typing import Final

import anyio

from tests.support.paths import ROOT

MAX_MODULES: Final = 25


async def test_a_plain_second_message_runs_through_few_modules() -> None:
    command = [sys.executable, "-m", "tests.project.message_path"]
    modules = (await anyio.run_process(command, cwd=ROOT)).stdout.decode().split()
    assert "tasks.answering" in modules
    assert len(modules) <= MAX_MODULES, "\n".join(modules)
