"""Talk to an A2A agent, any one: `python -m codex_workspace chat [URL]`.

`open_peer` is the client: it finds the agent by its card, sends messages, and follows a task to its end also where
the stream breaks. `chat` is the person's side of it: lines in, `terminal`'s rendering out, Ctrl-C cancels the turn.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import anyio
import httpx
from a2a.client import A2ACardResolver, Client, ClientCallContext, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientTimeoutError, AgentCardResolutionError
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
)
from a2a.utils.constants import TransportProtocol
from a2a.utils.errors import A2AError

from codex_workspace.cli.terminal import ENDINGS, PAUSES, Console, TurnView, clean
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import AgentError
from codex_workspace.config.environment import read_header_secret

PROMPT: Final = "> "
CONNECT_TIMEOUT_S: Final = 10.0
SILENCE_S: Final = 60.0
"""A stream that is silent for so long is taken for broken, and asked for again. The SDK's servers ping every 15 s."""

BLOCKING_TIMEOUT_S: Final = 3600.0
POLL_INTERVAL_S: Final = 0.5
GIVE_UP_AFTER_S: Final = 20.0
"""How long an agent that does not answer any more is asked how a task goes on: a restart takes a few seconds."""

CANCEL_GRACE_S: Final = 10.0
"""How long the stream may take to say `canceled` once the agent has agreed to cancel."""

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")

OnEvent = Callable[[StreamResponse], None]


class ChatError(AgentError):
    """The agent cannot be talked to; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What to send: `context_id` None lets the agent choose, `task_id` names a task that waits for an answer."""

    text: str
    context_id: str | None = None
    task_id: str | None = None


class ChatPeer:
    """An A2A agent that has shown its card."""

    def __init__(self, client: Client, card: AgentCard) -> None:
        self._client = client
        self.name = clean(card.name)
        self.streams = card.capabilities.streaming
        # An agent that does not stream may well answer only when all is done.
        self._patience = None if self.streams else ClientCallContext(timeout=BLOCKING_TIMEOUT_S)

    async def send(self, outgoing: Outgoing, on_event: OnEvent) -> None:
        """Send a message and give all that comes of it to `on_event`, until its task has ended or waits for us.

        Raises:
            ChatError: the agent refused the message, or was lost on the way.
        """
        following = _Following(on_event)
        # An agent that does not stream is asked for the task at once and polled, so that it can be cancelled too.
        configuration = SendMessageConfiguration(return_immediately=not self.streams)
        request = SendMessageRequest(message=_message(outgoing), configuration=configuration)
        try:
            await following.take(self._client.send_message(request, context=self._patience))
        except A2AError as error:
            # What was begun can be followed by its id; what was not accepted cannot.
            if following.task_id is None:
                raise _refused(error) from error
        if not following.over:
            await self._catch_up(following)

    async def cancel(self, task_id: str) -> StreamResponse:
        """Cancel a task; returns its state afterwards.

        Raises:
            ChatError: the agent did not cancel it; it may have ended a moment before.
        """
        try:
            return StreamResponse(task=await self._client.cancel_task(CancelTaskRequest(id=task_id)))
        except A2AError as error:
            raise _refused(error) from error

    async def _catch_up(self, following: "_Following") -> None:
        """Follow a task whose stream has ended before the task did."""
        task_id = following.task_id
        if task_id is None:
            raise ChatError("the agent's answer ended before it had begun")
        while not following.over:
            following.give(await self._state_of(task_id))
            if self.streams and not following.over:
                # An agent without SubscribeToTask refuses it for ever: then GetTask alone tells how it goes on.
                with suppress(A2AError):
                    await following.take(self._client.subscribe(SubscribeToTaskRequest(id=task_id)))
            if not following.over:
                await anyio.sleep(POLL_INTERVAL_S)

    async def _state_of(self, task_id: str) -> StreamResponse:
        """Return a task as it stands, asked for again while the agent cannot be reached."""
        give_up_at = anyio.current_time() + GIVE_UP_AFTER_S
        while True:
            try:
                return StreamResponse(task=await self._client.get_task(GetTaskRequest(id=task_id)))
            except A2AError as error:
                if not _may_pass(error) or anyio.current_time() > give_up_at:
                    raise ChatError(f"the agent was lost in the middle of task {task_id}: {_reason(error)}") from error
            await anyio.sleep(POLL_INTERVAL_S)


