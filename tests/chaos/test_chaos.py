"""Every message is answered exactly once, whatever is killed meanwhile, and no process is left over.

The short form; `make chaos` runs the long one. The plan of a run is generated from its seed, which a failure prints:
`make chaos SEED=…` runs the same plan again. Its strikes happen at the same number of answers, but the exact moment
depends on the machine, so it can take several runs to reproduce a fault.
"""

import random
import sys
from pathlib import Path

import pytest

from tests.chaos.plan import make_plan
from tests.chaos.run import run

MESSAGES = 30
STRIKES = 9


@pytest.mark.slow
@pytest.mark.alone
async def test_every_message_is_answered_once(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"make chaos SEED={seed} MESSAGES={MESSAGES} STRIKES={STRIKES}\n")
    report = await run(make_plan(seed, MESSAGES, STRIKES), tmp_path)
    assert not report.wrong, str(report)


@pytest.mark.postgresql
async def test_every_message_is_answered_once_with_postgresql(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"make chaos SEED={seed} MESSAGES={MESSAGES} STRIKES={STRIKES} DATABASE=postgresql\n")
    report = await run(make_plan(seed, MESSAGES, STRIKES, postgresql=True), tmp_path)
    assert not report.wrong, str(report)
