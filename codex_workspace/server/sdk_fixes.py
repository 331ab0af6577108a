"""Workarounds for faults of a2a-sdk 1.3, most of them in A2A 0.3 over JSON-RPC and HTTP+JSON."""

import re
import sys
from collections.abc import AsyncIterator, Callable
from typing import Final

from a2a.compat.v0_3 import a2a_v0_3_pb2
from a2a.compat.v0_3.jsonrpc_adapter import JSONRPC03Adapter
from a2a.compat.v0_3.rest_adapter import REST03Adapter
from a2a.compat.v0_3.types import A2ARequest
from a2a.server.context import ServerCallContext
from a2a.server.jsonrpc_models import InternalError as JSONRPCInternalError
from a2a.server.jsonrpc_models import InvalidRequestError, JSONRPCError
from a2a.server.routes.common import create_event_source_response
from a2a.server.routes.rest_dispatcher import RestDispatcher
from a2a.types import ListTasksRequest, ListTasksResponse
from a2a.utils import json_utils
from a2a.utils.constants import A2A_JSON_MEDIA_TYPE
from a2a.utils.error_handlers import rest_error_handler, rest_stream_error_handler
from a2a.utils.errors import InternalError, InvalidParamsError
from a2a.utils.proto_utils import parse_params
from google.protobuf.json_format import MessageToDict
from pydantic import ValidationError
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from codex_workspace.common.values import JsonObject, JsonValue, quoted
from codex_workspace.server.errors import INTERNAL_ERROR, invalid, invalid_fields, phrase

MAX_PROBLEMS: Final = 5
"""How many problems of a 0.3 call are reported: a part has one for each field of each kind of part."""

MAX_0_3_NESTING: Final = 45
"""The nesting limit of 0.3 parameters: the SDK's translation to 1.0 fails above it. Content has a lower limit."""


class CorrectedAdapter(JSONRPC03Adapter):
    """Reports invalid parameters as -32602 instead of -32600 (compare a2a-python issue #413, which covers the 0.3 SDK)
    with the names of the fields, and does not leave out a null `result` (not reported upstream)."""

    def _generate_error_response(self, request_id: str | int | None, error: Exception | JSONRPCError) -> JSONResponse:
        if isinstance(error, InvalidRequestError):
            # The SDK only passes on the text of the error that it handles.
            error = _invalid_request(sys.exception())
        elif isinstance(error, JSONRPCInternalError):
            error = InternalError(message=INTERNAL_ERROR)
        return super()._generate_error_response(request_id, error)

    async def _process_non_streaming_request(
        self, request_id: str | int | None, request_obj: A2ARequest, context: ServerCallContext
    ) -> JSONResponse:
        response = await super()._process_non_streaming_request(request_id, request_obj, context)
        if b'"result":' not in response.body:
            return JSONResponse({"jsonrpc": "2.0", "id": request_id, "result": None})
        return response


def _invalid_request(error: BaseException | None) -> InvalidParamsError:
    """Return the error that names the first fields that pydantic rejected."""
    if not isinstance(error, ValidationError):
        return InvalidParamsError()
    problems: dict[str, str] = {}
    for each in error.errors(include_url=False, include_context=False, include_input=False)[:MAX_PROBLEMS]:
        problems.setdefault(_place(each["loc"]), phrase(each["msg"]))
    return invalid_fields(problems)


