"""Parses answers to codex's questions: words of a person, or a data part of a program.

Only the documented words approve. Everything else is an `UnclearAnswer`, and the agent asks again.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.server_requests import (
    Answers,
    Approved,
    BooleanField,
    Choice,
    CompletedForm,
    Decision,
    Declined,
    Field,
    Form,
    FormQuestion,
    InvalidContent,
    MultiChoice,
    NumberField,
    Question,
    QuestionField,
    TextField,
    UserQuestion,
    can_last,
    field_names,
    format_value,
    is_yes_or_no,
    list_choices,
    validate,
)


@dataclass(frozen=True, slots=True)
class UnclearAnswer:
    """An answer that decides nothing; `sentence` tells its sender which answers are valid."""

    sentence: str


_FLAGS: Final = re.ASCII | re.IGNORECASE
"""ASCII, so that no letter of another script passes for one of these words."""

_YES: Final = re.compile(
    r"(?:yes|y|ok|okay|approve|accept|allow)(?P<session>,?\s+for\s+(?:(?:this|the)\s+)?session)?(?:,?\s+please)?\s*[.!]?",
    _FLAGS,
)
_YES_FOR_SESSION: Final = re.compile(r"(?:approve|accept)ForSession", _FLAGS)
_NO: Final = re.compile(
    r"(?:no|n|decline|deny|reject)(?:\s*[,.;:!\u2013\u2014-]+\s*|\s+|$)(?P<words>.*)", _FLAGS | re.DOTALL
)
_DECLINE: Final = re.compile(r"decline(?:\s*[.!]|\s*[:,]\s*(?P<words>.+))?", _FLAGS | re.DOTALL)
"""How to decline if any text is a valid answer."""

_MAX_NAMED: Final = 20
"""A sentence names at most this many options."""

_RECOMMENDED: Final = " (recommended)"
"""The model's mark at an option; the answer may leave it out."""

_CONTRADICTION: Final = UnclearAnswer("The text and the data part contradict each other. Send one of them.")


def parse_answer(question: Question, text: str, data: JsonObject | None) -> Decision | UnclearAnswer:
    """Return the decision of an answer with this text and this data part; never raises.

    The data part is `{"decision": "approve" | "approveForSession" | "decline", "reason": …}`,
    `{"answers": {id: "x" | ["x", …]}}` or `{"content": {…}}`; the caller compares its `questionId`. Text beside it is
    the reason of a decline, or states the same decision.
    """
    words = text.strip()
    if data is None:
        return _parse_words(question, words)
    decision = _parse_data(question, {key: value for key, value in data.items() if key != "questionId"})
    if isinstance(decision, UnclearAnswer) or not words:
        return decision
    stated = _parse_words(question, words)
    if isinstance(decision, Declined) and not isinstance(stated, Approved):
        reason = stated.words if isinstance(stated, Declined) else words
        return decision if decision.words else Declined(reason)
    return decision if decision == stated else _CONTRADICTION


# --- Data parts ---


def _parse_data(question: Question, data: JsonObject) -> Decision | UnclearAnswer:
    fields = _fields_of(question)
    match data:
        case {"decision": "approve" | "accept", **rest} if not any(rest.values()) and set(rest) <= {"reason"}:
            return _approved(question, for_session=False)
        case {"decision": "approveForSession" | "acceptForSession", **rest} if not rest:
            return _approved(question, for_session=True)
        case {"decision": "decline", **rest} if set(rest) <= {"reason"} and isinstance(rest.get("reason", ""), str):
            return Declined(str(rest.get("reason", "")).strip())
        case {"answers": dict(answers)} if len(data) == 1 and isinstance(question, UserQuestion):
            return _answers(question.asked, {id_: _texts(value) for id_, value in answers.items()})
        case {"content": dict(content)} if len(data) == 1 and fields:
            return _completed(fields, content)
        case _:
            return UnclearAnswer(f"The data part must be {_valid_data(question)}; only a decline has a reason.")


def _valid_data(question: Question) -> str:
    declining = '{"decision": "decline", "reason": "…"}'
    match question:
        case UserQuestion(asked):
            return (
                f'{{"answers": {{{format_value(asked[0].id)}: "…"}}}} with an answer to each question, or {declining}'
            )
        case FormQuestion(subject=Form(fields)) if fields:
            return f'{{"content": {{{format_value(fields[0].name)}: …}}}}, or {declining}'
        case _:
            session = ', {"decision": "approveForSession"}' if can_last(question) else ""
            return f'{{"decision": "approve"}}{session} or {declining}'


