"""Builds the SDK's call context of a request over HTTP and gRPC, and checks what the SDK does not.

The SDK does not check the protocol version of gRPC calls (a2a-python issue #1166), and on no transport whether a
request asks for the required extensions (not reported upstream).
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
    """The gRPC caller is not authenticated; HTTP requests are rejected earlier."""


@dataclass(frozen=True, slots=True)
class Extensions:
    """The extensions of the agent's card."""

    offered: tuple[AgentExtension, ...] = ()

    @property
    def uris(self) -> frozenset[str]:
        """The URIs of all extensions."""
        return frozenset(each.uri for each in self.offered)

    def check(self, asked: Iterable[str]) -> None:
        """Check that a request asks for all required extensions.

        Raises:
            ExtensionSupportRequiredError: it does not; the message names the missing ones.
        """
        missing = sorted({each.uri for each in self.offered if each.required} - set(asked))
        if missing:
            raise ExtensionSupportRequiredError(f"this agent requires {', '.join(missing)} in {HTTP_EXTENSION_HEADER}")


class HttpContextBuilder(DefaultServerCallContextBuilder):
    """Builds the call context of an authenticated HTTP request."""

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
    """Builds the call context of a gRPC call after authentication, rate limit and checks.

    `serves` tells whether the service supports a version.
    """

    def __init__(
        self, authenticator: Authenticator, rates: RateLimiter, extensions: Extensions, serves: Callable[[str], bool]
    ) -> None:
        self._authenticator = authenticator
        self._rates = rates
        self._extensions = extensions
        self._serves = serves

    def build(self, context: "grpc.aio.ServicerContext[object, object]") -> ServerCallContext:
        """Return the context, and set the active extensions in the response.

        Raises:
            UnauthenticatedError: the token is missing or unknown.
            BusyError: the principal's rate limit is exceeded.
            VersionNotSupportedError: the service does not support the client's version.
            ExtensionSupportRequiredError: the call does not ask for a required extension.
        """
        headers = _headers(context)
        try:
            principal = self._authenticator.authenticate(
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
            raise busy(call, "the rate limit of this principal is exceeded", wait_s)
        version = headers.get(VERSION_HEADER.lower()) or PROTOCOL_VERSION_0_3
        if not self._serves(version):
            raise VersionNotSupportedError(f"A2A version '{version[:20]}' is not supported by this service")
        self._extensions.check(call.requested_extensions)
        self._set_active_extensions(context, headers)
        return call

    def _set_active_extensions(
        self, context: "grpc.aio.ServicerContext[object, object]", headers: dict[str, str]
    ) -> None:
        active = {
            name.lower(): active_extensions([headers.get(name.lower(), "")], self._extensions.uris)
            for name in EXTENSION_HEADERS
        }
        context.set_trailing_metadata(tuple((name, ", ".join(uris)) for name, uris in active.items() if uris))


def _headers(context: "grpc.aio.ServicerContext[object, object]") -> dict[str, str]:
    """Return a call's text metadata; values of the same name are joined as in HTTP."""
    found: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found[name] = f"{found[name]}, {value}" if name in found else value
    return found
