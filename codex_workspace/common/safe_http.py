"""An HTTP client for URLs that clients choose (webhooks, images), protected against server-side request forgery.

The host name is resolved once, all its addresses are checked, and the connection is made to a checked address.
Redirects are not followed, proxies are not used, and only the head of a webhook's response is read.
"""

import ipaddress
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Final, TypeVar
from urllib.parse import urlsplit

import anyio
import httpcore

from codex_workspace.common.errors import AgentError, ConfigLocation
from codex_workspace.common.values import quoted

MAX_URL_CHARS: Final = 2048

WEB_PORTS: Final = frozenset({80, 443})
FIRST_ALLOWED_PORT: Final = 1024
"""Lower ports except 80 and 443 are rejected: a POST could harm their services, such as mail servers."""

MAX_ADDRESSES: Final = 4
"""How many addresses of a host are tried; they share the request's timeout."""

CHECK_TIMEOUT_S: Final = 2.0
"""How long the check of a new webhook waits for a name server; every connection checks the addresses again."""

USER_AGENT: Final = "codex-workspace"

ALLOW: Final = ConfigLocation("push.allow")
"""The location of the allow list if its file is not known."""

T = TypeVar("T")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and port to addresses; raises OSError if there are none."""

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class TargetRefused(AgentError, ValueError):
    """The target is not allowed; the message may be shown to the client that chose the URL."""


@dataclass(frozen=True, slots=True)
class ResponseAccepted:
    """The response has a 2xx status."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request failed and can be retried; `retry_after_s` is the delay that the server asks for."""

    reason: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ResponseRejected:
    """The request must not be retried: the server rejects it, or it is not allowed."""

    reason: str


