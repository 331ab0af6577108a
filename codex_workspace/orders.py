"""What a message wants, made ready for codex; and the tool of ours that the model may call for it."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import anyio
from a2a.types import Message, Part
from google.protobuf.json_format import MessageToDict

from codex_workspace import attachments, handover
from codex_workspace.errors import InputRefused
from codex_workspace.groups import plain_task_group
from codex_workspace.handover import HandedFile, HandoverBounds
from codex_workspace.job import Order
from codex_workspace.midturn import MidTurn
from codex_workspace.parts import IMAGE_MODES, PartLimits, image_type, image_urls, read_parts
from codex_workspace.refusals import NOBODY_TO_ASK
from codex_workspace.replies import A2AEvent, Reply
from codex_workspace.scrubbing import Scrubber
from codex_workspace.turn import ToolCall
from codex_workspace.webhooks import Failed, Fetched, Refused
from codex_workspace.wire import JsonObject
from codex_workspace.wishes import read_wishes

logger = logging.getLogger(__name__)

HOLDS_A_SECRET = "The file holds a credential of this agent's own, which is handed over to nobody; take it out first."

NO_STEERING: Final = (
    "A message cannot join a running turn of this agent (codex.backend: exec); let it wait (queue) or take that one's "
    "place (interrupt)."
)

Fetch = Callable[[str, int], Awaitable[Fetched | Failed | Refused]]
"""Gets what stands at a URL, of at most so many bytes."""


@dataclass(frozen=True, slots=True)
class OrderReader:
    """Reads messages for one workspace.

    mid_turn: what becomes of a message that comes while a turn of its context is at work and does not say itself.
    parts: how much a message may bring. files: how much may be handed over in one task.
    fetch: gets what stands at a URL, of at most so many bytes; without it images by URL are refused.
    scrub: knows the secrets that no file which is handed over may hold.
    steers: whether a message can join a running turn.
    """

    workspace: Path
    mid_turn: MidTurn = MidTurn.QUEUE
    parts: PartLimits = field(default_factory=PartLimits)
    files: HandoverBounds = field(default_factory=HandoverBounds)
    fetch: Fetch | None = None
    scrub: Scrubber = field(default_factory=Scrubber)
    steers: bool = True

    async def read(self, message: Message, task_id: str) -> Order:
        """Return what a message wants; its larger files are in the workspace then.

        Raises:
            InputRefused: a part cannot be taken, or a wish not be granted.
            AttachmentsNotWritten: a file cannot be laid down.
        """
        wishes = read_wishes(MessageToDict(message.metadata), self.workspace, self.mid_turn)
        if wishes.mid_turn is MidTurn.STEER and not self.steers:
            raise InputRefused(NO_STEERING)
        said = read_parts(await self._with_images(message.parts), self.parts)
        cwd = wishes.options.cwd
        told = ""
        if said.attachments:
            told = await anyio.to_thread.run_sync(attachments.write, self.workspace, task_id, said.attachments, cwd)
        return Order(said.items(told, self.parts.max_text_chars), said.text, wishes.options, wishes.mid_turn)

    async def _with_images(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts with the bytes of the images that they only name."""
        whole = list(parts)
        urls = image_urls(parts[: self.parts.max_parts])
        if self.fetch is None or not urls:
            return whole
        async with plain_task_group() as tasks:
            for number, url in urls.items():
                tasks.start_soon(self._put_image, whole, number, url, self.fetch)
        return whole

    async def _put_image(self, parts: list[Part], number: int, url: str, fetch: Fetch) -> None:
        named = parts[number]
        fetched = await fetch(url, self.parts.max_file_bytes)
        if not isinstance(fetched, Fetched):
            raise InputRefused(f"Part {number + 1} is an image by URL that cannot be fetched: {fetched.reason}.")
        media_type = image_type(fetched.data)
        if media_type is None:
            taken = ", ".join(IMAGE_MODES)
            raise InputRefused(f"Part {number + 1}: what stands at its URL is no image of a known kind ({taken}).")
        parts[number] = Part(raw=fetched.data, media_type=media_type, filename=named.filename)

    async def serve(self, call: ToolCall, reply: Reply, cwd: Path | None) -> tuple[JsonObject, list[A2AEvent]]:
        """Do what the model calls a tool for: the result for codex, and what goes out."""
        if call.tool != handover.TOOL:
            return handover.result(handover.NotHanded(NOBODY_TO_ASK)), []
        handed = reply.files
        left = replace(
            self.files,
            left_bytes=self.files.left_bytes - sum(len(part.raw) for file in handed for part in file.parts),
            left_files=self.files.left_files - len(handed),
        )
        outcome = await anyio.to_thread.run_sync(handover.take, call.arguments, self.workspace, left, cwd)
        if isinstance(outcome, HandedFile) and self.scrub.is_in(outcome.data):
            outcome = handover.NotHanded(HOLDS_A_SECRET)
        if not isinstance(outcome, HandedFile):
            logger.info("a file was not handed over: %s", outcome.sentence)
            return handover.result(outcome), []
        artifact = handover.as_artifact(outcome, len(handed) + 1)
        return handover.result(outcome), [reply.handed_over(artifact)]
