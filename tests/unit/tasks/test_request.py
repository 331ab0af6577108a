"""What a message may have its own way, and what is refused with a sentence."""

from pathlib import Path

import pytest

from codex_workspace.common.errors import InputRefused
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.runtimes.backend import TurnOptions
from codex_workspace.tasks.request import MAX_SCHEMA_CHARS, TURN, TurnOverrides, read_turn_options
from codex_workspace.tasks.scheduling import MidTurn


def read(wishes: JsonValue, workspace: Path) -> TurnOverrides:
    return read_turn_options({TURN: wishes}, workspace, MidTurn.QUEUE)


def test_without_a_wish_all_is_as_usual(tmp_path: Path) -> None:
    usual = TurnOverrides(TurnOptions(), MidTurn.STEER)
    assert read_turn_options({"other": {"model": "x"}}, tmp_path, MidTurn.STEER) == usual
    assert read_turn_options({TURN: {}}, tmp_path, MidTurn.STEER) == usual


def test_wishes_are_granted(tmp_path: Path) -> None:
    (tmp_path / "services" / "api").mkdir(parents=True)
    schema: JsonObject = {"type": ["object", "null"], "properties": {}}
    wishes = read(
        {"model": "gpt-5.4", "effort": "high", "workingFolder": "services/api", "outputSchema": schema}, tmp_path
    )
    assert wishes.options == TurnOptions("gpt-5.4", "high", tmp_path.resolve() / "services" / "api", schema)
    assert read({"midTurn": "interrupt"}, tmp_path).mid_turn is MidTurn.INTERRUPT
    assert read({"outputSchema": {"anyOf": []}}, tmp_path).options.output_schema == {"anyOf": []}


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ("fast", "must be an object"),
        ({"colour": "red"}, "'colour' is unknown; valid options: model, effort"),
        ({"model": "a b"}, "model must be the name of a model"),
        ({"model": 5}, "model must be the name of a model"),
        ({"effort": "High!"}, "effort must be a word"),
        ({"workingFolder": ".."}, "inside the workspace"),
        ({"workingFolder": "nowhere"}, "existing folder inside the workspace"),
        ({"workingFolder": "a\0b"}, "must be the path of a folder"),
        ({"outputSchema": "object"}, "must be a JSON Schema"),
        ({"outputSchema": {"description": "x" * MAX_SCHEMA_CHARS}}, "must be a JSON Schema"),
        ({"outputSchema": {"type": "nonsense"}}, "type must be one of object, array"),
        ({"outputSchema": {"type": []}}, "type must be one of object, array"),
        ({"outputSchema": {"type": {"a": "object"}}}, "type must be one of object, array"),
        ({"midTurn": "shout"}, "midTurn must be one of"),
    ],
)
def test_invalid_options_are_rejected(tmp_path: Path, wishes: JsonValue, sentence: str) -> None:
    with pytest.raises(InputRefused, match=f"^metadata {TURN}: .*{sentence}"):
        read(wishes, tmp_path)
