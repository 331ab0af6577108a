"""How to start a coding CLI, and the options of one run: the same for every runtime."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from codex_workspace.common.errors import InputRefused
from codex_workspace.common.values import JsonObject, KeyPath, TomlValue, quoted
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.protocol.codex_events import MODEL_UNKNOWN
from codex_workspace.protocol.jsonrpc import MAX_LINE_BYTES

logger = logging.getLogger(__name__)

ASSUMED_WINDOW: Final = 272_000
"""The context window in tokens, and its maximum, of a model that codex does not know (0.158 to 0.163)."""

UNKNOWN_MODEL: Final = (
    f"it assumes a context window of {ASSUMED_WINDOW:,} tokens, or a smaller context_window of the provider in "
    "config.yaml; only a model_catalog_file tells it more"
)

INACTIVITY_S: Final = 300.0
"""How long a CLI may write nothing. codex exec writes nothing while a command runs, so this limits commands too."""

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


MAX_UNKNOWN_MODELS: Final = 100
"""Callers may name a model for a turn; the notices about further models are not logged."""


def is_model_notice(warning: str, logged: set[str]) -> bool:
    """Return whether a warning of codex says that it does not know a model; log this once for each model."""
    found = MODEL_UNKNOWN.match(warning)
    if found is not None and found[1] not in logged and len(logged) < MAX_UNKNOWN_MODELS:
        logged.add(found[1])
        logger.warning("codex does not know the model %s: %s", quoted(found[1]), UNKNOWN_MODEL)
    return found is not None


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
    unknown_models: the models that were logged as unknown; all copies share it.
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
    unknown_models: set[str] = field(default_factory=set)


def child_environment(launch: Launch, mark: str) -> dict[str, str]:
    """Return the whole environment of the process. Commands outside a sandbox can read it."""
    passed = {
        name: value
        for name, value in launch.environment.items()
        if name in PASSED_ENVIRONMENT or name.startswith("LC_")
    }
    return passed | dict(launch.handed) | {"CODEX_HOME": str(launch.codex_home), MARK: mark}


Sandbox: TypeAlias = Literal["read-only", "workspace-write", "danger-full-access"]

FULL_AUTO: Final[Sandbox] = "workspace-write"
"""The sandbox of `full_auto`."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one run; the CLI's own configuration decides what is not set.

    resume: the session to resume; None starts a new one.
    model: the model's id.
    sandbox: what commands may do.
    full_auto: run commands in the workspace-write sandbox; excludes any other `sandbox`.
    cwd: the working directory.
    writable: directories that commands may write to in the workspace-write sandbox, beside the working directory.
    skip_git_check: run outside a git repository too.
    ephemeral: store no session; such a run cannot be resumed.
    web_search: whether the model may search the web.
    output_schema: a JSON Schema of the answer.
    images: image files that belong to the prompt.
    config: further settings by their paths. They may appear on a command line, which other users can read: put no
        secret here.
    """

    resume: str | None = None
    model: str | None = None
    sandbox: Sandbox | None = None
    full_auto: bool = False
    cwd: Path | None = None
    writable: tuple[Path, ...] = ()
    skip_git_check: bool = True
    ephemeral: bool = False
    web_search: bool | None = None
    output_schema: JsonObject | None = None
    images: tuple[Path, ...] = ()
    config: Mapping[KeyPath, TomlValue] = field(default_factory=dict)

    @property
    def effective_sandbox(self) -> Sandbox | None:
        """The sandbox after `full_auto` is applied."""
        return FULL_AUTO if self.full_auto else self.sandbox


DEFAULT_OPTIONS: Final = RunOptions()

NO_SERVERS: Final = McpServers()


def check_run(prompt: str, options: RunOptions, max_chars: int) -> None:
    """Reject a prompt and options that no runtime accepts.

    Raises:
        InputRefused: the prompt is empty or has more than `max_chars` characters, or two options contradict each other.
    """
    if not prompt.strip():
        raise InputRefused("The message has no text.")
    if len(prompt) > max_chars:
        raise InputRefused(f"The message has {len(prompt)} characters; codex accepts at most {max_chars}.")
    if options.full_auto and options.sandbox not in (None, FULL_AUTO):
        raise InputRefused(f"full_auto runs commands in the sandbox {FULL_AUTO}, not in {options.sandbox}.")
    if options.ephemeral and options.resume is not None:
        raise InputRefused("A run that is not stored cannot resume a session.")
