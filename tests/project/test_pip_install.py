"""`scripts/pip_install.py` shows progress, and pip's failures end it."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PIP: Final = """\
#!/bin/sh
[ "$*" = "-m pip --disable-pip-version-check --no-input install $OPTIONS -r $FILE" ] || exit 9
for number in $(seq 1 41); do
    echo "Collecting package$number==1.0"
    echo "  Downloading package${number}-1.0-py3-none-any.whl (12 kB)"
done
echo "Installing collected packages: package1"
[ -n "$FAILS" ] || exit 0
echo "ERROR: no space left" >&2
exit 1
"""


@pytest.mark.parametrize(("fails", "code", "error"), [("", 0, ""), ("yes", 1, "ERROR: no space left\n")])
def test_a_line_is_printed_after_every_20_packages(tmp_path: Path, fails: str, code: int, error: str) -> None:
    requirements, pip = tmp_path / "requirements.txt", tmp_path / "python"
    pins = (f"package{number}==1.0 \\\n    --hash=sha256:0\n    # via x\n" for number in range(1, 42))
    requirements.write_text("# pinned\n" + "".join(pins))
    pip.write_text(PIP)
    pip.chmod(0o700)
    command = [sys.executable, str(ROOT / "scripts" / "pip_install.py"), str(pip), str(requirements)]
    environment = {"PATH": "/usr/bin:/bin", "FILE": str(requirements), "FAILS": fails}
    environment["OPTIONS"] = "--progress-bar off --require-hashes"
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (ran.returncode, ran.stderr) == (code, error)
    assert ran.stdout == "  20 of 41 packages\n  40 of 41 packages\n  41 of 41 packages: unpacking\n"
