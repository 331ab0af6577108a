"""Codex's lines: split, decoded and encoded."""

import json
import math
import time
from contextlib import suppress

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codex_workspace.common.errors import CodexGone
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.jsonrpc import (
    Failure,
    InvalidMessage,
    LineSplitter,
    Mailbox,
    Message,
    Notification,
    Request,
    Result,
    Skipped,
    decode,
    encode,
    safe_text,
)
from tests.support.memory_codex import in_virtual_time

any_text = st.text(st.characters(categories=None))
"""Strings as Python can hold them, lone surrogates included."""

json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
json_objects: st.SearchStrategy[JsonObject] = st.dictionaries(any_text, json_values, max_size=4)
ids = st.integers() | st.text()


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def split(pieces: list[bytes], max_line_bytes: int = 1000) -> list[bytes | Skipped]:
    splitter = LineSplitter(max_line_bytes)
    return [line for piece in pieces for line in splitter.feed(piece)] + splitter.finish()


@given(
    st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b""))),
    st.lists(st.integers(0)),
    st.integers(1, 9),
)
def test_any_chunking_yields_the_same_lines(lines: list[bytes], cuts: list[int], max_line_bytes: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    expected = [line if len(line) <= max_line_bytes else Skipped(len(line)) for line in lines]
    assert split(pieces_of(data, cuts), max_line_bytes) == expected


def test_only_a_newline_ends_a_line() -> None:
    line = "a\u2028b\u2029c\x85d\x0be\x0cf\rg".encode()
    assert split([line + b"\n"]) == [line]


def test_the_unterminated_rest_comes_at_the_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntwo") == [b"one"]
    assert splitter.finish() == [b"two"]
    assert splitter.finish() == []


def test_a_line_that_is_too_long_is_reported_once_and_the_next_one_is_read() -> None:
    assert split([b"abcdef", b"ghi", b"jk\nnext\n", b"abcdefghi\nlast\n"], 8) == [
        Skipped(11),
        b"next",
        Skipped(9),
        b"last",
    ]


def test_a_rest_that_is_too_long_is_reported_too() -> None:
    assert split([b"abcdef", b"ghi"], 8) == [Skipped(9)]


def test_a_long_line_in_small_pieces_takes_linear_time() -> None:
    def seconds(size: int) -> float:
        splitter, piece = LineSplitter(), b"x" * 4096
        start = time.process_time()
        for _ in range(size // len(piece)):
            splitter.feed(piece)
        splitter.feed(b"\n")
        return time.process_time() - start

    small = min(seconds(2 * 1024 * 1024) for _ in range(3))
    assert min(seconds(32 * 1024 * 1024) for _ in range(2)) < 16 * small * 8  # a quadratic one takes 16 * 16 times


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id":0,"result":{}}', Result(0, {})),
        (b'{"id":"0","result":null}', Result("0", None)),
        (b'{"id":-5,"result":[1]}\r', Result(-5, [1])),
        (b'{"error":{"code":-32600,"message":"no"},"id":3}', Failure(3, -32600, "no")),
        (
            b'{"error":{"code":-32602,"message":"long","data":{"max":1}},"id":"a"}',
            Failure("a", -32602, "long"),
        ),
        (
            b'{"method":"turn/started","params":{"threadId":"t"},"emittedAtMs":7}',
            Notification("turn/started", {"threadId": "t"}),
        ),
        (b'{"method":"initialized"}', Notification("initialized", {})),
        (b'{"method":"initialized","params":null}', Notification("initialized", {})),
        (b'{"id":0,"method":"item/tool/call","params":{"tool":"x"}}', Request(0, "item/tool/call", {"tool": "x"})),
        (b'{"id":"0","method":"item/tool/call"}', Request("0", "item/tool/call", {})),
        (b'{"id":0,"method":"m","params":{},"result":1}', Request(0, "m", {})),
    ],
)
def test_decode_gives_the_message(line: bytes, message: Message) -> None:
    assert decode(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"id":1}',
        b'{"error":"odd","id":3}',
        b'{"id":null,"result":1}',
        b'{"id":true,"result":1}',
        b'{"id":1.5,"result":1}',
        b'{"result":1}',
        b'{"id":[],"method":"m"}',
        b'{"id":null,"method":"m"}',
        b'{"id":true,"method":"m"}',
        b'{"method":1}',
        b'{"method":"m","params":[]}',
        b"[" * 100_000,
        b"1" * 5000,
    ],
)
def test_decode_rejects_other_lines(line: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode(line)


@given(st.binary())
@example(b'{"id":1,"error":{"code":1e999}}')
@example(b'{"method":"m","params":{"x":NaN}}')
def test_decode_raises_no_other_error(line: bytes) -> None:
    with suppress(InvalidMessage):
        decode(line)


@given(json_values)
def test_decode_raises_no_other_error_for_json(value: JsonValue) -> None:
    with suppress(InvalidMessage):
        decode(json.dumps(value).encode())


def safe(value: JsonValue) -> JsonValue:
    match value:
        case str():
            return safe_text(value)
        case list():
            return [safe(inner) for inner in value]
        case dict():
            return {safe_text(key): safe(inner) for key, inner in value.items()}
        case _:
            return value


def is_one_line_of_valid_text(line: bytes) -> bool:
    return line.endswith(b"\n") and line.count(b"\n") == 1 and bool(line.decode("utf-8", "strict"))


@given(ids, any_text, json_objects)
def test_a_request_comes_back_as_it_was_sent_but_for_lone_surrogates(
    id_: int | str, method: str, params: JsonObject
) -> None:
    line = encode({"id": id_, "method": method, "params": params})
    assert is_one_line_of_valid_text(line)
    assert json.loads(line) == safe({"id": id_, "method": method, "params": params})
    assert isinstance(decode(line), Request)


@given(ids, json_values)
def test_a_result_comes_back_as_it_was_sent_but_for_lone_surrogates(id_: int | str, value: JsonValue) -> None:
    line = encode({"id": id_, "result": value})
    assert is_one_line_of_valid_text(line)
    assert decode(line) == Result(id_, safe(value))


@given(ids, st.integers(), any_text)
def test_an_error_comes_back_as_it_was_sent_but_for_lone_surrogates(id_: int | str, code: int, message: str) -> None:
    line = encode({"id": id_, "error": {"code": code, "message": message}})
    assert is_one_line_of_valid_text(line)
    assert decode(line) == Failure(id_, code, safe_text(message))


def test_a_number_that_json_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"id": 1, "result": float("nan")})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("plain", "plain"), ("a\ud83db", "a\ufffdb"), ("\ud83d\ude00", "\U0001f600"), ("\udc80", "\ufffd"), ("", "")],
)
def test_safe_text_is_valid_unicode(text: str, expected: str) -> None:
    assert safe_text(text) == expected


