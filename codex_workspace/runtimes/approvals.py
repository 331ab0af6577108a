"""A question of codex as JSON, for programs."""

from collections.abc import Iterable, Iterator
from typing import Final, assert_never

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.codex_events import FilePatch
from codex_workspace.protocol.server_requests import (
    CommandQuestion,
    Form,
    FormQuestion,
    PatchQuestion,
    PermissionQuestion,
    Question,
    QuestionField,
    ToolApproval,
    UrlRequest,
    UserQuestion,
    can_last,
)
from codex_workspace.runtimes.markdown import unified_diff

MAX_DIFF_CHARS: Final = 100_000
"""The diffs of one question are limited to this many characters; further ones are null."""


def approval_data(question: Question) -> JsonObject:
    """Return the question as JSON: `kind`, the question's fields (null if unknown), and its `choices`.

    A question of kind `question` has options instead of choices; a form with fields has a schema.
    """
    match question:
        case CommandQuestion(command, cwd, reason, to_terminal, permissions, host):
            data: JsonObject = {"kind": "command", "command": command, "cwd": cwd, "reason": reason}
            data |= {"toTerminal": to_terminal, "permissions": permissions, "host": host}
        case PatchQuestion(changes, reason, grant_root):
            listed = list[JsonValue](_changes_data(changes))
            data = {"kind": "patch", "changes": listed, "reason": reason, "grantRoot": grant_root}
        case PermissionQuestion(permissions, cwd, reason):
            data = {"kind": "permission", "permissions": permissions, "cwd": cwd, "reason": reason}
        case UserQuestion(several):
            return {"kind": "question", "questions": [_field_data(each) for each in several]}
        case FormQuestion(server, message, subject):
            data = {**_subject_data(subject), "server": server, "message": message}
            if isinstance(subject, Form) and subject.fields:
                return data
        case _:
            assert_never(question)
    return data | {"choices": ["approve", *(["approveForSession"] if can_last(question) else []), "decline"]}


def _subject_data(subject: Form | ToolApproval | UrlRequest) -> JsonObject:
    match subject:
        case Form(_, schema):
            return {"kind": "form", "schema": schema}
        case ToolApproval(tool, description, arguments):
            return {"kind": "toolCall", "tool": tool, "description": description, "arguments": arguments}
        case UrlRequest(url):
            return {"kind": "url", "url": url}
        case _:
            assert_never(subject)


def _changes_data(changes: Iterable[FilePatch]) -> Iterator[JsonObject]:
    """Yield each change as JSON; `diff` is null if the diffs before it and it exceed `MAX_DIFF_CHARS`."""
    left = MAX_DIFF_CHARS
    for change in changes:
        diff = unified_diff((change,))
        fits = len(diff) <= left
        left -= len(diff) if fits else 0
        yield {"path": change.path, "kind": change.kind, "diff": diff if fits else None}


def _field_data(field: QuestionField) -> JsonObject:
    options: list[JsonValue] = [{"label": each.label, "description": each.description} for each in field.options]
    return {
        "id": field.id,
        "header": field.header,
        "question": field.text,
        "options": options,
        "isOther": field.is_other,
        "isSecret": field.is_secret,
    }
