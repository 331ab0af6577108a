"""The operator's word as one value: config.yaml and the environment, read and checked once, into frozen `Settings`.

The dataclasses below are the schema that `schema.read_section` checks: a new key is a new field and nothing else. Which
provider answers is decided in `providers`; what codex is told, in `codex_home`.
"""

import importlib.util
import ipaddress
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import unquote

from codex_workspace.common.a2a_terms import OPERATOR
from codex_workspace.common.errors import ConfigLocation
from codex_workspace.common.values import MAX_INPUT_CHARS, quoted
from codex_workspace.config.environment import (
    CREDENTIALS,
    IN_ENVIRONMENT,
    Secret,
    Variables,
    read_header_secret,
    read_header_secret_file,
)
from codex_workspace.config.mcp_servers import McpServerEntry, McpServers, resolve
from codex_workspace.config.peers import Peer, PeerEntry, resolve_peers
from codex_workspace.config.prompts import Instructions, Skill, SkillFolder, read_instructions, read_skills
from codex_workspace.config.validation import (
    EnvName,
    HttpUrl,
    Matches,
    Range,
    Refused,
    Seconds,
    Slug,
    Text,
    load_yaml,
    read_section,
)

CONFIG_NAME = "config.yaml"

OWN_TOOLS: Final = "agent"
"""What codex knows the MCP server of our own tools by."""

PLATFORM_TOKEN: Final = "platform-token"
"""The file in the state folder that keeps the token which the platform has minted for us."""

PLATFORM_SECRET: Final = "platform-inbound-secret"
"""The file beside it that keeps what the platform shows when it calls us."""

PROVISIONED_TOKEN: Final = ".auth_token"
"""The file beside config.yaml where the platform's provisioner puts one; a new one at each start of a container."""

TURN_TIMEOUT_S = 3600.0
"""A turn's budget where nobody named one."""

MISPLACED: Mapping[str, str] = {"sandbox": "codex.sandbox", "effort": "codex.reasoning_effort"}
"""Keys that the platform takes at the top level and this agent does not read, and where it reads the like."""

PACKAGE_DIR: Final = Path(__file__).resolve().parents[1]

TEMPLATE_DIR: Final = PACKAGE_DIR if (PACKAGE_DIR / CONFIG_NAME).is_file() else PACKAGE_DIR.parent
"""The folder of the default config.yaml: the package if it was installed from a wheel, otherwise the checkout."""

