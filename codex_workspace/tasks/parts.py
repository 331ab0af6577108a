"""Converts a message's parts into turn input: text, images, and attachments for the workspace.

Pure: `request` fetches images by URL (`image_urls`), and `files` writes the attachments. In the order of the
parts, a text becomes text; an image (bytes or a `data:` URL) an image; a text file or data (as JSON) text if it is
small, else an attachment; any other file an attachment; any other URL a link in the text.
"""

import base64
import binascii
import json
import mimetypes
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Final, NoReturn
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from a2a.types import Part
from google.protobuf.struct_pb2 import Value

from codex_workspace.common.errors import InputRefused
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.settings import LimitsConfig
from codex_workspace.runtimes.backend import TurnInput, input_texts, text_input

IMAGE_MODES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Images that codex shows to the model."""

TEXT_MODES: Final = (
    *("text/plain", "application/json", "text/markdown", "text/csv", "text/tab-separated-values", "text/html"),
    *("text/css", "text/javascript", "text/xml", "text/yaml", "text/x-diff", "text/x-patch", "text/x-python"),
    *("text/prs.fallenstein.rst", "text/vnd.trolltech.linguist", "text/x-bibtex", "text/x-c++hdr", "text/x-c++src"),
    *("text/x-chdr", "text/x-csh", "text/x-csrc", "text/x-dsrc", "text/x-haskell", "text/x-java"),
    *("text/x-literate-haskell", "text/x-pascal", "text/x-perl", "text/x-scala", "text/x-sh", "text/x-tcl"),
    *("text/x-tex", "application/javascript", "application/rls-services+xml", "application/sql", "application/toml"),
    *("application/typescript", "application/vnd.dart", "application/x-csh", "application/x-httpd-php"),
    *("application/x-ipynb+json", "application/x-javascript", "application/x-ndjson", "application/x-perl"),
    *("application/x-ruby", "application/x-sh", "application/x-tcl", "application/x-tex", "application/x-yaml"),
    *("application/xml", "application/yaml", "image/svg+xml"),
)
"""Types of UTF-8 text files, as mime tables derive them from the names of source files; so is every other `text/*`."""

AMBIGUOUS_MODES: Final = (
    *("application/vnd.wolfram.mathematica.package", "application/x-msdos-program", "video/mp2t"),
)
"""Types that mime tables give to source files (.m, .bat, .ts): text if the content is UTF-8, else a file."""

FILE_MODES: Final = (
    *("application/octet-stream", "application/pdf", "application/zip", "application/gzip", "application/x-tar"),
    *("application/rtf", "application/vnd.oasis.opendocument.spreadsheet", "application/vnd.oasis.opendocument.text"),
    "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    *("image/bmp", "image/tiff"),
)
"""Types that are always attachments."""

INPUT_MODES: Final = (*TEXT_MODES, *IMAGE_MODES, *AMBIGUOUS_MODES, *FILE_MODES)
"""All accepted types beside the other text types, as listed in the agent card."""

_TEXT: Final = re.compile(r"text/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")

_SAME: Final = {
    "application/x-gzip": "application/gzip",
    "application/x-zip-compressed": "application/zip",
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
}
"""Unregistered names of types, and the registered ones."""

MAX_NAME_CHARS: Final = 100
MAX_NAME_BYTES: Final = 200
"""File systems allow 255."""

MAX_URL_CHARS: Final = 8192

MAX_EXACT: Final = 2**53
"""Up to here a float represents every whole number exactly."""

_BY_SUFFIX: Final = {
    ".csv": "text/csv",
    ".diff": "text/x-diff",
    ".js": "text/javascript",
    ".jsonl": "application/x-ndjson",
    ".md": "text/markdown",
    ".mjs": "text/javascript",
    ".ndjson": "application/x-ndjson",
    ".patch": "text/x-diff",
    ".sql": "application/sql",
    ".svg": "image/svg+xml",
    ".toml": "application/toml",
    ".ts": "text/plain",
    ".tsv": "text/tab-separated-values",
    ".xml": "application/xml",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}
"""Overrides Python's table where it differs between versions or is wrong for source files (`.ts`)."""

_TYPES: Final = mimetypes.MimeTypes()
"""Python's table without the system's mime files."""

