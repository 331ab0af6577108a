"""What codex asks of people, as values: the question, the decision on it, and the result that tells codex.

`prompts` says a question to people and programs, `answers` understands what they say; `refusals` declines everything
where nobody is to be asked. Shapes: `codex app-server generate-json-schema`; recordings 0.72 to 0.169.

What to answer codex's own requests with when nobody is there to ask: a well-formed refusal for each kind.

Every request has to be answered by a *result* of its shape: codex 0.72 hangs for ever on an error, and no version
gives up waiting by itself. Shapes: `codex app-server generate-json-schema`; recordings 0.72 to 0.169.
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
"""A request of more JSON than this is no question for people: nobody can judge a command of that length."""

MAX_ASKED: Final = 20
"""More questions than these at once are no question for people; codex's own tool takes three."""


@dataclass(frozen=True, slots=True)
class CommandQuestion:
    """Whether codex may run `command`; None where codex does not say (0.72: it is the item's).

    With `to_terminal` it is input for a command that runs. `permissions` are asked for beyond the sandbox's, and
    `host` is what it wants to reach; both are rare.
    """

    command: str | None
    cwd: str | None
    reason: str | None
    to_terminal: bool = False
    permissions: JsonObject | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class PatchQuestion:
    """Whether codex may change files. With `grant_root` it asks to write there until the session ends."""

    changes: tuple[FilePatch, ...]
    reason: str | None
    grant_root: str | None


@dataclass(frozen=True, slots=True)
class PermissionQuestion:
    """Whether codex may have `permissions`, of codex's own shape, for what it runs from now on."""

    permissions: JsonObject
    cwd: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Option:
    """One answer to choose; its label is what codex wants to hear."""

    label: str
    description: str


@dataclass(frozen=True, slots=True)
class QuestionField:
    """One thing to know; words of one's own are an answer where `is_other` or where there are no options."""

    id: str
    header: str
    text: str
    options: tuple[Option, ...]
    is_other: bool
    is_secret: bool

    @property
    def accepts_text(self) -> bool:
        """Whether words of one's own are an answer."""
        return self.is_other or not self.options


@dataclass(frozen=True, slots=True)
class UserQuestion:
    """What the model wants to know; at least one thing, each with an id of its own."""

    asked: tuple[QuestionField, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Something to fill in; without fields, to say yes or no to. `schema` is the server's."""

    fields: tuple[Field, ...]
    schema: JsonObject


@dataclass(frozen=True, slots=True)
class ToolApproval:
    """A call of one of the server's tools, to be allowed. Codex says the tool's name from 0.169 on."""

    tool: str | None
    description: str | None
    arguments: JsonObject
    can_last: bool


@dataclass(frozen=True, slots=True)
class UrlRequest:
    """An address to open; yes means that what it asks for is done."""

    url: str


@dataclass(frozen=True, slots=True)
class FormQuestion:
    """What the MCP server `server`, or codex about it, wants; `message` is the server's sentence."""

    server: str
    message: str
    subject: Form | ToolApproval | UrlRequest


Question: TypeAlias = CommandQuestion | PatchQuestion | PermissionQuestion | UserQuestion | FormQuestion


@dataclass(frozen=True, slots=True)
class Approved:
    """Yes; with `for_session` the thread's later turns have it too.

    That is the same command, another patch of the same files, the permissions, or the tool with any arguments; codex
    does not ask again (0.163).
    """

    for_session: bool = False


@dataclass(frozen=True, slots=True)
class Declined:
    """No; `words` are for the model, and no result of codex's has room for them."""

    words: str = ""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to a `UserQuestion`, by the ids of what was asked."""

    answers: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class CompletedForm:
    """A `Form` as it was filled in."""

    content: JsonObject


Decision: TypeAlias = Approved | Declined | Answers | CompletedForm


def can_last(question: Question) -> bool:
    """Return whether the question can be answered with yes for the rest of the session."""
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
    """Return whether yes is an answer: not where an answer has to be chosen, or a form needs a value."""
    match question:
        case UserQuestion():
            return False
        case FormQuestion(subject=Form(fields)):
            return not any(field.required for field in fields)
        case _:
            return True


def read_question(request: Request, changes: tuple[FilePatch, ...] = ()) -> Question | None:
    """Return what codex asks of people; None for other requests, and for one of an odd shape or size. Never raises.

    `changes` are those of the item that the request is about: codex says them in the item's start alone.
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
    asked: JsonObject = {name: value for name, value in permissions.items() if value is not None}
    if not asked:
        raise InvalidField("permissions")
    return PermissionQuestion(asked, text_or_none(params, "cwd"), text_or_none(params, "reason"))


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
    """Return what an elicitation is about; codex's own modes beside MCP's two are for its own clients."""
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
    """Return the result that answers codex's request; what is declined is told as `refusals.refuse` has it.

    Raises:
        ValueError: the decision is no answer to this kind of question; `answers.understand` gives none such.
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
            # A list, as codex offers it, is not understood; nor is the same in `content` (0.163).
            return {"action": "accept", "content": {}, "_meta": {"persist": "session"}}
        case FormQuestion(), Approved():
            return {"action": "accept", "content": {}}
        case FormQuestion(subject=Form()), CompletedForm(content):
            return {"action": "accept", "content": content}
        case FormQuestion(), Declined():
            return {"action": "decline"}
        case _:
            raise ValueError(f"{type(decision).__name__} is no answer to a {type(question).__name__}")


DECLINED_REASON: Final = "nobody is there to answer; go on without it"
"""What the model reads where a refusal has room for a sentence."""

_REFUSALS: Final[dict[str, JsonObject]] = {
    "item/commandExecution/requestApproval": {"decision": "decline"},
    "item/fileChange/requestApproval": {"decision": "decline"},
    "item/permissions/requestApproval": {"permissions": {}},
    "item/tool/requestUserInput": {"answers": {}},
    "mcpServer/elicitation/request": {"action": "decline"},
    "item/tool/call": {"contentItems": [{"type": "inputText", "text": DECLINED_REASON}], "success": False},
}


def default_response(request: Request) -> JsonObject | None:
    """Return the refusal for `request`, or None for a kind that is not known: answer that one with an error.

    The token refresh is left unknown on purpose: there is no well-formed refusal of it, and an error ends the turn at
    once where silence would take codex 10 s.
    """
    return _REFUSALS.get(request.method)
