"""Exit with 0 if the agent on this machine is ready: the container's HEALTHCHECK.

It runs every 30 seconds as `python -I codex_workspace/cli/probe.py`, so it imports nothing of the package. It requests
`/readyz` of our own host. Another host has no such address; there it requests the agent card.
"""

import os
import socket
import sys
from collections.abc import Mapping
from typing import Final

TIMEOUT_S: Final = 5.0
"""`/readyz` itself waits up to 3 s for codex."""

DEFAULT_PORT: Final = 8000
MAX_HEAD_BYTES: Final = 65536
MAX_CONFIG_CHARS: Final = 1 << 20


def probe(env: Mapping[str, str]) -> str | None:
    """Return why the agent is not ready; None when it is."""
    try:
        port = _port(env)
        status = _status(port, "/readyz")
        if status == 404:
            status = _status(port, "/.well-known/agent-card.json")
    except (OSError, ValueError) as error:
        return f"the agent does not answer: {error}"
    return None if status == 200 else f"the agent is not ready (HTTP {status})"


def _port(env: Mapping[str, str]) -> int:
    if named := env.get("A2A_PORT"):
        return int(named)
    folder = env.get("WORKSPACE_CONFIG_PATH") or "/configs"
    path = os.path.join(folder, "config.yaml")
    # The agent itself refuses other files; reading them could take forever.
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        return DEFAULT_PORT
    with open(path, encoding="utf-8") as file:
        text = file.read(MAX_CONFIG_CHARS)
    if "a2a:" not in text:
        return DEFAULT_PORT
    # Imported by those who need it: it takes longer than all the rest.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    match yaml.load(text, loader):
        case {"a2a": {"port": int(port)}}:
            return port
        case _:
            return DEFAULT_PORT


def _status(port: int, path: str) -> int:
    """Return the HTTP status of a GET on loopback.

    Raises:
        OSError: nothing listens, or there is no answer in time.
        ValueError: what answers is not HTTP.
    """
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        head = b""
        while b"\r\n" not in head and len(head) < MAX_HEAD_BYTES:
            piece = connection.recv(4096)
            if not piece:
                break
            head += piece
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError("this is not HTTP")
    return int(words[1])


if __name__ == "__main__":
    problem = probe(os.environ)
    if problem is not None:
        sys.exit(problem)
