"""Sends messages to an agent in one conversation and prints the answers as they stream.

    python python_client.py http://127.0.0.1:8000 "First message" "Second message"

A2A_TOKEN in the environment is sent as the bearer token.
"""

import asyncio
import os
import sys
import uuid

import httpx
from a2a.client import Client, ClientConfig, ClientFactory
from a2a.types import Message, Part, Role, SendMessageRequest, TaskState


async def ask(client: Client, text: str, context_id: str) -> None:
    """Send one message and print what the agent does and answers."""
    message = Message(role=Role.ROLE_USER, message_id=str(uuid.uuid4()), context_id=context_id, parts=[Part(text=text)])
    # Every update is printed once; the agent would send this SDK the whole answer again at the end.
    message.metadata["urn:codex-workspace:answer-updates"] = "pieces"
    async for event in client.send_message(SendMessageRequest(message=message)):
        if event.HasField("artifact_update") and event.artifact_update.artifact.artifact_id == "answer":
            print("".join(part.text for part in event.artifact_update.artifact.parts), end="", flush=True)
        elif event.HasField("status_update"):
            status = event.status_update.status
            note = "".join(part.text for part in status.message.parts)
            print(f"\n[{TaskState.Name(status.state).removeprefix('TASK_STATE_').lower()}] {note}".rstrip())


async def main(url: str, texts: list[str]) -> None:
    """Send the messages one after the other, all in one new conversation."""
    token = os.environ.get("A2A_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    context_id = str(uuid.uuid4())
    async with httpx.AsyncClient(headers=headers, timeout=600) as http:
        client = await ClientFactory(ClientConfig(httpx_client=http)).create_from_url(url)
        for text in texts:
            await ask(client, text, context_id)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
