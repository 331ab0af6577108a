"""Chooses the model provider, its credential and the model, from the settings and the environment.

Codex reads no API key from the environment (docs/codex-protocol.md). Each provider with a key is therefore a custom one
in config.toml that uses the key that codex receives at its start.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.config.environment import IN_ENVIRONMENT, Secret, read_header_secret
from codex_workspace.config.login import AUTH_NAME, configured_login, stored_login
from codex_workspace.config.settings import ProviderEntry, Settings
from codex_workspace.config.validation import HttpUrl, check_text

AuthMode = Literal["openai_api", "openai_compat_responses", "chatgpt_subscription"]

SUBSCRIPTION: Final = "chatgpt_subscription"
"""The mode whose credential is a login that codex stores and refreshes."""

OPENAI_BASE_URL = "https://api.openai.com/v1"
"""The endpoint of `openai_api` unless the environment variable of this name is set."""

CHATGPT_BASE_URL = "https://chatgpt.com/backend-api/codex"
"""The endpoint of `chatgpt_subscription`."""


@dataclass(frozen=True, slots=True)
class ChosenProvider:
    """The provider that codex uses.

    slug: its name in config.toml. env_key, credential: where the key or login was found, a variable of ours for one,
    and what it is; both None where none is needed. model: the id for the wire. reason: one sentence for log and doctor.
    """

    name: str
    auth_mode: AuthMode
    slug: str
    base_url: str
    env_key: str | None
    credential: Secret | None
    model: str
    reason: str


BUILT_IN: tuple[ProviderEntry, ...] = (
    ProviderEntry(
        name="openai",
        auth_mode="openai_api",
        auth_env=("OPENAI_API_KEY", "CODEX_API_KEY"),
        model_prefixes=("gpt-", "o", "codex-"),
    ),
    ProviderEntry(
        name="chatgpt",
        auth_mode="chatgpt_subscription",
        auth_env=("CODEX_AUTH_JSON", "CODEX_CHATGPT_AUTH_JSON"),
    ),
)


@dataclass(frozen=True, slots=True)
class _Found:
    """A credential and the variable it belongs to; both None for a provider that needs none."""

    env_key: str | None
    credential: Secret | None


def registry(settings: Settings) -> tuple[ProviderEntry, ...]:
    """Return the operator's entries in their order, then the built-in ones that no entry replaces by name."""
    variables = {provider.auth_mode: provider.auth_env for provider in BUILT_IN}
    own = [
        entry if entry.auth_env else entry.model_copy(update={"auth_env": variables.get(entry.auth_mode, ())})
        for entry in settings.config.providers
    ]
    names = {entry.name for entry in own}
    return (*own, *(provider for provider in BUILT_IN if provider.name not in names))


def choose_provider(settings: Settings, env: Mapping[str, str]) -> ChosenProvider:
    """Return the provider to use. In this order:

    1. the one that `runtime_config.provider` names,
    2. a subscription whose login is configured,
    3. the one that the model's name selects, if its credential is set,
    4. the first one whose credential is set,
    5. a subscription whose login is in CODEX_HOME.

    Reads the files that `…_FILE` variables in `env` name.

    Raises:
        ConfigError: the choice is impossible; with the remedy.
    """
    providers = registry(settings)
    _refuse_provider_as_model(settings, providers)
    _refuse_missing(settings, env, providers)
    if name := settings.config.runtime_config.provider:
        return _explicit(settings, env, providers, name)
    subscriptions = [provider for provider in providers if provider.auth_mode == SUBSCRIPTION]
    usable = [provider for provider in providers if provider.auth_mode != SUBSCRIPTION]
    for provider in subscriptions:
        if found := _find_credential(provider, env):
            return _chosen(settings, env, provider, found, "a subscription's login is handed in")
    for provider, match in _matching(settings.model, usable):
        if found := _find_credential(provider, env):
            return _chosen(settings, env, provider, found, f"the model {settings.model} matches its {match}")
    for provider in usable:
        if found := _find_credential(provider, env):
            why = (
                f"no provider that matches the model {settings.model} has a credential, and this is the first that has"
            )
            return _chosen(settings, env, provider, found, why)
    for provider in subscriptions:
        if found := _left_login(settings):
            why = "no provider has a credential, and CODEX_HOME holds a subscription's login still"
            return _chosen(settings, env, provider, found, why)
    names = [name for provider in (*usable, *subscriptions) for name in provider.auth_env]
    raise IN_ENVIRONMENT.error(f"no provider has a credential; set {_one_of(names)} (each also as …_FILE)")