PLATFORM_DEFAULT_MODEL = "anthropic:claude-opus-4-7"
"""What the platform writes as top-level `model:` where nobody chose one; never a model of codex's."""


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """`runtime_config:`, the platform's section; `model` here wins over the top-level one.

    model: the model, by the provider's name for it; `MOLECULE_MODEL` and `MODEL` win over it.
    provider: the name of the one to use.
    providers: names that the platform offers for choice.
    required_env: variables without which the agent does not start, but for those of providers: a provider that is not
        chosen needs none.
    timeout: the whole turn's budget in seconds, where codex.turn_timeout_s is not given; 0 = not given.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"auth_token_env", "auth_token_file", "args", "command", "models", "provision_timeout_seconds"}
    )

    model: Text | None = None
    provider: Text | None = None
    providers: tuple[Text, ...] = ()
    required_env: tuple[EnvName, ...] = ()
    timeout: Annotated[float, Range(0, 604_800)] = 0.0


@dataclass(frozen=True, slots=True)
class ProviderEntry:
    """One entry of `providers:`; what its fields mean together is checked in `providers`.

    name: how runtime_config.provider names it; a built-in one's takes its place.
    auth_mode: OpenAI by API key, any endpoint that speaks the Responses API, or a ChatGPT subscription.
    base_url: where the endpoint is; not for openai_api, which follows `OPENAI_BASE_URL`.
    auth_env: variables of the credential, the first that is set wins; none named = those of the built-in provider with
        this auth_mode, for another endpoint none.
    wire_api: what the endpoint speaks.
    model_prefixes, model_aliases: models that this provider is for, by how their names begin or by whole name.
    model_provider_slug: its name in codex's config.toml; made of `name` where it is not given.
    model_id_override: the model's name on the wire.
    """

    name: Text
    auth_mode: Literal["openai_api", "openai_compat_responses", "chatgpt_subscription"]
    base_url: HttpUrl | None = None
    auth_env: tuple[EnvName, ...] = ()
    wire_api: Annotated[
        Literal["responses", "chat"], Refused({"chat": "is no longer spoken by codex; use responses"})
    ] = "responses"
    model_prefixes: tuple[Text, ...] = ()
    model_aliases: tuple[Text, ...] = ()
    model_provider_slug: Slug | None = None
    model_id_override: Text | None = None


@dataclass(frozen=True, slots=True)
class A2AConfig:
    """`a2a:`, the platform's section.

    port: where to listen, 0 = any free one; `A2A_PORT` wins over it.
    streaming: whether streams are offered.
    push_notifications: whether webhooks are told of tasks.
    protocol_versions: what is spoken, and said in the card.
    signing_key_file: PEM file with a private key (ES256) that signs the card, where only 1.0 is spoken.
    grpc_url: what the card says of gRPC, as host:port, where that differs from the address it listens on.
    """

    port: Annotated[int, Range(0, 65535)] = 8000
    streaming: bool = True
    push_notifications: bool = True
    protocol_versions: tuple[Literal["1.0", "0.3"], ...] = ("1.0", "0.3")
    signing_key_file: Text | None = None
    grpc_url: Annotated[str, Matches(r"[^\s/]+:[0-9]{1,5}", "host:port")] | None = None


@dataclass(frozen=True, slots=True)
class PrincipalEntry:
    """One entry of `principals:`, somebody with a token of their own: in a variable or in a file.

    name: whose contexts and tasks those are that come with the token.
    token_env: the variable that holds it (or `…_FILE` the file).
    token_file: the file that holds it, seen from config.yaml's folder.
    """

    name: Slug
    token_env: EnvName | None = None
    token_file: Text | None = None


@dataclass(frozen=True, slots=True)
class CodexConfig:
    """`codex:`, how codex works for us. Times in seconds.

    sandbox: `container` says that the container is the sandbox, codex's own is off.
    approval_policy: under on-request and untrusted, what codex asks becomes a question to the task's sender.
    question_timeout_s: how long such a question waits; without an answer it counts as declined.
    conversations: where a message without a context goes: the sender's main one, or one of its own.
    backend: one codex app-server for all turns, or a `codex exec` for each. The latter takes neither mid_turn steer,
        nor another approval_policy than never, nor hide_secrets.
    mid_turn: a message that comes while a turn of its context runs waits (queue), joins it (steer) or takes its place.
    turn_inactivity_timeout_s: without any event of the turn for this long, it is interrupted and fails.
    turn_timeout_s: the whole turn's budget; null = runtime_config.timeout, else an hour.
    network_access: may commands in the workspace-write sandbox reach the network.
    reasoning_effort: a word that the model takes, such as low, medium or high.
    writable_folders: where commands may write, beside the workspace and the folders for temporary files; seen from the
        workspace. For the workspace-write sandbox.
    hide_secrets: whether codex's sandbox keeps commands from reading the agent's secrets and conversations.
    web_search: whether the model may search the web: in what OpenAI keeps of it (cached, or the larger indexed), or in
        the web of today (live). The search is the provider's, network_access is not asked.
    recovery: a turn that a death cut off is told to go on (resume), run again (rerun), or fails (fail).
    shutdown_grace_s: how long running turns may go on after SIGTERM; short, as Docker kills after 10 s.
    request_timeout_s: how long codex may take to answer one request.
    restart_wait_s: how long a message waits for a codex that does not start.
    max_restarts: after this many failures in a row codex counts as broken.
    """

    sandbox: Literal["read-only", "workspace-write", "danger-full-access", "container"] = "workspace-write"
    approval_policy: Literal["never", "on-request", "untrusted"] = "never"
    mid_turn: Literal["queue", "steer", "interrupt"] = "queue"
    question_timeout_s: Seconds = 3600.0
    conversations: Literal["main", "per-context"] = "main"
    backend: Literal["app-server", "exec"] = "app-server"
    turn_inactivity_timeout_s: Seconds = 300.0
    turn_timeout_s: Seconds | None = None
    network_access: bool = False
    writable_folders: tuple[Text, ...] = ()
    hide_secrets: bool = False
    web_search: Literal["disabled", "cached", "indexed", "live"] = "disabled"
    reasoning_effort: Annotated[str, Matches(r"[a-z]{1,32}", "a word such as low, medium or high")] | None = None
    shutdown_grace_s: Annotated[float, Range(0, 60)] = 3.0
    recovery: Literal["resume", "rerun", "fail"] = "resume"
    request_timeout_s: Seconds = 30.0
    restart_wait_s: Seconds = 120.0
    max_restarts: Annotated[int, Range(1, 1000)] = 5


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """`limits:`, what a caller may send, how much may wait, and how much codex may hold.

    max_message_bytes: of an HTTP body; files in it are a third larger than they are.
    max_text_chars: of a turn's text; codex takes no more.
    max_parts: of one message.
    max_file_bytes, max_files_bytes: of one file or image of a message, and of all of them, decoded. Codex says images
        back in one line, which has to stay below `wire.MAX_LINE_BYTES`.
    max_inline_bytes: a text file up to this size stands within the turn's text, a larger one in the workspace.
    max_handed_file_bytes, max_handed_bytes: of one file that codex hands over, and of all files of a task.
    max_waiting_per_context, max_waiting: messages that wait for their turn; one more hears when to come back.
    codex_memory_mb (MiB), codex_threads: a codex that holds so much is replaced between turns.
    mcp_processes: and so is one whose threads hold so many processes of MCP servers.
    max_running_turns: turns that run side by side, each in a context of its own; further ones wait.
    requests_per_minute: of one principal; a tenth of a minute's worth may come at once.
    max_streams_per_principal, max_streams: streams that are open at once.
    stream_idle_s: a stream without any event for this long is ended; the client may subscribe again.
    slow_reader_s: a client that does not take what it is sent for this long is cut off.
    """

    max_message_bytes: Annotated[int, Range(1024, 1 << 30)] = 12 << 20
    max_text_chars: Annotated[int, Range(1, MAX_INPUT_CHARS)] = MAX_INPUT_CHARS
    max_parts: Annotated[int, Range(1, 10_000)] = 100
    max_file_bytes: Annotated[int, Range(1024, 24 << 20)] = 5 << 20
    max_files_bytes: Annotated[int, Range(1024, 24 << 20)] = 8 << 20
    max_inline_bytes: Annotated[int, Range(0, 1 << 20)] = 16 << 10
    max_handed_file_bytes: Annotated[int, Range(1024, 64 << 20)] = 5 << 20
    max_handed_bytes: Annotated[int, Range(1024, 1 << 30)] = 20 << 20
    max_waiting_per_context: Annotated[int, Range(1, 100_000)] = 50
    max_waiting: Annotated[int, Range(1, 100_000)] = 500
    max_running_turns: Annotated[int, Range(1, 1000)] = 16
    requests_per_minute: Annotated[int, Range(1, 10_000_000)] = 60_000
    max_streams_per_principal: Annotated[int, Range(1, 100_000)] = 1000
    max_streams: Annotated[int, Range(1, 100_000)] = 2000
    stream_idle_s: Annotated[float, Range(1, 604_800)] = 1800.0
    slow_reader_s: Annotated[float, Range(1, 3600)] = 15.0
    codex_memory_mb: Annotated[int, Range(64, 1 << 20)] = 1024
    codex_threads: Annotated[int, Range(1, 100_000)] = 400
    mcp_processes: Annotated[int, Range(1, 100_000)] = 64


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """`storage:`, how much of what has ended is kept; unfinished tasks always are.

    keep_days: tasks that ended longer ago are forgotten.
    keep_tasks: and so are those beyond this many, of all contexts.
    """

    keep_days: Annotated[float, Range(0, 36_500)] = 30.0
    keep_tasks: Annotated[int, Range(0, 10_000_000)] = 10_000


@dataclass(frozen=True, slots=True)
class PushConfig:
    """`push:`, how webhooks are told of tasks. `a2a.push_notifications` says whether they are at all.

    allow: host names, addresses and networks that webhooks may live at although they are not public.
    timeout_s: how long one request may take.
    retry_for_s: how long a notification is tried again; 0 = once only.
    max_waiting: notifications that wait in memory; over it the oldest that are no task's end are dropped.
    max_parallel: requests that are on their way at once; one host gets a quarter of them.
    """

    allow: tuple[Text, ...] = ()
    timeout_s: Annotated[float, Range(0.1, 120)] = 10.0
    retry_for_s: Annotated[float, Range(0, 86_400)] = 900.0
    max_waiting: Annotated[int, Range(1, 100_000)] = 1000
    max_parallel: Annotated[int, Range(1, 1000)] = 32


@dataclass(frozen=True, slots=True)
class PlatformConfig:
    """`platform:`, how the agent is on the platform, where PLATFORM_URL and WORKSPACE_ID are set.

    delivery: messages are pushed to the agent, or read by it from its inbox; auto = as the platform has it, and by the
        inbox where the platform cannot reach the agent's address.
    heartbeat_s: the platform hears of the agent at least this often.
    answer_within_s: a pushed message that takes longer gets the word that it is at work, and its answer later; the
        platform itself waits 180 s, and then sends the message again.
    """

    delivery: Literal["auto", "push", "poll"] = "auto"
    heartbeat_s: Annotated[float, Range(1, 300)] = 30.0
    answer_within_s: Annotated[float, Range(0.1, 86_400)] = 150.0


@dataclass(frozen=True, slots=True)
class Config:
    """The whole of config.yaml.

    IGNORED: the platform's keys that are legal there and mean nothing to this agent.
    name, description: the agent's, on its card.
    version: the agent's, on its card; empty = the version of codex-workspace.
    role, tier: the platform's.
    runtime: which template the platform starts.
    template_schema_version: of this file.
    model: where runtime_config.model is not given; the platform's default counts as not given.
    skills: folders below `skills` beside config.yaml, each with a SKILL.md.
    prompt_files: seen from config.yaml's folder, and in it.
    peers: A2A agents that the model may give work to.
    agent_tools: whether the model gets our own tools for that, with a memory; auto = where there are peers, or the
        platform.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("bridge", "compliance", "delegation", "effort", "env", "governance", "hitl", "models", "observability"),
            *("idle_interval_seconds", "idle_prompt", "idle_prompt_file", "initial_prompt", "initial_prompt_file"),
            *(
                "plugins",
                "rbac",
                "sandbox",
                "security_scan",
                "shared_context",
                "sub_workspaces",
                "task_budget",
                "tools",
            ),
        }
    )

    name: Text
    runtime: Literal["codex"]
    template_schema_version: Annotated[int, Range(1, 1)] = 1
    description: str = ""
    role: str = ""
    version: str = ""
    tier: Annotated[int, Range(0, 99)] | None = None
    model: Text | None = None
    runtime_config: RuntimeConfig = field(default_factory=RuntimeConfig)
    skills: tuple[SkillFolder, ...] = ()
    prompt_files: tuple[Text, ...] = ()
    a2a: A2AConfig = field(default_factory=A2AConfig)
    principals: tuple[PrincipalEntry, ...] = ()
    providers: tuple[ProviderEntry, ...] = ()
    codex: CodexConfig = field(default_factory=CodexConfig)
    mcp_servers: tuple[McpServerEntry, ...] = ()
    peers: tuple[PeerEntry, ...] = ()
    agent_tools: Literal["auto", "always", "never"] = "auto"
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    push: PushConfig = field(default_factory=PushConfig)
    platform: PlatformConfig = field(default_factory=PlatformConfig)


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where and for whom the A2A server listens. Port 0 = any free one; `grpc_port` None = off.

    token: A2A_TOKEN, the operator's own; `principals` are those of config.yaml, by their names.
    """

    host: str
    port: int
    grpc_port: int | None
    token: Secret | None
    allow_anonymous: bool
    public_url: str | None
    principals: Mapping[str, Secret] = field(default_factory=dict)

    @property
    def tokens(self) -> Mapping[str, Secret]:
        """Every principal's token, by name; empty where everybody is let in."""
        own = {} if self.token is None else {OPERATOR: self.token}
        return {**own, **self.principals}


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How the log is written; `level` is a name of the logging module's."""

    format: Literal["text", "json"]
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]


