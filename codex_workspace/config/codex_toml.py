"""Sets the agent's keys in codex's config.toml and removes them again; everything else in the file is the operator's.

tomlkit edits the file and keeps the operator's keys, order and comments; tomllib checks the result before it replaces
the file. A comment marks each key of the agent, with a digest of its value, and the operator's value that it replaces.
If the operator changes the value, the key is the operator's.
"""

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import tomlkit
from tomlkit.container import Container, OutOfOrderTableProxy
from tomlkit.items import AoT, Item, Table

from codex_workspace.common.errors import ConfigError, ConfigLocation
from codex_workspace.common.files import read_config_file, replace_file
from codex_workspace.common.values import KeyPath, TomlValue
from codex_workspace.config.providers import ChosenProvider
from codex_workspace.config.settings import Settings

Managed = Mapping[KeyPath, TomlValue]
"""The agent's keys with their values."""

NOTHING: Final[Managed] = {}

CONFIG_NAME = "config.toml"

REQUEST_MAX_RETRIES = 2
STREAM_MAX_RETRIES = 2
"""With codex's own 4 and 5, a caller waits about 25 s if the model answers 500; with these a few seconds."""

COMMENT: Final = "# set by codex-workspace"
REPLACED: Final = " instead of "
UNCHANGED: Final = "; the file was not changed"
_BOM: Final = "\ufeff"
_MARK: Final = re.compile(rf"{COMMENT}(?: \((\w+)\))?(.*)")
"""Groups: the digest of the agent's value, which earlier versions do not write, and the rest of the comment."""


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


def edit(text: str, managed: Managed, file: str = CONFIG_NAME) -> str:
    """Return `text` with the keys of `managed`, and without the agent's other keys.

    A comment inside an array that the agent replaces is lost.

    Raises:
        ConfigError: `text` is not TOML, has a value for a table or the reverse, or cannot be edited without a change to
            the operator's keys.
    """
    content = _values(_parse(text, file))
    # TOML allows a byte order mark, and a last line without a line break; tomlkit's edits do not.
    bom, body = (_BOM, text[1:]) if text.startswith(_BOM) else ("", text)
    is_edited, document = False, tomlkit.document()
    replaced: Counter[str] = Counter()
    try:
        document = tomlkit.parse(body if body.endswith("\n") or not body else f"{body}\n")
        marked = dict(_marked(document))
        for path in marked.keys() - managed.keys():
            del content[path]
            content |= _restore(document, path, marked[path])
            is_edited = True
        for path, value in managed.items():
            theirs = content.get(path)
            if type(theirs) is not type(value) or theirs != value:
                if isinstance(theirs, str | list):
                    replaced += _comments(_text(document, path))
                item = _set(document, path, value, ConfigLocation(file))
                _mark(item, value, marked[path] if path in marked else _instead_of(theirs, item.trivia.comment))
                content[path] = value
                is_edited = True
        edited = bom + tomlkit.dumps(document)
        if (
            _values(tomllib.loads(edited.removeprefix(_BOM))) != content
            or _comments(text) - _comments(edited) - replaced
        ):
            raise ValueError("tomlkit has changed other keys or comments")
    except ConfigError:
        raise
    except Exception as error:  # tomlkit raises many kinds for what it cannot edit
        raise _not_editable(document, managed, ConfigLocation(file)) from error
    return edited if is_edited else text


def _not_editable(document: Container, managed: Managed, location: ConfigLocation) -> ConfigError:
    """Return the error for a file that tomlkit cannot edit; the usual cause is dotted keys beside new tables."""
    tables = {path[0] for path in managed if len(path) > 2}
    for key, item in document.body:
        if key is not None and key.is_dotted() and key.key in tables:
            path = next(iter(_values({key.key: item.unwrap()})))
            table = f"[{_dotted(path[:-1])}]"
            problem = f"must be the key {_dotted(path[-1:])} in a table that begins with {table}{UNCHANGED}"
            return location.at(_dotted(path)).error(problem)
    return location.error(
        f"cannot be edited without losing keys or comments; write each table once, as [table]{UNCHANGED}"
    )


def _parse(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.removeprefix(_BOM))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        problem = re.sub(r"(.*) \(at (line \d+, column \d+)\)", r"\2: \1", " ".join(str(error).split()))
        raise ConfigError(f"{file}: {problem}{UNCHANGED}") from error


def _values(content: Mapping[str, object], above: KeyPath = ()) -> dict[KeyPath, object]:
    """Return all values with their paths; tables without values are left out."""
    found: dict[KeyPath, object] = {}
    for key, value in content.items():
        found |= _values(value, (*above, key)) if isinstance(value, dict) else {(*above, key): value}
    return found


