"""`AdapterConfig` and `BaseAdapter`, as in August."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from a2a.server.agent_execution import AgentExecutor


@dataclass
class AdapterConfig:
    model: str
    system_prompt: str | None = None
    tools: list[str] = field(default_factory=list)
    runtime_config: dict[str, object] = field(default_factory=dict)
    config_path: str = "/configs"
    workspace_id: str = ""
    prompt_files: list[str] = field(default_factory=list)
    a2a_port: int = 8000
    heartbeat: object = None


@dataclass
class RuntimeCapabilities:
    heartbeat: bool = False
    scheduler: bool = False
    session: bool = False
    status_mgmt: bool = False
    retry: bool = False
    activity_decoration: bool = False
    channel_dispatch: bool = False

    def to_dict(self) -> dict[str, bool]:
        return dict(vars(self))


class BaseAdapter(ABC):
    _executor: AgentExecutor | None = None
    _snapshot_session_id: str | None = None

    @staticmethod
    @abstractmethod
    def name() -> str: ...

    @staticmethod
    @abstractmethod
    def display_name() -> str: ...

    @staticmethod
    @abstractmethod
    def description() -> str: ...

    @staticmethod
    def get_config_schema() -> dict[str, object]:
        return {}

    def memory_filename(self) -> str:
        return "CLAUDE.md"

    async def transcript_lines(self, since: int = 0, limit: int = 100) -> dict[str, object]:
        del limit
        return {"runtime": self.name(), "supported": False, "lines": [], "cursor": since, "more": False, "source": None}

    def capabilities(self) -> RuntimeCapabilities:
        return RuntimeCapabilities()

    def idle_timeout_override(self) -> int | None:
        return None

    def pre_stop_state(self) -> dict[str, object]:
        session = getattr(self._executor, "_session_id", None)
        return {"session_id": session} if session else {}

    def restore_state(self, snapshot: dict[str, object]) -> None:
        session = snapshot.get("session_id")
        if isinstance(session, str):
            self._snapshot_session_id = session

    def register_tool_hook(self, name: str, fn: object) -> None:
        del name, fn

    def register_mcp_server_hook(self, name: str, spec: object) -> None:
        del name, spec

    def mcp_settings_path(self) -> str | None:
        return None

    def management_mcp_present(self) -> bool:
        return False

    async def enumerate_loaded_mcp_tools(self) -> list[str]:
        return []

    def materialize_persona(self, config: AdapterConfig, text: str) -> None:
        (Path(config.config_path) / "AGENTS.md").write_text(text)

    def register_subagent_hook(self, name: str, spec: object) -> None:
        del name, spec

    @abstractmethod
    async def setup(self, config: AdapterConfig) -> None: ...

    @abstractmethod
    async def create_executor(self, config: AdapterConfig) -> AgentExecutor: ...