SHORTEST_HEADER_SECRET: Final = 8
"""A shorter value of a header, such as a tenant's number, is no secret."""


@dataclass(frozen=True, slots=True)
class ObservabilitySettings:
    """What those who run the agent look at.

    metrics_token: opens /metrics and nothing else. traces: whether spans are exported; `trace_headers` are shown then.
    """

    metrics_token: Secret | None = None
    traces: bool = False
    trace_headers: Secret | None = None

    @property
    def secrets(self) -> list[Secret]:
        """Return what must not show up: the token, and the values of the headers."""
        told = self.trace_headers.reveal().split(",") if self.trace_headers is not None else []
        values = [unquote(pair.partition("=")[2].strip()) for pair in told]
        # "Bearer …": the token alone, too.
        values += [value.rpartition(" ")[2] for value in values if " " in value]
        quoted = [Secret(value) for value in values if len(value) >= SHORTEST_HEADER_SECRET]
        return [*quoted, *([self.metrics_token] if self.metrics_token is not None else [])]


@dataclass(frozen=True, slots=True)
class PlatformSettings:
    """The platform to register with, and who we are there. Without a token, registering has to mint one.

    token_file: where a minted token is kept. provisioned: files in which the platform's provisioner may have put one.
    """

    url: str
    workspace_id: str
    token: Secret | None
    token_file: Path
    provisioned: tuple[Path, ...] = ()

    @property
    def secret_file(self) -> Path:
        """Where the platform's own secret is kept, for its calls to us."""
        return self.token_file.with_name(PLATFORM_SECRET)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the operator decided, checked. All folders are absolute; only `workspace_dir` is known to exist.

    config_file: the file that `config` was read from; for messages.
    codex_bin: codex's native binary, or None where none was found (whoever starts codex says so).
    database_url: of SQLAlchemy's form, with an async driver; a secret as it may hold a password.
    platform: None where this agent runs without one.
    mcp, peers: `mcp_servers` and `peers` of config.yaml, their variables filled in.
    instructions, skills: what the files say that `prompt_files` and `skills` of config.yaml name.
    model, model_source: the model as the operator names it, and the variable or key it was taken from.
    """

    config: Config
    config_file: Path
    state_dir: Path
    workspace_dir: Path
    codex_home: Path
    codex_bin: Path | None
    listen: ListenSettings
    database_url: Secret
    log: LogSettings
    platform: PlatformSettings | None
    model: str
    model_source: str
    mcp: McpServers = field(default_factory=McpServers)
    instructions: Instructions = field(default_factory=Instructions)
    skills: tuple[Skill, ...] = ()
    observing: ObservabilitySettings = field(default_factory=ObservabilitySettings)
    misplaced: tuple[str, ...] = ()
    unused: tuple[Secret, ...] = ()
    peers: tuple[Peer, ...] = ()

    @property
    def has_agent_tools(self) -> bool:
        """Whether the model gets our own tools."""
        return _has_agent_tools(self.config, self.platform)

    @property
    def turn_timeout_s(self) -> float:
        """The whole turn's budget."""
        return self.config.codex.turn_timeout_s or self.config.runtime_config.timeout or TURN_TIMEOUT_S

    @property
    def writable_folders(self) -> tuple[Path, ...]:
        """Where commands in the workspace-write sandbox may write, beside the workspace; absolute."""
        return tuple((self.workspace_dir / folder).resolve() for folder in self.config.codex.writable_folders)

    @property
    def exposed(self) -> Mapping[str, Path]:
        """What of the agent's own sandboxed commands may change, as it lies in the workspace; by what it is called."""
        if self.config.codex.sandbox != "workspace-write":
            return {}
        own = {
            "config.yaml": self.config_file,
            "the state folder": self.state_dir,
            "CODEX_HOME": self.codex_home,
            "the agent's program": TEMPLATE_DIR,
        }
        workspace = self.workspace_dir.resolve()
        return {called: kept for called, kept in own.items() if kept.resolve().is_relative_to(workspace)}


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
    """The settings of this process. Reads config.yaml and the files that it or a `…_FILE` names; makes and
    changes nothing.

    config_path: folder of config.yaml; wins over WORKSPACE_CONFIG_PATH.
    cwd: stands for the current folder.
    root: the folder under which `configs` and `workspace` are looked for.

    Raises:
        ConfigError: one sentence with file or variable, key, and what is allowed.
    """
    variables = Variables(env)
    here = (cwd or Path.cwd()).resolve()
    file = _config_file(variables, config_path, here, root)
    content = load_yaml(file)
    config = read_section(Config, content, ConfigLocation(str(file)))
    _check_versions(config.a2a, ConfigLocation(str(file)).at("a2a"))
    _check_allowed(config.push, ConfigLocation(str(file)).at("push.allow"))
    state = _state_dir(variables, here, root)
    platform = _platform(variables, state, (variables.path("CONFIGS_DIR", here), file.parent))
    _check_names(config, platform, ConfigLocation(str(file)).at("mcp_servers"))
    model, source = _model(variables, config, file)
    workspace, home = _workspace_dir(variables, here, root), variables.path("CODEX_HOME", here) or state / "codex"
    listen = _listen(variables, config, file)
    own = {"the state folder": state, "CODEX_HOME": home, "config.yaml": file, "the skills": file.parent / "skills"}
    if config.codex.hide_secrets and config.codex.sandbox not in ("read-only", "workspace-write"):
        raise (
            ConfigLocation(str(file))
            .at("codex.hide_secrets")
            .error(f"is for codex's own sandbox, but the sandbox is {config.codex.sandbox}; leave it out")
        )
    _check_backend(config.codex, ConfigLocation(str(file)).at("codex"))
    _check_folders(config.codex, workspace, own, ConfigLocation(str(file)).at("codex.writable_folders"))
    return Settings(
        config=config,
        config_file=file,
        state_dir=state,
        workspace_dir=workspace,
        codex_home=home,
        codex_bin=_codex_bin(variables, here),
        listen=listen,
        database_url=_database_url(variables, state),
        log=_log(variables),
        platform=platform,
        model=model,
        model_source=source,
        mcp=resolve(config.mcp_servers, env, ConfigLocation(str(file)).at("mcp_servers")),
        instructions=read_instructions(
            config.prompt_files, file.parent, ConfigLocation(str(file)).at("prompt_files"), (workspace, home)
        ),
        skills=read_skills(config.skills, file.parent, ConfigLocation(str(file)).at("skills")),
        observing=_observing(variables, listen),
        misplaced=tuple(key for key in MISPLACED if isinstance(content, dict) and key in content),
        unused=_credentials_in(env, config),
        peers=resolve_peers(config.peers, env, ConfigLocation(str(file)).at("peers")),
    )