_SUFFIXES: Final = {media_type: suffix for suffix, media_type in _BY_SUFFIX.items()} | {
    "application/json": ".json",
    "application/pdf": ".pdf",
    "application/zip": ".zip",
    "text/csv": ".csv",
    "text/html": ".html",
    "text/javascript": ".js",
    "text/plain": ".txt",
    "text/x-python": ".py",
}


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of a message. `name` is one component of a path, unique in its message."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class MessageContent:
    """A message as items of codex's `turn/start` (texts and images), and the attachments to write first."""

    items: list[JsonObject]
    attachments: list[Attachment]


def read_parts(parts: Sequence[Part], limits: LimitsConfig) -> MessageContent:
    """Return the content of a message's parts.

    Raises:
        InputRefused: a part is not accepted; the sentence names the part, the problem and what is accepted.
    """
    if len(parts) > limits.max_parts:
        raise InputRefused(f"The message has {len(parts)} parts; at most {limits.max_parts} are accepted.")
    reader = _Reader(limits)
    for number, part in enumerate(parts, 1):
        reader.read(_Place(number, part.filename), part)
    return reader.done()


def check_input(items: TurnInput, max_chars: int) -> None:
    """Raise InputRefused if a turn's input is empty, or has more than `max_chars` characters of text."""
    texts = input_texts(items)
    if not any(text.strip() for text in texts) and len(texts) == len(items):
        raise InputRefused("The message has no text.")
    chars = sum(len(text) for text in texts)
    if chars > max_chars:
        raise InputRefused(f"The message has {chars} characters; at most {max_chars} are accepted.")


def image_urls(parts: Sequence[Part]) -> dict[int, str]:
    """Return the URLs of the parts that are images by URL, by their index."""
    return {
        number: part.url
        for number, part in enumerate(parts)
        if part.WhichOneof("content") == "url" and part.url[:5].lower() != "data:" and _image_by_url(part)
    }


def _image_by_url(part: Part) -> bool:
    named = media_type_by_name(clean_name(part.filename) or clean_name(re.split(r"[?#]", part.url)[0]))
    return (media_type_of(part.media_type) or named) in IMAGE_MODES


@dataclass(frozen=True, slots=True)
class _Place:
    """A part's number and file name, for error messages."""

    number: int
    given_name: str

    def refuse(self, what: str) -> NoReturn:
        name = clean_name(self.given_name)
        raise InputRefused(f"Part {self.number}{f' ({name})' if name else ''} {what}")


