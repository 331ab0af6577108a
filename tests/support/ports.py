"""Free ports for servers that are started later or again."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a free port of 127.0.0.1, below the range from which the kernel assigns ports to others."""
    while True:
        port = random.randrange(20_000, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
