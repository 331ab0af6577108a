"""What a message may want to have its own way, in its metadata under `TURN`: an A2A extension that no client needs.

{"model": "gpt-5.5", "effort": "high", "workingFolder": "services/api", "outputSchema": {…}, "midTurn": "steer"}
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from codex_workspace.conversation import TurnOptions
from codex_workspace.errors import InputRefused
from codex_workspace.midturn import MidTurn
from codex_workspace.wire import JsonObject, JsonValue

TURN: Final = "urn:codex-workspace:turn"
"""The extension's name, and the key of a message's metadata."""

MAX_SCHEMA_CHARS: Final = 65_536

_TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
"""What a JSON Schema's `type` may be. Providers take different parts of all else, and say so themselves."""

_MODEL: Final = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,127}")
_EFFORT: Final = re.compile(r"[a-z]{1,32}")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one message has its own way."""

    options: TurnOptions
    mid_turn: MidTurn


def read_wishes(metadata: JsonObject, workspace: Path, usual: MidTurn) -> Wishes:
    """Return what a message's metadata ask for; `usual` is what becomes of it where it does not say.

    Raises:
        InputRefused: a wish that is not known, or cannot be granted; the sentence says which ones can.
    """
    asked = metadata.get(TURN)
    if asked is None:
        return Wishes(TurnOptions(), usual)
    if not isinstance(asked, dict):
        raise _refused("must be an object")
    wishes = Wishes(TurnOptions(), usual)
    for key, value in asked.items():
        reader = _READERS.get(key)
        if reader is None:
            raise _refused(f"{key[:50]!r} is not known; there are {', '.join(_READERS)}")
        wishes = reader(wishes, value, workspace)
    return wishes


def _with_model(wishes: Wishes, value: JsonValue, _workspace: Path) -> Wishes:
    if not isinstance(value, str) or not _MODEL.fullmatch(value):
        raise _refused("model must be the name of a model")
    return replace(wishes, options=replace(wishes.options, model=value))


def _with_effort(wishes: Wishes, value: JsonValue, _workspace: Path) -> Wishes:
    if not isinstance(value, str) or not _EFFORT.fullmatch(value):
        raise _refused("effort must be a word such as low, medium or high")
    return replace(wishes, options=replace(wishes.options, effort=value))


def _with_folder(wishes: Wishes, value: JsonValue, workspace: Path) -> Wishes:
    if not isinstance(value, str) or "\0" in value:
        raise _refused("workingFolder must be the path of a folder, relative to the workspace")
    home = workspace.resolve()
    folder = (home / value).resolve()
    if not folder.is_relative_to(home) or not folder.is_dir():
        raise _refused("workingFolder must be a folder inside of the workspace that exists")
    return replace(wishes, options=replace(wishes.options, cwd=folder))


def _with_schema(wishes: Wishes, value: JsonValue, _workspace: Path) -> Wishes:
    if not isinstance(value, dict) or len(json.dumps(value)) > MAX_SCHEMA_CHARS:
        raise _refused(f"outputSchema must be a JSON Schema, an object of at most {MAX_SCHEMA_CHARS} characters")
    if not _is_type(value.get("type", "object")):
        raise _refused(f"outputSchema: type must be one of {', '.join(_TYPES)}")
    return replace(wishes, options=replace(wishes.options, output_schema=value))


def _is_type(value: JsonValue) -> bool:
    named = value if isinstance(value, list) else [value]
    return bool(named) and all(each in _TYPES for each in named)


def _with_mid_turn(wishes: Wishes, value: JsonValue, _workspace: Path) -> Wishes:
    if value not in list(MidTurn):
        raise _refused(f"midTurn must be one of {', '.join(MidTurn)}")
    return replace(wishes, mid_turn=MidTurn(value))


_READERS: Final[Mapping[str, Callable[[Wishes, JsonValue, Path], Wishes]]] = {
    "model": _with_model,
    "effort": _with_effort,
    "workingFolder": _with_folder,
    "outputSchema": _with_schema,
    "midTurn": _with_mid_turn,
}


def _refused(sentence: str) -> InputRefused:
    return InputRefused(f"metadata {TURN}: {sentence}.")
