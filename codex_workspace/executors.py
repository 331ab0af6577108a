"""Executors of others: any `AgentExecutor` that a factory makes, served by this agent's server instead of codex's."""

import importlib
import sys
from pathlib import Path

from a2a.server.agent_execution import AgentExecutor

from codex_workspace.errors import ConfigError


def load_executor(name: str) -> AgentExecutor:
    """Return what the factory `module:function` makes; the module may lie in the current folder.

    Raises:
        ConfigError: there is no such module or function, it fails, or makes something else.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(f"--executor: must be module:factory, but is {name}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"--executor: the module {module_name} cannot be imported: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigError(f"--executor: {module_name} has no function {attribute}")
    made = factory()
    if not isinstance(made, AgentExecutor):
        raise ConfigError(f"--executor: {name} makes a {type(made).__name__}, not an AgentExecutor")
    return made
