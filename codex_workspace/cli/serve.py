"""The `serve` command: starts codex, imports and runs the server beside it, and stops both.

Imports are most of the start, so this module needs few of them; `server` has the others.
"""

import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
from anyio.abc import TaskStatus

from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import ConfigLocation
from codex_workspace.common.redact import Redactor
from codex_workspace.common.telemetry import set_up_logging
from codex_workspace.config.own_token import ROTATE, OwnToken
from codex_workspace.config.providers import choose_provider
from codex_workspace.config.settings import MISPLACED, Settings
from codex_workspace.launching import open_launched, secrets_of
from codex_workspace.server.sockets import GrpcListener, bind, bind_grpc, raise_handle_limit, reachable

if TYPE_CHECKING:
    from codex_workspace.server.card import Signer

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOKEN_TEXT: Final = """
Callers need this token. It is not shown again; `{rotate}` makes a new one.

    {token}

From another terminal:

    curl {url}/message:send -H 'Authorization: Bearer {token}' \\
      -H 'Content-Type: application/json' -H 'A2A-Version: 1.0' \\
      -d '{{"message": {{"messageId": "1", "role": "ROLE_USER", "parts": [{{"text": "Hello"}}]}}}}'
    A2A_TOKEN={token} codex-workspace chat {url}
"""


@dataclass(frozen=True, slots=True)
class ListeningPlace:
    """Where the agent listens. stop: set by SIGTERM or SIGINT."""

    url: str
    listener: socket.socket
    grpc: GrpcListener | None
    stop: anyio.Event


async def serve(settings: Settings, env: Mapping[str, str]) -> None:
    """Serve codex until SIGTERM or SIGINT, then let running turns end and stop all processes.

    Codex starts while the server is imported.

    Raises:
        ConfigError: the configuration is wrong, or a port is taken.
        CodexCannotStart: codex is missing, too old, or ends at once.
    """
    provider = choose_provider(settings, env)
    set_up_log(settings, secrets_of(settings, provider))
    async with listening(settings) as place:
        sign = card_signer_of(settings)
        logger.info("provider: %s", provider.reason)
        for key in settings.misplaced:
            logger.warning("%s: %s has no effect; use %s", settings.config_file, key, MISPLACED[key])
        if settings.exposed:
            logger.warning(
                "WORKSPACE_DIR: commands can change %s in this folder; set it to another folder",
                " and ".join(settings.exposed),
            )
        async with open_launched(settings, provider, env, place.url) as launched:
            if launched.codex is not None and not place.stop.is_set():
                launched.codex.start_soon()
            await unless(place.stop, partial(_import_server, settings.database_url.reveal()))
            if not place.stop.is_set():
                from codex_workspace.cli.server import serve_codex

                await serve_codex(settings, provider, launched, place, sign)


async def _import_server(database_url: str) -> None:
    """Import the server, and wait for the end of an earlier agent with the same database."""
    # In a thread, so that this one can talk to codex meanwhile.
    await anyio.to_thread.run_sync(import_module, "codex_workspace.cli.server", abandon_on_cancel=True)
    from codex_workspace.storage.store import wait_until_free

    await wait_until_free(database_url)


def card_signer_of(settings: Settings) -> "Signer | None":
    """Return the function that signs the card, if the operator configured a key; raises ConfigError for a bad key."""
    config, file = settings.config.a2a, settings.config_file
    if config.signing_key_file is None:
        return None
    # Imported only if needed: with the A2A SDK it takes 0.3 s.
    from codex_workspace.server.card import card_signer

    return card_signer(file.parent / config.signing_key_file, ConfigLocation(str(file)).at("a2a.signing_key_file"))


@asynccontextmanager
async def listening(settings: Settings) -> AsyncIterator[ListeningPlace]:
    """Bind the ports, and watch for SIGTERM and SIGINT, until the block is left.

    Raises:
        ConfigError: a port is taken.
    """
    raise_handle_limit()
    with bind(settings.environment.A2A_HOST, settings.port) as listener:
        async with _grpc_listener(settings) as grpc, task_group() as tasks:
            stop = await tasks.start(_watch_signals)
            yield ListeningPlace(url_of(settings, listener), listener, grpc, stop)
            tasks.cancel_scope.cancel()
    logger.info("stopped")


def set_up_log(settings: Settings, secrets: Sequence[str]) -> None:
    """Write the log in the configured format, without these secrets."""
    set_up_logging(
        as_json=settings.environment.LOG_FORMAT == "json",
        level=settings.environment.LOG_LEVEL.upper(),
        scrub=Redactor(secrets),
    )


def announce(token: OwnToken, state_dir: Path, url: str) -> None:
    """Store a new token and show it on the terminal, not in the log; of an earlier one, log that it is valid.

    Raises:
        ConfigError: the token cannot be stored.
    """
    if token.text is None:
        logger.info("the token of an earlier start is valid; `%s` on a terminal replaces it", ROTATE)
        return
    token.store(state_dir)
    print(TOKEN_TEXT.format(token=token.text.reveal(), url=url.rstrip("/"), rotate=ROTATE), file=sys.stderr, flush=True)


async def _watch_signals(*, task_status: TaskStatus[anyio.Event]) -> None:
    """Return an event that SIGTERM or SIGINT sets; further signals are ignored."""
    stop = anyio.Event()
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started(stop)
        async for number in signals:
            logger.info("%s: stopping", signal.Signals(number).name)
            stop.set()


async def unless(stop: anyio.Event, begin: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of `begin`, or None if `stop` is set before it ends."""
    begun: T | None = None
    async with task_group() as tasks:

        async def give_up() -> None:
            await stop.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(give_up)
        begun = await begin()
        tasks.cancel_scope.cancel()
    return begun


def url_of(settings: Settings, listener: socket.socket) -> str:
    """Return the URL for clients: A2A_PUBLIC_URL, or the listening address, with loopback for all interfaces."""
    if settings.environment.A2A_PUBLIC_URL is not None:
        return settings.environment.A2A_PUBLIC_URL
    host, port = listener.getsockname()[:2]
    return f"http://{reachable(host)}:{port}/"


def _grpc_listener(settings: Settings) -> AbstractAsyncContextManager[GrpcListener | None]:
    listen = settings.environment
    if listen.A2A_GRPC_PORT is None:
        return nullcontext()
    limits = settings.config.limits
    return bind_grpc(listen.A2A_HOST, listen.A2A_GRPC_PORT, limits.max_message_bytes, limits.slow_reader_s)
