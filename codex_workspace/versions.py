"""Versions of codex: three numbers, read and said."""

import re
from typing import Final, TypeAlias

Version: TypeAlias = tuple[int, int, int]

_VERSION: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})")


def version_in(text: str) -> Version | None:
    """Return the first version in a text; None where there is none."""
    found = _VERSION.search(text)
    if found is None:
        return None
    major, minor, patch = (int(number) for number in found.groups())
    return major, minor, patch


def dotted(version: Version) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))
