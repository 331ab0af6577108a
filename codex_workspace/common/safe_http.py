"""Requests to addresses that clients have named, webhooks and images: each goes to a checked address, and nowhere else.

A name is resolved here, all its addresses are judged, and the connection is made to one that was judged: between check
and use nothing is looked up again. Redirects are not followed, proxies not used, and of a webhook's answer only its
head is read. Who is told what, and when again, is the business of `push`.
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
from functools import cached_property
from typing import Final, TypeVar
from urllib.parse import urlsplit

import anyio
import httpcore

from codex_workspace.common.errors import AgentError, ConfigLocation
from codex_workspace.common.values import quoted

MAX_URL_CHARS: Final = 2048

USUAL_PORTS: Final = frozenset({80, 443})
FIRST_FREE_PORT: Final = 1024
"""Below it live services that a POST may be harmful to, such as mail servers; 80 and 443 excepted."""

MAX_ADDRESSES: Final = 4
"""Of a name's addresses so many are tried; they share the request's time."""

CHECK_LOOK_UP_S: Final = 2.0
"""How long the check at registration waits for a name server; connecting checks again in any case."""

USER_AGENT: Final = "codex-workspace"

ALLOW: Final = ConfigLocation("push.allow")
"""The key that says what is let through, where its file is not known."""

T = TypeVar("T")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Gives a host's addresses; raises OSError where it has none."""

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class TargetRefused(AgentError, ValueError):
    """Requests are not sent there; the sentence may be shown to whoever named the URL."""


@dataclass(frozen=True, slots=True)
class ResponseAccepted:
    """The webhook has answered with a 2xx."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """It did not work now, and may work later; `retry_after_s` is when the webhook wants to be asked again."""

    reason: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ResponseRejected:
    """It will not work: the webhook does not want the request, or we may not send it."""

    reason: str


RequestOutcome = ResponseAccepted | RequestFailed | ResponseRejected


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads. `host` is without brackets, `path` with the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        """What of it may stand in a log: path and query often hold a secret."""
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.scheme) else f"{host}:{self.port}"


def parse_target(url: str) -> Target:
    """Take a URL apart.

    Raises:
        TargetRefused: it is no http or https URL, or none that a request can be sent to.
    """
    if len(url) > MAX_URL_CHARS or not re.fullmatch(r"[\x21-\x5b\x5d-\x7e]+", url):
        raise TargetRefused(f"the URL must have 1 to {MAX_URL_CHARS} printable ASCII characters and no backslash")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TargetRefused("the URL cannot be read") from error
    if parts.scheme not in ("http", "https") or not host:
        raise TargetRefused("the URL must begin with http:// or https:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise TargetRefused("the URL must not hold a user or password; use the authentication field")
    path = parts.path or "/"
    port = _default_port(parts.scheme) if port is None else port
    return Target(parts.scheme, host, port, f"{path}?{parts.query}" if parts.query else path)


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def is_public(address: Address) -> bool:
    """Tell whether an address is a single host's on the open internet; one that holds an IPv4 address is as that is."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = _inner(address)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that a mapped, 6to4 or NAT64 address leads to."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour


@dataclass(frozen=True, slots=True)
class AllowList:
    """What the operator lets requests go to although it is not public: hosts by name, and networks."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str], place: ConfigLocation = ALLOW) -> "AllowList":
        """Read the entries of `push.allow`, which stand at `place`.

        Raises:
            ConfigError: one is neither a host name nor an address or network.
        """
        hosts, networks = set[str](), list[Network]()
        for index, entry in enumerate(entries):
            try:
                networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
            except ValueError as error:
                # Four numbers, or a slash, are a network that was misspelt.
                if not re.fullmatch(r"(?![0-9.]+$)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", entry):
                    raise place.item(index).error(
                        f"must be a host name, an address, or a network such as 10.0.0.0/8, but is {quoted(entry)}"
                    ) from error
                hosts.add(entry.lower())
        return cls(frozenset(hosts), tuple(networks))

    def allows(self, host: str, address: Address) -> bool:
        """Tell whether an entry names the host, or a network that the address is in."""
        plain = _inner(address) or address if isinstance(address, ipaddress.IPv6Address) else address
        return host.lower() in self.hosts or any(each in net for net in self.networks for each in {address, plain})


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the addresses that this machine's resolver gives, in its order.

    Raises:
        OSError: there are none, or nobody could be asked.
    """
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host} is no host name") from error
    except socket.gaierror as error:
        raise OSError(f"no address is known for {host} ({error.strerror})") from error
    return list(dict.fromkeys(str(info[4][0]) for info in found))


