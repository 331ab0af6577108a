"""The rest of the `serve` command, with all its imports: an executor behind the A2A server."""

import gc
import importlib
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from a2a.server.agent_execution import AgentExecutor
from a2a.types import AgentExtension

from codex_workspace import __version__
from codex_workspace.agent import Agent, agent_around, tracing
from codex_workspace.cli.serve import ListeningPlace, announce, card_signer_of, listening, set_up_log, unless
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import ConfigError, StoreUnavailable
from codex_workspace.common.redact import Redactor
from codex_workspace.common.values import format_version
from codex_workspace.config.providers import ChosenProvider
from codex_workspace.config.settings import OPERATOR, Settings
from codex_workspace.launching import Launched, is_exec, lock_state, prepare_state, secrets_of
from codex_workspace.server.answer_updates import ANSWER_UPDATES, MODES
from codex_workspace.server.app import ServerOptions, build_app, serving
from codex_workspace.server.card import Signer
from codex_workspace.server.handler import IdempotentHandler
from codex_workspace.server.limits import LimitedHandler, StreamLimits
from codex_workspace.server.push import PushService, open_push
from codex_workspace.server.sockets import reachable
from codex_workspace.server.views import GaugeCollector, View, metrics_view, transcript_view
from codex_workspace.storage.store import Store, open_store, wait_until_free
from codex_workspace.tasks.live_output import ITEMS
from codex_workspace.tasks.parts import INPUT_MODES
from codex_workspace.tasks.replies import USAGE
from codex_workspace.tasks.request import TURN
from codex_workspace.tasks.telemetry import Telemetry

if TYPE_CHECKING:
    from codex_workspace.cli.on_platform import PlatformMember


def load_executor(name: str) -> AgentExecutor:
    """Return the executor that the factory `module:function` creates; the module may be in the current folder.

    Raises:
        ConfigError: the module or function does not exist, or does not create an `AgentExecutor`.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(f"--executor: must be module:factory, but is {name}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"--executor: the module {module_name} cannot be imported: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigError(f"--executor: {module_name} has no function {attribute}")
    made = factory()
    if not isinstance(made, AgentExecutor):
        raise ConfigError(f"--executor: {name} returns a {type(made).__name__}, not an AgentExecutor")
    return made


logger = logging.getLogger(__name__)

EXTENSIONS = (
    AgentExtension(uri=USAGE, description="Token usage of a turn, in the metadata of its last status."),
    AgentExtension(uri=TURN, description="Per-message turn options, such as the model, in the message's metadata."),
    AgentExtension(uri=ITEMS, description="Output of commands and the current diff, streamed as artifacts."),
    *(
        AgentExtension(uri=f"{ANSWER_UPDATES}:{mode}", description=f"A stream brings the artifact `answer` {how}.")
        for mode, how in MODES.items()
    ),
)
"""Optional extensions."""

LIMITS = "urn:codex-workspace:limits"
"""The extension that lists the limitations of `codex exec`; it cannot be requested."""


def exec_extensions(*, hands_over: bool) -> tuple[AgentExtension, ...]:
    """Return the extensions of an agent with `codex exec`; `hands_over`: whether it can hand over files."""
    files = "" if hands_over else "files cannot be sent, "
    limits = AgentExtension(
        uri=LIMITS,
        description=(
            "Each turn runs in its own process: a message cannot join a running turn (midTurn steer is rejected), no "
            f"questions are asked, {files}and each text is sent as a whole."
        ),
    )
    return (*(extension for extension in EXTENSIONS if extension.uri != ITEMS), limits)


@dataclass(frozen=True, slots=True)
class ServedExecutor:
    """An executor and what the server needs to know about it.

    begin: starts it and returns its description for the log.
    agent: the agent whose executor it is; None for any other executor.
    """

    executor: AgentExecutor
    store: Store
    telemetry: Telemetry
    begin: Callable[[], Awaitable[str]]
    agent: Agent | None = None


async def serve_codex(
    settings: Settings, provider: ChosenProvider, launched: Launched, place: ListeningPlace, sign: Signer | None
) -> None:
    """Serve codex until the place's event is set, then let running turns end.

    Raises:
        ConfigError: the database is damaged or newer, or fails during the start.
        CodexCannotStart: codex is too old, or ends at once.
    """
    async with agent_around(launched, settings, provider) as agent:

        async def begin() -> str:
            version = await agent.codex.start()
            return f"codex {format_version(version)}, model {provider.model}, sandbox {settings.config.codex.sandbox}"

        options = replace(
            server_options(settings, place, sign),
            input_modes=INPUT_MODES,
            extensions=exec_extensions(hands_over=settings.has_agent_tools) if is_exec(settings) else EXTENSIONS,
            skills=settings.skills,
            setup=setup_of(settings, provider),
        )
        hosted = ServedExecutor(agent.executor, agent.store, agent.telemetry, begin, agent)
        await _run(settings, hosted, options, place)


async def serve_other(settings: Settings, name: str) -> None:
    """Serve the executor that the factory `module:function` creates.

    Raises:
        ConfigError: the factory or the configuration is wrong, or a port is taken.
    """
    executor = load_executor(name)
    secrets = secrets_of(settings, None)
    set_up_log(settings, secrets)
    async with listening(settings) as place:
        options = server_options(settings, place, card_signer_of(settings))
        prepare_state(settings)
        database_url = settings.database_url.reveal()
        await unless(place.stop, partial(wait_until_free, database_url))
        if place.stop.is_set():
            return
        async with (
            lock_state(settings, place.url),
            tracing(settings, Redactor(secrets)) as tracer,
            open_store(database_url) as store,
        ):

            async def begin() -> str:
                return name

            served = ServedExecutor(executor, store, Telemetry(tracer=tracer), begin)
            async with task_group() as tasks:
                tasks.start_soon(store.keep_lock)
                await _run(settings, served, options, place)
                tasks.cancel_scope.cancel()


async def _run(settings: Settings, hosted: ServedExecutor, options: ServerOptions, place: ListeningPlace) -> None:
    """Serve an executor until the place's event is set."""
    # A collection of the loaded modules, which stay for good, would stop the event loop for 100 ms and more.
    gc.freeze()
    gc.enable()
    agent, a2a = hosted.agent, settings.config.a2a
    member = None if agent is None else _platform_member(settings, agent)
    async with (
        open_push(settings.config.push, hosted.store.push_configs) if a2a.push_notifications else nullcontext() as push,
        build_app(
            options,
            hosted.executor if member is None else member.executor,
            hosted.store,
            hosted.store.write_problem if agent is None else agent.not_ready_reason,
            None if agent is None else agent.admission,
            push,
            views=partial(_views, settings, hosted, push),
            tracer=hosted.telemetry.tracer,
            handler_class=IdempotentHandler if member is None else member.handler_class,
        ) as app,
    ):
        name = await unless(place.stop, hosted.begin)
        try:
            if name is None or await unless(place.stop, app.resume) is None:
                return
        except StoreUnavailable as error:
            raise ConfigError("DATABASE_URL: the database failed during the start; see the log, start again") from error
        async with (
            nullcontext() if place.grpc is None else app.grpc(place.grpc),
            serving(app.asgi, place.listener, settings.config.limits.slow_reader_s),
            nullcontext() if member is None else member.joined(app, options.url, place.stop),
        ):
            gc.freeze()
            grpc_address = "" if place.grpc is None else f", gRPC at {options.grpc_url or f'port {place.grpc.port}'}"
            logger.info("ready: %s%s, A2A at %s", name, grpc_address, options.url)
            if settings.own_token is not None:
                announce(settings.own_token, settings.state_dir, options.url)
            await place.stop.wait()
            # The application cancels the work of other executors.
            if agent is not None:
                await agent.executor.drain(settings.config.codex.shutdown_grace_s)


