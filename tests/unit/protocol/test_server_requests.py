"""Codex's questions as values and their results, held against what codex really asked and was really answered."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import FilePatch
from codex_workspace.protocol.jsonrpc import Request, decode
from codex_workspace.protocol.server_requests import (
    MAX_QUESTION_CHARS,
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
    can_last,
    default_response,
    read_question,
    response_to,
)
from tests.support.paths import RECORDINGS

ASKS_PEOPLE: Final = {
    "item/commandExecution/requestApproval": CommandQuestion,
    "item/fileChange/requestApproval": PatchQuestion,
    "item/permissions/requestApproval": PermissionQuestion,
    "item/tool/requestUserInput": UserQuestion,
    "mcpServer/elicitation/request": FormQuestion,
}


PATCH: Final = "item/fileChange/requestApproval"


def exchanges() -> Iterator[tuple[Request, JsonObject | None]]:
    """Everything that codex asked in the recordings, and the result that it was answered with."""
    for file in sorted(RECORDINGS.glob("*/*.ndjson")):
        open_: dict[int | str, Request] = {}
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            match entry.get("dir"), entry.get("msg"):
                case "<", dict(message):
                    request = decode(json.dumps(message).encode())
                    if isinstance(request, Request):
                        open_[request.id] = request
                case ">", {"id": int(id_) | str(id_), "result": dict(result)} if id_ in open_:
                    yield open_.pop(id_), result
                case _:
                    pass
        yield from ((request, None) for request in open_.values())


def test_every_recorded_question_is_parsed() -> None:
    kinds = Counter[str]()
    for request, _ in exchanges():
        question = read_question(request)
        kind = ASKS_PEOPLE.get(request.method)
        assert type(question) is (type(None) if kind is None else kind), request
        kinds[request.method] += 1
    assert set(ASKS_PEOPLE) <= set(kinds)


def test_recorded_questions_are_answered_in_the_recorded_shape() -> None:
    """Each good answer of the recordings is one that some decision gives, and each decision is held to one."""
    reached = set[str]()
    for request, result in exchanges():
        question = read_question(request)
        if question is None or result is None:
            continue
        for decision in (Approved(), Approved(for_session=True), Declined(), *given_in(question, result)):
            if told(question, decision) == result:
                reached.add(f"{type(question).__name__} {type(decision).__name__}")
    assert reached >= {
        "CommandQuestion Approved",
        "CommandQuestion Declined",
        "PermissionQuestion Approved",
        "UserQuestion Answers",
        "UserQuestion Declined",
        "FormQuestion CompletedForm",
        "FormQuestion Declined",
    }


def given_in(question: Question, result: JsonObject) -> list[Decision]:
    match question, result:
        case UserQuestion(), {"answers": {"q1": {"answers": [str(answer)]}}}:
            return [Answers({"q1": (answer,)})]
        case FormQuestion(), {"content": dict(content)}:
            return [CompletedForm(content)]
        case _:
            return []


def told(question: Question, decision: Decision) -> JsonObject | None:
    try:
        return response_to(question, decision)
    except ValueError:
        return None


@pytest.mark.parametrize("method", ASKS_PEOPLE)
def test_a_decline_is_the_refusal(method: str) -> None:
    question = EXAMPLES[ASKS_PEOPLE[method]]
    assert response_to(question, Declined("words")) == default_response(Request(0, method, {}))


NETWORK: Final[JsonObject] = {"network": {"enabled": True}}
TOOL: Final = FormQuestion("srv", "Allow?", ToolApproval("echo", "says it", {"text": "a"}, can_last=True))
EMPTY: Final = FormQuestion("srv", "Really?", Form((), {"type": "object", "properties": {}}))
EXAMPLES: Final[dict[type[Question], Question]] = {
    CommandQuestion: CommandQuestion("ls", "/w", None),
    PatchQuestion: PatchQuestion((), None, None),
    PermissionQuestion: PermissionQuestion(NETWORK, "/w", None),
    UserQuestion: UserQuestion((QuestionField("q1", "Pick", "Which?", (), False, False),)),
    FormQuestion: TOOL,
}


@pytest.mark.parametrize(
    ("question", "decision", "result"),
    [
        (EXAMPLES[CommandQuestion], Approved(), {"decision": "accept"}),
        (EXAMPLES[CommandQuestion], Approved(True), {"decision": "acceptForSession"}),
        (EXAMPLES[PatchQuestion], Approved(), {"decision": "accept"}),
        (EXAMPLES[PatchQuestion], Approved(True), {"decision": "acceptForSession"}),
        (EXAMPLES[PermissionQuestion], Approved(), {"permissions": NETWORK, "scope": "turn"}),
        (EXAMPLES[PermissionQuestion], Approved(True), {"permissions": NETWORK, "scope": "session"}),
        (EXAMPLES[UserQuestion], Answers({"q1": ("a", "b")}), {"answers": {"q1": {"answers": ["a", "b"]}}}),
        (TOOL, Approved(), {"action": "accept", "content": {}}),
        (TOOL, Approved(True), {"action": "accept", "content": {}, "_meta": {"persist": "session"}}),
        (EMPTY, Approved(True), {"action": "accept", "content": {}}),
        (EMPTY, CompletedForm({"n": 1}), {"action": "accept", "content": {"n": 1}}),
        (FormQuestion("srv", "Open", UrlRequest("https://a.example")), Approved(), {"action": "accept", "content": {}}),
    ],
)
def test_results(question: Question, decision: Decision, result: JsonObject) -> None:
    assert response_to(question, decision) == result


def test_a_decision_on_another_question_type_is_an_error() -> None:
    for question in EXAMPLES.values():
        for decision in (Answers({}), CompletedForm({}), Approved()):
            fits = told(question, decision) is not None
            expected = isinstance(decision, Answers if isinstance(question, UserQuestion) else Approved)
            assert fits == expected, (question, decision)


# --- Reading ---


def asks(method: str, **params: JsonValue) -> Question | None:
    return read_question(Request(0, method, params))


def test_a_command() -> None:
    method = "item/commandExecution/requestApproval"
    assert asks(method, itemId="i", reason=None) == CommandQuestion(None, None, None)
    full = asks(
        method,
        kind="writeStdin",
        command="y\n",
        cwd="/w",
        reason="why",
        additionalPermissions=NETWORK,
        networkApprovalContext={"host": "a.example", "protocol": "https"},
    )
    assert full == CommandQuestion("y\n", "/w", "why", True, NETWORK, "a.example")


def test_the_changes_of_a_patch_come_from_its_item() -> None:
    changes = (FilePatch("a.txt", "add", "x\n"),)
    ids: JsonObject = {"threadId": "t", "turnId": "u", "itemId": "call_22_0", "startedAtMs": 1795222393407}
    recorded = Request(0, PATCH, {**ids, "reason": None, "grantRoot": None})
    assert read_question(recorded, changes) == PatchQuestion(changes, None, None)
    assert asks(PATCH, reason="why", grantRoot="/w") == PatchQuestion((), "why", "/w")


def test_permissions_are_granted_as_requested() -> None:
    entry: JsonObject = {"path": {"type": "path", "path": "/o"}, "access": "write"}
    files: JsonObject = {"read": None, "write": ["/o"], "entries": [entry]}
    question = asks(
        "item/permissions/requestApproval", permissions={"network": None, "fileSystem": files}, cwd="/w", reason=None
    )
    assert question == PermissionQuestion({"fileSystem": files}, "/w", None)
    assert asks("item/permissions/requestApproval", permissions={"network": None, "fileSystem": None}) is None


def test_user_questions() -> None:
    options: JsonValue = [{"label": "A", "description": "a"}, {"label": "B"}]
    asked: JsonObject = {"id": "q", "header": "H", "question": "Which?", "options": options, "isOther": True}
    bare: JsonObject = {"id": "r", "question": "What?", "options": None, "isSecret": True}
    assert asks("item/tool/requestUserInput", questions=[asked, bare]) == UserQuestion(
        (
            QuestionField("q", "H", "Which?", (Option("A", "a"), Option("B", "")), True, False),
            QuestionField("r", "", "What?", (), False, True),
        )
    )
    twice: JsonValue = [bare, bare]
    idle: JsonValue = [{"id": "q"}]
    for odd in ([], twice, None, idle):
        assert asks("item/tool/requestUserInput", questions=odd) is None


def elicits(**params: JsonValue) -> Question | None:
    return asks("mcpServer/elicitation/request", serverName="srv", message="m", **params)


def test_a_forms_fields() -> None:
    schema: JsonObject = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "title": "A", "description": "d", "minLength": 1, "maxLength": 3, "format": "uri"},
            "b": {"type": "string", "enum": ["x", "y"], "enumNames": ["X", "Y"]},
            "c": {"type": "string", "oneOf": [{"const": "x", "title": "X"}]},
            "d": {"type": "integer", "minimum": 1, "maximum": 5},
            "e": {"type": "number", "minimum": 0.5},
            "f": {"type": "boolean"},
            "g": {"type": "array", "items": {"type": "string", "enum": ["x"]}, "minItems": 1, "maxItems": 2},
            "h": {"type": "array", "items": {"anyOf": [{"const": "x", "title": "X"}]}},
        },
        "required": ["a"],
    }
    x, titled = Choice("x", "x"), Choice("x", "X")
    types: tuple[FieldType, ...] = (
        TextField((titled, Choice("y", "Y"))),
        TextField((titled,)),
        NumberField(True, 1, 5),
        NumberField(False, 0.5),
        BooleanField(),
        MultiChoice((x,), 1, 2),
        MultiChoice((titled,)),
    )
    first = Field("a", "A", "d", True, TextField((), 1, 3, "uri"))
    others = [Field(name, name, None, False, type_) for name, type_ in zip("bcdefgh", types, strict=True)]
    assert elicits(mode="form", requestedSchema=schema) == FormQuestion("srv", "m", Form((first, *others), schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "object"}}},
        {"properties": {"a": {}}},
        {"properties": {"a": {"type": "array", "items": {"type": "string"}}}},
        {"properties": {"a": 1}},
        {"properties": {}, "required": ["a"]},
        {},
    ],
)
def test_a_form_of_an_odd_shape_is_no_question(schema: JsonObject) -> None:
    assert elicits(mode="form", requestedSchema=schema) is None


def test_a_tool_call_and_whether_it_can_be_for_the_session() -> None:
    def call(**meta: JsonValue) -> Question | None:
        return elicits(mode="form", requestedSchema={}, _meta={"codex_approval_kind": "mcp_tool_call", **meta})

    question = call(tool_name="t", tool_description="d", tool_params={"a": 1}, persist=["session", "always"])
    assert question == FormQuestion("srv", "m", ToolApproval("t", "d", {"a": 1}, can_last=True))
    cases: list[tuple[JsonValue, bool]] = [(["always"], False), (None, False), ("session", True), (["session"], True)]
    for persist, lasting in cases:
        question = call(persist=persist)
        assert question is not None
        assert can_last(question) is lasting


def test_modes_of_elicitation() -> None:
    assert elicits(mode="url", url="https://a.example") == FormQuestion("srv", "m", UrlRequest("https://a.example"))
    for mode in ("openai/form", "openaiForm", "openai/userVerification", "", None):
        assert elicits(mode=mode, requestedSchema={"properties": {}}) is None


def test_a_request_without_details_is_no_question() -> None:
    method = "item/commandExecution/requestApproval"
    assert asks(method, command="x" * (MAX_QUESTION_CHARS - 100)) is not None
    assert asks(method, command="x" * MAX_QUESTION_CHARS) is None
    deep: JsonValue = []
    for _ in range(100_000):
        deep = [deep]
    assert asks(method, command="x", other=deep) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
KEYS: Final = (
    *("command", "cwd", "reason", "permissions", "questions", "serverName", "message", "mode", "requestedSchema"),
    *("_meta", "url", "grantRoot", "kind", "additionalPermissions", "networkApprovalContext"),
)


@given(st.sampled_from([*ASKS_PEOPLE, "item/tool/call", ""]), st.dictionaries(st.sampled_from(KEYS) | st.text(), JSON))
def test_reading_never_raises(method: str, params: JsonObject) -> None:
    read_question(Request(0, method, params))


def test_each_recorded_request_has_a_declining_response() -> None:
    assert [request.method for request, _ in exchanges() if default_response(request) is None] == []


@pytest.mark.parametrize("method", ["account/chatgptAuthTokens/refresh", "new/kind", ""])
def test_unknown_requests_have_no_declining_response(method: str) -> None:
    assert default_response(Request(0, method, {})) is None
