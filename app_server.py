"""Re-exports `codex_workspace.app_server`."""

from codex_workspace.app_server import Connection, Launch, Process, open_app_server

__all__ = ["Connection", "Launch", "Process", "open_app_server"]
