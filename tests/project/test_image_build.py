"""Tests `make image` without an engine, and image.pip_settings. `make image-test` tests the image itself."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import codex_workspace
from image import without_ids
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


ENGINE: Final = """\
#!/bin/sh
echo "${0##*/} $*" >> "$CALLS"
case $1 in
    create | from) echo container ;;
    push) cp "$PUSHED"/* "${4#dir:}" ;;
    pull) echo id ;;
    cp) echo contents > "$3" ;;
    run) echo contents ;;
esac
"""
"""An engine that does nothing but write down its calls."""


def pushed(folder: Path, container: str) -> Path:
    """Return a folder with an image that was built in a container, in the form of `podman push IMAGE dir:FOLDER`."""
    folder.mkdir()
    changes = {"container": container, "container_config": {"Hostname": container}, "parent": f"sha256:{container}"}
    history = [{"created_by": "/bin/sh", "comment": f"FROM {container}"}]
    config = {"config": {"Hostname": container, "User": ""}, "history": history, "os": "linux", **changes}
    (folder / "old").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps({"config": {"digest": "sha256:old", "size": 1}, "layers": []}))
    return folder


def test_images_of_two_builds_are_equal_without_the_identifiers_of_the_builds(tmp_path: Path) -> None:
    folders = [pushed(tmp_path / name, name) for name in ("one", "two")]
    for folder in folders:
        without_ids.main(folder)
    first, second = (json.loads((folder / "manifest.json").read_text()) for folder in folders)
    assert first == second
    text = (folders[0] / str(first["config"]["digest"]).removeprefix("sha256:")).read_text()
    assert len(text) == first["config"]["size"]
    assert json.loads(text) == {"config": {"User": ""}, "history": [{"created_by": "/bin/sh"}], "os": "linux"}


REPLACED: Final = ["push --quiet agent:1 dir:build/image.X", "pull --quiet dir:build/image.X", "tag id agent:1"]
COPIED: Final = ["create agent:1", "cp container:/app/sbom.cdx.json {sbom}"]


@pytest.mark.parametrize(
    ("engine", "time", "calls_after"),
    [
        ("docker", "", COPIED),
        ("podman", "--timestamp 86400 ", REPLACED + COPIED),
        (
            "buildah",
            "--timestamp 86400 ",
            [*REPLACED, "from --pull-never agent:1", "run container cat /app/sbom.cdx.json"],
        ),
    ],
)
def test_make_image_builds_with_the_engine_that_works(
    tmp_path: Path, engine: str, time: str, calls_after: list[str]
) -> None:
    program, calls, sbom = tmp_path / engine, tmp_path / "calls", tmp_path / "new" / "sbom.json"
    program.write_text(ENGINE)
    program.chmod(0o755)
    for name in ("make", "sh", "git", "sed", "date", "dirname", "mkdir", "mktemp", "rm", "cp"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    words = ["TAG=agent:1", f"PYTHON={sys.executable}", f"SBOM={sbom}", "RUNTIME_VERSION=1.2.3", "OPTIONS=--no-cache"]
    environment = {"PATH": str(tmp_path), "CALLS": str(calls), "SOURCE_DATE_EPOCH": "86400"}
    environment["PUSHED"] = str(pushed(tmp_path / "pushed", "one"))
    made = subprocess.run(
        ["make", "--silent", "image", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert sbom.read_text() == "contents\n"
    labels = re.compile(r"--label org\.opencontainers\.image\.(\w+)=(\S+) ")
    made_calls = re.sub(r"dir:build/image\.\w+", "dir:build/image.X", calls.read_text()).splitlines()
    build, *others = [call.removeprefix(f"{engine} ") for call in made_calls if " info" not in call]
    assert labels.sub("", build) == f"build --tag agent:1 {time}--build-arg RUNTIME_VERSION=1.2.3 --no-cache ."
    assert others == [*(call.format(sbom=sbom) for call in calls_after), "rm container"]
    stated = dict(labels.findall(build))
    assert (stated["version"], stated["created"]) == (codex_workspace.__version__, "1970-01-02T00:00:00Z")
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", stated.get("revision", "0" * 40))


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_apt_waits_while_another_program_holds_the_lock_of_its_lists(tmp_path: Path) -> None:
    (tmp_path / "lists" / "partial").mkdir(parents=True)
    empty = ["Dir::Etc::SourceList=/dev/null", "Dir::Etc::SourceParts=/dev/null", f"Dir::State={tmp_path}"]
    options = [word for each in empty for word in ("-o", each)]
    with (tmp_path / "lists" / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        command = [str(ROOT / "image" / "apt-get"), *options, "-qq", "update"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stderr is not None
            said = waiting.stderr.readline()
            assert said.startswith("apt-get: waiting for another program: E: Could not get lock"), said
            fcntl.lockf(lock, fcntl.LOCK_UN)
            assert waiting.stderr.read() == ""
    assert waiting.returncode == 0


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_another_error_of_apt_is_passed_on_at_once() -> None:
    ran = subprocess.run([ROOT / "image" / "apt-get", "-qq", "no-such-command"], capture_output=True, text=True)
    assert ran.returncode == 100
    assert ran.stderr.startswith("E: Invalid operation no-such-command")
