"""The operator's instructions and skills, which are files beside config.yaml.

Codex gets the instructions as the developer instructions of a new thread, and ignores them when it resumes one. A
resumed thread with an older `digest` therefore gets an amendment. Skills are checked for the card and linked into
CODEX_HOME. Codex lists their names and descriptions to the model, and adds a SKILL.md to a turn whose message contains
`$name`.
"""

import hashlib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import Field

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.common.files import read_regular
from codex_workspace.config.validation import BoundedLoader, Section, matching, read_section

DEFAULT_PROMPT_FILE: Final = "system-prompt.md"
"""The prompt file that is read if it exists and config.yaml names none, as on the platform."""

AGENTS_FILE: Final = "AGENTS.md"
"""The file beside config.yaml with the instructions of the platform's plugins and persona. Codex itself reads files of
this name only in its own home and in the workspace."""

MAX_AGENTS_FILE_BYTES: Final = 32 << 10
"""Codex's default limit for such files of the workspace; older versions drop the rest without a message."""

MAX_PROMPT_BYTES: Final = 128 << 10
"""The limit for all prompt files. They are part of every model call; this is about 30,000 tokens."""

_CHANGED: Final = (
    "The operator has changed the instructions of this agent. From now on, follow these instead of "
    "the operator's earlier instructions in this conversation:"
)
_REMOVED: Final = (
    "The operator has removed the instructions of this agent. "
    "The operator's earlier instructions in this conversation no longer apply."
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
        """The message to a thread that was started with other instructions."""
        return f"{_CHANGED}\n\n{self.text}" if self.text else _REMOVED


def read_instructions(
    named: Sequence[str], folder: Path, location: ConfigLocation, read_by_codex: Collection[Path] = ()
) -> Instructions:
    """Read the files that `prompt_files` names (or the default one), and the platform's AGENTS.md beside config.yaml.

    Args:
        named: paths relative to `folder`, the folder of config.yaml; they must be inside it.
        location: the location of `named`, for errors.
        read_by_codex: the folders in which codex reads AGENTS.md itself.

    Raises:
        ConfigError: a named file is missing or outside of `folder`, a file is not text, or all together are too large.
    """
    files = [(folder / name, location.item(index)) for index, name in enumerate(named)]
    default = [] if files else [folder / DEFAULT_PROMPT_FILE]
    agents = [] if folder in read_by_codex else [folder / AGENTS_FILE]
    files += [(file, ConfigLocation(str(file))) for file in (*default, *agents) if file.is_file()]
    texts: list[str] = []
    remaining_bytes, too_large = MAX_PROMPT_BYTES, f"the prompt files together have more than {MAX_PROMPT_BYTES} bytes"
    for file, source in files:
        text = read_text(file, folder, source, remaining_bytes, too_large)
        remaining_bytes -= len(text.encode())
        texts.append(text.removeprefix("\ufeff").replace("\r\n", "\n").strip())
    return Instructions("\n\n".join(text for text in texts if text), tuple(file for file, _ in files))


def read_text(file: Path, folder: Path, location: ConfigLocation, max_bytes: int, too_large: str) -> str:
    """Return the content of one of the operator's files, at most `max_bytes`; `too_large` states the limit for errors.

    Raises:
        ConfigError: at `location`; the file is missing, not regular, outside of `folder`, too large, or not UTF-8 text.
    """
    try:
        real = file.resolve(strict=True)
        # The model reads these files, and any caller may ask for their content.
        if not real.is_relative_to(folder.resolve()):
            raise location.error(f"names {file}, which is outside of {folder}; move or copy the file into that folder")
        content = read_regular(real, max_bytes + 1)
    except FileNotFoundError as error:
        raise location.error(f"names {file}, which does not exist; create it, or remove the entry") from error
    except (OSError, RuntimeError, ValueError) as error:  # such as a loop of links, or a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise location.error(
            f"names {file}, which cannot be read ({reason}); it must be a file that this user may read"
        ) from error
    if len(content) > max_bytes:
        raise location.error(f"names {file}, which is too large: {too_large}; shorten it")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise location.error(f"names {file}, which is not UTF-8 at byte {error.start + 1}; save it as UTF-8") from error
    if "\0" in text:
        raise location.error(f"names {file}, which contains a NUL character; it must be text")
    return text


