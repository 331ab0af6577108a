"""CODEX_HOME as codex needs it: the folder, and our keys merged into its config.toml.

The file belongs to the operator. `merge` puts our values in where the operator's own spelling wants them and returns a
`Record` of what it did; `unmerge` takes exactly that out again from whatever the file has become meanwhile, so what the
operator (or codex itself) wrote in between stays. A line or value of ours that somebody changed is theirs from then on.
The record is kept in a file of its own beside config.toml. Text is cut by `toml_text`; tomlkit spells keys and values.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import tomlkit

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import replace_file
from codex_workspace.common.values import KeyPath, TomlValue
from codex_workspace.config.providers import ChosenProvider
from codex_workspace.config.settings import Settings
from codex_workspace.config.toml_text import Comment, Header, Pair, Piece, scan

Managed = Mapping[KeyPath, TomlValue]
"""Our keys by full path, with their values."""

NOTHING: Final[Managed] = {}

CONFIG_NAME = "config.toml"
RECORD_NAME = ".codex-workspace.json"

REQUEST_MAX_RETRIES = 2
STREAM_MAX_RETRIES = 2
"""Codex's own 4 and 5 keep a caller waiting for about 25 s when the model answers 500; these for a few seconds."""

_TOP_BEGIN = "# Set by codex-workspace at every start; to change these, change config.yaml."
_TOP_END = "# End of what codex-workspace set."
_TABLE_MARK = "# Set by codex-workspace at every start."
_LENT_BEGIN = "# Set while a run of codex-workspace lasts, and gone after it."
_LENT_MARK = "# Set while a run of codex-workspace lasts."
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Inserted:
    """A pair that we added; `text` is the line without its break, or the member of an inline table."""

    path: KeyPath
    text: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """An operator's value that ours stands in for; both as they are spelled."""

    path: KeyPath
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Record:
    """What one `merge` did. `ended_with`: the operator's last line, where it had no line break until we gave it one."""

    inserted: tuple[Inserted, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    tables: tuple[KeyPath, ...] = ()
    top_marks: bool = False
    ended_with: str | None = None


# ── What we want to stand there ───────────────────────────────────────────────────────────────────────────────────────


def managed_config(settings: Settings, provider: ChosenProvider) -> Managed:
    """Our keys of config.toml. Holds no secret: codex is told the API key over its pipe.

    What this agent's promises rest on (no turns of codex's own making, no endless reconnects) is not left to a file:
    it goes on codex's command line.
    """
    codex = settings.config.codex
    values: dict[KeyPath, TomlValue] = {
        ("model",): provider.model,
        ("model_provider",): provider.slug,
        ("sandbox_mode",): "danger-full-access" if codex.sandbox == "container" else codex.sandbox,
        ("web_search",): codex.web_search,
        # Without these, commands see every variable that codex has, those for MCP servers included.
        ("shell_environment_policy", "inherit"): "core",
        ("shell_environment_policy", "ignore_default_excludes"): False,
    }
    return values | _optional(settings) | _provider_table(provider) | settings.mcp.managed


def _optional(settings: Settings) -> dict[KeyPath, TomlValue]:
    codex = settings.config.codex
    values: dict[KeyPath, TomlValue] = {}
    # Codex 0.163 does not start with a file that says untrusted, and takes it for a thread, where it is said too.
    if codex.approval_policy != "untrusted":
        values["approval_policy",] = codex.approval_policy
    if codex.reasoning_effort is not None:
        values["model_reasoning_effort",] = codex.reasoning_effort
    if codex.sandbox == "workspace-write":
        values["sandbox_workspace_write", "network_access"] = codex.network_access
    if settings.writable_folders:
        values["sandbox_workspace_write", "writable_roots"] = [str(folder) for folder in settings.writable_folders]
    return values


def _provider_table(provider: ChosenProvider) -> dict[KeyPath, TomlValue]:
    table: dict[str, TomlValue] = {"name": provider.name, "base_url": provider.base_url, "wire_api": "responses"}
    if provider.credential is not None:
        # So a provider uses what codex was told by `account/login/start`, whoever's key it is.
        table["requires_openai_auth"] = True
    table |= {"request_max_retries": REQUEST_MAX_RETRIES, "stream_max_retries": STREAM_MAX_RETRIES}
    return {("model_providers", provider.slug, key): value for key, value in table.items()}


# ── Merge ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def merge(text: str, managed: Managed, file: str = CONFIG_NAME, *, lends: bool = False) -> tuple[str, Record]:
    """`text` with `managed` in it, and the record for `unmerge`. `file` names it in errors.

    `lends` says in the text that they stand there for a while only.

    Raises:
        ConfigError: `text` is not TOML, or gives one of our keys another shape (a table for a value, or the reverse).
    """
    check_toml(text, file)
    if not managed:
        return text, Record()
    edit = _Edit(text, file, lends=lends)
    missing = [path for path, value in managed.items() if not edit.replace(path, value)]
    for table in dict.fromkeys(path[:-1] for path in missing if len(path) > 1):
        # Backwards, as each goes in right behind the table's first line: so they end up in `managed`'s order.
        for path in reversed([path for path in missing if path[:-1] == table]):
            edit.insert(path, managed[path])
    edit.insert_top({path: managed[path] for path in missing if len(path) == 1})
    return edit.result()


def check_toml(text: str, file: str) -> None:
    """Raises:
    ConfigError: `text` is not TOML 1.0; with line and column, counted from 1.
    """
    try:
        tomllib.loads(text.removeprefix(_BOM))
    except tomllib.TOMLDecodeError as error:
        problem = str(error)
        if found := re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", problem, re.DOTALL):
            problem = f"line {found[2]}, column {found[3]}: {found[1]}"
        else:
            last = text.split("\n")
            problem = f"line {len(last)}, column {len(last[-1]) + 1}: {problem}"
        raise ConfigError(f"{file}: {' '.join(problem.split())}; the file is left as it is") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: is nested too deeply; the file is left as it is") from error


@dataclass(slots=True)
class _Edit:
    """A TOML text while our keys go into it, one by one, and the record of that."""

    text: str
    file: str
    bom: str = ""
    newline: str = "\n"
    ended_with: str | None = None
    inserted: list[Inserted] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    tables: list[KeyPath] = field(default_factory=list)
    top_marks: bool = False
    lends: bool = False

    def __post_init__(self) -> None:
        self.bom, self.text = _split_bom(self.text)
        first = self.text.find("\n")
        self.newline = "\r\n" if first > 0 and self.text[first - 1] == "\r" else "\n"
        if self.text and not self.text.endswith("\n"):
            self.ended_with = self.text.rpartition("\n")[2]
            self.text += self.newline

    def result(self) -> tuple[str, Record]:
        record = Record(tuple(self.inserted), tuple(self.replaced), tuple(self.tables), self.top_marks, self.ended_with)
        return self.bom + self.text, record

    def replace(self, path: KeyPath, value: TomlValue) -> bool:
        """Put `value` where the operator has given `path` a value; False where nobody has."""
        for piece in scan(self.text):
            if isinstance(piece, Pair) and piece.in_array:
                continue
            if isinstance(piece, Pair) and piece.path == path:
                ours, theirs = _spell(value), self.text[piece.value_start : piece.value_end]
                self.replaced.append(Replaced(path, ours, theirs))
                self._put(piece.value_start, piece.value_end, ours)
                return True
            if isinstance(piece, Header | Pair) and piece.path[: len(path)] == path:
                raise self._shape(path, "must be a value, but is a table")
        return False

    def insert(self, path: KeyPath, value: TomlValue) -> None:
        """Add `path`, which is missing, to its table: in the spelling that the operator began it in, if any."""
        pieces = scan(self.text)
        for length in range(len(path) - 1, 0, -1):
            prefix = path[:length]
            for piece in pieces:
                if self._insert_at(piece, prefix, path, value):
                    return
        table = path[:-1]
        self.tables.append(table)
        head = self.newline.join((_LENT_MARK if self.lends else _TABLE_MARK, f"[{_spell_key(table)}]", ""))
        self.text += head
        self._insert_line(len(self.text), path[-1:], path, value)

    def _insert_at(self, piece: Piece, prefix: KeyPath, path: KeyPath, value: TomlValue) -> bool:
        """Add `path` at `piece` if that is what defines the table `prefix`."""
        match piece:
            case Header(found, array=True) if found == prefix:
                raise self._shape(prefix, "must be a table, but is an array of tables")
            case Header(found, end=end) if found == prefix and len(path) == len(prefix) + 1:
                self._insert_line(end, path[-1:], path, value)
            case Pair(found, opens=None, in_array=False) if found == prefix:
                raise self._shape(prefix, "must be a table, but is a value")
            case Pair(found, opens=int(brace), in_array=False) if found == prefix:
                self._insert_member(brace, path[len(prefix) :], path, value)
            case Pair(found, table, in_array=False) if _is_dotted(piece, prefix):
                if piece.braces is None:
                    self._insert_line(piece.end, path[len(table) :], path, value)
                else:
                    self._insert_member(piece.braces, path[len(table) :], path, value)
            case _:
                return False
        return True

    def insert_top(self, values: Managed) -> None:
        """Add top-level keys at the very beginning, the one place that is in no table."""
        if not values:
            return
        self.top_marks = True
        lines = [f"{_spell_key(path)} = {_spell(value)}" for path, value in values.items()]
        self.inserted += [Inserted(path, line) for path, line in zip(values, lines, strict=True)]
        begin = _LENT_BEGIN if self.lends else _TOP_BEGIN
        self._put(0, 0, self.newline.join((begin, *lines, _TOP_END, "")))

    def _insert_line(self, at: int, key: KeyPath, path: KeyPath, value: TomlValue) -> None:
        line = f"{_spell_key(key)} = {_spell(value)}"
        self.inserted.append(Inserted(path, line))
        self._put(at, at, line + self.newline)

    def _insert_member(self, brace: int, key: KeyPath, path: KeyPath, value: TomlValue) -> None:
        member = f"{_spell_key(key)} = {_spell(value)}"
        self.inserted.append(Inserted(path, member))
        comma = "" if re.match(r"[ \t]*\}", self.text[brace + 1 :]) else ","
        self._put(brace + 1, brace + 1, f" {member}{comma}")

    def _put(self, start: int, end: int, new: str) -> None:
        self.text = self.text[:start] + new + self.text[end:]

    def _shape(self, path: KeyPath, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}: {_spell_key(path)}: {problem}; the file is left as it is")


def _is_dotted(pair: Pair, prefix: KeyPath) -> bool:
    """Whether the pair's own dotted key defines the table `prefix`; nothing but dotted keys may add to that one."""
    return len(pair.table) < len(prefix) < len(pair.path) and pair.path[: len(prefix)] == prefix


def _spell(value: TomlValue) -> str:
    return tomlkit.item(value).as_string()


def _spell_key(path: KeyPath) -> str:
    return tomlkit.key(list(path)).as_string() if len(path) > 1 else tomlkit.key(path[0]).as_string()


def _split_bom(text: str) -> tuple[str, str]:
    return (_BOM, text[1:]) if text.startswith(_BOM) else ("", text)


# ── Unmerge ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def unmerge(text: str, record: Record, file: str = CONFIG_NAME) -> str:
    """`text` without what `record` says we put there, and with what that stood in for; the rest byte for byte.

    Raises:
        ConfigError: `text` is not TOML.
    """
    check_toml(text, file)
    bom, text = _split_bom(text)
    for replaced in record.replaced:
        text = _restore(text, replaced)
    for inserted in record.inserted:
        text = _take_out(text, inserted)
    for table in record.tables:
        text = _take_table(text, table)
    if record.top_marks:
        text = _take_comment(_take_comment(text, _TOP_BEGIN, _LENT_BEGIN), _TOP_END)
    if record.ended_with is not None and text.endswith("\n"):
        stripped = text[:-2] if text.endswith("\r\n") else text[:-1]
        text = stripped if stripped.rpartition("\n")[2] == record.ended_with else text
    return bom + text


def _restore(text: str, replaced: Replaced) -> str:
    for piece in scan(text):
        if isinstance(piece, Pair) and piece.path == replaced.path and not piece.in_array:
            if text[piece.value_start : piece.value_end] == replaced.ours:
                return text[: piece.value_start] + replaced.theirs + text[piece.value_end :]
            return text
    return text


def _take_out(text: str, inserted: Inserted) -> str:
    for piece in scan(text):
        if not isinstance(piece, Pair) or piece.path != inserted.path or piece.in_array:
            continue
        if text[piece.start : piece.end].rstrip("\r\n") != inserted.text:
            continue
        start, end = (piece.start, piece.end) if piece.braces is None else _member_span(text, piece)
        return text[:start] + text[end:]
    return text


def _member_span(text: str, member: Pair) -> tuple[int, int]:
    """What to cut so that the inline table stays valid: the blank that we put before it, and one of the commas."""
    start = member.start - 1 if text[member.start - 1] == " " else member.start
    comma = re.compile(r"[ \t]*,").match(text, member.end)
    if comma:
        return start, comma.end()
    before = re.compile(r",[ \t]*$").search(text, member.braces or 0, member.start)
    return (before.start() if before else start), member.end


def _take_table(text: str, table: KeyPath) -> str:
    """Remove the mark above our header of `table`, and the header too unless the table holds anything by now."""
    pieces = scan(text)
    for index, piece in enumerate(pieces):
        if not isinstance(piece, Header) or piece.path != table or piece.array:
            continue
        following = next((each for each in pieces[index + 1 :] if not isinstance(each, Comment)), None)
        if not isinstance(following, Pair):
            text = text[: piece.start] + text[piece.end :]
        marks = (_TABLE_MARK, _LENT_MARK)
        mark = next((each for each in reversed(pieces[:index]) if _is_comment(text, each, *marks)), None)
        return text[: mark.start] + text[mark.end :] if mark else text
    return text


def _take_comment(text: str, *lines: str) -> str:
    found = next((piece for piece in scan(text) if _is_comment(text, piece, *lines)), None)
    return text[: found.start] + text[found.end :] if found else text


def _is_comment(text: str, piece: Piece, *lines: str) -> bool:
    return isinstance(piece, Comment) and text[piece.start : piece.end].rstrip("\r\n") in lines


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def prepare_codex_home(settings: Settings, provider: ChosenProvider, further: Managed = NOTHING) -> None:
    """Make CODEX_HOME and bring its config.toml up to date; writes nothing where nothing changes.

    `further`: keys beside those of `managed_config`.

    Raises:
        ConfigError: the folder or a file in it cannot be read or written, or config.toml cannot be merged.
    """
    update_config(settings.codex_home, {**managed_config(settings, provider), **further})


def update_config(codex_home: Path, managed: Managed) -> None:
    """Let exactly `managed` be ours in `codex_home`'s config.toml; an empty one takes everything of ours out.

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
    # Mounted configuration is often a symbolic link; replacing the link would part it from its source.
    file, notes = (codex_home / CONFIG_NAME).resolve(), codex_home / RECORD_NAME
    found = _read_text(file)
    records = _read_records(notes)
    text = found
    for record in reversed(records):
        text = unmerge(text, record, str(file))
    text, record = merge(text, managed, str(file))
    if text != found:
        # Both records until the text is there: whichever of the two writes comes last, all of ours can be taken out.
        _write(notes, _dump_records([*records, record]))
        _write(file, text.encode())
    wanted = [record] if managed else []
    if records != wanted:
        _write(notes, _dump_records(wanted))


def _make_private(folder: Path) -> None:
    """Make `folder` and the parents that are missing, for this user alone; what is there keeps its mode."""
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
        raise ConfigError(f"{file}: line {line}, column {column}: is not UTF-8; the file is left as it is") from error


def _write(file: Path, data: bytes) -> None:
    """Replace `file` in one step; it keeps its mode, a new one is 0600."""
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    replace_file(file, data, mode)


def _dump_records(records: Sequence[Record]) -> bytes:
    return json.dumps({"version": 1, "records": [asdict(record) for record in records]}, indent=1).encode() + b"\n"


def _read_records(file: Path) -> list[Record]:
    """The records, oldest first: one, or two after a write that did not come to its end.

    Raises:
        ConfigError: it is not what `_dump_records` writes.
    """
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return []
    try:
        return [read_record(entry) for entry in json.loads(raw)["records"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{file}: is damaged; remove it, and take what codex-workspace set out of {CONFIG_NAME}"
        ) from error


def read_record(entry: object) -> Record:
    """Return the record that `asdict` and JSON have made this entry of.

    Raises:
        ValueError: it is none.
    """
    match entry:
        case {
            "inserted": [*inserted],
            "replaced": [*replaced],
            "tables": [*tables],
            "top_marks": bool(top_marks),
            "ended_with": str() | None as ended_with,
        }:
            return Record(
                inserted=tuple(_inserted(each) for each in inserted),
                replaced=tuple(_replaced(each) for each in replaced),
                tables=tuple(_path(each) for each in tables),
                top_marks=top_marks,
                ended_with=ended_with,
            )
        case _:
            raise ValueError("not a record")


def _inserted(entry: object) -> Inserted:
    match entry:
        case {"path": path, "text": str(text)}:
            return Inserted(_path(path), text)
        case _:
            raise ValueError("not an insertion")


def _replaced(entry: object) -> Replaced:
    match entry:
        case {"path": path, "ours": str(ours), "theirs": str(theirs)}:
            return Replaced(_path(path), ours, theirs)
        case _:
            raise ValueError("not a replacement")


def _path(entry: object) -> KeyPath:
    if not isinstance(entry, list) or not entry or not all(isinstance(part, str) for part in entry):
        raise ValueError("not a path")
    return tuple(entry)
