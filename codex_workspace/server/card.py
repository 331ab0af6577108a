"""The public agent card, its routes, and the extended card for authenticated clients."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from a2a.compat.v0_3.conversions import to_compat_agent_card
from a2a.server.request_handlers.response_helpers import agent_card_to_dict
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentExtension,
    AgentInterface,
    AgentSkill,
    APIKeySecurityScheme,
    HTTPAuthSecurityScheme,
    SecurityRequirement,
    SecurityScheme,
    StringList,
)
from a2a.utils.constants import AGENT_CARD_WELL_KNOWN_PATH, VERSION_HEADER
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.staticfiles import NotModifiedResponse, StaticFiles

from codex_workspace.common.a2a_terms import version_of
from codex_workspace.common.errors import ConfigLocation
from codex_workspace.common.files import read_config_file
from codex_workspace.common.values import JsonObject
from codex_workspace.config.prompts import Skill
from codex_workspace.server.middleware import API_KEY_HEADER

if TYPE_CHECKING:
    from codex_workspace.server.app import ServerOptions

Version = Literal["1.0", "0.3"]

Signer = Callable[[AgentCard], AgentCard]
"""Returns a card with its signature."""

SETUP: Final = "urn:codex-workspace:setup"
"""The extension in the extended card that describes the agent's setup; clients cannot request it."""

OUTPUT_MODES: Final = ("text/plain", "application/json", "text/x-diff", "application/octet-stream")


CARD_PATHS: Final = {
    "": AGENT_CARD_WELL_KNOWN_PATH,
    "1.0": f"/1.0{AGENT_CARD_WELL_KNOWN_PATH}",
    "0.3": f"/0.3{AGENT_CARD_WELL_KNOWN_PATH}",
}
"""The addresses of the card: for the version of the request, and for one version, whatever the request says."""

CARD_CACHE: Final = "public, max-age=60"
"""The card changes only with a restart; caches update within a minute."""


def agent_card(options: "ServerOptions") -> AgentCard:
    """Return the public card; 0.3 clients use its 0.3 interfaces."""
    card = AgentCard(
        name=options.name,
        description=options.description,
        version=options.version,
        capabilities=AgentCapabilities(
            streaming=options.streaming,
            push_notifications=options.push_notifications,
            extended_agent_card=options.is_extended,
            extensions=options.extensions,
        ),
        default_input_modes=options.input_modes,
        default_output_modes=OUTPUT_MODES,
        supported_interfaces=_interfaces(options),
        skills=_skills(options),
    )
    if options.secured:
        _secure(card)
    return card


def card_routes(options: "ServerOptions") -> list[Route]:
    """Return the routes of the public card: for clients of all versions, and of each version that is served.

    Strict clients reject a card with the fields of another version.
    """
    full = agent_card(options)
    forms = {"": agent_card_to_dict(full if options.sign is None else options.sign(full))}
    if len(options.versions) > 1:
        of_0_3 = to_compat_agent_card(agent_card(replace(options, versions=("0.3",))))
        forms["1.0"] = agent_card_to_dict(agent_card(replace(options, versions=("1.0",))))
        forms["0.3"] = of_0_3.model_dump(mode="json", exclude_none=True)
    return [
        Route(path, _card_endpoint(forms, name))
        for name, path in CARD_PATHS.items()
        if not name or name in options.versions
    ]


