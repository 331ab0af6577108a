"""The answering of one message: from its place in line, over turns, questions and deaths, to its task's end.

A job is not the request that began it: a task that asks a person something gives its caller back, and goes on when the
word comes, in whatever request, or when nobody has said anything for too long.
"""

import logging
import math
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, assert_never

import anyio
from a2a.server.agent_execution import RequestContext
from a2a.server.events import EventQueue
from a2a.types import Message, SendMessageRequest, Task, TaskState
from a2a.utils.errors import UnsupportedOperationError
from google.protobuf.json_format import MessageToDict

from codex_workspace.codex.recovery import (
    AlreadyEnded,
    Continue,
    FailureCounts,
    GiveUp,
    RecoveryPolicy,
    SendAgain,
    next_step,
)
from codex_workspace.common.a2a_terms import AWAITING_INPUT
from codex_workspace.common.concurrency import task_group
from codex_workspace.common.errors import AgentError, CodexError, CodexGone, InputRefused
from codex_workspace.common.metrics import TaskOutcome
from codex_workspace.common.redact import Redactor
from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.codex_events import TurnCompleted, TurnError, TurnText
from codex_workspace.protocol.failures import describe_failure, error_metadata
from codex_workspace.protocol.redaction import EventRedactor, redact_event
from codex_workspace.protocol.server_requests import Decision, Declined, response_to
from codex_workspace.runtimes.approvals import approval_data
from codex_workspace.runtimes.backend import (
    DynamicToolCall,
    PendingRequest,
    RunningTurn,
    Thread,
    ThreadLease,
    ThreadRegistry,
    TurnInput,
    TurnOptions,
    text_input,
)
from codex_workspace.storage.deliveries import (
    RECORDED,
    RESUMED,
    Deliveries,
    Delivery,
    DeliveryKey,
    DeliveryState,
    RecordedMessage,
    message_digest,
)
from codex_workspace.tasks.approval_answers import UnclearAnswer, parse_answer
from codex_workspace.tasks.approval_prompts import approval_prompt
from codex_workspace.tasks.live_output import ITEMS, LiveOutput
from codex_workspace.tasks.replies import (
    FAILURE,
    A2AEvent,
    Outcome,
    Reply,
    answer_text,
    closing_events,
    replay_events,
    usage_metadata,
)
from codex_workspace.tasks.request import RequestReader, TurnRequest
from codex_workspace.tasks.scheduling import AdmissionControl, EarlierMessage, MidTurn, QueueSlot, superseding_prompt
from codex_workspace.tasks.telemetry import MessageTelemetry, Telemetry, TurnTelemetry

logger = logging.getLogger(__name__)

AGENT_ENDED: Final = "the agent ended in the middle of it"
"""Why a turn was cut off that an earlier process had begun."""

STOPPED: Final = "The agent stopped before the turn was done. What was said is kept; send the message again to go on."
NOT_BEGUN: Final = "The agent stopped before it came to this message; send it again."
STOPPING: Final = "The agent is stopping and takes no new messages."
SUPERSEDED: Final = "A newer message in this context took its place."
VOID: Final = "The agent was restarted while it waited for an answer. It goes on, and may ask again."
HELD_UP: Final = (
    "Task {task_id} of this conversation asks something first. To answer it, send a message with taskId {task_id}."
)
TOO_LATE: Final = "That came too late: nothing is asked any more."

OLD_WORD: Final = UnclearAnswer("That was said to a question that is not open any more.")
NO_FILES: Final = UnclearAnswer(
    "A file cannot be an answer. Send text_input or a data part, and the file in a message of its own."
)

NOBODY: Final = Declined()
"""What is decided when nobody has decided anything in time."""

MAX_LOGGED_CHARS: Final = 2000
"""Of what a model endpoint says of its failure; some send whole pages."""


ENDS: Final = {
    TaskState.TASK_STATE_COMPLETED: TaskOutcome.COMPLETED,
    TaskState.TASK_STATE_FAILED: TaskOutcome.FAILED,
    TaskState.TASK_STATE_CANCELED: TaskOutcome.CANCELED,
    TaskState.TASK_STATE_REJECTED: TaskOutcome.REJECTED,
}
"""How a task's last state is counted."""


class TurnInterrupted(CodexError):
    """A turn ended with its codex, against everybody's wish."""


