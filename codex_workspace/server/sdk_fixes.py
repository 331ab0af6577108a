"""Workarounds for faults of a2a-sdk 1.3 in A2A 0.3 over JSON-RPC."""

from a2a.compat.v0_3.jsonrpc_adapter import JSONRPC03Adapter
from a2a.compat.v0_3.types import A2ARequest
from a2a.server.context import ServerCallContext
from a2a.server.jsonrpc_models import InvalidRequestError, JSONRPCError
from a2a.utils.errors import InvalidParamsError
from starlette.responses import JSONResponse


class CorrectedAdapter(JSONRPC03Adapter):
    """Reports invalid parameters as -32602 instead of -32600 (compare a2a-python issue #413, which covers the 0.3 SDK),
    and does not leave out a null `result` (not reported upstream)."""

    def _generate_error_response(self, request_id: str | int | None, error: Exception | JSONRPCError) -> JSONResponse:
        is_invalid = isinstance(error, InvalidRequestError)
        return super()._generate_error_response(request_id, InvalidParamsError() if is_invalid else error)

    async def _process_non_streaming_request(
        self, request_id: str | int | None, request_obj: A2ARequest, context: ServerCallContext
    ) -> JSONResponse:
        response = await super()._process_non_streaming_request(request_id, request_obj, context)
        if b'"result":' not in response.body:
            return JSONResponse({"jsonrpc": "2.0", "id": request_id, "result": None})
        return response
