"""Files of the workspace: those that come with a message, and those that the model hands over to its sender.

Codex writes the workspace too, so no name in it is trusted. The files of a message are written to
`<workspace>/.a2a/<task id>/`, readable by this user only and hidden from git; each folder is opened relative to the one
above it and never through a link. A file to hand over is opened once, and only that descriptor is checked and read.

Codex stores the tool of `tool_spec` in the thread: a resumed thread offers it, and a thread that was started without it
never does (0.163).

All functions that take a workspace block; call them in a thread.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from a2a.types import Part

from codex_workspace.common.errors import AgentError
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.jsonrpc import safe_text
from codex_workspace.runtimes.backend import HANDOVER_TOOL
from codex_workspace.tasks.parts import Attachment, clean_name, guess_media_type

FOLDER: Final = ".a2a"
"""The folder of all tasks' files, at the top of the workspace."""

MAX_SHOWN_CHARS: Final = 200
"""At most this much of a path is quoted in an error."""

DESCRIPTION: Final = (
    "Sends a file from the workspace to the sender of the message, who cannot see the workspace. Use it for every "
    "file that the sender asks for; its current content is sent."
)
PATH: Final = "The file, inside the workspace."
NAME: Final = "The file name for the recipient; by default the file's own name."


class AttachmentsNotWritten(AgentError):
    """The files of a message cannot be written to the workspace."""


class HandoverRefused(Exception):
    """A file cannot be handed over; the message is a sentence for the model."""


# --- Files that come with a message ---


def write(workspace: Path, task_id: str, attachments: Sequence[Attachment], cwd: Path | None = None) -> str:
    """Write the files of a task, replacing earlier ones; return the note for codex that lists their paths from `cwd`.

    Raises:
        AttachmentsNotWritten: the disk is full, or something else is in the place of the folders.
    """
    name = _folder_name(task_id)
    try:
        with _folder(workspace) as top, _folder(FOLDER, top) as tasks, _folder(name, tasks) as folder:
            with suppress(FileExistsError):
                _create(tasks, ".gitignore", b"*\n")
            for each in attachments:
                _put(folder, each.name, each.data)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            reason = "a file with that name is not a folder"
        raise AttachmentsNotWritten(
            f"The files of the message could not be written to {FOLDER} in the workspace: {reason}."
        ) from error
    return _note(attachments, Path(os.path.relpath(workspace / FOLDER / name, cwd or workspace)))


def _note(attachments: Sequence[Attachment], folder: Path) -> str:
    lines = [f"- {folder / each.name} ({each.media_type}, {len(each.data)} bytes)" for each in attachments]
    return "\n".join(["These files came with the message:", *lines])


def prune(workspace: Path, before: float, keep: Collection[str] = ()) -> None:
    """Remove the folders that were last written before the time `before`, except those of the tasks `keep`.

    Raises:
        OSError: a folder cannot be read or removed.
    """
    kept = {_folder_name(task_id) for task_id in keep}
    if (workspace / FOLDER).is_symlink() or not (workspace / FOLDER).is_dir():
        return
    with _folder(workspace) as top, _folder(FOLDER, top) as tasks:
        for name in os.listdir(tasks):
            found = os.stat(name, dir_fd=tasks, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) and found.st_mtime < before and name not in kept:
                shutil.rmtree(name, dir_fd=tasks)


def _folder_name(task_id: str) -> str:
    """Return a folder name for a task: its id if that is a valid name, else one derived from it."""
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", task_id):
        return task_id
    return hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def _folder(path: Path | str, parent: int | None = None) -> Iterator[int]:
    """Open a folder; one in an open folder `parent` is created if it is missing, and must not be a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if parent is not None:
        flags |= os.O_NOFOLLOW
        with suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=parent)
    opened = os.open(path, flags, dir_fd=parent)
    try:
        yield opened
    finally:
        os.close(opened)


def _put(folder: int, name: str, data: bytes) -> None:
    """Write a file; a file or link of that name is removed first."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    _create(folder, name, data)


def _create(folder: int, name: str, data: bytes) -> None:
    """Write a new file; it is removed if it cannot be written completely."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(opened, "wb") as file:
            file.write(data)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        raise


# --- Files that the model hands over ---


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


def take(arguments: JsonValue, workspace: Path, max_bytes: int, left_bytes: int, cwd: Path | None = None) -> Part:
    """Return a file of the workspace as raw bytes with its name; a relative path starts at `cwd`.

    `max_bytes` is the limit of a file, and `left_bytes` what is left of the task's limit.

    Raises:
        HandoverRefused: the arguments are invalid, the file is outside of the workspace, or a limit is exceeded.
    """
    match arguments:
        case {"path": str(path), **rest} if isinstance(name := rest.get("name") or "", str):
            pass
        case _:
            raise HandoverRefused('The arguments must be {"path": "…"}, with an optional string "name".')
    try:
        with _found((cwd or workspace) / path) as found:
            data = _read(found, _shown(path), workspace, max_bytes, left_bytes)
    except (OSError, ValueError) as error:
        raise HandoverRefused(f"{_shown(path)} cannot be sent: {_reason(error)}.") from error
    shown = clean_name(name) or clean_name(path) or "file"
    return Part(raw=data, media_type=guess_media_type(shown, data), filename=shown)


@contextmanager
def _found(path: Path) -> Iterator[int]:
    """Find a file without opening it, which would block for a pipe and may start something for a device."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield found
    finally:
        os.close(found)


def tool_result(text: str, *, success: bool) -> JsonObject:
    """Return the answer to `item/tool/call`; the model reads its text."""
    return {"contentItems": [{"type": "inputText", "text": text}], "success": success}


def _read(found: int, shown: str, workspace: Path, max_bytes: int, left_bytes: int) -> bytes:
    link = f"/proc/self/fd/{found}"
    if not Path(os.readlink(link)).is_relative_to(workspace.resolve()):
        raise HandoverRefused("Only files inside the workspace can be sent; if appropriate, copy the file there first.")
    about = os.fstat(found)
    if not stat.S_ISREG(about.st_mode):
        raise HandoverRefused(f"{shown} is not a file; to send a folder, put it into an archive.")
    most = min(max_bytes, left_bytes)
    with os.fdopen(os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        # One byte more than is allowed: the file may have grown since.
        data = b"" if about.st_size > most else file.read(most + 1)
    size = max(about.st_size, len(data))
    if size > max_bytes:
        raise HandoverRefused(f"{shown} has {size} bytes; a file may have at most {max_bytes}.")
    if size > left_bytes:
        raise HandoverRefused(f"{shown} has {size} bytes; {left_bytes} are left for this task.")
    return data


def _reason(error: OSError | ValueError) -> str:
    match error:
        case FileNotFoundError():
            return "there is no such file"
        case OSError(errno=errno.ELOOP):
            return "its symbolic links form a loop"
        case OSError():
            return (error.strerror or "it cannot be read").lower()
        case _:
            return "the path is invalid"


def _shown(path: str) -> str:
    text = safe_text("".join(char for char in path if char.isprintable()))
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
