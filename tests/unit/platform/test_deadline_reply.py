"""Pushed messages under our own host: questions, repeated messages and peers' answers."""

from pathlib import Path

import anyio
import pytest

from codex_workspace.common.telemetry import TaskOutcome
from codex_workspace.devkit.platform.app import StandInPlatform
from codex_workspace.devkit.platform.delivery import DeliveryOutcome, result_row
from codex_workspace.devkit.platform.records import NewRow
from codex_workspace.platform.deadline_reply import RECEIVED, SENT_SEPARATELY, STILL_WORKING
from codex_workspace.platform.registration import ErrorRate
from tests.support.platform_agent import ME, PEER, PlatformAgentSetup, running_platform_agent
from tests.unit.platform.test_registration import pushing_world


def text_of(outcome: DeliveryOutcome) -> str:
    assert outcome.result is not None
    parts = outcome.result["parts"]
    assert isinstance(parts, list)
    assert isinstance(parts[0], dict)
    return str(parts[0]["text"])


async def registered(platform: StandInPlatform) -> None:
    await platform.until(lambda: platform.workspace(ME).heartbeat != {})


async def test_the_heartbeat_counts_turns_and_not_waiting_messages(tmp_path: Path) -> None:
    turns = 0
    async with pushing_world(tmp_path) as platform:
        setup = PlatformAgentSetup(tmp_path, platform, "push", answer_within_s=0.1, running=lambda: turns)
        async with running_platform_agent(setup):
            await registered(platform)
            await platform.canvas_message(ME, "long")
            await platform.until(lambda: platform.workspace(ME).heartbeat["current_task"] == "long")
            assert platform.workspace(ME).active_tasks == 0
            turns = 1
            await platform.until(lambda: platform.workspace(ME).active_tasks == 1)


def test_the_error_rate_covers_the_last_minutes() -> None:
    errors = ErrorRate()
    assert errors.update({TaskOutcome.COMPLETED: 5, TaskOutcome.FAILED: 5}, 0.0) == (0, 0)
    for second in range(1, 100):
        assert errors.update({TaskOutcome.COMPLETED: 5 + second, TaskOutcome.FAILED: 5}, second) == (0, second)
    assert errors.update({TaskOutcome.COMPLETED: 104, TaskOutcome.FAILED: 6}, 100.0) == (1, 100)
    assert errors.update({TaskOutcome.COMPLETED: 104, TaskOutcome.FAILED: 6}, 500.0) == (0, 0)


async def test_the_next_message_answers_a_question(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as platform:
        setup = PlatformAgentSetup(tmp_path, platform, "push")
        setup.echo.gate.set()
        async with running_platform_agent(setup):
            await registered(platform)
            assert text_of(await platform.canvas_message(ME, "please ask")) == "which one?"
            for _ in range(2):
                # The second comes again, and is the same answer to the same question.
                assert text_of(await platform.canvas_message(ME, "the blue one", "m-2")) == "echo: the blue one"
            assert text_of(await platform.canvas_message(ME, "something else")) == "echo: something else"
        assert setup.echo.heard == ["please ask", "the blue one", "something else"]
        assert len(set(setup.echo.tasks)) == 2
        assert platform.notifications(ME) == []


async def test_a_question_after_the_deadline_is_sent_once_and_answered_by_the_next_message(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as platform:
        setup = PlatformAgentSetup(tmp_path, platform, "push", answer_within_s=0.3)
        async with running_platform_agent(setup):
            await registered(platform)
            assert text_of(await platform.canvas_message(ME, "please ask")) == STILL_WORKING
            setup.echo.gate.set()
            await platform.until(lambda: platform.notifications(ME) == ["which one?"])
            for _ in range(2):
                assert text_of(await platform.canvas_message(ME, "blue", "m-2")) in (STILL_WORKING, SENT_SEPARATELY)
            await platform.until(lambda: len(platform.notifications(ME)) == 2)
            assert text_of(await platform.canvas_message(ME, "blue", "m-2")) == SENT_SEPARATELY
        assert platform.notifications(ME) == ["which one?", "echo: blue"]
        assert len(set(setup.echo.tasks)) == 1


async def test_a_question_to_a_peer_is_sent_to_the_peer(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as platform:
        setup = PlatformAgentSetup(tmp_path, platform, "push", answer_within_s=0.3)
        async with running_platform_agent(setup):
            await registered(platform)
            assert text_of(await platform.peer_message(PEER, ME, "please ask", "m-1")) == STILL_WORKING
            setup.echo.gate.set()
            await platform.until(lambda: bool(platform.activity(PEER)))
            assert "which one?" in str(platform.activity(PEER)[0])
            assert platform.notifications(ME) == []


async def test_a_message_repeated_after_its_late_reply_gets_a_promise(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as platform:
        setup = PlatformAgentSetup(tmp_path, platform, "push", answer_within_s=0.3)
        async with running_platform_agent(setup):
            await registered(platform)
            for _ in range(2):
                assert text_of(await platform.canvas_message(ME, "long", "m-9")) == STILL_WORKING
            setup.echo.gate.set()
            await platform.until(lambda: platform.notifications(ME) == ["echo: long"])
            assert text_of(await platform.canvas_message(ME, "long", "m-9")) == SENT_SEPARATELY
        assert platform.shown(ME).count("echo: long") == 1
        assert setup.echo.heard == ["long"]


@pytest.mark.parametrize("about", [{"in_reply_to": "m-0"}, {"delegation_id": "work-1"}])
async def test_a_peers_answer_is_reported_to_the_user_and_not_answered(tmp_path: Path, about: dict[str, str]) -> None:
    async with pushing_world(tmp_path) as platform:
        setup = PlatformAgentSetup(tmp_path, platform, "push", answer_within_s=0.3)
        async with running_platform_agent(setup):
            await registered(platform)
            for _ in range(2):
                assert text_of(await platform.peer_message(PEER, ME, "it is done", "m-1", {**about})) == RECEIVED
            setup.echo.gate.set()
            await platform.until(lambda: bool(platform.notifications(ME)))
            await anyio.sleep(0.1)
        (heard,) = setup.echo.heard
        assert heard.startswith("The agent without a known ID answers the task")
        assert heard.endswith("it is done")
        assert len(platform.notifications(ME)) == 1
        assert platform.activity(PEER) == []


async def test_in_push_mode_only_delegation_results_are_read_from_the_inbox(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as platform:
        setup = PlatformAgentSetup(tmp_path, platform, "push")
        setup.echo.gate.set()
        pushed = '{"params": {"message": {"parts": [{"kind": "text", "text": "on its way by push"}]}}}'
        for _ in range(2):
            async with running_platform_agent(setup):
                await registered(platform)
                platform.write(NewRow(ME, method="message/send", request=pushed))
                platform.write(result_row(ME, PEER, f"work-{len(setup.echo.heard)}", "forty-two"))
                told = len(setup.echo.heard) + 1
                await platform.until(lambda: len(platform.notifications(ME)) == told)  # noqa: B023
        assert [text.rpartition(chr(10))[2] for text in setup.echo.heard] == ["forty-two"] * 2


async def test_a_delegated_task_is_answered(tmp_path: Path) -> None:
    async with pushing_world(tmp_path) as platform:
        setup = PlatformAgentSetup(tmp_path, platform, "push")
        setup.echo.gate.set()
        async with running_platform_agent(setup):
            await registered(platform)
            outcome = await platform.peer_message(PEER, ME, "do it", "work-1", {"delegation_id": "work-1"})
            assert text_of(outcome) == "echo: do it"