def _credentials_in(env: Mapping[str, str], config: Config) -> tuple[Secret, ...]:
    """Return every credential that the environment holds, whether or not anything uses it."""
    names = dict.fromkeys((*CREDENTIALS, *(name for entry in config.providers for name in entry.auth_env)))
    return tuple(Secret(env[name]) for name in names if env.get(name))


def _check_versions(a2a: A2AConfig, place: ConfigLocation) -> None:
    if not a2a.protocol_versions or len(set(a2a.protocol_versions)) < len(a2a.protocol_versions):
        raise place.at("protocol_versions").error("must name each version once, and at least one")
    if a2a.signing_key_file is not None and a2a.protocol_versions != ("1.0",):
        raise place.at("signing_key_file").error(
            'needs protocol_versions: ["1.0"]; what a card adds for 0.3 clients is not covered by its signature'
        )


def _check_allowed(push: PushConfig, place: ConfigLocation) -> None:
    if push.allow:
        # Imported by those who name some: with its HTTP client it takes 100 ms.
        from codex_workspace.common.safe_http import AllowList

        AllowList.parse(push.allow, place)


def _has_agent_tools(config: Config, platform: PlatformSettings | None) -> bool:
    has_peers = bool(config.peers) or platform is not None
    return config.agent_tools == "always" or (config.agent_tools == "auto" and has_peers)