SKILL_FOLDER: Final = "skills"
"""The folder beside config.yaml that contains `<name>/SKILL.md`, as on the platform."""

LINK_FOLDER: Final = Path("skills", "codex-workspace")
"""The folder in CODEX_HOME that contains the links to the skills, and nothing else."""

MAX_SKILL_BYTES: Final = 256 << 10
"""The limit for one SKILL.md."""

SkillFolder = Annotated[
    str,
    matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "the name of a folder: 1 to 64 letters, digits, dots, _ or -"),
]
_FRONT_MATTER: Final = re.compile(r"---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


class _FrontMatter(Section):
    """The keys of a SKILL.md that codex requires; it ignores other keys or checks them itself."""

    name: Annotated[str, matching(r"[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]{0,63}", "one line of 1 to 64 characters")]
    description: Annotated[str, Field(pattern=r"\S", max_length=1024, title="a text of 1 to 1024 characters")]


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill for codex: its folder, and the name and description from its SKILL.md."""

    folder: Path
    name: str
    description: str


def read_skills(named: Sequence[str], folder: Path, location: ConfigLocation) -> tuple[Skill, ...]:
    """Read the skills that config.yaml names; `folder` is the folder of config.yaml.

    Raises:
        ConfigError: at `location`; a skill is missing, codex would reject it, or two have the same name.
    """
    skills: list[Skill] = []
    for index, name in enumerate(named):
        here = location.item(index)
        skill = _read_skill(folder / SKILL_FOLDER / name, folder, here)
        if any(skill.name == other.name for other in skills):
            raise here.error(f"has the name of another skill, {skill.name}; change `name` in its SKILL.md")
        skills.append(skill)
    return tuple(skills)


def _read_skill(skill: Path, folder: Path, location: ConfigLocation) -> Skill:
    file = skill / "SKILL.md"
    text = read_text(file, folder, location, MAX_SKILL_BYTES, f"a SKILL.md may have at most {MAX_SKILL_BYTES} bytes")
    found = _FRONT_MATTER.match(text)
    if found is None:
        raise location.error(
            f"names {file}, which must begin with front matter: a line ---, keys, and another line ---"
        )
    try:
        keys = yaml.load(found[1], BoundedLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise location.error(f"names {file}, whose front matter is not YAML: {' '.join(str(error).split())}") from error
    known = {key: keys[key] for key in ("name", "description") if key in keys} if isinstance(keys, dict) else keys
    front_matter = read_section(_FrontMatter, known, ConfigLocation(str(file)))
    return Skill(skill, front_matter.name, front_matter.description)


def link_skill_folders(codex_home: Path, skills: Sequence[Skill]) -> None:
    """Link `skills` into an existing CODEX_HOME, and remove the agent's other links.

    Raises:
        ConfigError: the links cannot be created.
    """
    folder = codex_home / LINK_FOLDER
    wanted = {skill.folder.name: str(skill.folder) for skill in skills}
    try:
        if wanted:
            folder.mkdir(parents=True, exist_ok=True)
        entries = folder.iterdir() if folder.is_dir() else ()
        existing = {entry.name: os.readlink(entry) for entry in entries if entry.is_symlink()}
        for name in existing.keys() - wanted.keys():
            (folder / name).unlink()
        for name, target in wanted.items():
            if existing.get(name) != target:
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to(target)
    except OSError as error:
        raise ConfigError(
            f"CODEX_HOME: cannot create links to the skills in {folder} ({error.strerror}: {error.filename}); "
            "remove the files in their place, or make the folder writable for this user"
        ) from error
