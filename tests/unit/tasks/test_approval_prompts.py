"""What people and programs read of a question."""

import json
import re
from typing import TYPE_CHECKING, Final

import pytest

from codex_workspace.protocol.codex_events import FilePatch
from codex_workspace.protocol.server_requests import (
    BooleanField,
    Choice,
    CommandQuestion,
    Field,
    Form,
    FormQuestion,
    MultiChoice,
    NumberField,
    Option,
    PatchQuestion,
    PermissionQuestion,
    Question,
    QuestionField,
    TextField,
    ToolApproval,
    UrlRequest,
    UserQuestion,
)
from codex_workspace.runtimes.convert import MAX_DIFF_CHARS, approval_data
from codex_workspace.tasks.approval_prompts import (
    approval_prompt,
)

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject

CHOICES: Final = ["approve", "approveForSession", "decline"]
ONCE: Final = ["approve", "decline"]


def how(lasting: str) -> str:
    return (
        f"Answer `yes`, `yes, for this session` ({lasting}), or `no`; you can add what to do instead: "
        "`no, use make instead`."
    )


def test_a_command() -> None:
    question = CommandQuestion("npm install", "/w", "needs the\nnetwork")
    assert approval_prompt(question) == (
        f"Codex asks to run a command:\n\n```sh\nnpm install\n```\n\nFolder: /w\nReason: needs the network\n\n"
        f"{how('allows this command again')}"
    )
    assert approval_data(question) == {
        "kind": "command",
        "command": "npm install",
        "cwd": "/w",
        "reason": "needs the\nnetwork",
        "toTerminal": False,
        "permissions": None,
        "host": None,
        "choices": CHOICES,
    }


def test_a_command_with_all_that_belongs_to_it() -> None:
    shown = approval_prompt(CommandQuestion("y\n", "/w", None, True, {"network": {"enabled": True}}, "a.example"))
    assert "type into a running command" in shown
    assert '"enabled": true' in shown
    assert "Host: a.example" in shown
    assert "does not name the command" in approval_prompt(CommandQuestion(None, None, None))


def test_a_patch() -> None:
    changes = (FilePatch("a.txt", "add", "x\n"), FilePatch("b.txt", "update", "@@ -1 +1 @@\n-a\n+b\n"))
    question = PatchQuestion(changes, None, "/w")
    assert approval_prompt(question) == (
        "Codex asks to change 2 files:\n\n- add a.txt\n- update b.txt\n\n"
        "```diff\n--- /dev/null\n+++ a.txt\n@@ -0,0 +1,1 @@\n+x\n--- b.txt\n+++ b.txt\n@@ -1 +1 @@\n-a\n+b\n```\n\n"
        f"Write access for this session: /w\n\n{how('allows more changes to these files')}"
    )
    data = approval_data(question)
    assert (data["kind"], data["grantRoot"], data["choices"]) == ("patch", "/w", CHOICES)
    assert data["changes"] == [
        {"path": "a.txt", "kind": "add", "diff": "--- /dev/null\n+++ a.txt\n@@ -0,0 +1,1 @@\n+x\n"},
        {"path": "b.txt", "kind": "update", "diff": "--- b.txt\n+++ b.txt\n@@ -1 +1 @@\n-a\n+b\n"},
    ]
    assert "does not name them" in approval_prompt(PatchQuestion((), None, None))


def test_long_text_is_truncated_with_a_notice() -> None:
    large = tuple(FilePatch(f"{number}.txt", "add", "x" * 40_000) for number in range(40))
    question = PatchQuestion(large, None, None)
    assert re.search(r"- and 10 more\n", approval_prompt(question))
    assert re.search(r"\n\[… \d{7} characters left out …\]\n", approval_prompt(question))
    assert len(approval_prompt(question)) < 8000
    assert len(json.dumps(approval_data(question))) < MAX_DIFF_CHARS + 10_000
    changes = approval_data(question)["changes"]
    assert isinstance(changes, list)
    assert [isinstance(change, dict) and change["diff"] is not None for change in changes] == [True] * 2 + [False] * 38


def test_permissions() -> None:
    question = PermissionQuestion({"network": {"enabled": True}}, "/w", "need net")
    assert approval_prompt(question) == (
        'Codex asks for more permissions:\n\n```json\n{\n  "network": {\n    "enabled": true\n  }\n}\n```\n\n'
        f"Folder: /w\nReason: need net\n\n{how('otherwise the permissions end with this turn')}"
    )
    expected: JsonObject = {"kind": "permission", "permissions": {"network": {"enabled": True}}, "cwd": "/w"}
    assert approval_data(question) == {**expected, "reason": "need net", "choices": CHOICES}


PICK: Final = QuestionField(
    "q1", "Pick", "Which?", (Option("A (Recommended)", "the first"), Option("B", "")), True, False
)
NAME: Final = QuestionField("q2", "Name", "What name?", (), False, True)


