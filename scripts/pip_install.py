"""Installs pinned requirements into a virtual environment and shows one line of progress instead of pip's output.

    python scripts/pip_install.py .venv/bin/python requirements.txt

On a terminal the line is updated in place; elsewhere it is printed after every 20 packages. Errors of pip are shown.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

STEP = re.compile(r"\s*(?:Downloading|Using cached) (?P<name>\S+)-\d\S* \((?P<size>[^)]+)\)|Requirement already")


def install(python: str, file: str) -> int:
    """Install the requirements in `file` and return pip's exit code."""
    total = sum(1 for line in Path(file).read_text().splitlines() if line[:1].isalnum())
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar", "off"]
    command += ["--require-hashes", "-r", file]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as pip:
        assert pip.stdout is not None
        count = 0
        for line in pip.stdout:
            if found := STEP.match(line):
                count += 1
                show(f"  {count} of {total} packages", f"{found['name'] or ''} {found['size'] or ''}", count)
            elif line.startswith("Installing collected"):
                show(f"  {total} of {total} packages", "unpacking", 0)
    if sys.stdout.isatty():
        print()
    return pip.returncode


def show(text: str, detail: str, count: int) -> None:
    """Update the line of progress, or print it now and then if the output is not a terminal."""
    if sys.stdout.isatty():
        print(f"\r{text}: {detail}".ljust(78)[:78], end="", flush=True)
    elif count % 20 == 0:
        print(text + (": unpacking" if count == 0 else ""), flush=True)


if __name__ == "__main__":
    sys.exit(install(sys.argv[1], sys.argv[2]))
