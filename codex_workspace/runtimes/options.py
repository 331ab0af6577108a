"""The options of one run, the same for every runtime."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from codex_workspace.common.errors import InputRefused
from codex_workspace.common.values import JsonObject, KeyPath, TomlValue

Sandbox: TypeAlias = Literal["read-only", "workspace-write", "danger-full-access"]

FULL_AUTO: Final[Sandbox] = "workspace-write"
"""The sandbox of `full_auto`."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one run; the CLI's own configuration decides what is not set.

    resume: the session to resume; None starts a new one.
    model: the model's id.
    sandbox: what commands may do.
    full_auto: run commands in the workspace-write sandbox; excludes any other `sandbox`.
    cwd: the working directory.
    writable: directories that commands may write to in the workspace-write sandbox, beside the working directory.
    skip_git_check: run outside a git repository too.
    ephemeral: store no session; such a run cannot be resumed.
    web_search: whether the model may search the web.
    output_schema: a JSON Schema of the answer.
    images: image files that belong to the prompt.
    config: further settings by their paths. They may appear on a command line, which other users can read: put no
        secret here.
    """

    resume: str | None = None
    model: str | None = None
    sandbox: Sandbox | None = None
    full_auto: bool = False
    cwd: Path | None = None
    writable: tuple[Path, ...] = ()
    skip_git_check: bool = True
    ephemeral: bool = False
    web_search: bool | None = None
    output_schema: JsonObject | None = None
    images: tuple[Path, ...] = ()
    config: Mapping[KeyPath, TomlValue] = field(default_factory=dict)

    @property
    def effective_sandbox(self) -> Sandbox | None:
        """The sandbox after `full_auto` is applied."""
        return FULL_AUTO if self.full_auto else self.sandbox


DEFAULT_OPTIONS: Final = RunOptions()


def check_run(prompt: str, options: RunOptions, max_chars: int) -> None:
    """Reject a prompt and options that no runtime accepts.

    Raises:
        InputRefused: the prompt is empty or has more than `max_chars` characters, or two options contradict each other.
    """
    if not prompt.strip():
        raise InputRefused("The message has no text.")
    if len(prompt) > max_chars:
        raise InputRefused(f"The message has {len(prompt)} characters; codex takes at most {max_chars}.")
    if options.full_auto and options.sandbox not in (None, FULL_AUTO):
        raise InputRefused(f"full_auto runs commands in the sandbox {FULL_AUTO}, not in {options.sandbox}.")
    if options.ephemeral and options.resume is not None:
        raise InputRefused("A run that is not stored cannot resume a session.")
