"""Questions of a running turn to people: what a task sends, and what an answer to it decides."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from a2a.types import Message
from google.protobuf.json_format import MessageToDict

from codex_workspace.common.redact import Redactor, redact_value
from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.server_requests import Decision, Declined, Question, response_to
from codex_workspace.runtimes.backend import PendingRequest, RunningTurn, text_input
from codex_workspace.runtimes.convert import approval_data
from codex_workspace.tasks.approval_answers import UnclearAnswer, parse_answer
from codex_workspace.tasks.approval_prompts import approval_prompt
from codex_workspace.tasks.replies import A2AEvent

TIMED_OUT: Final = Declined()
"""The decision if no answer arrives in time."""

VOID: Final = "The agent restarted while it waited for an answer. It continues, and may ask again."
HELD_UP: Final = (
    "Task {task_id} in this context asks a question first. To answer it, send a message with taskId {task_id}."
)
NO_ANSWER: Final = "No answer within {timeout_s:g} s; treated as declined."
TOO_LATE: Final = "This answer came too late: the task has no open question."
OLD_QUESTION: Final = UnclearAnswer("This answers a question that is no longer open.")
OTHER_QUESTION: Final = UnclearAnswer("This answers another question.")
NO_FILES: Final = UnclearAnswer(
    "A file cannot be an answer. Answer with text or a data part, and send the file in a separate message."
)


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """A message that answers a question; `prompt_id` is the message that asked it, None if that is unknown."""

    message: Message
    prompt_id: str | None


@dataclass(slots=True)
class OpenQuestion:
    """A question that waits for an answer until `deadline`; `held` are the events to send after it is answered."""

    pending: PendingRequest
    question: Question
    deadline: float
    prompt_id: str = ""
    held: list[A2AEvent] = field(default_factory=list)

    def prompt(self, redactor: Redactor, unclear: UnclearAnswer | None = None) -> tuple[str, JsonObject]:
        """Return the question for people and for programs; after an unclear answer it says why it is asked again."""
        prompt = approval_prompt(self.question)
        data = redact_value(approval_data(self.question), redactor)
        told = prompt if unclear is None else f"{unclear.sentence}\n\n{prompt}"
        return redactor(told), {"questionId": self.pending.id, **data}

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
