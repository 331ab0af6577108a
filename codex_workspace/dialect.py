"""A2A 0.3's own words where the SDK's translation from 1.0 leaves them out. JSON-RPC only.

Wrong parameters are -32602 there (the SDK says that the whole request is invalid, -32600), and whatever succeeds has a
`result`, be it null.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from codex_workspace.wire import JsonObject

Endpoint = Callable[[Request], Awaitable[Response]]

INVALID_REQUEST: Final = -32600
INVALID_PARAMS: Final = -32602


def mended(endpoint: Endpoint) -> Endpoint:
    """Return the JSON-RPC endpoint with its answers to 0.3 requests mended."""

    async def answer(request: Request) -> Response:
        response = await endpoint(request)
        if not isinstance(response, JSONResponse) or b'"result":' in response.body:
            return response
        if not await _is_sound_and_old(request):
            return response
        body = _mended(json.loads(bytes(response.body)))
        return response if body is None else JSONResponse(body, response.status_code)

    return answer


async def _is_sound_and_old(request: Request) -> bool:
    """Tell whether it is a 0.3 request with nothing wrong outside of its parameters."""
    try:
        asked = await request.json()
    except (ValueError, HTTPException):
        return False
    match asked:
        case {"jsonrpc": "2.0", "method": str(method)} if "/" in method:
            return isinstance(asked.get("id"), str | int | None) and not isinstance(asked.get("id"), bool)
        case _:
            return False


def _mended(body: JsonObject) -> JsonObject | None:
    match body:
        case {"error": dict(error)}:
            if error.get("code") != INVALID_REQUEST:
                return None
            return {**body, "error": {**error, "code": INVALID_PARAMS, "message": "Invalid parameters"}}
        case _:
            return {**body, "result": None}
