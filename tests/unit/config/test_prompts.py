"""Skills: what codex would take, the sentence for each that it would not, and the links in its home."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.config.loading import load_settings
from codex_workspace.config.prompts import (
    AGENTS_FILE,
    DEFAULT_PROMPT_FILE,
    LINK_FOLDER,
    MAX_PROMPT_BYTES,
    Instructions,
    Skill,
    link_skill_folders,
    read_instructions,
    read_skills,
)
from tests.docs.test_docs import CONFIGURATION, the_snippet

PLACE = ConfigLocation("config.yaml").at("skills")
GOOD = "---\nname: notes\ndescription: Writes notes\n---\n\nWrite them.\n"


def write(folder: Path, name: str, text: str | bytes = GOOD) -> None:
    (folder / "skills" / name).mkdir(parents=True)
    content = text.encode() if isinstance(text, str) else text
    (folder / "skills" / name / "SKILL.md").write_bytes(content)


def refusal(folder: Path, *named: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_skills(named, folder, PLACE)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("text", "name", "description"),
    [
        (GOOD, "notes", "Writes notes"),
        (GOOD.replace("\n", "\r\n"), "notes", "Writes notes"),
        ("---\nname: release notes\ndescription: >\n  One\n  two\n---\n", "release notes", "One two\n"),
        ("--- \nname: a\nlicense: MIT\nmetadata: {short-description: x}\ndescription: d\n---", "a", "d"),
        ("---\nname: a\ndescription: d\n---\nfollowed by\n---\nanother rule\n", "a", "d"),
    ],
)
def test_skills_that_codex_accepts_are_accepted(tmp_path: Path, text: str, name: str, description: str) -> None:
    write(tmp_path, "s", text)
    assert read_skills(["s"], tmp_path, PLACE) == (Skill(tmp_path / "skills" / "s", name, description),)


def test_the_readmes_example_is_accepted(tmp_path: Path) -> None:
    write(tmp_path, "s", the_snippet(CONFIGURATION, "SKILL.md"))
    assert [skill.name for skill in read_skills(["s"], tmp_path, PLACE)] == ["release-notes"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Just text.", "which must begin with front matter: a line ---, keys, and another line ---"),
        ("\n" + GOOD, "which must begin with front matter"),
        ("\ufeff" + GOOD, "which must begin with front matter"),
        ("---\nname: a\ndescription: d\n", "which must begin with front matter"),
        ("---\nname: [a\n---\n", "whose front matter is not YAML"),
        ("---\nname: a\ndescription: Use when: always\n---\n", "whose front matter is not YAML"),
        ("---\nname: [a]\n---\n", "SKILL.md: name: must be one line of 1 to 64 characters, but is a list"),
        ("---\nname: &a [*a]\n---\n", "an alias is not allowed within its own value"),
        ("---\njust text\n---\n", "SKILL.md: must be a mapping of keys, but is text"),
        ("---\ndescription: d\n---\n", "SKILL.md: name: is missing"),
        ("---\nname: a\n---\n", "SKILL.md: description: is missing"),
        ("---\nname: 12\ndescription: d\n---\n", "but is a number; put it in quotes"),
        (f"---\nname: {'a' * 65}\ndescription: d\n---\n", "SKILL.md: name: must be one line of 1 to 64 characters"),
        ("---\nname: a\ndescription: ' '\n---\n", "SKILL.md: description: must be a text of 1 to 1024 characters"),
        (f"---\nname: a\ndescription: {'d' * 1025}\n---\n", "description: must be a text of 1 to 1024 characters"),
        (b"---\nname: a\ndescription: \xff\n---\n", "which is not UTF-8 at byte 26"),
        (GOOD + "x" * (256 << 10), "a SKILL.md may have at most 262144 bytes; shorten it"),
    ],
)
def test_skills_that_codex_would_ignore_are_rejected(tmp_path: Path, text: str | bytes, problem: str) -> None:
    write(tmp_path, "s", text)
    assert problem in refusal(tmp_path, "s")


def test_a_skill_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    write(tmp_path, "a")
    sentence = refusal(tmp_path, "a", "b")
    assert sentence.startswith("config.yaml: skills[1]: names ")
    assert "skills/b/SKILL.md, which does not exist; create it, or remove the entry" in sentence


def test_one_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    write(tmp_path, "a")
    (folder / "skills").mkdir(parents=True)
    (folder / "skills" / "a").symlink_to(tmp_path / "skills" / "a")
    assert "which is outside of" in refusal(folder, "a")


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b")
    assert refusal(tmp_path, "a", "b").startswith("config.yaml: skills[1]: has the name of another skill, notes")


@pytest.mark.parametrize("name", ["..", "a/b", "/etc", ".hidden", "", "a" * 65])
def test_a_name_is_a_folder_s(tmp_path: Path, name: str) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.yaml").write_text(f"name: a\nruntime: codex\nmodel: m\nskills: ['{name}']\n")
    with pytest.raises(ConfigError, match=r"skills\[0\]: must be the name of a folder"):
        load_settings({}, cwd=tmp_path, root=tmp_path)


def links(home: Path) -> dict[str, str]:
    ours = home / LINK_FOLDER
    return {link.name: os.readlink(link) for link in ours.iterdir()} if ours.exists() else {}


def test_codex_s_home_holds_a_link_for_each_and_no_old_one(tmp_path: Path) -> None:
    home, there = tmp_path / "home", tmp_path / "configs" / "skills"
    (home / "skills" / "operators").mkdir(parents=True)
    a, b, moved = Skill(there / "a", "a", "d"), Skill(there / "b", "b", "d"), Skill(tmp_path / "a", "a", "d")
    link_skill_folders(home, ())
    assert not (home / LINK_FOLDER).exists()
    link_skill_folders(home, (a, b))
    assert links(home) == {"a": str(there / "a"), "b": str(there / "b")}
    made = (home / LINK_FOLDER).stat().st_mtime_ns
    link_skill_folders(home, (a, b))
    assert (home / LINK_FOLDER).stat().st_mtime_ns == made, "a second start changes nothing"
    link_skill_folders(home, (moved,))
    assert links(home) == {"a": str(tmp_path / "a")}
    link_skill_folders(home, ())
    assert links(home) == {}
    assert (home / "skills" / "operators").is_dir()


def test_a_file_in_place_of_a_link_is_reported_and_kept(tmp_path: Path) -> None:
    taken = tmp_path / LINK_FOLDER / "a"
    taken.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"CODEX_HOME: .* remove the files in their place"):
        link_skill_folders(tmp_path, (Skill(tmp_path / "a", "a", "d"),))
    assert taken.is_dir()


# --- Prompt files: which are read, in what order, and the sentence for each that cannot be

PROMPT_FILES = ConfigLocation("config.yaml").at("prompt_files")


def read(folder: Path, *named: str) -> Instructions:
    return read_instructions(named, folder, PROMPT_FILES)


def prompt_refusal(folder: Path, *named: str) -> str:
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
    (tmp_path / DEFAULT_PROMPT_FILE).write_text("Usual.")
    (tmp_path / "own.md").write_text("Own.")
    assert read(tmp_path).text == "Usual."
    assert read(tmp_path, "own.md").text == "Own."


def test_platform_files_beside_config_yaml_come_last(tmp_path: Path) -> None:
    (tmp_path / "own.md").write_text("Own.")
    (tmp_path / AGENTS_FILE).write_text("A plugin's rule.")
    assert read(tmp_path, "own.md").text == "Own.\n\nA plugin's rule."
    assert read_instructions(["own.md"], tmp_path, PROMPT_FILES, read_by_codex=(tmp_path,)).text == "Own."


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
        "missing.md": "which does not exist; create it, or remove the entry",
        "good.md/x.md": "which cannot be read (Not a directory)",
        "../auth.json": "which is outside of",
        str(tmp_path / "auth.json"): "which is outside of",
        "/proc/self/environ": "which is outside of",
        "link.md": "which is outside of",
        "loop.md": "which cannot be read",
        "folder": "which cannot be read (Is a directory)",
        "pipe.md": "which cannot be read (it is a pipe or a device;",
        "latin.md": "which is not UTF-8 at byte 4",
        "nul.md": "which contains a NUL",
    }.items():
        sentence = prompt_refusal(folder, "good.md", name)
        assert sentence.startswith("config.yaml: prompt_files[1]: names "), sentence
        assert problem in sentence
        assert "secret" not in sentence


def test_all_together_have_a_bound(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("a" * (MAX_PROMPT_BYTES - 1))
    (tmp_path / "b.md").write_text("b")
    (tmp_path / "c.md").write_text("c")
    assert len(read(tmp_path, "a.md", "b.md").text) == MAX_PROMPT_BYTES + 2
    sentence = prompt_refusal(tmp_path, "a.md", "b.md", "c.md")
    assert sentence.startswith("config.yaml: prompt_files[2]: names ")
    assert f"the prompt files together have more than {MAX_PROMPT_BYTES} bytes; shorten it" in sentence


def test_an_endless_file_of_the_usual_name_is_no_prompt(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / DEFAULT_PROMPT_FILE)
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
    (folder / AGENTS_FILE).write_text("A plugin's rule.")
    assert load_settings({}, cwd=tmp_path, root=tmp_path).instructions.text == "Be brief.\n\nA plugin's rule."
    # Codex works in that folder, and reads its AGENTS.md by itself.
    assert load_settings({}, cwd=folder, root=tmp_path).instructions.text == "Be brief."
    (folder / "how.md").unlink()
    with pytest.raises(
        ConfigError, match=r"configs/config\.yaml: prompt_files\[0\]: names .*how\.md, which does not exist"
    ):
        load_settings({}, cwd=tmp_path, root=tmp_path)
