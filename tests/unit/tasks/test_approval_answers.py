"""What is understood of a person's words and a program's data, and above all what is no yes."""

import json
import re
import time
from typing import Final

import pytest
from a2a.types import Message, Part
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import FilePatch
from codex_workspace.protocol.server_requests import (
    Answers,
    Approved,
    BooleanField,
    Choice,
    CommandQuestion,
    CompletedForm,
    Decision,
    Declined,
    Field,
    FieldType,
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
    response_to,
)
from codex_workspace.tasks.approval_answers import UnclearAnswer, is_answer_word, parse_answer
from codex_workspace.tasks.request import TURN

COMMAND: Final = CommandQuestion("npm install", "/w", None)
ONCE: Final = FormQuestion("srv", "Allow?", ToolApproval("t", None, {}, can_last=False))
LINK: Final = FormQuestion("srv", "Open", UrlRequest("https://a.example"))


def form(*fields: Field) -> FormQuestion:
    return FormQuestion("srv", "Fill", Form(fields, {"type": "object", "properties": {}}))


def field(name: str, type_: FieldType, required: bool = True) -> Field:
    return Field(name, name, None, required, type_)


def decided(words: str, question: Question = COMMAND, data: JsonObject | None = None) -> Decision | None:
    """Return what was understood, None for nothing."""
    understood = parse_answer(question, words, data)
    return None if isinstance(understood, UnclearAnswer) else understood


# --- Yes and no ---


@pytest.mark.parametrize(
    "words",
    [
        *(
            "yes",
            "Yes.",
            "YES!",
            "y",
            "ok",
            "okay",
            "OK",
            "approve",
            "allow",
            "accept",
            "  yes\n",
            "yes please",
            "Yes, please.",
        ),
    ],
)
def test_yes(words: str) -> None:
    assert decided(words) == Approved()


@pytest.mark.parametrize(
    "words",
    [
        *("yes, for this session", "Yes for this session.", "yes, for  session", "approve for this session"),
        *("allow for the session!", "approveForSession", "acceptforsession"),
    ],
)
def test_yes_for_the_session(words: str) -> None:
    assert decided(words) == Approved(for_session=True)
    for question in (ONCE, LINK, form()):
        understood = parse_answer(question, words, None)
        assert isinstance(understood, UnclearAnswer)
        assert "whole session" in understood.sentence


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        *((words, "") for words in ("no", "No.", "n", "NO!", "decline", "Deny.", "reject")),
        ("no, use make instead", "use make instead"),
        ("No. Use make instead.", "Use make instead."),
        ("no - use make", "use make"),
        ("no — use make", "use make"),
        ("no use make instead", "use make instead"),
        ("no, too risky\nuse make", "too risky\nuse make"),
        ("decline: too risky", "too risky"),
        ("deny, use make", "use make"),
        ("no, problems would come of it", "problems would come of it"),
        ("no, do it in /srv instead", "do it in /srv instead"),
    ],
)
def test_no_with_the_reason_that_the_model_receives(words: str, reason: str) -> None:
    assert decided(words) == Declined(reason)


@pytest.mark.parametrize(
    "words",
    [
        *("", "   ", "yes?", "yes, but use make", "yes but not now", "yes and no", "yes no"),
        *("maybe", "later", "why?", "what does it do?", "if you must", "yes if it is safe", "ok, wait", "hm ok"),
        *("I approve of caution", "not yes", "never approve it", "yes for this turn", "yes to the first", "👍", "да"),
        *("continue", "please confirm", "go on", "next", "yes, but once more", "for session", "yes, but", "(yes)"),
        *('"yes" or "no"', '"yes', "yes`", "`yes` or `no`", '""', "*", "'", "yes once for this session"),
        *("always", "please", "it", "once", "for this session", "okey", "ye\u017f", "yes\u2028please", "yesyes"),
        *("approve this session", "nothing", "know", "noted", "done", "yes " * 200, "approve everything", "allow all"),
    ],
)
def test_unclear_answers_decide_nothing(words: str) -> None:
    understood = parse_answer(COMMAND, words, None)
    assert isinstance(understood, UnclearAnswer)


