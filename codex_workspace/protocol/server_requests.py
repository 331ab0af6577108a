"""Codex's requests to its client as values: questions to people, the decisions on them, and their results.

Codex waits for a result without a time limit. Shapes: `codex app-server generate-json-schema`, recordings 0.163 and
0.169. An MCP server's form is a flat object of primitive fields (`McpElicitationSchema`, MCP 2025-11-25).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import FilePatch
from codex_workspace.protocol.jsonrpc import (
    InvalidField,
    Request,
    nested,
    nested_or_empty,
    number_or_none,
    objects,
    text,
    text_or_none,
    texts,
)

MAX_QUESTION_CHARS: Final = 200_000
"""A request with more JSON is declined: a person cannot judge a command of that length."""

_MAX_SHOWN: Final = 20
"""How many choices or fields a sentence names."""

_MAX_WORD_CHARS: Final = 200
_MAX_PROBLEM_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class CommandQuestion:
    """Whether codex may run `command`.

    to_terminal: `command` is input for a running command.
    permissions: permissions beyond those of the sandbox.
    host: the host that the command connects to.
    """

    command: str | None
    cwd: str | None
    reason: str | None
    to_terminal: bool = False
    permissions: JsonObject | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class PatchQuestion:
    """Whether codex may change files; with `grant_root`, whether it may write there until the session ends."""

    changes: tuple[FilePatch, ...]
    reason: str | None
    grant_root: str | None


@dataclass(frozen=True, slots=True)
class PermissionQuestion:
    """Whether codex may have `permissions`, in codex's shape, for its further commands."""

    permissions: JsonObject
    cwd: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a question; its label is the answer."""

    label: str
    description: str


@dataclass(frozen=True, slots=True)
class QuestionField:
    """A question of the model."""

    id: str
    header: str
    text: str
    options: tuple[Option, ...]
    is_other: bool
    is_secret: bool

    @property
    def accepts_text(self) -> bool:
        """Whether free text is an answer."""
        return self.is_other or not self.options


@dataclass(frozen=True, slots=True)
class UserQuestion:
    """One or more questions of the model, with unique ids."""

    asked: tuple[QuestionField, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the values that a field permits, and its title for people."""

    value: str
    title: str


@dataclass(frozen=True, slots=True)
class TextField:
    """A text, or one of `choices` if there are any; lengths are in characters."""

    choices: tuple[Choice, ...] = ()
    min_length: int | None = None
    max_length: int | None = None
    format: str | None = None


@dataclass(frozen=True, slots=True)
class NumberField:
    """A number, or an integer if `whole` is set; the bounds are inclusive."""

    whole: bool = False
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class BooleanField:
    """True or false."""


@dataclass(frozen=True, slots=True)
class MultiChoice:
    """A list of values from `choices`."""

    choices: tuple[Choice, ...]
    min_items: int | None = None
    max_items: int | None = None


FieldType: TypeAlias = TextField | NumberField | BooleanField | MultiChoice


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form; `title` is its name if the server gave none."""

    name: str
    title: str
    description: str | None
    required: bool
    type: FieldType


@dataclass(frozen=True, slots=True)
class Form:
    """A form to fill in, or without fields to confirm; `schema` is the server's JSON Schema."""

    fields: tuple[Field, ...]
    schema: JsonObject


@dataclass(frozen=True, slots=True)
class ToolApproval:
    """A call of one of the server's tools; `tool` is None for a codex older than 0.169."""

    tool: str | None
    description: str | None
    arguments: JsonObject
    can_last: bool


@dataclass(frozen=True, slots=True)
class UrlRequest:
    """A URL to open; yes means that the person has finished there."""

    url: str


@dataclass(frozen=True, slots=True)
class FormQuestion:
    """A question of the MCP server `server`, or of codex about it; `message` is the server's text."""

    server: str
    message: str
    subject: Form | ToolApproval | UrlRequest


Question: TypeAlias = CommandQuestion | PatchQuestion | PermissionQuestion | UserQuestion | FormQuestion


@dataclass(frozen=True, slots=True)
class Approved:
    """Yes; with `for_session` codex does not ask again in this thread.

    This covers the same command, another patch of the same files, the permissions, or the tool with any arguments.
    """

    for_session: bool = False


