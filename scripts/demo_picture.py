"""Runs the demo in a pseudo-terminal and writes its first turn to docs/demo.svg: `make demo-picture`."""

import io
import os
import pty
import re
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT: Final = Path(__file__).resolve().parent.parent
PICTURE: Final = ROOT / "docs" / "demo.svg"
COLUMNS: Final = 100
FIRST_TURN: Final = re.compile(r".*?^\[\S*completed[^\n]*\n", re.DOTALL | re.MULTILINE)
REMOTE_FONTS: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def run_demo() -> str:
    """Return what the demo writes to a terminal, with its escape sequences."""
    written = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 1 << 16)
        written.extend(data)
        return data

    os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS))
    status = pty.spawn([sys.executable, "-m", "codex_workspace", "demo"], read)
    if status != 0:
        raise SystemExit(f"the demo failed with wait status {status}")
    return written.decode().replace("\r\n", "\n")


def draw(output: str) -> str:
    """Return the output up to the end of the first turn as an SVG that loads nothing from the network."""
    first_turn = FIRST_TURN.match(output)
    if first_turn is None:
        raise SystemExit("the demo's output has no line that begins with [completed")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False)
    console.print(Text.from_ansi(f"$ make demo\n{first_turn[0]}"))
    return REMOTE_FONTS.sub("", console.export_svg(title="make demo", theme=MONOKAI, unique_id="demo"))


if __name__ == "__main__":
    PICTURE.write_text(draw(run_demo()))