@pytest.mark.parametrize("words", ["yes", " Yes, please. ", "OK", "yes, for this session", "acceptForSession"])
def test_a_word_is_an_answer_without_a_task_id(words: str) -> None:
    assert is_answer_word(Message(parts=[Part(text=words)]))
    assert is_answer_word(Message(parts=[Part(text="No.")]))


@pytest.mark.parametrize(
    "message",
    [
        *(Message(parts=[Part(text=words)]) for words in ("", "no, use make", "No idea", "yes, but", "1", "hello")),
        *(Message(parts=parts) for parts in ([], [Part(text="yes"), Part(text="")], [Part(raw=b"yes")])),
        Message(parts=[Part(text="yes", filename="answer.txt")]),
        ParseDict({"parts": [{"text": "yes"}], "metadata": {TURN: {"midTurn": "queue"}}}, Message()),
    ],
    ids=repr,
)
def test_any_other_message_is_no_answer_without_a_task_id(message: Message) -> None:
    assert not is_answer_word(message)


YES_WORDS: Final = frozenset(("yes", "y", "ok", "okay", "approve", "allow", "accept", "approveforsession", "please"))
YES_WORDS_FOR_SESSION: Final = YES_WORDS | {"acceptforsession", "for", "the", "this", "session"}

SPOKEN: Final = st.lists(
    st.sampled_from(
        [
            *sorted(YES_WORDS_FOR_SESSION),
            "please",
            "no",
            "not",
            "don't",
            "but",
            "if",
            "never",
            "make",
            "?",
            "yes, but",
            "and",
            "wait",
            "n",
        ]
    ),
    max_size=8,
)


def is_documented(words: str) -> bool:
    said = re.sub("[,.!]", " ", words.lower())
    return said.isascii() and set(said.split()) <= YES_WORDS_FOR_SESSION


@settings(max_examples=500)
@given(st.text(max_size=40) | SPOKEN.map(" ".join) | SPOKEN.map(", ".join) | SPOKEN.map("".join))
def test_only_documented_answers_approve(words: str) -> None:
    for question in (COMMAND, ONCE, LINK, form()):
        if isinstance(parse_answer(question, words, None), Approved):
            assert is_documented(words), words


@settings(max_examples=300)
@given(
    st.sampled_from(["no", "not", "however", "if", "never", "make", "wait", "unless", "why"]), SPOKEN, st.integers(0, 8)
)
def test_other_text_never_approves(word: str, spoken: list[str], place: int) -> None:
    words = " ".join([*spoken[:place], word, *spoken[place:]])
    assert not isinstance(parse_answer(COMMAND, words, None), Approved)


@pytest.mark.alone
def test_long_answers_are_parsed_quickly() -> None:
    began = time.perf_counter()
    several = UserQuestion((asked(), asked(id_="r")))
    for filler in ('"', "*", "`", " ", "yes ", "no, ", "1:", "yes,", "\n", "do  ", ".", "always "):
        for words in (filler * 200_000 + "x", "yes" + filler * 200_000 + "x", "no" + filler * 200_000 + "x"):
            for question in (COMMAND, several, form(field("f", NumberField())), UserQuestion((asked(),))):
                parse_answer(question, words, None)
    assert time.perf_counter() - began < 20


# --- Data ---


@pytest.mark.parametrize(
    ("data", "decision"),
    [
        ({"decision": "approve"}, Approved()),
        ({"decision": "accept"}, Approved()),
        ({"decision": "approve", "reason": ""}, Approved()),
        ({"decision": "approve", "questionId": "7"}, Approved()),
        ({"decision": "approveForSession"}, Approved(True)),
        ({"decision": "acceptForSession"}, Approved(True)),
        ({"decision": "decline"}, Declined()),
        ({"decision": "decline", "reason": " use make "}, Declined("use make")),
    ],
)
def test_a_decision_as_data(data: JsonObject, decision: Decision) -> None:
    assert decided("", COMMAND, data) == decision


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"decision": "yes"},
        {"decision": "Approve"},
        {"decision": True},
        {"decision": None},
        {"decision": ["approve"]},
        {"decision": "approve", "reason": "but only once"},
        {"decision": "decline", "reason": 1},
        {"decision": "approve", "command": "rm -rf /"},
        {"answers": {"q": "yes"}},
        {"content": {}},
        {"questionId": "7"},
        {"decision": "approve", "content": {}},
    ],
)
def test_other_data_is_unclear_and_lists_what_is_allowed(data: JsonObject) -> None:
    understood = parse_answer(COMMAND, "", data)
    assert isinstance(understood, UnclearAnswer)
    assert "approve" in understood.sentence or "reason" in understood.sentence