def _card_endpoint(forms: Mapping[str, JsonObject], fixed: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that shows the form for the version `fixed`, or for the request's version if it is empty."""
    since = formatdate(usegmt=True)
    etags = {name: f'"{sha256(json.dumps(form).encode()).hexdigest()}"' for name, form in forms.items()}

    async def show(request: Request) -> Response:
        given = request.headers.get(VERSION_HEADER)
        asked = fixed or (version_of(given) if given else "")
        name = asked if asked in forms else ""
        headers = {"ETag": etags[name], "Last-Modified": since, "Cache-Control": CARD_CACHE, "Vary": VERSION_HEADER}
        response = JSONResponse(forms[name], headers=headers)
        is_known = StaticFiles().is_not_modified(response.headers, request.headers)
        return NotModifiedResponse(response.headers) if is_known else response

    return show


def extended_card(options: "ServerOptions") -> AgentCard | None:
    """Return the card for authenticated clients; None if it would not add anything."""
    if not options.is_extended:
        return None
    card = agent_card(options)
    setup = AgentExtension(uri=SETUP, description="The agent's configuration; cannot be requested.")
    setup.params.update(dict(options.setup))
    card.capabilities.extensions.append(setup)
    return card


def _interfaces(options: "ServerOptions") -> list[AgentInterface]:
    bindings = [("JSONRPC", options.url), ("HTTP+JSON", options.url.rstrip("/"))]
    if options.grpc_url is not None:
        bindings.append(("GRPC", options.grpc_url))
    return [
        AgentInterface(url=url, protocol_binding=binding, protocol_version=version)
        for version in options.versions
        for binding, url in bindings
    ]


def _skills(options: "ServerOptions") -> list[AgentSkill]:
    """Return the agent's skills; an operator's skill replaces a default skill with the same ID."""
    own = [_operator_skill(skill, options.input_modes) for skill in options.skills]
    taken = {skill.id for skill in own}
    return [*(skill for skill in _default_skills(options.input_modes) if skill.id not in taken), *own]


def _operator_skill(skill: Skill, input_modes: Sequence[str]) -> AgentSkill:
    return AgentSkill(
        id=skill.folder.name,
        name=skill.name,
        description=skill.description,
        tags=["skill"],
        # Codex adds the whole skill to a turn whose message contains this name.
        examples=[f"Use ${skill.name}."],
        input_modes=input_modes,
        output_modes=OUTPUT_MODES,
    )


def _default_skills(input_modes: Sequence[str]) -> list[AgentSkill]:
    return [
        AgentSkill(
            id="code",
            name="Work on the code",
            description="Writes, changes, runs and tests code in the agent's workspace.",
            tags=["code", "shell", "files"],
            examples=["Add a test for the parser and run it.", "Rename `load` to `read` everywhere."],
            input_modes=input_modes,
            output_modes=OUTPUT_MODES,
        ),
        AgentSkill(
            id="review",
            name="Review a change",
            description="Reviews a change, or the state of the workspace, and reports problems.",
            tags=["code", "review"],
            examples=["Review the last commit.", "What could go wrong with this patch?"],
            input_modes=input_modes,
            output_modes=["text/plain"],
        ),
        AgentSkill(
            id="explain",
            name="Explain the code",
            description="Answers questions about the code in the workspace.",
            tags=["code", "questions"],
            examples=["What does this repository do?", "Where is the configuration read?"],
            input_modes=input_modes,
            output_modes=["text/plain"],
        ),
    ]


def _secure(card: AgentCard) -> None:
    bearer = HTTPAuthSecurityScheme(scheme="bearer", description="A token issued by the operator")
    key = APIKeySecurityScheme(
        location="header", name=API_KEY_HEADER, description="The same token, for clients without bearer tokens"
    )
    schemes = {
        "bearer": SecurityScheme(http_auth_security_scheme=bearer),
        "apiKey": SecurityScheme(api_key_security_scheme=key),
    }
    for name, scheme in schemes.items():
        card.security_schemes[name].CopyFrom(scheme)
        # Two requirements: one of them is enough.
        card.security_requirements.append(SecurityRequirement(schemes={name: StringList()}))


def card_signer(file: Path, place: ConfigLocation) -> Signer:
    """Return a function that signs a card with the private key in a PEM file; `place` is the setting's location.

    The signature's `kid` is the start of the SHA-256 of the public key (DER, SubjectPublicKeyInfo).

    Raises:
        ConfigError: the file cannot be read, or contains no ES256 key.
    """
    # Imported only if needed: it takes 30 ms.
    from a2a.utils.signing import ProtectedHeader, create_agent_card_signer
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        pem = read_config_file(file)
    except OSError as error:
        raise place.error(
            f"names {file}, which cannot be read ({error.strerror}); it must be a PEM file that this user may read"
        ) from error
    key: object = None
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):
        key = load_pem_private_key(pem, password=None)
    if not (isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP256R1)):
        raise place.error(
            f"names {file}, which contains no private key for ES256; create one with `openssl ecparam -name "
            "prime256v1 -genkey -noout`"
        )
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    # jku is left out: it must be an HTTPS URL of the key, and null is not valid.
    header: ProtectedHeader = {"alg": "ES256", "kid": sha256(public).hexdigest()[:16], "typ": "JOSE"}  # type: ignore[typeddict-item]
    sign: Signer = create_agent_card_signer(pem, header)
    return sign
