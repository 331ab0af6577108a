"""Which hosts and origins are answered: DNS rebinding, foreign pages, and CORS, over real sockets."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import anyio
import grpc.aio
import httpx
import pytest
from a2a.types import ListTasksRequest

from codex_workspace.common.values import JsonObject
from codex_workspace.server.app import ServerOptions
from codex_workspace.server.views import View, metrics_view, transcript_view
from tests.integration.test_transports import OPTIONS, VERSION_HEADER, RunningServer, request, running_server

APP: Final = "https://app.example.com"
SECURED: Final = replace(OPTIONS, tokens={"operator": "t0ken"})
TOKEN: Final = {"Authorization": "Bearer t0ken"}


def message(message_id: str = "m-1") -> JsonObject:
    return {"messageId": message_id, "role": "ROLE_USER", "parts": [{"text": "hello"}]}


def old_message() -> JsonObject:
    return {"kind": "message", "messageId": "m-1", "role": "user", "parts": [{"kind": "text", "text": "hello"}]}


def call(method: str, content: JsonObject) -> JsonObject:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": content}}


ROUTES: Final[tuple[tuple[str, str, JsonObject | None], ...]] = (
    ("POST", "/", call("SendMessage", message())),
    ("POST", "/", call("SendStreamingMessage", message())),
    ("POST", "/", call("message/send", old_message())),
    ("POST", "/message:send", {"message": message()}),
    ("POST", "/message:stream", {"message": message()}),
    ("POST", "/v1/message:send", {"request": {"messageId": "m-1", "role": "ROLE_USER", "content": [{"text": "x"}]}}),
    ("POST", "/tenant/message:send", {"message": message()}),
    ("GET", "/tasks", None),
    ("POST", "/tasks/x:cancel", None),
    ("GET", "/.well-known/agent-card.json", None),
    ("GET", "/metrics", None),
    ("GET", "/transcript", None),
    ("GET", "/nowhere", None),
    ("OPTIONS", "/", None),
)


def views(metrics_token: str | None = None) -> tuple[View, View]:
    async def scrape() -> bytes:
        return b"secret_number 1\n"

    async def lines(_since: int, _limit: int, _context: str | None) -> JsonObject:
        return {}

    return metrics_view(scrape, metrics_token), transcript_view(lines, None)


async def answers(server: RunningServer, headers: Mapping[str, str]) -> dict[str, httpx.Response]:
    """Request every route."""
    found = {}
    for method, path, body in ROUTES:
        content = {} if body is None else {"json": body}
        sent = {**({} if "/v1/" in path else VERSION_HEADER), **headers}
        found[f"{method} {path}"] = await server.http.request(method, path, headers=sent, **content)  # type: ignore[arg-type]
    return found


# --- Without a token ---


@pytest.mark.parametrize(
    ("headers", "status", "sentence"),
    [
        ({"Host": "evil.example"}, 421, "does not answer to the host name 'evil.example'; add it to a2a.allowed_hosts"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 421, "does not answer to the host name"),
        ({"Origin": "http://evil.example"}, 403, "does not accept requests of web pages from 'http://evil.example'"),
        ({"Origin": "null"}, 403, "add it to a2a.allowed_origins"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "does not accept links and plain requests of other sites' pages"),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}, 403, "enter the address in the browser"),
    ],
)
async def test_a_foreign_page_reaches_no_route(
    tmp_path: Path, headers: Mapping[str, str], status: int, sentence: str
) -> None:
    async with running_server(tmp_path, views=views()) as server:
        for route, answer in (await answers(server, headers)).items():
            assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), route
            error = answer.json()["error"]
            assert (error["code"], error["status"]) == (status, "PERMISSION_DENIED"), route
            assert sentence in error["message"], route
            assert "access-control-allow-origin" not in answer.headers
        assert server.executor.owners == []
        for probe in ("/healthz", "/readyz"):
            assert (await server.http.get(probe, headers=headers)).status_code == 200


HERE: Final = (
    "localhost",
    "LocalHost:8000",
    "localhost.",
    "agent.localhost:1",
    "127.0.0.1",
    "127.9.9.9:65535",
    "[::1]:80",
)
ELSEWHERE: Final = (
    *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost", "evil.example:localhost"),
    *("localhost@evil.example", "localhost:x", "localhost:123456", "localhost/", "127.0.0.1..", "[::1].evil.example"),
    *("10.0.0.1", "0.0.0.0", "[::2]", "[::]", "::1", "", "agent", "agent.example.com"),
)


async def status_for(server: RunningServer, host: str) -> int:
    return (await server.http.get("/tasks", headers={**VERSION_HEADER, "Host": host})).status_code


async def test_only_loopback_names_are_answered(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        assert {host: await status_for(server, host) for host in HERE} == dict.fromkeys(HERE, 200)
        assert {host: await status_for(server, host) for host in ELSEWHERE} == dict.fromkeys(ELSEWHERE, 421)


async def test_the_bound_address_the_public_url_and_the_allowed_hosts_are_answered(tmp_path: Path) -> None:
    named = ("192.168.1.5", "fd00::1", "agent.example.com", "Agent_2")
    async with running_server(tmp_path, replace(OPTIONS, hosts=named), url="https://public.example.com/a2a") as server:
        own = ("192.168.1.5:8000", "[fd00::1]:8000", "AGENT.example.com", "agent_2:8000", "public.example.com", *HERE)
        assert {host: await status_for(server, host) for host in own} == dict.fromkeys(own, 200)
        others = ("192.168.1.50", "fd00::1", "agentxexample.com", "a.agent.example.com", "evil.example")
        assert {host: await status_for(server, host) for host in others} == dict.fromkeys(others, 421)


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
async def test_an_agent_that_listens_on_all_addresses_answers_to_addresses_but_not_to_names(
    tmp_path: Path, bound: str
) -> None:
    """A page can rebind a name, but not an address."""
    async with running_server(tmp_path, replace(OPTIONS, hosts=(bound,))) as server:
        own = ("10.0.0.1:8000", "0.0.0.0", "[fd00::1]", "[::]:8000", *HERE)
        assert {host: await status_for(server, host) for host in own} == dict.fromkeys(own, 200)
        others = ("evil.example", "10.0.0.1.evil.example", "agent", "[evil]", "1.2.3")
        assert {host: await status_for(server, host) for host in others} == dict.fromkeys(others, 421)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /tasks HTTP/1.0\r\nA2A-Version: 1.0", b"421"),
        (b"GET /tasks HTTP/1.0\r\nHost: localhost\r\nA2A-Version: 1.0", b"200"),
        (b"GET /healthz HTTP/1.0", b"200"),
        (b"GET /tasks HTTP/1.1\r\nA2A-Version: 1.0", b"400"),
        (b"GET /tasks HTTP/1.1\r\nHost: localhost\r\nHost: evil.example", b"400"),
    ],
)
async def test_a_request_needs_one_host(tmp_path: Path, head: bytes, status: bytes) -> None:
    async with running_server(tmp_path) as server:
        assert (await exchange(server.http.base_url.port, head + b"\r\n\r\n")).split(b" ")[1] == status


async def exchange(port: int | None, content: bytes) -> bytes:
    """Send bytes, and return the first bytes of the answer."""
    assert port is not None
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(content)
        return await stream.receive()


async def test_a_page_of_the_same_origin_is_no_foreign_page(tmp_path: Path) -> None:
    public = "https://public.example.com"
    async with running_server(tmp_path, url=f"{public}/a2a") as server:
        for host, origin in (("localhost:8000", "http://localhost:8000"), ("localhost", public)):
            headers = {**VERSION_HEADER, "Host": host, "Origin": origin}
            assert (await server.http.get("/tasks", headers=headers)).status_code == 200
        for origin in ("http://localhost:3000", "http://127.0.0.1:8000", f"{public}:444", f"{public}.evil.example", ""):
            headers = {**VERSION_HEADER, "Host": "localhost:8000", "Origin": origin}
            assert (await server.http.get("/tasks", headers=headers)).status_code == 403, origin


@pytest.mark.parametrize("origins", [(APP, APP), (APP, "http://evil.example"), ("", APP)])
async def test_several_origins_are_none_that_is_allowed(tmp_path: Path, origins: tuple[str, str]) -> None:
    async with running_server(tmp_path, replace(OPTIONS, origins=(APP,))) as server:
        headers = [*VERSION_HEADER.items(), *(("Origin", origin) for origin in origins)]
        assert (await server.http.get("/tasks", headers=headers)).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "cross-site", "Origin": APP},
    ],
)
async def test_a_typed_address_the_own_page_and_an_allowed_page_are_answered(
    tmp_path: Path, headers: Mapping[str, str]
) -> None:
    async with running_server(tmp_path, replace(OPTIONS, origins=(APP,))) as server:
        assert (await server.http.get("/tasks", headers={**VERSION_HEADER, **headers})).status_code == 200


async def test_addresses_and_ports_are_compared_in_the_form_of_browsers(tmp_path: Path) -> None:
    url = "https://[FD00:0:0:0:0:0:0:2]:443/a2a"
    async with running_server(tmp_path, replace(OPTIONS, hosts=("FD00:0:0:0:0:0:0:1",)), url=url) as server:
        own = ("[fd00::1]:8000", "[FD00:0:0:0:0:0:0:1]", "[fd00::2]", "[fd00:0:0:0:0:0:0:2]:443")
        assert {host: await status_for(server, host) for host in own} == dict.fromkeys(own, 200)
        headers = {**VERSION_HEADER, "Host": "localhost", "Origin": "https://[fd00::2]"}
        assert (await server.http.get("/tasks", headers=headers)).status_code == 200


async def test_a_public_url_of_all_addresses_answers_to_no_others(tmp_path: Path) -> None:
    async with running_server(tmp_path, url="http://0.0.0.0:8000/") as server:
        assert await status_for(server, "10.0.0.1") == 421


async def test_no_page_can_use_grpc(tmp_path: Path) -> None:
    """grpc.aio does not tell the :authority. No page can send unencrypted HTTP/2, whatever its host name is."""
    async with running_server(tmp_path) as server:
        for origin in ("http://evil.example", "null", ""):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await server.grpc.SendMessage(request("m-1"), metadata=(("a2a-version", "1.0"), ("origin", origin)))
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
            assert "does not accept requests of web pages from" in str(refused.value.details())
        for site in ("cross-site", "same-site"):
            with pytest.raises(grpc.aio.AioRpcError, match="other sites' pages"):
                await server.grpc.ListTasks(ListTasksRequest(), metadata=(("sec-fetch-site", site),))
        assert server.executor.owners == []


async def test_a_request_of_http_1_runs_nothing_over_grpc(tmp_path: Path) -> None:
    """It is all that a page can send to that port."""
    async with running_server(tmp_path) as server:
        content = request("m-1").SerializeToString()
        body = b"\0" + len(content).to_bytes(4) + content
        head = f"Host: localhost\r\nContent-Type: application/grpc\r\nA2A-Version: 1.0\r\nContent-Length: {len(body)}"
        for version in ("1.1", "1.0"):
            line = f"POST /lf.a2a.v1.A2AService/SendMessage HTTP/{version}"
            sent = f"{line}\r\n{head}\r\n\r\n".encode() + body
            answer = await exchange(int(str(server.options.grpc_url).rpartition(":")[2]), sent)
            assert not answer.startswith(b"HTTP")
        assert server.executor.owners == []
        # The same content does run as a call.
        await server.grpc.SendMessage(request("m-1"), metadata=(("a2a-version", "1.0"),))
        assert len(server.executor.owners) == 1


# --- With a token ---


async def test_with_a_token_every_host_and_origin_is_accepted(tmp_path: Path) -> None:
    foreign = {"Host": "agent.svc.cluster.local", "Origin": "https://elsewhere.example"}
    async with running_server(tmp_path, SECURED, views=views()) as server:
        for route, answer in (await answers(server, foreign)).items():
            assert answer.status_code == (200 if "card" in route else 401), route
        assert (await server.http.get("/tasks", headers={**VERSION_HEADER, **foreign, **TOKEN})).status_code == 200
        assert (await server.http.get("/metrics", headers={**foreign, **TOKEN})).status_code == 200
        metadata = (("a2a-version", "1.0"), ("origin", APP), ("authorization", "Bearer t0ken"))
        await server.grpc.ListTasks(ListTasksRequest(), metadata=metadata)


async def test_a_known_token_that_is_not_needed_lifts_the_checks(tmp_path: Path) -> None:
    """As that of the platform, whose requests may name any host."""
    async with running_server(tmp_path) as server:
        server.app.add_principal("platform", "p-token")
        for token, status in (("p-token", 200), ("wrong", 421), ("p-token-longer", 421)):
            for shown in ({"Authorization": f"Bearer {token}"}, {"X-API-Key": token}):
                headers = {**VERSION_HEADER, "Host": "agent.svc", "Origin": APP, **shown}
                for path in ("/tasks", "/.well-known/agent-card.json"):
                    assert (await server.http.get(path, headers=headers)).status_code == status, (path, shown)
        metadata = (("a2a-version", "1.0"), ("origin", APP))
        await server.grpc.ListTasks(ListTasksRequest(), metadata=(*metadata, ("authorization", "Bearer p-token")))
        with pytest.raises(grpc.aio.AioRpcError, match="does not accept requests of web pages from"):
            await server.grpc.ListTasks(ListTasksRequest(), metadata=(*metadata, ("authorization", "Bearer wrong")))


async def test_an_endpoint_with_a_token_of_its_own_accepts_every_host(tmp_path: Path) -> None:
    async with running_server(tmp_path, views=views("m-token")) as server:
        headers = {"Host": "pod.example", "Authorization": "Bearer m-token"}
        assert (await server.http.get("/metrics", headers=headers)).status_code == 200
        assert (await server.http.get("/transcript", headers=headers)).status_code == 421


# --- CORS ---


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "a2a-version,authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }


async def test_without_allowed_origins_no_page_may_read(tmp_path: Path) -> None:
    async with running_server(tmp_path, SECURED) as server:
        answer = await server.http.options("/", headers=preflight(APP))
        assert (answer.status_code, [name for name in answer.headers if "access-control" in name]) == (401, [])


@pytest.mark.parametrize("options", [OPTIONS, SECURED], ids=["without a token", "with a token"])
async def test_a_page_of_an_allowed_origin_may_call_every_route(tmp_path: Path, options: ServerOptions) -> None:
    async with running_server(tmp_path, replace(options, origins=(APP,)), views=views()) as server:
        for method, path, _ in ROUTES[:-1]:
            allowed = await server.http.options(path, headers=preflight(APP, method))
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == APP
            assert "authorization" in allowed.headers["access-control-allow-headers"]
            assert allowed.headers["access-control-allow-private-network"] == "true"
            refused = await server.http.options(path, headers=preflight("https://evil.example", method))
            assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)
        for answer in (await answers(server, {"Origin": APP, **TOKEN})).values():
            assert answer.headers["access-control-allow-origin"] == APP
            assert "access-control-allow-credentials" not in answer.headers
            for name in ("A2A-Extensions", "Retry-After", "WWW-Authenticate"):
                assert name in answer.headers["access-control-expose-headers"]
            assert "Origin" in answer.headers["vary"]
        assert server.executor.owners != []


async def test_a_page_can_read_why_it_is_rejected(tmp_path: Path) -> None:
    async with running_server(tmp_path, replace(SECURED, origins=(APP,), requests_per_minute=6)) as server:
        headers = {**VERSION_HEADER, "Origin": APP}
        statuses = {}
        for sent in (headers, {**headers, **TOKEN}, {**headers, **TOKEN}):
            answer = await server.http.get("/tasks", headers=sent)
            statuses[answer.status_code] = answer.headers["access-control-allow-origin"]
        assert statuses == {401: APP, 200: APP, 429: APP}


async def test_an_answer_streams_to_another_origin(tmp_path: Path) -> None:
    async with running_server(tmp_path, replace(OPTIONS, origins=(APP,))) as server:
        waiting = message() | {"parts": [{"text": "wait"}]}
        headers = {**VERSION_HEADER, "Origin": APP}
        async with server.http.stream("POST", "/message:stream", json={"message": waiting}, headers=headers) as answer:
            assert answer.headers["access-control-allow-origin"] == APP
            async for line in answer.aiter_lines():
                server.executor.go.set()  # the first event arrives while the turn still runs
                if "TASK_STATE_COMPLETED" in line:
                    break
            else:
                pytest.fail("the stream ended without the final status")
