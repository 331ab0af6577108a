"""Sets the agent's keys in codex's config.toml and removes them again; everything else in the file is the operator's.

tomlkit edits the file and keeps the operator's keys, order and comments; tomllib checks the result before it replaces
the file. A record beside the file holds the agent's keys. A value that the operator has changed is the operator's.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import tomlkit
from pydantic import BaseModel, ConfigDict, ValidationError
from tomlkit import items
from tomlkit.items import InlineTable, Item

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.common.files import replace_file
from codex_workspace.common.values import KeyPath, TomlValue
from codex_workspace.config.providers import ChosenProvider
from codex_workspace.config.settings import Settings

Managed = Mapping[KeyPath, TomlValue]
"""The agent's keys with their values."""

NOTHING: Final[Managed] = {}

CONFIG_NAME = "config.toml"
RECORD_NAME = ".codex-workspace.json"

REQUEST_MAX_RETRIES = 2
STREAM_MAX_RETRIES = 2
"""With codex's own 4 and 5, a caller waits about 25 s if the model answers 500; with these a few seconds."""

COMMENT: Final = "set by codex-workspace"
UNCHANGED: Final = "; the file is left as it is"
_BOM: Final = "\ufeff"

Table = MutableMapping[str, Any]
"""A table of config.toml: in plain values, or in tomlkit's with comments and layout."""


# --- The keys


def managed_config(settings: Settings, provider: ChosenProvider) -> Managed:
    """Return the agent's keys. They hold no secret: codex receives the API key over its pipe.

    Keys that the agent depends on, such as those for codex's own turns and reconnects, are on codex's command line
    instead.
    """
    codex = settings.config.codex
    values: dict[KeyPath, TomlValue] = {
        ("model",): provider.model,
        ("model_provider",): provider.slug,
        ("sandbox_mode",): "danger-full-access" if codex.sandbox == "container" else codex.sandbox,
        ("web_search",): codex.web_search,
        # Without these, commands see all variables of codex, including those for MCP servers.
        ("shell_environment_policy", "inherit"): "core",
        ("shell_environment_policy", "ignore_default_excludes"): False,
    }
    # Codex 0.163 does not start with `untrusted` in the file; each thread sets it.
    if codex.approval_policy != "untrusted":
        values["approval_policy",] = codex.approval_policy
    if codex.reasoning_effort is not None:
        values["model_reasoning_effort",] = codex.reasoning_effort
    if codex.sandbox == "workspace-write":
        values["sandbox_workspace_write", "network_access"] = codex.network_access
    if settings.writable_folders:
        values["sandbox_workspace_write", "writable_roots"] = [str(folder) for folder in settings.writable_folders]
    return values | _provider_table(provider) | settings.mcp.managed


def _provider_table(provider: ChosenProvider) -> dict[KeyPath, TomlValue]:
    table: dict[str, TomlValue] = {"name": provider.name, "base_url": provider.base_url, "wire_api": "responses"}
    if provider.credential is not None:
        # The provider then uses the key of `account/login/start`.
        table["requires_openai_auth"] = True
    table |= {"request_max_retries": REQUEST_MAX_RETRIES, "stream_max_retries": STREAM_MAX_RETRIES}
    return {("model_providers", provider.slug, key): value for key, value in table.items()}


# --- The edit


