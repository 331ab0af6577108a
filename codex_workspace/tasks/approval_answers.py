"""What a person or a program says to one of codex's questions, understood: a decision, or why it is none.

Yes is taken from a closed grammar alone: words that are not in it, a condition, or a question back approve nothing.
What the words mean for codex is left to `questions.result_of`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.forms import (
    BooleanField,
    Choice,
    Field,
    InvalidContent,
    MultiChoice,
    NumberField,
    TextField,
    field_names,
    format_value,
    list_choices,
    validate,
)
from codex_workspace.protocol.server_requests import (
    Answers,
    Approved,
    CompletedForm,
    Decision,
    Declined,
    Form,
    FormQuestion,
    Question,
    QuestionField,
    UserQuestion,
    can_last,
    is_yes_or_no,
)


@dataclass(frozen=True, slots=True)
class UnclearAnswer:
    """Not understood; `sentence` says what would be, and is for the one who answered."""

    sentence: str


_FLAGS: Final = re.ASCII | re.IGNORECASE
"""ASCII, so that no letter of another script stands for one of ours."""

_GAP: Final = r"(?:\s*[,.;!]\s*|\s+)"
_YES: Final = (
    r"(?:yes|yeah|yep|y|ok|okay|sure|lgtm|allowed|accepted|confirmed|proceed|go\s+ahead|go\s+for\s+it|do\s+it|"
    r"(?:i\s+)?(?:approve|allow|accept|confirm)|approved)"
)
_POLITE: Final = r"(?:please|thanks|thank\s+you)"
_ONCE: Final = r"(?:(?:but\s+)?(?:just|only)\s+)?(?:once|this\s+once|this\s+time)"
_SESSION: Final = r"for\s+(?:(?:this|the)\s+)?(?:(?:whole|entire)\s+)?session|always"

_APPROVAL: Final = re.compile(
    # "please confirm" asks back.
    rf"(?:please{_GAP}(?!confirm))?(?P<first>always\s+)?{_YES}(?:{_GAP}{_YES})*"
    rf"(?:{_GAP}(?:with\s+)?(?:it|that|this))?(?:{_GAP}{_POLITE})?"
    rf"(?:{_GAP}(?:(?P<once>{_ONCE})|(?P<session>{_SESSION})))?(?:{_GAP}{_POLITE})?\s*[.!]?",
    _FLAGS,
)
_CODEX_APPROVAL: Final = re.compile(r"(?:approve|accept)ForSession", _FLAGS)

_BREAK: Final = r"(?:\s*[,.;:!\u2013\u2014]+\s*|\s+-+\s+|\s+|$)"
_REFUSAL: Final = re.compile(rf"(?:nope|no|n)(?P<gap>{_BREAK})(?P<rest>.*)", _FLAGS | re.DOTALL)
_REFUSING: Final = re.compile(
    rf"(?P<verb>declined?|den(?:y|ied)|reject(?:ed)?|cancel(?:led)?|abort(?:ed)?|skip|stop|do\s+not|don['\u2019`]?t)"
    rf"(?P<gap>{_BREAK})(?P<rest>.*)",
    _FLAGS | re.DOTALL,
)
_NOTHING_MORE: Final = re.compile(rf"(?:way|(?:do\s+)?(?:it|that|this))?(?:{_GAP}?{_POLITE})?\s*[.!]*", _FLAGS)
_NOT_MEANT: Final = re.compile(
    r"(?:problems?|worries|worry|objections?|issues?|concerns?|doubt|need|idea|question|reason|matter|biggie|"
    r"ask|asking|bother|bothering|hesitate|mind|stop|wait|deny|decline|reject|refuse|forget|know|care|you|we|i)\b",
    _FLAGS,
)
"""What follows a no that may well mean yes ("no problem", "don't ask"), or nothing at all ("no idea")."""
_SECOND_THOUGHT: Final = re.compile(r"(?:yes|yeah|yep|ok|okay|sure|approved?|allow|accept|go\s+ahead)\b", _FLAGS)
"""What makes a no doubtful when it stands right behind it."""

_MARKS: Final = frozenset({'""', "''", "``", "**", "__", "\u201c\u201d", "\u2018\u2019", "\u00ab\u00bb"})
"""What may stand around an answer, opening and closing: quotes, and Markdown's."""

