"""Chooses the model provider, its credential and the model, from the settings and the environment.

Codex reads no API key from the environment (docs/codex-protocol.md). Each provider with a key is therefore a custom one
in config.toml that uses the key that codex receives at its start.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.common.files import read_config_file
from codex_workspace.config.environment import IN_ENVIRONMENT, Secret, VariableNotSet, read_header_secret
from codex_workspace.config.login import AUTH_NAME, configured_login, stored_login
from codex_workspace.config.provider_entry import ProviderEntry
from codex_workspace.config.settings import Settings
from codex_workspace.config.validation import HttpUrl, check_text, did_you_mean

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

    slug: its name in config.toml. env_key, credential: the variable or file with the key or login, and its content;
    None if none is needed. model: the model's name in requests. reason: one sentence for log and doctor.
    overrides: what the entry says of its models, as `-c` settings of codex.
    """

    name: str
    auth_mode: AuthMode
    slug: str
    base_url: str
    env_key: str | None
    credential: Secret | None
    model: str
    reason: str
    overrides: Mapping[str, str] = field(default_factory=dict)


BUILT_IN: tuple[ProviderEntry, ...] = (
    ProviderEntry(
        name="openai",
        auth_mode="openai_api",
        auth_env=("OPENAI_API_KEY", "CODEX_API_KEY"),
        model_prefixes=("gpt-", "o", "codex-"),
    ),
    ProviderEntry(
        name="chatgpt", auth_mode="chatgpt_subscription", auth_env=("CODEX_AUTH_JSON", "CODEX_CHATGPT_AUTH_JSON")
    ),
)


_Credential = tuple[str | None, Secret | None]
"""The variable of a credential, and its content; both None for a provider that needs none."""


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
    _reject_provider_as_model(settings, providers)
    _reject_missing(settings, env, providers)
    named = _named(settings, providers)
    candidates = _ranked(settings.model, providers) if named is None else [(named, "runtime_config.provider names it")]
    for provider, why in candidates:
        if found := _find_credential(provider, env):
            return _chosen(settings, env, provider, found, why)
    stored = stored_login(settings.codex_home)
    for provider, why in candidates:
        if provider.auth_mode == SUBSCRIPTION and stored is not None:
            found = f"{AUTH_NAME} in CODEX_HOME", stored
            why = why if named else "no provider has a credential, and CODEX_HOME contains a subscription's login"
            return _chosen(settings, env, provider, found, why)
    names = dict.fromkeys(name for provider in ([named] if named else providers) for name in provider.auth_env)
    remedy = f"set {' or '.join(names)} (each also as …_FILE)"
    if named:
        raise _location(settings, "runtime_config.provider").error(f"{named.name} has no credential; {remedy}")
    raise IN_ENVIRONMENT.error(f"no provider has a credential; {remedy}")


def _location(settings: Settings, key: str) -> ConfigLocation:
    return ConfigLocation(str(settings.config_file)).at(key)


def _reject_provider_as_model(settings: Settings, providers: Sequence[ProviderEntry]) -> None:
    """Reject a provider's name as the model or before it, unless an entry's aliases or prefixes contain it."""
    model = settings.model
    if any(model in provider.model_aliases for provider in providers):
        return
    prefixes = [prefix for provider in providers for prefix in provider.model_prefixes if re.search("[:/]", prefix)]
    for provider in providers:
        if model == provider.name:
            problem = "is a provider, not a model"
        elif model.startswith((f"{provider.name}:", f"{provider.name}/")) and not model.startswith(tuple(prefixes)):
            problem = "begins with a provider's name"
        else:
            continue
        raise ConfigError(
            f"{settings.model_source}: {model} {problem}; "
            f"name {provider.name} as runtime_config.provider, and a model such as gpt-5.5 here"
        )


def _reject_missing(settings: Settings, env: Mapping[str, str], providers: Sequence[ProviderEntry]) -> None:
    """Reject variables of `required_env` that are not set, except the providers' own."""
    credentials = {name for provider in providers for name in provider.auth_env}
    for index, name in enumerate(settings.config.runtime_config.required_env):
        if name not in credentials and not (env.get(name) or env.get(f"{name}_FILE")):
            raise VariableNotSet(name, _location(settings, "runtime_config.required_env").item(index))


