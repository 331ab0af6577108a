"""What the agent's tools are called for everybody: names that agents of several makers share, beside codex's own."""

from collections.abc import Iterable
from typing import Final

BASH: Final = "Bash"
EDIT: Final = "Edit"
WRITE: Final = "Write"
WEB_SEARCH: Final = "WebSearch"
TODO_WRITE: Final = "TodoWrite"

COMMAND: Final = "command_execution"
FILES: Final = "file_change"
SEARCH: Final = "web_search"


def name_of_change(kinds: Iterable[str]) -> str:
    """Return the name for a change of files: Write where all of them are new, else Edit."""
    kinds = tuple(kinds)
    return WRITE if kinds and all(kind == "add" for kind in kinds) else EDIT
