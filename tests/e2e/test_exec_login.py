"""A ChatGPT subscription under several `codex exec` at once: its login is refreshed by one of them, and never lost."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from functools import partial

import anyio
import pytest

from codex_workspace.backends.codex_exec.runtime import PATIENCE_S, CodexExec, run_codex
from codex_workspace.config.login import AUTH_NAME
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.runtimes.launch import Launch
from tests.e2e.login_server import ACCOUNT, LoginServer, running_login_server, token
from tests.e2e.test_exec_process import FREE, done_of, events_of, launch, left_of, model, script
from tests.support.waiting import HANG_S

__all__ = ["launch", "model"]

pytestmark = [pytest.mark.versions, pytest.mark.with_exec]

Asked = Callable[[], Coroutine[None, None, None]]

OLD = token(ACCOUNT, "access-old", timedelta(minutes=-1))


def subscribed(launch: Launch, server: LoginServer, access_token: str = OLD) -> Launch:
    """Return the same codex with a login that this server refreshes."""
    tokens = {
        "id_token": token(ACCOUNT, "id-old"),
        "access_token": access_token,
        "refresh_token": server.refresh_token,
        "account_id": ACCOUNT,
    }
    login = {"auth_mode": "chatgpt", "tokens": tokens, "last_refresh": "2026-01-01T00:00:00Z"}
    (launch.codex_home / AUTH_NAME).write_text(json.dumps(login))
    return replace(
        launch,
        api_key=None,
        overrides={"cli_auth_credentials_store": '"file"'},
        handed={"CODEX_REFRESH_TOKEN_URL_OVERRIDE": server.url},
    )


async def answers(codex: CodexExec, number: int) -> list[str]:
    """Have so many prompts answered at once."""
    found: list[str] = []

    async def ask() -> None:
        done = done_of(await events_of(codex, script({"say": "Said."})))
        found.append(done.text if done.error is None else done.error.message)

    async with anyio.create_task_group() as tasks:
        for _ in range(number):
            tasks.start_soon(ask)
    return found


async def test_concurrent_runs_refresh_the_login_once(launch: Launch, model: ScriptedModel) -> None:
    async with running_login_server(0.5) as server:
        codex = CodexExec(subscribed(launch, server))
        assert await answers(codex, 4) == ["Said."] * 4
        assert len(server.requests) == 1
        assert await answers(codex, 2) == ["Said."] * 2
        assert len(server.requests) == 1
        held = json.loads((launch.codex_home / AUTH_NAME).read_text())["tokens"]
    assert held["refresh_token"] == server.refresh_token
    assert {request.authorization for request in model.requests} == {f"Bearer {held['access_token']}"}


async def abort(codex: CodexExec, asked: Asked) -> None:
    """Have a run aborted once the login server is asked."""
    async with codex.run(script({"say": "Said."}), FREE) as run, anyio.create_task_group() as tasks:

        async def stop() -> None:
            await asked()
            run.abort()

        tasks.start_soon(stop)
        assert done_of([event async for event in run]).stop_reason == "interrupted"


async def cancel_the_scope(codex: CodexExec, asked: Asked) -> None:
    """Have the task of a run cancelled by anyio then."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(events_of, codex, script({"say": "Said."}))
        await asked()
        tasks.cancel_scope.cancel()


async def cancel_the_task(codex: CodexExec, asked: Asked) -> None:
    """Have it cancelled by asyncio then, twice, which no shield holds."""
    running = asyncio.create_task(events_of(codex, script({"say": "Said."})))
    await asked()
    for _ in range(2):
        running.cancel()
        await anyio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("stop", [abort, cancel_the_scope, cancel_the_task])
async def test_stopping_a_run_during_a_login_refresh_keeps_the_login(
    launch: Launch, model: ScriptedModel, stop: Callable[[CodexExec, Asked], Coroutine[None, None, None]]
) -> None:
    async with running_login_server(0.5) as server:
        codex = CodexExec(subscribed(launch, server))
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop, codex, server.wait_for_requests)
                await server.wait_for_requests()
                # It waits for the one that is stopped, although that is.
                assert await answers(codex, 1) == ["Said."]
        assert len(server.requests) == 1
        held = json.loads((launch.codex_home / AUTH_NAME).read_text())["tokens"]
    assert held["refresh_token"] == server.refresh_token
    assert left_of(launch) == []


async def test_a_one_shot_command_that_times_out_during_a_refresh_keeps_the_login(launch: Launch) -> None:
    async with running_login_server(0.5) as server:
        launch = subscribed(launch, server)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(run_codex, launch, "mcp", "list", within_s=HANG_S, late="late"))
            await server.wait_for_requests()
            tasks.cancel_scope.cancel()
        held = json.loads((launch.codex_home / AUTH_NAME).read_text())["tokens"]
    assert held["refresh_token"] == server.refresh_token == "refresh-1-0123456789"


async def test_an_unused_login_delays_no_run(launch: Launch) -> None:
    async with running_login_server(0) as server:
        subscribed(launch, server)
        codex = CodexExec(launch)
        async with codex.run(script({"run": "sleep 600"}), FREE) as run:
            await anext(run)
            with anyio.fail_after(PATIENCE_S - 1):
                assert await answers(codex, 1) == ["Said."]
        assert server.requests == []