def _platform_member(settings: Settings, agent: Agent) -> "PlatformMember | None":
    if settings.platform is None or agent.platform is None:
        return None
    # Imported only for an agent on the platform: with its HTTP client it takes 100 ms.
    from codex_workspace.cli.on_platform import PlatformMember
    from codex_workspace.platform.active_tasks import TrackedExecutor

    return PlatformMember(settings, settings.platform, agent.platform, agent, TrackedExecutor(agent.executor))


def _views(settings: Settings, hosted: ServedExecutor, push: PushService | None, front: LimitedHandler) -> list[View]:
    """Return the operator endpoints."""
    agent = hosted.agent
    reader = GaugeCollector(
        hosted.store.deliveries,
        lambda: front.open_streams,
        None if agent is None else agent.admission,
        None if agent is None else agent.codex.stats,
        None if push is None else lambda: push.waiting,
    )

    async def scrape() -> bytes:
        return hosted.telemetry.metrics.scrape(*await reader.read())

    metrics_token, platform = settings.metrics_token, settings.platform
    views = [metrics_view(scrape, None if metrics_token is None else metrics_token.reveal())]
    if agent is not None:
        token = platform.token.reveal() if platform is not None and platform.token is not None else None
        views.append(transcript_view(agent.transcripts.lines, token))
    return views


def server_options(settings: Settings, place: ListeningPlace, sign: Signer | None) -> ServerOptions:
    """Return the options of the server that do not depend on the executor."""
    config, limits = settings.config, settings.config.limits
    host = urlsplit(settings.environment.A2A_PUBLIC_URL or "").hostname or settings.environment.A2A_HOST
    grpc_url = None
    if place.grpc is not None and config.a2a.grpc_on_card:
        grpc_url = config.a2a.grpc_url or f"{reachable(host)}:{place.grpc.port}"
    return ServerOptions(
        name=config.name,
        description=config.description or "An agent that works on code with OpenAI Codex.",
        version=config.version or __version__,
        url=place.url,
        grpc_url=grpc_url,
        tokens={name: token.reveal() for name, token in settings.tokens.items()}
        | ({OPERATOR: settings.own_token.digest} if settings.own_token else {}),
        hosts=(settings.environment.A2A_HOST, place.listener.getsockname()[0], *config.a2a.allowed_hosts),
        origins=config.a2a.allowed_origins,
        max_body_bytes=limits.max_message_bytes,
        max_parts=limits.max_parts,
        one_main_context=config.codex.conversations == "main",
        versions=config.a2a.protocol_versions,
        streaming=config.a2a.streaming,
        answer_updates=config.a2a.answer_updates,
        requests_per_minute=limits.requests_per_minute,
        streams=StreamLimits(limits.max_streams_per_principal, limits.max_streams, limits.stream_idle_s),
        sign=sign,
    )


def setup_of(settings: Settings, provider: ChosenProvider) -> Mapping[str, str]:
    """Return the setup that the extended card shows to authenticated clients."""
    codex = settings.config.codex
    return {
        "workspace": str(settings.workspace_dir),
        "model": provider.model,
        "provider": provider.name,
        "sandbox": codex.sandbox,
        "approvalPolicy": codex.approval_policy,
        "midTurn": codex.mid_turn,
        "backend": codex.backend,
    }
