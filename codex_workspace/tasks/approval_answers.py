"""Questions of a running turn: what the task sends, and what the words of a person or the data of a program decide.

Only the documented words approve. Everything else is an `UnclearAnswer`, and the agent repeats the question after it.
"""

import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from a2a.types import Message
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.redact import Redactor, redact_value
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
    format_value,
    is_yes_or_no,
    list_choices,
    response_to,
    validate,
)
from codex_workspace.runtimes.backend import PendingRequest, RunningTurn, text_input
from codex_workspace.runtimes.convert import approval_data
from codex_workspace.tasks.approval_prompts import approval_prompt
from codex_workspace.tasks.replies import A2AEvent
from codex_workspace.tasks.request import TURN


@dataclass(frozen=True, slots=True)
class UnclearAnswer:
    """An answer that decides nothing; `sentence` says why, and the repeated question how to answer."""

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

_RECOMMENDED: Final = " (recommended)"
"""The model's mark at an option; the answer may leave it out."""

TIMED_OUT: Final = Declined()
"""The decision if no answer arrives in time."""

QUESTION_LOST: Final = "The agent restarted while it waited for an answer. It continues, and may ask again."
BLOCKED: Final = (
    "Task {task_id} in this context waits for an answer. To answer, send a message with taskId {task_id}.\n\n{prompt}"
)
NOT_PROCESSED: Final = "This message was not processed; send it again with a new messageId after the answer."
NO_ANSWER: Final = "No answer within {timeout_s:g} s; treated as declined."
TOO_LATE: Final = "This answer came too late: the task has no open question."
OLD_QUESTION: Final = UnclearAnswer("This answers a question that is no longer open.")
OTHER_QUESTION: Final = UnclearAnswer("This answers another question.")
NO_FILES: Final = UnclearAnswer(
    "A file cannot be an answer. Answer with text or a data part, and send the file in a separate message."
)
_TEXT_AND_DATA: Final = UnclearAnswer("Send either text or a data part; only a decline may have both.")
_INVALID_DATA: Final = UnclearAnswer(
    'The data part must be {"decision": "approve"}, {"decision": "approveForSession"}, {"answers": {…}} or '
    '{"content": {…}}, as the question allows, or {"decision": "decline", "reason": "…"}.'
)


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """A message that answers a question; `prompt_id` is the message that asked it, None if that is unknown."""

    message: Message
    prompt_id: str | None


@dataclass(slots=True)
class OpenQuestion:
    """A question that waits for an answer until `deadline`; `held_events` are sent after it is answered."""

    pending: PendingRequest
    question: Question
    deadline: float
    prompt_id: str = ""
    held_events: list[A2AEvent] = field(default_factory=list)

    def prompt(self, redactor: Redactor, unclear: UnclearAnswer | None = None) -> tuple[str, JsonObject]:
        """Return the question for people and for programs; after an unclear answer it says why it is asked again."""
        prompt = approval_prompt(self.question)
        data = redact_value(approval_data(self.question), redactor)
        text = prompt if unclear is None else f"{unclear.sentence}\n\n{prompt}"
        return redactor(text), {"questionId": self.pending.id, **data}

    def text_for_others(self, task_id: str, redactor: Redactor) -> str:
        """Return the question, and how to answer it, for the senders of the context's other messages."""
        return redactor(BLOCKED.format(task_id=task_id, prompt=approval_prompt(self.question)))

    def decide(self, answers: deque[ReceivedAnswer], now: float) -> Decision | UnclearAnswer | None:
        """Return what the next answer decides; None while there is no answer and time is left."""
        if not answers:
            return TIMED_OUT if now >= self.deadline else None
        answer = answers.popleft()
        message = answer.message
        if answer.prompt_id not in (None, self.prompt_id):
            return OLD_QUESTION
        if any(part.HasField("raw") or part.HasField("url") for part in message.parts):
            return NO_FILES
        text = "\n".join(part.text for part in message.parts if part.HasField("text"))
        objects = [part.data.struct_value for part in message.parts if part.data.HasField("struct_value")]
        data: JsonObject | None = MessageToDict(objects[0]) if objects else None
        if data is not None and data.get("questionId", self.pending.id) != self.pending.id:
            return OTHER_QUESTION
        return parse_answer(self.question, text, data)

    async def answer(self, turn: RunningTurn, decision: Decision) -> None:
        """Send the decision to codex, and the reason of a refusal to the model."""
        if isinstance(decision, Declined) and decision.words:
            await turn.steer(text_input(decision.words))
        turn.answer(self.pending, response_to(self.question, decision))


def is_answer_word(message: Message) -> bool:
    """Whether a message is one of the documented words and nothing else, so that it can only be meant as an answer."""
    if len(message.parts) != 1 or message.parts[0].filename or TURN in message.metadata:
        return False
    words = message.parts[0].text.strip()
    no = _NO.fullmatch(words)
    return no["words"] == "" if no is not None else any(each.fullmatch(words) for each in (_YES, _YES_FOR_SESSION))


def parse_answer(question: Question, text: str, data: JsonObject | None) -> Decision | UnclearAnswer:
    """Return the decision of an answer with this text and this data part; never raises.

    The data part is `{"decision": "approve" | "approveForSession" | "decline", "reason": …}`,
    `{"answers": {id: "x" | ["x", …]}}` or `{"content": {…}}`; the caller compares its `questionId`. Text beside it is
    the reason of a decline.
    """
    words = text.strip()
    if data is None:
        return _parse_words(question, words)
    decision = _parse_data(question, {key: value for key, value in data.items() if key != "questionId"})
    if isinstance(decision, Declined):
        return Declined(decision.words or words)
    return _TEXT_AND_DATA if words and not isinstance(decision, UnclearAnswer) else decision


