"""Files are replaced whole, or not at all."""

from pathlib import Path

import pytest

from codex_workspace.replacing import replace_file


def test_a_file_is_made_for_its_user_alone_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, b"old")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"old", 0o600)
    with file.open("rb") as reader:
        replace_file(file, b"new", 0o644)
        assert reader.read() == b"old"
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o644)
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
