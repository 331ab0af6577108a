"""Retrying clients: each sends its messages in order and retries with the same message ID until it has an answer."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio.lowlevel
import grpc.aio
import httpx
from a2a.types import SendMessageRequest, StreamResponse, a2a_pb2_grpc
from google.protobuf.json_format import MessageToDict, ParseDict

from codex_workspace.common.values import JsonObject
from tests.chaos.plan import Message, SendMode
from tests.chaos.task_responses import Answer, ProtocolFault, TaskReader, Unavailable

PATIENCE_S: Final = 0.5
"""The longest delay before a retry. It can be shorter than Retry-After, which the agent must tolerate."""

NEW: Final = {"A2A-Version": "1.0"}
OLD_MODES: Final = {SendMode.OLD_BLOCKING, SendMode.OLD_STREAMING}
REST_MODES: Final = {SendMode.REST_BLOCKING, SendMode.REST_STREAMING}
GRPC_MODES: Final = {SendMode.GRPC_BLOCKING, SendMode.GRPC_STREAMING}

ANSWER_WITHIN_S: Final = 30.0
"""The read time-out; afterwards the connection is closed and the message is sent again."""


GRPC_OPTIONS: Final = tuple((f"grpc.{name}_reconnect_backoff_ms", 200) for name in ("initial", "min", "max"))
"""A channel connects again soon after the agent was killed."""

RETRIED: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}
"""What gRPC reports if the connection breaks, if the agent has a temporary error, and after `ANSWER_WITHIN_S`."""


class Refusal(Exception):
    """An HTTP status that asks for a retry after `retry_after_s` seconds."""

    def __init__(self, status: int, retry_after_s: float) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Responses:
    """All answers to all messages, the number of tries by mode, the reasons of retries, and violations of A2A."""

    answers: dict[int, list[Answer]] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    answered: anyio.Event = field(default_factory=anyio.Event)

    def add(self, message: Message, answer: Answer) -> None:
        """Record an answer."""
        self.answers.setdefault(message.number, []).append(answer)
        self.answered.set()
        self.answered = anyio.Event()

    async def reach(self, answers: int) -> None:
        """Wait until this number of messages has an answer."""
        while len(self.answers) < answers:
            await self.answered.wait()


@dataclass(slots=True)
class Client:
    """One client. `request_scope` is the request in progress; cancelling it drops the connection."""

    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    responses: Responses
    request_scope: anyio.CancelScope | None = None

    async def send_all(self, messages: list[Message]) -> None:
        """Send the messages in order, each until it is answered."""
        for message in messages:
            self.responses.add(message, await self.deliver(message))

    async def deliver(self, message: Message, mode: SendMode | None = None) -> Answer:
        """Send a message until it is answered, first in its own mode or `mode`, then in any."""
        rng, mode = random.Random(message.message_id), mode or message.mode
        while True:
            self.responses.tries[mode] += 1
            answer, why, pause_s = await self._try(message, mode)
            if answer is not None:
                return answer
            self.responses.retries[why] += 1
            mode = rng.choice(list(SendMode))
            await anyio.sleep(min(pause_s, PATIENCE_S))

    async def _try(self, message: Message, mode: SendMode) -> tuple[Answer | None, str, float]:
        """Send a message once; return the answer, or None, the reason and the delay before the next attempt."""
        answer: Answer | None = None
        try:
            with anyio.CancelScope() as self.request_scope:
                answer = await (self._call(message, mode) if mode in GRPC_MODES else ask(self.http, message, mode))
        except Refusal as refusal:
            return None, str(refusal), refusal.retry_after_s
        except (httpx.HTTPError, Unavailable) as error:
            return None, type(error).__name__, random.uniform(0.02, 0.2)
        except ProtocolFault as fault:
            self.responses.faults.append(f"{message.name} by {mode}: {fault}")
            return None, type(fault).__name__, PATIENCE_S
        finally:
            dropped, self.request_scope = self.request_scope is not None and self.request_scope.cancelled_caught, None
        return answer, "dropped" if dropped else "stream without an end", 0.0

    async def _call(self, message: Message, mode: SendMode) -> Answer | None:
        """Do the same as `ask` over gRPC."""
        stub = a2a_pb2_grpc.A2AServiceStub(self.channel)  # type: ignore[no-untyped-call]
        request, reader = ParseDict(params(message), SendMessageRequest()), TaskReader()
        options = {"metadata": (("a2a-version", "1.0"),), "timeout": ANSWER_WITHIN_S}
        try:
            if mode is SendMode.GRPC_BLOCKING:
                reader.take_event(MessageToDict(await stub.SendMessage(request, **options)))
            else:
                event: StreamResponse
                async for event in stub.SendStreamingMessage(request, **options):
                    reader.take_event(MessageToDict(event))
        except asyncio.CancelledError:
            # gRPC replaces the cancel scope's error by its own, which the scope would not catch.
            await anyio.lowlevel.checkpoint()
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                trailers = dict(error.trailing_metadata() or ())
                raise Refusal(429, _seconds(trailers.get("retry-after"))) from error
            if error.code() in RETRIED:
                raise Unavailable(str(error)) from error
            raise ProtocolFault(str(error)) from error
        return reader.answer

    async def list_tasks(self) -> list[str]:
        """Return the IDs of all tasks."""
        found, token = list[str](), ""
        while True:
            query = {"pageSize": "100", "pageToken": token}
            page = (await self.http.get("/tasks", params=query, headers=NEW)).raise_for_status().json()
            found += [task["id"] for task in page["tasks"]]
            if not (token := page["nextPageToken"]):
                return found


async def ask(http: httpx.AsyncClient, message: Message, mode: SendMode) -> Answer | None:
    """Send a message over HTTP and return its answer, or None if the stream ends before the task.

    Raises:
        httpx.HTTPError: the connection fails.
        Refusal, Unavailable: the agent asks for a retry.
        ProtocolFault: the response violates A2A.
    """
    reader, is_rest = TaskReader(), mode in REST_MODES
    take = reader.take_event if is_rest else reader.take
    path, body = (mode, params(message)) if is_rest else ("/", call(message, mode))
    async with http.stream("POST", path, json=body, headers={} if mode in OLD_MODES else NEW) as response:
        if response.status_code == 429 or (response.status_code >= 500 and not is_rest):
            raise Refusal(response.status_code, _seconds(response.headers.get("retry-after")))
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    take(json.loads(line.removeprefix("data:")))
        else:
            take(json.loads(await response.aread()))
    return reader.answer


def _seconds(retry_after: str | bytes | None) -> float:
    if retry_after is None:
        raise ProtocolFault("a refusal without Retry-After")
    return float(retry_after)


def call(message: Message, mode: SendMode) -> JsonObject:
    """Return the JSON-RPC request."""
    body = params(message, is_old=mode in OLD_MODES)
    return {"jsonrpc": "2.0", "id": message.number, "method": str(mode), "params": body}


def params(message: Message, *, is_old: bool = False) -> JsonObject:
    """Return the request of 1.0, or of 0.3."""
    sent: JsonObject = {"messageId": message.message_id}
    if message.context_id:
        sent["contextId"] = message.context_id
    if is_old:
        sent |= {"kind": "message", "role": "user", "parts": [{"kind": "text", "text": message.text}]}
    else:
        sent |= {"role": "ROLE_USER", "parts": [{"text": message.text}]}
    return {"message": sent}


@asynccontextmanager
async def client(port: int, grpc_port: int, responses: Responses) -> AsyncIterator[Client]:
    """Yield a client with persistent connections."""
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_WITHIN_S, trust_env=False) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", GRPC_OPTIONS) as channel,
    ):
        yield Client(http, channel, responses)