def _named(settings: Settings, providers: Sequence[ProviderEntry]) -> ProviderEntry | None:
    """Return the provider that `runtime_config.provider` names; None if it names none."""
    name = settings.config.runtime_config.provider
    known = {provider.name: provider for provider in providers}
    if name is None or name in known:
        return known.get(name or "")
    raise _location(settings, "runtime_config.provider").error(
        f"must be one of {', '.join(known)}, but is {name!r}{did_you_mean(name, known)}"
    )


def _ranked(model: str, providers: Sequence[ProviderEntry]) -> list[tuple[ProviderEntry, str]]:
    """Return the providers in the order of choice, each with the reason.

    Those that the model's name selects are ordered by alias, then by the length of the prefix.
    """
    subscriptions = [provider for provider in providers if provider.auth_mode == SUBSCRIPTION]
    others = [provider for provider in providers if provider.auth_mode != SUBSCRIPTION]
    matching: list[tuple[int, ProviderEntry, str]] = []
    for provider in others:
        prefixes = [prefix for prefix in provider.model_prefixes if model.startswith(prefix)]
        if model in provider.model_aliases:
            matching.append((len(model) + 1, provider, f"alias {model}"))
        elif prefixes:
            longest = max(prefixes, key=len)
            matching.append((len(longest), provider, f"prefix {longest}"))
    matching.sort(key=lambda each: -each[0])
    first = f"no provider that matches the model {model} has a credential, and this is the first provider with one"
    return [
        *((provider, "a subscription's login is configured") for provider in subscriptions),
        *((provider, f"the model {model} matches its {match}") for _, provider, match in matching),
        *((provider, first) for provider in others),
    ]


def _find_credential(provider: ProviderEntry, env: Mapping[str, str]) -> _Credential | None:
    """Return the first of the provider's variables that is set; None if it needs one and none is set."""
    if provider.auth_mode == SUBSCRIPTION:
        return configured_login(env, provider.auth_env)
    if not provider.auth_env:
        return None, None
    for name in provider.auth_env:
        credential = read_header_secret(env, name)
        if credential is not None:
            return name, credential
    return None


def _chosen(
    settings: Settings, env: Mapping[str, str], provider: ProviderEntry, found: _Credential, why: str
) -> ChosenProvider:
    env_key, credential = found
    base_url = CHATGPT_BASE_URL if provider.auth_mode == SUBSCRIPTION else OPENAI_BASE_URL
    if provider.auth_mode == "openai_api" and env.get("OPENAI_BASE_URL"):
        base_url = check_text(HttpUrl, env["OPENAI_BASE_URL"], IN_ENVIRONMENT.at("OPENAI_BASE_URL"))
    return ChosenProvider(
        name=provider.name,
        auth_mode=provider.auth_mode,
        slug=provider.slug,
        base_url=provider.base_url or base_url,
        env_key=env_key,
        credential=credential,
        model=provider.model_id_override or settings.model,
        reason=f"provider {provider.name}: {why}; credential: {env_key or 'none needed'}",
        overrides=_model_overrides(settings, provider),
    )


def _model_overrides(settings: Settings, provider: ProviderEntry) -> dict[str, str]:
    values = {
        "model_context_window": provider.context_window,
        "model_auto_compact_token_limit": provider.auto_compact_token_limit,
        "model_catalog_json": provider.model_catalog_file
        and _catalog(settings, provider.name, provider.model_catalog_file),
    }
    return {key: json.dumps(value) for key, value in values.items() if value is not None}


def _catalog(settings: Settings, provider: str, name: str) -> str:
    file = settings.config_file.parent / name
    try:
        read_config_file(file)
    except OSError as error:
        place = _location(settings, f"providers: {provider}.model_catalog_file")
        raise place.error(f"names {file}, which cannot be read ({error.strerror}); correct the path") from error
    return str(file)
