"""The keys of config.yaml as pydantic models, and the frozen `Settings` of a process.

A new key is a new field here. `loading` creates the settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from codex_workspace.common.values import MAX_INPUT_CHARS, quoted
from codex_workspace.config.a2a_server import A2AConfig
from codex_workspace.config.environment import Environment, Secret
from codex_workspace.config.mcp_servers import McpServerEntry, McpServers
from codex_workspace.config.own_token import OwnToken
from codex_workspace.config.prompts import Instructions, Skill, SkillFolder
from codex_workspace.config.provider_entry import ProviderEntry
from codex_workspace.config.validation import EnvName, HttpUrl, Items, Seconds, Section, Slug, Text, matching, problem

CONFIG_NAME = "config.yaml"

OPERATOR: Final = "operator"
"""The principal of A2A_TOKEN, and of requests without a token if none is required."""

OWN_TOOLS: Final = "agent"
"""The name in codex of the MCP server with the agent's own tools."""

PLATFORM_SECRET: Final = "platform-inbound-secret"
"""The file in the state folder with the secret that the platform sends with its requests to the agent."""

TURN_TIMEOUT_S = 3600.0
"""A turn's time limit if config.yaml sets none."""

MISPLACED: Mapping[str, str] = {"sandbox": "codex.sandbox", "effort": "codex.reasoning_effort"}
"""Top-level keys of the platform that this agent ignores, and the keys that it reads instead."""

PACKAGE_DIR: Final = Path(__file__).resolve().parents[1]

TEMPLATE_DIR: Final = PACKAGE_DIR if (PACKAGE_DIR / CONFIG_NAME).is_file() else PACKAGE_DIR.parent
"""The folder of the default config.yaml: the package if it was installed from a wheel, otherwise the checkout."""


