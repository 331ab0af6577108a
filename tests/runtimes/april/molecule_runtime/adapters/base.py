"""`AdapterConfig` and `BaseAdapter`, as in April."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

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


class BaseAdapter(ABC):
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

    @abstractmethod
    async def setup(self, config: AdapterConfig) -> None: ...

    @abstractmethod
    async def create_executor(self, config: AdapterConfig) -> AgentExecutor: ...