@pytest.mark.parametrize(
    ("words", "data", "decision"),
    [
        ("yes", {"decision": "approve"}, None),
        ("yes, for this session", {"decision": "approve"}, None),
        ("no", {"decision": "approve"}, None),
        ("yes, but use make", {"decision": "approve"}, None),
        ("yes", {"decision": "decline"}, Declined("yes")),
        ("use make", {"decision": "decline"}, Declined("use make")),
        ("use make", {"decision": "decline", "reason": "r"}, Declined("r")),
        ("yes", {"decision": "maybe"}, None),
    ],
)
def test_text_beside_data(words: str, data: JsonObject, decision: Decision | None) -> None:
    assert decided(words, COMMAND, data) == decision


# --- Choices ---


def asked(*labels: str, id_: str = "q1", own: bool = False) -> QuestionField:
    return QuestionField(id_, f"Header {id_}", "Which?", tuple(Option(label, "") for label in labels), own, False)


PICK: Final = UserQuestion((asked("A (Recommended)", "B", "Use npm"),))
PICK_OR_SAY: Final = UserQuestion((asked("A (Recommended)", "B", own=True),))
SAY: Final = UserQuestion((asked(),))


@pytest.mark.parametrize(
    ("question", "words", "answer"),
    [
        *((PICK, words, "B") for words in ("B", "b", " b ", "2", "2.", "(2)")),
        *((PICK, words, "A (Recommended)") for words in ("a", "A (recommended)", "1")),
        (PICK, "use NPM", "Use npm"),
        (PICK_OR_SAY, "b", "B"),
        (PICK_OR_SAY, "neither of them", "neither of them"),
        (PICK_OR_SAY, "3", "3"),
        (SAY, "2", "2"),
        (SAY, "no", "no"),
        (SAY, "decline it politely", "decline it politely"),
        (UserQuestion((asked("2", "1"),)), "2", "2"),
        (UserQuestion((asked("yes", "no"),)), "No", "no"),
        (UserQuestion((asked("a", "A"),)), "A", "A"),
        (UserQuestion((asked("decline", "go on"),)), "decline", "decline"),
    ],
)
def test_a_choice(question: UserQuestion, words: str, answer: str) -> None:
    assert decided(words, question) == Answers({"q1": (answer,)})
    assert decided("", question, {"answers": {"q1": words}}) == Answers({"q1": (answer,)})


@pytest.mark.parametrize("question", [PICK, PICK_OR_SAY, SAY])
def test_a_question_can_be_declined(question: UserQuestion) -> None:
    assert decided("decline", question) == Declined()
    assert decided("Decline: ask me tomorrow", question) == Declined("ask me tomorrow")
    assert decided("", question, {"decision": "decline", "reason": "r"}) == Declined("r")
    assert decided("ask me tomorrow", question, {"decision": "decline"}) == Declined("ask me tomorrow")
    assert decided("", question, {"decision": "approve"}) is None


def test_an_unknown_option_is_unclear() -> None:
    for words in ("C", "4", "0", "A and B", "", "yes"):
        understood = parse_answer(PICK, words, None)
        assert isinstance(understood, UnclearAnswer)
    assert decided("no", PICK) == Declined()


TWO: Final = UserQuestion((asked("A", "B", id_="first"), asked(id_="second")))


