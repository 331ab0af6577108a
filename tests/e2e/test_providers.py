"""Each kind of provider, simulated by the scripted model, with new state and with the state of an earlier start.

All other tests use a custom endpoint.
"""

import json
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import anyio
import pytest
from a2a.types import TaskState

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.model_requests import Message
from tests.e2e.agent_process import SECRET, AgentSetup, running_agent
from tests.e2e.client import Peer, Seen, peer
from tests.e2e.login_server import ACCOUNT, LoginServer, running_login_server, token
from tests.e2e.test_exec_process import binary
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.slow

COMPLETED: Final = TaskState.TASK_STATE_COMPLETED


def login(
    account: str = ACCOUNT,
    token_id: str = "first",
    refreshed_at: datetime | None = None,
    valid_for: timedelta = timedelta(days=1),
    refresh_token: str = "",
) -> str:
    """Return the content of an auth.json whose access token is valid for `valid_for`."""
    tokens = {
        "id_token": token(account, f"id-{token_id}"),
        "access_token": token(account, f"access-{token_id}", valid_for),
        "refresh_token": refresh_token or f"refresh-{account}-{token_id}-0123456789",
        "account_id": account,
    }
    refreshed = (refreshed_at or datetime.now(UTC)).isoformat()
    return json.dumps({"auth_mode": "chatgpt", "OPENAI_API_KEY": None, "tokens": tokens, "last_refresh": refreshed})


def access_token(content: str) -> str:
    return str(json.loads(content)["tokens"]["access_token"])


def with_subscription(setup: AgentSetup, content: str) -> AgentSetup:
    """Return the setup of an agent with a subscription, whose endpoint is the scripted model."""
    entry = {"name": "chatgpt", "auth_mode": "chatgpt_subscription", "base_url": setup.model_url}
    config = {"runtime_config": {"model": "gpt-5.5"}, "providers": [entry]}
    return replace(setup, config=config, environment={"CODEX_AUTH_JSON": content, "SCRIPTED_KEY": ""})


def auth_file(setup: AgentSetup) -> Path:
    return setup.root / "state" / "codex" / "auth.json"


async def ask(setup: AgentSetup, text: str = "hello") -> Seen:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        return await client.ask_blocking(text, "ctx")


def with_api_key(setup: AgentSetup) -> AgentSetup:
    """Return the setup of an agent with only OpenAI's key and base URL."""
    environment = {
        "OPENAI_API_KEY": "sk-of-openai-0123456789",
        "OPENAI_BASE_URL": setup.model_url,
        "SCRIPTED_KEY": "",
    }
    return replace(setup, config={"runtime_config": {"model": "gpt-5.5"}, "providers": []}, environment=environment)


async def test_an_api_key_works_on_new_and_existing_state(setup: AgentSetup, model: ScriptedModel) -> None:
    for _ in range(2):
        seen = await ask(with_api_key(setup))
        assert (seen.state, seen.answer) == (COMPLETED, "You said: hello")
        assert model.requests[-1].authorization == "Bearer sk-of-openai-0123456789"
    assert (
        "provider openai: the model gpt-5.5 matches its prefix gpt-; credential: OPENAI_API_KEY"
        in setup.log.read_text()
    )


async def test_a_conversation_continues_with_another_provider(setup: AgentSetup, model: ScriptedModel) -> None:
    content = login()
    for each, authorization in [
        (setup, f"Bearer {SECRET}"),
        (with_subscription(setup, content), f"Bearer {access_token(content)}"),
        (with_api_key(setup), "Bearer sk-of-openai-0123456789"),
    ]:
        assert (await ask(each)).state == COMPLETED
        assert model.requests[-1].authorization == authorization
    texts = [each.text for each in model.requests[-1].input if isinstance(each, Message) and each.role == "user"]
    assert sum("hello" in text for text in texts) == 3


async def test_a_subscription_works_on_new_state_and_on_another_backends(
    setup: AgentSetup, model: ScriptedModel
) -> None:
    content = login()
    for backend in ("app-server", "exec"):
        seen = await ask(with_subscription(replace(setup, codex={"backend": backend}), content))
        assert (seen.state, seen.answer) == (COMPLETED, "You said: hello")
        sent = model.requests[-1]
        assert (sent.authorization, sent.account) == (f"Bearer {access_token(content)}", "account-1")
    assert stat.S_IMODE(auth_file(setup).stat().st_mode) == 0o600
    log = setup.log.read_text()
    assert "provider chatgpt: a subscription's login is configured; credential: CODEX_AUTH_JSON" in log
    assert access_token(content) not in log


def with_login_server(setup: AgentSetup, server: LoginServer) -> AgentSetup:
    """Return the setup of an agent whose codex refreshes its login at `server`, which needs an environment variable."""
    codex = setup.root / "codex"
    codex.write_text(f'#!/bin/sh\nexport CODEX_REFRESH_TOKEN_URL_OVERRIDE={server.url}\nexec {binary()} "$@"\n')
    codex.chmod(0o700)
    return replace(setup, environment={**setup.environment, "CODEX_BIN": str(codex)})


async def start_refreshing(setup: AgentSetup, server: LoginServer, client: Peer) -> Seen:
    """Start a turn with an expired login, and return it when codex requests a new one."""
    auth_file(setup).write_text(login(valid_for=timedelta(minutes=-1), refresh_token=server.refresh_token))
    known = len(server.requests)
    started = await client.begin("hello", "ctx")
    with anyio.fail_after(HANG_S):
        await server.wait_for_requests(known + 1)
    return started


async def test_stopping_a_turn_during_a_login_refresh_keeps_the_login(setup: AgentSetup, model: ScriptedModel) -> None:
    async with running_login_server(0.5) as server:
        at_once = replace(setup, backend="exec", codex={"shutdown_grace_s": 0})
        refreshing_setup = with_login_server(with_subscription(at_once, login()), server)
        async with running_agent(refreshing_setup) as agent, peer(agent.url) as client:
            started = await start_refreshing(refreshing_setup, server, client)
            assert (await client.cancel(started.task_id)).state == TaskState.TASK_STATE_CANCELED
            held = auth_file(refreshing_setup).read_text()
            assert json.loads(held)["tokens"]["refresh_token"] == server.refresh_token
            assert (await client.ask("hello", "ctx")).state == COMPLETED
            assert model.requests[-1].authorization == f"Bearer {access_token(held)}"
            await start_refreshing(refreshing_setup, server, client)
        assert json.loads(auth_file(refreshing_setup).read_text())["tokens"]["refresh_token"] == server.refresh_token
        assert len(server.requests) == 2


async def test_codexs_refreshed_login_is_kept_until_a_newer_one_or_another_account(
    setup: AgentSetup, model: ScriptedModel
) -> None:
    now = datetime.now(UTC)
    first = login(refreshed_at=now - timedelta(hours=2))
    refreshed = login(token_id="refreshed", refreshed_at=now - timedelta(hours=1))
    await ask(with_subscription(setup, first))
    auth_file(setup).write_text(refreshed)
    for handed, used in {
        first: refreshed,
        login(token_id="older", refreshed_at=now - timedelta(hours=3)): refreshed,
        (newer := login(token_id="newer", refreshed_at=now)): newer,
        (other := login("account-2", refreshed_at=now - timedelta(hours=4))): other,
    }.items():
        assert (await ask(with_subscription(setup, handed))).state == COMPLETED
        assert model.requests[-1].authorization == f"Bearer {access_token(used)}"
