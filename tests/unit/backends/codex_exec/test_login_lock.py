"""Who may begin while a login is about to be refreshed, and be ended; that codex refreshes it is tested in e2e."""

import asyncio
import json
import logging
from datetime import timedelta
from pathlib import Path

import anyio
import pytest

from codex_workspace.backends.codex_exec.login_lock import LoginLock
from codex_workspace.config.login import AUTH_NAME
from tests.e2e.login_server import token

FOREVER_S = 1000.0


def write(codex_home: Path, minutes: float) -> None:
    """Write a login whose access token holds for so long."""
    access = token("one", "access", timedelta(minutes=minutes))
    tokens = {"id_token": "i", "access_token": access, "refresh_token": "r"}
    (codex_home / AUTH_NAME).write_text(json.dumps({"tokens": tokens}))


async def enter_and_leave(gate: LoginLock) -> None:
    with anyio.fail_after(5):
        async with gate.passed():
            pass


@pytest.mark.parametrize("minutes", [5.5, 60])
async def test_with_a_fresh_login_nobody_waits(tmp_path: Path, minutes: float) -> None:
    write(tmp_path, minutes)
    gate = LoginLock(tmp_path, FOREVER_S)
    async with gate.passed():
        await enter_and_leave(gate)


async def test_without_a_login_nobody_waits(tmp_path: Path) -> None:
    gate = LoginLock(tmp_path, FOREVER_S)
    async with gate.passed():
        await enter_and_leave(gate)


@pytest.mark.parametrize("minutes", [-60, 4.9])
async def test_the_others_wait_until_it_is_refreshed(tmp_path: Path, minutes: float) -> None:
    write(tmp_path, minutes)
    gate = LoginLock(tmp_path, FOREVER_S)
    async with gate.passed(), anyio.create_task_group() as tasks:
        with anyio.move_on_after(0.1) as too_early:
            await enter_and_leave(gate)
        assert too_early.cancelled_caught
        tasks.start_soon(enter_and_leave, gate)
        write(tmp_path, 60)


async def test_the_others_wait_until_the_run_is_over_or_patience_is(tmp_path: Path) -> None:
    write(tmp_path, -1)
    gate = LoginLock(tmp_path, FOREVER_S)
    await enter_and_leave(gate)
    await enter_and_leave(gate)
    gate = LoginLock(tmp_path, 0.1)
    async with gate.passed():
        await enter_and_leave(gate)


async def test_what_goes_wrong_in_a_run_comes_out_as_it_is_and_lets_the_next_in(tmp_path: Path) -> None:
    write(tmp_path, -1)
    gate = LoginLock(tmp_path, FOREVER_S)
    with pytest.raises(ZeroDivisionError):
        async with gate.passed():
            raise ZeroDivisionError
    await enter_and_leave(gate)


async def test_a_run_that_is_cancelled_keeps_the_others_out_until_it_is_ended(tmp_path: Path) -> None:
    write(tmp_path, -1)
    gate = LoginLock(tmp_path, FOREVER_S)
    begun, ended = anyio.Event(), anyio.Event()

    async def run() -> None:
        async with gate.passed():
            begun.set()
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await ended.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await begun.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(0.1) as too_early:
                await enter_and_leave(gate)
            ended.set()
            assert too_early.cancelled_caught
            await enter_and_leave(gate)


async def test_a_login_that_is_not_refreshed_in_time_holds_up_nobody_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, -1)
    gate = LoginLock(tmp_path, 0.5)
    with caplog.at_level(logging.WARNING):
        async with gate.passed(), gate.passed():
            began = anyio.current_time()
            async with gate.passed(), gate.passed(), gate.passed():
                assert anyio.current_time() - began < 0.5
    assert [record.message for record in caplog.records] == [
        "codex has not refreshed the login within 0.5 s; further runs do not wait"
    ]
    write(tmp_path, -2)
    async with gate.passed():
        with anyio.move_on_after(0.1) as too_early:
            await enter_and_leave(gate)
    assert too_early.cancelled_caught, "another login is waited for again"


async def test_a_login_that_was_not_due_yet_is_not_given_up(tmp_path: Path) -> None:
    write(tmp_path, 5 + 1 / 60)
    gate = LoginLock(tmp_path, 0.1)
    async with gate.passed(), gate.passed():
        began = anyio.current_time()
        await enter_and_leave(gate)
        async with gate.passed():
            await enter_and_leave(gate)
        assert anyio.current_time() - began > 0.1


def never() -> bool:
    return False


@pytest.mark.parametrize("minutes", [None, 5.5])
async def test_a_codex_with_a_fresh_login_or_none_is_ended_at_once(tmp_path: Path, minutes: float | None) -> None:
    if minutes is not None:
        write(tmp_path, minutes)
    began = anyio.current_time()
    await LoginLock(tmp_path, spare_s=5).spared(never)
    assert anyio.current_time() - began < 5


async def test_a_codex_with_a_login_that_is_due_is_spared_until_it_is_over_or_time_is_up(tmp_path: Path) -> None:
    write(tmp_path, -1)
    began = anyio.current_time()
    await LoginLock(tmp_path, spare_s=5).spared(lambda: True)
    await LoginLock(tmp_path, spare_s=0.1).spared(never)
    assert 0.1 <= anyio.current_time() - began < 5


@pytest.mark.parametrize("written", ["", '{"tokens"'])
async def test_a_codex_is_spared_until_the_login_is_refreshed_whatever_cancels_that(
    tmp_path: Path, written: str
) -> None:
    write(tmp_path, -1)
    gate = LoginLock(tmp_path, spare_s=20)
    sparing = asyncio.create_task(gate.spared(never))
    for _ in range(3):
        await anyio.sleep(0.05)
        sparing.cancel()
        (tmp_path / AUTH_NAME).write_text(written)
    await anyio.sleep(0.05)
    assert not sparing.done()
    write(tmp_path, 60)
    with anyio.fail_after(5), pytest.raises(asyncio.CancelledError):
        await sparing