@pytest.mark.parametrize(
    "words",
    [
        "1: B\n2: my words: two",
        "first: b\nsecond: my words: two",
        "2:my words: two\n\n1:2",
        "Header first: B\nHEADER SECOND: my words: two",
    ],
)
def test_several_questions_have_a_line_each(words: str) -> None:
    assert decided(words, TWO) == Answers({"first": ("B",), "second": ("my words: two",)})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("B", "Line 1"),
        ("1: B\nmore", "Line 2"),
        ("1: B\n3: x", "Line 2"),
        ("1: B", 'Answer exactly these questions: "first", "second".'),
        ("1: B\n2: x\n1: A", "Line 3"),
        ("1: C\n2: x", 'The answer to "first" is not one of its options.'),
        ("1: B\n2:", 'The answer to "second" is not one of its options.'),
        ("yes", "Line 1"),
    ],
)
def test_lines_that_are_not_understood(words: str, sentence: str) -> None:
    understood = parse_answer(TWO, words, None)
    assert isinstance(understood, UnclearAnswer)
    assert sentence in understood.sentence


def test_several_questions_can_be_declined() -> None:
    assert decided("no, ask me tomorrow", TWO) == Declined("ask me tomorrow")


def test_answers_as_data() -> None:
    answers: JsonObject = {"first": ["b"], "second": ["x", "y"]}
    assert decided("", TWO, {"answers": answers}) == Answers({"first": ("B",), "second": ("x", "y")})
    assert decided("", TWO, {"answers": {"first": [], "second": "x"}}) == Answers({"first": (), "second": ("x",)})
    assert decided("1: B\n2: x", TWO, {"answers": {"first": "B", "second": "x"}}) is None
    odd: list[JsonObject] = [
        {"first": "B"},
        {"first": "B", "second": "x", "third": "y"},
        {"first": "C", "second": "x"},
        {"first": 1, "second": "x"},
        {"first": [1], "second": "x"},
        {"first": "B", "second": {"answers": ["x"]}},
        {"first": "B", "second": " "},
        {},
    ]
    for each in odd:
        assert decided("", TWO, {"answers": each}) is None


# --- Forms ---


COLORS: Final = (Choice("red", "Red"), Choice("dark-blue", "Dark blue"))


@pytest.mark.parametrize(
    ("type_", "words", "value"),
    [
        (TextField(), "any words", "any words"),
        (TextField(), "yes", "yes"),
        (TextField(), "no, thanks", "no, thanks"),
        (TextField(), '{"other": 1}', '{"other": 1}'),
        (TextField(), '{"f": "from an object"}', "from an object"),
        (TextField(COLORS), "RED", "red"),
        (TextField(COLORS), "dark blue", "dark-blue"),
        (TextField(COLORS), "2", "dark-blue"),
        (NumberField(), "2.5", 2.5),
        (NumberField(whole=True), "-3", -3),
        (NumberField(whole=True), '{"f": 2.0}', 2),
        (BooleanField(), "yes", True),
        (BooleanField(), "No.", False),
        (BooleanField(), "true", True),
        (MultiChoice(COLORS), "red, dark blue", ["red", "dark-blue"]),
    ],
)
def test_a_form_with_one_field_accepts_its_value(type_: FieldType, words: str, value: JsonValue) -> None:
    understood = decided(words, form(field("f", type_)))
    assert understood == CompletedForm({"f": value})
    assert isinstance(understood, CompletedForm)
    assert type(understood.content["f"]) is type(value)


@pytest.mark.parametrize(
    ("type_", "words", "sentence"),
    [
        (TextField((), 3, None), "ab", '"f": String should have at least 3 characters'),
        (TextField((), None, 3), "abcd", '"f": String should have at most 3 characters'),
        (TextField(COLORS), "green", '"f" must be one of: "red", "dark-blue"'),
        (TextField(COLORS), '{"f": "Red"}', "\"f\": Input should be 'red' or"),
        (TextField(), '{"f": 1}', '"f": Input should be a valid string'),
        (NumberField(), "many", '"f" must be a number'),
        (NumberField(), "1e400", '"f" must be a number'),
        (NumberField(), '{"f": NaN}', "finite number"),
        (NumberField(), '{"f": true}', '"f": Input should be a valid number'),
        (NumberField(True), "2.5", "a valid integer"),
        (NumberField(True, 1, 5), "0", '"f": Input should be greater than or equal to 1'),
        (NumberField(True, 1, 5), "6", '"f": Input should be less than or equal to 5'),
        (BooleanField(), "maybe", '"f" must be yes or no'),
        (BooleanField(), '{"f": "yes"}', '"f": Input should be a valid boolean'),
        (MultiChoice(COLORS, 2, None), "red", "at least 2"),
        (MultiChoice(COLORS, None, 1), "red, red", "at most 1"),
        (MultiChoice(COLORS), "red, green", '"f" must be one of'),
        (MultiChoice(COLORS), '{"f": "red"}', "should be a valid list"),
        (MultiChoice(COLORS), '{"f": ["red", 1]}', "\"f\": Input should be 'red' or"),
        (TextField(), '{"f": null}', "Field required"),
    ],
)
def test_a_value_that_does_not_fit_names_its_field(type_: FieldType, words: str, sentence: str) -> None:
    understood = parse_answer(form(field("f", type_)), words, None)
    assert isinstance(understood, UnclearAnswer)
    assert sentence in understood.sentence


