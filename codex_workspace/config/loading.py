"""Reads config.yaml, the files that it names and the environment into frozen `Settings`."""

import importlib.util
import ipaddress
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from codex_workspace.common.database_url import sqlite_url, url_problem
from codex_workspace.common.errors import CodexCannotStart, ConfigError, ConfigLocation
from codex_workspace.common.values import quoted
from codex_workspace.config.environment import (
    CREDENTIALS,
    IN_ENVIRONMENT,
    Environment,
    Secret,
    read_environment,
    read_header_secret,
    read_header_secret_file,
    read_secret,
    require_header_secret,
)
from codex_workspace.config.mcp_servers import resolve
from codex_workspace.config.own_token import ROTATE, NewToken, OwnToken
from codex_workspace.config.prompts import read_instructions, read_skills
from codex_workspace.config.providers import ChosenProvider
from codex_workspace.config.sandbox_mode import settle_sandbox
from codex_workspace.config.settings import (
    CONFIG_NAME,
    MISPLACED,
    OPERATOR,
    OWN_TOOLS,
    TEMPLATE_DIR,
    Config,
    PlatformSettings,
    PushConfig,
    Settings,
)
from codex_workspace.config.validation import load_yaml, read_section

SHORTEST_SECRET: Final = 6
"""Shorter secrets would match ordinary words in the model's text."""

PLATFORM_DEFAULT_MODEL = "anthropic:claude-opus-4-7"
"""The platform's default for the top-level `model:`; never a model of codex's."""

PLATFORM_TOKEN: Final = "platform-token"
"""The file in the state folder with the token that the platform issued."""

PROVISIONED_TOKEN: Final = ".auth_token"
"""The file beside config.yaml in which the platform's provisioner puts a token; a new one at each container start."""


def load_settings(
    env: Mapping[str, str],
    *,
    config_path: Path | None = None,
    cwd: Path | None = None,
    root: Path = Path("/"),
    new_token: NewToken = "never",
) -> Settings:
    """Return the settings of this process. Reads files and writes none; `settle_sandbox` may run codex.

    Args:
        config_path: The folder of config.yaml; takes precedence over WORKSPACE_CONFIG_PATH.
        cwd: Replaces the current folder.
        root: The folder that may contain `configs` and `workspace`.
        new_token: When to generate a token for the operator.

    Raises:
        ConfigError: the file or variable, the key, and the allowed values, in one sentence.
        CodexCannotStart: as `settle_sandbox`.
    """
    variables = read_environment(env)
    here = (cwd or Path.cwd()).resolve()
    file = _config_file(variables, config_path, here, root)
    location, folder = ConfigLocation(str(file)), file.parent
    content = load_yaml(file)
    config = read_section(Config, content, location)
    state = _state_dir(variables, here, root)
    workspace = _workspace_dir(variables, here, root)
    home = variables.path(variables.CODEX_HOME, here) or state / "codex"
    model, source = _model(variables, config, location)
    tokens = _tokens(variables, env, config, location.at("principals"), folder)
    settings = Settings(
        config=config,
        environment=variables,
        config_file=file,
        state_dir=state,
        workspace_dir=workspace,
        codex_home=home,
        codex_bin=_codex_bin(variables, here),
        port=config.a2a.port if variables.A2A_PORT is None else variables.A2A_PORT,
        tokens=tokens,
        metrics_token=_metrics_token(env, tokens),
        trace_headers=read_secret(env, "OTEL_EXPORTER_OTLP_HEADERS"),
        database_url=_database_url(env, state),
        platform=_platform(variables, env, state, (variables.path(variables.CONFIGS_DIR, here), folder)),
        model=model,
        model_source=source,
        mcp=resolve(config.mcp_servers, env, location.at("mcp_servers")),
        instructions=read_instructions(config.prompt_files, folder, location.at("prompt_files"), (workspace, home)),
        skills=read_skills(config.skills, folder, location.at("skills")),
        misplaced=tuple(key for key in MISPLACED if isinstance(content, dict) and key in content),
        credentials=_credentials_in(env, config),
        peer_tokens={
            peer.name: require_header_secret(env, peer.token_env, location.at(f"peers[{index}].token_env"))
            for index, peer in enumerate(config.peers)
            if peer.token_env is not None
        },
        own_token=_own_token(variables, tokens, state, new_token),
    )
    if settings.port and settings.port == variables.A2A_GRPC_PORT:
        raise IN_ENVIRONMENT.at("A2A_GRPC_PORT").error(f"must differ from A2A_PORT, but both are {settings.port}")
    _check_allowed(config.push, location.at("push.allow"))
    _check_names(settings, location.at("mcp_servers"))
    _check_writable_folders(settings, location.at("codex.writable_folders"))
    return settle_sandbox(settings)


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
    """Reject writable folders that do not exist, or that overlap with the agent's own files."""
    own = {
        "the state folder": settings.state_dir,
        "CODEX_HOME": settings.codex_home,
        "config.yaml": settings.config_file,
        "the skills": settings.config_file.parent / "skills",
    }
    for index, folder in enumerate(settings.writable_folders):
        # Codex accepts a folder that does not exist, and then its sandbox fails at the first command.
        if not folder.is_dir():
            raise location.item(index).error(f"must be an existing folder, but {folder} is not")
        for name, path in own.items():
            if folder.is_relative_to(path.resolve()) or path.resolve().is_relative_to(folder):
                raise location.item(index).error(
                    f"must not overlap with {name} ({path}), as commands could change the agent, but is {folder}"
                )


