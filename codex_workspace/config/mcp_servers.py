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
from codex_workspace.config.environment import ENVIRONMENT, IN_ENVIRONMENT, Secret, read_header_secret, read_secret
from codex_workspace.config.validation import EnvName, Items, Seconds, Section, Slug, Text, matching, problem

McpUrl = Annotated[
    str,
    matching(r"https?://[^\s/?#@\\]+(/[^\s#\\]*)?", "an http:// or https:// URL without user name and fragment"),
]
HeaderName = Annotated[str, matching(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}", "the name of an HTTP header")]

SHORTEST_SECRET: Final = 8
"""Shorter values are not redacted: they would match ordinary words."""

_PLAIN: Final = frozenset(
    {
        *(variable.name for variable in ENVIRONMENT if not variable.secret),
        *("USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "HOSTNAME", "PWD"),
    }
)
"""Variables without a secret; their values are not redacted."""

_REQUIRED: Final = ("required",)
_REFERENCE: Final = re.compile(r"\$(\$\{)|\$\{([^}]*)\}?")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
            raise problem("must have one of command and url")
        is_program = self.url is None
        for key in ("bearer_token_env", "headers") if is_program else ("args", "env", "cwd"):
            if getattr(self, key):
                raise problem(f"is for a server with {'url' if is_program else 'command'}", key)
        if self.bearer_token_env is not None and any(name.lower() == "authorization" for name in self.headers):
            raise problem("must not hold Authorization beside bearer_token_env", "headers")
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
    """All servers. `left_out`: for each server that is left out, why."""

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
        """Return the number of threads, at most `threads`, that run `processes` server processes in total."""
        programs = sum(("command",) in server.table for server in self.servers)
        return min(threads, max(1, processes // programs)) if programs else threads

    @property
    def required(self) -> bool:
        """Whether no turn starts without one of them."""
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


class _Missing(Exception):
    """A variable that config.yaml names is not set."""

    def __init__(self, name: str, location: ConfigLocation) -> None:
        super().__init__(name)
        self.name = name
        self.location = location

    @property
    def problem(self) -> str:
        return f"names the variable {self.name}, which is not set; set it (or {self.name}_FILE)"


def resolve(entries: Iterable[McpServerEntry], env: Mapping[str, str], location: ConfigLocation) -> McpServers:
    """Return the servers with their variables from `env`. `location` is the location of `entries`, for messages.

    A server that is not required is left out if one of its variables is not set.

    Raises:
        ConfigError: a reference is malformed, or a variable of a required server is not set.
    """
    found: dict[str, McpServer] = {}
    left_out: dict[str, str] = {}
    for index, entry in enumerate(entries):
        here = location.item(index)
        try:
            found[entry.name] = _Reader(entry, env, here).server()
        except _Missing as missing:
            if entry.required:
                raise missing.location.error(missing.problem) from None
            left_out[entry.name] = f"{missing.location.key} {missing.problem}"
    return McpServers(tuple(found.values()), left_out)


class _Reader:
    """Converts an entry to an `McpServer`."""

    def __init__(self, entry: McpServerEntry, env: Mapping[str, str], here: ConfigLocation) -> None:
        self._entry = entry
        self._env = env
        self._here = here
        self._private: dict[tuple[str, str], Secret] = {}
        self._secrets: list[Secret] = []

    def server(self) -> McpServer:
        entry = self._entry
        own = self._program(entry.command) if entry.command is not None else self._address(entry.url or "")
        return McpServer(
            entry.name,
            own | self._common(),
            self._private,
            tuple(self._secrets),
            entry.startup_timeout_s,
            entry.required,
            entry.trusted,
        )

    def _common(self) -> dict[KeyPath, TomlValue]:
        entry = self._entry
        table: dict[KeyPath, TomlValue] = {
            ("startup_timeout_sec",): entry.startup_timeout_s,
            ("tool_timeout_sec",): entry.tool_timeout_s,
        }
        if entry.enabled_tools is not None:
            table["enabled_tools",] = list(entry.enabled_tools)
        if entry.disabled_tools:
            table["disabled_tools",] = list(entry.disabled_tools)
        if entry.required:
            table[_REQUIRED] = True
        if entry.trusted:
            # Without it, sandboxed codex 0.163 rejects under `never` every tool that is not declared read-only.
            table["default_tools_approval_mode",] = "approve"
        return table

    def _program(self, command: str) -> dict[KeyPath, TomlValue]:
        table: dict[KeyPath, TomlValue] = {("command",): command, ("args",): list(self._entry.args)}
        if self._entry.cwd is not None:
            table["cwd",] = self._entry.cwd
        for name, text in self._entry.env.items():
            value = self._filled(text, self._here.at("env").at(name))
            if value is None:
                table["env", name] = text.replace("$${", "${")
            else:
                self._private["env", name] = value
        return table

    def _address(self, url: str) -> dict[KeyPath, TomlValue]:
        table: dict[KeyPath, TomlValue] = {("url",): url}
        name = self._entry.bearer_token_env
        if name is not None:
            token = read_header_secret(self._env, name)
            if token is None:
                raise _Missing(name, self._here.at("bearer_token_env"))
            self._secrets.append(token)
            self._private["http_headers", "Authorization"] = Secret(f"Bearer {token.reveal()}")
        for header, text in self._entry.headers.items():
            location = self._here.at("headers").at(header)
            value = self._filled(text, location)
            if not re.fullmatch(r"[\x20-\x7e]*", text if value is None else value.reveal()):
                raise location.error("must be printable ASCII without line breaks")
            if value is None:
                table["http_headers", header] = text.replace("$${", "${")
            else:
                self._private["http_headers", header] = value
        return table

    def _filled(self, text: str, location: ConfigLocation) -> Secret | None:
        """Return `text` with every `${NAME}` replaced; None if it has none."""
        filled: list[str] = []
        end = 0
        named = False
        for found in _REFERENCE.finditer(text):
            named = named or found[1] is None
            filled += (text[end : found.start()], found[1] or self._value(found[0], location))
            end = found.end()
        return Secret("".join((*filled, text[end:]))) if named else None

    def _value(self, reference: str, location: ConfigLocation) -> str:
        name = reference.removeprefix("${").removesuffix("}")
        if not (reference.endswith("}") and _NAME.fullmatch(name)):
            raise location.error("holds ${ without the name of a variable and }; a plain ${ is written $${")
        value = read_secret(self._env, name)
        if value is None:
            raise _Missing(name, location)
        if "\0" in value.reveal():
            raise IN_ENVIRONMENT.at(name).error("holds a NUL, which a variable cannot contain")
        if name not in _PLAIN and len(value.reveal()) >= SHORTEST_SECRET:
            self._secrets.append(value)
        return value.reveal()
