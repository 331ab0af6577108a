"""Workarounds for faults of a2a-sdk 1.3.

- A2A 0.3 over JSON-RPC: invalid parameters are reported as -32600 instead of -32602 (compare a2a-python issue #413,
which
  covers the 0.3 SDK), and a null `result` is left out (not reported upstream).
- Parameters that the SDK accepts, or answers with an internal error: unknown enum names are dropped (a filter then
matches
  everything), any text is accepted as base64, any query value other than "true" is false, and bodies that are not UTF-8
  or are nested too deeply raise (not reported upstream).

`callers.py` checks the protocol version of gRPC calls (issue #1166) and the required extensions.
"""

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from a2a.compat.v0_3 import a2a_v0_3_pb2
from a2a.server.jsonrpc_models import JSONParseError
from a2a.server.request_handlers.response_helpers import build_error_response
from a2a.server.routes.jsonrpc_dispatcher import JsonRpcDispatcher
from a2a.types import ListTasksRequest, SendMessageRequest
from a2a.utils.error_handlers import build_rest_error_payload
from a2a.utils.errors import InvalidParamsError
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseError
from google.protobuf.message import Message
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from codex_workspace.common.values import JsonObject, JsonValue

Endpoint = Callable[[Request], Awaitable[Response]]

INVALID_REQUEST: Final = -32600
INVALID_PARAMS: Final = -32602


def add_0_3_error_fields(endpoint: Endpoint) -> Endpoint:
    """Return the JSON-RPC endpoint with corrected responses to 0.3 requests."""

    async def answer(request: Request) -> Response:
        response = await endpoint(request)
        if not isinstance(response, JSONResponse) or b'"result":' in response.body:
            return response
        if not await _is_well_formed_0_3(request):
            return response
        body = _corrected(json.loads(bytes(response.body)))
        return response if body is None else JSONResponse(body, response.status_code)

    return answer


async def _is_well_formed_0_3(request: Request) -> bool:
    """Whether it is a 0.3 request that is valid except for its parameters."""
    try:
        asked = await request.json()
    except (ValueError, HTTPException):
        return False
    match asked:
        case {"jsonrpc": "2.0", "method": str(method)} if "/" in method:
            return isinstance(asked.get("id"), str | int | None) and not isinstance(asked.get("id"), bool)
        case _:
            return False


def _corrected(body: JsonObject) -> JsonObject | None:
    match body:
        case {"error": dict(error)}:
            if error.get("code") != INVALID_REQUEST:
                return None
            return {**body, "error": {**error, "code": INVALID_PARAMS, "message": "Invalid parameters"}}
        case _:
            return {**body, "result": None}


if TYPE_CHECKING:
    from typing import TypeAlias

    from google._upb._message import Descriptor as UpbDescriptor
    from google._upb._message import EnumDescriptor as UpbEnumDescriptor
    from google._upb._message import FieldDescriptor as UpbFieldDescriptor
    from google.protobuf.descriptor import Descriptor, EnumDescriptor

    AnyDescriptor: TypeAlias = Descriptor | UpbDescriptor
    AnyEnum: TypeAlias = EnumDescriptor | UpbEnumDescriptor
    AnyField: TypeAlias = FieldDescriptor | UpbFieldDescriptor


MAX_0_3_NESTING: Final = 45
"""The nesting limit of 0.3 parameters: the SDK's translation to 1.0 fails above it. Content has a lower limit."""

MAX_SHOWN_CHARS: Final = 50

_BODIES: Final[Mapping[str, "AnyDescriptor"]] = {
    "/message:send": SendMessageRequest.DESCRIPTOR,
    "/message:stream": SendMessageRequest.DESCRIPTOR,
    "/v1/message:send": a2a_v0_3_pb2.SendMessageRequest.DESCRIPTOR,
    "/v1/message:stream": a2a_v0_3_pb2.SendMessageRequest.DESCRIPTOR,
}
"""The message types of HTTP+JSON bodies, by the paths of the SDK's routes."""

_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]*={0,2}")
"""Both base64 alphabets, with or without padding, as ProtoJSON accepts them."""


class InvalidParameter(ValueError):
    """A parameter is invalid; the text is for the client."""


def validate_rpc(endpoint: Endpoint) -> Endpoint:
    """Return the JSON-RPC endpoint with a check of the parameters."""

    async def answer(request: Request) -> Response:
        try:
            asked = await request.json()
        except json.JSONDecodeError:
            return await endpoint(request)
        except (UnicodeDecodeError, RecursionError) as error:
            return JSONResponse(build_error_response(None, JSONParseError(message=_unreadable(error))))
        if isinstance(asked, dict):
            try:
                _check_call(asked)
            except InvalidParameter as wrong:
                return JSONResponse(_rpc_error(asked, str(wrong)))
        return await endpoint(request)

    return answer