def _config_file(variables: Environment, given: Path | None, cwd: Path, root: Path) -> Path:
    folder = (cwd / given).resolve() if given else variables.path(variables.WORKSPACE_CONFIG_PATH, cwd)
    if folder is None:
        mounted = root / "configs" / CONFIG_NAME
        return mounted if mounted.exists() else TEMPLATE_DIR / CONFIG_NAME
    if folder.is_file():
        raise IN_ENVIRONMENT.at("WORKSPACE_CONFIG_PATH").error(
            f"must be the folder of {CONFIG_NAME}, but {folder} is a file"
        )
    return folder / CONFIG_NAME


def _state_dir(variables: Environment, cwd: Path, root: Path) -> Path:
    if folder := variables.path(variables.WORKSPACE_STATE_DIR, cwd):
        return folder
    configs = root / "configs"
    if configs.is_dir() and os.access(configs, os.W_OK):
        return configs / ".codex-workspace"
    if base := variables.path(variables.XDG_STATE_HOME, cwd):
        return base / "codex-workspace"
    if home := variables.path(variables.HOME, cwd):
        return home / ".local" / "state" / "codex-workspace"
    raise IN_ENVIRONMENT.at("WORKSPACE_STATE_DIR").error("is missing, and so are /configs and HOME; set it to a folder")


def _workspace_dir(variables: Environment, cwd: Path, root: Path) -> Path:
    named = variables.path(variables.WORKSPACE_DIR, cwd)
    mounted = root / "workspace"
    folder = named or (mounted if mounted.is_dir() else cwd)
    # Codex accepts a cwd that does not exist, and then every command fails.
    if not folder.is_dir():
        raise IN_ENVIRONMENT.at("WORKSPACE_DIR").error(f"must be an existing folder, but {folder} is not")
    return folder


