"""Who may begin while a login is about to be refreshed; that codex refreshes it is tested in e2e."""

import json
from datetime import timedelta
from pathlib import Path

import anyio
import pytest

from codex_workspace.exec_login import LoginGate
from codex_workspace.subscription import AUTH_NAME
from tests.e2e.test_providers import token

FOREVER_S = 1000.0


def write(codex_home: Path, minutes: float) -> None:
    """Write a login whose access token holds for so long."""
    access = token("one", "access", timedelta(minutes=minutes))
    tokens = {"id_token": "i", "access_token": access, "refresh_token": "r"}
    (codex_home / AUTH_NAME).write_text(json.dumps({"tokens": tokens}))


async def enter_and_leave(gate: LoginGate) -> None:
    with anyio.fail_after(5):
        async with gate.passed():
            pass


@pytest.mark.parametrize("minutes", [5.5, 60])
async def test_with_a_fresh_login_nobody_waits(tmp_path: Path, minutes: float) -> None:
    write(tmp_path, minutes)
    gate = LoginGate(tmp_path, FOREVER_S)
    async with gate.passed():
        await enter_and_leave(gate)


async def test_without_a_login_nobody_waits(tmp_path: Path) -> None:
    gate = LoginGate(tmp_path, FOREVER_S)
    async with gate.passed():
        await enter_and_leave(gate)


@pytest.mark.parametrize("minutes", [-60, 4.9])
async def test_the_others_wait_until_it_is_refreshed(tmp_path: Path, minutes: float) -> None:
    write(tmp_path, minutes)
    gate = LoginGate(tmp_path, FOREVER_S)
    async with gate.passed(), anyio.create_task_group() as tasks:
        with anyio.move_on_after(0.1) as too_early:
            await enter_and_leave(gate)
        assert too_early.cancelled_caught
        tasks.start_soon(enter_and_leave, gate)
        write(tmp_path, 60)


async def test_the_others_wait_until_the_run_is_over_or_patience_is(tmp_path: Path) -> None:
    write(tmp_path, -1)
    gate = LoginGate(tmp_path, FOREVER_S)
    await enter_and_leave(gate)
    await enter_and_leave(gate)
    gate = LoginGate(tmp_path, 0.1)
    async with gate.passed():
        await enter_and_leave(gate)


async def test_what_goes_wrong_in_a_run_comes_out_as_it_is_and_lets_the_next_in(tmp_path: Path) -> None:
    write(tmp_path, -1)
    gate = LoginGate(tmp_path, FOREVER_S)
    with pytest.raises(ZeroDivisionError):
        async with gate.passed():
            raise ZeroDivisionError
    await enter_and_leave(gate)
