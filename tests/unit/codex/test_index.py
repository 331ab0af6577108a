"""Codex's index is renamed only if it names files elsewhere that are here; `tests/e2e/test_move.py` has a real one."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from codex_workspace.codex.index import rename_moved_index
from codex_workspace.common.errors import ConfigError

ROLLOUT = Path("sessions/2026/01/31/rollout-2026-01-31T10-00-00-0.jsonl")


def make_index(home: Path, *rollouts: Path, table: str = "threads") -> Path:
    """Create an index that names these files, with side files that a killed codex leaves; return it."""
    index = home / "state_5.sqlite"
    with closing(sqlite3.connect(index)) as connection, connection:
        connection.execute(f"create table {table} (id text primary key, rollout_path text not null)")
        rows = [(str(number), str(rollout)) for number, rollout in enumerate(rollouts)]
        connection.executemany(f"insert into {table} values (?, ?)", rows)
    return index


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A CODEX_HOME with one thread."""
    home = tmp_path / "home"
    (home / ROLLOUT).parent.mkdir(parents=True)
    (home / ROLLOUT).write_text("{}\n")
    return home


def renamed(home: Path) -> list[str]:
    return sorted(file.name for file in home.iterdir() if ".moved-2" in file.name)


@pytest.mark.parametrize("original_exists", [False, True])
def test_an_index_of_another_folder_is_renamed_with_its_side_files(
    home: Path, tmp_path: Path, *, original_exists: bool
) -> None:
    elsewhere = tmp_path / "elsewhere" / ROLLOUT
    if original_exists:
        elsewhere.parent.mkdir(parents=True)
        elsewhere.touch()
    index = make_index(home, home / ROLLOUT, elsewhere)
    content = index.read_bytes()
    for suffix in ("-wal", "-shm"):
        index.with_name(index.name + suffix).touch()
    assert rename_moved_index(home)
    names = renamed(home)
    assert [name.partition("Z")[2] for name in names] == ["", "-shm", "-wal"]
    assert (home / names[0]).read_bytes() == content
    assert not list(home.glob("state_5.sqlite*[!Zlm]"))
    assert not rename_moved_index(home)


def test_all_threads_are_looked_at(home: Path, tmp_path: Path) -> None:
    """Also those behind many that are nowhere, and archived ones."""
    archived = Path("archived_sessions", ROLLOUT.name)
    nowhere = [tmp_path / "gone" / ROLLOUT.with_name(f"{number}.jsonl") for number in range(2000)]
    for thread in (ROLLOUT, archived):
        (home / thread).parent.mkdir(exist_ok=True)
        (home / thread).touch()
        index = make_index(home, *nowhere, tmp_path / "sessions" / "elsewhere" / thread)
        assert rename_moved_index(home)
        assert not index.exists()


def test_an_index_in_use_stays(home: Path, tmp_path: Path) -> None:
    """Its reader is idle, as a codex that waits for a person is."""
    index = make_index(home, tmp_path / "elsewhere" / ROLLOUT)
    with closing(sqlite3.connect(index, isolation_level=None)) as reader:
        reader.execute("pragma journal_mode=wal")
        assert reader.execute("select count(*) from threads").fetchall() == [(1,)]
        with pytest.raises(ConfigError, match="which was moved, and another codex uses this index; stop that codex"):
            rename_moved_index(home)
        assert (renamed(home), index.exists()) == ([], True)
        reader.execute("insert into threads values ('new', '/nowhere')")
    assert rename_moved_index(home)


def test_an_index_of_this_folder_stays(home: Path, tmp_path: Path) -> None:
    """Also by another path to it, and with threads elsewhere that are not here."""
    (tmp_path / "link").symlink_to(home)
    make_index(home, home / ROLLOUT, tmp_path / "link" / ROLLOUT, tmp_path / "gone" / ROLLOUT.with_name("x.jsonl"))
    assert not rename_moved_index(home)
    assert not rename_moved_index(tmp_path / "link")
    assert renamed(home) == []


def test_an_index_of_another_form_is_left_to_codex(home: Path, tmp_path: Path) -> None:
    assert not rename_moved_index(home)
    index = make_index(home, tmp_path / "elsewhere" / ROLLOUT, table="conversations")
    assert not rename_moved_index(home)
    for content in (b"", b"no database " * 100):
        index.write_bytes(content)
        assert not rename_moved_index(home)
        assert index.read_bytes() == content
    assert renamed(home) == []


def test_an_index_that_cannot_be_renamed_stops_the_start(home: Path, tmp_path: Path) -> None:
    make_index(home, tmp_path / "elsewhere" / ROLLOUT)
    # A name of 256 characters is too long for a file, with the time behind it.
    long = home / f"state_{'5' * 230}.sqlite"
    (home / "state_5.sqlite").rename(long)
    with pytest.raises(ConfigError, match=r"^CODEX_HOME: .* cannot be renamed: File name too long; make the folder"):
        rename_moved_index(home)
    assert long.exists()
