"""The JSON Schema (2020-12) of config.yaml, made of the dataclasses that `settings` reads it into.

Editors complete and check by it; config.schema.json is a copy for them. It takes all that the agent takes. What it
cannot say the agent still refuses: what depends on the machine (files, folders, variables), two entries with one name,
and a whole number that is written 8000.0.
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Final, Literal

from codex_workspace.common.a2a_terms import OPERATOR
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.environment import ENVIRONMENT
from codex_workspace.config.mcp_servers import McpServerEntry
from codex_workspace.config.providers import RESERVED_SLUGS
from codex_workspace.config.settings import A2AConfig, CodexConfig, Config, PrincipalEntry, ProviderEntry
from codex_workspace.config.validation import Matches, Range, choices, unfold, without_none

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_TYPES: Final[Mapping[object, str]] = {str: "string", bool: "boolean", int: "integer", float: "number"}
_KEY: Final = r"[a-z][a-z0-9_]*(?: \(\w+\))?"
_ABOUT_KEYS: Final = re.compile(rf"({_KEY}(?:, {_KEY})*): (.*)")


def config_schema() -> JsonObject:
    """Return the schema of the whole file."""
    return {"$schema": DIALECT, "title": "config.yaml of codex-workspace"} | _section(Config)


def as_text() -> str:
    """Return the schema as a file holds it."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


def _section(cls: type) -> JsonObject:
    """Return the schema of a mapping that is read into the dataclass `cls`."""
    about, of_keys = _docstring(cls)
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    properties: JsonObject = {each.name: _key(each, hints[each.name], of_keys.get(each.name)) for each in fields}
    ignored: frozenset[str] = getattr(cls, "IGNORED", frozenset())
    for name in sorted(ignored):
        properties[name] = {"description": "the platform's; it means nothing to this agent"}
    required: list[JsonValue] = [each.name for each in fields if _is_required(each)]
    return {
        "description": about,
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
        **({"allOf": [*_BETWEEN_KEYS[cls]]} if cls in _BETWEEN_KEYS else {}),
    }


def _key(field: "dataclasses.Field[object]", kind: object, description: str | None) -> JsonObject:
    told: JsonObject = {} if description is None else {"description": description}
    if field.default is not dataclasses.MISSING:
        told["default"] = _as_json(field.default)
    elif field.default_factory is dict:
        told["default"] = {}
    return _of(kind) | told


def _is_required(field: "dataclasses.Field[object]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _as_json(default: object) -> JsonValue:
    match default:
        case None | bool() | int() | str():
            return default
        case float():
            return _number(default)
        case tuple():
            return [_as_json(each) for each in default]
        case _:
            raise TypeError(f"no default of config.yaml: {default!r}")


def _number(value: float) -> float:
    """Return `value`, a whole one without the point that nobody would write."""
    return int(value) if value == int(value) else value


def _of(kind: object) -> JsonObject:
    """Return the schema of what is read as `kind`."""
    base, rules = unfold(kind)
    origin = typing.get_origin(base)
    if origin in (types.UnionType, typing.Union):
        schema = _of(without_none(base))
        return {**schema, "type": [schema["type"], "null"]}
    if origin is Literal:
        return {"type": "string", "enum": [*choices(kind)]}
    if origin is tuple:
        return {"type": "array", "items": _of(typing.get_args(base)[0])}
    if origin is Mapping:
        of_key, of_value = typing.get_args(base)
        return {"type": "object", "propertyNames": _of(of_key), "additionalProperties": _of(of_value)}
    if isinstance(base, type) and dataclasses.is_dataclass(base):
        return _section(base)
    schema = {"type": _TYPES[base]}
    for rule in rules:
        match rule:
            case Range(low, high):
                schema |= {"minimum": _number(low), "maximum": _number(high)}
            case Matches(pattern, _):
                schema["pattern"] = f"^(?:{pattern})$"
            case _:
                raise TypeError(f"no rule of JSON Schema's: {rule!r}")
    return schema


def _docstring(cls: type) -> tuple[str, dict[str, str]]:
    """Return a docstring's first paragraph, and what the lines `key, other (unit): …` behind it say of each key."""
    first, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    of_keys: dict[str, str] = {}
    for line in re.sub(r"\n +", " ", rest).splitlines():
        if found := _ABOUT_KEYS.fullmatch(line):
            for key in found[1].split(", "):
                name, _, unit = key.partition(" ")
                of_keys[name] = f"{found[2]} {unit}".strip()
    return " ".join(first.split()), of_keys


# What keys mean for each other.


def _given(key: str) -> JsonObject:
    """Return a schema of the mappings in which `key` stands with a value."""
    return {"required": [key], "properties": {key: {"not": {"enum": [None, [], {}]}}}}


def _is(key: str, value: str) -> JsonObject:
    return {"required": [key], "properties": {key: {"const": value}}}


def _none_of(*keys: str) -> JsonObject:
    return {"not": {"anyOf": [_given(key) for key in keys]}}


_REFERENCES: Final = r"^(?:[^$]|\$+[^${]|\$\$+\{|\$\{[A-Za-z_][A-Za-z0-9_]*\})*\$*$"
"""Every `${` is one of `${NAME}`, or of `$${`."""

_AUTHORIZATION: Final = f"^{''.join(f'[{letter.upper()}{letter}]' for letter in 'authorization')}$"
"""That header, in whatever case: the patterns of JSON Schema have no switch for it."""

_BETWEEN_KEYS: Final[Mapping[type, tuple[JsonObject, ...]]] = {
    A2AConfig: (
        {"properties": {"protocol_versions": {"minItems": 1, "uniqueItems": True}}},
        {
            "if": _given("signing_key_file"),
            "then": {"required": ["protocol_versions"], "properties": {"protocol_versions": {"const": ["1.0"]}}},
        },
    ),
    PrincipalEntry: (
        {"oneOf": [_given("token_env"), _given("token_file")]},
        {"properties": {"name": {"not": {"const": OPERATOR}}}},
    ),
    ProviderEntry: (
        {"if": _is("auth_mode", "openai_compat_responses"), "then": _given("base_url")},
        {"if": _is("auth_mode", "openai_api"), "then": _none_of("base_url")},
        {
            "properties": {
                "model_provider_slug": {"not": {"enum": [*sorted(RESERVED_SLUGS)]}},
                "auth_env": {"items": {"not": {"enum": [each.name for each in ENVIRONMENT]}}},
            }
        },
    ),
    CodexConfig: (
        {
            "if": _given("writable_folders"),
            "then": {"properties": {"sandbox": {"const": "workspace-write"}}},
        },
    ),
    McpServerEntry: (
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
"""Rules that `settings`, `providers` and `mcp_servers` hold two or more keys to."""