@dataclass(slots=True)
class _Reader:
    limits: LimitsConfig
    items: list[JsonObject] = field(default_factory=list)
    attachments: list[Attachment] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    total_bytes: int = 0

    def read(self, place: _Place, part: Part) -> None:
        declared = media_type_of(part.media_type)
        if declared and not is_taken(declared):
            place.refuse(f"has the media type {_shown(declared)}, which is not accepted. {_taken()}")
        match part.WhichOneof("content"):
            case "text":
                self.text(place, declared, part.text)
            case "data":
                shown = json.dumps(_plain(place, part.data), ensure_ascii=False, indent=2, sort_keys=True)
                self.text_file(place, declared or "application/json", shown.encode())
            case "raw":
                self.file(place, declared, part.raw)
            case "url":
                self.url(place, declared, part.url)
            case _:
                place.refuse("is empty: it has neither text nor raw nor url nor data.")

    def done(self) -> MessageContent:
        """Return the content, with adjacent texts joined."""
        items: list[JsonObject] = []
        for kind, group in groupby(self.items, itemgetter("type")):
            adjacent = list(group)
            items += text_input("\n".join(input_texts(adjacent))) if kind == "text" else adjacent
        return MessageContent(items, self.attachments)

    def text(self, place: _Place, declared: str, text: str) -> None:
        if declared and not is_text_type(declared) and declared not in AMBIGUOUS_MODES:
            place.refuse(f"is text, but its media type is {declared}; send such content as raw.")
        if place.given_name:
            data = text.encode()
            self.text_file(place, declared or _taken_type(place.given_name, data), data)
        else:
            self.items += text_input(text)

    def file(self, place: _Place, declared: str, data: bytes) -> None:
        media_type = declared or _taken_type(place.given_name, data)
        if media_type in IMAGE_MODES:
            self.image(place, media_type, data)
        elif media_type in AMBIGUOUS_MODES and _is_text(data):
            self.text_file(place, media_type, data)
        elif is_text_type(media_type):
            if not _is_text(data):
                place.refuse(
                    f"has the media type {media_type}, but its bytes are not UTF-8 text; "
                    "send it in UTF-8, or as application/octet-stream."
                )
            self.text_file(place, media_type, data)
        else:
            self.count(place, data)
            self.attach(place, media_type, data)

    def image(self, place: _Place, media_type: str, data: bytes) -> None:
        found = image_type(data)
        if found != media_type:
            place.refuse(
                f"has the media type {media_type}, but its bytes are {found or 'not a known image format'}. "
                f"Accepted images: {', '.join(IMAGE_MODES)}."
            )
        self.count(place, data)
        if place.given_name:
            self.items += text_input(f"Image {self.name(place, media_type)}:")
        url = f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"
        self.items.append({"type": "image", "url": url})

    def text_file(self, place: _Place, media_type: str, data: bytes) -> None:
        self.count(place, data)
        if len(data) > self.limits.max_inline_bytes:
            self.attach(place, media_type, data)
            return
        text = data.decode("utf-8-sig")
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
        ended = text if text.endswith("\n") or not text else f"{text}\n"
        self.items += text_input(f"File {self.name(place, media_type)} ({media_type}):\n{fence}\n{ended}{fence}")

    def url(self, place: _Place, declared: str, url: str) -> None:
        if url[:5].lower() == "data:":
            media_type, data = _data_of(place, url)
            self.file(place, declared or media_type, data)
            return
        name = clean_name(place.given_name) or clean_name(_last_of(place, url))
        media_type = declared or media_type_by_name(name) or ""
        if media_type in IMAGE_MODES:
            place.refuse(
                "is an image by URL, which codex does not accept; send its bytes (raw), a data: URL, "
                "or the URL in the text."
            )
        about = " ".join(filter(None, (name, f"({media_type})" if media_type else "")))
        self.items += text_input(f"Linked file {about}: <{url}>" if about else f"Linked file: <{url}>")

    def attach(self, place: _Place, media_type: str, data: bytes) -> None:
        self.attachments.append(Attachment(self.name(place, media_type), media_type, data))

    def count(self, place: _Place, data: bytes) -> None:
        limits = self.limits
        if len(data) > limits.max_file_bytes:
            place.refuse(f"has {len(data)} bytes; a file may have at most {limits.max_file_bytes}.")
        self.total_bytes += len(data)
        if self.total_bytes > limits.max_files_bytes:
            place.refuse(f"exceeds the limit of {limits.max_files_bytes} bytes for all files of a message.")

    def name(self, place: _Place, media_type: str) -> str:
        """Return a file name that is unique in the message, ignoring case."""
        wanted = clean_name(place.given_name) or f"part-{place.number}{_suffix(media_type)}"
        name, number = wanted, 1
        while name.casefold() in self.names:
            number += 1
            path = PurePosixPath(wanted)
            name = _fitted(path.stem, f"-{number}{path.suffix}")
        self.names.add(name.casefold())
        return name


def clean_name(given: str) -> str:
    """Return a safe file name from the last component of `given`; "" if nothing is left.

    No control or format characters, no leading dots, at most `MAX_NAME_CHARS` characters and `MAX_NAME_BYTES` bytes.
    """
    last = re.split(r"[/\\]", given)[-1]
    plain = "".join(char for char in last if unicodedata.category(char)[0] != "C" and char not in "`<>\u2028\u2029")
    name = plain.strip().lstrip(".").strip()
    path = PurePosixPath(name)
    return _fitted(path.stem, path.suffix) if name else ""


def media_type_of(given: str) -> str:
    """Return a media type in lower case, without parameters, under its registered name."""
    named = given.partition(";")[0].strip().lower()
    return _SAME.get(named, named)


def is_taken(media_type: str) -> bool:
    """Return whether parts of this media type (as from `media_type_of`) are accepted."""
    return media_type in INPUT_MODES or is_text_type(media_type)


def is_text_type(media_type: str) -> bool:
    """Return whether files of this media type (as from `media_type_of`) are text."""
    return media_type in TEXT_MODES or _TEXT.fullmatch(media_type) is not None


