"""Reads config.yaml, the files that it names and the environment into frozen `Settings`."""

import importlib.util
import ipaddress
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

from codex_workspace.common.errors import CodexCannotStart, ConfigLocation
from codex_workspace.common.values import quoted
from codex_workspace.config.environment import (
    CREDENTIALS,
    IN_ENVIRONMENT,
    Secret,
    Variables,
    read_header_secret,
    read_header_secret_file,
)
from codex_workspace.config.mcp_servers import resolve
from codex_workspace.config.peers import resolve_peers
from codex_workspace.config.prompts import read_instructions, read_skills
from codex_workspace.config.providers import ChosenProvider
from codex_workspace.config.settings import (
    CONFIG_NAME,
    MISPLACED,
    OWN_TOOLS,
    PLATFORM_DEFAULT_MODEL,
    PLATFORM_TOKEN,
    PROVISIONED_TOKEN,
    TEMPLATE_DIR,
    Config,
    ListenSettings,
    LogSettings,
    ObservabilitySettings,
    PlatformSettings,
    PrincipalEntry,
    PushConfig,
    Settings,
)
from codex_workspace.config.validation import HttpUrl, Text, load_yaml, read_section

SHORTEST_SECRET: Final = 6
"""Shorter secrets would match ordinary words in the model's text."""

_LOG_FORMATS: Mapping[str, Literal["text", "json"]] = {"text": "text", "json": "json"}
_LOG_LEVELS: Mapping[str, Literal["DEBUG", "INFO", "WARNING", "ERROR"]] = {
    "debug": "DEBUG",
    "info": "INFO",
    "warning": "WARNING",
    "error": "ERROR",
}


def load_settings(
    env: Mapping[str, str], *, config_path: Path | None = None, cwd: Path | None = None, root: Path = Path("/")
) -> Settings:
    """Return the settings of this process. Reads files and writes none.

    Args:
        config_path: The folder of config.yaml; takes precedence over WORKSPACE_CONFIG_PATH.
        cwd: Replaces the current folder.
        root: The folder in which `configs` and `workspace` are looked up.

    Raises:
        ConfigError: one sentence with file or variable, key, and what is allowed.
    """
    variables = Variables(env)
    here = (cwd or Path.cwd()).resolve()
    file = _config_file(variables, config_path, here, root)
    location = ConfigLocation(str(file))
    content = load_yaml(file)
    config = read_section(Config, content, location)
    state = _state_dir(variables, here, root)
    workspace, home = _workspace_dir(variables, here, root), variables.path("CODEX_HOME", here) or state / "codex"
    model, source = _model(variables, config, location)
    listen = _listen(variables, config, location, file.parent)
    settings = Settings(
        config=config,
        config_file=file,
        state_dir=state,
        workspace_dir=workspace,
        codex_home=home,
        codex_bin=_codex_bin(variables, here),
        listen=listen,
        database_url=_database_url(variables, state),
        log=_log(variables),
        platform=_platform(variables, state, (variables.path("CONFIGS_DIR", here), file.parent)),
        model=model,
        model_source=source,
        mcp=resolve(config.mcp_servers, env, location.at("mcp_servers")),
        instructions=read_instructions(
            config.prompt_files, file.parent, location.at("prompt_files"), (workspace, home)
        ),
        skills=read_skills(config.skills, file.parent, location.at("skills")),
        observing=_observing(variables, listen),
        misplaced=tuple(key for key in MISPLACED if isinstance(content, dict) and key in content),
        unused=_credentials_in(env, config),
        peers=resolve_peers(config.peers, env, location.at("peers")),
    )
    _check_allowed(config.push, location.at("push.allow"))
    _check_names(settings, location.at("mcp_servers"))
    _check_writable_folders(settings, location.at("codex.writable_folders"))
    return settings


def _credentials_in(env: Mapping[str, str], config: Config) -> tuple[Secret, ...]:
    """Return every credential in the environment, used or not."""
    names = dict.fromkeys((*CREDENTIALS, *(name for entry in config.providers for name in entry.auth_env)))
    return tuple(Secret(env[name]) for name in names if env.get(name))


def _check_allowed(push: PushConfig, location: ConfigLocation) -> None:
    if push.allow:
        # Imported only if needed: its HTTP client takes 100 ms.
        from codex_workspace.common.safe_http import AllowList

        AllowList.parse(push.allow, location)


def _check_names(settings: Settings, location: ConfigLocation) -> None:
    for index, entry in enumerate(settings.config.mcp_servers):
        if entry.name == OWN_TOOLS and settings.has_agent_tools:
            raise (
                location.item(index)
                .at("name")
                .error(f"must not be {OWN_TOOLS}, which is the agent's own; rename it, or set agent_tools: never")
            )


