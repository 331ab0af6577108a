"""The client of a2a-sdk 0.3.26. It runs in its own environment and prints one JSON object.

Usage: python old_client.py URL TEXT [TOKEN]
"""

import asyncio
import json
import sys
import uuid
from typing import Any

import httpx
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.types import Message, Part, Role, TaskQueryParams, TextPart


async def main(url: str, text: str) -> None:
    """Send a message with the blocking client, then with the streaming one in the same context, and read both tasks."""
    seen: dict[str, Any] = {}
    async with httpx.AsyncClient(timeout=60) as http:
        card = await A2ACardResolver(http, url).get_agent_card()
        context_id = None
        for streaming in (False, True):
            client = ClientFactory(ClientConfig(streaming=streaming, httpx_client=http)).create(card)
            message = Message(
                role=Role.user,
                message_id=str(uuid.uuid4()),
                context_id=context_id,
                parts=[Part(root=TextPart(text=text))],
            )
            events, task = 0, None
            async for event in client.send_message(message):
                task, events = event[0], events + 1
            kept = await client.get_task(TaskQueryParams(id=task.id))
            context_id = task.context_id
            seen["streaming" if streaming else "blocking"] = {
                "events": events,
                "state": task.status.state.value,
                "answer": _answer(task),
                "kept_state": kept.status.state.value,
                "kept_answer": _answer(kept),
                "context": context_id,
            }
    print(json.dumps(seen))


def _answer(task: Any) -> str:
    return "".join(
        part.root.text for artifact in task.artifacts or [] if artifact.name == "answer" for part in artifact.parts
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
