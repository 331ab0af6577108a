"""Several `codex exec` share a ChatGPT subscription: one of them refreshes the login, and it is never lost."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta

import anyio
import pytest

from codex_workspace.backends.codex_exec.runtime import PATIENCE_S, CodexExec, run_codex
from codex_workspace.config.login import AUTH_NAME
from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.runtimes.launch import Launch
from tests.e2e.login_server import ACCOUNT, LoginServer, running_login_server, token
from tests.e2e.test_exec_process import UNSANDBOXED, events_of, last_event, launch, model, remaining_processes, script
from tests.support.waiting import HANG_S

__all__ = ["launch", "model"]

pytestmark = [pytest.mark.versions, pytest.mark.with_exec]

WaitForRefresh = Callable[[], Coroutine[None, None, None]]

EXPIRED_TOKEN = token(ACCOUNT, "access-old", timedelta(minutes=-1))


def with_subscription(launch: Launch, server: LoginServer, access_token: str = EXPIRED_TOKEN) -> Launch:
    """Return the launch with a login that this server refreshes."""
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


async def run_concurrently(codex: CodexExec, number: int) -> list[str]:
    """Run prompts concurrently and return their answers."""
    answers: list[str] = []

    async def ask() -> None:
        done = last_event(await events_of(codex, script({"say": "Said."})))
        answers.append(done.text if done.error is None else done.error.message)

    async with anyio.create_task_group() as tasks:
        for _ in range(number):
            tasks.start_soon(ask)
    return answers


async def test_concurrent_runs_refresh_the_login_once(launch: Launch, model: ScriptedModel) -> None:
    async with running_login_server(0.5) as server:
        codex = CodexExec(with_subscription(launch, server))
        assert await run_concurrently(codex, 4) == ["Said."] * 4
        assert len(server.requests) == 1
        assert await run_concurrently(codex, 2) == ["Said."] * 2
        assert len(server.requests) == 1
        tokens = json.loads((launch.codex_home / AUTH_NAME).read_text())["tokens"]
    assert tokens["refresh_token"] == server.refresh_token
    assert {request.authorization for request in model.requests} == {f"Bearer {tokens['access_token']}"}


async def abort(codex: CodexExec, refresh_requested: WaitForRefresh) -> None:
    """Abort a run while it refreshes the login."""
    async with codex.run(script({"say": "Said."}), UNSANDBOXED) as run, anyio.create_task_group() as tasks:

        async def stop() -> None:
            await refresh_requested()
            run.abort()

        tasks.start_soon(stop)
        assert last_event([event async for event in run]).stop_reason == "interrupted"


async def cancel_the_scope(codex: CodexExec, refresh_requested: WaitForRefresh) -> None:
    """Cancel the run's scope with anyio during the refresh."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(events_of, codex, script({"say": "Said."}))
        await refresh_requested()
        tasks.cancel_scope.cancel()


async def cancel_the_task(codex: CodexExec, refresh_requested: WaitForRefresh) -> None:
    """Cancel the run's task with asyncio during the refresh, twice, which no shield withstands."""
    running = asyncio.create_task(events_of(codex, script({"say": "Said."})))
    await refresh_requested()
    for _ in range(2):
        running.cancel()
        await anyio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("stop", [abort, cancel_the_scope, cancel_the_task])
async def test_stopping_a_run_during_a_login_refresh_keeps_the_login(
    launch: Launch, model: ScriptedModel, stop: Callable[[CodexExec, WaitForRefresh], Coroutine[None, None, None]]
) -> None:
    async with running_login_server(0.5) as server:
        codex = CodexExec(with_subscription(launch, server))
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop, codex, server.wait_for_requests)
                await server.wait_for_requests()
                # It waits for the run that is being stopped.
                assert await run_concurrently(codex, 1) == ["Said."]
        assert len(server.requests) == 1
        tokens = json.loads((launch.codex_home / AUTH_NAME).read_text())["tokens"]
    assert tokens["refresh_token"] == server.refresh_token
    assert remaining_processes(launch) == []


async def test_a_one_shot_command_that_times_out_during_a_refresh_keeps_the_login(launch: Launch) -> None:
    async with running_login_server(0.5) as server:
        launch = with_subscription(launch, server)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_codex, launch, "mcp", "list")
            await server.wait_for_requests()
            tasks.cancel_scope.cancel()
        tokens = json.loads((launch.codex_home / AUTH_NAME).read_text())["tokens"]
    assert tokens["refresh_token"] == server.refresh_token == "refresh-1-0123456789"


async def test_an_unused_login_delays_no_run(launch: Launch) -> None:
    async with running_login_server(0) as server:
        with_subscription(launch, server)
        codex = CodexExec(launch)
        async with codex.run(script({"run": "sleep 600"}), UNSANDBOXED) as run:
            await anext(run)
            with anyio.fail_after(PATIENCE_S - 1):
                assert await run_concurrently(codex, 1) == ["Said."]
        assert server.requests == []
