"""Validates values from YAML and the environment with pydantic, and reports the first problem as one sentence.

A sentence names the file, the dotted key, the problem and the allowed values; the latter come from the JSON Schema.
"""

import difflib
import json
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.common.files import read_config_file
from codex_workspace.common.values import JsonObject, JsonValue, quoted

_T = TypeVar("_T")
_Section = TypeVar("_Section", bound="Section")


def problem(sentence: str, key: str = "") -> PydanticCustomError:
    """Return an error for validators of a section to raise; `key` is the invalid key."""
    return PydanticCustomError("problem", "{sentence}", {"sentence": sentence, "key": key})


def matching(pattern: str, allowed: str) -> Any:  # pydantic types its `Field` so
    """Return the constraint that a text matches `pattern` in full; `allowed` completes the sentence "must be …"."""
    return Field(pattern=f"^(?:{pattern})$", title=allowed)


_INSIDE: Final = r"[^\x00-\x1f\x7f]*"
Text = Annotated[str, matching(rf"{_INSIDE}[^\x00-\x1f\x7f\s]{_INSIDE}", "one line of text, not blank")]
Seconds = Annotated[float, Field(ge=0.1, le=604_800)]
EnvName = Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable, not its value")]
HttpUrl = Annotated[
    str,
    matching(
        r"https?://[^\s/?#@\\]+(/[^\s?#@\\]*)?",
        "an http:// or https:// URL without user name, password, query or fragment",
    ),
]
Slug = Annotated[str, matching(r"[A-Za-z0-9_-]{1,64}", "1 to 64 letters, digits, _ or -")]
Items = Annotated[tuple[_T, ...], Strict(False)]
"""A list in YAML, a tuple in Python."""


class Section(BaseModel):
    """A mapping of config.yaml.

    The docstring of a section describes its keys, one `key, other: description` each; the JSON Schema shows them.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Keys that are valid and have no effect."""

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, value: object) -> object:
        if not (cls.IGNORED and isinstance(value, dict)):
            return value
        return {key: each for key, each in value.items() if key not in cls.IGNORED}


def read_section(section: type[_Section], value: object, location: ConfigLocation) -> _Section:
    """Return `value`, found at `location`, as a section.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, or a value that is not allowed.
    """
    try:
        return section.model_validate(value)
    except ValidationError as error:
        raise _config_error(error, schema_of(section), location) from None


def check_text(kind: object, value: str, location: ConfigLocation) -> str:
    """Return `value` if it is a valid `kind`, such as `HttpUrl`.

    Raises:
        ConfigError: it is not.
    """
    try:
        return TypeAdapter(cast("type[str]", kind)).validate_python(value)
    except ValidationError as error:
        raise _config_error(error, schema_of(kind), location) from None


# --- JSON Schema


def schema_text(section: type[Section], title: str) -> str:
    """Return the JSON Schema (2020-12) of a section as a JSON document, for editors."""
    head: JsonObject = {"$schema": GenerateJsonSchema.schema_dialect, "title": title}
    return json.dumps(head | schema_of(section), indent=2, ensure_ascii=False) + "\n"


def schema_of(kind: object) -> JsonObject:
    """Return the JSON Schema of a section or a type, without references."""
    schema: JsonObject = TypeAdapter(cast("type[object]", kind)).json_schema(schema_generator=_SchemaGenerator)
    return cast("JsonObject", _inline(schema, cast("JsonObject", schema.get("$defs", {}))))