class AddressGuard:
    """Knows which addresses requests may go to."""

    def __init__(self, allow: AllowList, resolve: Resolve = resolve_host) -> None:
        self._allow = allow
        self._resolve = resolve

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return a host's addresses, every one of them judged.

        Raises:
            TargetRefused: one of them is not to be connected to.
            OSError: the host has no address.
        """
        found = await self._resolve(host, port)
        if not found:
            raise OSError("the host has no address")
        for each in found:
            self._judge(host, port, ipaddress.ip_address(each))
        return list(found)

    async def check(self, url: str) -> None:
        """Refuse early what would be refused when connecting. A host that cannot be found now may be found later.

        Raises:
            TargetRefused: nothing will be sent there.
        """
        target = parse_target(url)
        with anyio.move_on_after(CHECK_LOOK_UP_S):
            try:
                await self.addresses(target.host, target.port)
            except OSError:
                return

    def _judge(self, host: str, port: int, address: Address) -> None:
        if self._allow.allows(host, address):
            return
        # The address itself is not told: it would show a client how names resolve inside.
        if not is_public(address):
            raise TargetRefused("its host is not a public one; the operator can list it in push.allow")
        if port < FIRST_FREE_PORT and port not in USUAL_PORTS:
            raise TargetRefused(f"its port must be 80, 443, or {FIRST_FREE_PORT} and above")


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Httpcore's way to the network, by judged addresses only."""

    def __init__(self, guard: AddressGuard, timeout_s: float) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._plain = httpcore.AnyIOBackend()

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
                return await self._plain.connect_tcp(
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
    """What stands at a URL."""

    data: bytes


class SafeHttpClient:
    """Sends requests to webhooks, and fetches what clients name; each request over a connection of its own."""

    def __init__(self, guard: AddressGuard, timeout_s: float) -> None:
        self.guard: Final = guard
        self._timeout_s = timeout_s
        self._network = GuardedNetwork(guard, timeout_s)

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> RequestOutcome:
        """Send a JSON body; return what came of it, at the latest after `timeout_s` seconds."""

        async def post(target: Target) -> RequestOutcome:
            async with self._asked(target, "POST", {"Content-Type": "application/json", **headers}, body) as response:
                head = {key.lower(): value for key, value in response.headers}
                return _answer(response.status, head.get(b"retry-after", b"").decode("latin-1"))

        return await self._tried(url, post)

    async def fetch(self, url: str, max_bytes: int) -> Fetched | RequestFailed | ResponseRejected:
        """Return what stands at a URL, in at most `timeout_s` seconds and `max_bytes` bytes."""

        async def fetch(target: Target) -> Fetched | RequestFailed | ResponseRejected:
            async with self._asked(target, "GET", {"Accept": "image/*"}, None) as response:
                answer = _answer(response.status, "")
                if not isinstance(answer, ResponseAccepted):
                    return answer
                data = bytearray()
                async for piece in response.aiter_stream():
                    data += piece
                    if len(data) > max_bytes:
                        return ResponseRejected(f"it has more than {max_bytes} bytes")
                return Fetched(bytes(data))

        return await self._tried(url, fetch)

    async def _tried(self, url: str, request: Callable[[Target], Awaitable[T]]) -> T | RequestFailed | ResponseRejected:
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
    async def _asked(
        self, target: Target, method: str, headers: Mapping[str, str], body: bytes | None
    ) -> AsyncIterator[httpcore.Response]:
        sent = {"Host": target.authority, "User-Agent": USER_AGENT, "Connection": "close", **headers}
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
        encoded = [(key.encode(), _header_value(value)) for key, value in sent.items()]
        tls = self._tls if target.scheme == "https" else None
        async with (
            httpcore.AsyncHTTPConnection(url.origin, tls, network_backend=self._network) as connection,
            connection.stream(method, url, headers=encoded, content=body) as response,
        ):
            yield response

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        # Made when it is first needed: reading the authorities takes memory and tens of milliseconds.
        context = httpcore.default_ssl_context()
        # The machine's own authorities too, or those of SSL_CERT_FILE.
        context.load_default_certs()
        return context


def _answer(status: int, retry_after: str) -> RequestOutcome:
    if 200 <= status < 300:
        return ResponseAccepted()
    if 300 <= status < 400:
        return ResponseRejected(f"HTTP {status}: redirects are not followed")
    if status in (408, 429) or status >= 500:
        return RequestFailed(f"HTTP {status}", _seconds(retry_after))
    return ResponseRejected(f"HTTP {status}")


def _seconds(retry_after: str) -> float | None:
    """Return how long a Retry-After header asks to wait; None where it says nothing that can be read."""
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
        raise TargetRefused("a header of the webhook's request cannot hold these characters") from error
