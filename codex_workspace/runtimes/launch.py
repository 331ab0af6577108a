"""How to start a coding CLI: the same `Launch` starts the app-server and `codex exec`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from codex_workspace.protocol.jsonrpc import MAX_LINE_BYTES

START_TIMEOUT_S: Final = 20.0

MARK: Final = "CODEX_WORKSPACE_RUN"
"""Environment variable that marks a CLI and its descendants with `family.run`, so that orphans are found."""

PASSED_ENVIRONMENT: Final = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "RUST_LOG"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "CODEX_CA_CERTIFICATE", "NODE_EXTRA_CA_CERTS"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    )
)
"""The variables that a CLI receives from our environment, beside `LC_*`: none of them holds a credential."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start codex.

    binary: the program.
    codex_home: its folder for configuration, login and sessions.
    cwd: its working directory.
    environment: the variables that `PASSED_ENVIRONMENT` selects from.
    api_key: the API key; the app-server receives it over its pipe, `codex exec` in its environment.
    secrets: texts that are masked in codex's stderr before it is quoted.
    overrides: `-c` settings, by dotted key, as TOML literals.
    max_line_bytes: longer lines are skipped.
    start_timeout_s: how long codex may take to answer `initialize`.
    family: identifies the processes of one agent across restarts; `end_leftovers` finds them by it.
    handed: further variables of codex's environment.
    """

    binary: Path
    codex_home: Path
    cwd: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    secrets: Sequence[str] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)
    max_line_bytes: int = MAX_LINE_BYTES
    start_timeout_s: float = START_TIMEOUT_S
    family: str = "none"
    handed: Mapping[str, str] = field(default_factory=dict)


def child_environment(launch: Launch, mark: str) -> dict[str, str]:
    """Return the whole environment of the process. Commands outside a sandbox can read it."""
    passed = {
        name: value
        for name, value in launch.environment.items()
        if name in PASSED_ENVIRONMENT or name.startswith("LC_")
    }
    return passed | dict(launch.handed) | {"CODEX_HOME": str(launch.codex_home), MARK: mark}