def _check_names(config: Config, platform: PlatformSettings | None, place: ConfigLocation) -> None:
    for index, entry in enumerate(config.mcp_servers):
        if entry.name == OWN_TOOLS and _has_agent_tools(config, platform):
            raise (
                place.item(index)
                .at("name")
                .error(f"must not be {OWN_TOOLS}, which is the agent's own; rename it, or set agent_tools: never")
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


def _check_backend(codex: CodexConfig, place: ConfigLocation) -> None:
    """Refuse what cannot be had where each turn is a `codex exec`: nobody can say anything to that one."""
    if codex.backend != "exec":
        return
    refused = {
        "approval_policy": (codex.approval_policy, "never", "codex exec asks nobody"),
        "mid_turn": (codex.mid_turn if codex.mid_turn == "steer" else "", "", "codex exec takes nothing more"),
        "hide_secrets": ("true" if codex.hide_secrets else "", "", "codex exec is not told whom to hide from"),
    }
    for key, (value, only, why) in refused.items():
        if value != only:
            raise place.at(key).error(f"cannot be {value} with codex.backend: exec, as {why}; change one of the two")


def _check_folders(codex: CodexConfig, workspace: Path, own: Mapping[str, Path], place: ConfigLocation) -> None:
    """Refuse writable folders that are not there, or that hold what is the agent's `own`, by what it is called."""
    if codex.writable_folders and codex.sandbox != "workspace-write":
        raise place.error(f"is for sandbox workspace-write, but the sandbox is {codex.sandbox}; leave one of them out")
    for index, name in enumerate(codex.writable_folders):
        folder = (workspace / name).resolve()
        # Codex takes any name, and its sandbox then fails at the first command.
        if not folder.is_dir():
            raise place.item(index).error(f"must be a folder that exists, but {folder} is not")
        for called, kept in own.items():
            if folder.is_relative_to(kept.resolve()) or kept.resolve().is_relative_to(folder):
                raise place.item(index).error(
                    f"must be apart from {called} ({kept}), as commands could change the agent there, but is {folder}"
                )


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


def _model(variables: Variables, config: Config, file: Path) -> tuple[str, str]:
    """The model and where it was named; the platform's order, less its default, which no codex provider has."""
    top = None if config.model == PLATFORM_DEFAULT_MODEL else config.model
    for model, source in (
        (variables.checked("MOLECULE_MODEL", Text), "environment: MOLECULE_MODEL"),
        (variables.checked("MODEL", Text), "environment: MODEL"),
        (config.runtime_config.model, f"{file}: runtime_config.model"),
        (top, f"{file}: model"),
    ):
        if model is not None:
            return model, source
    raise (
        ConfigLocation(str(file))
        .at("runtime_config.model")
        .error("is missing; it must be a model such as gpt-5.5 (or set MODEL)")
    )


def _listen(variables: Variables, config: Config, file: Path) -> ListenSettings:
    host = variables.text("A2A_HOST") or "127.0.0.1"
    port = variables.port("A2A_PORT")
    listen = ListenSettings(
        host=host,
        port=config.a2a.port if port is None else port,
        grpc_port=variables.port("A2A_GRPC_PORT"),
        token=read_header_secret(variables.env, "A2A_TOKEN"),
        allow_anonymous=variables.flag("A2A_ALLOW_ANONYMOUS"),
        public_url=variables.checked("A2A_PUBLIC_URL", HttpUrl),
        principals=_principals(variables, config, file),
    )
    if listen.port and listen.port == listen.grpc_port:
        raise IN_ENVIRONMENT.at("A2A_GRPC_PORT").error(f"must differ from A2A_PORT, but both are {listen.port}")
    if listen.token in listen.principals.values():
        raise (
            ConfigLocation(str(file))
            .at("principals")
            .error("one of the tokens is A2A_TOKEN's; everybody needs their own")
        )
    if not (listen.tokens or listen.allow_anonymous or is_loopback(host)):
        raise IN_ENVIRONMENT.at("A2A_TOKEN").error(
            f"is missing, and A2A_HOST {quoted(host)} is beyond loopback; "
            "set A2A_TOKEN or A2A_TOKEN_FILE, or A2A_ALLOW_ANONYMOUS=1"
        )
    return listen


def _principals(variables: Variables, config: Config, file: Path) -> Mapping[str, Secret]:
    found: dict[str, Secret] = {}
    for index, entry in enumerate(config.principals):
        place = ConfigLocation(str(file)).at("principals").item(index)
        if entry.name == OPERATOR:
            raise place.at("name").error(f"must not be {OPERATOR}, which is whoever has A2A_TOKEN")
        if entry.name in found:
            raise place.at("name").error(f"is there twice: {quoted(entry.name)}")
        token = _token_of(entry, variables, place, file)
        if token in found.values():
            raise place.error("has the token of another principal; everybody needs their own")
        found[entry.name] = token
    return found


def _token_of(entry: PrincipalEntry, variables: Variables, place: ConfigLocation, file: Path) -> Secret:
    match entry.token_env, entry.token_file:
        case str(name), None:
            token = read_header_secret(variables.env, name)
            if token is None:
                raise place.at("token_env").error(f"names the variable {name}, which is not set")
            return token
        case None, str(name):
            return read_header_secret_file(file.parent / name, place.at("token_file"))
        case _:
            raise place.error("must have one of token_env and token_file")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`; an unknown name counts as no."""
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
