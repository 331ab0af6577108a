"""The refusal "not now, come back later" in the words of each transport, as A2A has no error for it.

The SDK answers errors of JSON-RPC with HTTP 200, and those it does not know as unknown ones; here they go out with a
status that every client knows: HTTP 429 with `Retry-After`, or RESOURCE_EXHAUSTED with `RetryInfo`.

How often, and how many at once: counters of what one principal may ask for. No input or output.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from a2a.server.context import ServerCallContext
from a2a.utils.errors import A2AError
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codex_workspace.common.values import JsonObject, JsonValue

BUSY_CODE: Final = -32000
"""Of JSON-RPC's codes for servers, the one that A2A leaves to implementations."""

GRPC_CONTEXT: Final = "grpc_context"
"""Where the SDK's call context of a gRPC call holds gRPC's own."""


class BusyError(A2AError):
    """The agent takes no further request of this kind at the moment; come back after `retry_after_s` seconds."""

    def __init__(self, sentence: str, retry_after_s: int) -> None:
        super().__init__(sentence, {"retryAfterSeconds": retry_after_s})
        self.retry_after_s = retry_after_s


def busy(context: ServerCallContext, sentence: str, retry_after_s: int) -> BusyError:
    """Return the error to raise; on HTTP, have the request that is being answered get 429."""
    if GRPC_CONTEXT not in context.state:
        method = context.state.get("method")
        if method is None:
            body = rest_body(sentence, retry_after_s)
        else:
            old = "/" in str(method)
            body = rpc_body(sentence, retry_after_s, request_id=context.state.get("request_id"), is_old=old)
        replace_response(body, 429, {"Retry-After": str(retry_after_s)})
    return BusyError(sentence, retry_after_s)


def rpc_body(sentence: str, retry_after_s: int, *, request_id: JsonValue = None, is_old: bool = False) -> JsonObject:
    """Return the refusal as a JSON-RPC answer; 0.3 leaves the form of its details open."""
    data: JsonValue = {"retryAfterSeconds": retry_after_s} if is_old else [_info(retry_after_s)]
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": BUSY_CODE, "message": sentence, "data": data}}


def rest_body(sentence: str, retry_after_s: int) -> JsonObject:
    """Return the refusal as an HTTP+JSON answer."""
    error: JsonObject = {
        "code": 429,
        "status": "RESOURCE_EXHAUSTED",
        "message": sentence,
        "details": [_info(retry_after_s)],
    }
    return {"error": error}


def _info(retry_after_s: int) -> JsonObject:
    return {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "BUSY",
        "domain": "codex-workspace",
        "metadata": {"retryAfterSeconds": str(retry_after_s)},
    }


BURST_S: Final = 10.0
"""A principal that was quiet this long may ask for as much at once as it may ask for in that time."""

RETRY_STREAM_S: Final = 5
"""When to try a stream again for which there is no place: another one may end at any moment, or much later."""


@dataclass(slots=True)
class _Bucket:
    left: float
    since: float


class RateLimiter:
    """Lets each principal make `per_minute` requests a minute, in bursts of up to `BURST_S` seconds' worth."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / 60
        self._most = max(1.0, self._per_second * BURST_S)
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, principal: str) -> int:
        """Count a request; return 0 where it may be made, else after how many seconds to come back."""
        now = self._clock()
        bucket = self._buckets.setdefault(principal, _Bucket(self._most, now))
        bucket.left = min(self._most, bucket.left + (now - bucket.since) * self._per_second)
        bucket.since = now
        if bucket.left < 1:
            return max(1, math.ceil((1 - bucket.left) / self._per_second))
        bucket.left -= 1
        return 0


class LimitExceeded(Exception):
    """There is no place; says so in a sentence for the client."""


@dataclass(slots=True)
class ConcurrencyLimiter:
    """So many may be held at once, by one principal and by all."""

    per_principal: int
    total: int
    _held: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many are held by all."""
        return sum(self._held.values())

    @contextmanager
    def hold(self, principal: str, what: str) -> Iterator[None]:
        """Hold a place for as long as the block takes; `what` names in the plural what it is for.

        Raises:
            TooMany: all places are held.
        """
        own = self._held.get(principal, 0)
        if own >= self.per_principal:
            raise LimitExceeded(f"you have {own} {what} open, and may have {self.per_principal}")
        if self.count >= self.total:
            raise LimitExceeded(f"as many {what} are open as may ({self.total})")
        self._held[principal] = own + 1
        try:
            yield
        finally:
            self._held[principal] -= 1
            if not self._held[principal]:
                del self._held[principal]


@dataclass(slots=True)
class _Instead:
    """The response that takes the place of the one that is being made."""

    response: Response | None = None


_instead: ContextVar[_Instead | None] = ContextVar("instead", default=None)


def replace_response(content: object, status: int, headers: Mapping[str, str]) -> None:
    """Have the request that is being answered get this JSON, whatever is sent from now on.

    For what a library between us and the client would answer with a status of its own. Without effect where no request
    is being answered, and where the answer's body has begun.
    """
    instead = _instead.get()
    if instead is not None:
        instead.response = JSONResponse(content, status, headers)


class DeferredResponse:
    """Lets `replace_response` replace an answer until its body begins; the head is held back so long."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and what is sent for it back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        instead = _Instead()
        head: Message | None = None
        replaced = False

        async def passed_on(message: Message) -> None:
            nonlocal head, replaced
            if replaced:
                return
            if message["type"] == "http.response.start":
                head = message
                return
            first, head = head, None
            if first is not None and instead.response is not None:
                replaced = True
                await instead.response(scope, receive, send)
                return
            if first is not None:
                await send(first)
            await send(message)

        token = _instead.set(instead)
        try:
            await self._app(scope, receive, passed_on)
        finally:
            _instead.reset(token)