def _place(location: tuple[int | str, ...]) -> str:
    """Return a field's place, such as message.parts[0].text; pydantic also lists `params` and the tried classes."""
    names = [name for name in location if name != "params" and not str(name)[:1].isupper()]
    places = (f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    return "".join(places).removeprefix(".") or "params"


class ListingDispatcher(RestDispatcher):
    """Leaves out empty fields in lists of tasks."""

    @rest_error_handler
    async def list_tasks(self, request: Request) -> Response:
        """Return a page of tasks."""
        context, params = self._build_call_context(request), ListTasksRequest()
        parse_params(request.query_params, params)
        page = await self.request_handler.on_list_tasks(params, context)
        return JSONResponse(page_json(page, params), media_type=A2A_JSON_MEDIA_TYPE)


def page_json(page: ListTasksResponse, params: ListTasksRequest) -> JsonObject:
    """Return a page with all its own fields, and of the tasks' fields those that are not empty."""
    always: JsonObject = {"artifacts": []} if params.include_artifacts else {}
    return {
        "tasks": [always | MessageToDict(task) for task in page.tasks],
        "nextPageToken": page.next_page_token,
        "pageSize": page.page_size,
        "totalSize": page.total_size,
    }


async def without_content(response: Response) -> Response:
    """Return the response to a notification, after the end of its stream."""
    if isinstance(response, EventSourceResponse):
        async for _ in response.body_iterator:
            pass
    return Response(status_code=204)


class EagerAdapter(REST03Adapter):
    """Waits for a stream's first event before it responds, as in 1.0: the SDK sends 500 for every error before it (not
    reported upstream)."""

    @rest_stream_error_handler
    async def _handle_streaming_request(
        self, method: Callable[[Request, ServerCallContext], AsyncIterator[JsonObject]], request: Request
    ) -> EventSourceResponse:
        events = method(request, self._context_builder.build(request))
        first = await anext(events, None)

        async def texts() -> AsyncIterator[str]:
            if first is not None:
                yield json_utils.dumps(first)
            async for event in events:
                yield json_utils.dumps(event)

        return create_event_source_response(texts())


def check_0_3_call(params: JsonValue) -> None:
    """Check the parameters of a JSON-RPC call for what the SDK misreads or fails on.

    Raises:
        InvalidParamsError: names the parameter.
    """
    check_translatable(params)
    if not isinstance(params, dict):
        raise invalid("params", "is not an object")
    for place in (params, params.get("configuration")):
        if isinstance(place, dict):
            check_history_length(place.get("historyLength"))
    match params:
        case {"message": {"parts": list(parts)}}:
            for part in parts:
                match part:
                    case {"file": {"bytes": str(content)}}:
                        check_base64(content, "bytes of a file")
                    case _:
                        pass
        case _:
            pass


def check_0_3_parts(request: a2a_v0_3_pb2.SendMessageRequest) -> None:
    """Check a message's protobuf for empty parts, which the SDK fails on."""
    for index, part in enumerate(request.request.content):
        if part.WhichOneof("part") is None:
            raise invalid(f"message.parts[{index}]", "has none of text, file, data")


def check_history_length(length: JsonValue) -> None:
    """Check a history length of 0.3, which can be a text as well; the SDK fails on numbers that are no int32."""
    if length not in (None, "") and (not is_int32(length) or str(length).startswith("-")):
        raise invalid("historyLength", f"{quoted(str(length))} is not a whole number from 0 to 2147483647")


def is_int32(value: JsonValue) -> bool:
    """Whether a value, or its text, is a whole number of 32 bits."""
    digits = str(value).removesuffix(".0") if isinstance(value, int | float | str) else ""
    return re.fullmatch(r"-?[0-9]{1,10}", digits) is not None and abs(int(digits)) < 1 << 31


def check_base64(text: str, at: str) -> None:
    """Check the text at this place, of which the SDK would drop all other characters."""
    # Both alphabets, with or without padding, as ProtoJSON accepts them; many tools add line breaks.
    plain = text.replace("\r", "").replace("\n", "") if "\n" in text else text
    if re.fullmatch(r"[A-Za-z0-9+/_-]*={0,2}", plain) is None or len(plain.rstrip("=")) % 4 == 1:
        raise invalid(at, "is not base64")


def check_translatable(value: JsonValue, depth: int = 0) -> None:
    """Check for what the SDK's translation of 0.3 fails on: numbers that are no double, and deep nesting."""
    match value:
        case int() | float() if not abs(value) <= sys.float_info.max:
            shown = quoted(str(value))
            raise InvalidParamsError(message=f"the parameters contain a number that JSON does not have: {shown}")
        case dict() | list() if depth == MAX_0_3_NESTING:
            raise InvalidParamsError(message="the parameters are nested too deeply")
        case dict():
            for each in value.values():
                check_translatable(each, depth + 1)
        case list():
            for each in value:
                check_translatable(each, depth + 1)
        case _:
            pass
