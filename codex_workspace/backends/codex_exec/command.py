"""The command line of `codex exec`, its files and its environment: options, and MCP servers with their secrets.

The prompt is passed on stdin, where neither its length nor its first character matters.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import tomlkit

from codex_workspace.common.errors import ConfigError, InputRefused
from codex_workspace.common.values import MAX_INPUT_CHARS, KeyPath, TomlValue
from codex_workspace.config.environment import Secret
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.runtimes.launch import PASSED_ENVIRONMENT, Launch, RunOptions, check_run
from codex_workspace.runtimes.process import run_folder

_SESSION: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_RESERVED: Final = re.compile(r"CODEX_.*|OPENAI_.*|LC_.*|LD_.*")
"""Variables that no secret of an MCP server may have, beside `PASSED_ENVIRONMENT`."""


@contextmanager
def file_arguments(options: RunOptions, launch: Launch) -> Iterator[list[str]]:
    """Create the files of a run; yield the arguments that pass them, which are valid within the block.

    Raises:
        InputRefused: an image does not exist.
    """
    missing = [image.name for image in options.images if not image.is_file()]
    if missing:
        raise InputRefused(f"The image {missing[0]} is not a file.")
    if options.output_schema is None and not options.images:
        yield []
        return
    with run_folder(launch) as folder:
        found: list[str] = []
        if options.output_schema is not None:
            schema = folder / "schema.json"
            schema.write_text(json.dumps(options.output_schema))
            found.append(f"--output-schema={schema}")
        for number, image in enumerate(options.images):
            # Codex splits paths at commas. With `=`, because it takes all arguments that follow `--image` as images.
            link = folder / str(number)
            link.symlink_to(image.absolute())
            found.append(f"--image={link}")
        yield found


def check(prompt: str, options: RunOptions) -> None:
    """Reject a prompt and options that codex would reject or misread.

    Raises:
        InputRefused: see `check_run`; or the session's id is no UUID, or a model, a path or a setting's key cannot be
            passed on a command line.
    """
    check_run(prompt, options, MAX_INPUT_CHARS)
    if options.resume is not None and not _SESSION.fullmatch(options.resume):
        raise InputRefused("The ID of the session to resume is not a UUID.")
    for path in options.config:
        if not path or not all(_BARE_KEY.fullmatch(key) for key in path):
            # Codex splits the path at its dots, even inside quotes.
            raise InputRefused(f"The setting {'.'.join(path)!r} cannot be passed on codex's command line.")
    paths = (options.cwd, *options.writable, *options.images)
    if any("\0" in str(each) for each in (options.model, *paths)):
        raise InputRefused("A model or a path must not contain a NUL character.")


def arguments(options: RunOptions, files: Sequence[str]) -> list[str]:
    """Return the arguments after `codex exec`, with those of `file_arguments`; `options` have passed `check`."""
    sandbox = options.effective_sandbox
    flags = [
        "--json",
        "--color=never",
        *(["--skip-git-repo-check"] if options.skip_git_check else []),
        *(["--ephemeral"] if options.ephemeral else []),
        *_settings(options),
        *([f"--sandbox={sandbox}"] if sandbox is not None else []),
        *([f"--cd={options.cwd}"] if options.cwd is not None else []),
        *(f"--add-dir={folder}" for folder in options.writable),
        *([f"--model={options.model}"] if options.model is not None else []),
        *files,
    ]
    # Before `resume`, which does not accept all of them.
    return [*flags, *(["resume", options.resume] if options.resume is not None else []), "-"]


def overrides(settings: Mapping[str, str]) -> list[str]:
    """Return the `-c` arguments for `settings`; keys are dotted, values are TOML."""
    return [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]


def _settings(options: RunOptions) -> Sequence[str]:
    settings = {".".join(path): tomlkit.item(value).as_string() for path, value in options.config.items()}
    if options.web_search is not None:
        settings["web_search"] = '"live"' if options.web_search else '"disabled"'
    return overrides(settings)


def mcp_overrides(servers: McpServers) -> tuple[dict[KeyPath, TomlValue], dict[str, str]]:
    """Return codex's settings for MCP servers, and the environment variables that contain their secrets.

    Every user of the machine can read a command line; only the same user can read an environment.

    Raises:
        ConfigError: a secret's variable is reserved, or two servers need one variable with two values.
    """
    settings = dict(servers.managed)
    environment: dict[str, str] = {}
    for server in servers.servers:
        settings |= pass_secrets(server.name, server.private, environment)
    return settings, environment


def pass_secrets(
    server: str, secrets: Mapping[tuple[str, str], Secret], environment: dict[str, str]
) -> dict[KeyPath, TomlValue]:
    """Add a server's secrets to `environment`; return the settings that name their variables.

    Raises:
        ConfigError: see `mcp_overrides`.
    """
    settings: dict[KeyPath, TomlValue] = {}
    forwarded: list[str] = []
    for (table, key), secret in secrets.items():
        if table == "env":
            _add_variable(environment, key, secret.reveal(), server)
            forwarded.append(key)
        else:
            name = f"MCP_HEADER_{len(environment)}_{re.sub(r'[^A-Za-z0-9]', '_', server).upper()}"
            _add_variable(environment, name, secret.reveal(), server)
            settings["mcp_servers", server, "env_http_headers", key] = name
    return settings | ({("mcp_servers", server, "env_vars"): forwarded} if forwarded else {})


def _add_variable(environment: dict[str, str], name: str, value: str, server: str) -> None:
    if name in PASSED_ENVIRONMENT or _RESERVED.fullmatch(name):
        raise ConfigError(
            f"mcp_servers: {server}: env: {name} is reserved by codex; choose another name for a secret with "
            "codex.backend: exec"
        )
    if environment.setdefault(name, value) != value:
        raise ConfigError(
            f"mcp_servers: {server}: env: {name} has different values in two servers; use one value for both"
        )
