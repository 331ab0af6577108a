"""Nothing is lost: whatever is struck down in between, every message is answered once, and nothing is left over.

The short form; `make chaos` runs the long one. A run's plan is made of its seed, which a failure names: `make chaos
SEED=…` carries out the same plan again. Its strikes then meet the same messages at the same counts of answers; at which
instruction they meet a real process is the machine's business, so a fault may take several runs to show again.
"""

import random
import sys
from pathlib import Path

import pytest

from tests.chaos.plan import make_plan
from tests.chaos.run import run

pytestmark = pytest.mark.slow

MESSAGES = 30
STRIKES = 8


@pytest.mark.alone
async def test_every_message_is_answered_once(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"make chaos SEED={seed} MESSAGES={MESSAGES} STRIKES={STRIKES}\n")
    report = await run(make_plan(seed, MESSAGES, STRIKES), tmp_path)
    assert not report.wrong, str(report)