class ManagedKey(BaseModel):
    """A key that the agent has set.

    ours: the agent's value; while the file is being written, the previous one too. theirs: the operator's value that it
    replaces, as TOML.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    path: list[str]
    ours: list[TomlValue]
    theirs: str | None = None


class Record(BaseModel):
    """The keys that the agent has set in config.toml, and the tables that it has added."""

    model_config = ConfigDict(strict=True, extra="forbid")

    keys: list[ManagedKey]
    tables: list[list[str]]


def edit(text: str, managed: Managed, record: Record, file: str = CONFIG_NAME) -> tuple[str, Record]:
    """Return `text` with `managed` and without the other keys of `record`, and the new record.

    Raises:
        ConfigError: `text` is not TOML, gives a key another shape (a table for a value, or the reverse), or cannot be
            edited without a change to the operator's keys.
    """
    content = parse_toml(text, file)
    for path in managed:
        _check_shape(content, path, ConfigLocation(file))
    problem: Exception | None = None
    # An inline table can go where a [table] cannot: beside dotted keys, and into another inline table.
    for new_table in (tomlkit.table, tomlkit.inline_table):
        try:
            return _edit(text, deepcopy(content), managed, record, new_table)
        except Exception as error:  # tomlkit raises many kinds for what it cannot edit
            problem = error
    raise ConfigError(
        f"{file}: cannot be edited without losing keys or comments; write each table once, as [table]{UNCHANGED}"
    ) from problem


def _edit(
    text: str, content: Table, managed: Managed, record: Record, new_table: Callable[[], Table]
) -> tuple[str, Record]:
    # TOML allows a byte order mark, and a last line without a line break; tomlkit's edits do not.
    bom, body = (_BOM, text[1:]) if text.startswith(_BOM) else ("", text)
    document = tomlkit.parse(body if body.endswith("\n") or not body else f"{body}\n")
    keys, changes = _plan(content, document, managed, {tuple(key.path): key for key in record.keys})
    if not changes:
        return text, Record(keys=keys, tables=record.tables)
    tables = [tuple(path) for path in record.tables]
    for path, value in changes.items():
        parents = [path[:length] for length in range(1, len(path))]
        if value is not None:
            tables += [table for table in parents if _find(content, table) is None]
            _set(content, path, tomllib.loads(f"value = {value}")["value"], dict)
            _set(document, path, tomlkit.value(value), new_table)
            continue
        _remove(content, document, path)
        for table in reversed(parents):
            if table in tables and _is_blank(_find(document, table)):
                _remove(content, document, table)
    edited = bom + tomlkit.dumps(document)
    kept = [edited, *(key.theirs or "" for key in keys)]
    if parse_toml(edited, CONFIG_NAME) != content or _comments(text) - _comments("\n".join(kept)):
        raise ValueError("tomlkit has changed other keys or comments")
    return edited, Record(
        keys=keys, tables=[list(table) for table in dict.fromkeys(tables) if _find(content, table) is not None]
    )


def parse_toml(text: str, file: str) -> Table:
    """Return the content of `text`.

    Raises:
        ConfigError: it is not TOML 1.0; with line and column, counted from 1.
    """
    try:
        return tomllib.loads(text.removeprefix(_BOM))
    except tomllib.TOMLDecodeError as error:
        problem = str(error)
        if found := re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", problem, re.DOTALL):
            problem = f"line {found[2]}, column {found[3]}: {found[1]}"
        else:
            last = text.split("\n")
            problem = f"line {len(last)}, column {len(last[-1]) + 1}: {problem}"
        raise ConfigError(f"{file}: {' '.join(problem.split())}{UNCHANGED}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: is nested too deeply{UNCHANGED}") from error


def _check_shape(content: object, path: KeyPath, location: ConfigLocation) -> None:
    for length, key in enumerate(path, start=1):
        if not isinstance(content, dict) or key not in content:
            return
        content = content[key]
        here = location.at(_dotted(path[:length]))
        if length == len(path) and isinstance(content, dict):
            raise here.error(f"must be a value, but is a table{UNCHANGED}")
        if length < len(path) and not isinstance(content, dict):
            is_array = isinstance(content, list) and any(isinstance(item, dict) for item in content)
            raise here.error(f"must be a table, but is {'an array of tables' if is_array else 'a value'}{UNCHANGED}")


def _dotted(path: KeyPath) -> str:
    return ".".join(tomlkit.key(part).as_string() for part in path)


def _find(content: Any, path: KeyPath) -> Any:  # any TOML
    """Return the value at `path`, None if there is none."""
    for key in path:
        if not isinstance(content, Mapping) or key not in content:
            return None
        content = content[key]
    return content


def _plan(
    content: Table, document: Table, managed: Managed, known: Mapping[KeyPath, ManagedKey]
) -> tuple[list[ManagedKey], dict[KeyPath, str | None]]:
    """Return the keys for the record, and what has to change: values as TOML, None for a key to remove."""
    keys: list[ManagedKey] = []
    changes: dict[KeyPath, str | None] = {}
    for path, value in managed.items():
        current = _find(content, path)
        was = known.get(path)
        if was is not None and _is_one_of(current, was.ours):
            theirs = was.theirs
        elif _is_one_of(current, [value]):
            continue
        else:
            theirs = None if current is None else _as_toml(_find(document, path))
        keys.append(ManagedKey(path=list(path), ours=[value], theirs=theirs))
        if not _is_one_of(current, [value]):
            changes[path] = _as_toml(value)
    for path, was in known.items():
        if path not in managed and _is_one_of(_find(content, path), was.ours):
            changes[path] = was.theirs
    return keys, changes


def _is_one_of(value: object, values: Iterable[object]) -> bool:
    return any(type(value) is type(each) and value == each for each in values)


def _as_toml(value: object) -> str:
    return tomlkit.item(value).as_string()


def _comments(text: str) -> Counter[str]:
    """Return the lines that hold a comment alone."""
    return Counter(stripped for line in text.splitlines() if (stripped := line.strip()).startswith("#"))


def _set(content: Table, path: KeyPath, value: object, new_table: Callable[[], Table]) -> None:
    is_inline = False
    for key in path[:-1]:
        if key not in content:
            content[key] = new_table()
        content = content[key]
        is_inline = is_inline or isinstance(content, InlineTable)
    if isinstance(value, Item) and path[-1] not in content and not is_inline:
        value.comment(COMMENT)
    content[path[-1]] = value


def _is_blank(table: object) -> bool:
    """Return whether a table has neither keys nor comments."""
    if not isinstance(table, items.Table | InlineTable):
        return False
    return not table and "#" not in table.as_string() + table.trivia.comment


def _remove(content: Table, document: Table, path: KeyPath) -> None:
    for each in (content, document):
        del _find(each, path[:-1])[path[-1]]


# --- Files


def prepare_codex_home(settings: Settings, provider: ChosenProvider, further: Managed = NOTHING) -> None:
    """Create CODEX_HOME and update its config.toml; write nothing if nothing changes.

    Args:
        further: Keys besides those of `managed_config`.

    Raises:
        ConfigError: the folder or a file in it cannot be read or written, or config.toml cannot be edited.
    """
    update_config(settings.codex_home, {**managed_config(settings, provider), **further})


def update_config(codex_home: Path, managed: Managed) -> None:
    """Make `managed` the agent's keys in `codex_home`'s config.toml, and remove all others of the agent's.

    Raises:
        ConfigError: as `prepare_codex_home`.
    """
    try:
        _make_private(codex_home)
        _update(codex_home, managed)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or codex_home}: cannot be used as part of CODEX_HOME ({error.strerror})"
        ) from error


def _update(codex_home: Path, managed: Managed) -> None:
    # Mounted configuration is often a symbolic link, which must stay one.
    file, record_file = (codex_home / CONFIG_NAME).resolve(), codex_home / RECORD_NAME
    text, record = _read_text(file), _read_record(record_file)
    edited, new = edit(text, managed, record, str(file))
    if edited != text:
        # Both records until the file is written: after a crash, the old and the new values are known as the agent's.
        _write(record_file, _dump(_merged(record, new)))
        _write(file, edited.encode())
    if edited != text or new != record:
        _write(record_file, _dump(new))


def _merged(old: Record, new: Record) -> Record:
    keys = {tuple(key.path): key for key in old.keys}
    for key in new.keys:
        was = keys.get(tuple(key.path))
        keys[tuple(key.path)] = key.model_copy(update={"ours": [*key.ours, *(was.ours if was else ())]})
    return Record(keys=[*keys.values()], tables=[*old.tables, *new.tables])


def _make_private(folder: Path) -> None:
    """Create `folder` and its missing parents for this user alone; existing ones keep their mode."""
    if not folder.parent.is_dir():
        _make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _read_text(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return ""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise ConfigError(f"{file}: line {line}, column {column}: is not UTF-8{UNCHANGED}") from error


def _write(file: Path, data: bytes) -> None:
    """Replace `file` atomically; it keeps its mode, a new one gets 0600."""
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    replace_file(file, data, mode)


def _dump(record: Record) -> bytes:
    return record.model_dump_json(indent=1).encode() + b"\n"


def _read_record(file: Path) -> Record:
    try:
        return Record.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return Record(keys=[], tables=[])
    except ValidationError as error:
        raise ConfigError(f"{file}: is damaged; remove it, and remove the agent's keys from {CONFIG_NAME}") from error
