"""Overload: rate and concurrency limits per principal, and the "too many requests" response of each transport.

A2A defines no error for overload, and the SDK answers JSON-RPC errors with HTTP 200. This module replaces the response
by HTTP 429 with `Retry-After`; gRPC gets RESOURCE_EXHAUSTED.
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
"""A JSON-RPC server error code that A2A leaves to implementations."""

GRPC_CONTEXT: Final = "grpc_context"
"""Key in the SDK's call context: the gRPC context of a gRPC call."""


class BusyError(A2AError):
    """The agent is overloaded; retry after `retry_after_s` seconds."""

    def __init__(self, sentence: str, retry_after_s: int) -> None:
        super().__init__(sentence, {"retryAfterSeconds": retry_after_s})
        self.retry_after_s = retry_after_s


def busy(context: ServerCallContext, sentence: str, retry_after_s: int) -> BusyError:
    """Return the error to raise; over HTTP, also replace the current response by a 429."""
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
    """Return the JSON-RPC response; A2A 0.3 does not define the form of the details."""
    data: JsonValue = {"retryAfterSeconds": retry_after_s} if is_old else [_info(retry_after_s)]
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": BUSY_CODE, "message": sentence, "data": data}}


def rest_body(sentence: str, retry_after_s: int) -> JsonObject:
    """Return the HTTP+JSON response."""
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
"""The burst size: an idle principal may send the requests of this many seconds at once."""

RETRY_STREAM_S: Final = 5
"""When to retry a rejected stream; nothing is known about when another one ends."""


@dataclass(slots=True)
class _Bucket:
    left: float
    since: float


class RateLimiter:
    """A token bucket per principal: `per_minute` requests per minute, with bursts of `BURST_S` seconds."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / 60
        self._most = max(1.0, self._per_second * BURST_S)
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, principal: str) -> int:
        """Count a request; return 0 if it is allowed, else the seconds to wait."""
        now = self._clock()
        bucket = self._buckets.setdefault(principal, _Bucket(self._most, now))
        bucket.left = min(self._most, bucket.left + (now - bucket.since) * self._per_second)
        bucket.since = now
        if bucket.left < 1:
            return max(1, math.ceil((1 - bucket.left) / self._per_second))
        bucket.left -= 1
        return 0


class LimitExceeded(Exception):
    """The limit is reached; the text is a sentence for the client."""


@dataclass(slots=True)
class ConcurrencyLimiter:
    """Limits how many slots one principal, and all together, can hold at the same time."""

    per_principal: int
    total: int
    _held: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of held slots."""
        return sum(self._held.values())

    @contextmanager
    def hold(self, principal: str, what: str) -> Iterator[None]:
        """Hold a slot during the block; `what` is its plural noun for the error.

        Raises:
            LimitExceeded: all slots are held.
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
class _Replacement:
    """The response to send instead of the current one."""

    response: Response | None = None


_replacement: ContextVar[_Replacement | None] = ContextVar("replacement", default=None)


def replace_response(content: object, status: int, headers: Mapping[str, str]) -> None:
    """Replace the response of the current request by this JSON, whatever is sent afterwards.

    For responses whose status a library determines. Has no effect outside of a request and after the body has started.
    """
    replacement = _replacement.get()
    if replacement is not None:
        replacement.response = JSONResponse(content, status, headers)


class DeferredResponse:
    """Lets `replace_response` replace a response until its body starts; the head is held back until then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, and send its response or the replacement."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        replacement = _Replacement()
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
            if first is not None and replacement.response is not None:
                replaced = True
                await replacement.response(scope, receive, send)
                return
            if first is not None:
                await send(first)
            await send(message)

        token = _replacement.set(replacement)
        try:
            await self._app(scope, receive, passed_on)
        finally:
            _replacement.reset(token)
