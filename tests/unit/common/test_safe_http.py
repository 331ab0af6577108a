"""Where requests to webhooks go, and where they never do: by table, and over real sockets."""

import ipaddress
import ssl
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common import safe_http
from codex_workspace.common.errors import ConfigError
from codex_workspace.common.safe_http import (
    MAX_URL_CHARS,
    AddressGuard,
    AllowList,
    RequestFailed,
    Resolve,
    ResponseAccepted,
    ResponseRejected,
    SafeHttpClient,
    TargetRefused,
    is_public,
    parse_target,
    resolve_host,
)
from tests.support.webhook_server import Answer, webhook

LOOPBACK = AllowList.parse(["127.0.0.1"])
NOT_PUBLIC = "its host is not public; the operator can allow it with push.allow"


def resolves_to(*addresses: str) -> Resolve:
    async def resolve(host: str, port: int) -> Sequence[str]:
        del host, port
        return addresses

    return resolve


def to_loopback(allow: AllowList = LOOPBACK, timeout_s: float = 5.0) -> SafeHttpClient:
    return SafeHttpClient(AddressGuard(allow), timeout_s)


# --- Addresses ---


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::10.0.0.1", "2002:7f00:1::", "2001:0:1::1"),
    ],
)
def test_addresses_that_are_no_public_hosts(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["93.184.215.14", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "2002:101:101::"]
)
def test_addresses_that_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@given(st.ip_addresses(v=4))
def test_a_wrapped_ipv4_address_is_unwrapped(address: ipaddress.IPv4Address) -> None:
    wrapped = (f"::ffff:{address}", f"64:ff9b::{address}")
    assert {is_public(ipaddress.ip_address(each)) for each in wrapped} == {is_public(address)}


@pytest.mark.parametrize(
    ("entry", "host", "address", "permitted"),
    [
        ("10.0.0.0/8", "hooks.internal", "10.2.3.4", True),
        ("10.0.0.0/8", "hooks.internal", "::ffff:10.2.3.4", True),
        ("10.0.0.7/8", "hooks.internal", "10.2.3.4", True),
        ("10.0.0.7", "hooks.internal", "10.0.0.8", False),
        ("fd00::/8", "hooks.internal", "fd12::1", True),
        ("[::1]", "::1", "::1", True),
        ("Hooks.internal", "hooks.INTERNAL", "10.2.3.4", True),
        ("internal", "hooks.internal", "10.2.3.4", False),
    ],
)
def test_the_operators_permissions(entry: str, host: str, address: str, permitted: bool) -> None:
    assert AllowList.parse([entry]).allows(host, ipaddress.ip_address(address)) is permitted


@pytest.mark.parametrize(
    "entry", ["10.0.0.0/33", "10.0.0", "999.1.1.1", "http://host", "host/path", "*.internal", "a b"]
)
def test_entries_that_cannot_be_read_are_named(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"^push\.allow: .* must be a host name, an address, or a network"):
        AllowList.parse([entry])


# --- URLs ---


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("https://hooks.example.com/a?b=c", "hooks.example.com", "/a?b=c"),
        ("https://hooks.example.com", "hooks.example.com", "/"),
        ("HTTP://hooks.example.com:8080/a", "hooks.example.com:8080", "/a"),
        ("http://[2606:4700::1]:80/", "[2606:4700::1]", "/"),
        ("https://hooks.example.com/a#b", "hooks.example.com", "/a"),
    ],
)
def test_a_url_is_split(url: str, authority: str, path: str) -> None:
    target = parse_target(url)
    assert (target.authority, target.path) == (authority, path)
    assert target.origin.endswith(f"//{authority}")


@pytest.mark.parametrize(
    "url",
    [
        *("", "hooks.example.com", "/a", "ftp://hooks.example.com/", "file:///etc/passwd", "http://", "https:///a"),
        *("http://hooks.example.com:99999/", "http://[::1", "http://a\r\nb/", "http://a b/", "http://a\\@b/"),
        *("http://user@hooks.example.com/", "http://user:pass@hooks.example.com/", "http://bücher.example/"),
        "http://hooks.example.com/" + "a" * MAX_URL_CHARS,
    ],
)
def test_urls_that_are_no_webhooks(url: str) -> None:
    with pytest.raises(TargetRefused, match=r"^the URL "):
        parse_target(url)


