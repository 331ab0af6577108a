"""A config.toml that settings are lent to: its own bytes come back, whoever is killed when."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from codex_workspace.common.errors import ConfigError
from codex_workspace.config.codex_toml import Managed
from codex_workspace.config.shared_config import borrow, give_back, lent, recover
from tests.e2e.agent_process import REPOSITORY

ORIGINAL = b'# mine\r\nmodel = "own"  # kept\r\n[mcp_servers.docs]\r\ncommand = "docs"'
OURS: Managed = {
    ("model",): "lent",
    ("mcp_servers", "probe", "command"): "probe",
    ("mcp_servers", "probe", "args"): ["x"],
}
OTHERS: Managed = {("mcp_servers", "other", "command"): "other"}

KILLED = """
import json, os, signal, sys
from pathlib import Path
from codex_workspace.config.shared_config import lent
import codex_workspace.config.codex_toml

file, root = Path(sys.argv[1]), sys.argv[2]
settings = {("model",): "lent", ("mcp_servers", "probe", "command"): "probe"}
count, step = 0, int(sys.argv[3])
STEPS = {"open", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "fcntl.flock", "shutil.rmtree", "os.chmod"}

def audit(name, arguments):
    global count
    if name not in STEPS or not (name == "fcntl.flock" or any(root in str(each) for each in arguments)):
        return
    count += 1
    if count == step:
        os.kill(os.getpid(), signal.SIGKILL)

for step in range(step, step + 1000):
    count = 0
    child = os.fork()
    if child == 0:
        sys.addaudithook(audit)
        with lent(file, settings):
            pass
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(json.dumps([step, os.waitstatus_to_exitcode(status)]), flush=True)
    sys.stdin.readline()
"""


def values(file: Path) -> dict[str, object]:
    return tomllib.loads(file.read_text())


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "home" / "config.toml"
    file.parent.mkdir()
    file.write_bytes(ORIGINAL)
    file.chmod(0o640)
    return file


def test_settings_are_there_for_a_while(file: Path) -> None:
    with lent(file, OURS):
        assert values(file) == {
            "model": "lent",
            "mcp_servers": {"docs": {"command": "docs"}, "probe": {"command": "probe", "args": ["x"]}},
        }
        assert b"# kept" in file.read_bytes()
    assert file.read_bytes() == ORIGINAL
    assert file.stat().st_mode & 0o777 == 0o640
    assert names(file.parent) == ["config.toml"]


def test_what_is_lent_says_that_it_is(file: Path) -> None:
    before = file.read_bytes()
    with lent(file, {("approval_policy",): "never", ("odd", "key"): "y"}):
        assert file.read_text().count("# Set while a run of codex-workspace lasts") == 2
        assert "at every start" not in file.read_text()
    assert file.read_bytes() == before


def test_an_exception_gives_it_back_too(file: Path) -> None:
    with pytest.raises(ZeroDivisionError), lent(file, OURS):
        raise ZeroDivisionError
    assert file.read_bytes() == ORIGINAL


@pytest.mark.parametrize("folders", [(), ("home",), ("a", "b", "home")])
def test_what_was_not_there_is_gone_again(tmp_path: Path, folders: Sequence[str]) -> None:
    file = tmp_path.joinpath(*folders) / "config.toml"
    with lent(file, OURS):
        assert values(file)["model"] == "lent"
        assert file.stat().st_mode & 0o077 == 0
        assert not folders or file.parent.stat().st_mode & 0o077 == 0
    assert names(tmp_path) == []


def test_a_folder_that_others_have_used_stays(tmp_path: Path) -> None:
    file = tmp_path / "a" / "home" / "config.toml"
    with lent(file, OURS):
        (file.parent / "history").touch()
    assert names(tmp_path / "a" / "home") == ["history"]
    assert names(tmp_path) == ["a"]


def test_a_link_stays_one(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    with lent(link, OURS):
        assert link.is_symlink()
        assert values(file)["model"] == "lent"
    assert file.read_bytes() == ORIGINAL


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_borrowers_do_not_undo_each_other(file: Path, first_out: int) -> None:
    leases = [borrow(file, OURS), borrow(file, OTHERS)]
    assert {"probe", "other", "docs"} == set(json.loads(json.dumps(values(file)["mcp_servers"])))
    give_back(leases.pop(first_out))
    left = "probe" if first_out else "other"
    assert {left, "docs"} == set(json.loads(json.dumps(values(file)["mcp_servers"])))
    give_back(leases.pop())
    assert file.read_bytes() == ORIGINAL
    assert names(file.parent) == ["config.toml"]


def test_the_same_settings_can_be_lent_twice(file: Path) -> None:
    with lent(file, OURS):
        with lent(file, OURS):
            pass
        assert values(file)["model"] == "lent"
    assert file.read_bytes() == ORIGINAL


@pytest.mark.parametrize("other", [{("model",): "another"}, {("mcp_servers", "probe", "args", "x"): 1}])
def test_contradicting_settings_are_refused_and_nothing_is_lost(file: Path, other: Managed) -> None:
    with lent(file, OURS):
        before = file.read_bytes()
        with pytest.raises(ConfigError, match="another value for a run that is not over"):
            borrow(file, other)
        assert file.read_bytes() == before
    assert file.read_bytes() == ORIGINAL
    assert names(file.parent) == ["config.toml"]


def test_what_others_write_meanwhile_stays(file: Path) -> None:
    with lent(file, OURS):
        file.write_bytes(file.read_bytes() + b'\n[projects."/x"]\r\ntrust_level = "trusted"\r\n')
        with lent(file, OTHERS):
            pass
    assert file.read_bytes().startswith(ORIGINAL)
    assert values(file) == {**tomllib.loads(ORIGINAL.decode()), "projects": {"/x": {"trust_level": "trusted"}}}
    assert names(file.parent) == ["config.toml"]


def test_what_others_write_into_a_file_of_ours_stays(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    with lent(file, OURS):
        file.write_text(file.read_text() + "[x]\ny = 1\n")
    assert values(file) == {"x": {"y": 1}}


@pytest.mark.parametrize("broken", [b"model = [", b"\xff"])
def test_a_broken_file_is_left_as_it_is(file: Path, broken: bytes) -> None:
    file.write_bytes(broken)
    with pytest.raises(ConfigError, match="the file is left as it is"):
        borrow(file, OURS)
    assert file.read_bytes() == broken
    assert names(file.parent) == ["config.toml"]


def test_without_anything_lent_there_is_nothing_to_recover(file: Path, tmp_path: Path) -> None:
    recover(file)
    recover(tmp_path / "none" / "config.toml")
    assert file.read_bytes() == ORIGINAL
    assert names(tmp_path) == ["home"]


def test_a_folder_whose_name_only_looks_like_ours_is_left_alone(file: Path, tmp_path: Path) -> None:
    notes = tmp_path / ".home.lent-notes"
    notes.mkdir()
    with lent(file, OURS):
        pass
    recover(file)
    assert notes.is_dir()


def killed_at_every_step(file: Path, root: Path, restart: Callable[[int], None]) -> None:
    """Let processes borrow from `file`, each killed one step later than the one before, until one comes to its end.

    Args:
        restart: called after each death.
    """
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(file), str(root), "1"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        step = 0
        for line in process.stdout:
            step, code = json.loads(line)
            if code == 0:
                break
            assert code == -signal.SIGKILL
            restart(step)
            process.stdin.write("\n")
            process.stdin.flush()
        process.kill()
    assert step > 20


@pytest.mark.parametrize("original", [ORIGINAL, None, "folder"])
def test_the_original_survives_sigkill_at_every_step(tmp_path: Path, original: bytes | str | None) -> None:
    file = tmp_path / "[a]" / "home?" / "config.toml"

    def check() -> None:
        if original == "folder":
            assert names(tmp_path) == []
        else:
            assert names(file.parent) == (["config.toml"] if isinstance(original, bytes) else [])
            assert not isinstance(original, bytes) or file.read_bytes() == original

    if original != "folder":
        file.parent.mkdir(parents=True)
    if isinstance(original, bytes):
        file.write_bytes(original)

    def restart(step: int) -> None:
        # The next start: by itself, and in the shape of another borrower.
        if step % 2:
            recover(file)
        else:
            with lent(file, OTHERS):
                assert "probe" not in file.read_text()
        check()

    killed_at_every_step(file, tmp_path, restart)
    check()


def test_a_borrower_survives_sigkill_of_another_at_every_step(file: Path, tmp_path: Path) -> None:
    with lent(file, OTHERS):
        expected = file.read_bytes()

        def restart(_step: int) -> None:
            recover(file)
            assert file.read_bytes() == expected

        killed_at_every_step(file, tmp_path, restart)
        assert file.read_bytes() == expected
    assert file.read_bytes() == ORIGINAL
    assert names(file.parent) == ["config.toml"]


WAITS = """
import sys
from pathlib import Path
from codex_workspace.config.shared_config import lent

