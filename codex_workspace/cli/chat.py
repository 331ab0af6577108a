"""Sends messages to any A2A agent: `python -m codex_workspace chat [URL]`."""

import logging
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.types import CancelTaskRequest, GetTaskRequest, Message, Part, Role, SendMessageRequest, StreamResponse
from a2a.utils.constants import TransportProtocol
from a2a.utils.errors import A2AError
from anyio.abc import TaskGroup
from rich.console import Console

from codex_workspace.cli.terminal import TurnView, open_console
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import AgentError
from codex_workspace.config.environment import read_header_secret
from codex_workspace.runtimes.markdown import one_line

PROMPT: Final = "> "
CONNECT_TIMEOUT_S: Final = 10.0
SILENCE_S: Final = 300.0
"""A response that is silent for so long counts as broken. Agents that do not stream may need minutes."""

POLL_INTERVAL_S: Final = 0.5
GIVE_UP_AFTER_S: Final = 20.0
"""How long to poll an agent that does not answer; a restart takes a few seconds."""

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


class ChatError(AgentError):
    """The agent cannot be reached, or refused a request."""


class Conversation:
    """Messages to an agent in one context. Without a context ID the agent chooses the context."""

    def __init__(self, client: Client, console: Console, context_id: str = "") -> None:
        self._client = client
        self._console = console
        self._context_id = context_id
        self._waiting_task_id = ""

    async def turn(self, text: str) -> bool:
        """Send a message, show the turn, and return whether it succeeded.

        Ctrl-C cancels the turn; a second Ctrl-C does not wait for its end.

        Raises:
            ChatError: the agent refused the message, or does not answer any more.
        """
        view = TurnView(self._console)
        async with task_group() as tasks:
            tasks.start_soon(self._cancel_on_interrupt, view, tasks)
            await self.send(text, view)
            tasks.cancel_scope.cancel()
        if not view.outcome:
            view.show_problem("The task may still be running.")
        return view.completed

    async def send(self, text: str, view: TurnView) -> None:
        """Send a message and show its events, until its task ends or waits for input.

        Raises:
            ChatError: as `turn`.
        """
        message = Message(
            role=Role.ROLE_USER,
            message_id=str(uuid.uuid4()),
            context_id=self._context_id,
            task_id=self._waiting_task_id,
            parts=[Part(text=text)],
        )
        try:
            await self._follow(message, view)
        finally:
            self._context_id = view.context_id or self._context_id
            self._waiting_task_id = view.task_id if view.awaits_input else ""

    async def _follow(self, message: Message, view: TurnView) -> None:
        try:
            async for event in self._client.send_message(SendMessageRequest(message=message)):
                view.show(event)
                if view.outcome:
                    return
        except A2AError as error:
            if not view.task_id:
                raise _chat_error("the agent rejected the message", error) from error
        await self._poll(view)

    async def _poll(self, view: TurnView) -> None:
        """Follow a task whose stream broke, or whose agent does not stream."""
        give_up_at = anyio.current_time() + GIVE_UP_AFTER_S
        while not view.outcome:
            try:
                view.show(StreamResponse(task=await self._client.get_task(GetTaskRequest(id=view.task_id))))
                give_up_at = anyio.current_time() + GIVE_UP_AFTER_S
            except A2AError as error:
                if anyio.current_time() > give_up_at:
                    raise _chat_error(f"the state of task {view.task_id} is unknown", error) from error
            await anyio.sleep(POLL_INTERVAL_S)

    async def _cancel_on_interrupt(self, view: TurnView, tasks: TaskGroup) -> None:
        with anyio.open_signal_receiver(signal.SIGINT) as signals:
            is_canceling = False
            async for _ in signals:
                if is_canceling:
                    tasks.cancel_scope.cancel()
                else:
                    is_canceling = True
                    tasks.start_soon(self._cancel, view)

    async def _cancel(self, view: TurnView) -> None:
        await view.began.wait()
        try:
            await self._client.cancel_task(CancelTaskRequest(id=view.task_id))
        except A2AError as error:
            view.show_problem(str(_chat_error("the task was not canceled", error)))