@dataclass(frozen=True, slots=True)
class Declined:
    """No; `words` are for the model, and are sent as input because codex's results cannot hold them."""

    words: str = ""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to a `UserQuestion`, by the ids of its questions."""

    answers: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class CompletedForm:
    """The content of a completed `Form`."""

    content: JsonObject


Decision: TypeAlias = Approved | Declined | Answers | CompletedForm


def can_last(question: Question) -> bool:
    """Return whether the question can be approved for the rest of the session."""
    match question:
        case (
            CommandQuestion()
            | PatchQuestion()
            | PermissionQuestion()
            | FormQuestion(subject=ToolApproval(can_last=True))
        ):
            return True
        case _:
            return False


def is_yes_or_no(question: Question) -> bool:
    """Return whether yes is an answer; it is not if an answer must be chosen, or a form requires a value."""
    match question:
        case UserQuestion():
            return False
        case FormQuestion(subject=Form(fields)):
            return not any(field.required for field in fields)
        case _:
            return True


def read_question(request: Request, changes: tuple[FilePatch, ...] = ()) -> Question | None:
    """Return the question in a request; None for other requests, and for an invalid or oversized one. Never raises.

    `changes` are those of the request's item; codex sends them in the item's start only.
    """
    try:
        is_oversized = len(json.dumps(request.params)) > MAX_QUESTION_CHARS
        return None if is_oversized else _read_question(request.method, request.params, changes)
    except (InvalidField, RecursionError):
        return None


def _read_question(method: str, params: JsonObject, changes: tuple[FilePatch, ...]) -> Question | None:
    cwd, reason = text_or_none(params, "cwd"), text_or_none(params, "reason")
    match method:
        case "item/commandExecution/requestApproval":
            return CommandQuestion(
                text_or_none(params, "command"),
                cwd,
                reason,
                params.get("kind") == "writeStdin",
                nested_or_empty(params, "additionalPermissions") or None,
                text_or_none(nested_or_empty(params, "networkApprovalContext"), "host"),
            )
        case "item/fileChange/requestApproval":
            return PatchQuestion(changes, reason, text_or_none(params, "grantRoot"))
        case "item/permissions/requestApproval":
            permissions = nested(params, "permissions")
            requested: JsonObject = {name: value for name, value in permissions.items() if value is not None}
            return PermissionQuestion(requested, cwd, reason) if requested else None
        case "item/tool/requestUserInput":
            asked = tuple(_read_asked(each) for each in objects(params, "questions"))
            return UserQuestion(asked) if asked and len({each.id for each in asked}) == len(asked) else None
        case "mcpServer/elicitation/request":
            return FormQuestion(text(params, "serverName"), text(params, "message"), _read_subject(params))
        case _:
            return None


def _read_asked(asked: JsonObject) -> QuestionField:
    options = tuple(
        Option(text(option, "label"), text_or_none(option, "description") or "") for option in objects(asked, "options")
    )
    return QuestionField(
        text(asked, "id"),
        text_or_none(asked, "header") or "",
        text(asked, "question"),
        options,
        asked.get("isOther") is True,
        asked.get("isSecret") is True,
    )


def _read_subject(params: JsonObject) -> Form | ToolApproval | UrlRequest:
    meta = nested_or_empty(params, "_meta")
    match text(params, "mode"):
        case "url":
            return UrlRequest(text(params, "url"))
        case "form" if meta.get("codex_approval_kind") == "mcp_tool_call":
            return ToolApproval(
                text_or_none(meta, "tool_name"),
                text_or_none(meta, "tool_description"),
                nested_or_empty(meta, "tool_params"),
                "session" in texts(meta, "persist") or meta.get("persist") == "session",
            )
        case "form":
            schema = nested(params, "requestedSchema")
            properties, required = nested(schema, "properties"), texts(schema, "required")
            if not properties.keys() >= set(required):
                raise InvalidField("required")
            fields = (_read_field(name, nested(properties, name), name in required) for name in properties)
            return Form(tuple(fields), schema)
        case mode:
            raise InvalidField(mode)


def _read_field(name: str, schema: JsonObject, required: bool) -> Field:
    return Field(
        name, text_or_none(schema, "title") or name, text_or_none(schema, "description"), required, _type(schema)
    )


def _type(schema: JsonObject) -> FieldType:
    match text(schema, "type"):
        case "string":
            return TextField(
                _choices(schema, "oneOf"),
                number_or_none(schema, "minLength"),
                number_or_none(schema, "maxLength"),
                text_or_none(schema, "format"),
            )
        case "number" | "integer" as kind:
            return NumberField(kind == "integer", _bound(schema, "minimum"), _bound(schema, "maximum"))
        case "boolean":
            return BooleanField()
        case "array":
            choices = _choices(nested(schema, "items"), "anyOf")
            if not choices:
                raise InvalidField("items")
            return MultiChoice(choices, number_or_none(schema, "minItems"), number_or_none(schema, "maxItems"))
        case other:
            raise InvalidField(other)


def _choices(schema: JsonObject, titled: str) -> tuple[Choice, ...]:
    """Return the choices in one of MCP's three forms: constants with titles, an enum with names, or an enum."""
    if titled in schema:
        return tuple(Choice(text(each, "const"), text(each, "title")) for each in objects(schema, titled))
    values, names = texts(schema, "enum"), texts(schema, "enumNames")
    return tuple(map(Choice, values, names if len(names) == len(values) else values))


