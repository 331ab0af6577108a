"""The platform runtime's adapter contract: its own classes where it is installed, the part we use of them elsewhere.

The one place that knows `molecule_runtime`. Every generation of it has `adapters.base` with these two names; nothing
else of it is relied on. A platform image always has the runtime; a checkout, and our own host, never.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from a2a.server.agent_execution import AgentExecutor


@dataclass
class OwnAdapterConfig:
    """What the runtime tells an adapter about its workspace."""

    model: str
    config_path: str = "/configs"
    workspace_id: str = ""
    a2a_port: int = 8000
    prompt_files: list[str] = field(default_factory=list)


class OwnBaseAdapter(ABC):
    """What the runtime calls on an adapter."""

    @staticmethod
    @abstractmethod
    def name() -> str:
        """Return the runtime's id."""

    @staticmethod
    @abstractmethod
    def display_name() -> str:
        """Return the name for people."""

    @staticmethod
    @abstractmethod
    def description() -> str:
        """Return what it is, in a sentence."""

    @abstractmethod
    async def setup(self, config: OwnAdapterConfig) -> None:
        """Check and prepare; a RuntimeError says what the operator has to mend."""

    @abstractmethod
    async def create_executor(self, config: OwnAdapterConfig) -> AgentExecutor:
        """Return the executor that answers messages."""


if TYPE_CHECKING:
    AdapterConfig = OwnAdapterConfig
    BaseAdapter = OwnBaseAdapter
else:
    try:
        from molecule_runtime.adapters.base import AdapterConfig, BaseAdapter
    except ModuleNotFoundError as missing:
        if missing.name is None or not missing.name.startswith("molecule_runtime"):
            raise
        AdapterConfig, BaseAdapter = OwnAdapterConfig, OwnBaseAdapter
