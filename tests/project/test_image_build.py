"""What `make image` does before an engine is at work; the image itself is tested by `make image-test`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from image.__main__ import MARK, pip_secrets, pip_settings
from image.engine import ROOT

LISTED = """\
:env:.default-timeout='180'
:env:.index-url='https://env.example/simple'
global.extra-index-url='\\nhttps://one.example/simple\\nhttps://two.example/simple'
global.index-url='https://global.example/simple'
install.trusted-host='one.example'
list.format='columns'
"""


def test_pips_settings_are_read_as_pip_tells_them_the_environments_win() -> None:
    assert pip_settings(LISTED) == {
        "default-timeout": "180",
        "index-url": "https://env.example/simple",
        "extra-index-url": "https://one.example/simple\n https://two.example/simple",
        "trusted-host": "one.example",
    }


def test_pip_understands_what_a_build_is_handed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("certificates")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    theirs = tmp_path / "theirs.conf"
    theirs.write_text(f"[global]\nextra-index-url = https://one.example\n  https://two.example\ncert = {bundle}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(theirs))
    monkeypatch.setenv("PIP_INDEX_URL", "https://env.example/simple")
    with pip_secrets({}) as secrets:
        assert secrets["ca_bundle"] == bundle
        assert secrets["pip_conf"].read_text().startswith(MARK)
        monkeypatch.delenv("PIP_INDEX_URL")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(secrets["pip_conf"]))
        asked = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    told = pip_settings(asked.stdout)
    assert told["index-url"] == "https://env.example/simple"
    assert told["extra-index-url"].split() == ["https://one.example", "https://two.example"]


def test_without_an_engine_it_says_what_to_install(tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "image", "build"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert asked.returncode == 1
    assert asked.stderr.strip() == (
        "none of docker, podman and buildah works here; "
        "as root on Debian `python3 -m image install` installs what is needed"
    )