@given(st.text())
def test_safe_text_leaves_valid_text_alone(text: str) -> None:
    assert safe_text(text) == text


# --- What waits for a thread's reader


def said(number: int) -> Notification:
    return Notification("said", {"n": number})


async def test_take_returns_all_unread_messages_in_order() -> None:
    mailbox = Mailbox()
    for number in range(3):
        mailbox.put(said(number), 10)
    assert await mailbox.receive() == [said(0), said(1), said(2)]


async def test_take_waits_for_a_message() -> None:
    mailbox = Mailbox()
    assert not mailbox.has_received
    async with anyio.create_task_group() as tasks:

        async def take() -> None:
            assert await mailbox.receive() == [said(1)]

        tasks.start_soon(take)
        await anyio.lowlevel.checkpoint()
        mailbox.put(said(1), 10)
    assert mailbox.has_received


async def test_a_cancelled_take_loses_no_message() -> None:
    mailbox = Mailbox()
    with anyio.move_on_after(0.001):
        await mailbox.receive()
    mailbox.put(said(1), 10)
    assert await mailbox.receive() == [said(1)]


async def test_the_end_follows_the_earlier_messages_and_stays() -> None:
    mailbox = Mailbox()
    mailbox.put(said(1), 10)
    mailbox.fail(CodexGone("first", "tail"))
    mailbox.fail(CodexGone("second"))
    mailbox.put(said(2), 10)
    assert await mailbox.receive() == [said(1)]
    for _ in range(2):
        with pytest.raises(CodexGone, match="first") as raised:
            await mailbox.receive()
        assert raised.value.tail == "tail"


async def test_an_end_wakes_a_waiter() -> None:
    mailbox = Mailbox()
    async with anyio.create_task_group() as tasks:

        async def take() -> None:
            with pytest.raises(CodexGone):
                await mailbox.receive()

        tasks.start_soon(take)
        await anyio.lowlevel.checkpoint()
        mailbox.fail(CodexGone("gone"))


async def test_wake_lets_take_return_empty_once() -> None:
    mailbox = Mailbox()
    mailbox.wake()
    assert await mailbox.receive() == []
    with anyio.move_on_after(0.001) as waiting:
        await mailbox.receive()
    assert waiting.cancelled_caught
    mailbox.wake()
    mailbox.put(said(1), 10)
    assert await mailbox.receive() == [said(1)]


