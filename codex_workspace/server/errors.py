"""Errors as the responses of JSON-RPC and HTTP+JSON, and as A2A's errors for wrong fields."""

import re
from collections.abc import Mapping
from typing import Final

from a2a.utils.errors import A2AError, InvalidParamsError
from a2a.utils.proto_utils import ValidationDetail
from starlette.authentication import AuthenticationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from codex_workspace.common.values import JsonObject, JsonValue, quoted

INTERNAL_ERROR: Final = "Internal error; see the agent's log."
TENANT: Final = "tenant"
"""The name of the field in all requests of 1.0."""

NOTHING_HERE: Final = "there is nothing at this path; the agent has no tenants"

DENIED: Final = "PERMISSION_DENIED"
STATUS_NAMES: Final = {401: "UNAUTHENTICATED", 403: DENIED, 404: "NOT_FOUND", 405: "UNIMPLEMENTED", 421: DENIED}
INVALID: Final = "INVALID_ARGUMENT"
"""The canonical status names in HTTP+JSON errors, and that of all other statuses."""


def rpc_error(code: int, sentence: str, data: JsonValue = None, request_id: JsonValue = None) -> JsonObject:
    """Return a JSON-RPC response."""
    error: JsonObject = {"code": code, "message": sentence}
    return {"jsonrpc": "2.0", "id": request_id, "error": error if data is None else {**error, "data": data}}


def rest_error(code: int, status: str, sentence: str, *details: JsonObject) -> JsonObject:
    """Return an HTTP+JSON response."""
    error: JsonObject = {"code": code, "status": status, "message": sentence}
    return {"error": {**error, "details": list(details)} if details else error}


def error_info(reason: str, domain: str, **metadata: JsonValue) -> JsonObject:
    """Return the details of an error."""
    about = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason, "domain": domain}
    return {**about, "metadata": metadata} if metadata else {**about}


def error_response(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response in HTTP+JSON's error format.

    JSON-RPC gets it as well: its clients look for the message in an object, too.
    """
    return JSONResponse(rest_error(status, STATUS_NAMES.get(status, INVALID), sentence), status, headers)


class ForeignCaller(AuthenticationError):
    """A web page may have sent the request: it needs no token, but comes from another origin or to another host."""

    def __init__(self, status: int, problem: str, remedy: str) -> None:
        super().__init__(f"this agent has no token and {problem}; {remedy}, or set A2A_TOKEN")
        self.status: Final = status


def unauthorized(_connection: HTTPConnection, error: Exception) -> Response:
    """Return the response for a request that is not authenticated."""
    if isinstance(error, ForeignCaller):
        return error_response(error.status, str(error))
    return error_response(401, str(error), {"WWW-Authenticate": "Bearer"})


async def refuse_request(request: Request, error: Exception) -> Response:
    """Return the response for a request without a route: the methods of its path for OPTIONS, else an error."""
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        sentence = NOTHING_HERE if error.status_code == 404 else error.detail
        return error_response(error.status_code, sentence, error.headers)
    matching = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
    methods = {method for route in matching if isinstance(route, Route) for method in route.methods or ()}
    allow = {"Allow": ", ".join(sorted({*methods, "OPTIONS"}))}
    if request.method == "OPTIONS":
        return Response(status_code=204, headers=allow)
    return error_response(405, f"the methods of this path are {allow['Allow']}", allow)


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


def no_tenants(field: str, given: str) -> InvalidParamsError:
    """Return the error for a tenant: the card declares none."""
    return invalid(field, f"{quoted(given)} is unknown; this agent has no tenants")


def named_fields(error: A2AError) -> InvalidParamsError | None:
    """Return an error that names the fields of the SDK's error "Validation failed"; None for any other error."""
    match error:
        case InvalidParamsError(data={"errors": list(details)}) if type(error.data) is dict:
            return invalid_fields({_json_name(each["field"]): phrase(each["message"]) for each in details})
        case _:
            return None


def _json_name(field: str) -> str:
    return re.sub("_([a-z])", lambda letter: letter[1].upper(), field)


def phrase(sentence: str) -> str:
    """Return a library's sentence as part of one."""
    return sentence[:1].lower() + sentence[1:].removesuffix(".")
