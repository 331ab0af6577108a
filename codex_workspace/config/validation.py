"""Checks plain values (YAML's) against dataclasses; what differs is one sentence with file, key and what is allowed.

A field's name is its key, its type what is allowed, `Annotated` rules narrow it, a default makes it optional. Types:
str, bool, int, float, `Literal` of texts, `tuple[X, ...]`, `Mapping[X, Y]` of texts, other dataclasses, and
`X | None`. Which keys there are is
the business of `settings`.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast

import yaml

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.common.values import quoted

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Range:
    """A number's bounds, both included."""

    at_least: float
    at_most: float


@dataclass(frozen=True, slots=True)
class Matches:
    """A text's whole shape; `words` finishes the sentence "must be …"."""

    pattern: str
    words: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Values that the schema knows and this version refuses, each with the rest of the sentence "<value> …"."""

    reasons: Mapping[str, str]


_INSIDE = r"[^\x00-\x1f\x7f]*"
Text = Annotated[str, Matches(rf"{_INSIDE}[^\x00-\x1f\x7f\s]{_INSIDE}", "one line of text, not blank")]
Seconds = Annotated[float, Range(0.1, 604_800)]
EnvName = Annotated[str, Matches(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable, not its value")]
HttpUrl = Annotated[
    str,
    Matches(
        r"https?://[^\s/?#@\\]+(/[^\s?#@\\]*)?",
        "an http:// or https:// URL without user name, password, query or fragment",
    ),
]
Slug = Annotated[str, Matches(r"[A-Za-z0-9_-]{1,64}", "1 to 64 letters, digits, _ or -")]


def read_section(cls: type[_T], value: object, place: ConfigLocation) -> _T:
    """The mapping `value` as the dataclass `cls`, nested ones included.

    Keys named in `cls.IGNORED` are let through unread.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, or a value outside its rule.
    """
    if not isinstance(value, dict):
        raise place.error(f"must be a mapping of keys, but is {_kind_of(value)}")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # a dataclass by contract
    ignored: frozenset[str] = getattr(cls, "IGNORED", frozenset())
    known = {each.name for each in fields}
    for key in value:
        if key not in known and key not in ignored:
            name = key if isinstance(key, str) and re.fullmatch(r"[\w-]{1,60}", key) else quoted(str(key))
            raise place.at(name).error(f"is not a known key{_meant(str(key), known | ignored)}")
    given = {
        each.name: read_value(hints[each.name], value[each.name], place.at(each.name))
        for each in fields
        if each.name in value
    }
    for each in fields:
        if (
            each.name not in given
            and each.default is dataclasses.MISSING
            and each.default_factory is dataclasses.MISSING
        ):
            raise place.at(each.name).error(f"is missing; it must be {_allowed(hints[each.name])}")
    return cls(**given)


def read_value(kind: object, value: object, place: ConfigLocation) -> object:
    """`value` checked against the type `kind`: a tuple for a list, a float where one is asked for.

    Raises:
        ConfigError: it is not of that type, or outside its rule.
    """
    base, rules = unfold(kind)
    origin = typing.get_origin(base)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else read_value(without_none(base), value, place)
    if origin is Literal:
        return _read_choice(kind, value, rules, place)
    if origin is tuple:
        if not isinstance(value, list):
            raise place.error(_must(kind, value))
        return tuple(read_value(typing.get_args(base)[0], item, place.item(index)) for index, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise place.error(_must(kind, value))
        return _read_mapping(typing.get_args(base), value, place)
    if isinstance(base, type) and dataclasses.is_dataclass(base):
        return read_section(base, value, place)
    return _read_scalar(kind, value, place)


def _read_mapping(
    kinds: tuple[object, ...], value: dict[object, object], place: ConfigLocation
) -> dict[object, object]:
    of_key, of_value = kinds
    read: dict[object, object] = {}
    for key, item in value.items():
        try:
            name = read_value(of_key, key, place)
        except ConfigError:
            raise place.error(f"holds the key {quoted(str(key))}, but a key must be {_allowed(of_key)}") from None
        read[name] = read_value(of_value, item, place.at(str(name)))
    return read


def _read_choice(kind: object, value: object, rules: tuple[object, ...], place: ConfigLocation) -> object:
    base, _ = unfold(kind)
    if not isinstance(value, str) or value not in typing.get_args(base):
        raise place.error(f"{_must(kind, value)}{_meant(str(value), set(choices(kind)))}")
    for rule in rules:
        if isinstance(rule, Refused) and value in rule.reasons:
            raise place.error(f"{value} {rule.reasons[value]}")
    return value


def _read_scalar(kind: object, value: object, place: ConfigLocation) -> object:
    base, rules = unfold(kind)
    if base is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 53 else math.inf
    if type(value) is not base:
        raise place.error(_must(kind, value))
    for rule in rules:
        match rule, value:
            case Range(low, high), int() | float() if not low <= value <= high:  # a NaN is in no range
                raise place.error(f"must be {_allowed(kind)}, but is {value!r}")
            case Matches(pattern, words), str() if not re.fullmatch(pattern, value):
                raise place.error(f"must be {words}")
            case _:
                pass
    return value


def unfold(kind: object) -> tuple[object, tuple[object, ...]]:
    """The plain type of `kind` and its rules."""
    if typing.get_origin(kind) is Annotated:
        base, *rules = typing.get_args(kind)
        return base, tuple(rules)
    return kind, ()


def without_none(union: object) -> object:
    """The `X` of `X | None`."""
    [kind] = [each for each in typing.get_args(union) if each is not types.NoneType]
    return kind


def choices(kind: object) -> list[str]:
    """The values of a `Literal` that this version takes."""
    base, rules = unfold(kind)
    refused = {value for rule in rules if isinstance(rule, Refused) for value in rule.reasons}
    return [str(value) for value in typing.get_args(base) if value not in refused]


def _allowed(kind: object) -> str:
    """What may stand there, to finish the sentence "must be …"."""
    base, rules = unfold(kind)
    origin = typing.get_origin(base)
    if origin in (types.UnionType, typing.Union):
        return f"{_allowed(without_none(base))} or null"
    if origin is Literal:
        taken = choices(kind)
        return taken[0] if len(taken) == 1 else f"one of {', '.join(taken)}"
    if origin is tuple:
        return f"a list, each item {_allowed(typing.get_args(base)[0])}"
    if origin is Mapping:
        return f"a mapping, each value {_allowed(typing.get_args(base)[1])}"
    for rule in rules:
        match rule:
            case Range(low, high):
                span = f"{low:.10g}" if low == high else f"from {low:.10g} to {high:.10g}"
                return f"a {'whole ' if base is int else ''}number {span}"
            case Matches(_, words):
                return words
            case _:
                pass
    return {str: "text", bool: "true or false", int: "a whole number", float: "a number"}.get(
        cast("type", base), "a mapping of keys"
    )


def _must(kind: object, value: object) -> str:
    quotes = "; put it in quotes" if unfold(kind)[0] is str and isinstance(value, (bool, int, float)) else ""
    # Shown only where the schema lists what is allowed: elsewhere it may be a secret in the wrong place.
    listed = typing.get_origin(unfold(kind)[0]) is Literal and isinstance(value, str)
    return f"must be {_allowed(kind)}, but is {quoted(str(value)) if listed else _kind_of(value)}{quotes}"


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"


def _meant(word: str, known: set[str]) -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader to which two equal keys in one mapping, or a key that is no text, are errors."""

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        # Here and not when values are made: by then a merge key (`<<`) may have brought in keys that are there already.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def load_yaml(file: Path) -> object:
    """What `file` holds, as plain Python values.

    Raises:
        ConfigError: the file cannot be read, or is not YAML; with line and column, counted from 1.
    """
    place = ConfigLocation(str(file))
    try:
        # Bytes, so that PyYAML itself names the position of one that is not UTF-8.
        return yaml.load(file.read_bytes(), _StrictLoader)
    except OSError as error:
        raise place.error(f"cannot be read ({error.strerror})") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise place.error(f"{where}{_one_line(error.problem or 'is not YAML')}") from error
    except yaml.YAMLError as error:
        raise place.error(f"is not YAML: {_one_line(str(error))}") from error
    except ValueError as error:
        raise place.error(f"holds a value that YAML cannot make: {_one_line(str(error))}") from error
    except RecursionError as error:
        raise place.error("is nested too deeply") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())
