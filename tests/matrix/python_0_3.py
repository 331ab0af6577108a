# mypy: ignore-errors
"""The client of a2a-sdk 0.3.26 with the protocol of `remote`; it runs in its own environment.

Usage: python python_0_3.py URL TRANSPORT TOKEN
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import grpc.aio
import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.client.auth.credentials import CredentialService
from a2a.client.auth.interceptor import AuthInterceptor
from a2a.client.middleware import ClientCallContext
from a2a.types import AgentCard, MessageSendConfiguration, MessageSendParams, TaskIdParams, TaskQueryParams
from pydantic import BaseModel


class Token(CredentialService):
    """The same token for every security scheme of a card."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def get_credentials(self, security_scheme_name: str, context: ClientCallContext | None) -> str:
        return self._token


class Bearer:
    """Adds the token to gRPC calls, which this SDK leaves to the channel."""

    def __init__(self, token: str) -> None:
        self._token = token

    def with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {self._token}"))
        return details._replace(metadata=metadata)


class BearerCalls(Bearer, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, client_call_details, request):
        return await continuation(self.with_token(client_call_details), request)


class BearerStreams(Bearer, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation, client_call_details, request):
        return await continuation(self.with_token(client_call_details), request)


class Clients:
    """The SDK's clients for one agent; in this SDK, a client holds the send configuration."""

    def __init__(self, card: AgentCard, http: httpx.AsyncClient, transport: str, token: str) -> None:
        self._card, self._http, self._transport, self._token = card, http, transport, token
        self._channel: grpc.aio.Channel | None = None

    def client(self, *, streaming: bool = False, sent_with: MessageSendConfiguration | None = None) -> Client:
        """Return a client for one call."""
        push = sent_with.push_notification_config if sent_with is not None else None
        config = ClientConfig(
            streaming=streaming,
            polling=sent_with is not None and not sent_with.blocking,
            httpx_client=self._http,
            grpc_channel_factory=self._channel_to,
            supported_transports=[self._transport],
            push_notification_configs=[] if push is None else [push],
        )
        return ClientFactory(config).create(self._card, interceptors=[AuthInterceptor(Token(self._token))])

    def _channel_to(self, url: str) -> grpc.aio.Channel:
        if self._channel is None:
            bearers = [BearerCalls(self._token), BearerStreams(self._token)]
            self._channel = grpc.aio.insecure_channel(url, interceptors=bearers)
        return self._channel

    async def aclose(self) -> None:
        """Close the shared connections."""
        if self._channel is not None:
            await self._channel.close()


async def main(url: str, transport: str, token: str) -> None:
    """Run the call of each line."""
    # Over HTTP+JSON this SDK does not call interceptors.
    headers = {"Authorization": f"Bearer {token}"} if transport == "HTTP+JSON" else {}
    async with httpx.AsyncClient(timeout=30, headers=headers) as http:
        clients = Clients(await A2ACardResolver(http, url).get_agent_card(), http, transport, token)
        async with asyncio.TaskGroup() as tasks:
            while line := await asyncio.to_thread(sys.stdin.readline):
                tasks.create_task(answer(clients, json.loads(line)))
        await clients.aclose()


async def answer(clients: Clients, call: dict) -> None:
    """Print the results of one call."""
    try:
        async for event in called(clients, call["do"], call["with"]):
            say(call, event=event.model_dump(mode="json", by_alias=True, exclude_none=True))
    except Exception as error:
        say(call, error=f"{type(error).__name__}: {error}")
    else:
        say(call, end=True)


async def called(clients: Clients, what: str, about: dict | str) -> AsyncIterator[BaseModel]:
    """Yield the results of a call; for a stream the updates, not the client's copy of the task."""
    match what:
        case "get":
            yield await clients.client().get_task(TaskQueryParams(id=about))
        case "cancel":
            yield await clients.client().cancel_task(TaskIdParams(id=about))
        case "list":
            for task in await clients.client().list_tasks(about):
                yield task
        case "subscribe":
            async for task, update in clients.client(streaming=True).resubscribe(TaskIdParams(id=about)):
                yield update or task
        case "send" | "stream":
            params = MessageSendParams.model_validate(about)
            client = clients.client(streaming=what == "stream", sent_with=params.configuration)
            async for event in client.send_message(params.message, request_metadata=params.metadata):
                yield (event[1] or event[0]) if isinstance(event, tuple) else event


def say(call: dict, **what: object) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps({"id": call["id"], **what}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
