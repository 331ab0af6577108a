"""Starts an MCP server with variables under the names that it knows, and is that server from then on.

Codex hands a server variables of its own environment under their own names only, and what is handed over this way must
neither stand in config.toml nor in a command line, nor collide with a name that codex itself or another server uses. So
codex's environment holds each value under a name of ours, and this program gives it the server's name:

    python -I -S mcp_launcher.py NAME=OUR_NAME … -- command argument …

It imports nothing of the project: it is run by its path, for every thread of codex.
"""

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> str:
    """Become the server; returns only where that fails, with the sentence why."""
    split = arguments.index("--")
    environment = dict(os.environ)
    for pair in arguments[:split]:
        name, _, ours = pair.partition("=")
        environment[name] = environment.pop(ours)
    command = list(arguments[split + 1 :])
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
