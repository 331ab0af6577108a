"""The JSON Schema (2020-12) of config.yaml, for editors; config.schema.json is a copy of it.

The agent also rejects what the schema cannot express: missing files, folders and variables, duplicate names, and whole
numbers such as 8000.0.
"""

import json
from collections.abc import Mapping
from typing import Final, cast

from codex_workspace.common.values import JsonObject
from codex_workspace.config.environment import ENVIRONMENT
from codex_workspace.config.providers import RESERVED_SLUGS
from codex_workspace.config.settings import OPERATOR, Config
from codex_workspace.config.validation import schema_of

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> JsonObject:
    """Return the schema of the whole file."""
    schema = schema_of(Config)
    properties = cast("Mapping[str, JsonObject]", schema["properties"])
    for name, rules in _BETWEEN_KEYS.items():
        section = cast("JsonObject", properties[name].get("items", properties[name]))
        section["allOf"] = [*rules]
    return {"$schema": DIALECT, "title": "config.yaml of codex-workspace"} | schema


def as_text() -> str:
    """Return the schema as a JSON document."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


# --- Rules between keys


def _given(key: str) -> JsonObject:
    """Return the schema of mappings that give `key` a value."""
    return {"required": [key], "properties": {key: {"not": {"enum": [None, [], {}]}}}}


def _is(key: str, value: str) -> JsonObject:
    return {"required": [key], "properties": {key: {"const": value}}}


def _none_of(*keys: str) -> JsonObject:
    return {"not": {"anyOf": [_given(key) for key in keys]}}


_REFERENCES: Final = r"^(?:[^$]|\$+[^${]|\$\$+\{|\$\{[A-Za-z_][A-Za-z0-9_]*\})*\$*$"
"""Every `${` belongs to `${NAME}` or to `$${`."""

_AUTHORIZATION: Final = f"^{''.join(f'[{letter.upper()}{letter}]' for letter in 'authorization')}$"
"""The header in any case; JSON Schema has no flag for it."""

_BETWEEN_KEYS: Final[Mapping[str, tuple[JsonObject, ...]]] = {
    "a2a": (
        {"properties": {"protocol_versions": {"minItems": 1, "uniqueItems": True}}},
        {
            "if": _given("signing_key_file"),
            "then": {"required": ["protocol_versions"], "properties": {"protocol_versions": {"const": ["1.0"]}}},
        },
    ),
    "principals": (
        {"oneOf": [_given("token_env"), _given("token_file")]},
        {"properties": {"name": {"not": {"const": OPERATOR}}}},
    ),
    "providers": (
        {"if": _is("auth_mode", "openai_compat_responses"), "then": _given("base_url")},
        {"if": _is("auth_mode", "openai_api"), "then": _none_of("base_url")},
        {
            "properties": {
                "model_provider_slug": {"not": {"enum": [*sorted(RESERVED_SLUGS)]}},
                "auth_env": {"items": {"not": {"enum": [each.name for each in ENVIRONMENT]}}},
            }
        },
    ),
    "codex": (
        {
            "if": _given("writable_folders"),
            "then": {"properties": {"sandbox": {"const": "workspace-write"}}},
        },
    ),
    "mcp_servers": (
        {"oneOf": [_given("command"), _given("url")]},
        {"if": _given("url"), "then": _none_of("args", "env", "cwd")},
        {"if": _given("command"), "then": _none_of("bearer_token_env", "headers")},
        {
            "if": _given("bearer_token_env"),
            "then": {"properties": {"headers": {"propertyNames": {"not": {"pattern": _AUTHORIZATION}}}}},
        },
        {"properties": {key: {"additionalProperties": {"pattern": _REFERENCES}} for key in ("env", "headers")}},
    ),
}
"""Rules that `loading`, `providers` and `mcp_servers` check, by the section or list that they belong to."""
