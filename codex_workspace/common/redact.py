"""Redacts known secrets in text, in text that is streamed in pieces, and in values."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

MASK: Final = "***"

MIN_LINE_CHARS: Final = 8
"""Each line of a multi-line secret, such as a PEM key, with at least this many characters is a secret too, because
diffs and listings separate the lines."""

MIN_TAIL_CHARS: Final = 6
"""At the end of a stream, the start of a secret is shown if it is shorter than this."""


class Redactor:
    """Replaces each of `secrets` by `***`: the plain text, and its escaped forms in JSON and Python."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._set_forms({form for secret in secrets if secret for form in _forms(secret)})

    def add(self, secret: str) -> None:
        """Redact another secret; existing streams do not redact it."""
        self._set_forms({*self._forms, *_forms(secret)})

    def _set_forms(self, forms: Iterable[str]) -> None:
        self._forms = tuple(sorted(forms, key=len, reverse=True))
        self._raw = tuple(form.encode("utf-8", "surrogateescape") for form in self._forms)
        # The longest first: if one starts with another, all of it is replaced.
        self._any = re.compile("|".join(map(re.escape, self._forms)))

    def __bool__(self) -> bool:
        """Whether there are any secrets."""
        return bool(self._forms)

    def __call__(self, text: str) -> str:
        """Return `text` with the secrets replaced; the same object if it contains none."""
        # A search for each secret is much faster than the expression, and usually finds nothing.
        return self._any.sub(MASK, text) if any(form in text for form in self._forms) else text

    def found_in(self, data: bytes) -> bool:
        """Whether `data` contains a secret."""
        return any(form in data for form in self._raw)

    def stream(self) -> "RedactedStream":
        """Return a new stream of redacted text."""
        return RedactedStream(self._forms, self._any)


class RedactedStream:
    """Redacts a text that comes in pieces; the possible start of a secret is held back until more text comes."""

    def __init__(self, forms: tuple[str, ...], any_: re.Pattern[str]) -> None:
        self._forms = forms
        self._any = any_
        self._held = ""

    def feed(self, piece: str) -> str:
        """Add a piece, and return the redacted text that can be shown now."""
        text = self._held + piece
        shown: list[str] = []
        begin = 0
        for found in self._any.finditer(text) if any(form in text for form in self._forms) else ():
            if self._secret_start(text, begin) <= found.start():
                # It may be part of a longer secret.
                break
            shown += (text[begin : found.start()], MASK)
            begin = found.end()
        end = self._secret_start(text, begin)
        self._held = text[end:]
        return "".join((*shown, text[begin:end]))

    def finish(self) -> str:
        """Return the text that was held back; `***` if it is a large part of a secret."""
        held, self._held = self._held, ""
        if not held:
            return ""
        text = self._any.sub(MASK, held)
        return text if text != held or len(held) < MIN_TAIL_CHARS else MASK

    def _secret_start(self, text: str, begin: int) -> int:
        """Return the index in `text`, from `begin` on, where a secret may start; or the length of `text`."""
        first = len(text)
        for form in self._forms:
            at = text.find(form[0], max(begin, len(text) - len(form) + 1), first)
            while at >= 0:
                if form.startswith(text[at:]):
                    first = at
                    break
                at = text.find(form[0], at + 1, first)
        return first


def _forms(secret: str) -> set[str]:
    lines = [line.strip() for line in secret.splitlines()]
    whole = {secret, *(line for line in lines if len(lines) > 1 and len(line) >= MIN_LINE_CHARS)}
    return {form for each in whole for form in (each, json.dumps(each)[1:-1], repr(each)[1:-1])}


def redact_value(value: T, redactor: Redactor) -> T:
    """Return a value (text, JSON, dataclasses, and tuples of them) with all text redacted.

    A value without a secret is returned itself, not a copy.
    """
    return cast("T", _redacted(value, redactor))


def _redacted(value: Any, redactor: Redactor) -> object:
    match value:
        case str():
            return redactor(value)
        case tuple() | list():
            parts = [_redacted(each, redactor) for each in value]
            is_same = all(part is before for part, before in zip(parts, value, strict=True))
            return value if is_same else type(value)(parts)
        case Mapping():
            redacted = {redactor(str(key)): _redacted(each, redactor) for key, each in value.items()}
            return value if redacted == value else redacted
        case _ if is_dataclass(value) and not isinstance(value, type):
            before = {field.name: getattr(value, field.name) for field in fields(value)}
            after = {name: _redacted(each, redactor) for name, each in before.items()}
            changed = {name: each for name, each in after.items() if each is not before[name]}
            return replace(value, **changed) if changed else value
        case _:
            return value
