"""The operator's skills: folders beside config.yaml, read and checked for the card, and linked to where codex looks.

What a skill is, and when the model reads it, is codex's own: it lists the name and description of each to the model,
and gives the whole SKILL.md to a turn whose message says `$name`. Skills in the workspace (`.agents/skills`) are found
by codex without us.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import yaml

from codex_workspace.errors import ConfigError
from codex_workspace.instructions import read_text
from codex_workspace.schema import Matches, Place, read_section

FOLDER: Final = "skills"
"""Beside config.yaml: `skills/<name>/SKILL.md`, as the platform has it."""

OURS: Final = Path("skills", "codex-workspace")
"""In CODEX_HOME: the folder that holds links to them and nothing else."""

MAX_BYTES: Final = 256 << 10
"""Of one SKILL.md."""

SkillFolder = Annotated[
    str,
    Matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "the name of a folder: 1 to 64 letters, digits, dots, _ or -"),
]
_FRONT: Final = re.compile(r"---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Front:
    """The head of a SKILL.md, as the strictest codex wants it; further keys are left to it."""

    name: Annotated[str, Matches(r"[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]{0,63}", "one line of 1 to 64 characters")]
    description: Annotated[str, Matches(r"(?s)(?=.*\S).{1,1024}", "a text of 1 to 1024 characters")]


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill that codex is given: its folder, and what SKILL.md says of it."""

    folder: Path
    name: str
    description: str


def read_skills(named: Sequence[str], folder: Path, place: Place) -> tuple[Skill, ...]:
    """Read the skills that config.yaml names, from `folder`, which is config.yaml's own.

    Raises:
        ConfigError: one is missing, codex would not take it, or two have one name; at `place`.
    """
    skills: list[Skill] = []
    for index, name in enumerate(named):
        where = place.item(index)
        skill = _read_skill(folder / FOLDER / name, folder, where)
        if any(skill.name == other.name for other in skills):
            raise where.error(f"is a skill with the name {skill.name}, as is another; change `name` in its SKILL.md")
        skills.append(skill)
    return tuple(skills)


def _read_skill(skill: Path, folder: Path, place: Place) -> Skill:
    file = skill / "SKILL.md"
    text = read_text(file, folder, place, MAX_BYTES, f"a SKILL.md may have {MAX_BYTES} bytes")
    found = _FRONT.match(text)
    if found is None:
        raise place.error(f"names {file}, which must begin with a line ---, keys, and another line ---")
    try:
        keys = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise place.error(f"names {file}, whose head is not YAML: {' '.join(str(error).split())}") from error
    known = {key: keys[key] for key in ("name", "description") if key in keys} if isinstance(keys, dict) else keys
    front = read_section(_Front, known, Place(str(file)))
    return Skill(skill, front.name, front.description)


def link_skills(codex_home: Path, skills: Sequence[Skill]) -> None:
    """Have codex find `skills` and no others of ours, in a home that exists; what is right already is left alone.

    Raises:
        ConfigError: the links cannot be made.
    """
    ours = codex_home / OURS
    wanted = {skill.folder.name: str(skill.folder) for skill in skills}
    try:
        if wanted:
            ours.mkdir(parents=True, exist_ok=True)
        there = {link.name: os.readlink(link) for link in _links(ours)}
        for name in there.keys() - wanted.keys():
            (ours / name).unlink()
        for name, target in wanted.items():
            if there.get(name) != target:
                (ours / name).unlink(missing_ok=True)
                (ours / name).symlink_to(target)
    except OSError as error:
        raise ConfigError(
            f"CODEX_HOME: {ours} cannot hold links to the skills ({error.strerror}: {error.filename}); "
            "move away what is in their place, or give this user the right to write there"
        ) from error


def _links(ours: Path) -> list[Path]:
    return [entry for entry in ours.iterdir() if entry.is_symlink()] if ours.is_dir() else []
