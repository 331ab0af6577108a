"""What codex says of a configuration that it does not take, without the values that stand in it.

Codex quotes what it stumbles over: a header's value where a table should be, or the whole line. The line's number and
the key are enough to mend it. Words: 0.158 and 0.163.
"""

import re
from typing import Final

HIDDEN: Final = "…"
"""What stands where a value stood."""

_BEGINS: Final = re.compile(
    r"Error loading config|failed to (?:load|read) (?:\w+ )?configuration|failed to resolve feature override"
    r"|invalid configuration|^Error: (?:Model provider|legacy) [`…]",
    re.MULTILINE,
)
_LINES: Final = re.compile(r"^[ \t]*\d*[ \t]*\|.*\n?", re.MULTILINE)
"""The file's own lines, each behind its number and a bar."""

_QUOTED: Final = re.compile(r"[\"`].*[\"`]", re.DOTALL)
"""From the first mark to the last: a value may hold marks itself."""

_IN: Final = re.compile(r"\n\s*in `")


def is_about_config(said: str) -> bool:
    """Tell whether codex says that it does not take its configuration."""
    return _BEGINS.search(said) is not None


def without_values(said: str) -> str:
    """Return what codex has said of its configuration without that one's values."""
    about = _LINES.sub("", said)
    known = _own_words(about)
    return f"{_QUOTED.sub(HIDDEN, about[:known])}{about[known:]}"


def hide_values(said: str) -> str:
    """Return whatever codex has said without the values of a configuration that it does not take."""
    begins = _BEGINS.search(said)
    return said if begins is None else f"{said[: begins.start()]}{without_values(said[begins.start() :])}"


def _own_words(about: str) -> int:
    """Return where the words begin behind which no value stands: what was expected, and else the key."""
    expected = about.rfind(", expected ")
    if expected >= 0:
        return expected
    return max((found.start() for found in _IN.finditer(about)), default=len(about))