class AgentServices(Protocol):
    """What jobs need of the agent that is the same for all."""

    telemetry: Telemetry
    threads: ThreadRegistry[Thread]
    deliveries: Deliveries
    admission: AdmissionControl
    policy: RecoveryPolicy
    question_timeout_s: float
    asks_people: bool
    redactor: Redactor
    requests: RequestReader

    def jobs_before(self, job: "Job") -> list["Job"]:
        """Return the jobs of the same context that were there first and are not over, in their order."""

    def jobs_after(self, job: "Job") -> list["Job"]:
        """Return the jobs of the same context that came after it and are not over, in their order."""


@dataclass(slots=True)
class _Open:
    """A question that people have been asked, how long they have, and what goes out once it is settled."""

    pending: PendingRequest
    deadline: float
    prompt_id: str = ""
    held: list[A2AEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Word:
    """What a person has said, and to which message of ours."""

    message: Message
    prompt_id: str | None


class Job:
    """The answering of one message."""

    def __init__(self, desk: AgentServices, request: RequestContext, event_queue: EventQueue) -> None:
        self.task_id, self.context_id = task_and_context_ids(request)
        self.owner: Final = request.call_context.user.user_name
        self.over: Final = anyio.Event()
        self.ended: Task | None = None
        self.error: Exception | None = None
        self.turn: RunningTurn | None = None
        self.order: TurnRequest | None = None
        self._turn_id: str | None = None
        self._desk = desk
        self._request = request
        self._queue = event_queue
        is_watched = ITEMS in request.call_context.requested_extensions
        live = LiveOutput(self.task_id, self.context_id) if is_watched else None
        before = request.current_task.artifacts if request.current_task is not None else []
        self._reply = Reply(self.task_id, self.context_id, live, before)
        self._resting = anyio.Event()
        self._life = anyio.CancelScope()
        self._waiting = anyio.CancelScope()
        self._stopped_as: Outcome | None = None
        self._question: _Open | None = None
        self._heard: deque[_Word] = deque()
        self._place: QueueSlot | None = None
        self._joined: Job | None = None

    @property
    def is_asking(self) -> bool:
        """Whether a person has the word."""
        return self._question is not None

    async def rested(self) -> None:
        """Wait until the job is over, or a person has the word.

        Raises:
            Exception: what broke the job, for whoever holds its task.
        """
        await self.at_rest()
        if self.error is not None:
            raise self.error

    async def at_rest(self) -> None:
        """Wait until the job is over, or a person has the word."""
        await self._resting.wait()

    def receive(self, message: Message, event_queue: EventQueue, prompt_id: str | None = None) -> None:
        """Take what a person says to a question; what comes of it goes to `event_queue`.

        `prompt_id`: the id of the message that had asked when the person spoke; None: not known.
        """
        self._heard.append(_Word(message, prompt_id))
        self._queue = event_queue
        self._resting = anyio.Event()
        if self.over.is_set():
            self._resting.set()
        elif self.turn is not None:
            self.turn.wake()

    async def held_up_by(self, asking: "Job") -> None:
        """Say that nothing goes on here before somebody has answered what another task asks."""
        say = self._reply.waits if self._joined is None else self._reply.notice
        await self._send([say(HELD_UP.format(task_id=asking.task_id))])

    def stop(self, outcome: Outcome) -> None:
        """Have the task end with `outcome`: leave the queue, or interrupt the turn."""
        self._stopped_as = self._stopped_as or outcome
        if self.turn is None:
            self._waiting.cancel()
        else:
            self.turn.interrupt()

    def kill(self) -> None:
        """End the codex that does not obey, and the turn with it."""
        if self.turn is not None:
            self.turn.kill()

    def set_aside(self) -> None:
        """Leave the task as it is, for the next process to take up."""
        self._life.cancel()

    async def run(self) -> None:
        """Answer the message: a Task first, a terminal status last, and no exception in between."""
        name = self._message.message_id or self.task_id
        watched = self._desk.telemetry.message(self.task_id, self.context_id, self._request.call_context.state)
        try:
            with watched as watch, self._life, self._desk.admission.claim(self.owner, self.context_id, name) as place:
                self._place = place
                await self._work(watch)
        except Exception as error:
            # Whoever waits for the task gets it; nobody else is hurt.
            logger.log(logging.INFO if isinstance(error, UnsupportedOperationError) else logging.ERROR, "%s", error)
            self.error = error
        finally:
            self.over.set()
            self._resting.set()

    @property
    def _message(self) -> Message:
        message = self._request.message
        assert message is not None
        return message

    async def _work(self, watch: MessageTelemetry) -> None:
        if self._request.current_task is None:
            await self._send([self._reply.opened(self._message)])
        delivery = await self._delivery()
        if delivery.state in (DeliveryState.ANSWERED, DeliveryState.ACKNOWLEDGED):
            self.ended = Task.FromString(delivery.ending)
            await self._send(replay_events(self.ended))
            return
        ended = await self._answer(delivery, watch)
        # Down on disk first: from here on, the answer is only handed out.
        await self._desk.deliveries.mark_answered(delivery.key, ended.SerializeToString())
        self.ended = ended
        watch.ended(ENDS[ended.status.state])
        await self._send([*self._unasked(), *closing_events(ended)])

    async def _delivery(self) -> Delivery:
        """Return the written-down message; a host that writes none down, or elsewhere, has it done here."""
        state = self._request.call_context.state
        match state.get(RESUMED) or state.get(RECORDED):
            case Delivery() as taken_up:
                return taken_up
            case RecordedMessage(delivery, by) if by is self._desk.deliveries:
                return delivery
        known = await self._desk.deliveries.find_by_task(self.task_id)
        if known is not None and known.key.message_id == self._message.message_id:
            return known
        request = SendMessageRequest(message=self._message)
        key = DeliveryKey(self.owner, self._message.message_id)
        accepted = await self._desk.deliveries.accept(
            key, request, message_digest(request), self.task_id, self.context_id
        )
        if accepted is None:
            raise UnsupportedOperationError(message=f"message {key.message_id} is answered by another task")
        return accepted

    async def _answer(self, delivery: Delivery, watch: MessageTelemetry) -> Task:
        """Run the turn, send what comes of it, and return what the task has come to."""
        reply = self._reply
        try:
            with self._waiting:
                return await self._run(delivery, watch)
        except InputRefused as error:
            return reply.ended(Outcome(TaskState.TASK_STATE_REJECTED, str(error), code("inputRefused")))
        except AgentError as error:
            logger.warning("task %s failed: %s", self.task_id, error)
            return reply.ended(self._stopped_as or self._failed(error.public, type(error).__name__))
        except Exception:
            logger.exception("task %s failed for a reason that nobody foresaw", self.task_id)
            return reply.ended(self._failed("The agent made a mistake of its own; its log says more.", "internal"))
        return reply.ended(self._canceled())

    def _canceled(self) -> Outcome:
        outcome = self._stopped_as or canceled_outcome()
        if self._joined is None:
            return outcome
        given = f"What it said was already given to task {self._joined.task_id}."
        return replace(outcome, sentence=f"{outcome.sentence} {given}".strip())

    async def _run(self, delivery: Delivery, watch: MessageTelemetry) -> Task:
        desk, is_taken_up = self._desk, was_taken_up(self._request)
        order = self.order = await desk.requests.read(self._message, self.task_id)
        conversation = desk.threads.get(self.owner, self.context_id)
        conversation.check(order.turn_input)
        if not is_taken_up and order.mid_turn is MidTurn.STEER and (joined := await self._join(delivery, order)):
            return joined
        if not is_taken_up and order.mid_turn is MidTurn.INTERRUPT:
            order = await self._take_the_place_of_others(order)
        if is_taken_up and self._request.current_task and self._request.current_task.status.state in AWAITING_INPUT:
            await self._send([self._reply.notice(VOID)])
        for other in desk.jobs_before(self):
            if other.is_asking:
                await self.held_up_by(other)
        assert self._place is not None
        async with AsyncExitStack() as held:
            with watch.waiting():
                # First this context's turn, then the agent's: whoever waits for the former keeps nobody from the
                # latter.
                lease = await held.enter_async_context(conversation.lease())
                await held.enter_async_context(desk.admission.turn(self._place))
            return await self._speak(delivery, lease, order, watch, is_taken_up=is_taken_up)

    async def _speak(
        self, delivery: Delivery, lease: ThreadLease, order: TurnRequest, watch: MessageTelemetry, *, is_taken_up: bool
    ) -> Task:
        """Run turns until one has come to its end, or nothing more is to be tried."""
        step: Step = SendAgain()
        deaths = FailureCounts(codex=delivery.deaths)
        if is_taken_up:
            if delivery.state is DeliveryState.STARTED:
                deaths = replace(deaths, ours=await self._desk.deliveries.count_restart(delivery.task_id))
            step = await self._next_step(delivery, lease, order, deaths, AGENT_ENDED)
        while True:
            match step:
                case SendAgain():
                    turn_input = order.turn_input
                case Continue(text):
                    turn_input = text_input(text)
                case AlreadyEnded(end):
                    last = self._desk.redactor(end.last_message.text) if end.last_message is not None else None
                    return self._reply.ended(self._ended(end), last)
                case GiveUp(sentence):
                    return self._reply.ended(self._failed(sentence, "cutOff"))
                case _:
                    assert_never(step)
            try:
                with watch.turn() as turn:
                    return await self._turn(delivery, lease, turn_input, order.options, turn)
            except TurnInterrupted as cut_off:
                deaths = replace(deaths, codex=await self._desk.deliveries.count_codex_death(delivery.key))
                step = await self._next_step(delivery, lease, order, deaths, str(cut_off))
                if isinstance(step, SendAgain | Continue):
                    again = self._reply.notice(f"{cut_off}; the turn is taken up again.")
                    await self._send([*self._unasked(), *self._reply.interrupted(), again])

    async def _next_step(
        self, delivery: Delivery, lease: ThreadLease, order: TurnRequest, deaths: FailureCounts, why: str
    ) -> "Step":
        """Find out what became of a message's earlier turns, and how to go on."""
        found = await lease.recorded_end(_mark(delivery), order.turn_input, self._turn_id or delivery.turn_id)
        step = next_step(self._desk.policy, found, deaths, why)
        logger.info("task %s is taken up: %s, so %s", self.task_id, found, type(step).__name__)
        return step

    async def _turn(
        self, delivery: Delivery, lease: ThreadLease, turn_input: TurnInput, options: TurnOptions, watch: TurnTelemetry
    ) -> Task:
        """Run one turn to its end.

        Raises:
            CutOff: codex died in it, or again and again before it, and nobody wanted it stopped.
        """
        try:
            async with lease.turn(turn_input, _new_mark(delivery), options) as begun:
                self.turn = begun.turn
                self._turn_id = begun.turn.turn_id
                if self._stopped_as is not None:
                    begun.turn.interrupt()
                notes = [self._reply.notice(self._desk.redactor(begun.note))] if begun.note else []
                watch.began(begun.turn)
                async with self._noted(delivery, begun.turn):
                    await self._send([self._reply.working(), *notes])
                    text = await self._follow(begun.turn, watch)
        except CodexGone as gone:
            self.turn = None
            if self._stopped_as is not None:
                raise
            raise TurnInterrupted(gone.public) from gone
        return self._reply.ended(self._outcome(begun.turn), text.answer)

    @asynccontextmanager
    async def _noted(self, delivery: Delivery, turn: RunningTurn) -> AsyncIterator[None]:
        """Write down that the turn has begun, beside what is done in the block; it is down when the block is left.

        Only the turn's end has to wait for it: codex's own record tells of a turn, too.
        """
        written = anyio.Event()

        async def write() -> None:
            await self._desk.deliveries.mark_started(delivery.key, turn.thread_id, turn.turn_id)
            written.set()

        async with task_group() as beside:
            beside.start_soon(write)
            try:
                yield
            except CodexGone:
                # A query that is cancelled takes its connection with it.
                await written.wait()
                raise

    async def _follow(self, turn: RunningTurn, watch: TurnTelemetry) -> TurnText:
        """Send the turn's events as they come, text at most ten times a second, until the turn has ended."""
        text, reply, redactor = TurnText(), self._reply, EventRedactor(self._desk.redactor)
        while turn.ended is None:
            out: list[A2AEvent] = []
            for event in await turn.receive(by=self._next_look()):
                watch.see(event)
                for told in redactor.redact(event):
                    text.apply(told)
                    out += reply.apply(told, anyio.current_time())
            if self._question is not None:
                self._question.held += out
            else:
                due = reply.due
                await self._send([*out, *(reply.flush(anyio.current_time()) if _is_due(due) else [])])
            await self._attend(turn)
        return text

    def _next_look(self) -> float:
        if self._question is not None:
            return self._question.deadline
        due = self._reply.due
        return math.inf if due is None else due

    # --- Questions ---

    async def _attend(self, turn: RunningTurn) -> None:
        """Deal with what codex asks, and with what people have said to it, as far as both have got."""
        while turn.ended is None:
            pending = turn.pending
            if self._question is not None and self._question.pending is not pending:
                await self._go_on()
            elif pending is None:
                await self._send([self._reply.notice(TOO_LATE) for _ in self._heard])
                self._heard.clear()
                return
            elif isinstance(pending.subject, DynamicToolCall):
                cwd = self.order.options.cwd if self.order is not None else None
                result, out = await self._desk.requests.serve(pending.subject, self._reply, cwd)
                turn.answer(pending, result)
                await self._send(out)
            elif not self._desk.asks_people:
                turn.answer(pending, response_to(pending.subject, Declined()))
            elif self._question is None:
                await self._ask(pending, approval_prompt(pending.subject))
            else:
                decision = self._decided(self._question)
                if decision is None:
                    return
                if isinstance(decision, UnclearAnswer):
                    await self._ask(pending, f"{decision.sentence}\n\n{approval_prompt(pending.subject)}")
                else:
                    await self._tell(turn, pending, decision)

    async def _ask(self, pending: PendingRequest, prompt: str) -> None:
        """Give a person the word."""
        assert not isinstance(pending.subject, DynamicToolCall)
        now = anyio.current_time()
        if self._question is None:
            self._question = _Open(pending, now + self._desk.question_timeout_s)
        about: JsonObject = {
            "questionId": pending.id,
            **redact_event(approval_data(pending.subject), self._desk.redactor),
        }
        asking = self._reply.asking(self._desk.redactor(prompt), about)
        self._question.prompt_id = asking.status.message.message_id
        await self._send([*self._reply.flush(now), asking])
        for other in self._desk.jobs_after(self):
            await other.held_up_by(self)
        if self._place is not None:
            self._desk.admission.step_aside(self._place)
        self._resting.set()

    def _decided(self, question: _Open) -> Decision | UnclearAnswer | None:
        """Return what was decided, None while nothing is."""
        assert not isinstance(question.pending.subject, DynamicToolCall)
        if self._heard:
            word = self._heard.popleft()
            said = word.message
            if word.prompt_id not in (None, question.prompt_id):
                return OLD_WORD
            if any(part.HasField("raw") or part.HasField("url") for part in said.parts):
                return NO_FILES
            text, data = words_of(said)
            if data is not None and data.pop("questionId", question.pending.id) != question.pending.id:
                return UnclearAnswer("That was the answer to another question.")
            return parse_answer(question.pending.subject, text, data)
        return NOBODY if anyio.current_time() >= question.deadline else None

    async def _tell(self, turn: RunningTurn, pending: PendingRequest, decision: Decision) -> None:
        """Let codex know what was decided, and the model the text_input that came with a refusal."""
        assert not isinstance(pending.subject, DynamicToolCall)
        if isinstance(decision, Declined) and decision.words:
            await turn.steer(text_input(decision.words))
        turn.answer(pending, response_to(pending.subject, decision))
        nobody = f"Nobody has answered within {self._desk.question_timeout_s:g} s, which counts as a no."
        await self._go_on([self._reply.notice(nobody)] if decision is NOBODY else [])

    async def _go_on(self, notes: Sequence[A2AEvent] = ()) -> None:
        """Work again: nothing is asked any more, or something else."""
        assert self._place is not None
        held = self._unasked()
        if self._resting.is_set():
            self._resting = anyio.Event()
        await self._desk.admission.step_back(self._place)
        await self._send([self._reply.working(), *notes, *held])

    def _unasked(self) -> list[A2AEvent]:
        """Forget the question; return what was held back for it."""
        question, self._question = self._question, None
        return question.held if question is not None else []

    # --- Messages that come while another turn is at work ---

    async def _join(self, delivery: Delivery, order: TurnRequest) -> Task | None:
        """Say the message into the turn that runs, and return that one's end as ours; None where there is none."""
        other = next((job for job in self._desk.jobs_before(self) if job.turn is not None and not job.is_asking), None)
        turn = other.turn if other is not None else None
        if other is None or turn is None or turn.ended is not None:
            return None
        if not await turn.steer(order.turn_input, _new_mark(delivery)):
            return None
        await self._desk.deliveries.mark_started(delivery.key, turn.thread_id, turn.turn_id)
        note = f"This message joined the running turn of task {other.task_id}, whose answer is for both."
        self._joined = other
        await self._send([self._reply.working(), self._reply.notice(note)])
        await other.over.wait()
        if other.ended is None:
            raise CodexGone("the task whose turn this message had joined did not come to an end")
        return self._reply.ended_as(other.ended)

    async def _take_the_place_of_others(self, order: TurnRequest) -> TurnRequest:
        """Stop what runs or waits in this context, and return the order with all of it in."""
        earlier: list[EarlierMessage] = []
        for job in self._desk.jobs_before(self):
            job.stop(Outcome(TaskState.TASK_STATE_CANCELED, SUPERSEDED, code("superseded")))
            await job.over.wait()
            if job.order is not None:
                earlier.append(EarlierMessage(job.order.text, answer_text(job.ended) if job.ended is not None else ""))
        if earlier:
            story = superseding_prompt(earlier)
            order = self.order = replace(
                order, turn_input=[*text_input(story), *order.turn_input], text=f"{story}\n\n{order.text}"
            )
        return order

    # --- How it ends ---

    def _outcome(self, turn: RunningTurn) -> Outcome:
        usage = usage_metadata(turn.usage, turn.thread_usage)
        outcome = self._stopped_as or self._ended(turn.ended)
        return Outcome(outcome.state, outcome.sentence, {**outcome.metadata, **usage})

    def _ended(self, ended: TurnCompleted | None) -> Outcome:
        match ended:
            case TurnCompleted(status="completed"):
                return Outcome(TaskState.TASK_STATE_COMPLETED)
            case TurnCompleted(status="interrupted"):
                return self._failed("The turn was interrupted from outside.", "interrupted")
            case TurnCompleted(failure=TurnError() as failure):
                sentence = self._desk.redactor(failure.message)[:MAX_LOGGED_CHARS]
                logger.warning("turn failed (%s): %s", failure.kind, sentence)
                return Outcome(
                    TaskState.TASK_STATE_FAILED, self._desk.redactor(describe_failure(failure)), _code_of(failure)
                )
            case _:
                return self._failed("Codex says that the turn failed, and not why.", "unknown")

    def _failed(self, sentence: str, reason: str) -> Outcome:
        return Outcome(TaskState.TASK_STATE_FAILED, self._desk.redactor(sentence), code(reason))

    async def _send(self, events: Iterable[A2AEvent]) -> None:
        for event in events:
            await self._queue.enqueue_event(event)


Step = SendAgain | Continue | AlreadyEnded | GiveUp


def task_and_context_ids(request: RequestContext) -> tuple[str, str]:
    """Return task id and context id, which the SDK has made up where the client named none.

    A follow-up that names only its task comes with a fresh context id; the task knows the true one.
    """
    task = request.current_task
    context_id = task.context_id if task is not None else request.context_id
    if request.task_id is None or context_id is None:
        raise ValueError("the SDK gives every request a task id and a context id")
    return request.task_id, context_id


def words_of(message: Message) -> tuple[str, JsonObject | None]:
    """Return the text of a message, and the object in its data part where there is one."""
    text = "\n".join(part.text for part in message.parts if part.HasField("text"))
    objects = [part.data.struct_value for part in message.parts if part.data.HasField("struct_value")]
    return text, MessageToDict(objects[0]) if objects else None


def was_taken_up(request: RequestContext) -> bool:
    """Tell whether an earlier process has accepted the message, and may have begun with it."""
    return RESUMED in request.call_context.state


def canceled_outcome() -> Outcome:
    """Return how a task ends that somebody has canceled."""
    return Outcome(TaskState.TASK_STATE_CANCELED, "Canceled.")


def code(reason: str) -> JsonObject:
    """Return the metadata that tell programs why a task did not end well."""
    return {FAILURE: {"code": reason}}


def _code_of(failure: TurnError) -> JsonObject:
    return {FAILURE: error_metadata(failure)}


def _is_due(due: float | None) -> bool:
    return due is not None and anyio.current_time() >= due


def _mark(delivery: Delivery) -> str:
    """Return how the ids begin under which codex is sent this message: so its record tells what became of it."""
    return f"{delivery.task_id}/"


def _new_mark(delivery: Delivery) -> str:
    return f"{_mark(delivery)}{uuid.uuid4()}"
