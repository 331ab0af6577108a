"""A codex that does one thing and ends: what it has said, and nothing left of it."""

import subprocess
import uuid

import anyio

from app_server import MARK, Launch, child_environment
from codex_workspace.errors import MAX_REASON_CHARS, CodexCannotStart
from codex_workspace.processes import sweep


async def run_once(launch: Launch, *arguments: str, within_s: float, late: str) -> "subprocess.CompletedProcess[bytes]":
    """Run codex with nothing to read, and return what it has said; whatever it has started ends with it.

    Args:
        launch: how to start it.
        arguments: what stands behind its name.
        within_s: how long it may take.
        late: the sentence where it takes longer.

    Raises:
        CodexCannotStart: it is not there, or takes longer.
    """
    mark = f"{launch.family}.{uuid.uuid4().hex}"
    try:
        with anyio.fail_after(within_s):
            return await anyio.run_process(
                [str(launch.binary), *arguments],
                stdin=subprocess.DEVNULL,
                cwd=launch.cwd,
                env=child_environment(launch, mark),
                check=False,
                start_new_session=True,
            )
    except TimeoutError as error:
        raise CodexCannotStart(late) from error
    except OSError as error:
        where = error.filename or launch.binary
        raise CodexCannotStart(f"codex cannot be started: {where}: {error.strerror}") from error
    finally:
        await sweep(MARK, mark)


def last_line(said: bytes) -> str:
    """Return the last line of what it has said, as warnings come first; "" where it has said nothing."""
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:MAX_REASON_CHARS]