def _approved(question: Question, *, for_session: bool) -> Approved | UnclearAnswer:
    if not is_yes_or_no(question):
        return UnclearAnswer(f"Yes is not an answer to this question. {_valid_words(question)}")
    if for_session and not can_last(question):
        return UnclearAnswer("This cannot be approved for the whole session. Answer yes for this once, or no.")
    return Approved(for_session)


def _texts(value: JsonValue) -> tuple[str, ...] | None:
    values = value if isinstance(value, list) else [value]
    texts = tuple(each for each in values if isinstance(each, str))
    return texts if len(texts) == len(values) else None


def _answers(asked: Sequence[QuestionField], given: Mapping[str, tuple[str, ...] | None]) -> Answers | UnclearAnswer:
    """Return the answers if each question has valid ones; an empty list leaves a question without an answer."""
    unknown = sorted(set(given) - {each.id for each in asked})
    if unknown:
        return UnclearAnswer(f"There is no question {format_value(unknown[0])}; the questions are: {_ids(asked)}.")
    missing = [each for each in asked if each.id not in given]
    if missing:
        return UnclearAnswer(f"There is no answer to {_ids(missing)}.")
    answers: dict[str, tuple[str, ...]] = {}
    for each in asked:
        values = given[each.id]
        if values is None:
            return UnclearAnswer(f"The answer to {format_value(each.id)} must be a text or a list of texts.")
        chosen = [_choice_or_text(each, value) for value in values]
        answers[each.id] = tuple(value for value in chosen if value is not None)
        if None in chosen:
            return UnclearAnswer(_valid_options(each))
    return Answers(answers)


def _ids(asked: Sequence[QuestionField]) -> str:
    return ", ".join(format_value(each.id) for each in asked)


# --- Words ---


def _parse_words(question: Question, words: str) -> Decision | UnclearAnswer:
    if not words:
        return UnclearAnswer(f"The message has no answer. {_valid_words(question)}")
    match question:
        case UserQuestion((asked,)):
            return _parse_choice(asked, words)
        case UserQuestion(asked):
            return _parse_lines(asked, words)
        case FormQuestion(subject=Form((field,))):
            return _parse_value(field, words)
        case FormQuestion(subject=Form(fields)) if fields and words.startswith("{"):
            content = _read_object(words)
            if content is None:
                return UnclearAnswer(
                    "This is not a JSON object. Answer with one that has the form's fields, or decline."
                )
            return _completed(fields, content)
    yes = _YES.fullmatch(words)
    if yes is not None or _YES_FOR_SESSION.fullmatch(words):
        return _approved(question, for_session=yes is None or yes["session"] is not None)
    return _declined(_NO, words) or UnclearAnswer(f"This is neither a yes nor a no. {_valid_words(question)}")


def _declined(pattern: re.Pattern[str], words: str) -> Declined | None:
    match = pattern.fullmatch(words)
    return None if match is None else Declined((match["words"] or "").strip())


def _valid_words(question: Question) -> str:
    match question:
        case UserQuestion((asked,)):
            return _valid_options(asked) if asked.options else "Answer in your own words, or decline."
        case UserQuestion(asked):
            return _valid_lines(asked)
        case FormQuestion(subject=Form(fields)) if fields:
            return f"Answer with a JSON object with the form's fields ({field_names(fields)}), or decline."
        case _:
            session = ", yes for this session" if can_last(question) else ""
            return f"Answer yes{session}, or no with what to do instead."


# --- Choices ---


def _parse_choice(asked: QuestionField, words: str) -> Decision | UnclearAnswer:
    label = _option(asked, words)
    if label is not None:
        return Answers({asked.id: (label,)})
    declined = _declined(_DECLINE if asked.accepts_text else _NO, words)
    if declined is not None:
        return declined
    return Answers({asked.id: (words,)}) if asked.accepts_text else UnclearAnswer(_valid_options(asked))


def _choice_or_text(asked: QuestionField, words: str) -> str | None:
    label = _option(asked, words)
    return words if label is None and asked.accepts_text and words.strip() else label


