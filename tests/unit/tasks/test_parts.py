"""A message's parts as codex gets them: by table, by property, and by the real codex to the scripted model."""

import base64
import json
import mimetypes
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from a2a.types import Part
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.app_server import Connection, open_app_server
from codex_workspace.common.errors import CodexRefused, InputRefused
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.codex_toml import prepare_codex_home
from codex_workspace.config.loading import load_settings
from codex_workspace.config.providers import choose_provider
from codex_workspace.config.settings import LimitsConfig
from codex_workspace.devkit.model import scripted_model
from codex_workspace.launching import launch_of, thread_options
from codex_workspace.protocol.jsonrpc import Request
from codex_workspace.runtimes.backend import input_texts
from codex_workspace.tasks.parts import (
    IMAGE_MODES,
    INPUT_MODES,
    MAX_NAME_BYTES,
    MAX_NAME_CHARS,
    Attachment,
    MessageContent,
    check_input,
    clean_name,
    guess_media_type,
    image_type,
    media_type_by_name,
    media_type_of,
    read_parts,
)
from tests.e2e.agent_process import AgentSetup
from tests.e2e.client import script

GIF = base64.b64decode("R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs=")
WEBP = base64.b64decode("UklGRhoAAABXRUJQVlA4TA0AAAAvAAAAEAcQERGIiP4HAA==")
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"


