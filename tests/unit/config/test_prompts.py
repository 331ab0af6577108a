"""Skills: what codex would take, the sentence for each that it would not, and the links in its home."""

import os
from pathlib import Path

import pytest

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.config.loading import load_settings
from codex_workspace.config.prompts import OURS, Skill, link_skill_folders, read_skills
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
        ("Just text.", "which must begin with a line ---, keys, and another line ---"),
        ("\n" + GOOD, "which must begin with a line ---"),
        ("\ufeff" + GOOD, "which must begin with a line ---"),
        ("---\nname: a\ndescription: d\n", "which must begin with a line ---"),
        ("---\nname: [a\n---\n", "whose head is not YAML"),
        ("---\nname: a\ndescription: Use when: always\n---\n", "whose head is not YAML"),
        ("---\nname: &a [*a]\n---\n", "SKILL.md: name: must be one line of 1 to 64 characters, but is a list"),
        ("---\njust text\n---\n", "SKILL.md: must be a mapping of keys, but is text"),
        ("---\ndescription: d\n---\n", "SKILL.md: name: is missing"),
        ("---\nname: a\n---\n", "SKILL.md: description: is missing"),
        ("---\nname: 12\ndescription: d\n---\n", "but is a number; put it in quotes"),
        (f"---\nname: {'a' * 65}\ndescription: d\n---\n", "SKILL.md: name: must be one line of 1 to 64 characters"),
        ("---\nname: a\ndescription: ' '\n---\n", "SKILL.md: description: must be a text of 1 to 1024 characters"),
        (f"---\nname: a\ndescription: {'d' * 1025}\n---\n", "description: must be a text of 1 to 1024 characters"),
        (b"---\nname: a\ndescription: \xff\n---\n", "whose byte 26 is not UTF-8"),
        (GOOD + "x" * (256 << 10), "a SKILL.md may have 262144 bytes; shorten it"),
    ],
)
def test_skills_that_codex_would_ignore_are_rejected(tmp_path: Path, text: str | bytes, problem: str) -> None:
    write(tmp_path, "s", text)
    assert problem in refusal(tmp_path, "s")


def test_a_skill_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    write(tmp_path, "a")
    sentence = refusal(tmp_path, "a", "b")
    assert sentence.startswith("config.yaml: skills[1]: names ")
    assert "skills/b/SKILL.md, which is not there; write it, or take the entry away" in sentence


def test_one_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    write(tmp_path, "a")
    (folder / "skills").mkdir(parents=True)
    (folder / "skills" / "a").symlink_to(tmp_path / "skills" / "a")
    assert "which is outside of" in refusal(folder, "a")


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b")
    assert refusal(tmp_path, "a", "b").startswith("config.yaml: skills[1]: is a skill with the name notes")


@pytest.mark.parametrize("name", ["..", "a/b", "/etc", ".hidden", "", "a" * 65])
def test_a_name_is_a_folder_s(tmp_path: Path, name: str) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.yaml").write_text(f"name: a\nruntime: codex\nmodel: m\nskills: ['{name}']\n")
    with pytest.raises(ConfigError, match=r"skills\[0\]: must be the name of a folder"):
        load_settings({}, cwd=tmp_path, root=tmp_path)


def links(home: Path) -> dict[str, str]:
    ours = home / OURS
    return {link.name: os.readlink(link) for link in ours.iterdir()} if ours.exists() else {}


def test_codex_s_home_holds_a_link_for_each_and_no_old_one(tmp_path: Path) -> None:
    home, there = tmp_path / "home", tmp_path / "configs" / "skills"
    (home / "skills" / "operators").mkdir(parents=True)
    a, b, moved = Skill(there / "a", "a", "d"), Skill(there / "b", "b", "d"), Skill(tmp_path / "a", "a", "d")
    link_skill_folders(home, ())
    assert not (home / OURS).exists()
    link_skill_folders(home, (a, b))
    assert links(home) == {"a": str(there / "a"), "b": str(there / "b")}
    made = (home / OURS).stat().st_mtime_ns
    link_skill_folders(home, (a, b))
    assert (home / OURS).stat().st_mtime_ns == made, "a second start changes nothing"
    link_skill_folders(home, (moved,))
    assert links(home) == {"a": str(tmp_path / "a")}
    link_skill_folders(home, ())
    assert links(home) == {}
    assert (home / "skills" / "operators").is_dir()


def test_a_file_in_place_of_a_link_is_reported_and_kept(tmp_path: Path) -> None:
    taken = tmp_path / OURS / "a"
    taken.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"CODEX_HOME: .* move away what is in their place"):
        link_skill_folders(tmp_path, (Skill(tmp_path / "a", "a", "d"),))
    assert taken.is_dir()