def test_the_models_questions_are_shown() -> None:
    assert approval_prompt(UserQuestion((PICK,))) == (
        "Codex asks:\n\nWhich?\n   1. A (Recommended): the first\n   2. B\n   or your own words\n\n"
        "Answer with the number or the text of your choice, or `decline`."
    )
    assert approval_prompt(UserQuestion((NAME,))).endswith("Answer in your own words, or `decline`.")
    both = approval_prompt(UserQuestion((PICK, NAME)))
    assert "Codex asks 2 questions:\n\n1: Which?\n" in both
    assert "\n\n2: What name?\n   (a secret;" in both
    assert both.endswith("Answer with one line for each question, such as `1: …`, or `decline`.")
    assert approval_data(UserQuestion((PICK,))) == {
        "kind": "question",
        "questions": [
            {
                "id": "q1",
                "header": "Pick",
                "question": "Which?",
                "options": [
                    {"label": "A (Recommended)", "description": "the first"},
                    {"label": "B", "description": ""},
                ],
                "isOther": True,
                "isSecret": False,
            }
        ],
    }


FIELDS: Final = (
    Field("color", "Color", "of the car", True, TextField((Choice("red", "Red"), Choice("blue", "Blue")))),
    Field("plate", "plate", None, False, TextField((), 1, 8, "uri")),
    Field("doors", "doors", None, False, NumberField(True, 2, 5)),
    Field("used", "used", None, False, BooleanField()),
    Field("extras", "extras", None, False, MultiChoice((Choice("roof", "Roof"),), 1, None)),
)


def test_a_form() -> None:
    schema: JsonObject = {"type": "object", "properties": {}}
    question = FormQuestion("cars", "Which car?", Form(FIELDS, schema))
    assert approval_prompt(question) == (
        "The MCP server cars asks you to fill in a form: Which car?\n\n"
        '- `color`, Color (one of: "red", "blue"): of the car\n'
        "- `plate` (uri, at least 1 and at most 8 characters, optional)\n"
        "- `doors` (whole number, at least 2 and at most 5, optional)\n"
        "- `used` (true or false, optional)\n"
        '- `extras` (list, each one of: "roof", at least 1 of them, optional)\n\n'
        "Answer with a JSON object with these fields, or `decline`."
    )
    assert approval_data(question) == {"kind": "form", "server": "cars", "message": "Which car?", "schema": schema}
    optional = FormQuestion("cars", "m", Form(FIELDS[1:], schema))
    assert approval_prompt(optional).endswith("or `yes` to leave it empty, or `decline`.")
    assert "Answer with the value, or" in approval_prompt(FormQuestion("cars", "m", Form(FIELDS[:1], schema)))


def test_a_yes_or_no_of_a_server() -> None:
    question = FormQuestion("cars", "Really?", Form((), {"properties": {}}))
    assert approval_prompt(question) == "The MCP server cars asks: Really?\n\nAnswer `yes` or `no`."
    assert approval_data(question)["choices"] == ONCE


@pytest.mark.parametrize(("can_last", "choices"), [(True, CHOICES), (False, ONCE)])
def test_a_tool_call(can_last: bool, choices: list[str]) -> None:
    question = FormQuestion("cars", "Allow it?", ToolApproval("drive", "drives", {"km": 3}, can_last))
    shown = approval_prompt(question)
    assert shown.startswith(
        "Codex asks to call the tool drive of the MCP server cars: Allow it?\n\nDescription: drives"
    )
    assert '```json\n{\n  "km": 3\n}\n```' in shown
    assert ("for this session" in shown) is can_last
    expected: JsonObject = {"kind": "toolCall", "server": "cars", "tool": "drive", "description": "drives"}
    assert approval_data(question) == {**expected, "arguments": {"km": 3}, "message": "Allow it?", "choices": choices}


def test_an_address() -> None:
    question = FormQuestion("cars", "Log in", UrlRequest("https://a.example/x"))
    assert approval_prompt(question) == (
        "The MCP server cars asks you to open an address: Log in\n\n```\nhttps://a.example/x\n```\n\n"
        "Answer `yes` when that is done, or `no`."
    )
    assert approval_data(question)["url"] == "https://a.example/x"


@pytest.mark.parametrize("hidden", ["\x1b[2K", "\r", "\u202e", "\u2066", "\u200b", "\x00", "\ud800"])
def test_shown_text_cannot_hide_what_follows(hidden: str) -> None:
    spoken = f"a{hidden}b"
    assert hidden not in approval_prompt(CommandQuestion(spoken, spoken, spoken))
    assert hidden not in approval_prompt(
        UserQuestion((QuestionField("q", spoken, spoken, (Option(spoken, spoken),), True, False),))
    )


def test_a_sentence_of_the_model_stays_on_its_line() -> None:
    shown = approval_prompt(CommandQuestion("rm -rf x", None, "cleanup\n\nAnswer `yes` to go on.\u2028More"))
    assert "Reason: cleanup Answer `yes` to go on. More\n" in shown


QUESTIONS: Final[tuple[Question, ...]] = (
    CommandQuestion("x", "/w", "y"),
    PatchQuestion((FilePatch("a", "delete", "b"),), None, None),
    PermissionQuestion({"network": {}}, None, None),
    UserQuestion((PICK, NAME)),
    FormQuestion("s", "m", Form(FIELDS, {})),
    FormQuestion("s", "m", ToolApproval(None, None, {}, False)),
    FormQuestion("s", "m", UrlRequest("u")),
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_has_text_and_data(question: Question) -> None:
    assert approval_prompt(question).count("`decline`") + approval_prompt(question).count("`no`") == 1
    assert json.loads(json.dumps(approval_data(question))) == approval_data(question)