@asynccontextmanager
async def open_client(url: str, token: str | None = None) -> AsyncIterator[Client]:
    """Open a client of the agent at `url`, which sends `token` as bearer token.

    Raises:
        ChatError: there is no agent, or the token is wrong.
    """
    address = url if "://" in url else f"http://{url}"
    async with httpx.AsyncClient(
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S),
        # A proxy cannot reach this machine's loopback addresses.
        mounts={f"all://{host}": httpx.AsyncHTTPTransport() for host in LOOPBACK},
    ) as http:
        try:
            card = await A2ACardResolver(http, address).get_agent_card()
            config = ClientConfig(
                httpx_client=http,
                # Without a stream, the task is polled, so that it can be canceled.
                polling=not card.capabilities.streaming,
                supported_protocol_bindings=[TransportProtocol.JSONRPC.value, TransportProtocol.HTTP_JSON.value],
            )
            client = ClientFactory(config).create(card)
        except (A2AError, httpx.InvalidURL, ValueError) as error:
            raise _chat_error(f"no A2A agent at {address}", error) from error
        yield client


def _chat_error(what: str, error: Exception) -> ChatError:
    match error.__cause__:
        case httpx.HTTPStatusError(response=response) if response.status_code in (401, 403):
            return ChatError("the agent rejects the token (HTTP 401): set A2A_TOKEN or A2A_TOKEN_FILE to its token")
        case _:
            return ChatError(one_line(f"{what}: {error}"))


async def chat(url: str, message: str | None, env: Mapping[str, str]) -> int:
    """Send `message` to the agent at `url` and show the turn, or without a message, ask for messages.

    The token is A2A_TOKEN or the content of the file A2A_TOKEN_FILE.

    Returns:
        The exit code: 1 if the agent cannot be reached or the message's task did not complete, else 0.

    Raises:
        ConfigError: the token cannot be read.
    """
    # Errors are shown; the SDK's log would repeat them.
    logging.basicConfig(handlers=[logging.NullHandler()])
    token = read_header_secret(env, "A2A_TOKEN")
    console = open_console()
    try:
        async with open_client(url, None if token is None else token.reveal()) as client:
            if message is not None:
                return 0 if await Conversation(client, console).turn(message) else 1
            await _talk(client, console)
            return 0
    except ChatError as error:
        print(error, file=sys.stderr)
        return 1


async def _talk(client: Client, console: Console) -> None:
    """Ask for messages and send them."""
    conversation = Conversation(client, console)
    is_interactive = console.is_terminal and sys.stdin.isatty()
    # The event loop's own handler would not interrupt reading from a pipe.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_interactive:
        console.out("Ctrl-C cancels a turn; /new starts a new conversation, /quit exits.")
    while line := await _ask() if is_interactive else sys.stdin.readline():
        match line.strip():
            case "/quit":
                return
            case "/new":
                # Some agents have one main conversation for messages without a context.
                conversation = Conversation(client, console, str(uuid.uuid4()))
                console.out("[a new conversation]")
            case "":
                pass
            case text:
                try:
                    await conversation.turn(text)
                except ChatError as error:
                    print(error, file=sys.stderr)


async def _ask() -> str:
    """Return the line that is typed at the prompt, with its end; after Ctrl-C or Ctrl-D nothing."""
    line = ""
    # `input` would lose a Ctrl-C that arrives just before it reads.
    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        async with task_group() as tasks:
            tasks.start_soon(_cancel_on_signal, signals, tasks.cancel_scope)
            print(PROMPT, end="", flush=True)
            await anyio.wait_readable(sys.stdin)
            line = sys.stdin.readline()
            tasks.cancel_scope.cancel()
    if not line:
        print()
    return line


async def _cancel_on_signal(signals: AsyncIterator[signal.Signals], scope: anyio.CancelScope) -> None:
    await anext(signals)
    scope.cancel()
