"""The clients of the matrix: a2a-sdk 1.3 in this process, the others in their own processes."""

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
"""The minimum version for the JavaScript SDK."""


class Client(Protocol):
    """A client connected by the agent's card. Its interface is A2A 1.0, whatever version it uses itself."""

    def send(self, request: SendMessageRequest, *, streaming: bool = False) -> AsyncIterator[StreamResponse]:
        """Send a message and yield its events."""

    def subscribe(self, task_id: str) -> AsyncIterator[StreamResponse]:
        """Subscribe to a task and yield its events."""

    async def get(self, task_id: str) -> Task:
        """Return the task as the agent stores it."""

    async def cancel(self, task_id: str) -> Task:
        """Cancel a task and return it."""

    async def list(self, context_id: str) -> Sequence[Task]:
        """Return a context's tasks."""


@dataclass(frozen=True, slots=True)
class Kind:
    """An available client: its SDK and transport; `opened` connects it to the agent at a URL, with a token."""

    sdk: str
    transport: str
    opened: Callable[[str, str], AbstractAsyncContextManager[Client]]

    @property
    def is_old(self) -> bool:
        """Whether it uses A2A 0.3."""
        return self.sdk == "python-0.3"

    def __str__(self) -> str:
        return f"{self.sdk} {self.transport}"


@dataclass(frozen=True, slots=True)
class Token(sdk.CredentialService):
    """The same token for every security scheme of a card."""

    token: str

    async def get_credentials(self, security_scheme_name: str, context: sdk.ClientCallContext | None) -> str | None:
        return self.token


@dataclass(frozen=True, slots=True)
class OwnClient:
    """The a2a-sdk of this process."""

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
    """Connect the a2a-sdk of this process."""
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
    """Whether Node and npm are available in versions that the JavaScript SDK supports."""
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
"""Features that an SDK lacks: SDK and row, and its error."""
