"""Plain values: JSON types, versions, and delimiters around untrusted text."""

import re
import secrets
from typing import Final, TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


JsonObject: TypeAlias = dict[str, JsonValue]


TomlValue: TypeAlias = str | int | float | bool | list[str]
"""A value that the agent sets in codex's config.toml."""


KeyPath: TypeAlias = tuple[str, ...]
"""A dotted key of codex's config.toml, in parts."""


MAX_INPUT_CHARS: Final = 1_048_576
"""Codex refuses a turn's input beyond this many characters (-32602, `input_too_large`, 0.130 and later)."""


THREAD_ID_PATTERN: Final = re.compile(r"[0-9a-zA-Z-]{1,64}")
"""Thread IDs that are safe in a file name pattern."""


def quote_untrusted(text: str, opening: str, closing: str) -> str:
    """Return untrusted text between a line with `opening` and a line with `closing`.

    Both lines contain a random number, so that the text cannot imitate the closing line.
    """
    number = secrets.token_hex(4)
    return f"--- {number}: {opening}\n{text}\n--- {number}: {closing}"


Version: TypeAlias = tuple[int, int, int]

_VERSION: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})")


def find_version(text: str) -> Version | None:
    """Return the first version in a text; None if there is none."""
    found = _VERSION.search(text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def format_version(version: Version) -> str:
    """Return a version as text, such as "0.158.0"."""
    return ".".join(map(str, version))


def quoted(value: str) -> str:
    """Return `value` in quotation marks for a sentence, cut to 40 characters."""
    return repr(value if len(value) <= 40 else value[:40] + "…")
