"""A model provider in config.yaml."""

import re
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from codex_workspace.config.environment import SECRETS, Environment
from codex_workspace.config.validation import EnvName, HttpUrl, Items, Section, Slug, Text, problem

RESERVED_SLUGS: Final = frozenset({"openai", "ollama", "ollama-chat", "lmstudio", "amazon-bedrock"})
"""Codex's built-in providers; codex rejects a config.toml that defines one of them (0.163)."""


Tokens = Annotated[int, Field(ge=1000, le=100_000_000)]


class ProviderEntry(Section):
    """A model provider.

    name: The name for runtime_config.provider. A built-in provider of the same name is replaced.
    auth_mode: OpenAI by API key, any endpoint with the Responses API, or a ChatGPT subscription.
    base_url: The endpoint; not for openai_api, which uses OPENAI_BASE_URL.
    auth_env: Variables with the credential; the first one that is set is used. The default is the built-in provider's
        variables for this auth_mode; none for another endpoint.
    wire_api: The API of the endpoint.
    model_prefixes, model_aliases: Models that select this provider, by the beginning of their name or by their name.
    model_provider_slug: The provider's name in codex's config.toml; derived from name by default.
    model_id_override: The model's name in requests.
    context_window: The tokens that a model of this provider can process at once. Codex has a lower limit for models
        that it does not know.
    auto_compact_token_limit: Codex summarizes a conversation of this many tokens; by default, of 90% of the window.
    model_catalog_file: A JSON file that describes the models to codex, relative to config.yaml's folder; replaces
        codex's own list.
    """

    name: Text
    auth_mode: Literal["openai_api", "openai_compat_responses", "chatgpt_subscription"]
    base_url: HttpUrl | None = None
    auth_env: Items[EnvName] = ()
    wire_api: Literal["responses"] = "responses"
    model_prefixes: Items[Text] = ()
    model_aliases: Items[Text] = ()
    model_provider_slug: Slug | None = None
    model_id_override: Text | None = None
    context_window: Tokens | None = None
    auto_compact_token_limit: Tokens | None = None
    model_catalog_file: Text | None = None

    @property
    def slug(self) -> str:
        """The provider's name in codex's config.toml."""
        derived = re.sub(r"[^A-Za-z0-9_-]", "_", self.name)[:60]
        return self.model_provider_slug or (f"{derived}_api" if derived in RESERVED_SLUGS else derived)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.auth_mode == "openai_compat_responses" and self.base_url is None:
            raise problem("is missing; auth_mode openai_compat_responses needs an http(s) URL", "base_url")
        if self.auth_mode == "openai_api" and self.base_url is not None:
            raise problem("has no effect with auth_mode openai_api; set OPENAI_BASE_URL instead", "base_url")
        if self.model_provider_slug in RESERVED_SLUGS:
            raise problem(
                f"must not be a built-in provider of codex ({', '.join(sorted(RESERVED_SLUGS))})", "model_provider_slug"
            )
        for index, name in enumerate(self.auth_env):
            if name in SECRETS or name in Environment.model_fields:
                raise problem(
                    f"must be a variable of the provider, but {name} belongs to the agent", f"auth_env[{index}]"
                )
        return self