def validate_rest(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """Return the HTTP+JSON routes with a check of the parameters."""
    return [_checked_route(route) for route in routes]


def wrong_in(descriptor: "AnyDescriptor", value: JsonValue, at: str = "") -> str | None:
    """Return what is wrong in a protobuf message's JSON that the parser would accept; None if nothing is."""
    if not isinstance(value, dict):
        return None
    fields = _fields(descriptor)
    for name, given in value.items():
        field = fields.get(name)
        for each in given if isinstance(given, list) else [given]:
            wrong = None if field is None else _wrong_value(field, each, f"{at}{name}")
            if wrong is not None:
                return wrong
    return None


def _checked_route(route: BaseRoute) -> BaseRoute:
    match route:
        case Mount(path=path, routes=inner):
            return Mount(path, routes=[_checked_route(each) for each in inner or ()])
        case Route(path=path, endpoint=endpoint, methods=methods):
            return Route(path, _checked_endpoint(path, endpoint), methods=sorted(methods or ()))
        case _:
            return route


def _checked_endpoint(path: str, endpoint: Endpoint) -> Endpoint:
    async def answer(request: Request) -> Response:
        try:
            if path == "/tasks":
                _check_query(request)
            if request.method == "POST" and await request.body():
                _check_body(path, await request.json())
        except json.JSONDecodeError:
            # The SDK's error names the position.
            return await endpoint(request)
        except (UnicodeDecodeError, RecursionError) as error:
            return _rest_error(ParseError(_unreadable(error)))
        except InvalidParameter as wrong:
            return _rest_error(InvalidParamsError(message=str(wrong)))
        return await endpoint(request)

    return answer


def _check_call(asked: JsonObject) -> None:
    """Check the parameters of a JSON-RPC call.

    Raises:
        InvalidParameter: one of them is invalid.
    """
    method, params = asked.get("method"), asked.get("params")
    if not isinstance(method, str):
        return
    if "/" in method:
        _check_values(params)
        for number, content in enumerate(_0_3_files(params)):
            if not _is_base64(content):
                raise InvalidParameter(f"file {number + 1} of the message: bytes is not base64")
        return
    model = JsonRpcDispatcher.METHOD_TO_MODEL.get(method)
    if model is not None and issubclass(model, Message):
        _check_message(model.DESCRIPTOR, params)


def _check_body(path: str, body: JsonValue) -> None:
    if path.startswith("/v1/"):
        _check_values(body)
    _check_message(_BODIES.get(path), body)


def _check_message(descriptor: "AnyDescriptor | None", value: JsonValue) -> None:
    wrong = None if descriptor is None else wrong_in(descriptor, value)
    if wrong is not None:
        raise InvalidParameter(wrong)


def _check_query(request: Request) -> None:
    fields = _fields(ListTasksRequest.DESCRIPTOR)
    for name, value in request.query_params.items():
        field = fields.get(name)
        if field is None:
            continue
        if field.type == FieldDescriptor.TYPE_BOOL and value.lower() not in ("true", "false"):
            raise InvalidParameter(f"{name}: {_shown(value)} is neither true nor false")
        wrong = _wrong_value(field, value, name)
        if wrong is not None:
            raise InvalidParameter(wrong)


def _check_values(params: JsonValue) -> None:
    """Check for what the SDK's translation of 0.3 fails on: numbers that JSON does not have, and deep nesting."""
    waiting = [(params, 0)]
    while waiting:
        value, depth = waiting.pop()
        match value:
            case float() if not math.isfinite(value):
                raise InvalidParameter(f"the parameters contain a number that JSON does not have: {value}")
            case dict() | list() if depth == MAX_0_3_NESTING:
                raise InvalidParameter("the parameters are nested too deeply")
            case dict():
                waiting += [(each, depth + 1) for each in value.values()]
            case list():
                waiting += [(each, depth + 1) for each in value]
            case _:
                pass


def _0_3_files(params: JsonValue) -> Iterator[str]:
    """Yield the file contents in the parameters of 0.3's `message/send` and `message/stream`."""
    match params:
        case {"message": {"parts": list(parts)}}:
            for part in parts:
                match part:
                    case {"file": {"bytes": str(content)}}:
                        yield content
                    case _:
                        pass
        case _:
            pass


def _wrong_value(field: "AnyField", value: JsonValue, at: str) -> str | None:
    enum, message = field.enum_type, field.message_type
    if enum is not None:
        return None if _is_among(enum, value) else _not_among(enum, value, at)
    if message is not None:
        return None if message.full_name.startswith("google.") else wrong_in(message, value, f"{at}.")
    is_bytes = field.type == FieldDescriptor.TYPE_BYTES and isinstance(value, str)
    return f"{at}: is not base64" if is_bytes and not _is_base64(str(value)) else None


def _is_among(enum: "AnyEnum", value: JsonValue) -> bool:
    """Whether a value is a name or number of the enum; the SDK rejects other types."""
    match value:
        case str() if value.isascii() and value.isdigit():
            return value.lstrip("0").rjust(1, "0") in {str(number) for number in enum.values_by_number}
        case str():
            return value in enum.values_by_name
        case int():
            return value in enum.values_by_number
        case _:
            return True


def _not_among(enum: "AnyEnum", value: JsonValue, at: str) -> str:
    return f"{at}: {_shown(str(value))} is none of {', '.join(enum.values_by_name)}"


def _is_base64(text: str) -> bool:
    # Many tools add line breaks.
    plain = text.replace("\r", "").replace("\n", "") if "\n" in text else text
    return _BASE64.fullmatch(plain) is not None and len(plain.rstrip("=")) % 4 != 1


@cache
def _fields(descriptor: "AnyDescriptor") -> Mapping[str, "AnyField"]:
    """Return a message's fields by their protobuf and JSON names."""
    return {name: field for field in descriptor.fields for name in (field.name, field.json_name)}


def _unreadable(error: Exception) -> str:
    return "the body is nested too deeply" if isinstance(error, RecursionError) else "the body is not UTF-8"


def _rpc_error(asked: JsonObject, sentence: str) -> JsonObject:
    id_ = asked.get("id")
    request_id = id_ if isinstance(id_, str | int) and not isinstance(id_, bool) else None
    if "/" in str(asked.get("method")):
        return {"jsonrpc": "2.0", "id": request_id, "error": {"code": INVALID_PARAMS, "message": sentence}}
    answer: JsonObject = build_error_response(request_id, InvalidParamsError(message=sentence))
    return answer


def _rest_error(error: InvalidParamsError | ParseError) -> Response:
    return JSONResponse(build_rest_error_payload(error), 400)


def _shown(text: str) -> str:
    return repr(text[:MAX_SHOWN_CHARS])
