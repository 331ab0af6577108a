"""Reading the inbox without a cursor."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from codex_workspace.devkit.platform.app import running_platform
from codex_workspace.platform import inbox
from codex_workspace.platform.client import PlatformClient, WorkspaceToken, open_platform_client
from codex_workspace.platform.dispatcher import Dispatcher
from codex_workspace.platform.inbox import Inbox
from codex_workspace.storage.outbox import OutboxMessage
from codex_workspace.storage.store import open_store
from tests.support.platform_agent import ME


class Recorder(Dispatcher):
    """Records the dispatched messages."""

    def __init__(self) -> None:
        self.dispatched: list[OutboxMessage] = []

    def free_slots(self, slots: int) -> int:
        return slots

    async def dispatch(self, message: OutboxMessage) -> None:
        await anyio.lowlevel.checkpoint()
        self.dispatched.append(message)


@asynccontextmanager
async def polling(folder: Path, api: PlatformClient) -> AsyncIterator[Recorder]:
    recorder = Recorder()
    async with (
        open_store(f"sqlite:///{folder / 'store.sqlite3'}") as store,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(Inbox(api, store.outbox, recorder, 10).run, anyio.Event())
        yield recorder
        tasks.cancel_scope.cancel()


async def test_an_error_410_without_a_cursor_is_a_failure_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inbox, "POLL_S", 0.001)
    polls = 0

    async def respond(_request: httpx.Request) -> httpx.Response:
        await anyio.lowlevel.checkpoint()
        nonlocal polls
        polls += 1
        return httpx.Response(410, json={"error": "gone"})

    token = WorkspaceToken(tmp_path / "token")
    with anyio.fail_after(5):
        async with (
            open_platform_client("http://platform.test", ME, token, httpx.MockTransport(respond)) as api,
            polling(tmp_path, api),
        ):
            while polls <= inbox.WARN_AFTER + 1:
                await anyio.sleep(0.001)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("cannot read the inbox")


async def test_only_one_page_of_rows_is_kept_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "PAGE", 3)
    async with running_platform() as platform:
        platform.add_workspace(ME, "mine", "poll")
        (tmp_path / "token").write_text("mine")
        for number in range(7):
            await platform.canvas_message(ME, str(number), str(number))
        token = WorkspaceToken(tmp_path / "token")
        async with open_platform_client(platform.url, ME, token) as api, polling(tmp_path, api) as recorder:
            await platform.until(lambda: sum(each.path.endswith("/activity") for each in platform.requests) >= 4)
            assert [message.source_id for message in recorder.dispatched] == ["0", "1", "2"]
            monkeypatch.setattr(inbox, "SETTLE_S", 0.1)
            with anyio.fail_after(5):
                await platform.until(lambda: len(recorder.dispatched) == 7)
            assert [message.source_id for message in recorder.dispatched] == [str(number) for number in range(7)]