def _check_writable_folders(settings: Settings, location: ConfigLocation) -> None:
    """Reject writable folders that do not exist, or that contain files of the agent's."""
    own = {
        "the state folder": settings.state_dir,
        "CODEX_HOME": settings.codex_home,
        "config.yaml": settings.config_file,
        "the skills": settings.config_file.parent / "skills",
    }
    for index, folder in enumerate(settings.writable_folders):
        # Codex accepts any name, and its sandbox then fails at the first command.
        if not folder.is_dir():
            raise location.item(index).error(f"must be a folder that exists, but {folder} is not")
        for name, path in own.items():
            if folder.is_relative_to(path.resolve()) or path.resolve().is_relative_to(folder):
                raise location.item(index).error(
                    f"must be apart from {name} ({path}), as commands could change the agent there, but is {folder}"
                )


def _config_file(variables: Variables, given: Path | None, cwd: Path, root: Path) -> Path:
    folder = (cwd / given).resolve() if given else variables.path("WORKSPACE_CONFIG_PATH", cwd)
    if folder is None:
        mounted = root / "configs" / CONFIG_NAME
        return mounted if mounted.is_file() else TEMPLATE_DIR / CONFIG_NAME
    if folder.is_file():
        raise IN_ENVIRONMENT.at("WORKSPACE_CONFIG_PATH").error(
            f"must be the folder of {CONFIG_NAME}, but {folder} is a file"
        )
    return folder / CONFIG_NAME


def _state_dir(variables: Variables, cwd: Path, root: Path) -> Path:
    if folder := variables.path("WORKSPACE_STATE_DIR", cwd):
        return folder
    configs = root / "configs"
    if configs.is_dir() and os.access(configs, os.W_OK):
        return configs / ".codex-workspace"
    if base := variables.path("XDG_STATE_HOME", cwd):
        return base / "codex-workspace"
    if home := variables.path("HOME", cwd):
        return home / ".local" / "state" / "codex-workspace"
    raise IN_ENVIRONMENT.at("WORKSPACE_STATE_DIR").error("must name a folder, as neither /configs nor HOME is there")


def _workspace_dir(variables: Variables, cwd: Path, root: Path) -> Path:
    named = variables.path("WORKSPACE_DIR", cwd)
    mounted = root / "workspace"
    folder = named or (mounted if mounted.is_dir() else cwd)
    # Codex takes any cwd, and every command in one that is not there fails.
    if not folder.is_dir():
        raise IN_ENVIRONMENT.at("WORKSPACE_DIR").error(f"must be a folder that exists, but {folder} is not")
    return folder


def check_secrets(settings: Settings, provider: ChosenProvider) -> None:
    """Reject secrets that cannot be redacted, because they would match ordinary words.

    Raises:
        ConfigError: names the variable or key.
    """
    file = ConfigLocation(str(settings.config_file))
    secrets: list[tuple[ConfigLocation, Secret | None]] = [
        (IN_ENVIRONMENT.at("A2A_TOKEN"), settings.listen.token),
        (IN_ENVIRONMENT.at("METRICS_TOKEN"), settings.observing.metrics_token),
        (IN_ENVIRONMENT.at("MOLECULE_WORKSPACE_TOKEN"), settings.platform.token if settings.platform else None),
        (IN_ENVIRONMENT.at(provider.env_key or ""), provider.credential),
        *((file.at(f"principals: {name}"), token) for name, token in settings.listen.principals.items()),
        *((file.at(f"peers: {peer.name}"), peer.token) for peer in settings.peers),
    ]
    for location, secret in secrets:
        if secret is not None and len(secret.reveal()) < SHORTEST_SECRET:
            raise location.error(
                f"is too short to be redacted from logs and answers; use at least {SHORTEST_SECRET} characters"
            )


def require_codex(binary: Path | None) -> Path:
    """Return `binary`, the settings' `codex_bin`, if it can be run.

    Raises:
        CodexCannotStart: it is missing or cannot be run; names CODEX_BIN and the remedy.
    """
    remedy = "set CODEX_BIN to a codex executable, or install openai-codex-cli-bin and unset it"
    if binary is None:
        raise CodexCannotStart(f"codex is not installed, or CODEX_BIN names a program that is not in PATH; {remedy}")
    if not binary.exists():
        raise CodexCannotStart(f"CODEX_BIN: {binary}: No such file or directory; {remedy}")
    if not binary.is_file() or not os.access(binary, os.X_OK):
        why = "is not executable" if binary.is_file() else "is not a file"
        raise CodexCannotStart(f"CODEX_BIN: {binary} {why}; {remedy}")
    return binary


def _codex_bin(variables: Variables, cwd: Path) -> Path | None:
    named = variables.text("CODEX_BIN")
    if named and "/" not in named:
        found = shutil.which(named, path=variables.text("PATH") or "")
        return Path(found) if found else None
    return variables.path("CODEX_BIN", cwd) or _wheel_binary()


def _wheel_binary() -> Path | None:
    spec = importlib.util.find_spec("codex_cli_bin")
    for folder in (spec and spec.submodule_search_locations) or ():
        binary = Path(folder) / "bin" / "codex"
        if binary.is_file():
            return binary
    return None


