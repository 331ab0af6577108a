"""The platform's entry point: its runtime imports this module from the template's folder and takes `Adapter`.

The code is in `codex_workspace.adapter`."""

from codex_workspace.adapter import Adapter, CodexAdapter

__all__ = ["Adapter", "CodexAdapter"]
