"""A stand-in of the platform, for tests and for play on one machine: `python -m codex_workspace platform`.

It speaks the platform's HTTP API to workspaces, with SQLite behind it, delivers to them by push and by inbox, and does
wrong on demand (`Faults`). A message of the user is a POST to `/workspaces/<id>/a2a` without a token, as the canvas
sends it; `GET /stand-in/shown/<id>` lists what the user was shown.

What it cannot prove, as it only does what was read in the platform's sources of May and August 2026:

- the order and the locks of the real platform under load, its rate limit (one per address, here one per workspace), its
  database's failures other than by an error's number, and what it does of messages on their way when it ends;
- anything of the firewall before it, of origins, of provisioning (nothing is started, restarted or given tokens but by
  `token_file`), of liveness (nobody goes offline for silence), of budgets, and of what the canvas draws;
- that a release of the platform, or of its runtime's package, still is as they were then.

Left out: the shorter wait of August for the user's messages, the window of silence and the ceiling behind the wait for
an answer's head, messages that expire, and that the platform keeps an address on loopback that an earlier registration
has named. Whoever reaches the stand-in is the user; it is for loopback.
"""

import contextlib
import logging
import os
import signal
import ssl
import sys
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import anyio
import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware

from codex_workspace.common.concurrency import task_group
from codex_workspace.common.values import JsonObject
from codex_workspace.devkit.platform.api import Api, routes_of
from codex_workspace.devkit.platform.delivery import NOTIFICATION, Delivery, DeliveryOutcome, PushedMessage
from codex_workspace.devkit.platform.faults import Faults, read_faults
from codex_workspace.devkit.platform.records import Era, Mode, NewRow, StoredDelegation, Workspace
from codex_workspace.devkit.platform.request_log import LoggedRequest, RequestLog
from codex_workspace.devkit.platform.store import PlatformStore
from codex_workspace.runtimes.markdown import clean
from codex_workspace.server.app import serving
from codex_workspace.server.sockets import bind

KEPT_REQUESTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class StandInOptions:
    """How the platform is.

    mode: how it delivers to whoever does not say. era: see `Era`; of August are acknowledging rows, work that was
    received in the list of work, and `kind` for `type` in the parts of work. wait_s: so long an agent's answer is
    waited for. rate_per_minute: of each workspace. private_urls: agents may be at private addresses. retry_s,
    result_rows, tells_secret: see `Delivery`.
    """

    mode: Mode = "push"
    era: Era = "may"
    wait_s: float = 180.0
    rate_per_minute: int = 600
    private_urls: bool = False
    retry_s: float = 8.0
    result_rows: bool = False
    tells_secret: bool = False


