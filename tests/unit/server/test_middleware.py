"""Who is let in, and how much of a body."""

import re
from collections.abc import AsyncIterator, Mapping

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from codex_workspace.config.settings import OPERATOR
from codex_workspace.server.errors import unauthorized
from codex_workspace.server.limits import MAX_HEADERS, MAX_QUERY_BYTES, REPLACEMENT, RateLimiter, limit_heads
from codex_workspace.server.middleware import (
    BODY_BYTES_PER_S,
    BODY_S,
    Authenticator,
    PageCheck,
    RequestChecks,
    TokenBackend,
)
from tests.support.memory_codex import in_virtual_time

TOKEN = "t0ken-ü"
PUBLIC = frozenset({"/healthz", "/card"})
MAX_BYTES = 100
PAGES = PageCheck(re.compile("agent"), frozenset())


async def echo(request: Request) -> Response:
    body = await request.body()
    user = request.user.display_name if request.user.is_authenticated else None
    return JSONResponse({"user": user, "bytes": len(body)})


def backend(authenticator: Authenticator) -> TokenBackend:
    return TokenBackend(authenticator, PUBLIC, frozenset({"/healthz"}), {}, PAGES)


def client(token: str | None = TOKEN, *, max_bytes: int = MAX_BYTES, **others: str) -> httpx.AsyncClient:
    tokens = {} if token is None else {OPERATOR: token, **others}
    app = Starlette(
        routes=[Route(path, echo, methods=["GET", "POST"]) for path in ("/", "/healthz", "/card", "/card/more")],
        middleware=[
            Middleware(limit_heads),
            Middleware(AuthenticationMiddleware, backend=backend(Authenticator(tokens)), on_error=unauthorized),
            Middleware(RequestChecks, rates=RateLimiter(60_000), max_bytes=max_bytes, extensions=frozenset()),
        ],
    )
    headers = {"Content-Type": "application/json"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent", headers=headers)


def bearer(token: str, scheme: str = "Bearer") -> dict[bytes, bytes]:
    return {b"Authorization": f"{scheme} {token}".encode("latin-1")}


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_right_token_opens(scheme: str) -> None:
    async with client("t0ken") as http:
        answer = await http.get("/", headers=bearer("t0ken", scheme))
        assert answer.json() == {"user": OPERATOR, "bytes": 0}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer("t0ken-longer"),
        bearer("t0ke"),
        bearer("t0ken", "Basic"),
        {b"Authorization": b"t0ken"},
        {b"Authorization": b"Bearer"},
        {b"X-API-Key": b"t0ken-longer"},
        {b"X-API-Key": b""},
        {b"X-API-Key": b"t0ken", b"Authorization": b"Bearer wrong"},
        {b"Authorization": b"Bearer \xff\xfe"},
    ],
)
async def test_anything_else_is_rejected_with_the_remedy(headers: Mapping[bytes, bytes]) -> None:
    async with client("t0ken") as http:
        answer = await http.post("/", headers=headers, content=b"x")
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["code"], error["status"]) == (401, "UNAUTHENTICATED")
        assert "token" in error["message"]
        assert "t0ken" not in answer.text


async def test_a_token_may_be_sent_as_an_api_key() -> None:
    async with client("t0ken") as http:
        assert (await http.get("/", headers={"X-API-Key": "t0ken"})).json()["user"] == OPERATOR


async def test_each_caller_is_identified_by_their_token() -> None:
    async with client("t0ken", ada="a-token", bob="b-token") as http:
        for name, token in ((OPERATOR, "t0ken"), ("ada", "a-token"), ("bob", "b-token")):
            assert (await http.get("/", headers=bearer(token))).json()["user"] == name
            assert (await http.get("/", headers={"X-API-Key": token})).json()["user"] == name
        assert (await http.get("/", headers=bearer("c-token"))).status_code == 401


@pytest.mark.parametrize("path", sorted(PUBLIC))
async def test_public_paths_need_no_token_and_take_any(path: str) -> None:
    async with client() as http:
        for headers in ({}, bearer("wrong")):
            answer = await http.get(path, headers=headers)
            assert answer.json() == {"user": None, "bytes": 0}


@pytest.mark.parametrize("path", ["/card/more", "/?x=/healthz", "/#/healthz", "/unknown", "/healthz/", "/Healthz"])
async def test_only_the_exact_path_is_public(path: str) -> None:
    async with client() as http:
        assert (await http.get(path)).status_code == 401


@pytest.mark.parametrize("host", [b"agent/healthz?", b"agent/card#", b"agent/healthz", b"x@agent/card?x=", b"[::1"])
async def test_a_crafted_host_is_no_path(host: bytes) -> None:
    async with client() as http:
        assert (await http.get("/", headers={b"Host": host})).status_code == 401


async def test_without_a_token_everybody_is_the_one_principal() -> None:
    async with client(None) as http:
        for headers in ({}, bearer("whatever")):
            assert (await http.get("/", headers=headers)).json()["user"] == OPERATOR