class RuntimeConfig(Section):
    """The platform's section for a runtime.

    model: The model's name at the provider. Takes precedence over the top-level model; MOLECULE_MODEL and
        MODEL take precedence over both.
    provider: The name of the provider to use.
    providers: Names that the platform offers for choice.
    required_env: Variables without which the agent does not start. Variables of providers that are not chosen may be
        missing.
    timeout: The time limit of a turn in seconds if codex.turn_timeout_s is not set; 0 = not set.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"auth_token_env", "auth_token_file", "args", "command", "models", "provision_timeout_seconds"}
    )

    model: Text | None = None
    provider: Text | None = None
    providers: Items[Text] = ()
    required_env: Items[EnvName] = ()
    timeout: Annotated[float, Field(ge=0, le=604_800)] = 0.0


class PrincipalEntry(Section):
    """A caller with a token of its own, from a variable or a file.

    name: The owner of the contexts and tasks that are created with the token.
    token_env: The variable with the token; the variable with _FILE appended can name a file instead.
    token_file: The file with the token, relative to config.yaml's folder.
    """

    name: Slug
    token_env: EnvName | None = None
    token_file: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == OPERATOR:
            raise problem(f"must not be {OPERATOR}, which is the owner of A2A_TOKEN", "name")
        if (self.token_env is None) == (self.token_file is None):
            raise problem("must have either token_env or token_file")
        return self


class PeerEntry(Section):
    """An A2A agent that the model may send tasks to.

    name: The peer's name for the model.
    url: The peer's address.
    description: What the peer is good for, for the model; the default is the description on its card.
    token_env: The variable with the bearer token for the peer; with _FILE appended, it can name a file instead.
    allow_private: Allow an address that is not public, such as this machine's or a container network's.
    """

    name: Slug
    url: HttpUrl
    description: str = ""
    token_env: EnvName | None = None
    allow_private: bool = False


class CodexConfig(Section):
    """How codex runs. Times in seconds.

    sandbox: The sandbox for commands; auto = workspace-write, or container in the image if the kernel forbids it and
        neither hide_secrets nor approvals need it; container = the container is the sandbox, codex's own is off.
    approval_policy: When codex asks for approval. Under on-request and untrusted the sender of the task is asked.
    question_timeout_s: How long to wait for an answer; no answer counts as declined.
    conversations: The context of messages without one; main = the sender's main context, per-context = a new one.
    backend: One codex app-server for all turns, or one `codex exec` per turn. exec supports neither mid_turn steer,
        nor hide_secrets, nor an approval_policy other than never.
    mid_turn: A message for a context with a running turn waits for it (queue), is added to it (steer) or replaces it
        (interrupt).
    turn_inactivity_timeout_s: A turn without any event for this long is interrupted and fails.
    turn_timeout_s: The time limit of a turn; null = runtime_config.timeout, or one hour.
    network_access: Allow network access to commands in the workspace-write sandbox.
    reasoning_effort: A level that the model supports, such as low, medium or high.
    writable_folders: Folders that commands may write to besides the workspace and temporary folders, relative to the
        workspace. For the workspace-write sandbox.
    hide_secrets: Prevent commands from reading the agent's secrets and conversations, by codex's sandbox.
    web_search: Web search for the model, from OpenAI's cache (cached, or the larger indexed) or live. The provider
        searches; network_access does not apply.
    recovery: After a crash a turn is continued (resume), run again (rerun) or fails (fail).
    shutdown_grace_s: How long running turns may continue after SIGTERM. Docker kills after 10 s.
    request_timeout_s: How long codex may take to answer a request.
    restart_wait_s: How long a message waits for codex to start.
    max_restarts: After this many consecutive failures codex counts as broken.
    """

    sandbox: Literal["auto", "read-only", "workspace-write", "danger-full-access", "container"] = "auto"
    approval_policy: Literal["never", "on-request", "untrusted"] = "never"
    mid_turn: Literal["queue", "steer", "interrupt"] = "queue"
    question_timeout_s: Seconds = 3600.0
    conversations: Literal["main", "per-context"] = "main"
    backend: Literal["app-server", "exec"] = "app-server"
    turn_inactivity_timeout_s: Seconds = 300.0
    turn_timeout_s: Seconds | None = None
    network_access: bool = False
    writable_folders: Items[Text] = ()
    hide_secrets: bool = False
    web_search: Literal["disabled", "cached", "indexed", "live"] = "disabled"
    reasoning_effort: Annotated[str, matching(r"[a-z]{1,32}", "a word such as low, medium or high")] | None = None
    shutdown_grace_s: Annotated[float, Field(ge=0, le=60)] = 3.0
    recovery: Literal["resume", "rerun", "fail"] = "resume"
    request_timeout_s: Seconds = 30.0
    restart_wait_s: Seconds = 120.0
    max_restarts: Annotated[int, Field(ge=1, le=1000)] = 5

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.writable_folders and self.sandbox not in ("auto", "workspace-write"):
            raise problem(
                f"needs sandbox workspace-write, but the sandbox is {self.sandbox}; remove one of them",
                "writable_folders",
            )
        if self.hide_secrets and self.sandbox in ("danger-full-access", "container"):
            raise problem(f"needs codex's own sandbox, but the sandbox is {self.sandbox}; remove it", "hide_secrets")
        unsupported = {
            "approval_policy": (self.approval_policy != "never", "asks for no approval"),
            "mid_turn": (self.mid_turn == "steer", "accepts no input during a turn"),
            "hide_secrets": (self.hide_secrets, "does not support it"),
        }
        for key, (is_set, why) in unsupported.items():
            if is_set and self.backend == "exec":
                value = str(getattr(self, key)).lower()
                raise problem(
                    f"cannot be {value} with codex.backend: exec, because codex exec {why}; change one of them", key
                )
        return self


class LimitsConfig(Section):
    """Limits for callers, queues and codex's resources.

    max_message_bytes: Size of an HTTP body; files in it are a third larger than their content.
    max_text_chars: Characters of a turn's text; the default is codex's own limit.
    max_parts: Parts of a message.
    max_file_bytes, max_files_bytes: Decoded size of one file of a message, and of all its files.
    max_inline_bytes: A text file up to this size becomes part of the turn's text; a larger one is put in the workspace.
    max_handed_file_bytes, max_handed_bytes: Size of one file that codex returns, and of all files of a task.
    max_waiting_per_context, max_waiting: Messages that wait for a turn; further ones are rejected with a retry time.
    codex_memory_mb, codex_threads: Between turns, codex is restarted if it uses this much memory (MiB) or has this many
        threads.
    mcp_processes: Likewise if its threads run this many MCP server processes.
    max_running_turns: Turns that run at the same time, in different contexts, with their commands and MCP servers.
    requests_per_minute: Requests of one principal; up to a tenth of them at once.
    max_streams_per_principal, max_streams: Open streams.
    stream_idle_s: A stream without any event for this long is closed; the client may subscribe again.
    slow_reader_s: The connection of a client that does not read for this long is closed.
    """

    max_message_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 12 << 20
    max_text_chars: Annotated[int, Field(ge=1, le=MAX_INPUT_CHARS)] = MAX_INPUT_CHARS
    max_parts: Annotated[int, Field(ge=1, le=10_000)] = 100
    max_file_bytes: Annotated[int, Field(ge=1024, le=24 << 20)] = 5 << 20
    max_files_bytes: Annotated[int, Field(ge=1024, le=24 << 20)] = 8 << 20
    max_inline_bytes: Annotated[int, Field(ge=0, le=1 << 20)] = 16 << 10
    max_handed_file_bytes: Annotated[int, Field(ge=1024, le=64 << 20)] = 5 << 20
    max_handed_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 20 << 20
    max_waiting_per_context: Annotated[int, Field(ge=1, le=100_000)] = 50
    max_waiting: Annotated[int, Field(ge=1, le=100_000)] = 500
    max_running_turns: Annotated[int, Field(ge=1, le=1000)] = 128
    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] = 60_000
    max_streams_per_principal: Annotated[int, Field(ge=1, le=100_000)] = 1000
    max_streams: Annotated[int, Field(ge=1, le=100_000)] = 2000
    stream_idle_s: Annotated[float, Field(ge=1, le=604_800)] = 1800.0
    slow_reader_s: Annotated[float, Field(ge=1, le=3600)] = 15.0
    codex_memory_mb: Annotated[int, Field(ge=64, le=1 << 20)] = 1024
    codex_threads: Annotated[int, Field(ge=1, le=100_000)] = 400
    mcp_processes: Annotated[int, Field(ge=1, le=100_000)] = 64


class StorageConfig(Section):
    """How long ended tasks are kept; unfinished tasks are never deleted.

    keep_days: Tasks that ended longer ago are deleted.
    keep_tasks: The oldest ended tasks beyond this number, in all contexts, are deleted.
    """

    keep_days: Annotated[float, Field(ge=0, le=36_500)] = 30.0
    keep_tasks: Annotated[int, Field(ge=0, le=10_000_000)] = 10_000


class PushConfig(Section):
    """Webhook notifications; a2a.push_notifications turns them on and off.

    allow: Host names, addresses and networks that webhooks may use although they are not public.
    timeout_s: The time limit of a request.
    retry_for_s: How long a notification is retried; 0 = no retry.
    max_waiting: Notifications that wait in memory; above this, the oldest that do not end a task are dropped.
    max_parallel: Requests at the same time; at most a quarter of them to one host.
    """

    allow: Items[Text] = ()
    timeout_s: Annotated[float, Field(ge=0.1, le=120)] = 10.0
    retry_for_s: Annotated[float, Field(ge=0, le=86_400)] = 900.0
    max_waiting: Annotated[int, Field(ge=1, le=100_000)] = 1000
    max_parallel: Annotated[int, Field(ge=1, le=1000)] = 32


class PlatformConfig(Section):
    """The connection to the platform, which PLATFORM_URL and WORKSPACE_ID turn on.

    delivery: Messages are pushed to the agent, or polled from its inbox. auto = the platform's setting, or poll if the
        platform cannot reach the agent's address.
    heartbeat_s: The longest time between two heartbeats.
    answer_within_s: A pushed message that takes longer is acknowledged, and its answer is sent later. The platform
        itself waits 180 s and then sends the message again.
    """

    delivery: Literal["auto", "push", "poll"] = "auto"
    heartbeat_s: Annotated[float, Field(ge=1, le=300)] = 30.0
    answer_within_s: Annotated[float, Field(ge=0.1, le=86_400)] = 150.0


class Config(Section):
    """The whole of config.yaml.

    name, description: Shown on the agent card.
    version: Shown on the agent card; empty = the version of codex-workspace.
    role, tier: For the platform.
    runtime: The template that the platform starts.
    template_schema_version: The version of this file's format.
    model: The model if runtime_config.model is not set; the platform's default counts as not set.
    skills: Folders below `skills` beside config.yaml, each with a SKILL.md.
    prompt_files: Files with instructions for the model, in config.yaml's folder.
    principals: Callers with tokens of their own.
    providers: Model providers besides the built-in ones.
    mcp_servers: MCP servers whose tools the model may use.
    peers: A2A agents that the model may send tasks to.
    agent_tools: Give the model the agent's own tools (memory, peers); auto = if there are peers or a platform.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("bridge", "compliance", "delegation", "effort", "env", "governance", "hitl", "models", "observability"),
            *("idle_interval_seconds", "idle_prompt", "idle_prompt_file", "initial_prompt", "initial_prompt_file"),
            *("plugins", "rbac", "sandbox", "security_scan", "shared_context", "sub_workspaces", "task_budget"),
            "tools",
        }
    )

    name: Text
    runtime: Literal["codex"]
    template_schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    description: str = ""
    role: str = ""
    version: str = ""
    tier: Annotated[int, Field(ge=0, le=99)] | None = None
    model: Text | None = None
    runtime_config: RuntimeConfig = Field(default_factory=RuntimeConfig)
    skills: Items[SkillFolder] = ()
    prompt_files: Items[Text] = ()
    a2a: A2AConfig = Field(default_factory=A2AConfig)
    principals: Items[PrincipalEntry] = ()
    providers: Items[ProviderEntry] = ()
    codex: CodexConfig = Field(default_factory=CodexConfig)
    mcp_servers: Items[McpServerEntry] = ()
    peers: Items[PeerEntry] = ()
    agent_tools: Literal["auto", "always", "never"] = "auto"
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    push: PushConfig = Field(default_factory=PushConfig)
    platform: PlatformConfig = Field(default_factory=PlatformConfig)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for section, key, names in (
            ("principals", "name", [entry.name for entry in self.principals]),
            ("providers", "name", [entry.name for entry in self.providers]),
            ("providers", "model_provider_slug", [entry.slug for entry in self.providers]),
            ("mcp_servers", "name", [entry.name for entry in self.mcp_servers]),
            ("peers", "name", [entry.name for entry in self.peers]),
        ):
            for index, name in enumerate(names):
                if name in names[:index]:
                    raise problem(f"is a duplicate: {quoted(name)}", f"{section}[{index}].{key}")
        return self


