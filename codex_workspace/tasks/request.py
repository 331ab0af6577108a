"""Reads an A2A message into a turn request: input, files, and the turn options in its metadata under `TURN`.

{"model": "gpt-5.5", "effort": "high", "workingFolder": "services/api", "outputSchema": {…}, "midTurn": "steer"}
"""

import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import anyio
from a2a.server.agent_execution import RequestContext
from a2a.types import Artifact, Message, Part
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import InputRefused
from codex_workspace.common.redact import Redactor
from codex_workspace.common.safe_http import Fetched, RequestFailed, ResponseRejected
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.settings import LimitsConfig
from codex_workspace.protocol.server_requests import DECLINED_REASON
from codex_workspace.runtimes.backend import (
    HANDOVER_TOOL,
    DynamicToolCall,
    TurnInput,
    TurnOptions,
    input_texts,
    text_input,
)
from codex_workspace.tasks import files
from codex_workspace.tasks.files import HandoverRefused, tool_result
from codex_workspace.tasks.parts import IMAGE_MODES, check_input, image_type, image_urls, read_parts
from codex_workspace.tasks.replies import A2AEvent, Reply
from codex_workspace.tasks.scheduling import MidTurn

TURN: Final = "urn:codex-workspace:turn"
"""The extension's name, and the key of a message's metadata."""

MAX_SCHEMA_CHARS: Final = 65_536

_TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
"""Valid values of a JSON Schema's `type`; the model provider checks the rest."""

_MODEL: Final = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,127}")
_EFFORT: Final = re.compile(r"[a-z]{1,32}")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A message read into a turn's input; `text` is its readable text, `mid_turn` applies if another turn runs."""

    turn_input: TurnInput
    text: str
    options: TurnOptions = field(default_factory=TurnOptions)
    mid_turn: MidTurn = MidTurn.QUEUE


@dataclass(frozen=True, slots=True)
class TurnOverrides:
    """Turn options of one message."""

    options: TurnOptions
    mid_turn: MidTurn


def read_turn_options(metadata: JsonObject, workspace: Path, usual: MidTurn) -> TurnOverrides:
    """Return the turn options in a message's metadata; `usual` is the default of `midTurn`.

    Raises:
        InputRefused: an option is unknown or invalid; the sentence lists the valid ones.
    """
    wanted = metadata.get(TURN)
    if wanted is None:
        return TurnOverrides(TurnOptions(), usual)
    if not isinstance(wanted, dict):
        raise _refused("must be an object")
    overrides = TurnOverrides(TurnOptions(), usual)
    for key, value in wanted.items():
        reader = _READERS.get(key)
        if reader is None:
            raise _refused(f"{key[:50]!r} is unknown; valid options: {', '.join(_READERS)}")
        overrides = reader(overrides, value, workspace)
    return overrides


def _with_model(overrides: TurnOverrides, value: JsonValue, _workspace: Path) -> TurnOverrides:
    if not isinstance(value, str) or not _MODEL.fullmatch(value):
        raise _refused("model must be the name of a model")
    return replace(overrides, options=replace(overrides.options, model=value))


def _with_effort(overrides: TurnOverrides, value: JsonValue, _workspace: Path) -> TurnOverrides:
    if not isinstance(value, str) or not _EFFORT.fullmatch(value):
        raise _refused("effort must be a word such as low, medium or high")
    return replace(overrides, options=replace(overrides.options, effort=value))


def _with_folder(overrides: TurnOverrides, value: JsonValue, workspace: Path) -> TurnOverrides:
    if not isinstance(value, str) or "\0" in value:
        raise _refused("workingFolder must be the path of a folder, relative to the workspace")
    home = workspace.resolve()
    folder = (home / value).resolve()
    if not folder.is_relative_to(home) or not folder.is_dir():
        raise _refused("workingFolder must be an existing folder inside the workspace")
    return replace(overrides, options=replace(overrides.options, cwd=folder))


def _with_schema(overrides: TurnOverrides, value: JsonValue, _workspace: Path) -> TurnOverrides:
    if not isinstance(value, dict) or len(json.dumps(value)) > MAX_SCHEMA_CHARS:
        raise _refused(f"outputSchema must be a JSON Schema, an object of at most {MAX_SCHEMA_CHARS} characters")
    if not _is_type(value.get("type", "object")):
        raise _refused(f"outputSchema: type must be one of {', '.join(_TYPES)}")
    return replace(overrides, options=replace(overrides.options, output_schema=value))


def _is_type(value: JsonValue) -> bool:
    named = value if isinstance(value, list) else [value]
    return bool(named) and all(each in _TYPES for each in named)


def _with_mid_turn(overrides: TurnOverrides, value: JsonValue, _workspace: Path) -> TurnOverrides:
    if value not in list(MidTurn):
        raise _refused(f"midTurn must be one of {', '.join(MidTurn)}")
    return replace(overrides, mid_turn=MidTurn(value))


_READERS: Final[Mapping[str, Callable[[TurnOverrides, JsonValue, Path], TurnOverrides]]] = {
    "model": _with_model,
    "effort": _with_effort,
    "workingFolder": _with_folder,
    "outputSchema": _with_schema,
    "midTurn": _with_mid_turn,
}


