"""Re-exports `codex_workspace.app_server`."""

from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.runtimes.launch import Launch
from codex_workspace.runtimes.process import Process

__all__ = ["Connection", "Launch", "Process", "open_app_server"]
