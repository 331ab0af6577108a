"""The versions of codex that this agent supports, and how codex states its version in `initialize`."""

import re
from typing import Final

from codex_workspace.common.errors import CodexCannotStart
from codex_workspace.common.values import JsonValue, Version, format_version

MINIMUM_VERSION: Final[Version] = (0, 158, 0)
"""The oldest supported codex, for the app-server and for `codex exec`."""


def require_supported(version: Version) -> None:
    """Reject a codex that is too old.

    Raises:
        CodexCannotStart: the version is older than `MINIMUM_VERSION`.
    """
    if version < MINIMUM_VERSION:
        raise CodexCannotStart(
            f"codex {format_version(version)} is too old: this agent needs {format_version(MINIMUM_VERSION)} or newer; "
            "install a newer codex, or set CODEX_BIN to one"
        )


def initialized_version(result: JsonValue) -> Version:
    """Return codex's version from the result of `initialize`, whose `userAgent` begins with `<client name>/<version>`.

    Raises:
        CodexCannotStart: the result contains no version.
    """
    agent = result.get("userAgent") if isinstance(result, dict) else None
    found = re.match(r"[^/]+/(\d+)\.(\d+)\.(\d+)", agent) if isinstance(agent, str) else None
    if found is None:
        raise CodexCannotStart("codex did not report its version; set CODEX_BIN to a codex executable")
    major, minor, patch = (int(number) for number in found.groups())
    return major, minor, patch
