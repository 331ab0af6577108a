"""The peers of config.yaml: A2A agents that the model may send tasks to, and their tokens.

The model names a peer, never an address; no other agents are called.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from codex_workspace.common.errors import ConfigLocation
from codex_workspace.config.environment import Secret, read_header_secret
from codex_workspace.config.validation import EnvName, HttpUrl, Section, Slug


class PeerEntry(Section):
    """An A2A agent that the model may send tasks to.

    name: The peer's name for the model.
    url: The peer's address.
    description: What the peer is good for, for the model; the default is the description on its card.
    token_env: The variable with the bearer token for the peer, or NAME of NAME_FILE.
    allow_private: Allow an address that is not public, such as this machine's or a container network's.
    """

    name: Slug
    url: HttpUrl
    description: str = ""
    token_env: EnvName | None = None
    allow_private: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer with its token; fields as in `PeerEntry`."""

    name: str
    url: str
    description: str = ""
    token: Secret | None = None
    allow_private: bool = False


def resolve_peers(entries: Iterable[PeerEntry], env: Mapping[str, str], location: ConfigLocation) -> tuple[Peer, ...]:
    """Return the peers with their tokens from `env`. `location` is the location of `entries`, for messages.

    Raises:
        ConfigError: two have the same name, or a token is not set or not valid in a header.
    """
    found: dict[str, Peer] = {}
    for index, entry in enumerate(entries):
        here = location.item(index)
        found[entry.name] = Peer(
            entry.name, entry.url, entry.description, _token(entry.token_env, env, here), entry.allow_private
        )
    return tuple(found.values())


def _token(name: str | None, env: Mapping[str, str], here: ConfigLocation) -> Secret | None:
    if name is None:
        return None
    token = read_header_secret(env, name)
    if token is None:
        raise here.at("token_env").error(f"names the variable {name}, which is not set; set it (or {name}_FILE)")
    return token
