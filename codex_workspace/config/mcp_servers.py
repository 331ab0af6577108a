"""The MCP servers of config.yaml: their keys in codex's config.toml, and the values that codex gets with each thread.

Codex starts the servers itself, one set for each thread, outside of its sandbox. `${NAME}` is replaced from the agent's
environment, and codex gets the result over its pipe: commands without a sandbox can read its environment and files.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from codex_workspace.common.errors import ConfigLocation
from codex_workspace.common.values import KeyPath, TomlValue
from codex_workspace.config.environment import (
    IN_ENVIRONMENT,
    Environment,
    Secret,
    VariableNotSet,
    read_secret,
    require_header_secret,
)
from codex_workspace.config.validation import EnvName, Items, Seconds, Section, Slug, Text, matching, problem

McpUrl = Annotated[
    str, matching(r"https?://[^\s/?#@\\]+(/[^\s#\\]*)?", "an http:// or https:// URL without user name and fragment")
]
HeaderName = Annotated[str, matching(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}", "the name of an HTTP header")]

SHORTEST_SECRET: Final = 8
"""Shorter values are not redacted: they would match ordinary words."""

_PLAIN: Final = frozenset(
    {*Environment.model_fields, *("USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "HOSTNAME", "PWD")}
)
"""Variables without a secret; their values are not redacted."""

_REQUIRED: Final = ("required",)
_REFERENCE: Final = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?")


class McpServerEntry(Section):
    """An MCP server, started by `command` (stdio) or reached at `url` (streamable HTTP). Times in seconds.

    name: The server's name; the names of its tools begin with it.
    command, args, cwd: The program; cwd is relative to codex's working folder.
    env: The program's variables; `${NAME}` stands for the agent's variable NAME (or the content of NAME_FILE).
    url: The server's address.
    bearer_token_env: The agent's variable with the bearer token for the server.
    headers: Further headers; `${NAME}` as in env.
    startup_timeout_s: How long the server may take to start; a thread's first turn waits for it.
    tool_timeout_s: The time limit of a tool call.
    enabled_tools: The only tools that are offered; null = all.
    disabled_tools: Tools that are not offered.
    required: Without this server no turn starts.
    trusted: Its tools run without approval, under every approval policy.
    """

    name: Slug
    command: Text | None = None
    args: Items[str] = ()
    env: Mapping[EnvName, str] = Field(default_factory=dict)
    cwd: Text | None = None
    url: McpUrl | None = None
    bearer_token_env: EnvName | None = None
    headers: Mapping[HeaderName, str] = Field(default_factory=dict)
    startup_timeout_s: Seconds = 30.0
    tool_timeout_s: Seconds = 60.0
    enabled_tools: Items[Text] | None = None
    disabled_tools: Items[Text] = ()
    required: bool = False
    trusted: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise problem("must have either command or url")
        is_program = self.url is None
        for key in ("bearer_token_env", "headers") if is_program else ("args", "env", "cwd"):
            if getattr(self, key):
                raise problem(f"is only valid for a server with {'url' if is_program else 'command'}", key)
        if self.bearer_token_env is not None and any(name.lower() == "authorization" for name in self.headers):
            raise problem("must not contain Authorization if bearer_token_env is set", "headers")
        return self


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server in codex's configuration.

    table: its keys in config.toml, below `mcp_servers.<name>`, without secrets.
    private: further keys, by table and key, such as `env` and a variable's name; never in a file.
    secrets: the values that are redacted.
    """

    name: str
    table: Mapping[KeyPath, TomlValue]
    private: Mapping[tuple[str, str], Secret]
    secrets: tuple[Secret, ...]
    startup_timeout_s: float
    required: bool
    trusted: bool