async def test_an_overflow_ends_the_mailbox_and_keeps_what_fits() -> None:
    mailbox = Mailbox(max_unread_bytes=100)
    for number in range(3):
        mailbox.put(said(number), 40)
    assert await mailbox.receive() == [said(0), said(1)]
    with pytest.raises(CodexGone, match="more than 100 bytes that were not read"):
        await mailbox.receive()


async def test_read_messages_do_not_count() -> None:
    mailbox = Mailbox(max_unread_bytes=100)
    for number in range(100):
        mailbox.put(said(number), 100)
        assert await mailbox.receive() == [said(number)]


# --- Pieces of a text, which may wait ---

PIECE = Notification("item/agentMessage/delta", {"itemId": "m", "delta": "x"})


async def begun_text() -> Mailbox:
    """Return a mailbox whose reader has received the first piece of a text."""
    mailbox = Mailbox()
    mailbox.put(PIECE, 10, "m")
    assert await mailbox.receive(text_by=math.inf) == [PIECE]
    return mailbox


async def puts(mailbox: Mailbox, *messages: tuple[float, Notification, str | None]) -> None:
    """Add messages after so many seconds each, with the texts that they are pieces of."""
    for seconds, message, piece_of in messages:
        await anyio.sleep(seconds)
        mailbox.put(message, 10, piece_of)


@in_virtual_time
async def test_pieces_of_a_text_end_the_wait_at_the_given_time() -> None:
    mailbox, start = await begun_text(), anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(puts, mailbox, *[(0.01, PIECE, "m")] * 5)
        assert await mailbox.receive(text_by=start + 0.1) == [PIECE] * 5
    assert anyio.current_time() == pytest.approx(start + 0.1)


@in_virtual_time
async def test_unread_pieces_wait_as_well() -> None:
    mailbox, start = await begun_text(), anyio.current_time()
    mailbox.put(PIECE, 10, "m")
    assert await mailbox.receive(text_by=start + 0.1) == [PIECE]
    assert anyio.current_time() == pytest.approx(start + 0.1)
    mailbox.put(PIECE, 10, "m")
    assert await mailbox.receive(text_by=start) == [PIECE]
    assert anyio.current_time() == pytest.approx(start + 0.1)


@in_virtual_time
async def test_any_other_message_ends_the_wait_with_the_pieces_before_it() -> None:
    others: list[tuple[Notification, str | None]] = [(said(1), None), (PIECE, "another text")]
    for other, piece_of in others:
        mailbox, start = await begun_text(), anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(puts, mailbox, (0.01, PIECE, "m"), (0.01, other, piece_of))
            assert await mailbox.receive(text_by=math.inf) == [PIECE, other]
        assert anyio.current_time() == pytest.approx(start + 0.02)


@in_virtual_time
async def test_a_quiet_message_is_read_with_the_next_one_or_at_the_deadline() -> None:
    async def put_both(mailbox: Mailbox) -> None:
        await anyio.sleep(0.01)
        mailbox.put(said(1), 10, is_quiet=True)
        await anyio.sleep(1)
        mailbox.put(said(2), 10)

    for wait_s, received in ((math.inf, [said(1), said(2)]), (0.5, [said(1)])):
        mailbox, start = Mailbox(), anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put_both, mailbox)
            assert await mailbox.receive(start + wait_s) == received
            assert anyio.current_time() == pytest.approx(start + min(wait_s, 1.01))


@in_virtual_time
async def test_the_end_and_a_wake_do_not_wait_for_the_text() -> None:
    mailbox, start = await begun_text(), anyio.current_time()
    mailbox.put(PIECE, 10, "m")
    mailbox.wake()
    assert await mailbox.receive(text_by=math.inf) == [PIECE]
    mailbox.put(PIECE, 10, "m")
    mailbox.fail(CodexGone("gone"))
    assert await mailbox.receive(text_by=math.inf) == [PIECE]
    with pytest.raises(CodexGone):
        await mailbox.receive(text_by=math.inf)
    assert anyio.current_time() == start


@in_virtual_time
async def test_at_the_latest_time_the_pieces_are_returned_and_then_nothing() -> None:
    mailbox, start = await begun_text(), anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(puts, mailbox, (1, PIECE, "m"))
        assert await mailbox.receive(start + 2, text_by=math.inf) == [PIECE]
    assert await mailbox.receive(start + 2, text_by=math.inf) == []
    assert anyio.current_time() == pytest.approx(start + 2)


@in_virtual_time
async def test_a_reader_without_patience_receives_each_piece_at_once() -> None:
    mailbox, start = Mailbox(), anyio.current_time()
    for _ in range(3):
        mailbox.put(PIECE, 10, "m")
        assert await mailbox.receive() == [PIECE]
    assert anyio.current_time() == start