def _model(variables: Variables, config: Config, location: ConfigLocation) -> tuple[str, str]:
    """Return the model and its source, in the platform's order; without its default, which no codex provider has."""
    top = None if config.model == PLATFORM_DEFAULT_MODEL else config.model
    for model, source in (
        (variables.checked("MOLECULE_MODEL", Text), "environment: MOLECULE_MODEL"),
        (variables.checked("MODEL", Text), "environment: MODEL"),
        (config.runtime_config.model, f"{location.file}: runtime_config.model"),
        (top, f"{location.file}: model"),
    ):
        if model is not None:
            return model, source
    raise location.at("runtime_config.model").error("is missing; it must be a model such as gpt-5.5 (or set MODEL)")


def _listen(variables: Variables, config: Config, location: ConfigLocation, folder: Path) -> ListenSettings:
    host = variables.text("A2A_HOST") or "127.0.0.1"
    port = variables.port("A2A_PORT")
    listen = ListenSettings(
        host=host,
        port=config.a2a.port if port is None else port,
        grpc_port=variables.port("A2A_GRPC_PORT"),
        token=read_header_secret(variables.env, "A2A_TOKEN"),
        allow_anonymous=variables.flag("A2A_ALLOW_ANONYMOUS"),
        public_url=variables.checked("A2A_PUBLIC_URL", HttpUrl),
        principals=_principals(variables, config, location.at("principals"), folder),
    )
    if listen.port and listen.port == listen.grpc_port:
        raise IN_ENVIRONMENT.at("A2A_GRPC_PORT").error(f"must differ from A2A_PORT, but both are {listen.port}")
    if listen.token in listen.principals.values():
        raise location.at("principals").error(
            "one of the tokens is the value of A2A_TOKEN; every principal needs a token of its own"
        )
    if not (listen.tokens or listen.allow_anonymous or is_loopback(host)):
        raise IN_ENVIRONMENT.at("A2A_TOKEN").error(
            f"is missing, and A2A_HOST {quoted(host)} is beyond loopback; "
            "set A2A_TOKEN or A2A_TOKEN_FILE, or A2A_ALLOW_ANONYMOUS=1"
        )
    return listen


def _principals(variables: Variables, config: Config, location: ConfigLocation, folder: Path) -> Mapping[str, Secret]:
    found: dict[str, Secret] = {}
    for index, entry in enumerate(config.principals):
        here = location.item(index)
        token = _token_of(entry, variables, here, folder)
        if token in found.values():
            raise here.error("has the token of another principal; every principal needs a token of its own")
        found[entry.name] = token
    return found


def _token_of(entry: PrincipalEntry, variables: Variables, location: ConfigLocation, folder: Path) -> Secret:
    if entry.token_env is None:
        return read_header_secret_file(folder / (entry.token_file or ""), location.at("token_file"))
    token = read_header_secret(variables.env, entry.token_env)
    if token is None:
        raise location.at("token_env").error(f"names the variable {entry.token_env}, which is not set")
    return token


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on `host`; False for an unknown name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _database_url(variables: Variables, state: Path) -> Secret:
    given = variables.secret("DATABASE_URL")
    if given is None:
        return Secret(f"sqlite+aiosqlite:///{state / 'workspace.sqlite3'}")
    if not re.match(r"[a-z][a-z0-9+]*://", given.reveal()):
        raise IN_ENVIRONMENT.at("DATABASE_URL").error(
            "must be a URL such as sqlite+aiosqlite:////path or postgresql+asyncpg://host/name"
        )
    return given


def _log(variables: Variables) -> LogSettings:
    return LogSettings(
        variables.choice("LOG_FORMAT", _LOG_FORMATS, "text"), variables.choice("LOG_LEVEL", _LOG_LEVELS, "info")
    )


def _observing(variables: Variables, listen: ListenSettings) -> ObservabilitySettings:
    token = read_header_secret(variables.env, "METRICS_TOKEN")
    if token is not None and token in listen.tokens.values():
        raise IN_ENVIRONMENT.at("METRICS_TOKEN").error("is another token as well; it is to open /metrics and no more")
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    named = [name for name in endpoints if variables.checked(name, HttpUrl) is not None]
    is_on = variables.choice("OTEL_TRACES_EXPORTER", {"otlp": True, "none": False}, "otlp")
    variables.choice("OTEL_EXPORTER_OTLP_PROTOCOL", {"http/protobuf": None}, "http/protobuf")
    return ObservabilitySettings(
        metrics_token=token,
        traces=bool(named) and is_on and not variables.flag("OTEL_SDK_DISABLED"),
        trace_headers=variables.secret("OTEL_EXPORTER_OTLP_HEADERS"),
    )


def _platform(variables: Variables, state: Path, folders: Iterable[Path | None]) -> PlatformSettings | None:
    url, workspace = variables.checked("PLATFORM_URL", HttpUrl), variables.text("WORKSPACE_ID")
    token = read_header_secret(variables.env, "MOLECULE_WORKSPACE_TOKEN")
    if url is None:
        return None
    if workspace is None:
        raise IN_ENVIRONMENT.at("WORKSPACE_ID").error(
            "is missing; PLATFORM_URL is set, and the platform knows an agent by this id"
        )
    provisioned = tuple(dict.fromkeys(folder / PROVISIONED_TOKEN for folder in folders if folder is not None))
    return PlatformSettings(url.rstrip("/"), workspace, token, state / PLATFORM_TOKEN, provisioned)
