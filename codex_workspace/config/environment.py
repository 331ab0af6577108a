"""The environment variables of the agent, and secrets from variables and files."""

import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.common.files import read_config_file
from codex_workspace.common.values import quoted
from codex_workspace.config.a2a_server import origin_of
from codex_workspace.config.validation import HttpUrl, Section, Text, problem, read_section

IN_ENVIRONMENT = ConfigLocation("environment")
"""The location of variables: `IN_ENVIRONMENT.at(name).error(…)`."""

_FLAGS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def _port(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", value) or int(value) > 65535:
        raise problem(f"must be a whole number from 0 to 65535, but is {quoted(value)}")
    return int(value)


def _flag(value: str) -> bool:
    if value.lower() not in _FLAGS:
        raise problem(f"must be one of {', '.join(_FLAGS)}, but is {quoted(value)}")
    return _FLAGS[value.lower()]


Port = Annotated[int, BeforeValidator(_port)]
Flag = Annotated[bool, BeforeValidator(_flag)]


class Environment(Section):
    """The agent's variables that are not secrets; docs/configuration.md describes them."""

    WORKSPACE_CONFIG_PATH: str | None = None
    WORKSPACE_STATE_DIR: str | None = None
    WORKSPACE_DIR: str | None = None
    CODEX_HOME: str | None = None
    CODEX_BIN: str | None = None
    SANDBOX_FALLBACK: Literal["container"] | None = None
    A2A_HOST: str = "127.0.0.1"
    A2A_PORT: Port | None = None
    A2A_GRPC_PORT: Port | None = None
    A2A_ALLOW_ANONYMOUS: Flag = False
    A2A_PUBLIC_URL: Annotated[HttpUrl, AfterValidator(lambda url: origin_of(url) and url)] | None = None
    LOG_FORMAT: Annotated[Literal["text", "json"], BeforeValidator(str.lower)] = "text"
    LOG_LEVEL: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(str.lower)] = "info"
    OTEL_EXPORTER_OTLP_ENDPOINT: HttpUrl | None = None
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: HttpUrl | None = None
    OTEL_EXPORTER_OTLP_PROTOCOL: Annotated[Literal["http/protobuf"], BeforeValidator(str.lower)] = "http/protobuf"
    OTEL_TRACES_EXPORTER: Annotated[Literal["otlp", "none"], BeforeValidator(str.lower)] = "otlp"
    OTEL_SDK_DISABLED: Flag = False
    PLATFORM_URL: HttpUrl | None = None
    WORKSPACE_ID: str | None = None
    CONFIGS_DIR: str | None = None
    MOLECULE_MODEL: Text | None = None
    MODEL: Text | None = None
    HOME: str | None = None
    XDG_STATE_HOME: str | None = None
    PATH: str = ""

    @property
    def has_traces(self) -> bool:
        """Whether spans are exported."""
        endpoint = self.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or self.OTEL_EXPORTER_OTLP_ENDPOINT
        return endpoint is not None and self.OTEL_TRACES_EXPORTER == "otlp" and not self.OTEL_SDK_DISABLED

    def path(self, value: str | None, cwd: Path) -> Path | None:
        """Return a variable's value as an absolute path; expands `~`, which docker's --env-file does not."""
        if value is None:
            return None
        if self.HOME and (value == "~" or value.startswith("~/")):
            value = self.HOME + value[1:]
        return (cwd / value).resolve()


SECRETS: Final = (
    *("A2A_TOKEN", "DATABASE_URL", "METRICS_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "MOLECULE_WORKSPACE_TOKEN"),
)
"""The agent's variables that are secrets; the credentials of providers are in `providers`."""

CREDENTIALS: Final = (
    *("OPENAI_API_KEY", "CODEX_API_KEY", "CODEX_AUTH_JSON", "CODEX_CHATGPT_AUTH_JSON"),
    *("MOLECULE_WORKSPACE_TOKEN", "ADMIN_TOKEN"),
)
"""Variables that always hold a credential; config.yaml can name others."""


def read_environment(env: Mapping[str, str]) -> Environment:
    """Return the agent's variables; an empty variable counts as not set.

    Raises:
        ConfigError: a value is not allowed.
    """
    values = {name: env[name] for name in Environment.model_fields if env.get(name)}
    return read_section(Environment, values, IN_ENVIRONMENT)


# --- Secrets


class Secret:
    """A text that only `reveal` returns; `str`, `repr`, f-strings and `dataclasses.asdict` show `***`.

    It is not a dataclass, because `asdict` would copy the text.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text, only for the code that sends it."""
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


class VariableNotSet(ConfigError):
    """A variable that config.yaml names is not set."""

    def __init__(self, name: str, location: ConfigLocation) -> None:
        problem = f"names the variable {name}, which is not set; set it (or {name}_FILE)"
        super().__init__(str(location.error(problem)))
        self.reason = f"{location.key} {problem}"


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


def require_header_secret(env: Mapping[str, str], name: str, location: ConfigLocation) -> Secret:
    """Return a secret as `read_header_secret` does.

    Raises:
        VariableNotSet: at `location`.
    """
    secret = read_header_secret(env, name)
    if secret is None:
        raise VariableNotSet(name, location)
    return secret


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
        text = read_config_file(file).decode()
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
        raise location.error("must be printable ASCII without spaces or line breaks")
    return secret


# --- Secrets inside of values, for redaction

SHORTEST_TOKEN: Final = 20
"""Shorter texts in a JSON credential are not tokens but, for example, its type or a date."""

SHORTEST_HEADER_SECRET: Final = 8
"""Shorter values of a header are not secrets but, for example, a tenant's number."""


def tokens_in(credential: str) -> list[str]:
    """Return the tokens in a credential that is JSON, such as a subscription's login."""
    pattern = rf'"([^"\\]{{{SHORTEST_TOKEN},}})"'
    return re.findall(pattern, credential) if credential.lstrip().startswith("{") else []


def header_secrets(headers: str) -> list[str]:
    """Return the secret values in `name=value,…`, and the token alone in values such as "Bearer …"."""
    values = [unquote(pair.partition("=")[2].strip()) for pair in headers.split(",")]
    values += [value.rpartition(" ")[2] for value in values if " " in value]
    return [value for value in values if len(value) >= SHORTEST_HEADER_SECRET]


def secrets_in_url(url: str) -> list[str]:
    """Return a URL and its passwords if it has any, or the text itself if it is not a URL."""
    try:
        parsed = urlsplit(url)
    except ValueError:
        return [url]
    passwords = [parsed.password or "", *parse_qs(parsed.query).get("password", [])]
    found = [secret for password in passwords if password for secret in (password, unquote(password))]
    return [url, *found] if found or "://" not in url else []


def without_proxy_for(host: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with `host` added to NO_PROXY, if it configures a proxy."""
    if not any(name.lower() in ("http_proxy", "all_proxy") for name in env):
        return dict(env)
    excepted = {name: f"{env[name]},{host}" if env.get(name) else host for name in ("NO_PROXY", "no_proxy")}
    return {**env, **excepted}