RequestOutcome = ResponseAccepted | RequestFailed | ResponseRejected


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL. `host` is without brackets, `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        """The part that may be logged: path and query often contain a secret."""
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.scheme) else f"{host}:{self.port}"


def parse_target(url: str) -> Target:
    """Parse a URL.

    Raises:
        TargetRefused: it is not a valid http or https URL.
    """
    if len(url) > MAX_URL_CHARS or not re.fullmatch(r"[\x21-\x5b\x5d-\x7e]+", url):
        raise TargetRefused(f"the URL must have 1 to {MAX_URL_CHARS} printable ASCII characters and no backslash")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TargetRefused("the URL is malformed") from error
    if parts.scheme not in ("http", "https") or not host:
        raise TargetRefused("the URL must start with http:// or https:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise TargetRefused("the URL must not contain a user or password; use the authentication field")
    path = parts.path or "/"
    port = _default_port(parts.scheme) if port is None else port
    return Target(parts.scheme, host, port, f"{path}?{parts.query}" if parts.query else path)


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def is_public(address: Address) -> bool:
    """Whether an address is a public unicast address; if it embeds an IPv4 address, that address is checked."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded_ipv4(address)
        if embedded is not None:
            return is_public(embedded)
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address in a mapped, 6to4 or NAT64 address."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour


@dataclass(frozen=True, slots=True)
class AllowList:
    """Host names and networks that are allowed as targets although they are not public."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str], location: ConfigLocation = ALLOW) -> "AllowList":
        """Parse the entries of `push.allow`, found at `location`.

        Raises:
            ConfigError: an entry is not a host name, an address or a network.
        """
        hosts, networks = set[str](), list[Network]()
        for index, entry in enumerate(entries):
            try:
                networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
            except ValueError as error:
                # A text of digits and dots, or with a slash, is an invalid network and not a host name.
                if not re.fullmatch(r"(?![0-9.]+$)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", entry):
                    raise location.item(index).error(
                        f"must be a host name, an address, or a network such as 10.0.0.0/8, but is {quoted(entry)}"
                    ) from error
                hosts.add(entry.lower())
        return cls(frozenset(hosts), tuple(networks))

    def allows(self, host: str, address: Address) -> bool:
        """Whether an entry is the host, or a network that contains the address."""
        plain = _embedded_ipv4(address) or address if isinstance(address, ipaddress.IPv6Address) else address
        return host.lower() in self.hosts or any(each in net for net in self.networks for each in {address, plain})


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host from the system's resolver.

    Raises:
        OSError: there are none, or no name server responds.
    """
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host} is not a valid host name") from error
    except socket.gaierror as error:
        raise OSError(f"cannot resolve {host} ({error.strerror})") from error
    return list(dict.fromkeys(str(info[4][0]) for info in found))


class AddressGuard:
    """Decides which addresses requests may be sent to."""

    def __init__(self, allow: AllowList, resolve: Resolve = resolve_host) -> None:
        self._allow = allow
        self._resolve = resolve

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return a host's addresses after checking each of them.

        Raises:
            TargetRefused: an address is not allowed.
            OSError: the host has no address.
        """
        found = await self._resolve(host, port)
        if not found:
            raise OSError("the host has no address")
        for each in found:
            self._check_address(host, port, ipaddress.ip_address(each))
        return list(found)

    async def check(self, url: str) -> None:
        """Check a URL before it is used. A host that cannot be resolved passes, because it may be resolvable later.

        Raises:
            TargetRefused: its address is not allowed.
        """
        target = parse_target(url)
        with anyio.move_on_after(CHECK_TIMEOUT_S):
            try:
                await self.addresses(target.host, target.port)
            except OSError:
                return

    def _check_address(self, host: str, port: int, address: Address) -> None:
        if self._allow.allows(host, address):
            return
        # The message omits the address, which would show clients how internal names resolve.
        if not is_public(address):
            raise TargetRefused("its host is not public; the operator can allow it with push.allow")
        if port < FIRST_ALLOWED_PORT and port not in WEB_PORTS:
            raise TargetRefused(f"its port must be 80, 443, or {FIRST_ALLOWED_PORT} or higher")


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """A network backend for httpcore that connects to checked addresses only."""

    def __init__(self, guard: AddressGuard, timeout_s: float) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the base class's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first of the host's addresses that answers."""
        del timeout
        addresses = (await self._guard.addresses(host, port))[:MAX_ADDRESSES]
        failure: Exception = OSError("no address")
        for address in addresses:
            try:
                return await self._backend.connect_tcp(
                    address, port, self._timeout_s / len(addresses), local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await anyio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The content of a URL."""

    data: bytes


class SafeHttpClient:
    """Sends requests to checked addresses only, each over its own connection."""

    def __init__(self, guard: AddressGuard, timeout_s: float) -> None:
        self.guard: Final = guard
        self._timeout_s = timeout_s
        self._network = GuardedNetwork(guard, timeout_s)

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> RequestOutcome:
        """Send a JSON body, and return the outcome within `timeout_s` seconds."""

        async def post(target: Target) -> RequestOutcome:
            async with self._request(target, "POST", {"Content-Type": "application/json", **headers}, body) as response:
                head = {name.lower(): value for name, value in response.headers}
                return _outcome_of(response.status, head.get(b"retry-after", b"").decode("latin-1"))

        return await self._outcome(url, post)

    async def fetch(self, url: str, max_bytes: int) -> Fetched | RequestFailed | ResponseRejected:
        """Return the content of a URL, at most `max_bytes` bytes within `timeout_s` seconds."""

        async def fetch(target: Target) -> Fetched | RequestFailed | ResponseRejected:
            async with self._request(target, "GET", {"Accept": "image/*"}, None) as response:
                outcome = _outcome_of(response.status, "")
                if not isinstance(outcome, ResponseAccepted):
                    return outcome
                data = bytearray()
                async for piece in response.aiter_stream():
                    data += piece
                    if len(data) > max_bytes:
                        return ResponseRejected(f"it has more than {max_bytes} bytes")
                return Fetched(bytes(data))

        return await self._outcome(url, fetch)

    async def _outcome(
        self, url: str, request: Callable[[Target], Awaitable[T]]
    ) -> T | RequestFailed | ResponseRejected:
        try:
            with anyio.fail_after(self._timeout_s):
                return await request(parse_target(url))
        except TargetRefused as error:
            return ResponseRejected(str(error))
        except httpcore.LocalProtocolError as error:
            return ResponseRejected(f"the request cannot be made: {error}")
        except (TimeoutError, httpcore.TimeoutException):
            return RequestFailed(f"no answer within {self._timeout_s:g} s")
        except (httpcore.NetworkError, httpcore.RemoteProtocolError, OSError) as error:
            return RequestFailed(f"{type(error).__name__}: {error}")

    @asynccontextmanager
    async def _request(
        self, target: Target, method: str, headers: Mapping[str, str], body: bytes | None
    ) -> AsyncIterator[httpcore.Response]:
        sent = {"Host": target.authority, "User-Agent": USER_AGENT, "Connection": "close", **headers}
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
        encoded = [(key.encode(), _header_value(value)) for key, value in sent.items()]
        tls = tls_context() if target.scheme == "https" else None
        async with (
            httpcore.AsyncHTTPConnection(url.origin, tls, network_backend=self._network) as connection,
            connection.stream(method, url, headers=encoded, content=body) as response,
        ):
            yield response


@cache
def tls_context() -> ssl.SSLContext:
    """Return the process's TLS context; to load the certificate authorities takes memory and tens of milliseconds."""
    context = httpcore.default_ssl_context()
    # Also trust the system's certificate authorities, or those of SSL_CERT_FILE.
    context.load_default_certs()
    return context


def _outcome_of(status: int, retry_after: str) -> RequestOutcome:
    if 200 <= status < 300:
        return ResponseAccepted()
    if 300 <= status < 400:
        return ResponseRejected(f"HTTP {status}: redirects are not followed")
    if status in (408, 429) or status >= 500:
        return RequestFailed(f"HTTP {status}", _retry_after_s(retry_after))
    return ResponseRejected(f"HTTP {status}")


def _retry_after_s(retry_after: str) -> float | None:
    """Return the delay of a Retry-After header in seconds; None if it is invalid."""
    if re.fullmatch(r"[0-9]{1,9}", retry_after.strip()):
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _header_value(value: str) -> bytes:
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError as error:
        raise TargetRefused("the value of a header contains characters that are not Latin-1") from error