def _refused(sentence: str) -> InputRefused:
    return InputRefused(f"metadata {TURN}: {sentence}.")


logger = logging.getLogger(__name__)

MAX_FILES: Final = 100
"""At most this many files are handed over in one task."""

HOLDS_A_SECRET: Final = (
    "The file contains a credential of this agent, so it cannot be sent; remove the credential first."
)

NO_STEERING: Final = "A message cannot join a running turn of this agent (codex.backend: exec); use queue or interrupt."

Fetch = Callable[[str, int], Awaitable[Fetched | RequestFailed | ResponseRejected]]
"""Fetches the content of a URL, at most this many bytes."""


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads the messages of one workspace.

    mid_turn: the default for messages that arrive during another turn.
    limits: the limits of a message, and of the files that one task hands over.
    fetch: fetches images by URL; without it they are rejected.
    scrub: the secrets that a handed-over file must not contain.
    steers: whether a message can join a running turn.
    """

    workspace: Path
    mid_turn: MidTurn = MidTurn.QUEUE
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    fetch: Fetch | None = None
    scrub: Redactor = field(default_factory=Redactor)
    steers: bool = True

    async def read(self, message: Message, task_id: str) -> TurnRequest:
        """Return the turn request of a message, after its attachments were written to the workspace.

        Raises:
            InputRefused: a part or a turn option is not accepted.
            AttachmentsNotWritten: a file cannot be written.
        """
        overrides = read_turn_options(MessageToDict(message.metadata), self.workspace, self.mid_turn)
        if overrides.mid_turn is MidTurn.STEER and not self.steers:
            raise InputRefused(NO_STEERING)
        content = read_parts(await self._with_images(message.parts), self.limits)
        items, options = content.items, overrides.options
        if content.attachments:
            note = await anyio.to_thread.run_sync(
                files.write, self.workspace, task_id, content.attachments, options.cwd
            )
            items = [*items, *text_input(note)]
        check_input(items, self.limits.max_text_chars)
        return TurnRequest(items, "\n".join(input_texts(content.items)), options, overrides.mid_turn)

    async def _with_images(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts with the images by URL replaced by their bytes."""
        whole = list(parts)
        urls = image_urls(parts[: self.limits.max_parts])
        if self.fetch is None or not urls:
            return whole
        async with task_group() as tasks:
            for number, url in urls.items():
                tasks.start_soon(self._put_image, whole, number, url, self.fetch)
        return whole

    async def _put_image(self, parts: list[Part], number: int, url: str, fetch: Fetch) -> None:
        named = parts[number]
        fetched = await fetch(url, self.limits.max_file_bytes)
        if not isinstance(fetched, Fetched):
            raise InputRefused(f"Part {number + 1} is an image by URL that cannot be fetched: {fetched.reason}.")
        media_type = image_type(fetched.data)
        if media_type is None:
            taken = ", ".join(IMAGE_MODES)
            raise InputRefused(f"Part {number + 1}: the content of its URL is not a known image format ({taken}).")
        parts[number] = Part(raw=fetched.data, media_type=media_type, filename=named.filename)

    async def serve(self, call: DynamicToolCall, reply: Reply, cwd: Path | None) -> tuple[JsonObject, list[A2AEvent]]:
        """Serve a tool call of the model: return the result for codex and the events to send."""
        if call.tool != HANDOVER_TOOL:
            return tool_result(DECLINED_REASON, success=False), []
        try:
            file = await self._take(call.arguments, reply.files, cwd)
        except HandoverRefused as refused:
            logger.info("rejected the request to send a file: %s", refused)
            return tool_result(str(refused), success=False), []
        artifact = Artifact(artifact_id=f"file-{len(reply.files) + 1}", name=file.filename, parts=[file])
        said = f"Sent as {file.filename} ({file.media_type}, {len(file.raw)} bytes)."
        return tool_result(said, success=True), [reply.handed_over(artifact)]

    async def _take(self, arguments: JsonValue, handed: Sequence[Artifact], cwd: Path | None) -> Part:
        if len(handed) >= MAX_FILES:
            raise HandoverRefused("No more files can be sent in this task; put the rest into one archive.")
        left = self.limits.max_handed_bytes - sum(len(part.raw) for file in handed for part in file.parts)
        most = self.limits.max_handed_file_bytes
        file = await anyio.to_thread.run_sync(files.take, arguments, self.workspace, most, left, cwd)
        if self.scrub.found_in(file.raw):
            raise HandoverRefused(HOLDS_A_SECRET)
        return file


def task_and_context_ids(context: RequestContext) -> tuple[str, str]:
    """Return the task id and the context id of a request.

    If a request names only its task, the SDK invents a context id; the task has the true one.
    """
    task = context.current_task
    context_id = task.context_id if task is not None else context.context_id
    if context.task_id is None or context_id is None:
        raise ValueError("the SDK gives every request a task id and a context id")
    return context.task_id, context_id
