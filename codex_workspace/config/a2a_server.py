"""The section `a2a` of config.yaml."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from codex_workspace.config.validation import Items, Section, Text, matching, problem

HostName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?",
        "a host name or an address without port, such as agent.example.com; with a token, every host is accepted",
    ),
]
Origin = Annotated[
    str,
    matching(
        r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?",
        "one origin in lower case without a path, such as https://app.example.com",
    ),
]


class A2AConfig(Section):
    """The A2A server.

    port: The port to listen on; 0 = any free one. A2A_PORT takes precedence.
    streaming: Offer streaming.
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