class StandInPlatform:
    """A platform that runs; what tests do to it, and see of it."""

    def __init__(
        self, url: str, store: PlatformStore, faults: Faults, delivery: Delivery, options: StandInOptions
    ) -> None:
        self.url: Final = url
        self.store: Final = store
        self.faults: Final = faults
        self.requests: Final[deque[LoggedRequest]] = deque(maxlen=KEPT_REQUESTS)
        self._delivery = delivery
        self._options = options
        self._changed = anyio.Event()
        delivery.changed = self.notice

    def notice(self) -> None:
        """Wake those who wait in `until`."""
        self._changed.set()
        self._changed = anyio.Event()

    def take_note(self, asked: LoggedRequest) -> None:
        """Keep what a workspace has asked for."""
        self.requests.append(asked)
        self.notice()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds; it is looked at again whenever something was kept or asked."""
        while not holds():
            await self._changed.wait()

    # --- What the operator, the user and other agents do ---

    def add_workspace(
        self,
        workspace_id: str,
        token: str | None = None,
        delivery: Mode | None = None,
        *,
        name: str = "",
        role: str = "",
        parent_id: str | None = None,
        url: str = "",
        token_file: Path | None = None,
    ) -> None:
        """Make a workspace; without a `token`, one is minted at its first registration.

        url: where it is, whatever it says itself. token_file: where a provisioner writes its new tokens.
        """
        self.store.add_workspace(
            workspace_id,
            delivery=delivery or self._options.mode,
            name=name,
            role=role,
            parent_id=parent_id,
            url=url,
            token_file=token_file,
        )
        if token is not None:
            self.store.mint(workspace_id, token)

    async def canvas_message(self, workspace_id: str, text: str, message_id: str | None = None) -> DeliveryOutcome:
        """Send an agent a message of the user's; with push it returns when the agent has answered."""
        request = message_of(text, message_id, canvas={"history": []})
        return await self._delivery.send(None, self._known(workspace_id), request)

    async def peer_message(
        self,
        from_id: str,
        to_id: str,
        text: str,
        message_id: str | None = None,
        metadata: JsonObject | None = None,
    ) -> DeliveryOutcome:
        """Send an agent another's message, or by the same ids its own prompt."""
        return await self._delivery.send(from_id, self._known(to_id), message_of(text, message_id, metadata))

    def upload(self, workspace_id: str, name: str, content: bytes, mime_type: str = "text/plain") -> str:
        """Put a file of the user's before an agent that polls: the instruction to fetch it; returns the file's id."""
        file_id = self.store.upload(workspace_id, content)
        request: JsonObject = {
            "file_id": file_id,
            "name": name,
            "mimeType": mime_type,
            "size": len(content),
            "uri": f"platform-pending:{workspace_id}/{file_id}",
        }
        self.write(NewRow(workspace_id, "a2a_receive", None, workspace_id, "chat_upload_receive", name, request))
        return file_id

    def write(self, row: NewRow) -> str:
        """Write a row of any kind; returns its id."""
        return self._delivery.write(row)

    def rotate_token(self, workspace_id: str) -> str:
        """Make a workspace's tokens void and a new one, in its token file where it has one; returns it."""
        self.store.revoke(workspace_id)
        token = self.store.mint(workspace_id)
        file = self._known(workspace_id).token_file
        if file is not None:
            _write_secret(file, token)
        return token

    def revoke_tokens(self, workspace_id: str) -> None:
        """Make a workspace's tokens void; the next registration mints one."""
        self.store.revoke(workspace_id)

    def prune(self, workspace_id: str) -> None:
        """Forget all rows that a workspace has."""
        self.store.prune(workspace_id)

    def remove(self, workspace_id: str) -> None:
        """Remove a workspace."""
        self.store.remove(workspace_id)
        self.notice()

    # --- What became of it ---

    def workspace(self, workspace_id: str) -> Workspace:
        """Return a workspace as it is now."""
        return self._known(workspace_id)

    def activity(self, workspace_id: str) -> list[JsonObject]:
        """Return all rows of a workspace, oldest first."""
        return self.store.page(workspace_id, "august", limit=-1)[::-1]

    def notifications(self, workspace_id: str) -> list[str]:
        """Return what an agent has notified the user of, oldest first."""
        return [text for how, text in self.store.shown(workspace_id) if how == NOTIFICATION]

    def shown(self, workspace_id: str) -> list[str]:
        """Return what the user was shown of an agent, answers and notifications, oldest first."""
        return [text for _, text in self.store.shown(workspace_id)]

    @property
    def delegations(self) -> list[StoredDelegation]:
        """Return the work that was given, oldest first."""
        return self.store.delegations()[::-1]

    @property
    def pushes(self) -> list[PushedMessage]:
        """Return what was sent to agents' addresses since the start."""
        return self._delivery.pushes

    def _known(self, workspace_id: str) -> Workspace:
        found = self.store.workspace(workspace_id)
        if found is None:
            raise LookupError(f"there is no workspace {workspace_id}")
        return found