class _Following:
    """Passes a task's events on, and knows whether it is over."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self.task_id: str | None = None
        self.over = False

    async def take(self, events: AsyncIterator[StreamResponse]) -> None:
        """Pass events on until they or the task end."""
        async for event in events:
            self.give(event)
            if self.over:
                return

    def give(self, event: StreamResponse) -> None:
        match event.WhichOneof("payload"):
            case "task":
                self.task_id, state = event.task.id, event.task.status.state
                self.over = state in ENDINGS or state in PAUSES
            case "status_update":
                self.task_id, state = event.status_update.task_id, event.status_update.status.state
                self.over = state in ENDINGS or state in PAUSES
            case "message":
                self.over = True
            case _:
                pass
        self._on_event(event)


@asynccontextmanager
async def open_peer(url: str, token: str | None = None) -> AsyncIterator[ChatPeer]:
    """Find the A2A agent at `url` by its card; `token` is shown to it as bearer token.

    Raises:
        ChatError: nothing answers there, the token is missing or wrong, or what answers is no A2A agent.
    """
    address = _address(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=SILENCE_S),
        # A proxy for the outside world does not know what listens on this machine.
        mounts={f"all://{host}": httpx.AsyncHTTPTransport() for host in LOOPBACK},
    ) as http:
        card = await _find_card(http, address)
        bindings = [TransportProtocol.JSONRPC.value, TransportProtocol.HTTP_JSON.value]
        try:
            client = ClientFactory(ClientConfig(httpx_client=http, supported_protocol_bindings=bindings)).create(card)
        except ValueError as error:
            raise ChatError(
                f"the agent at {address} offers neither JSON-RPC nor HTTP+JSON, which is what can be spoken here"
            ) from error
        yield ChatPeer(client, card)


def _address(url: str) -> str:
    """Return the agent's base address.

    Raises:
        ChatError: `url` is none.
    """
    address = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ChatError(f"{url} is no address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ChatError(f"{url} is no http or https address")
    return address.rstrip("/")


async def _find_card(http: httpx.AsyncClient, address: str) -> AgentCard:
    try:
        return await A2ACardResolver(http, address).get_agent_card()
    except AgentCardResolutionError as error:
        if error.status_code in (401, 403):
            raise ChatError(_UNAUTHORIZED) from error
        if error.status_code is not None:
            raise ChatError(
                f"{address} is not an A2A agent: it answers HTTP {error.status_code} where the agent card should be"
            ) from error
        if isinstance(error.__cause__, httpx.RequestError):
            raise ChatError(f"no agent can be reached at {address}: {_network_reason(error.__cause__)}") from error
        raise ChatError(f"{address} is not an A2A agent: what it gives as agent card is none") from error
    except ValueError as error:
        raise ChatError(f"{address} is not an A2A agent: what it gives as agent card is not JSON") from error


_UNAUTHORIZED: Final = "the agent wants another token (HTTP 401): set A2A_TOKEN, or A2A_TOKEN_FILE, to the agent's own"


def _is_broken_line(error: A2AError) -> bool:
    return isinstance(error, A2AClientTimeoutError) or isinstance(error.__cause__, httpx.RequestError)


def _may_pass(error: A2AError) -> bool:
    cause = error.__cause__
    return _is_broken_line(error) or (isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code >= 500)


def _refused(error: A2AError) -> ChatError:
    cause = error.__cause__
    if isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code in (401, 403):
        return ChatError(_UNAUTHORIZED)
    if _is_broken_line(error):
        return ChatError(f"the agent cannot be reached: {_reason(error)}")
    return ChatError(f"the agent refused: {_reason(error)}")


def _reason(error: A2AError) -> str:
    match error.__cause__:
        case httpx.HTTPStatusError() as cause:
            return f"HTTP {cause.response.status_code}"
        case httpx.RequestError() as cause:
            return _network_reason(cause)
        case _:
            return " ".join(clean(error.message).split())


def _network_reason(error: httpx.RequestError) -> str:
    match error:
        case httpx.ConnectTimeout() | httpx.PoolTimeout():
            return f"no connection within {CONNECT_TIMEOUT_S:g} s"
        case httpx.TimeoutException():
            return f"silent for {SILENCE_S:g} s"
        case httpx.ConnectError():
            return f"no connection ({error})"
        case _:
            return f"the connection broke ({error})"


def _message(outgoing: Outgoing) -> Message:
    return Message(
        role=Role.ROLE_USER,
        message_id=str(uuid.uuid4()),
        context_id=outgoing.context_id,
        task_id=outgoing.task_id,
        parts=[Part(text=outgoing.text)],
    )


async def chat(url: str, message: str | None, env: Mapping[str, str]) -> int:
    """Talk to the agent at `url`: send `message` and show what comes of it, or without one, ask for lines.

    The token is A2A_TOKEN or the text of the file A2A_TOKEN_FILE.

    Returns:
        The exit code. One message: 0 when its task has completed, else 1. Asked for lines: 0 when the person left.

    Raises:
        ConfigError: the token cannot be read.
    """
    # What the SDK logs is said in fewer words where it matters.
    logging.basicConfig(handlers=[logging.NullHandler()])
    token = read_header_secret(env, "A2A_TOKEN")
    console = Console(sys.stdout, env)
    code = 0 if message is None else 1
    with _interrupts() as interrupts:
        async with task_group() as tasks:

            def leave() -> None:
                console.line()
                tasks.cancel_scope.cancel()

            interrupts.on_interrupt = leave
            tasks.start_soon(interrupts.listen)
            try:
                async with open_peer(url, None if token is None else token.reveal()) as peer:
                    code = await _converse(_Conversation(peer, console, interrupts), message, console)
            except ChatError as error:
                print(clean(str(error)), file=sys.stderr)
                code = 1
            tasks.cancel_scope.cancel()
    return code


async def _converse(conversation: "_Conversation", message: str | None, console: Console) -> int:
    if message is not None:
        return 0 if await conversation.turn(message) else 1
    await _talk(conversation, console)
    return 0


class _Interrupts:
    """What Ctrl-C does at the moment: `on_interrupt` is called for each."""

    def __init__(self, signals: AsyncIterator[signal.Signals]) -> None:
        self._signals = signals
        self.on_interrupt: Callable[[], None] = lambda: None

    async def listen(self) -> None:
        async for _ in self._signals:
            self.on_interrupt()

    @contextmanager
    def instead(self, action: Callable[[], None]) -> Iterator[None]:
        """Let Ctrl-C do `action` while the block runs."""
        before, self.on_interrupt = self.on_interrupt, action
        try:
            yield
        finally:
            self.on_interrupt = before


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    receiver: AbstractContextManager[AsyncIterator[signal.Signals]] = anyio.open_signal_receiver(signal.SIGINT)
    with receiver as signals:
        yield _Interrupts(signals)


class _Conversation:
    """Turn after turn in one context."""

    def __init__(self, peer: ChatPeer, console: Console, interrupts: _Interrupts) -> None:
        self.peer = peer
        self._console = console
        self._interrupts = interrupts
        self._context_id: str | None = None
        self._waiting_task_id: str | None = None

    def begin_anew(self) -> None:
        """Continue in a new context. Its id is ours: to name none means one main conversation to some agents."""
        self._context_id, self._waiting_task_id = str(uuid.uuid4()), None

    async def turn(self, text: str) -> bool:
        """Send a message, show what comes of it, and tell whether it ended well. Ctrl-C cancels it.

        A second Ctrl-C does not wait for the agent any longer.

        Raises:
            ChatError: the agent refused the message, or was lost on the way.
        """
        turn = _Turn(self.peer, self._console)
        view = turn.view
        try:
            with self._interrupts.instead(turn.interrupt):
                await turn.run(Outgoing(text, self._context_id, self._waiting_task_id))
        finally:
            self._context_id = view.context_id or self._context_id
            self._waiting_task_id = view.task_id if view.state in PAUSES else None
        return view.completed


class _Turn:
    """One message and what comes of it, shown as it comes."""

    def __init__(self, peer: ChatPeer, console: Console) -> None:
        self.view = TurnView(console.style, anyio.current_time())
        self._peer = peer
        self._console = console
        self._scope = anyio.CancelScope()
        self._interrupted, self._task_known, self._over = anyio.Event(), anyio.Event(), anyio.Event()

    def interrupt(self) -> None:
        """Have the task canceled; at the second time, wait for it no longer."""
        if self._interrupted.is_set():
            self._scope.cancel()
        self._interrupted.set()

    async def run(self, outgoing: Outgoing) -> None:
        """Send the message and show what comes of it, to the end."""
        with self._scope:
            async with task_group() as tasks:
                tasks.start_soon(self._cancel_when_interrupted)
                await self._peer.send(outgoing, self._show)
                tasks.cancel_scope.cancel()
        if not self.view.ended:
            self._console.write(self.view.broken("not waited for any longer; the agent may still be at work"))

    async def _cancel_when_interrupted(self) -> None:
        """Cancel the task, and wait until the stream has said so: its own last words come before that."""
        await self._interrupted.wait()
        await self._task_known.wait()
        if self.view.task_id is None or self.view.ended:
            return
        try:
            canceled = await self._peer.cancel(self.view.task_id)
        except ChatError as error:
            # It may have ended a moment ago, which the stream is about to say.
            if not self.view.ended:
                self._console.write(self.view.broken(f"not canceled: {error}"))
            return
        with anyio.move_on_after(CANCEL_GRACE_S):
            await self._over.wait()
        self._show(canceled)
        self._scope.cancel()

    def _show(self, event: StreamResponse) -> None:
        self._console.write(self.view.apply(event, anyio.current_time()))
        if self.view.task_id is not None:
            self._task_known.set()
        if self.view.ended:
            self._over.set()


async def _talk(conversation: _Conversation, console: Console) -> None:
    """Ask for lines and send them until there are no more."""
    lines = _Lines(sys.stdin.fileno())
    asks = console.is_terminal and os.isatty(sys.stdin.fileno())
    if asks:
        console.line(f"{conversation.peer.name}. Ctrl-C cancels a turn; /new begins anew, /quit leaves.")
    while True:
        if asks:
            console.write(PROMPT)
        line = await lines.next()
        match line if line is None else line.strip():
            case None:
                if asks:
                    console.line()
                return
            case "":
                continue
            case "/quit":
                return
            case "/new":
                conversation.begin_anew()
                console.line("[a new conversation]")
            case text:
                try:
                    await conversation.turn(text)
                except ChatError as error:
                    print(clean(str(error)), file=sys.stderr)


class _Lines:
    """The lines of a file descriptor, read without a thread: one that waits for a key could not be ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""
        self._ended = False

    async def next(self) -> str | None:
        """Return the next line, or None where there is none."""
        while b"\n" not in self._buffer and not self._ended:
            await self._readable()
            data = os.read(self._descriptor, 1 << 16)
            self._buffer += data
            self._ended = not data
        line, newline, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace") if line or newline else None

    async def _readable(self) -> None:
        try:
            await anyio.wait_readable(self._descriptor)
        except PermissionError:
            # A file, or /dev/null: never waits, and cannot be waited for.
            await anyio.lowlevel.checkpoint()
