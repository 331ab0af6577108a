"""One codex for one thing: what is said of it in time, and where it cannot be."""

import uuid
from pathlib import Path

import anyio
import pytest

from app_server import MARK, Launch
from codex_workspace.errors import CodexCannotStart
from codex_workspace.exec_once import run_once
from codex_workspace.processes import marked


def launch(folder: Path, script: str) -> Launch:
    """How to start a program that stands for codex."""
    program = folder / "codex"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return Launch(program, folder, folder, {"PATH": "/usr/bin:/bin"}, family=f"once-{uuid.uuid4().hex}")


async def test_what_it_has_said_comes_back(tmp_path: Path) -> None:
    ran = await run_once(launch(tmp_path, 'echo "$1 $2"; cat; echo no >&2; exit 4'), "a", "b", within_s=20, late="late")
    assert (ran.stdout, ran.stderr, ran.returncode) == (b"a b\n", b"no\n", 4)


async def test_what_takes_too_long_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    asleep = launch(tmp_path, "sleep 600 & sleep 600 & wait")
    with anyio.fail_after(20), pytest.raises(CodexCannotStart, match=r"^it takes too long$"):
        await run_once(asleep, within_s=1, late="it takes too long")
    assert marked(MARK, f"{asleep.family}.", or_longer=True) == []


@pytest.mark.parametrize("missing", ["codex", "work"])
async def test_what_is_not_there_is_named(tmp_path: Path, missing: str) -> None:
    (tmp_path / "bin").mkdir()
    there = launch(tmp_path / "bin", "true")
    gone = Launch(
        tmp_path / "codex" if missing == "codex" else there.binary,
        tmp_path,
        tmp_path / "work" if missing == "work" else tmp_path,
    )
    with pytest.raises(CodexCannotStart, match=f"codex cannot be started: {tmp_path / missing}: No such file"):
        await run_once(gone, within_s=20, late="late")
