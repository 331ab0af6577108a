"""Removes the agent's secrets from the events of a turn, before anything else sees them.

The model's text and a command's output may contain a secret. Deltas pass through one stream per item, because a secret
may be split between two of them.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar, cast

from codex_workspace.common.redact import RedactedStream, Redactor
from codex_workspace.protocol.codex_events import (
    CommandCompleted,
    CommandOutput,
    MessageCompleted,
    MessageDelta,
    ReasoningCompleted,
    ReasoningDelta,
    TurnCompleted,
    TurnEvent,
    WarningReported,
)

T = TypeVar("T")

_StreamKey = tuple[type[TurnEvent], str, int]


class EventRedactor:
    """Redacts the events of one turn, in their order."""

    def __init__(self, scrub: Redactor) -> None:
        self._scrub: Final = scrub
        self._streams: dict[_StreamKey, RedactedStream] = {}

    def redact(self, event: TurnEvent) -> list[TurnEvent]:
        """Return the redacted event, preceded by text that was held back; nothing if the event itself is held back."""
        if not self._scrub:
            return [event]
        match event:
            case MessageDelta(item_id=item, text=text) | CommandOutput(item_id=item, text=text):
                return self._delta(event, (type(event), item, 0), text)
            case ReasoningDelta(item_id=item, section=section, text=text):
                return self._delta(event, (ReasoningDelta, item, section), text)
            case MessageCompleted(item_id=item) | CommandCompleted(item_id=item) | ReasoningCompleted(item_id=item):
                # The full text contains what was held back.
                self._forget(item)
            case WarningReported(will_retry=True):
                # The model call is repeated, with its text.
                self._streams.clear()
            case TurnCompleted():
                return [*self._held_back(), redact_event(event, self._scrub)]
            case _:
                pass
        return [redact_event(event, self._scrub)]

    def _delta(
        self, event: MessageDelta | CommandOutput | ReasoningDelta, key: _StreamKey, text: str
    ) -> list[TurnEvent]:
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = self._scrub.stream()
        shown = stream.feed(text)
        if shown == text:
            return [event]
        return [replace(event, text=shown)] if shown else []

    def _forget(self, item: str) -> None:
        for key in [key for key in self._streams if key[1] == item]:
            del self._streams[key]

    def _held_back(self) -> list[TurnEvent]:
        """Return the held-back text of incomplete messages."""
        rest = [(item, stream.finish()) for (kind, item, _), stream in self._streams.items() if kind is MessageDelta]
        self._streams.clear()
        return [MessageDelta(item, text) for item, text in rest if text]


def redact_event(value: T, scrub: Redactor) -> T:
    """Return a value (text, JSON, dataclasses, and tuples of them) with all text redacted.

    A value without a secret is returned itself, not a copy.
    """
    return cast("T", _redacted(value, scrub))


def _redacted(value: Any, scrub: Redactor) -> object:
    match value:
        case str():
            return scrub(value)
        case tuple() | list():
            parts = [_redacted(each, scrub) for each in value]
            is_same = all(part is before for part, before in zip(parts, value, strict=True))
            return value if is_same else type(value)(parts)
        case Mapping():
            return {scrub(str(key)): _redacted(each, scrub) for key, each in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            before = {field.name: getattr(value, field.name) for field in fields(value)}
            after = {name: _redacted(each, scrub) for name, each in before.items()}
            changed = {name: each for name, each in after.items() if each is not before[name]}
            return replace(value, **changed) if changed else value
        case _:
            return value
