"""Who calls, in which version, and with which extensions: the SDK's call context of a request, on HTTP and gRPC.

Every call of every transport passes here before the handler, so here is checked what the SDK checks on some of them
only: the version on gRPC, and on all of them the extensions that the agent requires.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from a2a.compat.v0_3.extension_headers import LEGACY_HTTP_EXTENSION_HEADER
from a2a.extensions.common import HTTP_EXTENSION_HEADER, get_requested_extensions
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers.grpc_handler import GrpcServerCallContextBuilder
from a2a.server.routes import DefaultServerCallContextBuilder
from a2a.types import AgentExtension
from a2a.utils.constants import PROTOCOL_VERSION_0_3, VERSION_HEADER
from a2a.utils.errors import A2AError, ExtensionSupportRequiredError, VersionNotSupportedError
from starlette.authentication import AuthenticationError
from starlette.requests import Request

from codex_workspace.common.a2a_terms import HEADERS, AuthenticatedUser
from codex_workspace.server.middleware import API_KEY_HEADER, EXTENSION_HEADERS, Authenticator, active_extensions
from codex_workspace.server.overload import GRPC_CONTEXT, RateLimiter, busy

if TYPE_CHECKING:
    import grpc.aio


class UnauthenticatedError(A2AError):
    """Nobody that the agent knows; HTTP requests of this kind do not come so far."""


@dataclass(frozen=True, slots=True)
class Extensions:
    """What the agent's card says of extensions."""

    offered: tuple[AgentExtension, ...] = ()

    @property
    def uris(self) -> frozenset[str]:
        """All that can be asked for."""
        return frozenset(each.uri for each in self.offered)

    def check(self, asked: Iterable[str]) -> None:
        """Refuse a request that asks for less than is required.

        Raises:
            ExtensionSupportRequiredError: it does; names what is missing.
        """
        missing = sorted({each.uri for each in self.offered if each.required} - set(asked))
        if missing:
            raise ExtensionSupportRequiredError(f"this agent requires {', '.join(missing)} in {HTTP_EXTENSION_HEADER}")


class HttpContextBuilder(DefaultServerCallContextBuilder):
    """Makes the call context of an HTTP request that the door has let in."""

    def __init__(self, extensions: Extensions) -> None:
        super().__init__()
        self._extensions = extensions

    def build(self, request: Request) -> ServerCallContext:
        """Return the context.

        Raises:
            ExtensionSupportRequiredError: the request does not ask for an extension that is required.
        """
        context: ServerCallContext = super().build(request)
        old = request.headers.getlist(LEGACY_HTTP_EXTENSION_HEADER)
        context.requested_extensions |= get_requested_extensions(old)
        self._extensions.check(context.requested_extensions)
        return context


class GrpcContextBuilder(GrpcServerCallContextBuilder):
    """Makes the call context of a gRPC call: the door, the rate and the checks in one.

    `serves` tells whether the service speaks a version (as the client names it).
    """

    def __init__(
        self, doorkeeper: Authenticator, rates: RateLimiter, extensions: Extensions, serves: Callable[[str], bool]
    ) -> None:
        self._doorkeeper = doorkeeper
        self._rates = rates
        self._extensions = extensions
        self._serves = serves

    def build(self, context: "grpc.aio.ServicerContext[object, object]") -> ServerCallContext:
        """Return the context, and have the answer tell which extensions are on.

        Raises:
            UnauthenticatedError: nobody that the agent knows.
            BusyError: the principal asks too often.
            VersionNotSupportedError: the client speaks a version that the service does not.
            ExtensionSupportRequiredError: the call does not ask for an extension that is required.
        """
        headers = _headers(context)
        try:
            principal = self._doorkeeper.authenticate(
                headers.get("authorization", ""), headers.get(API_KEY_HEADER.lower(), "")
            )
        except AuthenticationError as error:
            raise UnauthenticatedError(str(error)) from error
        call = ServerCallContext(
            user=AuthenticatedUser(principal.display_name),
            state={GRPC_CONTEXT: context, HEADERS: headers},
            requested_extensions=get_requested_extensions(
                [headers.get(name.lower(), "") for name in EXTENSION_HEADERS]
            ),
        )
        wait_s = self._rates.take(principal.display_name)
        if wait_s:
            raise busy(call, "this principal asks too often", wait_s)
        version = headers.get(VERSION_HEADER.lower()) or PROTOCOL_VERSION_0_3
        if not self._serves(version):
            raise VersionNotSupportedError(f"A2A version '{version[:20]}' is not spoken by this service")
        self._extensions.check(call.requested_extensions)
        self._tell(context, headers)
        return call

    def _tell(self, context: "grpc.aio.ServicerContext[object, object]", headers: dict[str, str]) -> None:
        active = {
            name.lower(): active_extensions([headers.get(name.lower(), "")], self._extensions.uris)
            for name in EXTENSION_HEADERS
        }
        context.set_trailing_metadata(tuple((name, ", ".join(uris)) for name, uris in active.items() if uris))


def _headers(context: "grpc.aio.ServicerContext[object, object]") -> dict[str, str]:
    """Return a call's metadata of text; values of one name are joined, as HTTP does it."""
    found: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found[name] = f"{found[name]}, {value}" if name in found else value
    return found