def _bound(schema: JsonObject, key: str) -> float | None:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def response_to(question: Question, decision: Decision) -> JsonObject:
    """Return the result for codex's request.

    Raises:
        ValueError: the decision is not an answer to this kind of question.
    """
    match question, decision:
        case ((CommandQuestion() | PatchQuestion()), Approved(for_session)):
            return {"decision": "acceptForSession" if for_session else "accept"}
        case ((CommandQuestion() | PatchQuestion()), Declined()):
            return {"decision": "decline"}
        case PermissionQuestion(permissions), Approved(for_session):
            return {"permissions": permissions, "scope": "session" if for_session else "turn"}
        case PermissionQuestion(), Declined():
            return {"permissions": {}}
        case UserQuestion(), Answers(answers):
            return {"answers": {id_: {"answers": list[JsonValue](given)} for id_, given in answers.items()}}
        case UserQuestion(), Declined():
            return {"answers": {}}
        case FormQuestion(subject=ToolApproval(can_last=True)), Approved(for_session=True):
            # Codex 0.163 ignores a list here, although it offers one, and a value in `content`.
            return {"action": "accept", "content": {}, "_meta": {"persist": "session"}}
        case FormQuestion(), Approved():
            return {"action": "accept", "content": {}}
        case FormQuestion(subject=Form()), CompletedForm(content):
            return {"action": "accept", "content": content}
        case FormQuestion(), Declined():
            return {"action": "decline"}
        case _:
            raise ValueError(f"{type(decision).__name__} is not an answer to a {type(question).__name__}")


DECLINED_REASON: Final = "no person is available to answer; continue without it"
"""The text for the model in the default response to a tool call."""

_DEFAULT_RESPONSES: Final[dict[str, JsonObject]] = {
    "item/commandExecution/requestApproval": {"decision": "decline"},
    "item/fileChange/requestApproval": {"decision": "decline"},
    "item/permissions/requestApproval": {"permissions": {}},
    "item/tool/requestUserInput": {"answers": {}},
    "mcpServer/elicitation/request": {"action": "decline"},
    "item/tool/call": {"contentItems": [{"type": "inputText", "text": DECLINED_REASON}], "success": False},
}


def default_response(request: Request) -> JsonObject | None:
    """Return the result that declines `request`; None for an unknown kind, which is answered with an error.

    There is no valid result that declines a token refresh; an error ends the turn at once, silence after 10 s.
    """
    return _DEFAULT_RESPONSES.get(request.method)


class InvalidContent(ValueError):
    """Content that does not match its form; the message is for a person and names the field."""


def validate(fields: tuple[Field, ...], content: JsonObject) -> JsonObject:
    """Return `content` as the form requires it, with integers as such (A2A sends all numbers as floats).

    A field that is not required may be missing or null.

    Raises:
        InvalidContent: a field is missing, is unknown, or has a value that it does not permit.
    """
    types = {field.name: core_schema.typed_dict_field(_schema(field.type), required=field.required) for field in fields}
    validator = SchemaValidator(core_schema.typed_dict_schema(types, extra_behavior="forbid"))
    try:
        valid: JsonObject = validator.validate_python({k: v for k, v in content.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name, problem = format_value(str(first["loc"][0])), first["msg"][:_MAX_PROBLEM_CHARS]
        raise InvalidContent(f"{name}: {problem}. The form's fields are: {field_names(fields)}.") from None
    except UnicodeEncodeError:
        raise InvalidContent("The content is not valid Unicode.") from None
    return valid


def _schema(type_: FieldType) -> CoreSchema:
    match type_:
        case TextField((), shortest, longest):
            return core_schema.str_schema(strict=True, min_length=shortest, max_length=longest)
        case TextField(choices):
            return core_schema.literal_schema([choice.value for choice in choices])
        case NumberField(whole, lowest, highest):
            number = core_schema.float_schema(strict=True, ge=lowest, le=highest, allow_inf_nan=False)
            return core_schema.chain_schema([number, core_schema.int_schema()]) if whole else number
        case BooleanField():
            return core_schema.bool_schema(strict=True)
        case MultiChoice(choices, fewest, most):
            values = core_schema.literal_schema([choice.value for choice in choices])
            return core_schema.list_schema(values, strict=True, min_length=fewest, max_length=most)
        case _:
            assert_never(type_)


def field_names(fields: tuple[Field, ...]) -> str:
    """Return the names of at most twenty of the fields."""
    names = ", ".join(format_value(field.name) for field in fields[:_MAX_SHOWN])
    return names if len(fields) <= _MAX_SHOWN else f"{names} and {len(fields) - _MAX_SHOWN} more"


def list_choices(choices: tuple[Choice, ...]) -> str:
    """Return at most twenty of the choices, in the form: one of: "a", "b"."""
    more = len(choices) - _MAX_SHOWN
    values = ", ".join(format_value(choice.value) for choice in choices[:_MAX_SHOWN])
    return f"one of: {values}" + (f" and {more} more" if more > 0 else "")


def format_value(word: str) -> str:
    """Return an untrusted name for a sentence: quoted, escaped, and cut at 200 characters."""
    return json.dumps(word if len(word) <= _MAX_WORD_CHARS else f"{word[:_MAX_WORD_CHARS]}…", ensure_ascii=False)