@dataclass(frozen=True, slots=True)
class PlatformSettings:
    """The platform to register with. Without a token, the registration issues one.

    token_file: the file for an issued token. provisioned: files in which the platform's provisioner may put a token.
    """

    url: str
    workspace_id: str
    token: Secret | None
    token_file: Path
    provisioned: tuple[Path, ...] = ()

    @property
    def secret_file(self) -> Path:
        """The file for the secret that the platform sends with its requests."""
        return self.token_file.with_name(PLATFORM_SECRET)


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked configuration. All folders are absolute; only `workspace_dir` is known to exist.

    config_file: the file of `config`, for messages.
    codex_bin: codex's native binary, or None if none was found; starting codex then fails with an error.
    port: 0 = any free port.
    config: `codex.sandbox` is never `auto`; `sandbox_blocked` tells why codex's sandbox is off although it was.
    tokens: the principals' tokens by name; the one of A2A_TOKEN belongs to OPERATOR.
    own_token: the operator's token that the agent has generated, only without `tokens`. Without both, no token is
        required.
    database_url: see `common.database_url`; a secret because it can contain a password.
    mcp: `mcp_servers` of config.yaml with the values of their variables.
    instructions, skills: the content of the files that config.yaml names.
    model, model_source: the model in the operator's words, and the variable or key that sets it.
    misplaced: the keys of `MISPLACED` in config.yaml.
    credentials: every credential in the environment, used or not.
    peer_tokens: by the name of the peer.
    """

    config: Config
    environment: Environment
    config_file: Path
    state_dir: Path
    workspace_dir: Path
    codex_home: Path
    codex_bin: Path | None
    port: int
    tokens: Mapping[str, Secret]
    metrics_token: Secret | None
    trace_headers: Secret | None
    database_url: Secret
    platform: PlatformSettings | None
    model: str
    model_source: str
    mcp: McpServers = field(default_factory=McpServers)
    instructions: Instructions = field(default_factory=Instructions)
    skills: tuple[Skill, ...] = ()
    misplaced: tuple[str, ...] = ()
    credentials: tuple[Secret, ...] = ()
    peer_tokens: Mapping[str, Secret] = field(default_factory=dict)
    own_token: OwnToken | None = None
    sandbox_blocked: str | None = None

    @property
    def has_agent_tools(self) -> bool:
        """Whether the model gets the agent's own tools."""
        has_peers = bool(self.config.peers) or self.platform is not None
        return self.config.agent_tools == "always" or (self.config.agent_tools == "auto" and has_peers)

    @property
    def turn_timeout_s(self) -> float:
        """The time limit of a turn."""
        return self.config.codex.turn_timeout_s or self.config.runtime_config.timeout or TURN_TIMEOUT_S

    @property
    def writable_folders(self) -> tuple[Path, ...]:
        """The absolute folders besides the workspace that commands in the workspace-write sandbox may write to."""
        return tuple((self.workspace_dir / folder).resolve() for folder in self.config.codex.writable_folders)

    @property
    def exposed(self) -> Mapping[str, Path]:
        """The agent's own files that sandboxed commands can change because they are in the workspace."""
        if self.config.codex.sandbox != "workspace-write":
            return {}
        own = {
            "config.yaml": self.config_file,
            "the state folder": self.state_dir,
            "CODEX_HOME": self.codex_home,
            "the agent's program": TEMPLATE_DIR,
        }
        workspace = self.workspace_dir.resolve()
        return {name: path for name, path in own.items() if path.resolve().is_relative_to(workspace)}