MAX_MARKS: Final = 6
"""So many of them are taken off: a fence within stars, and some."""

MAX_APPROVAL_CHARS: Final = 200
"""No yes is longer; it spares the pattern texts of any size."""

_DECLINE_ALONE: Final = re.compile(r"decline(?:\s*[.!]|\s*[:,]\s*(?P<words>.+))?", _FLAGS | re.DOTALL)
"""How to decline where any words are an answer."""


def parse_answer(question: Question, text: str, data: JsonObject | None) -> Decision | UnclearAnswer:
    """Return what `text` and the data part beside it decide. Never raises, and never approves what is doubtful.

    The data part counts; words beside it are the reason of a decline, and else have to say the same. Data is
    `{"decision": "approve" | "approveForSession" | "decline", "reason": …}`, `{"answers": {id: "x" | ["x", …]}}` or
    `{"content": {…}}`; `questionId` may stand in it, and is for the caller to compare.
    """
    words = text.strip()
    if data is None:
        return _understand_words(question, words)
    told = _understand_data(question, data)
    if isinstance(told, UnclearAnswer) or not words:
        return told
    said = _understand_words(question, words)
    match told, said:
        case Declined(), Approved():
            return _TWO_VOICES
        case Declined(""), Declined():
            return said
        case Declined(""), _:
            return Declined(words)
        case Declined(), _:
            return told
        case Approved(), Approved():
            return Approved(told.for_session and said.for_session)
        case _:
            return told if told == said else _TWO_VOICES


_TWO_VOICES: Final = UnclearAnswer("The words and the data part beside them do not say the same. Send one of them.")


# --- Data ---


def _understand_data(question: Question, data: JsonObject) -> Decision | UnclearAnswer:
    given = {key: value for key, value in data.items() if key != "questionId"}
    match given:
        case {"decision": str(decision), **rest} if set(rest) <= {"reason"}:
            reason = rest.get("reason")
            if reason is not None and not isinstance(reason, str):
                return UnclearAnswer('In the data part, "reason" has to be a text.')
            return _decided(question, decision, reason or "")
        case {"answers": dict(answers)} if len(given) == 1 and isinstance(question, UserQuestion):
            return _answered(question.asked, {id_: _several(value) for id_, value in answers.items()})
        case {"content": dict(content)} if len(given) == 1 and _fields_of(question):
            return _filled(_fields_of(question), content)
        case _:
            return UnclearAnswer(f"The data part has to be {_allowed_data(question)}, and nothing else.")


def _allowed_data(question: Question) -> str:
    declining = '{"decision": "decline", "reason": "…"}'
    match question:
        case UserQuestion(asked):
            return (
                f'{{"answers": {{{format_value(asked[0].id)}: "…"}}}} with an answer for each question, or {declining}'
            )
        case FormQuestion(subject=Form(fields)) if fields:
            return f'{{"content": {{{format_value(fields[0].name)}: …}}}}, or {declining}'
        case _:
            session = ', {"decision": "approveForSession"}' if can_last(question) else ""
            return f'{{"decision": "approve"}}{session} or {declining}'


def _decided(question: Question, decision: str, reason: str) -> Decision | UnclearAnswer:
    match decision:
        case "approve" | "accept" if not reason:
            return _approved(question, for_session=False)
        case "approveForSession" | "acceptForSession" if not reason:
            return _approved(question, for_session=True)
        case "decline":
            return Declined(reason.strip())
        case _:
            return UnclearAnswer(
                f"The data part has to be {_allowed_data(question)}; a reason goes with a decline only."
            )


