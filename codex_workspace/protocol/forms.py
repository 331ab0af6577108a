"""The forms of MCP servers: reads their fields from a JSON Schema, and validates content against them.

MCP permits a flat object of primitive fields. Source: `McpElicitationSchema` of `codex app-server generate-json-schema`
(0.163), MCP 2025-11-25.
"""

import json
import math
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from codex_workspace.common.values import (
    InvalidField,
    JsonObject,
    JsonValue,
    nested,
    number_or_none,
    objects,
    text,
    text_or_none,
    texts,
)

MAX_FIELDS: Final = 100
"""A form with more fields is declined; no person would fill it in."""

_MAX_SHOWN: Final = 20
"""How many choices or fields a sentence names."""

_MAX_WORD_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the values that a field permits, and its title for people."""

    value: str
    title: str


@dataclass(frozen=True, slots=True)
class TextField:
    """A text, or one of `choices` if there are any; lengths are in characters."""

    choices: tuple[Choice, ...] = ()
    min_length: int | None = None
    max_length: int | None = None
    format: str | None = None


@dataclass(frozen=True, slots=True)
class NumberField:
    """A number, or an integer if `whole` is set; the bounds are inclusive."""

    whole: bool = False
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class BooleanField:
    """True or false."""


@dataclass(frozen=True, slots=True)
class MultiChoice:
    """A list of values from `choices`."""

    choices: tuple[Choice, ...]
    min_items: int | None = None
    max_items: int | None = None


FieldType: TypeAlias = TextField | NumberField | BooleanField | MultiChoice


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form; `title` is its name if the server gave none."""

    name: str
    title: str
    description: str | None
    required: bool
    type: FieldType


class InvalidContent(ValueError):
    """Content that does not match its form; the message is for a person and names the field."""


def read_fields(schema: JsonObject) -> tuple[Field, ...]:
    """Return the fields of a form in the order of its schema.

    Raises:
        InvalidField: a field has an unknown type, the form is too long, or it requires a field that it does not have.
    """
    properties = nested(schema, "properties")
    required = set(texts(schema, "required"))
    if len(properties) > MAX_FIELDS or not required <= set(properties):
        raise InvalidField("properties")
    return tuple(_read_field(name, nested(properties, name), name in required) for name in properties)


def _read_field(name: str, schema: JsonObject, required: bool) -> Field:
    return Field(
        name, text_or_none(schema, "title") or name, text_or_none(schema, "description"), required, _type(schema)
    )


def _type(schema: JsonObject) -> FieldType:
    match text(schema, "type"):
        case "string":
            return TextField(
                _choices(schema, "oneOf"),
                number_or_none(schema, "minLength"),
                number_or_none(schema, "maxLength"),
                text_or_none(schema, "format"),
            )
        case "number":
            return NumberField(False, _bound(schema, "minimum"), _bound(schema, "maximum"))
        case "integer":
            return NumberField(True, _bound(schema, "minimum"), _bound(schema, "maximum"))
        case "boolean":
            return BooleanField()
        case "array":
            choices = _choices(nested(schema, "items"), "anyOf")
            if not choices:
                raise InvalidField("items")
            return MultiChoice(choices, number_or_none(schema, "minItems"), number_or_none(schema, "maxItems"))
        case other:
            raise InvalidField(other)


def _choices(schema: JsonObject, titled: str) -> tuple[Choice, ...]:
    """Return the choices in one of MCP's three forms: constants with titles, an enum with names, or an enum."""
    if titled in schema:
        return tuple(Choice(text(each, "const"), text(each, "title")) for each in objects(schema, titled))
    values, names = texts(schema, "enum"), texts(schema, "enumNames")
    return tuple(map(Choice, values, names if len(names) == len(values) else values))


