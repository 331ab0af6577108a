"""Fields of codex's JSON objects with their types known; what is not of the shape raises `OddShape`."""

from codex_workspace.wire import JsonObject, JsonValue


class OddShape(ValueError):
    """A field that its reader cannot do without is missing or of another type."""


def text(fields: JsonObject, key: str) -> str:
    """Return a field that must be a string."""
    value = fields.get(key)
    if isinstance(value, str):
        return value
    raise OddShape(key)


def text_or_none(fields: JsonObject, key: str) -> str | None:
    """Return a field that is a string, or None."""
    value = fields.get(key)
    return value if isinstance(value, str) else None


def number(fields: JsonObject, key: str) -> int:
    """Return a field that must be a whole number."""
    value = number_or_none(fields, key)
    if value is None:
        raise OddShape(key)
    return value


def number_or_none(fields: JsonObject, key: str) -> int | None:
    """Return a field that is a whole number, or None."""
    value = fields.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def nested(fields: JsonObject, key: str) -> JsonObject:
    """Return a field that must be an object."""
    value = fields.get(key)
    if isinstance(value, dict):
        return value
    raise OddShape(key)


def nested_or_empty(fields: JsonObject, key: str) -> JsonObject:
    """Return a field that is an object, or an empty one."""
    value = fields.get(key)
    return value if isinstance(value, dict) else {}


def objects(fields: JsonObject, key: str) -> list[JsonObject]:
    """Return the objects in a field that is an array; nothing where it is none."""
    return [value for value in _array(fields, key) if isinstance(value, dict)]


def texts(fields: JsonObject, key: str) -> tuple[str, ...]:
    """Return the strings in a field that is an array; nothing where it is none."""
    return tuple(value for value in _array(fields, key) if isinstance(value, str))


def _array(fields: JsonObject, key: str) -> list[JsonValue]:
    value = fields.get(key)
    return value if isinstance(value, list) else []
