"""The demo as a person runs it."""

import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import anyio
import psutil
import pytest

from tests.e2e.agent_process import REPOSITORY

COMMAND = (sys.executable, "-m", "codex_workspace", "demo")

WORK = re.compile(
    r"""> Please write a small file and show me its content\.

I will write the file, then read it\.

\*\*Write\*\*

- add `/.*/workspace/greeting\.txt`

```diff
--- /dev/null
\+\+\+ /.*/workspace/greeting\.txt
@@ -0,0 \+1,1 @@
\+hello from the sandbox
```

\*\*Bash\*\*

```bash
uname -sr && ls && cat greeting\.txt
```

```
Linux \S+
greeting\.txt
hello from the sandbox
```

Done: I wrote greeting\.txt with a patch and read it with a command\.

\[completed, """
)
"""What is shown of the first message."""


def environment(temporary: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """A person's environment, with what must not disturb the demo: another agent's settings, keys, a proxy."""
    return {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(temporary / "nobody"),
        "TMPDIR": str(temporary),
        "A2A_PORT": "1",
        "A2A_TOKEN": "",
        "WORKSPACE_CONFIG_PATH": "/nowhere",
        "OPENAI_API_KEY": "sk-real",
        "HTTP_PROXY": "http://127.0.0.1:1",
        **(env or {}),
    }


def left_behind(temporary: Path) -> list[psutil.Process]:
    """The processes that were started with a folder below `temporary`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(temporary) in value for value in (*process.environ().values(), *process.cmdline())):
                found.append(process)
    return found


def free_of_traces(temporary: Path) -> bool:
    return left_behind(temporary) == [] and list(temporary.iterdir()) == []


async def test_the_demo_shows_an_answer_a_command_and_a_memory(tmp_path: Path) -> None:
    with anyio.fail_after(40):
        done = await anyio.run_process(
            COMMAND, env=environment(tmp_path), cwd=REPOSITORY, stderr=STDOUT, stdin=DEVNULL, check=False
        )
    said = done.stdout.decode()
    assert done.returncode == 0, said
    assert "[ready: codex " in said
    assert WORK.search(said), said
    assert len(re.findall(r"^\[completed, [\d,]+ tokens .*, \d+\.\d s\]$", said, re.MULTILINE)) == 3
    assert re.findall(r"^(\d)\. ", said, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "user: What have we said so far?\nassistant: user: Please write" in said
    assert re.search(r"^Completed in \d+\.\d s: text streamed in \d+ pieces, .*a restart\.$", said, re.MULTILINE)
    assert "\x1b" not in said
    assert free_of_traces(tmp_path)


@pytest.mark.parametrize("moment", ["1. Start", "uname"])
@pytest.mark.slow
async def test_ctrl_c_leaves_no_process(tmp_path: Path, moment: str) -> None:
    process = await anyio.open_process(
        COMMAND, env=environment(tmp_path), cwd=REPOSITORY, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
    )
    async with process:
        assert process.stdout is not None
        with anyio.fail_after(40):
            said = ""
            while moment not in said:
                said += (await process.stdout.receive()).decode()
            process.send_signal(signal.SIGINT)
            async for data in process.stdout:
                said += data.decode()
            assert await process.wait() == 130
    assert "Traceback" not in said
    assert said.endswith("\nInterrupted; all processes of the demo have been stopped.\n")
    assert free_of_traces(tmp_path)


@pytest.mark.slow
async def test_an_agent_that_fails_to_start_exits_with_1(tmp_path: Path) -> None:
    env = environment(tmp_path, {"CODEX_BIN": "/bin/false"})
    with anyio.fail_after(40):
        done = await anyio.run_process(COMMAND, env=env, cwd=REPOSITORY, stderr=STDOUT, stdin=DEVNULL, check=False)
    said = done.stdout.decode()
    assert done.returncode == 1
    assert "Not as expected: the agent did not start; its last words: codex cannot start" in said
    assert "Traceback" not in said
    assert free_of_traces(tmp_path)