def _approved(question: Question, *, for_session: bool) -> Approved | UnclearAnswer:
    if not is_yes_or_no(question):
        return UnclearAnswer(f"Yes is no answer here. {_wanted(question)}")
    if for_session and not can_last(question):
        return UnclearAnswer("This cannot be approved for the whole session. Answer yes for this once, or no.")
    return Approved(for_session)


def _several(value: JsonValue) -> tuple[str, ...] | None:
    """Return the answers in a value that is one or a list of them; None where it is neither."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(each for each in value if isinstance(each, str))
    return None


def _answered(asked: tuple[QuestionField, ...], given: Mapping[str, tuple[str, ...] | None]) -> Answers | UnclearAnswer:
    """Return the answers where each question has some that it takes; an empty list leaves a question unanswered."""
    unknown = sorted(set(given) - {each.id for each in asked})
    if unknown:
        return UnclearAnswer(f"Nothing called {format_value(unknown[0])} was asked; it was: {_ids(asked)}.")
    missing = [each for each in asked if each.id not in given]
    if missing:
        return UnclearAnswer(f"There is no answer to {_ids(missing)}.")
    answers: dict[str, tuple[str, ...]] = {}
    for each in asked:
        values = given[each.id]
        if values is None:
            return UnclearAnswer(f"The answer to {format_value(each.id)} has to be a text or a list of texts.")
        chosen = [_choose(each, value) for value in values]
        known = tuple(value for value in chosen if value is not None)
        if len(known) < len(chosen):
            return UnclearAnswer(_not_among(each))
        answers[each.id] = known
    return Answers(answers)


def _ids(asked: tuple[QuestionField, ...] | list[QuestionField]) -> str:
    return ", ".join(format_value(each.id) for each in asked)


# --- Words ---


def _understand_words(question: Question, words: str) -> Decision | UnclearAnswer:
    if not words:
        return UnclearAnswer(f"There was no answer in that. {_wanted(question)}")
    match question:
        case UserQuestion((asked,)):
            return _understand_choice(asked, words)
        case UserQuestion(asked):
            return _understand_lines(asked, words)
        case FormQuestion(subject=Form((field,))):
            return _understand_value(field, words)
        case FormQuestion(subject=Form(fields)) if fields and words.startswith("{"):
            return _understand_object(fields, words)
        case _:
            return _understand_yes_or_no(question, words)


def _understand_yes_or_no(question: Question, given: str) -> Decision | UnclearAnswer:
    words = _unmarked(given)
    approval = _read_approval(words)
    if approval is not None:
        return _approved(question, for_session=approval.for_session)
    refusal = _read_refusal(words)
    if refusal is not None:
        return refusal
    return UnclearAnswer(f"I did not understand that as a yes or a no. {_wanted(question)}")


def _unmarked(words: str) -> str:
    """Return the words without quotes and Markdown around all of them."""
    for _ in range(MAX_MARKS):
        if len(words) < 2 or words[0] + words[-1] not in _MARKS:
            return words
        words = words[1:-1].strip()
    return words


def _wanted(question: Question) -> str:
    match question:
        case UserQuestion((asked,)):
            return _not_among(asked) if asked.options else "Answer in your own words, or decline."
        case UserQuestion(asked):
            return _how_to_answer_lines(asked)
        case FormQuestion(subject=Form(fields)) if fields:
            return f"Answer a JSON object with the form's fields ({field_names(fields)}), or decline."
        case _:
            session = ", yes for this session" if can_last(question) else ""
            return f"Answer yes{session}, or no with what to do instead. A condition is no yes."


def _read_approval(words: str) -> Approved | None:
    """Return the yes that the words are, all of them; None where they are anything else."""
    if len(words) > MAX_APPROVAL_CHARS:
        return None
    if _CODEX_APPROVAL.fullmatch(words):
        return Approved(for_session=True)
    yes = _APPROVAL.fullmatch(words)
    if yes is None or (yes["first"] and yes["once"]):
        return None
    return Approved(for_session=bool(yes["first"] or yes["session"]))


def _read_refusal(words: str) -> Declined | None:
    """Return the no that the words begin with, and what follows for the model; None where it may be none."""
    no = _REFUSAL.fullmatch(words)
    if no is not None:
        return None if _is_phrase(no) else _refused(no["rest"], no["rest"])
    refusing = _REFUSING.fullmatch(words)
    if refusing is None or _is_phrase(refusing) or words.endswith("?"):
        return None
    # "don't run it here": without the verb the rest would say the opposite.
    apart = bool(refusing["gap"].strip()) and not refusing["verb"].lower().startswith("do")
    return _refused(refusing["rest"], refusing["rest"] if apart else words)


def _is_phrase(no: re.Match[str]) -> bool:
    """Return whether the no and what follows are one phrase of another meaning, as "no problem" is."""
    return not no["gap"].strip() and _NOT_MEANT.match(no["rest"]) is not None


def _refused(rest: str, told: str) -> Declined | None:
    if _NOTHING_MORE.fullmatch(rest):
        return Declined()
    return None if _SECOND_THOUGHT.match(rest) else Declined(told.strip())


def _read_decline_alone(words: str) -> Declined | None:
    alone = _DECLINE_ALONE.fullmatch(words)
    return None if alone is None else Declined((alone["words"] or "").strip())


# --- Choices ---


def _understand_choice(asked: QuestionField, words: str) -> Decision | UnclearAnswer:
    label = _option(asked, words)
    if label is not None:
        return Answers({asked.id: (label,)})
    declined = _read_decline_alone(words) if asked.takes_words else _read_refusal(words)
    if declined is not None:
        return declined
    return Answers({asked.id: (words,)}) if asked.takes_words else UnclearAnswer(_not_among(asked))


def _choose(asked: QuestionField, words: str) -> str | None:
    """Return the answer that the words are to what was asked; None where it takes only its options."""
    label = _option(asked, words)
    return words if label is None and asked.takes_words and words.strip() else label


_RECOMMENDED: Final = " (recommended)"
"""The model marks an option so; nobody repeats it."""


def _option(asked: QuestionField, words: str) -> str | None:
    """Return the label of the option that the words or their number name; the exact label goes before the like."""
    said = words.strip().casefold()
    labels = [option.label for option in asked.options]
    if words in labels:
        return words
    for label in labels:
        if said and said in (label.strip().casefold(), label.strip().casefold().removesuffix(_RECOMMENDED)):
            return label
    place = _place(said, len(labels))
    return None if place is None else labels[place]


def _place(said: str, places: int) -> int | None:
    """Return the index that a number from 1 on names."""
    number = re.fullmatch(r"\(?([1-9][0-9]{0,3})[.)]?", said)
    return int(number[1]) - 1 if number is not None and int(number[1]) <= places else None


_MAX_NAMED: Final = 20
"""A sentence names at most so many options."""


def _not_among(asked: QuestionField) -> str:
    options = ", ".join(
        f"{place}. {format_value(option.label)}" for place, option in enumerate(asked.options[:_MAX_NAMED], 1)
    )
    return f"Choose one of these for {format_value(asked.id)}, by number or words: {options}. Or decline."


def _understand_lines(asked: tuple[QuestionField, ...], words: str) -> Decision | UnclearAnswer:
    """Return the answers in lines such as "1: B"; a question that is answered twice is doubtful."""
    declined = _read_refusal(words)
    if declined is not None:
        return declined
    given: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(words.split("\n"), 1):
        if not line.strip():
            continue
        name, colon, answer = line.partition(":")
        each = _named_question(asked, name) if colon else None
        if each is None:
            return UnclearAnswer(f"Line {number} names none of the questions. {_how_to_answer_lines(asked)}")
        if each.id in given:
            return UnclearAnswer(f"There are two answers to {format_value(each.id)}.")
        given[each.id] = (answer.strip(),)
    return _answered(asked, given)


def _how_to_answer_lines(asked: tuple[QuestionField, ...]) -> str:
    return f"Answer each question in a line of its own, such as `1: …`; they are {_ids(asked)}. Or decline."


def _named_question(asked: tuple[QuestionField, ...], key: str) -> QuestionField | None:
    """Return the question that an id, a header or a number from 1 on names."""
    said = key.strip().casefold()
    names: tuple[Callable[[QuestionField], str], ...] = (lambda each: each.id, lambda each: each.header)
    for name in names:
        of_that_name = [each for each in asked if name(each).casefold() == said]
        if len(of_that_name) == 1:
            return of_that_name[0]
    place = _place(said, len(asked))
    return None if place is None else asked[place]


# --- Forms ---


def _fields_of(question: Question) -> tuple[Field, ...]:
    match question:
        case FormQuestion(subject=Form(fields)):
            return fields
        case _:
            return ()


def _filled(fields: tuple[Field, ...], content: JsonObject) -> CompletedForm | UnclearAnswer:
    try:
        return CompletedForm(validate(fields, content))
    except InvalidContent as error:
        return UnclearAnswer(str(error))


def _understand_object(fields: tuple[Field, ...], words: str) -> CompletedForm | UnclearAnswer:
    content = _read_object(words)
    if content is None:
        return UnclearAnswer("That is no JSON object. Answer one with the form's fields, or decline.")
    return _filled(fields, content)


def _read_object(words: str) -> JsonObject | None:
    try:
        value = json.loads(words)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _understand_value(field: Field, words: str) -> Decision | UnclearAnswer:
    """Return what the words are for a form of one field: its value, or an object that holds it."""
    content = _read_object(words) if words.startswith("{") else None
    if content is not None and set(content) == {field.name}:
        return _filled((field,), content)
    free = isinstance(field.type, TextField) and not field.type.choices
    declined = _read_decline_alone(words) if free else None
    if declined is not None:
        return declined
    value = _value(field, words)
    if value is not None:
        return _filled((field,), {field.name: value})
    return _read_refusal(words) or UnclearAnswer(_not_a_value(field))


def _value(field: Field, words: str) -> JsonValue:
    """Return the value that the words are; None where they are none of this field's."""
    match field.type:
        case TextField(choices) if choices:
            return _choice(choices, words)
        case TextField():
            return words
        case NumberField():
            return _number(words)
        case BooleanField():
            return _true_or_false(words)
        case MultiChoice(choices):
            chosen = [_choice(choices, each) for each in words.split(",")]
            return None if None in chosen else list[JsonValue](chosen)
        case _:
            assert_never(field.type)


def _choice(choices: tuple[Choice, ...], words: str) -> str | None:
    said = words.strip().casefold()
    for choice in choices:
        if said in (choice.value.casefold(), choice.title.casefold()):
            return choice.value
    place = _place(said, len(choices))
    return None if place is None else choices[place].value


def _number(words: str) -> int | float | None:
    if not re.fullmatch(r"[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?", words):
        return None
    return float(words) if "." in words else int(words)


def _true_or_false(words: str) -> bool | None:
    match words.casefold().rstrip(".!"):
        case "yes" | "y" | "true" | "ok" | "okay":
            return True
        case "no" | "n" | "false" | "nope":
            return False
        case _:
            return None


def _not_a_value(field: Field) -> str:
    match field.type:
        case TextField(choices) | MultiChoice(choices):
            return f"{format_value(field.name)} has to be {list_choices(choices)}. Or decline."
        case NumberField():
            return f"{format_value(field.name)} has to be a number. Or decline."
        case BooleanField():
            return f"{format_value(field.name)} has to be yes or no. Or decline."
        case _:
            assert_never(field.type)
