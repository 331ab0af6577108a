"""Retrying clients: each sends its messages in order and retries with the same message ID until it has an answer."""

import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
import httpx

from codex_workspace.common.values import JsonObject
from tests.chaos.plan import Message, SendMode
from tests.chaos.task_responses import Answer, ProtocolFault, TaskReader, Unavailable

PATIENCE_S: Final = 0.5
"""The longest delay before a retry. It can be shorter than Retry-After, which the agent must tolerate."""

ANSWER_WITHIN_S: Final = 30.0
"""The read time-out; afterwards the connection is closed and the message is sent again."""


class Refusal(Exception):
    """An HTTP status that asks for a retry after `retry_after_s` seconds."""

    def __init__(self, status: int, retry_after_s: float) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Responses:
    """All answers to all messages, the reasons of retries, and violations of A2A."""

    answers: dict[int, list[Answer]] = field(default_factory=dict)
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
    responses: Responses
    request_scope: anyio.CancelScope | None = None

    async def send_all(self, messages: list[Message]) -> None:
        """Send the messages in order, each until it is answered."""
        for message in messages:
            self.responses.add(message, await self.deliver(message))

    async def deliver(self, message: Message, mode: SendMode | None = None) -> Answer:
        """Send a message until it is answered, in its own mode or another."""
        while True:
            answer, why, pause_s = await self._try(message, mode or message.mode)
            if answer is not None:
                return answer
            self.responses.retries[why] += 1
            await anyio.sleep(min(pause_s, PATIENCE_S))

    async def _try(self, message: Message, mode: SendMode) -> tuple[Answer | None, str, float]:
        """Send a message once; return the answer, or None, the reason and the delay before the next attempt."""
        answer: Answer | None = None
        try:
            with anyio.CancelScope() as self.request_scope:
                answer = await ask(self.http, message, mode)
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


async def ask(http: httpx.AsyncClient, message: Message, mode: SendMode) -> Answer | None:
    """Send a message and return its answer, or None if the stream ends before the task.

    Raises:
        httpx.HTTPError: the connection fails.
        Refusal, Unavailable: the agent asks for a retry.
        ProtocolFault: the response violates A2A.
    """
    is_old = "/" in mode
    reader = TaskReader()
    headers = {} if is_old else {"A2A-Version": "1.0"}
    async with http.stream("POST", "/", json=call(message, mode), headers=headers) as response:
        if response.status_code == 429 or response.status_code >= 500:
            raise Refusal(response.status_code, _seconds(response.headers.get("retry-after")))
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    reader.take(json.loads(line.removeprefix("data:")))
        else:
            reader.take(json.loads(await response.aread()))
    return reader.answer


def _seconds(retry_after: str | None) -> float:
    if retry_after is None:
        raise ProtocolFault("a refusal without Retry-After")
    return float(retry_after)


def call(message: Message, mode: SendMode) -> JsonObject:
    """Return the JSON-RPC request."""
    sent: JsonObject = {"messageId": message.message_id}
    if message.context_id:
        sent["contextId"] = message.context_id
    if "/" in mode:
        sent |= {"kind": "message", "role": "user", "parts": [{"kind": "text", "text": message.text}]}
    else:
        sent |= {"role": "ROLE_USER", "parts": [{"text": message.text}]}
    return {"jsonrpc": "2.0", "id": message.number, "method": str(mode), "params": {"message": sent}}


@asynccontextmanager
async def client(url: str, responses: Responses) -> AsyncIterator[Client]:
    """Yield a client with a persistent connection."""
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_WITHIN_S, trust_env=False) as http:
        yield Client(http, responses)
