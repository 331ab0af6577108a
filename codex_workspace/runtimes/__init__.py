"""The public Python API: runtimes, run options, and the events of a run."""

from codex_workspace.runtimes.events import AgentEvent, Done, as_json
from codex_workspace.runtimes.launch import Launch
from codex_workspace.runtimes.options import RunOptions
from codex_workspace.runtimes.process import end_leftovers
from codex_workspace.runtimes.registry import Run, Runtime, create_runtime

__all__ = [
    "AgentEvent",
    "Done",
    "Launch",
    "Run",
    "RunOptions",
    "Runtime",
    "as_json",
    "create_runtime",
    "end_leftovers",
]
