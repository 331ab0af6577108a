"""Tests which runs start and end while a login is about to be refreshed; the end-to-end tests refresh it."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import anyio
import pytest

from codex_workspace.backends.codex_exec import runtime
from codex_workspace.backends.codex_exec.runtime import LoginLock, wait_for_refresh
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
async def test_runs_with_a_fresh_login_do_not_wait(tmp_path: Path, minutes: float) -> None:
    write(tmp_path, minutes)
    gate = LoginLock(tmp_path)
    async with gate.passed():
        await enter_and_leave(gate)


async def test_runs_without_a_login_do_not_wait(tmp_path: Path) -> None:
    gate = LoginLock(tmp_path)
    async with gate.passed():
        await enter_and_leave(gate)


@pytest.mark.parametrize("minutes", [-60, 4.9])
async def test_other_runs_wait_until_the_login_is_refreshed(tmp_path: Path, minutes: float) -> None:
    write(tmp_path, minutes)
    gate = LoginLock(tmp_path)
    async with gate.passed(), anyio.create_task_group() as tasks:
        with anyio.move_on_after(0.1) as too_early:
            await enter_and_leave(gate)
        assert too_early.cancelled_caught
        tasks.start_soon(enter_and_leave, gate)
        write(tmp_path, 60)


async def test_other_runs_wait_until_the_run_ends_or_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, -1)
    gate = LoginLock(tmp_path)
    await enter_and_leave(gate)
    await enter_and_leave(gate)
    monkeypatch.setattr(runtime, "PATIENCE_S", 0.1)
    async with gate.passed():
        await enter_and_leave(gate)


async def test_after_a_wait_in_vain_no_run_waits_for_the_same_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, -1)
    gate = LoginLock(tmp_path)
    monkeypatch.setattr(runtime, "PATIENCE_S", 0.1)
    async with gate.passed():
        await enter_and_leave(gate)
        monkeypatch.setattr(runtime, "PATIENCE_S", FOREVER_S)
        await enter_and_leave(gate)
        assert [record.message for record in caplog.records] == [
            "codex has not refreshed the login within 0.1 s; further runs do not wait"
        ]
        write(tmp_path, -2)
        with anyio.move_on_after(0.1) as too_early:
            await enter_and_leave(gate)
        assert too_early.cancelled_caught, "another login is waited for again"


@pytest.mark.parametrize("state", ["not due yet", "being written"])
async def test_a_login_that_may_still_be_refreshed_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(runtime, "MARGIN_S", 60)
    write(tmp_path, 5.5)
    if state == "being written":
        (tmp_path / AUTH_NAME).write_text("")
    gate = LoginLock(tmp_path)
    monkeypatch.setattr(runtime, "PATIENCE_S", 0.1)
    async with gate.passed():
        await enter_and_leave(gate)
        monkeypatch.setattr(runtime, "PATIENCE_S", FOREVER_S)
        with anyio.move_on_after(0.1) as too_early:
            await enter_and_leave(gate)
        assert too_early.cancelled_caught


async def test_a_run_that_began_with_a_fresh_login_delays_no_other(tmp_path: Path) -> None:
    write(tmp_path, 60)
    gate = LoginLock(tmp_path)
    async with gate.passed():
        write(tmp_path, -1)
        await enter_and_leave(gate)


async def test_an_error_in_a_run_is_raised_and_lets_the_next_run_start(tmp_path: Path) -> None:
    write(tmp_path, -1)
    gate = LoginLock(tmp_path)
    with pytest.raises(ZeroDivisionError):
        async with gate.passed():
            raise ZeroDivisionError
    await enter_and_leave(gate)


async def test_a_cancelled_run_delays_others_until_it_has_ended(tmp_path: Path) -> None:
    write(tmp_path, -1)
    gate = LoginLock(tmp_path)
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


def never() -> bool:
    return False


@pytest.mark.parametrize("minutes", [None, 5.5])
async def test_a_process_with_a_fresh_login_or_none_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float | None
) -> None:
    monkeypatch.setattr(runtime, "SPARE_S", FOREVER_S)
    if minutes is not None:
        write(tmp_path, minutes)
    with anyio.fail_after(5):
        await wait_for_refresh(tmp_path, never)


async def test_a_process_whose_login_is_due_gets_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, -1)
    with anyio.fail_after(5):
        monkeypatch.setattr(runtime, "SPARE_S", FOREVER_S)
        await wait_for_refresh(tmp_path, lambda: True)
        monkeypatch.setattr(runtime, "SPARE_S", 0.1)
        await wait_for_refresh(tmp_path, never)


@pytest.mark.parametrize("written", ["", '{"tokens"'])
async def test_the_wait_for_a_refresh_outlasts_cancellations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.setattr(runtime, "SPARE_S", FOREVER_S)
    write(tmp_path, -1)
    sparing = asyncio.create_task(wait_for_refresh(tmp_path, never))
    for _ in range(3):
        await anyio.sleep(0.05)
        sparing.cancel()
        (tmp_path / AUTH_NAME).write_text(written)
    await anyio.sleep(0.05)
    assert not sparing.done()
    write(tmp_path, 60)
    with anyio.fail_after(5), pytest.raises(asyncio.CancelledError):
        await sparing
