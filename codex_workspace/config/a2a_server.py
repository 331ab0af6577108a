"""The section `a2a` of config.yaml."""

from ipaddress import IPv6Address
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from codex_workspace.config.validation import Items, Section, Text, matching, problem


def host_of(name: str) -> str:
    """Return a host name or address as browsers send it; raise ValueError for an invalid address."""
    return f"[{IPv6Address(name.removeprefix('[').removesuffix(']'))}]" if ":" in name else name.lower()


def origin_of(url: str) -> str:
    """Return the origin of a URL as browsers send it; raise ValueError for an invalid address or port."""
    parts = urlsplit(url)
    port = "" if parts.port in (None, {"http": 80, "https": 443}.get(parts.scheme)) else f":{parts.port}"
    return f"{parts.scheme}://{host_of(parts.hostname or '')}{port}"


def _check_host(name: str) -> str:
    if host_of(name) in ("0.0.0.0", "[::]"):
        raise problem("must name one host; with A2A_HOST=0.0.0.0, every address is accepted")
    return name


HostName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*|\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]",
        "a host name or an address without port, such as agent.example.com; with a token, every host is accepted",
    ),
    AfterValidator(_check_host),
]
Origin = Annotated[
    str,
    matching(
        r"[a-z][a-z0-9+.-]*://([a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:[0-9]{1,5})?",
        "one origin in lower case without a path, such as https://app.example.com",
    ),
    AfterValidator(origin_of),
]

AnswerMode = Literal["pieces", "pieces-then-whole", "whole"]
"""How a stream brings the answer."""

AnswerUpdates = Literal["by-client", AnswerMode]


class A2AConfig(Section):
    """The A2A server.

    port: The port to listen on; 0 = any free one. A2A_PORT takes precedence.
    streaming: Offer streaming.
    answer_updates: How streams bring the answer, unless the request says it: by-client = as the client needs it.
    push_notifications: Offer webhooks.
    protocol_versions: The supported protocol versions, as listed on the card.
    signing_key_file: A PEM file with the private key (ES256) that signs the card. For protocol version 1.0 only.
    grpc_url: The gRPC address on the card, as host:port, if it differs from the listening address.
    grpc_on_card: List gRPC on the card, if it is on.
    allowed_hosts: Further host names that requests may name if the agent has no token.
    allowed_origins: Origins of the web pages that may call the agent from a browser.
    """

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    streaming: bool = True
    answer_updates: AnswerUpdates = "by-client"
    push_notifications: bool = True
    protocol_versions: Items[Literal["1.0", "0.3"]] = ("1.0", "0.3")
    signing_key_file: Text | None = None
    grpc_url: Annotated[str, matching(r"[^\s/]+:[0-9]{1,5}", "host:port")] | None = None
    grpc_on_card: bool = True
    allowed_hosts: Items[HostName] = ()
    allowed_origins: Items[Origin] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.protocol_versions or len(set(self.protocol_versions)) < len(self.protocol_versions):
            raise problem("must list at least one version, and each only once", "protocol_versions")
        if self.signing_key_file is not None and self.protocol_versions != ("1.0",):
            raise problem(
                'needs protocol_versions: ["1.0"]; the signature does not cover the fields for 0.3 clients',
                "signing_key_file",
            )
        if self.grpc_url is not None and not self.grpc_on_card:
            raise problem("is not used if grpc_on_card is false; remove one of the two", "grpc_url")
        return self
