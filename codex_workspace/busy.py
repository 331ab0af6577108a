"""The refusal "not now, come back later" in the words of each transport, as A2A has no error for it.

The SDK answers errors of JSON-RPC with HTTP 200, and those it does not know as unknown ones; here they go out with a
status that every client knows: HTTP 429 with `Retry-After`, or RESOURCE_EXHAUSTED with `RetryInfo`.
"""

from typing import Final

from a2a.server.context import ServerCallContext
from a2a.utils.errors import A2AError

from codex_workspace.guards import answer_instead
from codex_workspace.wire import JsonObject, JsonValue

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
        answer_instead(body, 429, {"Retry-After": str(retry_after_s)})
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