listed = []
sys.addaudithook(lambda name, arguments: name == "os.scandir" and listed.append(str(arguments[0])))
print("ready", flush=True)
with lent(Path(sys.argv[1]), {("model",): "lent"}):
    print(listed.count(sys.argv[2]), flush=True)
"""


def test_whoever_waits_does_not_list_the_folders_again_and_again(file: Path, tmp_path: Path) -> None:
    with lent(file, OTHERS):
        lock = os.open(file.parent / ".config.toml.lent" / "lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, "-c", WAITS, str(file), str(tmp_path)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            # A hundred looks at the lock.
            time.sleep(0.5)
            os.close(lock)
            assert 1 <= int(process.stdout.readline()) <= 3
    assert file.read_bytes() == ORIGINAL


def test_a_folder_that_another_process_makes_meanwhile_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, real = tmp_path / "home", Path.is_dir

    def made_behind_the_look(path: Path) -> bool:
        was = real(path)
        if path == home and not was:
            home.mkdir()
        return was

    monkeypatch.setattr(Path, "is_dir", made_behind_the_look)
    with lent(home / "config.toml", {("model",): "m"}):
        assert tomllib.loads((home / "config.toml").read_text()) == {"model": "m"}
    assert names(tmp_path) == ["home"]


BORROWS = """
import sys
from pathlib import Path
from codex_workspace.config.shared_config import lent

for turn in range(6):
    with lent(Path(sys.argv[1]), {("mcp_servers", sys.argv[2], "command"): sys.argv[2]}):
        assert f"[mcp_servers.{sys.argv[2]}]" in Path(sys.argv[1]).read_text()
"""


@pytest.mark.parametrize("original", [ORIGINAL, None])
def test_two_processes_at_once_leave_the_original(tmp_path: Path, original: bytes | None) -> None:
    file = tmp_path / "home" / "config.toml"
    if original is not None:
        file.parent.mkdir()
        file.write_bytes(original)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    processes = [
        subprocess.Popen([sys.executable, "-c", BORROWS, str(file), name], cwd=REPOSITORY, env=environment)
        for name in ("one", "two", "three")
    ]
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    if original is None:
        assert names(tmp_path) == []
    else:
        assert file.read_bytes() == original
        assert names(file.parent) == ["config.toml"]