class _SchemaGenerator(GenerateJsonSchema):
    """Sets descriptions from docstrings, and no titles but those that complete the sentence "must be …"."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> dict[str, Any]:
        inner = self.generate_inner(schema["schema"])
        return inner | {"type": [inner["type"], "null"]}

    def dict_schema(self, schema: core_schema.DictSchema) -> dict[str, Any]:
        keys, values = self.generate_inner(schema["keys_schema"]), self.generate_inner(schema["values_schema"])
        return {"type": "object", "propertyNames": keys, "additionalProperties": values}

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        section = cast("type[Section]", schema["cls"])
        result = super().model_schema(schema)
        del result["title"]
        about, _, of_keys = (section.__doc__ or "").partition("\n\n")
        result["description"] = " ".join(about.split())
        for line in re.sub(r"\n {5,}", " ", of_keys).splitlines():
            keys, _, description = line.strip().partition(": ")
            for key in keys.split(", "):
                if key in result["properties"]:
                    result["properties"][key]["description"] = description
        for key in sorted(section.IGNORED):
            result["properties"][key] = {"description": "Belongs to the platform; this agent ignores it."}
        return result


def _inline(schema: JsonValue, definitions: JsonObject) -> JsonValue:
    match schema:
        case {"$ref": str(reference), **rest}:
            target = _inline(definitions[reference.rpartition("/")[2]], definitions)
            return cast("JsonObject", target) | cast("JsonObject", rest)
        case dict():
            return {key: _inline(value, definitions) for key, value in schema.items() if key != "$defs"}
        case list():
            return [_inline(value, definitions) for value in schema]
        case _:
            return schema


# --- Sentences


def _config_error(error: ValidationError, schema: JsonObject, location: ConfigLocation) -> ConfigError:
    # An unknown key first: a misspelled key is often the reason for a missing one.
    details = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    path = details["loc"]
    tail_length = 1 if details["type"] == "extra_forbidden" else 2 if path[-1:] == ("[key]",) else 0
    for step in path[: len(path) - tail_length]:
        location = location.item(step) if isinstance(step, int) else location.at(_key(step))
        schema = _schema_within(schema, step)
    match path[len(path) - tail_length :]:
        case (key,):
            known = cast("JsonObject", schema["properties"])
            return location.at(_key(str(key))).error(f"is not a known key{did_you_mean(str(key), known)}")
        case (key, _):
            allowed = _allowed(cast("JsonObject", schema["propertyNames"]))
            return location.error(f"contains the key {quoted(str(key))}, but a key must be {allowed}")
        case _ if details["type"] == "problem":
            key = details["ctx"]["key"]
            return (location.at(key) if key else location).error(details["msg"])
        case _:
            return location.error(_problem(details, schema))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]{1,60}", name) else quoted(name)


def _schema_within(schema: JsonObject, step: int | str) -> JsonObject:
    """Return the schema of one item or one key of the values that `schema` describes."""
    if isinstance(step, int):
        return cast("JsonObject", schema["items"])
    properties = cast("JsonObject", schema.get("properties", {}))
    return cast("JsonObject", properties.get(step, schema.get("additionalProperties")))


def _problem(details: ErrorDetails, schema: JsonObject) -> str:
    value: object = details["input"]
    match details["type"]:
        case "missing":
            return f"is missing; it must be {_allowed(schema)}"
        case "string_pattern_mismatch" | "string_too_long":
            return f"must be {_allowed(schema)}"
        case "value_error":
            return f"must be {_allowed(schema)}; the address or port is invalid"
        case _:
            return f"must be {_allowed(schema)}, but is {_actual(value, schema)}"


def _allowed(schema: JsonObject) -> str:
    """Return what `schema` allows, to complete the sentence "must be …"."""
    match schema:
        case {"type": [str(kind), "null"]}:
            return _allowed({**schema, "type": kind})
        case {"title": str(words)}:
            return words
        case {"const": value}:
            return str(value)
        case {"enum": [*values]}:
            return f"one of {', '.join(map(str, values))}"
        case {"type": "array", "items": dict(items)}:
            return f"a list, each item {_allowed(items)}"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"a mapping, each value {_allowed(values)}"
        case {"type": kind, "minimum": low, "maximum": high}:
            span = f"{low:.10g}" if low == high else f"from {low:.10g} to {high:.10g}"
            return f"a {'whole ' if kind == 'integer' else ''}number {span}"
        case {"type": kind}:
            return {"string": "text", "boolean": "true or false", "object": "a mapping of keys"}[str(kind)]
        case _:
            raise TypeError(f"cannot describe {schema}")


def _actual(value: object, schema: JsonObject) -> str:
    """Describe the actual value. A text is shown only if the schema lists allowed texts, because it may be a secret."""
    kind = schema["type"][0] if isinstance(schema["type"], list) else schema["type"]
    match value:
        case None:
            return "empty"
        case bool():
            actual = "true" if value else "false"
        case int() if kind in ("integer", "number"):
            return repr(value)[:40]
        case float() if kind == "number":
            return repr(value)
        case int() | float():
            actual = "a number"
        case str() if "enum" in schema:
            return quoted(value) + did_you_mean(value, cast("list[str]", schema["enum"]))
        case str() if "const" in schema:
            return quoted(value)
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"
    return actual + ("; put it in quotes" if kind == "string" else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known name that is similar to `name`; empty if there is none."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


# --- YAML


MAX_VALUES: Final = 50_000
"""The limit for the keys and values of a YAML file; PyYAML takes about 25 µs for each."""


class BoundedLoader(yaml.SafeLoader):
    """A SafeLoader that rejects YAML with more than `MAX_VALUES`, where each alias counts as a copy of its value."""

    def __init__(self, content: str | bytes) -> None:
        super().__init__(content)
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if node is None or (is_alias and node in self._sizes):
            return node
        if is_alias:
            raise yaml.MarkedYAMLError(
                problem="an alias is not allowed within its own value", problem_mark=node.start_mark
            )
        self._sizes[node] = 1 + sum(self._sizes[part] for part in _parts(node))
        if max(len(self._sizes), self._sizes[node]) > MAX_VALUES:
            problem = f"contains too many values; at most {MAX_VALUES} are allowed, and an alias counts as a copy"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node


def _parts(node: yaml.Node) -> Iterable[yaml.Node]:
    values: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
    return chain.from_iterable(values) if isinstance(node, yaml.MappingNode) else values


class _StrictLoader(BoundedLoader):
    """A loader that also rejects duplicate keys and keys that are not text."""

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        # Check before values are constructed, because merge keys (`<<`) may repeat keys.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is a duplicate", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def load_yaml(file: Path) -> object:
    """Return the content of `file` as plain Python values.

    Raises:
        ConfigError: the file cannot be read, or is not YAML; with line and column, counted from 1.
    """
    location = ConfigLocation(str(file))
    try:
        # Bytes, so that PyYAML reports the position of invalid UTF-8.
        return yaml.load(read_config_file(file), _StrictLoader)
    except OSError as error:
        raise location.error(f"cannot be read ({error.strerror})") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise location.error(f"{where}{_one_line(error.problem or 'is not YAML')}") from error
    except yaml.YAMLError as error:
        raise location.error(f"is not YAML: {_one_line(str(error))}") from error
    except ValueError as error:
        raise location.error(f"contains an invalid value: {_one_line(str(error))}") from error
    except RecursionError as error:
        raise location.error("is nested too deeply") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())