def _parse_data(question: Question, data: JsonObject) -> Decision | UnclearAnswer:
    match question, data:
        case _, {"decision": "approve" | "accept", **rest} if not any(rest.values()) and set(rest) <= {"reason"}:
            return _approved(question, for_session=False)
        case _, {"decision": "approveForSession" | "acceptForSession"} if len(data) == 1:
            return _approved(question, for_session=True)
        case _, {"decision": "decline", **rest} if set(rest) <= {"reason"} and isinstance(rest.get("reason", ""), str):
            return Declined(str(rest.get("reason", "")).strip())
        case UserQuestion(asked), {"answers": dict(answers)} if len(data) == 1:
            return _answers(asked, answers)
        case FormQuestion(subject=Form(fields)), {"content": dict(content)} if len(data) == 1 and fields:
            return _completed(fields, content)
        case _:
            return _INVALID_DATA


def _parse_words(question: Question, words: str) -> Decision | UnclearAnswer:
    if not words:
        return UnclearAnswer("The message has no answer.")
    match question:
        case UserQuestion((asked,)):
            return _parse_choice(asked, words)
        case UserQuestion(asked):
            return _parse_lines(asked, words)
        case FormQuestion(subject=Form((field,))):
            return _parse_value(field, words)
        case FormQuestion(subject=Form(fields)) if fields and words.startswith("{"):
            return _completed(fields, _read_object(words))
    yes = _YES.fullmatch(words)
    if yes is not None or _YES_FOR_SESSION.fullmatch(words):
        return _approved(question, for_session=yes is None or yes["session"] is not None)
    return _declined(_NO, words) or UnclearAnswer("This is neither a yes nor a no.")


def _approved(question: Question, *, for_session: bool) -> Approved | UnclearAnswer:
    if not is_yes_or_no(question):
        return UnclearAnswer("Yes is not an answer to this question.")
    if for_session and not can_last(question):
        return UnclearAnswer("This cannot be approved for the whole session.")
    return Approved(for_session)


def _declined(pattern: re.Pattern[str], words: str) -> Declined | None:
    match = pattern.fullmatch(words)
    return None if match is None else Declined((match["words"] or "").strip())


def _pick(options: Sequence[Sequence[str]], words: str) -> int | None:
    """Return the index of the option with this name, or with this number, counted from 1; an exact match wins."""
    wanted = words.strip()
    folded = [[name.strip().casefold() for name in names] for names in options]
    for name, names in ((wanted, options), (wanted.casefold(), folded)):
        found = [index for index, each in enumerate(names) if name and name in each]
        if found:
            return found[0]
    number = wanted.strip("().")
    is_number = len(number) <= 4 and number.isdecimal() and 0 < int(number) <= len(options)
    return int(number) - 1 if is_number else None


# --- Choices ---


def _parse_choice(asked: QuestionField, words: str) -> Decision | UnclearAnswer:
    label = _option(asked, words)
    if label is not None:
        return Answers({asked.id: (label,)})
    declined = _declined(_DECLINE if asked.accepts_text else _NO, words)
    if declined is not None:
        return declined
    return Answers({asked.id: (words,)}) if asked.accepts_text else UnclearAnswer("This is not one of the options.")


def _option(asked: QuestionField, words: str) -> str | None:
    labels = [option.label for option in asked.options]
    index = _pick([(label, label.strip().casefold().removesuffix(_RECOMMENDED)) for label in labels], words)
    return None if index is None else labels[index]


def _parse_lines(asked: Sequence[QuestionField], words: str) -> Decision | UnclearAnswer:
    """Return the answers in lines such as "1: B"."""
    declined = _declined(_NO, words)
    if declined is not None:
        return declined
    given: dict[str, JsonValue] = {}
    for number, line in enumerate(words.split("\n"), 1):
        if not line.strip():
            continue
        name, colon, answer = line.partition(":")
        index = _pick([(each.id, each.header) for each in asked], name) if colon else None
        if index is None or asked[index].id in given:
            return UnclearAnswer(f"Line {number} does not name a question, or names one that is already answered.")
        given[asked[index].id] = answer.strip()
    return _answers(asked, given)


def _answers(asked: Sequence[QuestionField], given: JsonObject) -> Answers | UnclearAnswer:
    """Return the answers if each question has valid ones; an empty list leaves a question without an answer."""
    if set(given) != {each.id for each in asked}:
        names = ", ".join(format_value(each.id) for each in asked)
        return UnclearAnswer(f"Answer exactly these questions: {names}.")
    answers: dict[str, tuple[str, ...]] = {}
    for each in asked:
        value = given[each.id]
        values = value if isinstance(value, list) else [value]
        answers[each.id] = tuple(
            chosen for text in values if isinstance(text, str) and (chosen := _choice_or_text(each, text)) is not None
        )
        if len(answers[each.id]) < len(values):
            return UnclearAnswer(f"The answer to {format_value(each.id)} is not one of its options.")
    return Answers(answers)


def _choice_or_text(asked: QuestionField, words: str) -> str | None:
    label = _option(asked, words)
    return words if label is None and asked.accepts_text and words.strip() else label


# --- Forms ---


def _completed(fields: tuple[Field, ...], content: JsonObject | None) -> CompletedForm | UnclearAnswer:
    if content is None:
        return UnclearAnswer("This is not a JSON object.")
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
    sentence = f"{format_value(field.name)} must be {expected}. To refuse, answer `decline`."
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
    index = _pick([(choice.value, choice.title) for choice in choices], words)
    return None if index is None else choices[index].value
