"""Each kind of provider, with the scripted model in its place, on a clean state and on the one of the start before.

A custom endpoint is what all other tests use.
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
    mark: str = "first",
    at: datetime | None = None,
    holds: timedelta = timedelta(days=1),
    refresh_token: str = "",
) -> str:
    """Return the content of an auth.json, whose access token holds for so long."""
    tokens = {
        "id_token": token(account, f"id-{mark}"),
        "access_token": token(account, f"access-{mark}", holds),
        "refresh_token": refresh_token or f"refresh-{account}-{mark}-0123456789",
        "account_id": account,
    }
    refreshed = (at or datetime.now(UTC)).isoformat()
    return json.dumps({"auth_mode": "chatgpt", "OPENAI_API_KEY": None, "tokens": tokens, "last_refresh": refreshed})


def access_token(content: str) -> str:
    return str(json.loads(content)["tokens"]["access_token"])


def subscribed(setup: AgentSetup, content: str) -> AgentSetup:
    """Return the place of an agent whose subscription is answered by the scripted model."""
    entry = {"name": "chatgpt", "auth_mode": "chatgpt_subscription", "base_url": setup.model_url}
    config = {"runtime_config": {"model": "gpt-5.5"}, "providers": [entry]}
    return replace(setup, config=config, environment={"CODEX_AUTH_JSON": content, "SCRIPTED_KEY": ""})


def auth_file(setup: AgentSetup) -> Path:
    return setup.root / "state" / "codex" / "auth.json"


async def asked(setup: AgentSetup, text: str = "hello") -> Seen:
    async with running_agent(setup) as agent, peer(agent.url) as client:
        return await client.ask_blocking(text, "ctx")


def keyed(setup: AgentSetup) -> AgentSetup:
    """Return the place of an agent with nothing but OpenAI's key and address."""
    own = {"OPENAI_API_KEY": "sk-of-openai-0123456789", "OPENAI_BASE_URL": setup.model_url, "SCRIPTED_KEY": ""}
    return replace(setup, config={"runtime_config": {"model": "gpt-5.5"}, "providers": []}, environment=own)


async def test_an_api_key_works_on_new_and_existing_state(setup: AgentSetup, model: ScriptedModel) -> None:
    for _ in range(2):
        seen = await asked(keyed(setup))
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
        (subscribed(setup, content), f"Bearer {access_token(content)}"),
        (keyed(setup), "Bearer sk-of-openai-0123456789"),
    ]:
        assert (await asked(each)).state == COMPLETED
        assert model.requests[-1].authorization == authorization
    said = [each.text for each in model.requests[-1].input if isinstance(each, Message) and each.role == "user"]
    assert sum("hello" in text for text in said) == 3


async def test_a_subscription_works_on_new_state_and_on_another_backends(
    setup: AgentSetup, model: ScriptedModel
) -> None:
    content = login()
    for backend in ("app-server", "exec"):
        seen = await asked(subscribed(replace(setup, codex={"backend": backend}), content))
        assert (seen.state, seen.answer) == (COMPLETED, "You said: hello")
        sent = model.requests[-1]
        assert (sent.authorization, sent.account) == (f"Bearer {access_token(content)}", "account-1")
    assert stat.S_IMODE(auth_file(setup).stat().st_mode) == 0o600
    log = setup.log.read_text()
    assert "provider chatgpt: a subscription's login is handed in; credential: CODEX_AUTH_JSON" in log
    assert access_token(content) not in log


def refreshed_by(setup: AgentSetup, server: LoginServer) -> AgentSetup:
    """Return the place of an agent whose codex has its login refreshed there; only its environment can tell it so."""
    codex = setup.root / "codex"
    codex.write_text(f'#!/bin/sh\nexport CODEX_REFRESH_TOKEN_URL_OVERRIDE={server.url}\nexec {binary()} "$@"\n')
    codex.chmod(0o700)
    return replace(setup, environment={**setup.environment, "CODEX_BIN": str(codex)})


async def refreshing(setup: AgentSetup, server: LoginServer, client: Peer) -> Seen:
    """Begin a turn with a login that is over, and return it once codex asks for a new one."""
    auth_file(setup).write_text(login(holds=timedelta(minutes=-1), refresh_token=server.refresh_token))
    known = len(server.requests)
    begun = await client.begin("hello", "ctx")
    with anyio.fail_after(HANG_S):
        await server.wait_for_requests(known + 1)
    return begun


async def test_stopping_a_turn_during_a_login_refresh_keeps_the_login(setup: AgentSetup, model: ScriptedModel) -> None:
    async with running_login_server(0.5) as server:
        at_once = replace(setup, backend="exec", codex={"shutdown_grace_s": 0})
        own = refreshed_by(subscribed(at_once, login()), server)
        async with running_agent(own) as agent, peer(agent.url) as client:
            begun = await refreshing(own, server, client)
            assert (await client.cancel(begun.task_id)).state == TaskState.TASK_STATE_CANCELED
            held = auth_file(own).read_text()
            assert json.loads(held)["tokens"]["refresh_token"] == server.refresh_token
            assert (await client.ask("hello", "ctx")).state == COMPLETED
            assert model.requests[-1].authorization == f"Bearer {access_token(held)}"
            await refreshing(own, server, client)
        assert json.loads(auth_file(own).read_text())["tokens"]["refresh_token"] == server.refresh_token
        assert len(server.requests) == 2


async def test_codexs_refreshed_login_is_kept_until_a_newer_one_or_another_account(
    setup: AgentSetup, model: ScriptedModel
) -> None:
    now = datetime.now(UTC)
    first = login(at=now - timedelta(hours=2))
    refreshed = login(mark="refreshed", at=now - timedelta(hours=1))
    await asked(subscribed(setup, first))
    auth_file(setup).write_text(refreshed)
    for handed, used in {
        first: refreshed,
        login(mark="older", at=now - timedelta(hours=3)): refreshed,
        (newer := login(mark="newer", at=now)): newer,
        (other := login("account-2", at=now - timedelta(hours=4))): other,
    }.items():
        assert (await asked(subscribed(setup, handed))).state == COMPLETED
        assert model.requests[-1].authorization == f"Bearer {access_token(used)}"
