"""The demo of two agents on a platform, as a person runs it."""

import re
import sys
from pathlib import Path
from subprocess import DEVNULL, STDOUT

import anyio
import pytest

from tests.e2e.agent_process import REPOSITORY
from tests.unit.devkit.test_demo import environment, free_of_traces

COMMAND = (sys.executable, "-m", "codex_workspace", "demo", "--platform")


@pytest.mark.slow
async def test_a_canvas_message_is_handed_on_and_the_answer_comes_back_to_the_canvas(tmp_path: Path) -> None:
    env = environment(tmp_path, {"PLATFORM_URL": "http://127.0.0.1:1", "WORKSPACE_ID": "another", "A2A_PORT": "1"})
    with anyio.fail_after(60):
        done = await anyio.run_process(COMMAND, env=env, cwd=REPOSITORY, stderr=STDOUT, stdin=DEVNULL, check=False)
    said = done.stdout.decode()
    assert done.returncode == 0, said
    assert re.findall(r"^(\d)\. ", said, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "[planner by poll, reviewer by push, " in said
    canvas = said.partition("planner answers on the canvas:")[2]
    assert "text from the peer" in canvas
    assert "notes.txt has 3 lines; I have counted them with wc." in canvas
    assert re.search(r"^Completed in \d+\.\d s: a user's message in one agent's inbox", said, re.MULTILINE)
    assert "\x1b" not in said
    assert free_of_traces(tmp_path)
