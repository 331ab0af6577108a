"""Re-exports `codex_workspace.executor`."""

from codex_workspace.executor import CodexAppServerExecutor

__all__ = ["CodexAppServerExecutor"]