@given(st.text())
def test_any_text_is_a_target_or_refused(text: str) -> None:
    try:
        target = parse_target(f"http://{text}")
    except TargetRefused:
        return
    assert "\n" not in f"{target.authority}{target.path}"
    assert target.host


# --- The check at registration ---


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/", "http://localhost/", "http://[::1]:8080/", "http://2130706433/", "http://127.1/"),
        *("http://0x7f000001/", "http://0/", "http://169.254.169.254/latest/meta-data"),
    ],
)
async def test_a_private_target_is_refused_at_registration(url: str) -> None:
    with pytest.raises(TargetRefused) as refused:
        await AddressGuard(AllowList(), resolve_host).check(url)
    assert str(refused.value) == NOT_PUBLIC


async def test_an_unknown_host_is_one_sentence() -> None:
    with pytest.raises(OSError, match=r"^cannot resolve nowhere\.invalid \("):
        await resolve_host("nowhere.invalid", 443)


async def test_one_private_address_among_public_ones_is_enough() -> None:
    with pytest.raises(TargetRefused):
        await AddressGuard(AllowList(), resolves_to("1.1.1.1", "10.0.0.1")).check("https://hooks.example.com/")


async def test_a_public_target_passes() -> None:
    await AddressGuard(AllowList(), resolves_to("1.1.1.1", "2606:4700::1")).check("https://hooks.example.com/")


@pytest.mark.parametrize(("port", "passes"), [(22, False), (25, False), (80, True), (443, True), (1024, True)])
async def test_ports_of_other_services_are_rejected(port: int, passes: bool) -> None:
    guard, url = AddressGuard(AllowList(), resolves_to("1.1.1.1")), f"http://hooks.example.com:{port}/"
    if passes:
        await guard.check(url)
        return
    with pytest.raises(TargetRefused, match="port must be 80, 443, or 1024 or higher"):
        await guard.check(url)


async def test_a_host_that_cannot_be_found_now_passes_until_it_is_connected_to() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise OSError(f"{host} {port}")

    guard = AddressGuard(AllowList(), resolve)
    await guard.check("https://hooks.example.com/")
    assert isinstance(await SafeHttpClient(guard, 5.0).post("https://hooks.example.com/", {}, b"{}"), RequestFailed)


# --- Requests ---


async def test_the_request_a_webhook_receives() -> None:
    async with webhook() as server:
        answer = await to_loopback().post(f"{server.url}?x=1", {"Authorization": "Bearer s"}, b'{"a": 1}')
    assert answer == ResponseAccepted()
    (request,) = server.received
    assert request.target == "/hook?x=1"
    assert request.body == b'{"a": 1}'
    assert request.headers["host"] == f"127.0.0.1:{server.port}"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["authorization"] == "Bearer s"


@pytest.mark.parametrize(
    ("given_answer", "expected"),
    [
        ((204, {}), ResponseAccepted()),
        ((302, {"Location": "http://169.254.169.254/"}), ResponseRejected("HTTP 302: redirects are not followed")),
        ((307, {"Location": "/elsewhere"}), ResponseRejected("HTTP 307: redirects are not followed")),
        ((400, {}), ResponseRejected("HTTP 400")),
        ((410, {"Retry-After": "5"}), ResponseRejected("HTTP 410")),
        ((408, {}), RequestFailed("HTTP 408")),
        ((429, {"Retry-After": "7"}), RequestFailed("HTTP 429", 7.0)),
        ((503, {"Retry-After": "soon"}), RequestFailed("HTTP 503")),
        ((500, {}), RequestFailed("HTTP 500")),
    ],
)
async def test_the_meaning_of_each_status(
    given_answer: Answer, expected: ResponseAccepted | RequestFailed | ResponseRejected
) -> None:
    async with webhook(given_answer) as server:
        assert await to_loopback().post(server.url, {}, b"{}") == expected
    assert len(server.received) == 1


async def test_a_date_to_come_back_at() -> None:
    later = datetime.now(UTC) + timedelta(seconds=90)
    async with webhook((503, {"Retry-After": later.strftime("%a, %d %b %Y %H:%M:%S GMT")})) as server:
        answer = await to_loopback().post(server.url, {}, b"{}")
    assert isinstance(answer, RequestFailed)
    assert answer.retry_after_s is not None
    assert 80 < answer.retry_after_s <= 90


