"""The operator's instructions and skills, which are files beside config.yaml.

Codex gets the instructions as the developer instructions of a new thread, and ignores them when it resumes one. A
resumed thread with an older `digest` therefore gets an amendment. Skills are checked for the card and linked into
CODEX_HOME. Codex lists their names and descriptions to the model, and adds a SKILL.md to a turn whose message contains
`$name`.
"""

import hashlib
import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import Field

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.config.validation import Section, matching, read_section

USUAL: Final = "system-prompt.md"
"""The prompt file that is read if config.yaml names none and it exists; the platform's rule."""

MEMORY: Final = "AGENTS.md"
"""Beside config.yaml the platform keeps what its plugins and its persona say to codex. Codex itself reads files of this
name in its own home and in the workspace only."""

CODEX_READS_BYTES: Final = 32 << 10
"""Of the workspace's files of that name, where codex is not told otherwise; older ones drop the rest in silence."""

MAX_BYTES: Final = 128 << 10
"""The limit for all prompt files. They are part of every model call; this is about 30,000 tokens."""

_CHANGED: Final = (
    "The operator has changed the instructions of this agent. These are in force from now on, "
    "in place of those that the operator gave earlier in this conversation:"
)
_TAKEN_BACK: Final = (
    "The operator has taken back the instructions of this agent. "
    "Those that the operator gave earlier in this conversation are no longer in force."
)


@dataclass(frozen=True, slots=True)
class Instructions:
    """The text of all files in order, and their paths; empty if there are none."""

    text: str = ""
    files: tuple[Path, ...] = ()

    @property
    def digest(self) -> str | None:
        """A hash of the instructions, 64 characters; None without instructions."""
        return hashlib.sha256(self.text.encode()).hexdigest() if self.text else None

    @property
    def amendment(self) -> str:
        """The message for a thread that has other instructions."""
        return f"{_CHANGED}\n\n{self.text}" if self.text else _TAKEN_BACK


def read_instructions(
    named: Sequence[str], folder: Path, place: ConfigLocation, read_by_codex: Collection[Path] = ()
) -> Instructions:
    """Read the files that `prompt_files` names (or the usual one), and what the platform keeps for codex beside them.

    Args:
        named: seen from `folder`, the folder of config.yaml, and in it.
        place: where `named` stands.
        read_by_codex: folders whose `AGENTS.md` codex reads itself.

    Raises:
        ConfigError: a named file is missing, or outside of `folder`; or one is no text, or all together are too large.
    """
    files = [(folder / name, place.item(index)) for index, name in enumerate(named)]
    usual = [] if files else [folder / USUAL]
    memory = [] if folder in read_by_codex else [folder / MEMORY]
    files += [(file, ConfigLocation(str(file))) for file in (*usual, *memory) if file.is_file()]
    texts: list[str] = []
    left = MAX_BYTES
    for file, where in files:
        text = read_text(file, folder, where, left, f"all prompt files have more than {MAX_BYTES} bytes")
        left -= len(text.encode())
        texts.append(text.removeprefix("\ufeff").replace("\r\n", "\n").strip())
    return Instructions("\n\n".join(text for text in texts if text), tuple(file for file, _ in files))


def read_text(file: Path, folder: Path, place: ConfigLocation, max_bytes: int, too_large: str) -> str:
    """Return what is in a file of the operator's, of at most `max_bytes`; `too_large` says of what it is too much.

    Raises:
        ConfigError: at `place`; it is missing, no plain file, outside of `folder`, too large, or no UTF-8 text.
    """
    try:
        real = file.resolve(strict=True)
        # The model reads these files, and any caller may ask for their content.
        if not real.is_relative_to(folder.resolve()):
            raise place.error(f"names {file}, which is outside of {folder}; put the file, or a copy, in there")
        content = _read_plain(real, max_bytes + 1)
    except FileNotFoundError as error:
        raise place.error(f"names {file}, which is not there; write it, or take the entry away") from error
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise place.error(
            f"names {file}, which cannot be read ({reason}); it must be a file that this user may read"
        ) from error
    if content is None:
        raise place.error(f"names {file}, which is no plain file; it must be one with text")
    if len(content) > max_bytes:
        raise place.error(f"is too much with {file}: {too_large}; shorten it")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise place.error(f"names {file}, whose byte {error.start + 1} is not UTF-8; save it as UTF-8 text") from error
    if "\0" in text:
        raise place.error(f"names {file}, which holds a NUL; it must be text")
    return text


def _read_plain(file: Path, max_bytes: int) -> bytes | None:
    """Return the beginning of a plain file; None for a folder, a pipe or a device, which are not waited for."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read(max_bytes)
    finally:
        os.close(descriptor)


FOLDER: Final = "skills"
"""The folder beside config.yaml with `<name>/SKILL.md`, as the platform has it."""

OURS: Final = Path("skills", "codex-workspace")
"""The folder in CODEX_HOME with links to the skills and nothing else."""

MAX_BYTES_SKILLS: Final = 256 << 10
"""The limit for one SKILL.md."""

SkillFolder = Annotated[
    str,
    matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "the name of a folder: 1 to 64 letters, digits, dots, _ or -"),
]
_FRONT: Final = re.compile(r"---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


class _FrontMatter(Section):
    """The keys of a SKILL.md that codex requires; it ignores or checks further ones itself."""

    name: Annotated[str, matching(r"[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]{0,63}", "one line of 1 to 64 characters")]
    description: Annotated[str, Field(pattern=r"\S", max_length=1024, title="a text of 1 to 1024 characters")]


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill for codex: its folder, and the name and description in its SKILL.md."""

    folder: Path
    name: str
    description: str


def read_skills(named: Sequence[str], folder: Path, place: ConfigLocation) -> tuple[Skill, ...]:
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


def _read_skill(skill: Path, folder: Path, place: ConfigLocation) -> Skill:
    file = skill / "SKILL.md"
    text = read_text(file, folder, place, MAX_BYTES_SKILLS, f"a SKILL.md may have {MAX_BYTES_SKILLS} bytes")
    found = _FRONT.match(text)
    if found is None:
        raise place.error(f"names {file}, which must begin with a line ---, keys, and another line ---")
    try:
        keys = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise place.error(f"names {file}, whose head is not YAML: {' '.join(str(error).split())}") from error
    known = {key: keys[key] for key in ("name", "description") if key in keys} if isinstance(keys, dict) else keys
    front = read_section(_FrontMatter, known, ConfigLocation(str(file)))
    return Skill(skill, front.name, front.description)


def link_skill_folders(codex_home: Path, skills: Sequence[Skill]) -> None:
    """Link `skills`, and no others of the agent's, into an existing CODEX_HOME.

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
