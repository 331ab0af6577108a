"""The environment variables of the agent, how they are checked, and secrets from variables and files."""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from codex_workspace.common.errors import ConfigLocation
from codex_workspace.common.values import quoted
from codex_workspace.config.validation import check_text

_T = TypeVar("_T")


class Secret:
    """A text that only `reveal` returns; `str`, `repr`, f-strings and `dataclasses.asdict` show `***`.

    Not a dataclass, as `asdict` would copy the text.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself; for the one location that sends it."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    def __str__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        """Compare both texts in constant time."""
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(
            self._text.encode("utf-8", "surrogateescape"), other._text.encode("utf-8", "surrogateescape")
        )

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of the agent, as docs/configuration.md lists it."""

    name: str
    meaning: str
    default: str
    secret: bool = False


ENVIRONMENT: tuple[Variable, ...] = (
    Variable(
        "WORKSPACE_CONFIG_PATH", "folder of config.yaml", "/configs if it contains one, else the template's folder"
    ),
    Variable("WORKSPACE_STATE_DIR", "state folder", "/configs/.codex-workspace, else ~/.local/state/codex-workspace"),
    Variable("WORKSPACE_DIR", "codex's working folder", "/workspace if it exists, else the current folder"),
    Variable("CODEX_HOME", "codex's own folder", "codex in the state folder"),
    Variable("CODEX_BIN", "codex's native binary", "the binary of the pinned package"),
    Variable("A2A_HOST", "address to listen on", "127.0.0.1"),
    Variable("A2A_PORT", "port to listen on; 0 = any free port", "a2a.port, which is 8000"),
    Variable("A2A_GRPC_PORT", "port for gRPC; 0 = any free port", "off"),
    Variable("A2A_TOKEN", "bearer token that callers must send", "none", secret=True),
    Variable("A2A_ALLOW_ANONYMOUS", "1 = listen beyond loopback without a token", "0"),
    Variable("A2A_PUBLIC_URL", "URL on the agent card", "the listening address"),
    Variable("DATABASE_URL", "SQLAlchemy URL of the database", "a SQLite file in the state folder", secret=True),
    Variable("LOG_FORMAT", "text or json", "text"),
    Variable("LOG_LEVEL", "debug, info, warning or error", "info"),
    Variable("METRICS_TOKEN", "bearer token for /metrics only", "none", secret=True),
    Variable("OTEL_EXPORTER_OTLP_ENDPOINT", "base URL for traces (OTLP over HTTP); /v1/traces is appended", "off"),
    Variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "URL for traces, used unchanged", "off"),
    Variable("OTEL_EXPORTER_OTLP_HEADERS", "headers for the exporter, as name=value,…", "none", secret=True),
    Variable("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf, the only supported protocol", "http/protobuf"),
    Variable("OTEL_TRACES_EXPORTER", "otlp or none", "otlp"),
    Variable("OTEL_SDK_DISABLED", "true = no traces", "false"),
    Variable("PLATFORM_URL", "URL of the platform to register with", "off"),
    Variable("WORKSPACE_ID", "the agent's ID on the platform", "none"),
    Variable("MOLECULE_WORKSPACE_TOKEN", "bearer token for the platform", "issued at registration", secret=True),
    Variable("CONFIGS_DIR", "folder with the platform's .auth_token", "config.yaml's folder"),
    Variable("MOLECULE_MODEL", "model; takes precedence over MODEL and config.yaml", "none"),
    Variable("MODEL", "model; takes precedence over config.yaml", "none"),
    Variable("HOME", "base of the default state folder", "none"),
    Variable("XDG_STATE_HOME", "base of the default state folder", "~/.local/state"),
    Variable("PATH", "search path for a CODEX_BIN without a slash", "none"),
)
"""Every variable that `load_settings` reads; the credentials of providers are in `providers`."""