def _option(asked: QuestionField, words: str) -> str | None:
    """Return the label of the option with these words or this number; an exact match wins."""
    labels = [option.label for option in asked.options]
    if words in labels:
        return words
    wanted = words.strip().casefold()
    for label in labels:
        if wanted and wanted in (label.strip().casefold(), label.strip().casefold().removesuffix(_RECOMMENDED)):
            return label
    index = _index(wanted, len(labels))
    return None if index is None else labels[index]


def _index(words: str, count: int) -> int | None:
    """Return the index of a number that counts from 1."""
    number = re.fullmatch(r"\(?([1-9][0-9]{0,3})[.)]?", words)
    return int(number[1]) - 1 if number is not None and int(number[1]) <= count else None


def _valid_options(asked: QuestionField) -> str:
    options = ", ".join(f"{n}. {format_value(each.label)}" for n, each in enumerate(asked.options[:_MAX_NAMED], 1))
    return f"Choose one of these for {format_value(asked.id)}, by number or words: {options}. Or decline."


def _parse_lines(asked: Sequence[QuestionField], words: str) -> Decision | UnclearAnswer:
    """Return the answers in lines such as "1: B"."""
    declined = _declined(_NO, words)
    if declined is not None:
        return declined
    given: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(words.split("\n"), 1):
        if not line.strip():
            continue
        name, colon, answer = line.partition(":")
        each = _question_named(asked, name.strip().casefold()) if colon else None
        if each is None:
            return UnclearAnswer(f"Line {number} names none of the questions. {_valid_lines(asked)}")
        if each.id in given:
            return UnclearAnswer(f"There are two answers to {format_value(each.id)}.")
        given[each.id] = (answer.strip(),)
    return _answers(asked, given)


def _valid_lines(asked: Sequence[QuestionField]) -> str:
    return f"Answer each question in its own line, such as `1: …`; the questions are {_ids(asked)}. Or decline."


def _question_named(asked: Sequence[QuestionField], name: str) -> QuestionField | None:
    """Return the question with this id, header or number."""
    for names in ([each.id.casefold() for each in asked], [each.header.casefold() for each in asked]):
        if names.count(name) == 1:
            return asked[names.index(name)]
    index = _index(name, len(asked))
    return None if index is None else asked[index]


# --- Forms ---


def _fields_of(question: Question) -> tuple[Field, ...]:
    match question:
        case FormQuestion(subject=Form(fields)):
            return fields
        case _:
            return ()


def _completed(fields: tuple[Field, ...], content: JsonObject) -> CompletedForm | UnclearAnswer:
    try:
        return CompletedForm(validate(fields, content))
    except InvalidContent as error:
        return UnclearAnswer(str(error))


def _read_object(words: str) -> JsonObject | None:
    try:
        value = json.loads(words)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _parse_value(field: Field, words: str) -> Decision | UnclearAnswer:
    """Return the answer to a form with one field: its value, or a JSON object that contains it."""
    content = _read_object(words) if words.startswith("{") else None
    if content is not None and set(content) == {field.name}:
        return _completed((field,), content)
    is_text = isinstance(field.type, TextField) and not field.type.choices
    if is_text and (declined := _declined(_DECLINE, words)) is not None:
        return declined
    value, expected = _value(field, words)
    if value is not None:
        return _completed((field,), {field.name: value})
    sentence = f"{format_value(field.name)} has to be {expected}. Or decline."
    return _declined(_NO, words) or UnclearAnswer(sentence)


def _value(field: Field, words: str) -> tuple[JsonValue, str]:
    """Return the field's value, None if the words are none, and a description of valid values."""
    match field.type:
        case TextField(choices):
            return _choice(choices, words) if choices else words, list_choices(choices)
        case NumberField():
            is_number = re.fullmatch(r"[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?", words)
            return (float(words) if "." in words else int(words)) if is_number else None, "a number"
        case BooleanField():
            values = {"yes": True, "y": True, "true": True, "no": False, "n": False, "false": False}
            return values.get(words.casefold().rstrip(".!")), "yes or no"
        case MultiChoice(choices):
            chosen = [_choice(choices, each) for each in words.split(",")]
            return None if None in chosen else list[JsonValue](chosen), list_choices(choices)
        case _:
            assert_never(field.type)


def _choice(choices: Sequence[Choice], words: str) -> str | None:
    wanted = words.strip().casefold()
    for choice in choices:
        if wanted in (choice.value.casefold(), choice.title.casefold()):
            return choice.value
    index = _index(wanted, len(choices))
    return None if index is None else choices[index].value