def test_a_form_of_one_field_can_be_declined() -> None:
    for type_ in (TextField(), TextField(COLORS), NumberField(), BooleanField(), MultiChoice(COLORS)):
        assert decided("decline", form(field("f", type_))) == Declined()
    assert decided("no", form(field("f", NumberField()))) == Declined()


CAR: Final = form(
    field("color", TextField(COLORS)), field("doors", NumberField(True, 2, 5)), field("note", TextField(), False)
)


def test_a_form_of_several_fields_is_an_object() -> None:
    good: JsonObject = {"color": "red", "doors": 3.0}
    assert decided(json.dumps(good), CAR) == CompletedForm({"color": "red", "doors": 3})
    assert decided("", CAR, {"content": good}) == CompletedForm({"color": "red", "doors": 3})
    assert decided("", CAR, {"content": good | {"note": None}}) == CompletedForm({"color": "red", "doors": 3})
    assert decided("no, ask somebody else", CAR) == Declined("ask somebody else")
    for words in ("yes", "red", "{", "[]", '{"color": "red"}', json.dumps(good | {"x": 1}), "{" * 100_000):
        assert decided(words, CAR) is None
    odd: list[JsonObject] = [
        {"content": {}},
        {"content": None},
        {"content": good, "x": 1},
        {"decision": "approve"},
        good,
    ]
    for data in odd:
        assert decided("", CAR, data) is None


def test_a_form_without_fields_is_yes_or_no() -> None:
    empty, optional = form(), form(field("a", TextField(), False), field("b", TextField(), False))
    for question in (empty, optional):
        assert decided("yes", question) == Approved()
        assert decided("no", question) == Declined()
        assert decided("", question, {"decision": "approve"}) == Approved()
        assert decided("yes, but", question) is None
    assert decided('{"a": "x"}', optional) == CompletedForm({"a": "x"})
    assert decided("", empty, {"content": {}}) is None


# --- Anything at all ---


QUESTIONS: Final[tuple[Question, ...]] = (
    *(COMMAND, ONCE, LINK, PICK, PICK_OR_SAY, SAY, TWO, CAR, form(), form(field("f", TextField()))),
    *(
        form(field("f", NumberField(True, 1, 2))),
        form(field("f", BooleanField())),
        form(field("f", MultiChoice(COLORS))),
    ),
    PatchQuestion((FilePatch("a", "add", "b"),), None, None),
    PermissionQuestion({"network": {"enabled": True}}, None, None),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
KEYS: Final = ("decision", "reason", "answers", "content", "questionId", "q1", "first", "second", "f", "color")
WORDS: Final = st.text(max_size=30) | SPOKEN.map(" ".join) | JSON.map(json.dumps)


@settings(max_examples=300)
@given(
    st.sampled_from(QUESTIONS),
    WORDS,
    st.none() | st.dictionaries(st.sampled_from(KEYS), JSON | st.dictionaries(st.sampled_from(KEYS), JSON), max_size=3),
)
def test_any_input_has_a_result(question: Question, words: str, data: JsonObject | None) -> None:
    understood = parse_answer(question, words, data)
    if isinstance(understood, UnclearAnswer):
        assert understood.sentence
    else:
        json.dumps(response_to(question, understood), allow_nan=False)
    if isinstance(understood, Approved) and data is not None:
        assert data.get("decision") in ("approve", "accept", "approveForSession", "acceptForSession")
