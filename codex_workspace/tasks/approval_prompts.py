"""Codex's questions as Markdown for people: the action, its folder, the reason, and the choices.

The content is untrusted, because the model or an MCP server wrote it. It is fenced or put on one line, and characters
that would hide or reorder text are escaped.
"""

from collections.abc import Iterator
from typing import Final, assert_never

from codex_workspace.protocol.server_requests import (
    BooleanField,
    CommandQuestion,
    Field,
    Form,
    FormQuestion,
    MultiChoice,
    NumberField,
    PatchQuestion,
    PermissionQuestion,
    Question,
    QuestionField,
    TextField,
    ToolApproval,
    UrlRequest,
    UserQuestion,
    can_last,
    is_yes_or_no,
    list_choices,
)
from codex_workspace.runtimes.markdown import data, fenced, one_line, unified_diff

MAX_SHOWN_LINES: Final = 120
"""A prompt shows at most this many lines of a command or a diff."""

MAX_FILES_SHOWN: Final = 30


def approval_prompt(question: Question) -> str:
    """Return the text that asks a person a question and explains how to answer."""
    return "\n\n".join([*_body(question), _how_to_answer(question)])


def _body(question: Question) -> Iterator[str]:
    match question:
        case CommandQuestion():
            yield from _command(question)
        case PatchQuestion():
            yield from _patch(question)
        case PermissionQuestion(permissions, cwd, reason):
            yield "Codex asks for more permissions:"
            yield data(permissions)
            yield from _facts(("Folder", cwd), ("Reason", reason))
        case UserQuestion(asked):
            yield "Codex asks:" if len(asked) == 1 else f"Codex asks {len(asked)} questions:"
            for number, each in enumerate(asked, 1):
                yield _user_question(each, None if len(asked) == 1 else number)
        case FormQuestion():
            yield from _form_question(question)
        case _:
            assert_never(question)


def _command(question: CommandQuestion) -> Iterator[str]:
    wants = "type into a running command" if question.to_terminal else "run a command"
    yield f"Codex asks to {wants}:"
    command = question.command
    yield ("(codex does not name the command)" if command is None else fenced(command, "sh", MAX_SHOWN_LINES))
    if question.permissions is not None:
        yield "With permissions that the sandbox does not grant:"
        yield data(question.permissions)
    yield from _facts(("Folder", question.cwd), ("Host", question.host), ("Reason", question.reason))


def _patch(question: PatchQuestion) -> Iterator[str]:
    changes = question.changes
    if changes:
        yield f"Codex asks to change {len(changes)} file{'s' if len(changes) > 1 else ''}:"
        files = [f"- {each.kind} {one_line(each.path)}" for each in changes[:MAX_FILES_SHOWN]]
        more = len(changes) - MAX_FILES_SHOWN
        yield "\n".join(files + ([f"- and {more} more"] if more > 0 else []))
        yield fenced(unified_diff(changes), "diff", MAX_SHOWN_LINES)
    else:
        yield "Codex asks to change files, but does not name them."
    yield from _facts(("Reason", question.reason), ("Write access for this session", question.grant_root))


def _form_question(question: FormQuestion) -> Iterator[str]:
    server, message = one_line(question.server), one_line(question.message)
    match question.subject:
        case ToolApproval(tool, description, arguments):
            called = f"the tool {one_line(tool)}" if tool else "a tool"
            yield f"Codex asks to call {called} of the MCP server {server}: {message}"
            yield from _facts(("Description", description))
            yield "Arguments:"
            yield data(arguments)
        case UrlRequest(url):
            yield f"The MCP server {server} asks you to open an address: {message}"
            yield fenced(url)
        case Form(()):
            yield f"The MCP server {server} asks: {message}"
        case Form(fields):
            yield f"The MCP server {server} asks you to fill in a form: {message}"
            yield "\n".join(_field(field) for field in fields)
        case _:
            assert_never(question.subject)


def _facts(*facts: tuple[str, str | None]) -> Iterator[str]:
    known = [f"{name}: {one_line(value)}" for name, value in facts if value]
    if known:
        yield "\n".join(known)


def _user_question(asked: QuestionField, number: int | None) -> str:
    head = one_line(asked.text) if number is None else f"{number}: {one_line(asked.text)}"
    options = [
        f"   {place}. {one_line(option.label)}" + (f": {one_line(option.description)}" if option.description else "")
        for place, option in enumerate(asked.options, 1)
    ]
    own = ["   or your own words"] if asked.options and asked.is_other else []
    secret = ["   (a secret; note that this task's history stores your answer)"] if asked.is_secret else []
    return "\n".join([head, *options, *own, *secret])


def _field(field: Field) -> str:
    title = "" if field.title == field.name else f", {one_line(field.title)}"
    description = f": {one_line(field.description)}" if field.description else ""
    optional = "" if field.required else ", optional"
    return f"- `{one_line(field.name)}`{title} ({one_line(_type_of(field))}{optional}){description}"


def _type_of(field: Field) -> str:
    match field.type:
        case TextField(choices) if choices:
            return list_choices(choices)
        case TextField(_, shortest, longest, format_):
            return f"{format_ or 'text'}{_span(shortest, longest, ' characters')}"
        case NumberField(whole, lowest, highest):
            return f"{'whole number' if whole else 'number'}{_span(lowest, highest, '')}"
        case BooleanField():
            return "true or false"
        case MultiChoice(choices, fewest, most):
            return f"list, each {list_choices(choices)}{_span(fewest, most, ' of them')}"
        case _:
            assert_never(field.type)


def _span(least: float | None, most: float | None, unit: str) -> str:
    bounds = ([f"at least {least}"] if least is not None else []) + ([f"at most {most}"] if most is not None else [])
    return f", {' and '.join(bounds)}{unit}" if bounds else ""


def _how_to_answer(question: Question) -> str:
    match question:
        case UserQuestion(asked):
            return _how_to_choose(asked)
        case FormQuestion(subject=Form(fields)) if fields:
            return _how_to_fill_in(fields, is_yes_or_no(question))
        case FormQuestion(subject=UrlRequest()):
            return "Answer `yes` when that is done, or `no`."
        case FormQuestion(subject=Form()):
            return "Answer `yes` or `no`."
        case _:
            session = f", `yes, for this session` ({_lasting(question)})," if can_last(question) else ""
            return f"Answer `yes`{session} or `no`; you can add what to do instead: `no, use make instead`."


def _lasting(question: Question) -> str:
    """Return what `yes, for this session` allows without another question (0.163)."""
    match question:
        case CommandQuestion():
            return "allows this command again"
        case PatchQuestion():
            return "allows more changes to these files"
        case FormQuestion():
            return "allows this tool with any arguments"
        case _:
            return "otherwise the permissions end with this turn"


def _how_to_choose(asked: tuple[QuestionField, ...]) -> str:
    if len(asked) > 1:
        return "Answer with one line for each question, such as `1: …`, or `decline`."
    if asked[0].options:
        return "Answer with the number or the text of your choice, or `decline`."
    return "Answer in your own words, or `decline`."


def _how_to_fill_in(fields: tuple[Field, ...], may_be_empty: bool) -> str:
    if len(fields) == 1:
        return "Answer with the value, or with a JSON object that contains the field, or `decline`."
    empty = "`yes` to leave it empty, or " if may_be_empty else ""
    return f"Answer with a JSON object with these fields, or {empty}`decline`."
