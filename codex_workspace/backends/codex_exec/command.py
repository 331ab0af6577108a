"""How `codex exec` is called: options to its argument vector, for every version that takes `--experimental-json`.

What each version takes was measured with 0.42, 0.72, 0.101, 0.136, 0.163 and 0.169. The prompt is no argument: it
goes to codex's stdin, where neither its length nor its first character matters, for a resumed session too.

What `codex exec` is told of MCP servers: settings, and their secrets by its environment.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

import tomlkit

from codex_workspace.app_server import PASSED_ENVIRONMENT
from codex_workspace.common.errors import ConfigError, InputRefused
from codex_workspace.common.values import JsonObject, Version, dotted
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.config.toml_text import KeyPath, TomlValue

Sandbox: TypeAlias = Literal["read-only", "workspace-write", "danger-full-access"]

OLDEST: Final[Version] = (0, 42, 0)
"""The oldest codex that was tried."""

SAYS_JSON: Final[Version] = (0, 72, 0)
"""From here on `--json` is known to give the events of `ExecLines`; before, it may be other ones."""

TAKES_FOLDERS: Final[Version] = (0, 72, 0)
"""From here on `--add-dir` is known to be taken; before, the folders are a setting."""

TAKES_IMAGES: Final[Version] = (0, 72, 0)
"""Before, codex waits without end for the answer to the images, which it sends ahead of the prompt."""

KEEPS_NOTHING: Final[Version] = (0, 136, 0)
"""From here on `--ephemeral` is known to be taken."""

FULL_AUTO: Final[Sandbox] = "workspace-write"
"""What `--full-auto` has come down to: `codex exec` never asks anybody, and 0.163 has no such flag any more."""

_SESSION: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class ExecOptions:
    """What one run has its own way; what is left out is codex's config.toml's business.

    resume: the session that goes on; None begins a new one.
    model: its id.
    sandbox: what commands may do.
    full_auto: commands run in the workspace-write sandbox; not together with another `sandbox`.
    cwd: codex's working folder.
    writable: folders that commands may write beside it, in the workspace-write sandbox.
    skip_git_check: work outside of a git repository too.
    ephemeral: codex writes no session, so that none can be resumed.
    web_search: whether the model may search the web; None leaves it to config.toml.
    output_schema: a JSON Schema of the answer.
    images: files that go with the prompt.
    config: further settings of config.toml by their paths. They stand on the command line, which others can read: no
        secret belongs here.
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


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run, as codex is told them: `schema` holds the output schema."""

    schema: Path | None = None
    images: tuple[Path, ...] = ()


def check(options: ExecOptions) -> None:
    """Refuse what codex would misread.

    Raises:
        InputRefused: the session's id is none, two options contradict each other, or a model, a path or that of a
            setting cannot be said on a command line.
    """
    if options.resume is not None and not _SESSION.fullmatch(options.resume):
        raise InputRefused("The id of the session to resume is no UUID.")
    if options.full_auto and options.sandbox not in (None, FULL_AUTO):
        raise InputRefused(f"full_auto runs commands in the sandbox {FULL_AUTO}, not in {options.sandbox}.")
    if options.ephemeral and options.resume is not None:
        raise InputRefused("A run that is kept nowhere resumes no session.")
    for path in options.config:
        if not path or not all(_BARE_KEY.fullmatch(key) for key in path):
            # Codex cuts the path at its dots, whatever is quoted.
            raise InputRefused(f"The setting {'.'.join(path)!r} cannot be given on codex's command line.")
    paths = (options.cwd, *options.writable, *options.images)
    if any("\0" in str(each) for each in (options.model, *paths)):
        raise InputRefused("A model or a path with a NUL cannot be given on codex's command line.")


def arguments(options: ExecOptions, files: RunFiles, version: Version) -> list[str]:
    """Return what stands behind `codex exec`; the prompt comes by stdin. `options` have passed `check`.

    Raises:
        InputRefused: this version cannot do it.
    """
    if files.images and version < TAKES_IMAGES:
        raise InputRefused(f"codex {dotted(version)} takes no images.")
    if options.ephemeral and version < KEEPS_NOTHING:
        raise InputRefused(f"codex {dotted(version)} cannot be kept from writing its session.")
    options_first = [
        "--json" if version >= SAYS_JSON else "--experimental-json",
        "--color=never",
        *(["--skip-git-repo-check"] if options.skip_git_check else []),
        *(["--ephemeral"] if options.ephemeral else []),
        *_settings(options, version),
        *_folders(options, version),
        *([f"--model={options.model}"] if options.model is not None else []),
        *([f"--output-schema={files.schema}"] if files.schema is not None else []),
        # With `=`, as it would take all that follows it for images.
        *(f"--image={image}" for image in files.images),
    ]
    # Before `resume`: behind it no version takes all of them, and 0.72 nearly none.
    return [*options_first, *(["resume", options.resume] if options.resume is not None else []), "-"]


def overrides(settings: Mapping[str, str]) -> list[str]:
    """Return the arguments that put `settings` over config.toml; keys are dotted, values TOML."""
    return [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]


def _settings(options: ExecOptions, version: Version) -> Sequence[str]:
    settings = {".".join(path): tomlkit.item(value).as_string() for path, value in options.config.items()}
    if options.web_search is not None:
        settings |= _search(options.web_search)
    if options.writable and version < TAKES_FOLDERS:
        roots = [str(folder) for folder in options.writable]
        settings["sandbox_workspace_write.writable_roots"] = tomlkit.item(roots).as_string()
    return overrides(settings)


def _search(wanted: bool) -> dict[str, str]:
    """Both settings: 0.42 and 0.72 know the first one only."""
    return {"tools.web_search": "true" if wanted else "false", "web_search": '"live"' if wanted else '"disabled"'}


def _folders(options: ExecOptions, version: Version) -> Sequence[str]:
    sandbox = FULL_AUTO if options.full_auto else options.sandbox
    return [
        *([f"--sandbox={sandbox}"] if sandbox is not None else []),
        *([f"--cd={options.cwd}"] if options.cwd is not None else []),
        *(f"--add-dir={folder}" for folder in options.writable if version >= TAKES_FOLDERS),
    ]


_OWN: Final = re.compile(r"CODEX_.*|OPENAI_.*|LC_.*|LD_.*")


def mcp_overrides(servers: McpServers) -> tuple[dict[KeyPath, TomlValue], dict[str, str]]:
    """Return the settings that tell codex of MCP servers, and the variables of its environment that hold their secrets.

    `codex exec` has no pipe to be told a secret by; its command line can be read by everybody on the machine, its
    environment by the same user.

    Raises:
        ConfigError: a secret's variable would be codex's own, or two servers want one variable with two values.
    """
    settings = dict(servers.managed)
    handed: dict[str, str] = {}
    for server in servers.servers:
        forwarded: list[str] = []
        for (table, key), secret in server.private.items():
            path = ("mcp_servers", server.name)
            if table == "env":
                _hand(handed, key, secret.reveal(), server.name)
                forwarded.append(key)
            else:
                name = f"MCP_HEADER_{len(handed)}_{re.sub(r'[^A-Za-z0-9]', '_', server.name).upper()}"
                _hand(handed, name, secret.reveal(), server.name)
                settings[(*path, "env_http_headers", key)] = name
        if forwarded:
            settings["mcp_servers", server.name, "env_vars"] = forwarded
    return settings, handed


def _hand(handed: dict[str, str], name: str, value: str, server: str) -> None:
    if name in PASSED_ENVIRONMENT or _OWN.fullmatch(name):
        raise ConfigError(
            f"mcp_servers: {server}: env: {name} is codex's own, and cannot hold a secret with codex exec"
        )
    if handed.setdefault(name, value) != value:
        raise ConfigError(f"mcp_servers: {server}: env: {name} has another value with another server; give it one")
