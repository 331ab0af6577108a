"""Codex's requests to its client as values: questions to people, the decisions on them, and their results.

Codex waits for a result without a time limit. Shapes: `codex app-server generate-json-schema`, recordings 0.163 and
0.169.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from codex_workspace.common.values import (
    InvalidField,
    JsonObject,
    JsonValue,
    nested,
    nested_or_empty,
    objects,
    text,
    text_or_none,
    texts,
)
from codex_workspace.protocol.codex_events import FilePatch
from codex_workspace.protocol.forms import Field, read_fields
from codex_workspace.protocol.jsonrpc import Request

MAX_QUESTION_CHARS: Final = 200_000
"""A request with more JSON is declined: a person cannot judge a command of that length."""

MAX_ASKED: Final = 20
"""A request with more questions is declined; codex's own tool accepts three."""


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
    reader = _READERS.get(request.method)
    if reader is None:
        return None
    try:
        if len(json.dumps(request.params)) > MAX_QUESTION_CHARS:
            return None
        return reader(request.params, changes)
    except (InvalidField, RecursionError):
        return None


def _read_command(params: JsonObject, _: tuple[FilePatch, ...]) -> CommandQuestion:
    return CommandQuestion(
        text_or_none(params, "command"),
        text_or_none(params, "cwd"),
        text_or_none(params, "reason"),
        params.get("kind") == "writeStdin",
        nested_or_empty(params, "additionalPermissions") or None,
        text_or_none(nested_or_empty(params, "networkApprovalContext"), "host"),
    )


def _read_patch(params: JsonObject, changes: tuple[FilePatch, ...]) -> PatchQuestion:
    return PatchQuestion(changes, text_or_none(params, "reason"), text_or_none(params, "grantRoot"))


def _read_permission(params: JsonObject, _: tuple[FilePatch, ...]) -> PermissionQuestion:
    permissions = nested(params, "permissions")
    requested: JsonObject = {name: value for name, value in permissions.items() if value is not None}
    if not requested:
        raise InvalidField("permissions")
    return PermissionQuestion(requested, text_or_none(params, "cwd"), text_or_none(params, "reason"))


def _read_user_question(params: JsonObject, _: tuple[FilePatch, ...]) -> UserQuestion:
    asked = tuple(_read_asked(each) for each in objects(params, "questions"))
    if not 0 < len(asked) <= MAX_ASKED or len({each.id for each in asked}) < len(asked):
        raise InvalidField("questions")
    return UserQuestion(asked)


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


def _read_form_question(params: JsonObject, _: tuple[FilePatch, ...]) -> FormQuestion:
    return FormQuestion(text(params, "serverName"), text(params, "message"), _read_subject(params))


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
            return Form(read_fields(schema), schema)
        case mode:
            raise InvalidField(mode)


_READERS: Final[dict[str, Callable[[JsonObject, tuple[FilePatch, ...]], Question]]] = {
    "item/commandExecution/requestApproval": _read_command,
    "item/fileChange/requestApproval": _read_patch,
    "item/permissions/requestApproval": _read_permission,
    "item/tool/requestUserInput": _read_user_question,
    "mcpServer/elicitation/request": _read_form_question,
}


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
