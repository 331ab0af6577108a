"""The folders of the checkout and of its test data."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
RECORDINGS: Final = ROOT / "tests" / "recordings"
