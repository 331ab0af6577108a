"""The exit code of `serve` for a signal that arrives while the agent starts (`codex_workspace.__main__`)."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def catches_sigterm(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM: it runs `main`."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def is_importing(pid: int) -> bool:
    """Return whether a process has opened pydantic's compiled module: it is in the middle of its imports."""
    return "pydantic_core" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_reached", [catches_sigterm, is_importing])
def test_a_signal_during_the_start_ends_serve_with_0(
    tmp_path: Path, number: signal.Signals, is_reached: Callable[[int], bool]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "codex_workspace", "serve"],
        cwd=ROOT,
        env={
            **{"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OPENAI_API_KEY": "sk-x-0123456789"},
            **{"WORKSPACE_DIR": str(tmp_path), "WORKSPACE_STATE_DIR": str(tmp_path)},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not is_reached(process.pid):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(number)
    _out, said = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in said) == (0, False)
