"""The real agent with the real codex on the platform's stand-in: with push delivery, polling, and removed.

Covers `cli.on_platform`.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import anyio
import pytest

from codex_workspace.devkit.model import ScriptedModel
from codex_workspace.devkit.platform.app import StandInOptions, running_platform
from codex_workspace.platform.deadline_reply import STILL_WORKING
from tests.e2e.agent_process import AgentSetup, running_agent
from tests.e2e.client import script
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

ME = "11111111-1111-4111-8111-111111111111"
PEER = "22222222-2222-4222-8222-222222222222"


def on_platform(setup: AgentSetup, url: str, **platform: object) -> AgentSetup:
    """Return the setup of an agent that is registered with a platform."""
    config = {"agent_tools": "never", "platform": {"heartbeat_s": 1, **platform}}
    return replace(setup, config=config, environment={"PLATFORM_URL": url, "WORKSPACE_ID": ME})


async def test_a_pushed_message_is_answered_and_a_long_turn_is_acknowledged_first(setup: AgentSetup) -> None:
    async with running_platform(options=StandInOptions(tells_secret=True)) as platform:
        platform.add_workspace(ME, delivery="push")
        async with running_agent(on_platform(setup, platform.url, answer_within_s=1.0)):
            await platform.until(lambda: platform.workspace(ME).heartbeat != {})
            outcome = await platform.canvas_message(ME, script({"say": "Forty-two."}))
            assert outcome.result is not None
            assert outcome.result["parts"] == [{"kind": "text", "text": "Forty-two."}]
            outcome = await platform.canvas_message(ME, script({"say": "At last.", "delay_ms": 3000}))
            assert outcome.result is not None
            assert outcome.result["parts"] == [{"kind": "text", "text": STILL_WORKING}]
            await platform.until(lambda: platform.workspace(ME).active_tasks == 1)
            await platform.until(lambda: platform.notifications(ME) == ["At last."])
            await platform.until(lambda: platform.workspace(ME).active_tasks == 0)
        assert platform.shown(ME) == ["Forty-two.", STILL_WORKING, "At last."]


@pytest.mark.parametrize("delivery", ["poll", "push"])
async def test_a_message_behind_a_question_is_kept_and_answered_later(
    setup: AgentSetup, delivery: Literal["poll", "push"]
) -> None:
    asking = replace(setup, codex={"approval_policy": "on-request"})
    file = setup.root / "outside.txt"
    wish = script({"say": "I begin.", "run": "sleep 2"}, {"run": f"touch {file}", "escalate": True}, {"say": "Done."})
    async with running_platform(options=StandInOptions(tells_secret=True)) as platform:
        platform.add_workspace(ME, delivery=delivery)
        platform.add_workspace(PEER, "peer's", "poll", name="peer")
        async with running_agent(on_platform(asking, platform.url, answer_within_s=0.5)) as agent:
            await platform.until(lambda: platform.workspace(ME).heartbeat != {})
            await platform.canvas_message(ME, wish)
            await eventually(lambda: agent.commands("2"))
            # This one waits in the queue when the question comes up.
            await platform.peer_message(PEER, ME, "hello", "m-1")
            await platform.until(lambda: any("touch" in each for each in platform.notifications(ME)))
            await platform.canvas_message(ME, "yes")
            await platform.until(lambda: platform.notifications(ME)[-1] == "Done.")
            await platform.until(lambda: "hello" in str(platform.activity(PEER)))
        assert "You said" in str(platform.activity(PEER))
        assert len(platform.notifications(ME)) == 2
        assert file.exists()


@pytest.mark.alone
async def test_an_idle_polling_agent_starts_within_a_second(setup: AgentSetup, model: ScriptedModel) -> None:
    async with running_platform() as platform:
        platform.add_workspace(ME, delivery="poll")
        async with running_agent(on_platform(setup, platform.url)):
            await platform.canvas_message(ME, "warm up")
            await platform.until(lambda: len(platform.notifications(ME)) == 1)
            # Wait until the polling interval has reached its maximum.
            await anyio.sleep(6.0)
            calls_before, start = len(model.requests), time.monotonic()
            await platform.canvas_message(ME, "hello")
            await eventually(lambda: len(model.requests) > calls_before, poll_s=0.01)
            assert time.monotonic() - start < 1.0
            await platform.until(lambda: platform.notifications(ME)[1:] == ["You said: hello"])


async def test_a_removed_workspace_stops_the_agent_cleanly(setup: AgentSetup, tmp_path: Path) -> None:
    async with running_platform() as platform:
        platform.add_workspace(ME, delivery="poll")
        async with running_agent(on_platform(setup, platform.url)) as agent:
            await platform.until(lambda: platform.workspace(ME).heartbeat != {})
            token = (tmp_path / "state" / "platform-token").read_text()
            platform.remove(ME)
            assert await agent.ended() == 0
    assert token not in setup.log.read_text()
    assert "was removed from the platform" in setup.log.read_text()
