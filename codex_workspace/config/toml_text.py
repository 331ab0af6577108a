"""Where things stand in a TOML text: every table header, key and value by its offsets.

tomlkit knows the values and keeps the layout, yet neither tells offsets nor edits every spelling in place (dotted keys
next to tables, inline tables, tables out of order). `codex_home` edits text by the offsets found here, so that all the
rest stays byte for byte. The text has to be valid TOML 1.0 (`tomllib` has read it); what is not is read wrongly.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

from codex_workspace.common.values import KeyPath


@dataclass(frozen=True, slots=True)
class Header:
    """A `[path]` line, or `[[path]]` if `array`. `start` to `end`: the whole line with its line break."""

    path: KeyPath
    array: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A `key = value`; `path` is its full path, `table` that of the table (or inline table) it is written in.

    start, end: the whole lines with the line break; of a member of an inline table, from its key to its value's end.
    key_start, value_start, value_end: the key's first and the value's own characters.
    braces: offset of the `{` that it stands behind, None on a line of its own.
    opens: offset of the `{` that its value begins with, None where the value is no inline table.
    in_array: it belongs to an array of tables (or hangs below one), where equal paths do not mean the same key.
    """

    path: KeyPath
    table: KeyPath
    start: int
    end: int
    key_start: int
    value_start: int
    value_end: int
    braces: int | None
    opens: int | None
    in_array: bool


@dataclass(frozen=True, slots=True)
class Comment:
    """A line that holds a comment only; `start` to `end` with its line break."""

    start: int
    end: int


Piece = Header | Pair | Comment

_BLANK = re.compile(r"[ \t]*")
_VOID = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\r\n]*[^,\]}#\r\n \t]")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})'  # up to two quotes more belong to the text
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'",
    re.DOTALL,
)


def scan(text: str) -> list[Piece]:
    """All headers, pairs (members of inline tables too, after the pair that holds them) and comment lines, in order."""
    return list(_Scanner(text).pieces())


class _Scanner:
    """One pass over one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.table: KeyPath = ()
        self.arrays: set[KeyPath] = set()

    def pieces(self) -> Iterator[Piece]:
        at = 0
        while at < len(self.text):
            begin = self._skip(_BLANK, at)
            match self.text[begin : begin + 1]:
                case "" | "\r" | "\n":
                    at = self._line_end(begin)
                case "#":
                    end = self._line_end(begin)
                    yield Comment(at, end)
                    at = end
                case "[":
                    header = self._header(at, begin)
                    yield header
                    at = header.end
                case _:
                    pairs = self._pair(at, begin)
                    yield from pairs
                    at = pairs[0].end

    def _header(self, start: int, bracket: int) -> Header:
        array = self.text.startswith("[[", bracket)
        path, after = self._key(bracket + (2 if array else 1))
        if array:
            self.arrays.add(path)
        self.table = path
        return Header(path, array, start, self._line_end(after))

    def _pair(self, start: int, begin: int) -> list[Pair]:
        key, after = self._key(begin)
        value = self._skip(_BLANK, after + 1)
        path = self.table + key
        end, members = self._value(value, path)
        opens = value if self.text[value] == "{" else None
        line = self._line_end(end)
        in_array = self._in_array(path)
        return [Pair(path, self.table, start, line, begin, value, end, None, opens, in_array), *members]

    def _value(self, at: int, path: KeyPath) -> tuple[int, list[Pair]]:
        """Where the value that begins at `at` ends, and the members in it; `path` is its own."""
        match self.text[at]:
            case "{":
                return self._inline_table(at, path)
            case "[":
                return self._list(at, path), []
            case "'" | '"':
                return self._skip(_STRING, at), []
            case _:
                return self._skip(_SCALAR, at), []

    def _inline_table(self, brace: int, path: KeyPath) -> tuple[int, list[Pair]]:
        members: list[Pair] = []
        at = self._skip(_BLANK, brace + 1)
        while self.text[at] != "}":
            key, after = self._key(at)
            value = self._skip(_BLANK, after + 1)
            end, inner = self._value(value, path + key)
            opens = value if self.text[value] == "{" else None
            in_array = self._in_array(path)
            members += [Pair(path + key, path, at, end, at, value, end, brace, opens, in_array), *inner]
            at = self._skip(_BLANK, end)
            if self.text[at] == ",":
                at = self._skip(_BLANK, at + 1)
        return at + 1, members

    def _list(self, bracket: int, path: KeyPath) -> int:
        at = self._skip(_VOID, bracket + 1)
        while self.text[at] != "]":
            end, _ = self._value(at, path)
            at = self._skip(_VOID, end)
            if self.text[at] == ",":
                at = self._skip(_VOID, at + 1)
        return at + 1

    def _key(self, at: int) -> tuple[KeyPath, int]:
        """The dotted key that begins near `at`, and the offset of the sign behind it (`=` or `]`)."""
        parts: list[str] = []
        while True:
            at = self._skip(_BLANK, at)
            end = self._skip(_STRING if self.text[at] in "\"'" else _BARE, at)
            parts.append(self._name(self.text[at:end]))
            at = self._skip(_BLANK, end)
            if self.text[at] != ".":
                return tuple(parts), at
            at += 1

    def _name(self, raw: str) -> str:
        if raw[0] not in "\"'":
            return raw
        [name] = tomllib.loads(f"{raw} = 0")
        return name

    def _in_array(self, path: KeyPath) -> bool:
        return any(path[:length] in self.arrays for length in range(1, len(path) + 1))

    def _skip(self, pattern: re.Pattern[str], at: int) -> int:
        found = pattern.match(self.text, at)
        return found.end() if found else at

    def _line_end(self, at: int) -> int:
        """The offset behind the line break that ends the line of `at`."""
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end + 1