def _refuse_provider_as_model(settings: Settings, providers: Sequence[ProviderEntry]) -> None:
    model = settings.model
    named = [provider.name for provider in providers if re.match(rf"{re.escape(provider.name)}[:/]", model)]
    aliased = any(model in provider.model_aliases for provider in providers)
    if not aliased and any(model == provider.name for provider in providers):
        raise ConfigError(
            f"{settings.model_source}: {model} is a provider, not a model; "
            f"name it as runtime_config.provider, and a model such as gpt-5.5 here"
        )
    if not aliased and named and not any(_begins(model, provider) for provider in providers):
        raise ConfigError(
            f"{settings.model_source}: {model} begins with a provider's name; "
            f"name {named[0]} as runtime_config.provider, and here the model alone"
        )


def _refuse_missing(settings: Settings, env: Mapping[str, str], providers: Sequence[ProviderEntry]) -> None:
    """Reject variables of `required_env` that are not set, except the providers' own."""
    credentials = {name for provider in providers for name in provider.auth_env}
    place = ConfigLocation(str(settings.config_file)).at("runtime_config.required_env")
    for index, name in enumerate(settings.config.runtime_config.required_env):
        if name not in credentials and not (env.get(name) or env.get(f"{name}_FILE")):
            raise place.item(index).error(f"names the variable {name}, which is not set; set it (or {name}_FILE)")


def _begins(model: str, provider: ProviderEntry) -> bool:
    """Return whether a prefix with a provider's name in it, such as `openai/`, selects this model."""
    long = [prefix for prefix in provider.model_prefixes if re.search("[:/]", prefix)]
    return any(model.startswith(prefix) for prefix in long)


def _explicit(
    settings: Settings, env: Mapping[str, str], providers: Sequence[ProviderEntry], name: str
) -> ChosenProvider:
    place = ConfigLocation(str(settings.config_file)).at("runtime_config.provider")
    provider = next((each for each in providers if each.name == name), None)
    if provider is None:
        names = [each.name for each in providers]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise place.error(f"must be one of {', '.join(names)}, but is {name!r}{hint}")
    found = _find_credential(provider, env)
    if found is None and provider.auth_mode == SUBSCRIPTION:
        found = _left_login(settings)
    if found is None:
        raise place.error(f"{name} has no credential; set {_one_of(provider.auth_env)} (each also as …_FILE)")
    return _chosen(settings, env, provider, found, "runtime_config.provider names it")


def _matching(model: str, providers: Iterable[ProviderEntry]) -> list[tuple[ProviderEntry, str]]:
    """Return the providers that the model's name selects, and how; best first: aliases, then longer prefixes."""
    ranked: list[tuple[int, ProviderEntry, str]] = []
    for provider in providers:
        prefixes = [prefix for prefix in provider.model_prefixes if model.startswith(prefix)]
        if model in provider.model_aliases:
            ranked.append((len(model) + 1, provider, f"alias {model}"))
        elif prefixes:
            longest = max(prefixes, key=len)
            ranked.append((len(longest), provider, f"prefix {longest}"))
    return [(provider, match) for _, provider, match in sorted(ranked, key=lambda each: -each[0])]


def _find_credential(provider: ProviderEntry, env: Mapping[str, str]) -> _Found | None:
    """Return the first of the provider's variables that is set; None if it needs one and none is set."""
    if provider.auth_mode == SUBSCRIPTION:
        login = configured_login(env, provider.auth_env)
        return None if login is None else _Found(*login)
    if not provider.auth_env:
        return _Found(None, None)
    for name in provider.auth_env:
        credential = read_header_secret(env, name)
        if credential is not None:
            return _Found(name, credential)
    return None


def _left_login(settings: Settings) -> _Found | None:
    login = stored_login(settings.codex_home)
    return None if login is None else _Found(f"{AUTH_NAME} in CODEX_HOME", login)


def _chosen(
    settings: Settings, env: Mapping[str, str], provider: ProviderEntry, found: _Found, why: str
) -> ChosenProvider:
    return ChosenProvider(
        name=provider.name,
        auth_mode=provider.auth_mode,
        slug=provider.slug,
        base_url=provider.base_url
        or (CHATGPT_BASE_URL if provider.auth_mode == SUBSCRIPTION else _openai_base_url(env)),
        env_key=found.env_key,
        credential=found.credential,
        model=provider.model_id_override or settings.model,
        reason=f"provider {provider.name}: {why}; credential: {found.env_key or 'none needed'}",
    )


def _openai_base_url(env: Mapping[str, str]) -> str:
    value = env.get("OPENAI_BASE_URL")
    if not value:
        return OPENAI_BASE_URL
    return check_text(HttpUrl, value, IN_ENVIRONMENT.at("OPENAI_BASE_URL"))


def _one_of(names: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(names))
