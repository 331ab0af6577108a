"""Secrets taken out of text, whole and in pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.redact import MASK, MIN_TAIL_CHARS, Redactor

PEM = "-----BEGIN KEY-----\nAAAAbbbbCCCCdddd\neeeeFFFFgggg\n-----END KEY-----\n"


def streamed(secrets: list[str], pieces: list[str]) -> str:
    stream = Redactor(secrets).stream()
    return "".join([*(stream.feed(piece) for piece in pieces), stream.finish()])


def test_the_longest_secret_is_redacted_first() -> None:
    scrub = Redactor(["sk-1", "sk-1-longer", ""])
    assert scrub("a sk-1-longer b sk-1 c") == "a *** b *** c"
    assert scrub("nothing") == "nothing"
    assert Redactor([])("anything") == "anything"
    assert not Redactor([""])


def test_a_secret_is_found_in_the_forms_that_json_and_repr_give_it() -> None:
    secret = 'sk-"quo\\ted'
    scrub = Redactor([secret])
    for shown in (secret, json.dumps(secret), repr(secret), json.dumps({"key": secret})):
        assert "quo" not in scrub(shown)


def test_a_secret_can_be_learned_later() -> None:
    scrub = Redactor()
    assert not scrub
    scrub.add("token-1")
    scrub.add("token-12")
    assert scrub("a token-12 b token-1") == "a *** b ***"
    assert scrub.found_in(b"token-1")


def test_each_line_of_a_secret_of_several_lines_is_one() -> None:
    scrub = Redactor([PEM])
    assert scrub(PEM) == MASK
    assert scrub("+AAAAbbbbCCCCdddd\n+eeeeFFFFgggg") == "+***\n+***"


def test_bytes_are_looked_through() -> None:
    scrub = Redactor(["sk-söcret"])
    assert scrub.found_in(b"\xff\x00" + "sk-söcret".encode() + b"\xff")
    assert not scrub.found_in(b"\xff\x00sk-s\xff")


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["the key is sk-se", "cret-1, see"], ["the key is ", "***, see"]),
        (["sk", "-", "secret", "-1"], ["", "", "", "***"]),
        (["sk-secret", "ary"], ["", "sk-secretary"]),
        (["sk-secret-1"], ["***"]),
        (["sk-sk-secret-1"], ["sk-***"]),
        (["no", "thing"], ["no", "thing"]),
    ],
)
def test_a_possible_start_of_a_secret_is_held_back(pieces: list[str], shown: list[str]) -> None:
    stream = Redactor(["sk-secret-1"]).stream()
    assert [stream.feed(piece) for piece in pieces] == shown


def test_a_secret_that_is_a_prefix_of_another_is_held_back() -> None:
    assert streamed(["sk-1", "sk-1-longer"], ["a sk-1", "-longer b"]) == "a *** b"
    assert streamed(["sk-1", "sk-1-longer"], ["a sk-1", "-", "other b"]) == "a ***-other b"
    # The end of the one could begin the other.
    assert streamed(["abcx", "xyz"], ["abcx", "yz"]) == "***yz"


def test_the_rest_reveals_no_large_part_of_a_secret() -> None:
    assert streamed(["sk-secret-1"], ["it is sk-"]) == "it is sk-"
    assert streamed(["sk-secret-1"], ["it is sk-secret-"]) == "it is ***"
    assert streamed(["sk-1", "sk-1-longer"], ["it is sk-1"]) == "it is ***"


@given(
    secrets=st.lists(st.text("abc", min_size=2, max_size=6), min_size=1, max_size=3),
    pieces=st.lists(st.text("abcd", max_size=5), max_size=8),
)
def test_no_cutting_lets_a_secret_through(secrets: list[str], pieces: list[str]) -> None:
    shown = streamed(secrets, pieces)
    for part in shown.split(MASK):
        assert not any(secret in part for secret in secrets), shown


@given(pieces=st.lists(st.text("sk-ecrt1 xyz", max_size=6), max_size=10))
def test_other_text_is_unchanged(pieces: list[str]) -> None:
    secret = "sk-secret-1"
    shown, whole = streamed([secret], pieces), "".join(pieces)
    expected = whole.replace(secret, MASK)
    # But for the rest that may be a large part of one.
    held = next((n for n in range(len(secret) - 1, MIN_TAIL_CHARS - 1, -1) if expected.endswith(secret[:n])), 0)
    assert shown == (expected[:-held] + MASK if held else expected)