def _comments(text: str) -> Counter[str]:
    """Return the lines that hold a comment alone, and the lines of strings that look like one."""
    return Counter(stripped for line in text.splitlines() if (stripped := line.strip()).startswith("#"))


def _text(document: Mapping[str, Any], path: KeyPath) -> str:
    """Return the string or array at `path` as it is in the file, with the comment after it."""
    for key in path[:-1]:
        document = document[key]
    item = document[path[-1]]
    return f"{item.as_string()}{item.trivia.comment_ws}{item.trivia.comment}"


def _marked(container: Container, above: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Return the agent's keys with their comments, each without its mark."""
    for key, item in container.body:
        if key is not None and isinstance(item, Table):
            yield from _marked(item.value, (*above, key.key))
        elif key is not None:
            mark = _MARK.fullmatch(item.trivia.comment)
            if mark and mark[1] in (None, _digest(item.unwrap())):
                yield (*above, key.key), mark[2]


def _mark(item: Item, value: TomlValue, rest: str) -> None:
    item.comment(f"{COMMENT} ({_digest(value)}){rest}".rstrip())


def _instead_of(theirs: object, comment: str) -> str:
    """Return what the agent's comment says of the operator's value and comment."""
    return f"{'' if theirs is None else REPLACED + tomlkit.item(theirs).as_string()} {comment}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:8]


def _set(document: MutableMapping[str, Any], path: KeyPath, value: TomlValue, location: ConfigLocation) -> Item:
    """Set a value and return its item, with the comment of the value that it replaces."""
    table = document
    for length, key in enumerate(path[:-1], start=1):
        if key not in table:
            table[key] = tomlkit.table()
        table = table[key]
        if not isinstance(table, Table | OutOfOrderTableProxy):
            name = _dotted(path[:length])
            raise location.at(name).error(
                f"must be a table that begins with [{name}], not a value, a list or {{…}}{UNCHANGED}"
            )
    if isinstance(table.get(path[-1]), dict | AoT):
        name = _dotted(path)
        raise location.at(name).error(f"must be a value, but is a table; remove it, or write {name} = …{UNCHANGED}")
    item = tomlkit.item(value)
    table[path[-1]] = item
    return item


def _dotted(path: KeyPath) -> str:
    return ".".join(tomlkit.key(part).as_string() for part in path)


def _restore(document: MutableMapping[str, Any], path: KeyPath, comment: str) -> dict[KeyPath, object]:
    """Put back the operator's value that `comment` holds; without one, remove the key, and tables that are empty then.

    Returns: the value with its path.
    """
    tables = [document]
    for key in path[:-1]:
        tables.append(tables[-1][key])
    theirs = comment.removeprefix(REPLACED)
    if theirs != comment:
        ((_, item),) = tomlkit.parse(f"value = {theirs}").body
        comment = item.trivia.comment
        tables[-1][path[-1]] = item
        item.trivia.comment = comment
        return {path: tomllib.loads(f"value = {theirs}")["value"]}
    del tables[-1][path[-1]]
    for length in range(len(path) - 1, 0, -1):
        table = tables[length]
        if isinstance(table, Table) and not table and "#" not in table.as_string() + table.trivia.comment:
            del tables[length - 1][path[length - 1]]
    return {}


# --- Files


def prepare_codex_home(settings: Settings, provider: ChosenProvider, further: Managed = NOTHING) -> None:
    """Create CODEX_HOME and update its config.toml with `managed_config` and `further`.

    Raises:
        ConfigError: as `update_config`.
    """
    update_config(settings.codex_home, {**managed_config(settings, provider), **further})


def create_codex_home(codex_home: Path) -> None:
    """Create CODEX_HOME and its missing parents for this user alone; existing ones keep their mode.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        _make_private(codex_home)
    except OSError as error:
        raise _unusable(codex_home, error) from error


def update_config(codex_home: Path, managed: Managed) -> None:
    """Make `managed` the agent's keys in `codex_home`'s config.toml; write nothing if nothing changes.

    Raises:
        ConfigError: the folder or the file cannot be read or written, or config.toml cannot be edited.
    """
    try:
        _make_private(codex_home)
        # Mounted configuration is often a symbolic link, which must stay one.
        file = (codex_home / CONFIG_NAME).resolve()
        text = read_config_file(file).decode() if file.exists() else ""
        edited = edit(text, managed, str(file))
        if edited != text:
            replace_file(file, edited.encode(), file.stat().st_mode & 0o777 if file.exists() else 0o600)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start + 1} is not UTF-8{UNCHANGED}") from error
    except OSError as error:
        raise _unusable(codex_home, error) from error


def _unusable(codex_home: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{error.filename or codex_home}: cannot be used as part of CODEX_HOME ({error.strerror})")


def _make_private(folder: Path) -> None:
    if not folder.parent.is_dir():
        _make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