async def chunks(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield b"x" * size


async def test_a_body_up_to_the_limit_passes() -> None:
    async with client(None) as http:
        assert (await http.post("/", content=b"x" * MAX_BYTES)).json()["bytes"] == MAX_BYTES
        assert (await http.post("/", content=chunks(60, 40))).json()["bytes"] == MAX_BYTES


async def test_a_body_over_the_limit_is_refused_by_its_header() -> None:
    async with client(None) as http:
        answer = await http.post("/", content=b"x" * (MAX_BYTES + 1))
        said = {"code": 413, "status": "INVALID_ARGUMENT", "message": "the body exceeds the limit of 100 bytes"}
        assert (answer.status_code, answer.json()) == (413, {"error": said})


@pytest.mark.parametrize("content_type", ["", "text/plain"])
async def test_a_body_over_the_limit_is_refused_whatever_its_type(content_type: str) -> None:
    async with client(None) as http:
        for body in (b"x" * (MAX_BYTES + 1), chunks(60, 60)):
            answer = await http.post("/", content=body, headers={"Content-Type": content_type})
            assert (answer.status_code, "100 bytes" in answer.text) == (413, True)
        allowed = await http.post("/", content=b"x" * MAX_BYTES, headers={"Content-Type": content_type})
        assert allowed.status_code == 415


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"abc", b"", b"99999999999999999999"])
async def test_an_invalid_content_length_is_rejected(length: bytes) -> None:
    async with client(None) as http:
        answer = await http.post("/", content=chunks(1), headers={b"Content-Length": length})
        assert answer.status_code == 413


async def test_a_body_over_the_limit_is_rejected_as_it_arrives() -> None:
    async with client(None) as http:
        answer = await http.post("/", content=chunks(60, 60))
        assert answer.status_code == 413
        assert "exceeds the limit of 100 bytes" in answer.text
        lying = await http.post("/", content=chunks(60, 60), headers={b"Content-Length": b"10"})
        assert lying.status_code == 413


async def test_too_many_headers_or_too_long_a_query_are_rejected_before_authentication() -> None:
    async with client("t0ken") as http:
        # The client adds its own headers.
        many = {f"X-{number}": "1" for number in range(MAX_HEADERS)}
        answer = await http.get("/", headers=many)
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, 431)
        answer = await http.get("/", params={"a": "b" * MAX_QUERY_BYTES})
        assert (answer.status_code, answer.json()["error"]["code"]) == (414, 414)
        few = dict(list(many.items())[: MAX_HEADERS // 2])
        assert (await http.get("/", headers=few, params={"a": "b" * 1000})).status_code == 401


async def slow_chunks(*pauses_s: float, size: int) -> AsyncIterator[bytes]:
    for pause_s in pauses_s:
        await anyio.sleep(pause_s)
        yield b"x" * size


@in_virtual_time
async def test_a_body_may_be_as_slow_as_the_lowest_rate() -> None:
    async with client(None, max_bytes=1 << 20) as http:
        size = BODY_BYTES_PER_S * 10
        answer = await http.post("/", content=slow_chunks(BODY_S - 1, *[10] * 9, size=size))
        assert answer.json()["bytes"] == 10 * size


@in_virtual_time
async def test_a_body_that_arrives_too_slowly_is_rejected() -> None:
    async with client(None, max_bytes=1 << 20) as http:
        for pauses_s in ((BODY_S + 1,), (1, BODY_S), [0.5] * 100):
            start = anyio.current_time()
            answer = await http.post("/", content=slow_chunks(*pauses_s, size=1))
            assert (answer.status_code, answer.headers["connection"]) == (408, "close")
            assert answer.json()["error"]["message"] == "the body arrived too slowly"
            assert BODY_S <= anyio.current_time() - start < BODY_S + 1


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'"\xff"', "the body is not UTF-8"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"id": ' + b"1" * 4301 + b"}", "the body contains an integer of too many digits"),
    ],
)
async def test_an_unreadable_body_is_rejected(body: bytes, sentence: str) -> None:
    async with client(None, max_bytes=1_000_000) as http:
        rpc, rest = await http.post("/", content=body), await http.post("/card/more", content=body)
    assert (rpc.json()["error"]["code"], rpc.json()["error"]["message"]) == (-32700, sentence)
    error = {"code": 400, "status": "INVALID_ARGUMENT", "message": sentence}
    assert (rest.status_code, rest.json()) == (400, {"error": error})


# --- Replaced responses ---


async def stubborn(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 200 in two pieces; the path tells before which message the response is replaced."""
    busy = JSONResponse({"error": "busy"}, 429, {"Retry-After": "7"})
    if scope["path"] == "/busy":
        scope[REPLACEMENT].response = busy
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/busy-after-the-head":
        scope[REPLACEMENT].response = busy
    await send({"type": "http.response.body", "body": b"all ", "more_body": True})
    if scope["path"] == "/too-late":
        scope[REPLACEMENT].response = busy
    await send({"type": "http.response.body", "body": b"is well"})


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/", 200, "all is well"),
        ("/busy", 429, '{"error":"busy"}'),
        ("/busy-after-the-head", 429, '{"error":"busy"}'),
        ("/too-late", 200, "all is well"),
    ],
)
async def test_a_response_can_be_replaced_until_its_body_starts(path: str, status: int, text: str) -> None:
    checks = RequestChecks(stubborn, RateLimiter(60_000), MAX_BYTES, frozenset())
    app = AuthenticationMiddleware(checks, backend(Authenticator({})))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://agent") as http:
        answer = await http.get(path)
        assert (answer.status_code, answer.text) == (status, text)
        assert answer.headers.get("retry-after") == ("7" if status == 429 else None)