def png() -> bytes:
    """Return a red image of four dots."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0))
    dots = chunk(b"IDAT", zlib.compress((b"\0" + b"\xff\0\0" * 2) * 2))
    return b"\x89PNG\r\n\x1a\n" + head + dots + chunk(b"IEND", b"")


IMAGES = {"image/png": png(), "image/jpeg": JPEG, "image/gif": GIF, "image/webp": WEBP}


def data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def raw(data: bytes, media_type: str = "", filename: str = "") -> Part:
    return Part(raw=data, media_type=media_type, filename=filename)


def data(content: JsonObject, filename: str = "") -> Part:
    return Part(data=ParseDict(content, Value()), filename=filename)


def text_of(*parts: Part) -> str:
    """Return the words of parts that are nothing but words."""
    content = read(*parts)
    assert not content.attachments
    (text,) = input_texts(content.items)
    return text


LIMITS = LimitsConfig()


def limits_of(**limits: int) -> LimitsConfig:
    """Return limits that may be smaller than those of a configuration."""
    return LimitsConfig.model_construct(None, **limits)


def read(*parts: Part, limits: LimitsConfig | None = None) -> MessageContent:
    """Read a message without attachments, and check its text."""
    limits = limits or LimitsConfig()
    content = read_parts(parts, limits)
    if not content.attachments:
        check_input(content.items, limits.max_text_chars)
    return content


def refusal_of(*parts: Part, limits: LimitsConfig | None = None) -> str:
    with pytest.raises(InputRefused) as refused:
        read(*parts, limits=limits)
    return str(refused.value)


# --- Words ---


def test_text_parts_keep_their_order() -> None:
    assert text_of(Part(text="  first\n"), Part(text="second", media_type="text/plain")) == "  first\n\nsecond"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5))
def test_text_parts_are_joined_as_by_the_sdk(texts: list[str]) -> None:
    joined = "\n".join(texts)
    parts = [Part(text=text) for text in texts]
    if joined.strip():
        assert text_of(*parts) == joined
    else:
        assert refusal_of(*parts) == "The message has no text."


@pytest.mark.parametrize("parts", [[], [Part(text="")], [Part(text=" \n")]])
def test_an_empty_message_is_rejected(parts: list[Part]) -> None:
    assert refusal_of(*parts) == "The message has no text."


def test_a_small_text_file_is_inlined() -> None:
    said = text_of(Part(text="Look:"), raw(b"a,b\n1,2\n", "text/csv", "data.csv"), Part(text="Add it up."))
    assert said == "Look:\nFile data.csv (text/csv):\n```\na,b\n1,2\n```\nAdd it up."


@pytest.mark.parametrize(
    ("content", "fence"),
    [("no end", "```"), ("```py\nx\n```\n", "````"), ("a `` b", "```"), ("``````", "```````"), ("", "```")],
)
def test_the_fence_is_longer_than_any_within(content: str, fence: str) -> None:
    lines = text_of(raw(content.encode(), "text/markdown", "a.md")).split("\n")
    assert (lines[0], lines[1], lines[-1]) == ("File a.md (text/markdown):", fence, fence)
    assert "\n".join(lines[2:-1]).removesuffix("\n") == content.removesuffix("\n")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")))
def test_no_content_gets_out_of_its_fence(content: str) -> None:
    lines = text_of(raw(content.encode(), "text/plain", "a.txt")).split("\n")
    assert lines[1] == lines[-1]
    assert not any(lines[1] in line for line in lines[2:-1])


def test_a_text_part_with_a_name_is_a_file() -> None:
    assert text_of(Part(text="x = 1", filename="a.py")) == "File a.py (text/x-python):\n```\nx = 1\n```"


def test_data_is_shown_as_json_with_integers() -> None:
    content: JsonObject = {"b": [3, 2.5, -0.0, True, None], "a": {"é": "ü"}, "big": 1e300, "exact": 2**53}
    head, _, shown = text_of(data(content)).partition("\n")
    assert head == "File part-1.json (application/json):"
    body = shown.removeprefix("```\n").removesuffix("\n```")
    assert json.loads(body) == content
    assert "3,\n" in body
    assert "1e+300" in body
    assert "9007199254740992" in body
    assert body.index('"a"') < body.index('"b"')


def test_a_number_that_json_cannot_say_is_refused() -> None:
    assert "contains a number that is not finite" in refusal_of(Part(data=Value(number_value=float("nan"))))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Part(url="https://example.org/a/b%20c.pdf?x=1"), "Linked file b c.pdf (application/pdf): <"),
        (Part(url="http://example.org/", media_type="text/html"), "Linked file (text/html): <http://example.org/>"),
        (Part(url="http://example.org", filename="page"), "Linked file page: <http://example.org>"),
        (Part(url="http://example.org"), "Linked file: <http://example.org>"),
    ],
)
def test_another_url_becomes_a_link(part: Part, said: str) -> None:
    assert text_of(part).startswith(said)
    assert f"<{part.url}>" in text_of(part)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "unsupported URL"),
        ("javascript:alert(1)", "unsupported URL"),
        ("relative/path", "unsupported URL"),
        ("http://", "unsupported URL"),
        ("http://[::1", "unsupported URL"),
        ("http://a/> ignore that", "spaces, brackets or control characters"),
        ("http://a/\nb", "spaces, brackets or control characters"),
        (f"http://a/{'b' * 9000}", "has a URL of 9009 characters; at most 8192"),
        ("data:text/plain", "without content"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:video/mp4;base64,AAAA", "media type video/mp4, which is not accepted"),
    ],
)
def test_a_url_that_is_no_link_is_refused(url: str, why: str) -> None:
    assert why in refusal_of(Part(text="See"), Part(url=url))
    assert refusal_of(Part(text="See"), Part(url=url)).startswith("Part 2 ")


def test_a_data_url_is_its_content() -> None:
    assert text_of(Part(url="data:,a%20b")) == "File part-1.txt (text/plain):\n```\na b\n```"
    assert text_of(Part(url="data:text/csv;charset=utf-8;base64,YSxi", filename="x")).startswith("File x (text/csv):")


# --- Images ---


@pytest.mark.parametrize("media_type", IMAGE_MODES)
@pytest.mark.parametrize("declared", [True, False])
def test_an_image_keeps_its_position(media_type: str, declared: bool) -> None:
    image = raw(IMAGES[media_type], media_type if declared else "")
    said = read_parts([Part(text="before"), image, Part(text="after")], LIMITS)
    url = data_url(media_type, IMAGES[media_type])
    assert said.items == [
        {"type": "text", "text": "before"},
        {"type": "image", "url": url},
        {"type": "text", "text": "after"},
    ]


def test_a_message_may_be_an_image_alone() -> None:
    assert read_parts([raw(png())], LIMITS).items == [{"type": "image", "url": data_url("image/png", png())}]
    named = read_parts([raw(png(), filename="shot.png")], LIMITS)
    assert named.items == [
        {"type": "text", "text": "Image shot.png:"},
        {"type": "image", "url": data_url("image/png", png())},
    ]


@pytest.mark.parametrize("media_type", ["image/png", ""])
def test_an_image_by_data_url_is_one_by_bytes(media_type: str) -> None:
    part = Part(url=data_url("image/png", png()), media_type=media_type)
    assert read_parts([part], LIMITS) == read_parts([raw(png(), "image/png")], LIMITS)


@pytest.mark.parametrize(
    "part",
    [
        Part(url="https://example.org/a.png"),
        Part(url="https://example.org/a", media_type="image/webp"),
        Part(url="https://example.org/a", filename="a.JPG"),
    ],
)
def test_an_image_url_is_rejected_with_the_remedy(part: Part) -> None:
    assert "is an image by URL, which codex does not accept; send its bytes (raw), a data: URL" in refusal_of(part)


@pytest.mark.parametrize(
    ("content", "found"), [(JPEG, "image/jpeg"), (b"hello", "not a known image format"), (b"", "not a known image")]
)
def test_an_images_content_must_match_its_type(content: bytes, found: str) -> None:
    refusal = refusal_of(raw(content, "image/png", "a.png"))
    assert refusal.startswith("Part 1 (a.png) has the media type image/png, but its bytes are ")
    assert found in refusal


# --- Files ---


def test_large_and_binary_files_are_attachments() -> None:
    long = b"x" * (16 * 1024 + 1)
    said = read_parts(
        [
            Part(text="Look"),
            raw(long, "text/plain", "long.txt"),
            raw(b"%PDF", "application/pdf", "a.pdf"),
            raw(b"\0\1"),
        ],
        LIMITS,
    )
    assert said.items == [{"type": "text", "text": "Look"}]
    assert said.attachments == [
        Attachment("long.txt", "text/plain", long),
        Attachment("a.pdf", "application/pdf", b"%PDF"),
        Attachment("part-4.bin", "application/octet-stream", b"\0\1"),
    ]


def test_text_in_another_encoding_is_rejected_with_the_remedy() -> None:
    refusal = refusal_of(raw("ä".encode("latin-1"), "text/csv", "a.csv"))
    assert refusal.startswith("Part 1 (a.csv) has the media type text/csv, but its bytes are not UTF-8 text; ")


def test_a_byte_order_mark_is_removed() -> None:
    assert text_of(raw(b"\xef\xbb\xbfa\n", "text/plain", "a.txt")) == "File a.txt (text/plain):\n```\na\n```"


def test_a_media_type_is_read_without_case_and_parameters() -> None:
    assert "(text/csv):" in text_of(raw(b"a", "Text/CSV; charset=utf-8"))


def test_a_media_type_that_the_card_does_not_list_is_refused_with_those_it_does() -> None:
    refusal = refusal_of(Part(text="Look"), raw(b"x", "video/mp4", "clip.mp4"))
    assert refusal.startswith("Part 2 (clip.mp4) has the media type video/mp4, which is not accepted. Accepted: ")
    assert "every text/* in UTF-8" in refusal
    assert all(mode in refusal for mode in INPUT_MODES if not mode.startswith("text/"))
    assert "its media type is image/png" in refusal_of(Part(text="x", media_type="image/png"))


SOURCES = {
    "a.c": "text/plain text/x-csrc",
    "a.h": "text/plain text/x-chdr",
    "a.cpp": "text/x-c++src",
    "a.hpp": "text/x-c++hdr",
    "A.java": "text/x-java text/x-java-source",
    "a.js": "application/javascript text/javascript application/x-javascript",
    "a.mjs": "application/javascript text/javascript",
    "a.ts": "text/vnd.trolltech.linguist video/mp2t application/typescript",
    "a.py": "text/x-python",
    "a.sh": "application/x-sh text/x-sh",
    "a.csh": "application/x-csh text/x-csh",
    "a.bat": "text/plain application/x-msdos-program",
    "a.pl": "text/plain text/x-perl application/x-perl",
    "a.rb": "application/x-ruby",
    "a.rs": "application/rls-services+xml text/rust",
    "a.php": "application/x-httpd-php",
    "a.dart": "application/vnd.dart",
    "a.hs": "text/x-haskell",
    "a.pas": "text/x-pascal",
    "a.scala": "text/x-scala",
    "a.tcl": "application/x-tcl text/x-tcl",
    "a.d": "text/x-dsrc",
    "a.m": "application/vnd.wolfram.mathematica.package",
    "a.sql": "application/sql",
    "a.tex": "application/x-tex text/x-tex",
    "a.bib": "text/x-bibtex",
    "a.rst": "text/prs.fallenstein.rst",
    "a.md": "text/markdown",
    "a.ipynb": "application/x-ipynb+json",
    "a.xml": "text/xml application/xml",
    "a.patch": "text/x-diff",
    "a.log": "text/x-log",
}
"""What clients call a source file that fill the type in from the name: by Python's table alone, by Debian's beside it,
and by the usual table of JavaScript."""


@pytest.mark.parametrize(("name", "media_types"), SOURCES.items(), ids=SOURCES)
def test_source_files_are_text_whatever_type_their_name_suggests(name: str, media_types: str) -> None:
    of_this_machine = mimetypes.guess_type(name)[0]
    for media_type in filter(None, (*media_types.split(), of_this_machine)):
        assert text_of(raw(b"x = 1\n", media_type, name)) == f"File {name} ({media_type}):\n```\nx = 1\n```"
        assert text_of(Part(text="x = 1\n", media_type=media_type, filename=name))
        assert media_type in INPUT_MODES or media_type in ("text/x-log", "text/rust", "text/x-java-source")


def test_an_ambiguous_type_is_a_file_if_its_bytes_are_not_text() -> None:
    for media_type in ("video/mp2t", "application/x-msdos-program", "application/vnd.wolfram.mathematica.package"):
        assert read_parts([raw(b"G@\x11\x10\0", media_type, "a.ts")], LIMITS).attachments[0].media_type == media_type


def test_every_utf_8_text_type_is_accepted() -> None:
    assert "(text/x-nobody-knows):" in text_of(raw("ü".encode(), "text/X-Nobody-knows; charset=utf-8"))
    assert "its bytes are not UTF-8 text" in refusal_of(raw("ü".encode("latin-1"), "text/x-nobody-knows"))
    for strange in ("text/", "text/*", "text/x y", "text/a`b", "text/a\nb", "text/" + "a" * 200):
        assert "which is not accepted" in refusal_of(raw(b"x", strange)), strange


@pytest.mark.parametrize(
    ("given_type", "meant"),
    [
        ("image/jpg", "image/jpeg"),
        ("Image/PNG; q=1", "image/png"),
        ("application/x-zip-compressed", "application/zip"),
        ("application/x-gzip", "application/gzip"),
        (" text/plain ;charset=us-ascii", "text/plain"),
    ],
)
def test_one_type_has_one_name(given_type: str, meant: str) -> None:
    assert media_type_of(given_type) == meant
    content = IMAGES.get(meant, b"text")
    assert read_parts([raw(content, given_type)], LIMITS) == read_parts([raw(content, meant)], LIMITS)
    assert read_parts([Part(url=data_url(given_type, content))], LIMITS) == read_parts([raw(content, meant)], LIMITS)


def test_a_part_without_content_is_refused() -> None:
    assert refusal_of(Part()).startswith("Part 1 is empty")


@pytest.mark.parametrize("mode", INPUT_MODES)
def test_every_input_mode_of_the_card_is_accepted(mode: str) -> None:
    said = read_parts([raw(IMAGES.get(mode, b"text"), mode)], LIMITS)
    assert said.items or said.attachments


def test_the_input_modes_are_exact_and_unique() -> None:
    assert len(set(INPUT_MODES)) == len(INPUT_MODES)
    assert all(mode == mode.lower() and "*" not in mode and ";" not in mode for mode in INPUT_MODES)


@pytest.mark.parametrize(
    ("name", "content", "media_type"),
    [
        ("a.py", b"x", "text/x-python"),
        ("a.YML", b"x", "application/yaml"),
        ("a.ts", b"x", "text/plain"),
        ("a.json", b"{}", "application/json"),
        ("a.json", b"\xff", "application/octet-stream"),
        ("a.png", b"hello", "text/plain"),
        ("a.txt", png(), "image/png"),
        ("a.tar.gz", b"\x1f\x8b", "application/gzip"),
        ("a.tar", b"\0", "application/x-tar"),
        ("a.mp4", b"\0", "video/mp4"),
        ("noname", b"text", "text/plain"),
        ("", b"\0", "application/octet-stream"),
    ],
)
def test_the_type_of_a_file_follows_from_bytes_and_name(name: str, content: bytes, media_type: str) -> None:
    assert guess_media_type(name, content) == media_type


def test_a_guessed_type_that_is_not_accepted_becomes_bytes() -> None:
    assert read_parts([raw(b"\0", filename="a.mp4")], LIMITS).attachments[0].media_type == "application/octet-stream"


@given(st.text(), st.binary())
def test_guessing_never_fails(name: str, content: bytes) -> None:
    media_type_by_name(name)
    assert "/" in guess_media_type(name, content)
    assert image_type(content) in (None, *IMAGE_MODES)


# --- Names ---


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\x\\report.docx", "report.docx"),
        (".bashrc", "bashrc"),
        ("...", ""),
        ("a\nb\0c\u202etxt.exe", "abctxt.exe"),
        (" a b.txt ", "a b.txt"),
        ("`rm`<x>.sh", "rmx.sh"),
        ("dir/", ""),
        ("ü.md", "ü.md"),
    ],
)
def test_names_are_cleaned(given_name: str, name: str) -> None:
    assert clean_name(given_name) == name


@given(st.text(max_size=400))
def test_a_clean_name_is_one_component_and_stays_as_it_is(given_name: str) -> None:
    name = clean_name(given_name)
    assert clean_name(name) == name
    assert "/" not in name
    assert not name.startswith(".")
    assert len(name) <= MAX_NAME_CHARS
    assert len(name.encode()) <= MAX_NAME_BYTES


def test_a_long_name_keeps_its_suffix() -> None:
    assert clean_name("x" * 300 + ".tar.gz") == "x" * 97 + ".gz"
    assert clean_name("ü" * 300 + ".md").endswith("ü.md")


@given(st.lists(st.sampled_from(["a.bin", "A.bin", "a-2.bin", "", "ü" * 200, "ü" * 201 + ".x"]), max_size=12))
def test_no_two_files_of_a_message_have_one_name(names: list[str]) -> None:
    said = read_parts([Part(text="x"), *(raw(b"\0", filename=name) for name in names)], LIMITS)
    found = [each.name.casefold() for each in said.attachments]
    assert len(set(found)) == len(names)
    assert all(0 < len(name) <= MAX_NAME_CHARS and len(name.encode()) <= MAX_NAME_BYTES for name in found)


# --- Bounds ---


@pytest.mark.parametrize(
    ("parts", "limits", "why"),
    [
        ([Part(text="a")] * 3, limits_of(max_parts=2), "The message has 3 parts; at most 2 are accepted."),
        ([raw(b"\0" * 5)], limits_of(max_file_bytes=4), "Part 1 has 5 bytes; a file may have at most 4."),
        ([raw(png())], limits_of(max_file_bytes=4), f"Part 1 has {len(png())} bytes; a file may have at most 4."),
        (
            [raw(b"text")] * 3,
            limits_of(max_files_bytes=11),
            "Part 3 exceeds the limit of 11 bytes for all files of a message.",
        ),
        ([Part(text="abc")], limits_of(max_text_chars=2), "The message has 3 characters; at most 2 are accepted."),
        ([raw(b"abc")], limits_of(max_text_chars=20), "The message has 41 characters; at most 20 are accepted."),
    ],
)
def test_content_over_the_limits_is_rejected(parts: list[Part], limits: LimitsConfig, why: str) -> None:
    assert refusal_of(*parts, limits=limits).startswith(why)


def test_the_size_limit_of_inlined_files() -> None:
    limits = limits_of(max_inline_bytes=4)
    assert not read_parts([raw(b"1234")], limits).attachments
    assert read_parts([raw(b"12345")], limits).attachments


# --- The real codex ---


Answerer = Callable[[Request], JsonValue]


class Threads:
    """The real codex, held by hand: its threads and whole turns on them."""

    def __init__(self, codex: Connection, options: JsonObject) -> None:
        self.codex = codex
        self.options = options

    async def start(self, **more: JsonValue) -> str:
        started = await self.codex.call("thread/start", {**self.options, **more})
        assert isinstance(started, dict)
        thread = started["thread"]
        assert isinstance(thread, dict)
        return str(thread["id"])

    async def resume(self, thread_id: str, **more: JsonValue) -> None:
        await self.codex.call("thread/resume", {"threadId": thread_id, "excludeTurns": True, **self.options, **more})

    async def turn(self, thread_id: str, items: Sequence[JsonValue], answer: Answerer | None = None) -> None:
        """Run a turn to its end; `answer` gives the result of what codex asks."""
        with self.codex.subscribe(thread_id) as mailbox, anyio.fail_after(10):
            await self.codex.call("turn/start", {"threadId": thread_id, "input": list(items)})
            while True:
                for each in await mailbox.receive():
                    if isinstance(each, Request):
                        each.answer(answer(each) if answer else None)
                    elif each.method == "turn/completed":
                        return


@asynccontextmanager
async def real_codex(setup: AgentSetup) -> AsyncIterator[Threads]:
    environment = setup.prepare()
    settings = load_settings(environment)
    provider = choose_provider(settings, environment)
    prepare_codex_home(settings, provider)
    launch = launch_of(settings, provider, environment)
    async with open_app_server(launch) as codex:
        yield Threads(codex, thread_options(settings, provider).params())


async def test_the_model_sees_text_and_images_in_order(tmp_path: Path) -> None:
    said = read_parts([Part(text="Look:"), raw(png(), filename="a.png"), Part(text=script({"say": "seen"}))], LIMITS)
    async with scripted_model() as model, real_codex(AgentSetup(tmp_path, model.base_url)) as codex:
        await codex.turn(await codex.start(), said.items)
        seen = model.requests[-1].last_user_message
    assert seen is not None
    assert seen.images == (data_url("image/png", png()),)
    assert seen.text.startswith("Look:\nImage a.png:")


async def test_codex_refuses_an_image_by_url(tmp_path: Path) -> None:
    async with scripted_model() as model, real_codex(AgentSetup(tmp_path, model.base_url)) as codex:
        thread_id = await codex.start()
        with pytest.raises(CodexRefused, match="remote image URLs are not supported"):
            await codex.turn(thread_id, [{"type": "image", "url": "https://example.org/a.png"}])
