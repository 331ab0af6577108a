"""Writes the files of a message to the workspace, where codex can read them.

They stand in `<workspace>/.a2a/<task id>/`, for this user's eyes only, and git does not see them. The workspace is
written by codex too, so no name in it is trusted: every folder is opened by the one above it and never through a link.

All of this waits for the disk; call it in a thread.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from codex_workspace.common.errors import AgentError

FOLDER: Final = ".a2a"
"""The folder of all tasks' files, at the top of the workspace."""

_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class AttachmentsNotWritten(AgentError):
    """The files of a message cannot be written to the workspace."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of a message. `name` is one component of a path, unique in its message."""

    name: str
    media_type: str
    data: bytes


def write(workspace: Path, task_id: str, attachments: Sequence[Attachment], cwd: Path | None = None) -> str:
    """Write the files and return the note for codex that lists them; "" if there are none.

    Writing the same task's files again replaces them.

    Args:
        workspace: the folder that `FOLDER` is made in.
        task_id: whose files they are.
        attachments: the files.
        cwd: where codex's commands run, for the paths that it is told; the workspace where None.

    Raises:
        AttachmentsNotWritten: the disk is full, or something else stands where the folders belong.
    """
    if not attachments:
        return ""
    name = _folder_name(task_id)
    try:
        with _folder(workspace) as top, _below(top, FOLDER) as all_tasks:
            _hide_from_git(all_tasks)
            with _below(all_tasks, name) as folder:
                for attachment in attachments:
                    _put(folder, attachment)
    except OSError as error:
        raise AttachmentsNotWritten(_why_not(error)) from error
    seen_from = Path(os.path.relpath(workspace / FOLDER / name, cwd or workspace))
    lines = [f"- {seen_from / each.name} ({each.media_type}, {len(each.data)} bytes)" for each in attachments]
    return "\n".join(["These files came with the message:", *lines])


def prune(workspace: Path, before: float, keep: Collection[str] = ()) -> int:
    """Remove the folders of tasks that were last written before `before`; return their number.

    Args:
        workspace: the folder that `FOLDER` is in.
        before: seconds since the epoch.
        keep: ids of tasks whose files stay, whatever their age.

    Raises:
        OSError: a folder cannot be read or removed.
    """
    kept = {_folder_name(task_id) for task_id in keep}
    removed = 0
    with _folder(workspace) as top:
        try:
            all_tasks = os.open(FOLDER, _OPEN_FOLDER, dir_fd=top)
        except OSError as error:
            # Nothing was ever laid down, or what stands there is not ours.
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                return 0
            raise
        try:
            for name in os.listdir(all_tasks):
                found = os.stat(name, dir_fd=all_tasks, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode) and found.st_mtime < before and name not in kept:
                    shutil.rmtree(name, dir_fd=all_tasks)
                    removed += 1
        finally:
            os.close(all_tasks)
    return removed


def _folder_name(task_id: str) -> str:
    """Return a folder name for a task: its id if that is a valid name, else one derived from it."""
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", task_id):
        return task_id
    return hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    """Open the workspace, which may be a symbolic link."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


@contextmanager
def _below(parent: int, name: str) -> Iterator[int]:
    """Open the folder `name` in an open folder; create it if it is missing."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    opened = os.open(name, _OPEN_FOLDER, dir_fd=parent)
    try:
        yield opened
    finally:
        os.close(opened)


def _hide_from_git(folder: int) -> None:
    with suppress(FileExistsError), os.fdopen(os.open(".gitignore", _NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
        file.write(b"*\n")


def _put(folder: int, attachment: Attachment) -> None:
    """Write a temporary file and rename it, so that the file appears complete; replaces a link of that name."""
    beside = f".{uuid.uuid4().hex}"
    try:
        with os.fdopen(os.open(beside, _NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
            file.write(attachment.data)
        os.rename(beside, attachment.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=folder)
        raise


def _why_not(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        reason = "something that is no folder stands in its place"
    return f"The files of the message could not be laid down in {FOLDER} of the workspace: {reason}."
