"""On a platform with random faults, each message is answered once and in order; the short form."""

import random
import sys
from pathlib import Path

import pytest

from tests.chaos.platform import make_plan, run

pytestmark = pytest.mark.slow

MESSAGES = 30
DEATHS = 3


@pytest.mark.alone
async def test_every_platform_message_is_answered_once(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"make chaos-platform SEED={seed} MESSAGES={MESSAGES} DEATHS={DEATHS}\n")
    report = await run(make_plan(seed, MESSAGES, DEATHS), tmp_path)
    assert not report.wrong, str(report)
