"""The clients of the matrix: a2a-sdk 1.3 in this process, those of others as processes of their own."""

import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import grpc.aio
import httpx
from a2a import client as sdk
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
)

from tests.e2e.agent_process import REPOSITORY
from tests.matrix.remote import Wire, remote_client
from tests.matrix.wires import NEW, OLD

HERE: Final = Path(__file__).parent
OLD_PYTHON: Final = REPOSITORY / ".venv-a2a-0.3" / "bin" / "python"
NODE_MODULES: Final = REPOSITORY / ".node-a2a" / "node_modules"
TRANSPORTS: Final = ("JSONRPC", "HTTP+JSON", "GRPC")
OLDEST_NODE: Final = 20
"""What the JavaScript SDK asks for."""


class Client(Protocol):
    """A client that has found the agent by its card. It is spoken to in A2A 1.0, whatever it speaks itself."""

    def send(self, request: SendMessageRequest, *, streaming: bool = False) -> AsyncIterator[StreamResponse]:
        """Send a message and yield what comes of it."""

    def subscribe(self, task_id: str) -> AsyncIterator[StreamResponse]:
        """Yield a task and what comes of it from now on."""

    async def get(self, task_id: str) -> Task:
        """Return the task as the agent keeps it."""

    async def cancel(self, task_id: str) -> Task:
        """Cancel a task and return it."""

    async def list(self, context_id: str) -> Sequence[Task]:
        """Return a context's tasks."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A client that is there: its SDK and its transport; `opened` connects it to the agent at a URL, with a token."""

    sdk: str
    transport: str
    opened: Callable[[str, str], AbstractAsyncContextManager[Client]]

    @property
    def is_old(self) -> bool:
        """Whether it speaks A2A 0.3."""
        return self.sdk == "python-0.3"

    def __str__(self) -> str:
        return f"{self.sdk} {self.transport}"


@dataclass(frozen=True, slots=True)
class Token(sdk.CredentialService):
    """The same token for every scheme that a card asks for."""

    token: str

    async def get_credentials(self, security_scheme_name: str, context: sdk.ClientCallContext | None) -> str | None:
        return self.token


@dataclass(frozen=True, slots=True)
class OwnClient:
    """a2a-sdk of this process."""

    streaming: sdk.Client
    blocking: sdk.Client

    def send(self, request: SendMessageRequest, *, streaming: bool = False) -> AsyncIterator[StreamResponse]:
        return (self.streaming if streaming else self.blocking).send_message(request)

    def subscribe(self, task_id: str) -> AsyncIterator[StreamResponse]:
        return self.streaming.subscribe(SubscribeToTaskRequest(id=task_id))

    async def get(self, task_id: str) -> Task:
        return await self.blocking.get_task(GetTaskRequest(id=task_id))

    async def cancel(self, task_id: str) -> Task:
        return await self.blocking.cancel_task(CancelTaskRequest(id=task_id))

    async def list(self, context_id: str) -> Sequence[Task]:
        return (await self.blocking.list_tasks(ListTasksRequest(context_id=context_id))).tasks


@asynccontextmanager
async def own_client(transport: str, url: str, token: str) -> AsyncIterator[OwnClient]:
    """Connect a2a-sdk of this process."""
    async with httpx.AsyncClient(timeout=30) as http:
        clients = [
            await sdk.ClientFactory(
                sdk.ClientConfig(
                    streaming=streaming,
                    httpx_client=http,
                    grpc_channel_factory=grpc.aio.insecure_channel,
                    supported_protocol_bindings=[transport],
                )
            ).create_from_url(url, interceptors=[sdk.AuthInterceptor(Token(token))])
            for streaming in (True, False)
        ]
        async with clients[0], clients[1]:
            yield OwnClient(*clients)


def there_is_node() -> bool:
    """Tell whether Node and npm are there, new enough for the JavaScript SDK."""
    if not (shutil.which("node") and shutil.which("npm")):
        return False
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return int(version.strip().removeprefix("v").partition(".")[0]) >= OLDEST_NODE


def _kinds() -> list[Kind]:
    old = [str(OLD_PYTHON), str(HERE / "python_0_3.py")]
    javascript = ["node", str(HERE / "javascript" / "client.cjs")]
    found = [Kind("python-1.3", transport, partial(own_client, transport)) for transport in TRANSPORTS]
    found += [_remote("python-0.3", transport, old, OLD) for transport in TRANSPORTS]
    if there_is_node():
        found += [_remote("javascript-1.3", transport, javascript, NEW) for transport in TRANSPORTS]
    return found


def _remote(name: str, transport: str, command: list[str], wire: Wire) -> Kind:
    environment = {"NODE_PATH": str(NODE_MODULES)}
    return Kind(name, transport, lambda url, token: remote_client([*command, url, transport, token], environment, wire))


KINDS: Final = tuple(_kinds())
"""Every client that can run on this machine."""

CANNOT: Final[Mapping[tuple[str, str], str]] = {
    ("python-0.3", "list"): "'BaseClient' object has no attribute 'list_tasks'",
}
"""What an SDK cannot do, whatever the agent does: SDK and row, and what it says when it is asked to."""
