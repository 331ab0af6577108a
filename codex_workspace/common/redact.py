"""Known secrets taken out of text: of a whole one, and of one in pieces, where a secret may be cut in two."""

import json
import re
from collections.abc import Iterable
from typing import Final

MASK: Final = "***"

MIN_LINE_CHARS: Final = 8
"""Of a secret of several lines, such as a key in PEM, each line of this many characters is a secret too: a diff or a
listing puts something between them."""

MIN_TAIL_CHARS: Final = 6
"""The beginning of a secret that nothing follows is shown up to this length; more of it would give the rest away."""


class Redactor:
    """Replaces every one of `secrets` in a text by `***`: as it is, and as JSON and Python quote it."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._know({form for secret in secrets if secret for form in _forms(secret)})

    def add(self, secret: str) -> None:
        """Take out this one too, from now on; streams that have begun do not know it."""
        self._know({*self._forms, *_forms(secret)})

    def _know(self, forms: Iterable[str]) -> None:
        self._forms = tuple(sorted(forms, key=len, reverse=True))
        self._raw = tuple(form.encode("utf-8", "surrogateescape") for form in self._forms)
        # The longest first: where one begins with another, the whole of it goes.
        self._any = re.compile("|".join(map(re.escape, self._forms)))

    def __bool__(self) -> bool:
        """Whether there is anything to take out."""
        return bool(self._forms)

    def __call__(self, text: str) -> str:
        """Return `text` without the secrets; the very same object where there are none in it."""
        # Looking for each is much faster than the expression, and as a rule nothing is found.
        return self._any.sub(MASK, text) if any(form in text for form in self._forms) else text

    def found_in(self, data: bytes) -> bool:
        """Tell whether one of the secrets is in `data`."""
        return any(form in data for form in self._raw)

    def stream(self) -> "RedactedStream":
        """Return a new stream of text to be scrubbed."""
        return RedactedStream(self._forms, self._any)


class RedactedStream:
    """A text that comes in pieces: what may be the beginning of a secret is held back until more has come."""

    def __init__(self, forms: tuple[str, ...], any_: re.Pattern[str]) -> None:
        self._forms = forms
        self._any = any_
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return what can be shown by now, scrubbed; "" where all of it has to wait."""
        text = self._held + piece
        shown: list[str] = []
        begin = 0
        for found in self._any.finditer(text) if any(form in text for form in self._forms) else ():
            if self._waits_from(text, begin) <= found.start():
                # It may be part of a longer one.
                break
            shown += (text[begin : found.start()], MASK)
            begin = found.end()
        waits = self._waits_from(text, begin)
        self._held = text[waits:]
        return "".join((*shown, text[begin:waits]))

    def finish(self) -> str:
        """Return what was held back, now that nothing follows; `***` where it is a large part of a secret."""
        held, self._held = self._held, ""
        if not held:
            return ""
        text = self._any.sub(MASK, held)
        return text if text != held or len(held) < MIN_TAIL_CHARS else MASK

    def _waits_from(self, text: str, begin: int) -> int:
        """Return where in `text`, from `begin` on, something starts that may become a secret; its length if nowhere."""
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