def check_secrets(settings: Settings, provider: ChosenProvider) -> None:
    """Reject secrets that cannot be redacted, because they would match ordinary words.

    Raises:
        ConfigError: names the variable or key.
    """
    file = ConfigLocation(str(settings.config_file))
    secrets: list[tuple[ConfigLocation, Secret | None]] = [
        (IN_ENVIRONMENT.at("METRICS_TOKEN"), settings.metrics_token),
        (IN_ENVIRONMENT.at("MOLECULE_WORKSPACE_TOKEN"), settings.platform.token if settings.platform else None),
        (IN_ENVIRONMENT.at(provider.env_key or ""), provider.credential),
        *(
            (IN_ENVIRONMENT.at("A2A_TOKEN") if name == OPERATOR else file.at(f"principals: {name}"), token)
            for name, token in settings.tokens.items()
        ),
        *((file.at(f"peers: {name}"), token) for name, token in settings.peer_tokens.items()),
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


def _codex_bin(variables: Environment, cwd: Path) -> Path | None:
    named = variables.CODEX_BIN
    if named and "/" not in named:
        found = shutil.which(named, path=variables.PATH)
        return Path(found) if found else None
    return variables.path(named, cwd) or _wheel_binary()


def _wheel_binary() -> Path | None:
    spec = importlib.util.find_spec("codex_cli_bin")
    for folder in (spec and spec.submodule_search_locations) or ():
        binary = Path(folder) / "bin" / "codex"
        if binary.is_file():
            return binary
    return None


def _model(variables: Environment, config: Config, location: ConfigLocation) -> tuple[str, str]:
    """Return the model and its source in the platform's order, without its default, which is not for codex."""
    top = None if config.model == PLATFORM_DEFAULT_MODEL else config.model
    for model, source in (
        (variables.MOLECULE_MODEL, "environment: MOLECULE_MODEL"),
        (variables.MODEL, "environment: MODEL"),
        (config.runtime_config.model, f"{location.file}: runtime_config.model"),
        (top, f"{location.file}: model"),
    ):
        if model is not None:
            return model, source
    raise location.at("runtime_config.model").error("is missing; it must be a model such as gpt-5.5 (or set MODEL)")


def _tokens(
    variables: Environment, env: Mapping[str, str], config: Config, location: ConfigLocation, folder: Path
) -> dict[str, Secret]:
    """Return the principals' tokens."""
    own = read_header_secret(env, "A2A_TOKEN")
    tokens = {} if own is None else {OPERATOR: own}
    for index, entry in enumerate(config.principals):
        here = location.item(index)
        if entry.token_env is not None:
            token = require_header_secret(env, entry.token_env, here.at("token_env"))
        else:
            token = read_header_secret_file(folder / (entry.token_file or ""), here.at("token_file"))
        if token in tokens.values():
            raise here.error("is also the token of another principal; give each principal its own token")
        tokens[entry.name] = token
    return tokens


def _own_token(variables: Environment, tokens: Mapping[str, Secret], state: Path, new: NewToken) -> OwnToken | None:
    """Return the agent's own token, if there are no others and the agent listens beyond loopback."""
    if tokens or variables.A2A_ALLOW_ANONYMOUS or is_loopback(variables.A2A_HOST):
        if new == "always":
            why = "A2A_TOKEN, A2A_ALLOW_ANONYMOUS or principals are set, or A2A_HOST is a loopback address"
            raise ConfigError(f"{ROTATE}: this agent uses no generated token, because {why}")
        return None
    own = None if new == "always" else OwnToken.read(state)
    if own is None and new == "never":
        raise IN_ENVIRONMENT.at("A2A_TOKEN").error(
            f"is missing, and A2A_HOST {quoted(variables.A2A_HOST)} is not a loopback address; set A2A_TOKEN or "
            "A2A_TOKEN_FILE, or A2A_ALLOW_ANONYMOUS=1, or start the agent on a terminal (docker run -it), where it "
            "generates a token"
        )
    return own or OwnToken.generate()


def _metrics_token(env: Mapping[str, str], tokens: Mapping[str, Secret]) -> Secret | None:
    token = read_header_secret(env, "METRICS_TOKEN")
    if token in tokens.values():
        raise IN_ENVIRONMENT.at("METRICS_TOKEN").error("is also a principal's token; use a separate token for /metrics")
    return token


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on `host`; False for an unknown name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _database_url(env: Mapping[str, str], state: Path) -> Secret:
    given = read_secret(env, "DATABASE_URL")
    if given is None:
        return Secret(sqlite_url(state / "workspace.sqlite3"))
    problem = url_problem(given.reveal())
    if problem is not None:
        raise IN_ENVIRONMENT.at("DATABASE_URL").error(problem)
    return given


def _platform(
    variables: Environment, env: Mapping[str, str], state: Path, folders: Iterable[Path | None]
) -> PlatformSettings | None:
    token = read_header_secret(env, "MOLECULE_WORKSPACE_TOKEN")
    if variables.PLATFORM_URL is None:
        return None
    if variables.WORKSPACE_ID is None:
        raise IN_ENVIRONMENT.at("WORKSPACE_ID").error(
            "is missing; PLATFORM_URL requires it, because the platform identifies agents by this ID"
        )
    provisioned = tuple(dict.fromkeys(folder / PROVISIONED_TOKEN for folder in folders if folder is not None))
    url = variables.PLATFORM_URL.rstrip("/")
    return PlatformSettings(url, variables.WORKSPACE_ID, token, state / PLATFORM_TOKEN, provisioned)