@dataclass(frozen=True, slots=True)
class McpServers:
    """All servers. `left_out`: the reason for each server that is left out, by name."""

    servers: tuple[McpServer, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def managed(self) -> dict[KeyPath, TomlValue]:
        """The servers' keys in config.toml."""
        return {
            ("mcp_servers", server.name, *path): value
            for server in self.servers
            for path, value in server.table.items()
        }

    @property
    def private(self) -> dict[str, Mapping[tuple[str, str], Secret]]:
        """The keys that codex gets with each thread, by server."""
        return {server.name: server.private for server in self.servers if server.private}

    @property
    def secrets(self) -> list[Secret]:
        """The values that are redacted in logs and answers."""
        return [secret for server in self.servers for secret in server.secrets]

    def threads_within(self, processes: int, threads: int) -> int:
        """Return the number of threads, at most `threads`, that run at most `processes` server processes in total."""
        programs = sum(("command",) in server.table for server in self.servers)
        return min(threads, max(1, processes // programs)) if programs else threads

    @property
    def required(self) -> bool:
        """Whether a server must run before a turn can start."""
        return any(server.required for server in self.servers)

    @property
    def optional(self) -> "McpServers":
        """The same servers, none of them required."""
        servers = [
            replace(
                server, required=False, table={path: server.table[path] for path in server.table if path != _REQUIRED}
            )
            for server in self.servers
        ]
        return McpServers(tuple(servers), self.left_out)

    @property
    def patience_s(self) -> float:
        """The longest start timeout; 0 without servers."""
        return max((server.startup_timeout_s for server in self.servers), default=0.0)


def resolve(entries: Iterable[McpServerEntry], env: Mapping[str, str], location: ConfigLocation) -> McpServers:
    """Return the servers with their variables from `env`. `location` is the location of `entries`, for messages.

    A server that is not required is left out if one of its variables is not set.

    Raises:
        ConfigError: a reference is malformed, or a variable of a required server is not set.
    """
    found: list[McpServer] = []
    left_out: dict[str, str] = {}
    for index, entry in enumerate(entries):
        try:
            found.append(_resolved(entry, env, location.item(index)))
        except VariableNotSet as error:
            if entry.required:
                raise
            left_out[entry.name] = error.reason
    return McpServers(tuple(found), left_out)


def _resolved(entry: McpServerEntry, env: Mapping[str, str], here: ConfigLocation) -> McpServer:
    table: dict[KeyPath, TomlValue] = {}
    private: dict[tuple[str, str], Secret] = {}
    secrets: list[Secret] = []
    if entry.command is not None:
        table |= {("command",): entry.command, ("args",): list(entry.args)}
    if entry.cwd is not None:
        table["cwd",] = entry.cwd
    if entry.url is not None:
        table["url",] = entry.url
    if entry.bearer_token_env is not None:
        token = require_header_secret(env, entry.bearer_token_env, here.at("bearer_token_env"))
        secrets.append(token)
        private["http_headers", "Authorization"] = Secret(f"Bearer {token.reveal()}")
    for key, toml_key, values in (("env", "env", entry.env), ("headers", "http_headers", entry.headers)):
        for name, text in values.items():
            location = here.at(key).at(name)
            value = _filled(text, env, location, secrets)
            if key == "headers" and not re.fullmatch(r"[\x20-\x7e]*", value):
                raise location.error("must be printable ASCII without line breaks")
            if "${" in text.replace("$${", ""):
                private[toml_key, name] = Secret(value)
            else:
                table[toml_key, name] = value
    table |= {("startup_timeout_sec",): entry.startup_timeout_s, ("tool_timeout_sec",): entry.tool_timeout_s}
    if entry.enabled_tools is not None:
        table["enabled_tools",] = list(entry.enabled_tools)
    if entry.disabled_tools:
        table["disabled_tools",] = list(entry.disabled_tools)
    if entry.required:
        table[_REQUIRED] = True
    if entry.trusted:
        # Without it, sandboxed codex 0.163 rejects under `never` every tool that is not declared read-only.
        table["default_tools_approval_mode",] = "approve"
    return McpServer(entry.name, table, private, tuple(secrets), entry.startup_timeout_s, entry.required, entry.trusted)


def _filled(text: str, env: Mapping[str, str], location: ConfigLocation, secrets: list[Secret]) -> str:
    """Return `text` with every `${NAME}` replaced; append the values that are redacted to `secrets`."""

    def value_of(reference: re.Match[str]) -> str:
        if reference[0] == "$${":
            return "${"
        name = reference[1]
        if name is None:
            raise location.error("contains ${ without a variable name and }; write $${ for a plain ${")
        value = read_secret(env, name)
        if value is None:
            raise VariableNotSet(name, location)
        if "\0" in value.reveal():
            raise IN_ENVIRONMENT.at(name).error("contains a NUL character, which a variable cannot contain")
        if name not in _PLAIN and len(value.reveal()) >= SHORTEST_SECRET:
            secrets.append(value)
        return value.reveal()

    return _REFERENCE.sub(value_of, text)