def _bound(schema: JsonObject, key: str) -> float | None:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def validate(fields: tuple[Field, ...], content: JsonObject) -> JsonObject:
    """Return `content` as the form requires it, with integers as such (A2A sends all numbers as floats).

    A field that is not required may be missing or null.

    Raises:
        InvalidContent: a field is missing, is unknown, or has a value that it does not permit.
    """
    unknown = sorted(set(content) - {field.name for field in fields})
    if unknown:
        raise InvalidContent(
            f"The form has no field {format_value(unknown[0])}; its fields are: {field_names(fields)}."
        )
    given = {name: value for name, value in content.items() if value is not None}
    missing = tuple(field for field in fields if field.required and field.name not in given)
    if missing:
        raise InvalidContent(f"The form needs a value for {field_names(missing)}.")
    return {field.name: _checked(field, given[field.name]) for field in fields if field.name in given}


def _checked(field: Field, value: JsonValue) -> JsonValue:
    match field.type:
        case TextField() as words:
            return _checked_words(format_value(field.name), words, value)
        case NumberField() as number:
            return _checked_number(format_value(field.name), number, value)
        case BooleanField():
            if not isinstance(value, bool):
                raise InvalidContent(f"{format_value(field.name)} has to be true or false.")
            return value
        case MultiChoice() as several:
            return _checked_several(format_value(field.name), several, value)
        case _:
            assert_never(field.type)


def _checked_words(name: str, words: TextField, value: JsonValue) -> str:
    if not isinstance(value, str):
        raise InvalidContent(f"{name} has to be a text.")
    if words.choices:
        return _chosen(name, words.choices, value)
    if words.min_length is not None and len(value) < words.min_length:
        raise InvalidContent(f"{name} needs at least {words.min_length} characters.")
    if words.max_length is not None and len(value) > words.max_length:
        raise InvalidContent(f"{name} takes at most {words.max_length} characters.")
    return value


def _checked_number(name: str, number: NumberField, value: JsonValue) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidContent(f"{name} has to be a number.")
    if isinstance(value, float):
        if not math.isfinite(value) or (number.whole and not value.is_integer()):
            raise InvalidContent(f"{name} has to be a {'whole' if number.whole else 'finite'} number.")
        value = int(value) if number.whole else value
    if number.minimum is not None and value < number.minimum:
        raise InvalidContent(f"{name} has to be at least {number.minimum}.")
    if number.maximum is not None and value > number.maximum:
        raise InvalidContent(f"{name} has to be at most {number.maximum}.")
    return value


def _checked_several(name: str, several: MultiChoice, value: JsonValue) -> list[JsonValue]:
    if not isinstance(value, list):
        raise InvalidContent(f"{name} has to be a list.")
    if several.min_items is not None and len(value) < several.min_items:
        raise InvalidContent(f"{name} needs at least {several.min_items} of its choices.")
    if several.max_items is not None and len(value) > several.max_items:
        raise InvalidContent(f"{name} takes at most {several.max_items} of its choices.")
    chosen: list[JsonValue] = [_chosen(name, several.choices, each) for each in value]
    return chosen


def _chosen(name: str, choices: tuple[Choice, ...], value: JsonValue) -> str:
    if isinstance(value, str) and any(choice.value == value for choice in choices):
        return value
    raise InvalidContent(f"{name} has to be {list_choices(choices)}.")


def field_names(fields: tuple[Field, ...]) -> str:
    """Return the names of at most twenty of the fields."""
    names = ", ".join(format_value(field.name) for field in fields[:_MAX_SHOWN])
    return names if len(fields) <= _MAX_SHOWN else f"{names} and {len(fields) - _MAX_SHOWN} more"


def list_choices(choices: tuple[Choice, ...]) -> str:
    """Return at most twenty of the choices, in the form: one of: "a", "b"."""
    more = len(choices) - _MAX_SHOWN
    values = ", ".join(format_value(choice.value) for choice in choices[:_MAX_SHOWN])
    return f"one of: {values}" + (f" and {more} more" if more > 0 else "")


def format_value(word: str) -> str:
    """Return an untrusted name for a sentence: quoted, escaped, and cut at 200 characters."""
    return json.dumps(word if len(word) <= _MAX_WORD_CHARS else f"{word[:_MAX_WORD_CHARS]}…", ensure_ascii=False)
