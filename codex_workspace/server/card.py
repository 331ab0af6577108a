"""The agent's card: what is said to everybody, and what only to those who were let in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

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

from codex_workspace.config.prompts import Skill
from codex_workspace.server.middleware import API_KEY_HEADER

Version = Literal["1.0", "0.3"]

SETUP: Final = "urn:codex-workspace:setup"
"""The extension of the extended card that tells how the agent is set up; it has nothing to ask for."""

OUTPUT_MODES: Final = ("text/plain", "application/json", "text/x-diff", "application/octet-stream")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the card says.

    url, grpc_url: where clients reach the agent; `grpc_url` is host:port, None where gRPC is off.
    versions: of A2A, the preferred one first.
    secured: whether a token has to be shown.
    skills: the operator's, beside what every agent of this kind does.
    setup: what the extended card tells of model, workspace and rules; empty: there is no extended card.
    """

    name: str
    description: str
    version: str
    url: str
    grpc_url: str | None = None
    versions: tuple[Version, ...] = ("1.0", "0.3")
    secured: bool = False
    streaming: bool = True
    push_notifications: bool = False
    input_modes: tuple[str, ...] = ("text/plain",)
    extensions: tuple[AgentExtension, ...] = ()
    skills: tuple[Skill, ...] = ()
    setup: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_extended(self) -> bool:
        """Whether there is more to tell to those who were let in."""
        return self.secured and bool(self.setup)


def agent_card(facts: CardFacts) -> AgentCard:
    """Return the card for everybody; the 0.3 interfaces in it are what old clients look for."""
    card = AgentCard(
        name=facts.name,
        description=facts.description,
        version=facts.version,
        capabilities=AgentCapabilities(
            streaming=facts.streaming,
            push_notifications=facts.push_notifications,
            extended_agent_card=facts.is_extended,
            extensions=facts.extensions,
        ),
        default_input_modes=facts.input_modes,
        default_output_modes=OUTPUT_MODES,
        supported_interfaces=_interfaces(facts),
        skills=_skills(facts),
    )
    if facts.secured:
        _secure(card)
    return card


def extended_card(facts: CardFacts) -> AgentCard | None:
    """Return the card for those who were let in; None where it would tell nothing more."""
    if not facts.is_extended:
        return None
    card = agent_card(facts)
    setup = AgentExtension(uri=SETUP, description="How this agent is set up; nothing to ask for.")
    setup.params.update(dict(facts.setup))
    card.capabilities.extensions.append(setup)
    return card


def _interfaces(facts: CardFacts) -> list[AgentInterface]:
    bindings = [("JSONRPC", facts.url), ("HTTP+JSON", facts.url.rstrip("/"))]
    if facts.grpc_url is not None:
        bindings.append(("GRPC", facts.grpc_url))
    return [
        AgentInterface(url=url, protocol_binding=binding, protocol_version=version)
        for version in facts.versions
        for binding, url in bindings
    ]


def _skills(facts: CardFacts) -> list[AgentSkill]:
    """Return what the agent can do; an operator's skill takes the place of ours of the same id."""
    own = [_own_skill(skill, facts.input_modes) for skill in facts.skills]
    taken = {skill.id for skill in own}
    return [*(skill for skill in _usual_skills(facts.input_modes) if skill.id not in taken), *own]


def _own_skill(skill: Skill, input_modes: Sequence[str]) -> AgentSkill:
    return AgentSkill(
        id=skill.folder.name,
        name=skill.name,
        description=skill.description,
        tags=["skill"],
        # Codex gives the whole skill to a turn whose message names it so.
        examples=[f"Use ${skill.name}."],
        input_modes=input_modes,
        output_modes=OUTPUT_MODES,
    )


def _usual_skills(input_modes: Sequence[str]) -> list[AgentSkill]:
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
            description="Reads a change, or the state of the workspace, and says what is wrong with it.",
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
    schemes = {
        "bearer": SecurityScheme(
            http_auth_security_scheme=HTTPAuthSecurityScheme(scheme="bearer", description="A token of the operator's")
        ),
        "apiKey": SecurityScheme(
            api_key_security_scheme=APIKeySecurityScheme(
                location="header", name=API_KEY_HEADER, description="The same token, for clients without bearer tokens"
            )
        ),
    }
    for name, scheme in schemes.items():
        card.security_schemes[name].CopyFrom(scheme)
        # Each on its own: one of them is enough.
        card.security_requirements.append(SecurityRequirement(schemes={name: StringList()}))