@asynccontextmanager
async def running_platform(
    file: Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    options: StandInOptions | None = None,
    faults: Faults | None = None,
) -> AsyncIterator[StandInPlatform]:
    """Run a platform while the block runs; what it keeps stays in `file`, so that leaving and entering is a restart.

    Raises:
        ConfigError: the port is taken.
    """
    options, faults = options or StandInOptions(), faults or Faults()
    logging.getLogger("uvicorn.error").addFilter(_is_no_lost_answer)
    store = PlatformStore(file)
    store.requeue_dispatched()
    with contextlib.closing(store), bind(host, port) as listener:
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        # A proxy for the outside world may stand between.
        async with httpx.AsyncClient(trust_env=False, verify=_trusted()) as http, task_group() as tasks:
            delivery = Delivery(
                *(store, faults, http, tasks, _nobody_waits),
                wait_s=options.wait_s,
                retry_s=options.retry_s,
                result_rows=options.result_rows,
                tells_secret=options.tells_secret,
                part_name="type" if options.era == "may" else "kind",
            )
            platform = StandInPlatform(url, store, faults, delivery, options)
            api = Api(store, faults, delivery, options.mode, options.era, options.private_urls)
            line = Middleware(
                RequestLog,
                store=store,
                faults=faults,
                rate_per_minute=options.rate_per_minute,
                rotate=platform.rotate_token,
                note=platform.take_note,
            )
            async with serving(Starlette(routes=routes_of(api), middleware=[line]), listener):
                yield platform
            tasks.cancel_scope.cancel()


@cache
def _trusted() -> ssl.SSLContext:
    """Return whom agents behind TLS are to be vouched by; it takes 50 ms to read."""
    return ssl.create_default_context()


def _nobody_waits() -> None:
    pass


def message_of(
    text: str, message_id: str | None = None, metadata: JsonObject | None = None, canvas: JsonObject | None = None
) -> JsonObject:
    """Return a request as the platform and its agents send it: A2A 0.3, `message/send`.

    metadata: the message's. canvas: what the canvas adds to the request's parameters.
    """
    message: JsonObject = {
        "role": "user",
        "messageId": message_id or str(uuid.uuid4()),
        "parts": [{"kind": "text", "text": text}],
    }
    if metadata:
        message["metadata"] = metadata
    params: JsonObject = {"message": message}
    if canvas is not None:
        params["metadata"] = canvas
    return {"jsonrpc": "2.0", "id": str(uuid.uuid4()), "method": "message/send", "params": params}


def _write_secret(file: Path, text: str) -> None:
    new = file.with_name(f"{file.name}.new")
    with os.fdopen(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as out:
        out.write(text)
    new.replace(file)


# --- The command line ---


async def play(host: str, port: int, file: Path | None, mode: Mode, faults: str) -> int:
    """Run a platform until SIGTERM or SIGINT; print its address, and what the user is shown as it comes.

    Raises:
        ConfigError: a fault is unknown, or the port is taken.
    """
    shares = read_faults(faults)
    options = StandInOptions(mode=mode, private_urls=True)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with (
            running_platform(file, host=host, port=port, options=options, faults=Faults(shares)) as platform,
            task_group() as tasks,
        ):
            _say(f"platform at {platform.url}")
            tasks.start_soon(_show, platform)
            async for _ in signals:
                break
            tasks.cancel_scope.cancel()
    return 0


def _is_no_lost_answer(record: logging.LogRecord) -> bool:
    """Tell whether it is worth a line; that answers are lost where they are to be lost is not."""
    return "without completing response" not in record.getMessage()


async def _show(platform: StandInPlatform) -> None:
    """Print what the user is shown from now on."""
    seen = Counter({each.id: len(platform.shown(each.id)) for each in platform.store.workspaces()})

    def new() -> list[str]:
        lines = []
        for each in platform.store.workspaces():
            texts = platform.shown(each.id)
            lines += [f"{each.name}: {text}" for text in texts[seen[each.id] :]]
        return lines

    while True:
        await platform.until(lambda: bool(new()))
        for line in new():
            _say(line)
        seen.update({each.id: len(platform.shown(each.id)) - seen[each.id] for each in platform.store.workspaces()})


def _say(line: str) -> None:
    sys.stdout.write(f"{clean(line)}\n")
    sys.stdout.flush()
