"""Our own host: the agent behind its A2A server, from the first log line to a stop in good order."""

import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import anyio
from anyio.abc import TaskStatus

from codex_workspace.agent import Agent, open_agent, secrets_of
from codex_workspace.groups import plain_task_group
from codex_workspace.logs import scrubber, set_up_logging
from codex_workspace.providers import ChosenProvider, choose_provider
from codex_workspace.server import Application, ServerOptions, bind, build_app, serving
from codex_workspace.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def serve(settings: Settings, env: Mapping[str, str]) -> None:
    """Serve until SIGTERM or SIGINT; then let running turns end, and leave nothing behind.

    Raises:
        ConfigError: the configuration is wrong, or the port is taken.
        CodexCannotStart: codex is missing, too old, or ends at once.
    """
    provider = choose_provider(settings, env)
    scrub = scrubber(secrets_of(settings, provider))
    set_up_logging(as_json=settings.log.format == "json", level=settings.log.level, scrub=scrub)
    with bind(settings.listen.host, settings.listen.port) as listener:
        logger.info("provider: %s", provider.reason)
        await _serve_on(listener, settings, provider, env)


async def _serve_on(
    listener: socket.socket, settings: Settings, provider: ChosenProvider, env: Mapping[str, str]
) -> None:
    async with plain_task_group() as tasks:
        stop = await tasks.start(_watch_signals)
        options = server_options(settings, url_of(settings, listener))
        async with (
            open_agent(settings, provider, env, options.url) as agent,
            build_app(options, agent.executor, agent.store, agent.not_ready, agent.admission) as app,
        ):
            about = await _unless(stop, lambda: _begin(agent, app))
            if about is not None:
                async with serving(app.asgi, listener, settings.config.limits.slow_reader_s):
                    logger.info("ready: %s, model %s, A2A at %s", about, provider.model, options.url)
                    await stop.wait()
                    await agent.executor.drain(settings.config.codex.shutdown_grace_s)
        tasks.cancel_scope.cancel()
    logger.info("stopped")


async def _begin(agent: Agent, app: Application) -> str:
    """Start codex and take up what is unanswered; return which codex it is."""
    codex = await agent.codex.start()
    await app.take_up()
    return "codex " + ".".join(str(number) for number in codex.version)


async def _watch_signals(*, task_status: TaskStatus[anyio.Event]) -> None:
    """Set the event that is handed out at SIGTERM or SIGINT; further ones change nothing."""
    stop = anyio.Event()
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started(stop)
        async for number in signals:
            logger.info("%s: stopping", signal.Signals(number).name)
            stop.set()


async def _unless(stop: anyio.Event, begin: Callable[[], Awaitable[T]]) -> T | None:
    """Return what `begin` gives; None, and no more waiting for it, once `stop` is set."""
    begun: T | None = None
    async with plain_task_group() as tasks:

        async def give_up() -> None:
            await stop.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(give_up)
        begun = await begin()
        tasks.cancel_scope.cancel()
    return begun


def url_of(settings: Settings, listener: socket.socket) -> str:
    """Return the address for clients: the public one if it is set, else where we listen.

    A server on all interfaces says loopback, which is right for whoever tries it on the same machine; others need
    A2A_PUBLIC_URL.
    """
    if settings.listen.public_url is not None:
        return settings.listen.public_url
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"


def server_options(settings: Settings, url: str) -> ServerOptions:
    """Return what the server has to know of the settings."""
    config, token = settings.config, settings.listen.token
    return ServerOptions(
        name=config.name,
        description=config.description or "An agent that works on code with OpenAI Codex.",
        version=config.version,
        url=url,
        token=None if token is None else token.reveal(),
        max_body_bytes=config.limits.max_message_bytes,
        one_main_context=config.codex.conversations == "main",
    )