def media_type_by_name(name: str) -> str | None:
    """Return the media type of a file name's suffix, None if it is unknown."""
    known = _BY_SUFFIX.get(PurePosixPath(name).suffix.lower())
    if known is not None:
        return known
    guessed, encoding = _TYPES.guess_type(f"/{name}")
    if encoding is None:
        return guessed
    return "application/gzip" if encoding == "gzip" else "application/octet-stream"


def image_type(data: bytes) -> str | None:
    """Return which of `IMAGE_MODES` the bytes are by their first bytes, or None."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def guess_media_type(name: str, data: bytes) -> str:
    """Return a file's media type by its first bytes, then its name, then whether it is UTF-8 text."""
    found = image_type(data)
    if found is not None:
        return found
    is_text = _is_text(data)
    named = media_type_by_name(name)
    if named is None or named in IMAGE_MODES:
        return "text/plain" if is_text else "application/octet-stream"
    if is_text_type(named) and not is_text:
        return "application/octet-stream"
    return named


def _taken_type(name: str, data: bytes) -> str:
    """Return an accepted media type for a part without one."""
    guessed = guess_media_type(clean_name(name), data)
    if is_taken(guessed):
        return guessed
    return "text/plain" if _is_text(data) else "application/octet-stream"


def _taken() -> str:
    others = ", ".join(mode for mode in INPUT_MODES if not mode.startswith("text/"))
    return f"Accepted: every text/* in UTF-8, and {others}; send other files as application/octet-stream."


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _data_of(place: _Place, url: str) -> tuple[str, bytes]:
    """Return media type and content of a `data:` URL (RFC 2397)."""
    head, comma, content = url[5:].partition(",")
    if not comma:
        place.refuse("has a data: URL without content.")
    flags = [flag.strip().lower() for flag in head.split(";")]
    media_type = media_type_of(head)
    if media_type and not is_taken(media_type):
        place.refuse(f"has the media type {_shown(media_type)}, which is not accepted. {_taken()}")
    data = unquote_to_bytes(content)
    if flags[-1] != "base64":
        return media_type or "text/plain", data
    try:
        return media_type, base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        place.refuse("has a data: URL whose content is not base64.")


def _last_of(place: _Place, url: str) -> str:
    """Return the last component of a link's path; reject links that are not http: or https:."""
    wrong = "has an unsupported URL; accepted: http:, https: and data: URLs."
    if len(url) > MAX_URL_CHARS:
        place.refuse(f"has a URL of {len(url)} characters; at most {MAX_URL_CHARS} are accepted.")
    if not url.isprintable() or re.search(r"[\s<>]", url):
        place.refuse("has a URL with spaces, brackets or control characters; percent-encode them.")
    try:
        parsed = urlsplit(url)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            place.refuse(wrong)
    except ValueError:
        place.refuse(wrong)
    return unquote(parsed.path, errors="replace").rpartition("/")[2]


def _plain(place: _Place, value: Value) -> JsonValue:
    """Return a data part's JSON; whole numbers, which protobuf stores as floats, become integers again."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return {key: _plain(place, each) for key, each in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(place, each) for each in value.list_value.values]
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "number_value":
            return _number(place, value.number_value)
        case _:
            return None


def _number(place: _Place, number: float) -> float:
    if not isfinite(number):
        place.refuse("contains a number that is not finite.")
    return int(number) if number.is_integer() and abs(number) <= MAX_EXACT else number


def _fitted(stem: str, suffix: str) -> str:
    """Return stem and suffix within the length limits; the stem is cut first."""
    tail = suffix if len(suffix) <= MAX_NAME_CHARS // 2 and len(suffix.encode()) <= MAX_NAME_BYTES // 2 else ""
    room = MAX_NAME_BYTES - len(tail.encode())
    head = stem[: MAX_NAME_CHARS - len(tail)].encode()[:room].decode(errors="ignore")
    return f"{head}{tail}"


def _suffix(media_type: str) -> str:
    return _SUFFIXES.get(media_type) or _TYPES.guess_extension(media_type) or ""


def _shown(text: str) -> str:
    return "".join(char for char in text if char.isprintable())[:100]