_KNOWN = {variable.name: variable for variable in ENVIRONMENT}
IN_ENVIRONMENT = ConfigLocation("environment")
"""The location of variables: `IN_ENVIRONMENT.at(name).error(…)`."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Variables:
    """The variables in `ENVIRONMENT`. An empty variable counts as not set."""

    env: Mapping[str, str]

    def text(self, name: str) -> str | None:
        assert not _KNOWN[name].secret, name
        return self.env.get(name) or None

    def checked(self, name: str, kind: object) -> str | None:
        """Return the variable if it is a valid `kind`, such as `HttpUrl`."""
        value = self.text(name)
        return None if value is None else check_text(kind, value, IN_ENVIRONMENT.at(name))

    def port(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not re.fullmatch(r"[0-9]{1,5}", value) or int(value) > 65535:
            raise IN_ENVIRONMENT.at(name).error(f"must be a whole number from 0 to 65535, but is {quoted(value)}")
        return int(value)

    def flag(self, name: str) -> bool:
        value = (self.text(name) or "0").lower()
        if value not in (*_TRUE, *_FALSE):
            raise IN_ENVIRONMENT.at(name).error(
                f"must be one of {', '.join((*_TRUE, *_FALSE))}, but is {quoted(value)}"
            )
        return value in _TRUE

    def choice(self, name: str, allowed: Mapping[str, _T], default: str) -> _T:
        value = (self.text(name) or default).lower()
        if value not in allowed:
            raise IN_ENVIRONMENT.at(name).error(f"must be one of {', '.join(allowed)}, but is {quoted(value)}")
        return allowed[value]

    def path(self, name: str, cwd: Path) -> Path | None:
        value = self.text(name)
        if value is None:
            return None
        home = self.env.get("HOME")
        if home and (value == "~" or value.startswith("~/")):  # docker's --env-file does not expand it
            value = home + value[1:]
        return (cwd / value).resolve()

    def secret(self, name: str) -> Secret | None:
        assert _KNOWN[name].secret, name
        return read_secret(self.env, name)


CREDENTIALS = (
    *("OPENAI_API_KEY", "CODEX_API_KEY", "CODEX_AUTH_JSON", "CODEX_CHATGPT_AUTH_JSON"),
    *("MOLECULE_WORKSPACE_TOKEN", "ADMIN_TOKEN"),
)
"""Variables that always hold a credential; config.yaml can name others."""


def read_secret(env: Mapping[str, str], name: str) -> Secret | None:
    """Return the secret in variable `name`, or in the file that `name`_FILE names, without one trailing newline.

    None if neither is set; an empty variable counts as not set.

    Raises:
        ConfigError: both are set, or the file cannot be read, is not UTF-8 or is empty.
    """
    value, file = env.get(name) or None, env.get(f"{name}_FILE") or None
    if file is None:
        return None if value is None else Secret(value)
    location = IN_ENVIRONMENT.at(f"{name}_FILE")
    if value is not None:
        raise location.error(f"is set as well as {name}; set one of them")
    return Secret(_text_of(Path(file), location))


def read_header_secret(env: Mapping[str, str], name: str) -> Secret | None:
    """Return a secret as `read_secret` does, for use in an HTTP header.

    Raises:
        ConfigError: as `read_secret`, or the secret has a character that is not valid in a header.
    """
    secret = read_secret(env, name)
    return None if secret is None else _for_header(secret, IN_ENVIRONMENT.at(name))


def read_header_secret_file(file: Path, location: ConfigLocation) -> Secret:
    """Return the secret in a file, without one trailing newline, for use in an HTTP header.

    Raises:
        ConfigError: at `location`, without the secret.
    """
    return _for_header(Secret(_text_of(file, location)), location)


def _text_of(file: Path, location: ConfigLocation) -> str:
    # Only an absolute path is shown: other text may be the secret itself, put in the wrong variable.
    path = f"the path {file}" if file.is_absolute() else "the path"
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        remedy = f"correct {path}, or create a file there that this user may read"
        raise location.error(f"names a file that cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:  # not UTF-8, or a NUL in the name
        raise location.error("names a file that is not UTF-8 text") from error
    text = text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")
    if not text:
        raise location.error("names a file that is empty")
    return text


def _for_header(secret: Secret, location: ConfigLocation) -> Secret:
    if not re.fullmatch(r"[\x21-\x7e]+", secret.reveal()):
        raise location.error("must be printable ASCII without blanks or line breaks")
    return secret


def without_proxy_for(host: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with `host` excepted from its proxies, if it names any."""
    if not any(name.lower() in ("http_proxy", "all_proxy") for name in env):
        return dict(env)
    excepted = {name: f"{env[name]},{host}" if env.get(name) else host for name in ("NO_PROXY", "no_proxy")}
    return {**env, **excepted}
