"""Workarounds for faults of a2a-sdk 1.3, most of them in A2A 0.3 over JSON-RPC and HTTP+JSON."""

import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from a2a.compat.v0_3.jsonrpc_adapter import JSONRPC03Adapter
from a2a.compat.v0_3.rest_adapter import REST03Adapter
from a2a.compat.v0_3.types import A2ARequest
from a2a.server.context import ServerCallContext
from a2a.server.jsonrpc_models import InvalidRequestError, JSONRPCError
from a2a.server.routes.common import create_event_source_response
from a2a.utils import json_utils
from a2a.utils.error_handlers import rest_stream_error_handler
from a2a.utils.errors import A2AError, InvalidParamsError
from a2a.utils.proto_utils import ValidationDetail
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse

from codex_workspace.common.values import JsonObject, JsonValue, quoted

MAX_0_3_NESTING: Final = 45
"""The nesting limit of 0.3 parameters: the SDK's translation to 1.0 fails above it. Content has a lower limit."""


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


class FieldErrors(dict[str, str]):
    """Problems by field: the metadata of an error, which must be texts. For the SDK there is the list `errors` as well,
    of which it makes the details of the type BadRequest; with a list of its own, the metadata would contain it."""

    def get(self, name: str, _default: object = None) -> object:  # type: ignore[override]
        """Return the problems as the SDK's list."""
        return self[name]

    def __getitem__(self, _name: str) -> list[ValidationDetail]:  # type: ignore[override]
        return [ValidationDetail(field=field, message=problem) for field, problem in self.items()]


def invalid_fields(problems: Mapping[str, str]) -> InvalidParamsError:
    """Return the error for fields with these problems."""
    sentence = "; ".join(f"{field}: {problem}" for field, problem in problems.items())
    return InvalidParamsError(message=sentence, data=FieldErrors(problems))


def invalid(field: str, problem: str) -> InvalidParamsError:
    """Return the error for a field."""
    return invalid_fields({field: problem})


def named_fields(error: A2AError) -> InvalidParamsError | None:
    """Return an error that names the fields of the SDK's error "Validation failed"; None for any other error."""
    match error:
        case InvalidParamsError(data={"errors": list(details)}) if type(error.data) is dict:
            return invalid_fields({_json_name(each["field"]): _phrase(each["message"]) for each in details})
        case _:
            return None


def _json_name(field: str) -> str:
    return re.sub("_([a-z])", lambda letter: letter[1].upper(), field)


def _phrase(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:].removesuffix(".")


def check_0_3_call(params: JsonValue) -> None:
    """Check the parameters of a JSON-RPC call for what the SDK misreads or fails on.

    Raises:
        InvalidParamsError: names the parameter.
    """
    check_translatable(params)
    if not isinstance(params, dict):
        return
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
