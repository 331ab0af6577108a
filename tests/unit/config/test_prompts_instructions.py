"""Prompt files: which are read, in what order, and the sentence for each that cannot be."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.config.loading import load_settings
from codex_workspace.config.prompts import MAX_BYTES, MEMORY, USUAL, Instructions, read_instructions

PLACE = ConfigLocation("config.yaml").at("prompt_files")


def read(folder: Path, *named: str) -> Instructions:
    return read_instructions(named, folder, PLACE)


def refusal(folder: Path, *named: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, *named)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_files_come_one_after_the_other_as_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("Be brief.\n\n")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "a.md").write_text("\nAsk first.")
    told = read(tmp_path, "b.md", "prompts/a.md")
    assert told.text == "Be brief.\n\nAsk first."
    assert told.files == (tmp_path / "b.md", tmp_path / "prompts" / "a.md")


def test_without_names_the_platform_s_usual_file_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == Instructions()
    (tmp_path / USUAL).write_text("Usual.")
    (tmp_path / "own.md").write_text("Own.")
    assert read(tmp_path).text == "Usual."
    assert read(tmp_path, "own.md").text == "Own."


def test_platform_files_beside_config_yaml_come_last(tmp_path: Path) -> None:
    (tmp_path / "own.md").write_text("Own.")
    (tmp_path / MEMORY).write_text("A plugin's rule.")
    assert read(tmp_path, "own.md").text == "Own.\n\nA plugin's rule."
    assert read_instructions(["own.md"], tmp_path, PLACE, read_by_codex=(tmp_path,)).text == "Own."


def test_a_byte_order_mark_and_other_line_ends_are_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\r\n")
    assert read(tmp_path, "a.md").text == "One.\nTwo."


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    """Kubernetes mounts the files of a ConfigMap so."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "a.md").write_text("Linked.")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "a.md").symlink_to("..data/a.md")
    assert read(tmp_path, "a.md").text == "Linked."


def test_an_unreadable_file_is_reported_with_its_key(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "auth.json").write_text("secret")
    (folder / "link.md").symlink_to(tmp_path / "auth.json")
    (folder / "loop.md").symlink_to("loop.md")
    (folder / "latin.md").write_bytes(b"caf\xe9")
    (folder / "nul.md").write_bytes(b"a\0b")
    os.mkfifo(folder / "pipe.md")
    (folder / "good.md").write_text("Good.")
    for name, problem in {
        "missing.md": "which is not there; write it, or take the entry away",
        "good.md/x.md": "which cannot be read (Not a directory)",
        "../auth.json": "which is outside of",
        str(tmp_path / "auth.json"): "which is outside of",
        "/proc/self/environ": "which is outside of",
        "link.md": "which is outside of",
        "loop.md": "which cannot be read",
        "folder": "which is no plain file",
        "pipe.md": "which is no plain file",
        "latin.md": "whose byte 4 is not UTF-8",
        "nul.md": "which holds a NUL",
    }.items():
        sentence = refusal(folder, "good.md", name)
        assert sentence.startswith("config.yaml: prompt_files[1]: names "), sentence
        assert problem in sentence
        assert "secret" not in sentence


def test_all_together_have_a_bound(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("a" * (MAX_BYTES - 1))
    (tmp_path / "b.md").write_text("b")
    (tmp_path / "c.md").write_text("c")
    assert len(read(tmp_path, "a.md", "b.md").text) == MAX_BYTES + 2
    sentence = refusal(tmp_path, "a.md", "b.md", "c.md")
    assert sentence.startswith("config.yaml: prompt_files[2]: is too much with ")
    assert f"all prompt files have more than {MAX_BYTES} bytes; shorten it" in sentence


def test_an_endless_file_of_the_usual_name_is_no_prompt(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / USUAL)
    assert read(tmp_path) == Instructions()


@given(st.text(), st.text())
def test_a_digest_distinguishes_instructions(one: str, other: str) -> None:
    one, other = one.encode(errors="replace").decode(), other.encode(errors="replace").decode()
    first, second = Instructions(one).digest, Instructions(other).digest
    assert (first == second) == (one == other)
    assert (first is None) == (not one)
    assert first is None or len(first) == 64


def test_settings_read_them_from_the_folder_of_config_yaml(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: a\nruntime: codex\nmodel: m\nprompt_files: [how.md]\n")
    (folder / "how.md").write_text("Be brief.")
    (folder / MEMORY).write_text("A plugin's rule.")
    assert load_settings({}, cwd=tmp_path, root=tmp_path).instructions.text == "Be brief.\n\nA plugin's rule."
    # Codex works in that folder, and reads its AGENTS.md by itself.
    assert load_settings({}, cwd=folder, root=tmp_path).instructions.text == "Be brief."
    (folder / "how.md").unlink()
    with pytest.raises(
        ConfigError, match=r"configs/config\.yaml: prompt_files\[0\]: names .*how\.md, which is not there"
    ):
        load_settings({}, cwd=tmp_path, root=tmp_path)
