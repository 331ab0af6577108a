"""What a message wants, made ready for codex; and the tool of ours that the model may call for it."""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
from a2a.types import Message
from google.protobuf.json_format import MessageToDict

from codex_workspace import attachments, handover
from codex_workspace.handover import HandedFile, HandoverBounds
from codex_workspace.job import Order
from codex_workspace.midturn import MidTurn
from codex_workspace.parts import PartLimits, read_parts
from codex_workspace.refusals import NOBODY_TO_ASK
from codex_workspace.replies import A2AEvent, Reply
from codex_workspace.turn import ToolCall
from codex_workspace.wire import JsonObject
from codex_workspace.wishes import read_wishes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OrderReader:
    """Reads messages for one workspace.

    mid_turn: what becomes of a message that comes while a turn of its context is at work and does not say itself.
    parts: how much a message may bring. files: how much may be handed over in one task.
    """

    workspace: Path
    mid_turn: MidTurn = MidTurn.QUEUE
    parts: PartLimits = field(default_factory=PartLimits)
    files: HandoverBounds = field(default_factory=HandoverBounds)

    async def read(self, message: Message, task_id: str) -> Order:
        """Return what a message wants; its larger files are in the workspace then.

        Raises:
            InputRefused: a part cannot be taken, or a wish not be granted.
            AttachmentsNotWritten: a file cannot be laid down.
        """
        wishes = read_wishes(MessageToDict(message.metadata), self.workspace, self.mid_turn)
        said = read_parts(message.parts, self.parts)
        cwd = wishes.options.cwd
        told = ""
        if said.attachments:
            told = await anyio.to_thread.run_sync(attachments.write, self.workspace, task_id, said.attachments, cwd)
        return Order(said.items(told, self.parts.max_text_chars), said.text, wishes.options, wishes.mid_turn)

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
        if not isinstance(outcome, HandedFile):
            logger.info("a file was not handed over: %s", outcome.sentence)
            return handover.result(outcome), []
        artifact = handover.as_artifact(outcome, len(handed) + 1)
        return handover.result(outcome), [reply.handed_over(artifact)]
