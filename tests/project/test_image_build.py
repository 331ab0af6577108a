"""Tests `make image` without an engine, and image.pip_settings. `make image-test` tests the image itself."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from image.engine import ROOT
from image.pip_settings import MARK, listed_pip_settings, read_pip_settings, write_build_secrets

LISTED = """\
:env:.default-timeout='180'
:env:.index-url='https://env.example/simple'
global.extra-index-url='\\nhttps://one.example/simple\\nhttps://two.example/simple'
global.index-url='https://global.example/simple'
install.trusted-host='one.example'
list.format='columns'
"""


def test_pip_settings_of_the_environment_override_files() -> None:
    assert read_pip_settings(LISTED) == {
        "default-timeout": "180",
        "index-url": "https://env.example/simple",
        "extra-index-url": "https://one.example/simple\n https://two.example/simple",
        "trusted-host": "one.example",
    }


def test_build_secrets_are_valid_pip_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("certificates")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    given = tmp_path / "given.conf"
    given.write_text(f"[global]\nextra-index-url = https://one.example\n  https://two.example\ncert = {bundle}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(given))
    monkeypatch.setenv("PIP_INDEX_URL", "https://env.example/simple")
    secrets = tmp_path / "secrets"
    write_build_secrets(secrets, {})
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert (secrets / "ca_bundle").read_text() == "certificates"
    assert (secrets / "pip.conf").read_text().startswith(MARK)
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(secrets / "pip.conf"))
    settings = read_pip_settings(listed_pip_settings())
    assert settings["index-url"] == "https://env.example/simple"
    assert settings["extra-index-url"].split() == ["https://one.example", "https://two.example"]


def test_make_image_without_an_engine_names_the_remedy(tmp_path: Path) -> None:
    for program in ("make", "sh"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    made = subprocess.run(["make", "image"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert made.returncode != 0
    assert "none of docker, podman and buildah works; on Debian, run `python3 -m image install` as root" in made.stderr


@pytest.mark.parametrize("engine", ["docker", "podman", "buildah"])
def test_make_image_builds_with_the_engine_that_works(tmp_path: Path, engine: str) -> None:
    program = tmp_path / engine
    program.write_text('#!/bin/sh\necho "$0" "$@"\n')
    program.chmod(0o755)
    for name in ("make", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    made = subprocess.run(
        ["make", "--silent", "image", "TAG=agent:1", "RUNTIME_VERSION=1.2.3", "OPTIONS=--no-cache"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    words = f"{program} build --tag agent:1 --build-arg RUNTIME_VERSION=1.2.3 --no-cache ."
    assert made.stdout.splitlines()[-1] == words, made.stderr