async def test_a_name_that_leads_inside_is_refused_when_connecting() -> None:
    async with webhook() as server:
        webhooks = SafeHttpClient(AddressGuard(AllowList(), resolves_to("127.0.0.1")), 5.0)
        assert await webhooks.post(f"http://hooks.example.com:{server.port}/", {}, b"{}") == ResponseRejected(
            NOT_PUBLIC
        )
    assert not server.received


async def test_a_name_that_changes_its_address_after_the_check_is_refused() -> None:
    answers = [["1.1.1.1"], ["127.0.0.1"], ["127.0.0.1"]]

    async def rebinding(host: str, port: int) -> Sequence[str]:
        del host, port
        return answers.pop(0)

    async with webhook() as server:
        guard, url = AddressGuard(AllowList(), rebinding), f"http://hooks.example.com:{server.port}/"
        await guard.check(url)
        assert await SafeHttpClient(guard, 5.0).post(url, {}, b"{}") == ResponseRejected(NOT_PUBLIC)
    assert not server.received
    assert len(answers) == 1, "one look-up for each connection, and none after it was judged"


async def test_a_name_is_looked_up_once_and_connected_to_by_its_address() -> None:
    async with webhook() as server:
        guard = AddressGuard(AllowList.parse(["hooks.internal"]), resolves_to("127.0.0.1"))
        assert (
            await SafeHttpClient(guard, 5.0).post(f"http://hooks.internal:{server.port}/", {}, b"{}")
            == ResponseAccepted()
        )
    assert server.received[0].headers["host"] == f"hooks.internal:{server.port}"


async def test_the_next_address_is_tried_if_one_fails() -> None:
    async with webhook() as server:
        guard = AddressGuard(AllowList.parse(["hooks.internal"]), resolves_to("127.0.0.2", "127.0.0.1"))
        assert (
            await SafeHttpClient(guard, 5.0).post(f"http://hooks.internal:{server.port}/", {}, b"{}")
            == ResponseAccepted()
        )


async def test_an_unreachable_host_is_retried() -> None:
    async with webhook() as server:
        url = server.url
    assert isinstance(await to_loopback().post(url, {}, b"{}"), RequestFailed)


async def test_a_webhook_that_does_not_answer_in_time_is_for_later() -> None:
    async with webhook(takes_s=60) as server:
        assert await to_loopback(timeout_s=0.2).post(server.url, {}, b"{}") == RequestFailed("no answer within 0.2 s")


async def test_an_answer_without_end_is_not_read() -> None:
    hung_up = anyio.Event()

    async def endless(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
            with suppress(anyio.BrokenResourceError):
                while True:
                    await stream.send(b"x" * 65536)
            hung_up.set()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, endless)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        assert await to_loopback().post(f"http://127.0.0.1:{port}/", {}, b"{}") == ResponseAccepted()
        await hung_up.wait()
        tasks.cancel_scope.cancel()


async def test_a_header_that_cannot_be_sent_is_refused() -> None:
    async with webhook() as server:
        for value in ("a\r\nX-Other: b", "☃"):
            assert isinstance(await to_loopback().post(server.url, {"Authorization": value}, b"{}"), ResponseRejected)
    assert not server.received


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a key and a certificate for hooks.internal, which certifies itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hooks.internal")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("hooks.internal")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, no_password)
    file = tmp_path / "certificate.pem"
    file.write_bytes(private + made.public_bytes(encoding))
    return file


async def test_over_tls_the_name_counts_not_the_address(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    # Without its cache, which may hold a context that was made before.
    monkeypatch.setattr(safe_http, "tls_context", safe_http.tls_context.__wrapped__)
    asked_for: list[str | None] = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    tls.sni_callback = lambda _socket, name, _context: asked_for.append(name)
    async with webhook(tls=tls) as server:
        guard = AddressGuard(AllowList.parse(["127.0.0.1"]), resolves_to("127.0.0.1"))
        webhooks = SafeHttpClient(guard, 5.0)
        assert await webhooks.post(f"https://hooks.internal:{server.port}/", {}, b"{}") == ResponseAccepted()
        other = await webhooks.post(f"https://other.internal:{server.port}/", {}, b"{}")
    assert isinstance(other, RequestFailed)
    assert "CERTIFICATE_VERIFY_FAILED" in other.reason
    assert asked_for == ["hooks.internal", "other.internal"]
    assert len(server.received) == 1
