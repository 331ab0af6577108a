"""The tool by which the model hands files of the workspace to the sender of the message.

The tool is told at `thread/start` (`dynamicTools`) and kept in the thread's record: a resumed thread offers it without
being told again, and one that was started without it never does (0.163). A call comes as the request
`item/tool/call` with `tool`, `namespace` (null here) and `arguments`; `result` is what it is answered with.

A file becomes an artifact of its own with one part of raw bytes, text or not: whoever saves it has the file as it was.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from a2a.types import Artifact, Part

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.jsonrpc import safe_text
from codex_workspace.runtimes.backend import HANDOVER_TOOL
from codex_workspace.tasks.parts import clean_name, guess_media_type

MAX_SHOWN_CHARS: Final = 200
"""At most this much of a path is quoted in an error."""


@dataclass(frozen=True, slots=True)
class HandoverLimits:
    """Limits: bytes of one file, and the remaining bytes and files of a task."""

    file_bytes: int = 5 << 20
    left_bytes: int = 20 << 20
    left_files: int = 100

    def after(self, file: "OutgoingFile") -> "HandoverLimits":
        """Return the limits after `file` was handed over."""
        return replace(self, left_bytes=self.left_bytes - len(file.data), left_files=self.left_files - 1)


@dataclass(frozen=True, slots=True)
class OutgoingFile:
    """A file as it was when codex handed it over."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class HandoverRefused:
    """Why a file was not handed over, as a sentence for the model."""

    sentence: str


DESCRIPTION: Final = (
    "Hands a file of the workspace over to the person or program that sent the message, who cannot see the workspace. "
    "Use it for every file that they ask to be given; the file is sent as it is at this moment."
)
PATH: Final = "The file, inside the workspace."
NAME: Final = "What to call it; its own name where this is left out."


def tool_spec() -> JsonObject:
    """Return the tool as an entry of `dynamicTools` in `thread/start`."""
    return {
        "type": "function",
        "name": HANDOVER_TOOL,
        "description": DESCRIPTION,
        "inputSchema": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": PATH},
                "name": {"type": "string", "description": NAME},
            },
            "required": ["path"],
            "additionalProperties": False,
        },
    }


def take(
    arguments: JsonValue, workspace: Path, bounds: HandoverLimits, cwd: Path | None = None
) -> OutgoingFile | HandoverRefused:
    """Return the file to hand over, or the reason why not. Blocks; call it in a thread.

    What is read is the very file that was looked at: a name that changes its meaning meanwhile leads nowhere else.

    Args:
        arguments: of the tool's call.
        workspace: the folder that the file has to be in, once all links are followed.
        bounds: what may be handed over yet.
        cwd: what a relative path begins at; the workspace where None.
    """
    match arguments:
        case {"path": str(path), "name": str(name)}:
            pass
        case {"path": str(path), "name": None}:
            name = ""
        case {"path": str(path), **rest} if "name" not in rest:
            name = ""
        case _:
            return HandoverRefused('The arguments have to be {"path": "…"}, with "name" as a string if at all.')
    if bounds.left_files < 1:
        return HandoverRefused(
            "No more files can be handed over in this task; put the rest into one archive next time."
        )
    try:
        with _looked_at(path, cwd or workspace) as found:
            return _inside(workspace, found) or _read(found, path, name, bounds)
    except (OSError, ValueError) as error:
        return HandoverRefused(f"{_shown(path)} cannot be handed over: {_reason(error)}.")


def as_artifact(file: OutgoingFile, number: int) -> Artifact:
    """Return the file as the artifact `file-<number>`, with one part of raw bytes."""
    part = Part(raw=file.data, media_type=file.media_type, filename=file.name)
    return Artifact(artifact_id=f"file-{number}", name=file.name, parts=[part])


def result(outcome: OutgoingFile | HandoverRefused) -> JsonObject:
    """Return the answer to `item/tool/call`; the model reads its text."""
    match outcome:
        case OutgoingFile(name=name, media_type=media_type, data=data):
            said, success = f"Handed over as {name} ({media_type}, {len(data)} bytes).", True
        case HandoverRefused(sentence):
            said, success = sentence, False
    return {"contentItems": [{"type": "inputText", "text": said}], "success": success}


@contextmanager
def _looked_at(path: str, base: Path) -> Iterator[int]:
    """Find a file without opening it: a pipe would block, and a device may do something."""
    found = os.open(base / path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield found
    finally:
        os.close(found)


def _inside(workspace: Path, found: int) -> HandoverRefused | None:
    real = Path(os.readlink(f"/proc/self/fd/{found}"))
    if real.is_relative_to(workspace.resolve()):
        return None
    return HandoverRefused(
        "Only files inside the workspace can be handed over; copy it there first, if that is right to do."
    )


def _read(found: int, path: str, name: str, bounds: HandoverLimits) -> OutgoingFile | HandoverRefused:
    about = os.fstat(found)
    if not stat.S_ISREG(about.st_mode):
        return HandoverRefused(f"{_shown(path)} is no file; put a folder into an archive and hand that over.")
    most = min(bounds.file_bytes, bounds.left_bytes)
    # One byte more than is allowed: the file may have grown since.
    opened = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        data = b"" if about.st_size > most else file.read(most + 1)
    if about.st_size > most or len(data) > most:
        size = max(about.st_size, len(data))
        if size > bounds.file_bytes:
            return HandoverRefused(f"{_shown(path)} has {size} bytes; a file may have {bounds.file_bytes}.")
        return HandoverRefused(f"{_shown(path)} has {size} bytes; {bounds.left_bytes} are left for this task.")
    shown = clean_name(name) or clean_name(path) or "file"
    return OutgoingFile(shown, guess_media_type(shown, data), data)


def _reason(error: OSError | ValueError) -> str:
    if not isinstance(error, OSError):
        return "this is no path"
    match error.errno:
        case errno.ENOENT:
            return "there is no such file"
        case errno.ELOOP:
            return "its links go round in circles"
        case _:
            return (error.strerror or "it cannot be read").lower()


def _shown(path: str) -> str:
    text = safe_text("".join(char for char in path if char.isprintable()))
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
