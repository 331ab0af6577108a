"""Files that are replaced in one step: whoever reads one finds the old or the new, and after a crash too."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(file: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file, or make it; it is durable on return.

    Raises:
        OSError: it cannot be written; what was there before is there still.
    """
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
