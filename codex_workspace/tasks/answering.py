"""`Job` answers one message: it waits in the queue, runs the turn, handles its questions, and ends the task."""

import logging
import math
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final, Protocol

import anyio
from a2a.server.agent_execution import RequestContext
from a2a.server.events import EventQueue
from a2a.types import Message, SendMessageRequest, Task, TaskState
from a2a.utils.errors import UnsupportedOperationError

from codex_workspace.common.a2a_terms import AWAITING_INPUT
from codex_workspace.common.errors import AgentError, CodexError, CodexGone, InputRefused
from codex_workspace.common.redact import Redactor
from codex_workspace.protocol.codex_events import TurnCompleted
from codex_workspace.protocol.server_requests import Declined, response_to
from codex_workspace.runtimes.backend import (
    DynamicToolCall,
    RecoveryPolicy,
    RunningTurn,
    Thread,
    ThreadLease,
    ThreadRegistry,
    TurnInput,
    TurnOptions,
    TurnRecord,
    next_step,
    text_input,
)
from codex_workspace.runtimes.convert import EventRedactor
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
from codex_workspace.tasks.approval_answers import (
    NO_ANSWER,
    NOT_PROCESSED,
    QUESTION_LOST,
    TIMED_OUT,
    TOO_LATE,
    OpenQuestion,
    ReceivedAnswer,
    UnclearAnswer,
)
from codex_workspace.tasks.live_output import ITEMS, LiveOutput
from codex_workspace.tasks.replies import (
    INTERNAL_ERROR,
    SUPERSEDED,
    TASK_OUTCOMES,
    A2AEvent,
    Outcome,
    Reply,
    answer_text,
    canceled_outcome,
    closing_events,
    code,
    failed_outcome,
    replay_events,
    turn_outcome,
    usage_metadata,
)
from codex_workspace.tasks.request import RequestReader, TurnRequest, task_and_context_ids
from codex_workspace.tasks.scheduling import AdmissionControl, EarlierMessage, MidTurn, superseding_prompt
from codex_workspace.tasks.telemetry import MessageTelemetry, Telemetry, TurnTelemetry

logger = logging.getLogger(__name__)

AGENT_ENDED: Final = "the agent ended during the turn"
"""The reason for the interruption of a turn that an earlier process started."""


class TurnInterrupted(CodexError):
    """Codex died during a turn that was not being stopped."""


class AgentServices(Protocol):
    """The services that all jobs share; implemented by `CodexAppServerExecutor`."""

    telemetry: Telemetry
    threads: ThreadRegistry[Thread]
    deliveries: Deliveries
    requests: RequestReader
    admission: AdmissionControl
    policy: RecoveryPolicy
    question_timeout_s: float
    asks_people: bool
    redactor: Redactor

    def jobs_before(self, job: "Job") -> list["Job"]:
        """Return the unfinished jobs of the same context that came before `job`, in their order."""

    def jobs_after(self, job: "Job") -> list["Job"]:
        """Return the unfinished jobs of the same context that came after `job`, in their order."""


class Job:
    """Answers one message.

    A job is not tied to the request that started it: while a task waits for an answer to a question, the request
    returns, and the job continues with the answer's request or when the question times out.
    """

    def __init__(self, services: AgentServices, context: RequestContext, event_queue: EventQueue) -> None:
        self.task_id, self.context_id = task_and_context_ids(context)
        self.owner: Final = context.call_context.user.user_name
        self.over: Final = anyio.Event()
        self.ended: Task | None = None
        self.error: Exception | None = None
        self.turn: RunningTurn | None = None
        self.request: TurnRequest | None = None
        self._services = services
        self._context = context
        self._is_resumed = RESUMED in context.call_context.state
        self._is_opened = context.current_task is not None
        self._queue = event_queue
        has_live_output = ITEMS in context.call_context.requested_extensions
        live = LiveOutput(self.task_id, self.context_id) if has_live_output else None
        before = context.current_task.artifacts if context.current_task is not None else []
        self._reply = Reply(self.task_id, self.context_id, live, before, lambda: services.admission.update_interval_s)
        self._turn_id: str | None = None
        self._idle = anyio.Event()
        self._run_scope = anyio.CancelScope()
        self._queue_scope = anyio.CancelScope()
        self._stop_outcome: Outcome | None = None
        self._question: OpenQuestion | None = None
        self._answers: deque[ReceivedAnswer] = deque()
        self._joined: Job | None = None

    @property
    def is_asking(self) -> bool:
        """Whether the task waits for an answer to a question."""
        return self._question is not None

    async def wait_or_raise(self) -> None:
        """Wait until the job is over or asks a question; raise an error that ended it without a terminal status."""
        await self.wait_until_idle()
        if self.error is not None:
            raise self.error

    async def wait_until_idle(self) -> None:
        """Wait until the job is over or asks a question."""
        await self._idle.wait()

    def receive(self, message: Message, event_queue: EventQueue, prompt_id: str | None = None) -> None:
        """Accept an answer to the question with message id `prompt_id`; further events are sent to `event_queue`."""
        self._answers.append(ReceivedAnswer(message, prompt_id))
        self._queue = event_queue
        self._idle = anyio.Event()
        if self.over.is_set():
            self._idle.set()
        elif self.turn is not None:
            self.turn.wake()

    async def blocked_by(self, asking: "Job") -> None:
        """End this task, because an earlier one asks a question; if the sender polls, only report it."""
        sentence, is_queued = asking.question_text(), self._joined is None
        if not self._is_polled:
            state = TaskState.TASK_STATE_REJECTED if is_queued else TaskState.TASK_STATE_CANCELED
            self.stop(Outcome(state, f"{NOT_PROCESSED} {sentence}" if is_queued else sentence, code("questionOpen")))
        elif self._is_opened:
            await self._send([(self._reply.waits if is_queued else self._reply.notice)(sentence)])

    def question_text(self) -> str:
        """Return the open question and how to answer it, for the senders of other messages."""
        assert self._question is not None
        return self._question.text_for_others(self.task_id, self._services.redactor)

    def stop(self, outcome: Outcome) -> None:
        """End the task with `outcome`: leave the queue, or interrupt the turn."""
        self._stop_outcome = self._stop_outcome or outcome
        if self.turn is None:
            self._queue_scope.cancel()
        else:
            self.turn.interrupt()

    def kill(self) -> None:
        """Kill a codex that does not react to the interrupt."""
        if self.turn is not None:
            self.turn.kill()

    def suspend(self) -> None:
        """Leave the task unfinished; the next process resumes it."""
        self._run_scope.cancel()

    async def run(self) -> None:
        """Answer the message: send the task first and a terminal status last. Exceptions are stored in `error`."""
        message_id, services = self._message.message_id or self.task_id, self._services
        recorded = services.telemetry.message(self.task_id, self.context_id, self._context.call_context.state)
        claim = services.admission.claim(self.owner, self.context_id, message_id)
        try:
            with recorded as telemetry, self._run_scope, claim as slot:
                self._slot = slot
                await self._work(telemetry)
        except Exception as error:
            # Only the request that waits for this task raises the error.
            logger.log(logging.INFO if isinstance(error, UnsupportedOperationError) else logging.ERROR, "%s", error)
            self.error = error
        finally:
            self.over.set()
            self._idle.set()

    @property
    def _is_polled(self) -> bool:
        """Whether no call waits for the task: its sender can leave it in the queue."""
        return self._context.configuration is not None and self._context.configuration.return_immediately

    @property
    def _asking(self) -> "Job | None":
        """The earlier task of this context that asks a question."""
        return next((job for job in self._services.jobs_before(self) if job.is_asking), None)

    @property
    def _message(self) -> Message:
        message = self._context.message
        assert message is not None
        return message

    async def _work(self, telemetry: MessageTelemetry) -> None:
        if not self._is_opened:
            opened = self._reply.opened(self._message)
            if self._is_polled and (asking := self._asking) is not None:
                opened.status.CopyFrom(self._reply.waits(asking.question_text()).status)
            self._is_opened = True
            await self._send([opened])
        delivery = self._delivery = await self._stored()
        if delivery.state in (DeliveryState.ANSWERED, DeliveryState.ACKNOWLEDGED):
            self.ended = Task.FromString(delivery.ending)
            await self._send(replay_events(self.ended))
            return
        ended = await self._answer(telemetry)
        # The answer is stored before it is sent.
        await self._services.deliveries.mark_answered(delivery.key, ended.SerializeToString())
        self.ended = ended
        telemetry.ended(TASK_OUTCOMES[ended.status.state])
        await self._send([*self._close_question(), *closing_events(ended)])

    async def _stored(self) -> Delivery:
        """Return the stored message; store it if the host has not stored it in this database."""
        state, deliveries = self._context.call_context.state, self._services.deliveries
        match state.get(RESUMED) or state.get(RECORDED):
            case Delivery() as resumed:
                return resumed
            case RecordedMessage(delivery, source) if source is deliveries:
                return delivery
        key = DeliveryKey(self.owner, self._message.message_id)
        known = await deliveries.find_by_task(self.task_id)
        if known is not None and known.key.message_id == key.message_id:
            return known
        request = SendMessageRequest(message=self._message)
        accepted = await deliveries.accept(key, request, message_digest(request), self.task_id, self.context_id)
        if accepted is None:
            raise UnsupportedOperationError(message=f"message {key.message_id} is answered by another task")
        return accepted

    async def _answer(self, telemetry: MessageTelemetry) -> Task:
        """Run the turn and return the finished task."""
        reply = self._reply
        try:
            with self._queue_scope:
                return await self._run(telemetry)
        except InputRefused as error:
            return reply.ended(Outcome(TaskState.TASK_STATE_REJECTED, str(error), code("inputRefused")))
        except AgentError as error:
            logger.warning("task %s failed: %s", self.task_id, error)
            return reply.ended(self._stop_outcome or self._failed(error.public, type(error).__name__))
        except Exception:
            logger.exception("task %s failed with an unexpected error", self.task_id)
            return reply.ended(self._failed(INTERNAL_ERROR, "internal"))
        return reply.ended(self._canceled())

    def _canceled(self) -> Outcome:
        outcome = self._stop_outcome or canceled_outcome()
        if self._joined is None:
            return outcome
        addition = f"Task {self._joined.task_id} already received its text."
        return replace(outcome, sentence=f"{addition} {outcome.sentence}".strip())

    async def _run(self, telemetry: MessageTelemetry) -> Task:
        services, task = self._services, self._context.current_task
        request = self.request = await services.requests.read(self._message, self.task_id)
        thread = services.threads.get(self.owner, self.context_id)
        if not self._is_resumed and request.mid_turn is MidTurn.STEER and (joined := await self._join(request)):
            return joined
        if not self._is_resumed and request.mid_turn is MidTurn.INTERRUPT:
            request = self.request = await self._supersede(request)
        if self._is_resumed and task is not None and task.status.state in AWAITING_INPUT:
            await self._send([self._reply.notice(QUESTION_LOST)])
        if not self._is_polled and (asking := self._asking) is not None:
            await self.blocked_by(asking)
        async with AsyncExitStack() as stack:
            with telemetry.waiting():
                # First the thread, then a slot: a message that waits for its thread must not occupy a slot.
                lease = await stack.enter_async_context(thread.lease())
                await stack.enter_async_context(services.admission.turn(self._slot))
            return await self._run_turns(lease, request, telemetry)

    async def _run_turns(self, lease: ThreadLease, request: TurnRequest, telemetry: MessageTelemetry) -> Task:
        """Run turns until one has ended, or the recovery policy gives up."""
        step: TurnInput | TurnCompleted | str = request.turn_input
        deliveries, delivery = self._services.deliveries, self._delivery
        deaths, restarts = delivery.deaths, 0
        if self._is_resumed:
            # Before the look at codex's record, in case that ends the agent.
            is_started = delivery.state is DeliveryState.STARTED
            restarts = await deliveries.count_restart(delivery.task_id) if is_started else 0
            found = await self._recorded_end(lease, request, AGENT_ENDED)
            if found is TurnRecord.INTERRUPTED and not is_started:
                restarts = await deliveries.count_restart(delivery.task_id)
            step = next_step(self._services.policy, found, request.turn_input, deaths, restarts, AGENT_ENDED)
        while not isinstance(step, str | TurnCompleted):
            try:
                with telemetry.turn() as turn_telemetry:
                    return await self._turn(lease, step, request.options, turn_telemetry)
            except TurnInterrupted as interrupted:
                why = str(interrupted)
                deaths = await deliveries.count_codex_death(delivery.key)
                found = await self._recorded_end(lease, request, why)
                step = next_step(self._services.policy, found, request.turn_input, deaths, restarts, why)
                if not isinstance(step, str | TurnCompleted):
                    notice = self._reply.notice(f"{why}; the agent resumes the turn.")
                    await self._send([*self._close_question(), *self._reply.interrupted(), notice])
        if isinstance(step, str):
            return self._reply.ended(self._failed(step, "cutOff"))
        last = self._services.redactor(step.last_message.text) if step.last_message is not None else None
        return self._reply.ended(turn_outcome(step, self._services.redactor), last)

    async def _recorded_end(self, lease: ThreadLease, request: TurnRequest, why: str) -> TurnCompleted | TurnRecord:
        """Find out how the message's earlier turns ended."""
        delivery = self._delivery
        found = await lease.recorded_end(f"{delivery.task_id}/", request.turn_input, self._turn_id or delivery.turn_id)
        logger.info("resuming task %s: %s; codex's history: %s", self.task_id, why, found)
        return found

    async def _turn(
        self, lease: ThreadLease, turn_input: TurnInput, options: TurnOptions, telemetry: TurnTelemetry
    ) -> Task:
        """Run one turn to its end.

        Raises:
            TurnInterrupted: codex died during the turn, or repeatedly before it, and the task is not being stopped.
        """
        try:
            async with lease.turn(turn_input, self._new_client_message_id(), options) as started:
                turn = self.turn = started.turn
                self._turn_id = turn.turn_id
                if self._stop_outcome is not None:
                    turn.interrupt()
                notes = [self._reply.notice(self._services.redactor(started.note))] if started.note else []
                telemetry.began(turn)
                await self._services.deliveries.mark_started(self._delivery.key, turn.thread_id, turn.turn_id)
                await self._send([self._reply.working(), *notes])
                await self._follow(turn, telemetry)
        except CodexGone as gone:
            self.turn = None
            if self._stop_outcome is not None:
                raise
            raise TurnInterrupted(gone.public) from gone
        return self._reply.ended(self._outcome(turn))

    async def _follow(self, turn: RunningTurn, telemetry: TurnTelemetry) -> None:
        """Send the turn's events until it has ended, text in intervals."""
        reply, redactor = self._reply, EventRedactor(self._services.redactor)
        while turn.ended is None:
            out: list[A2AEvent] = []
            due = self._question.deadline if self._question is not None else reply.due
            for event in await turn.receive(math.inf if due is None else due, reply.text_by):
                telemetry.see(event)
                for redacted in redactor.redact(event):
                    out += reply.apply(redacted, anyio.current_time())
            if self._question is not None:
                self._question.held_events += out
            else:
                now, due = anyio.current_time(), reply.due
                await self._send([*out, *(reply.flush(now) if due is not None and now >= due else [])])
            await self._serve_requests(turn)

    # --- Requests of codex: tool calls and questions ---

    async def _serve_requests(self, turn: RunningTurn) -> None:
        """Answer codex's pending requests until one of them needs an answer that has not arrived."""
        services = self._services
        while turn.ended is None:
            pending, question = turn.pending, self._question
            if question is not None and question.pending is not pending:
                await self._resume_work()
            elif pending is None:
                if self._answers:
                    await self._send([self._reply.notice(TOO_LATE) for _ in self._answers])
                    self._answers.clear()
                return
            elif isinstance(pending.subject, DynamicToolCall):
                cwd = self.request.options.cwd if self.request is not None else None
                result, out = await services.requests.serve(pending.subject, self._reply, cwd)
                turn.answer(pending, result)
                await self._send(out)
            elif not services.asks_people:
                turn.answer(pending, response_to(pending.subject, Declined()))
            elif question is None:
                deadline = anyio.current_time() + services.question_timeout_s
                await self._ask(OpenQuestion(pending, pending.subject, deadline))
            else:
                match question.decide(self._answers, anyio.current_time()):
                    case None:
                        return
                    case UnclearAnswer() as unclear:
                        await self._ask(question, unclear)
                    case decision:
                        await question.answer(turn, decision)
                        late = NO_ANSWER.format(timeout_s=services.question_timeout_s)
                        await self._resume_work([self._reply.notice(late)] if decision is TIMED_OUT else [])

    async def _ask(self, question: OpenQuestion, unclear: UnclearAnswer | None = None) -> None:
        """Send a question and let other turns run until it is answered."""
        self._question = question
        asking = self._reply.asking(*question.prompt(self._services.redactor, unclear))
        question.prompt_id = asking.status.message.message_id
        await self._send([*self._reply.before_question(anyio.current_time()), asking])
        if self._stop_outcome is None:
            for other in self._services.jobs_after(self):
                await other.blocked_by(self)
        self._services.admission.release_slot(self._slot)
        self._idle.set()

    async def _resume_work(self, notes: Sequence[A2AEvent] = ()) -> None:
        """Continue after a question: wait for a slot, then send the events that were held back."""
        held_events = self._close_question()
        if self._idle.is_set():
            self._idle = anyio.Event()
        await self._services.admission.reacquire_slot(self._slot)
        await self._send([self._reply.working(), *notes, *held_events])

    def _close_question(self) -> list[A2AEvent]:
        """Drop the open question; return the events that were held back."""
        question, self._question = self._question, None
        return question.held_events if question is not None else []

    # --- Messages that arrive during another turn ---

    async def _join(self, request: TurnRequest) -> Task | None:
        """Add the message to the running turn and return its task's end; None if no turn accepts it."""
        other = next((job for job in self._services.jobs_before(self) if job.turn and not job.is_asking), None)
        turn = other.turn if other is not None else None
        client_message_id = self._new_client_message_id()
        # Before the text is sent: if the turn asks a question meanwhile, the message may be part of it.
        self._joined = other
        if not (other and turn and turn.ended is None and await turn.steer(request.turn_input, client_message_id)):
            self._joined = None
            return None
        await self._services.deliveries.mark_started(self._delivery.key, turn.thread_id, turn.turn_id)
        note = f"This message joined the running turn of task {other.task_id}; the answer is for both messages."
        await self._send([self._reply.working(), self._reply.notice(note)])
        await other.over.wait()
        if other.ended is None:
            raise CodexGone("the task whose turn this message joined was not completed")
        return self._reply.ended_as(other.ended)

    async def _supersede(self, request: TurnRequest) -> TurnRequest:
        """Stop the earlier tasks of this context; return the request with their messages included."""
        earlier: list[EarlierMessage] = []
        for job in self._services.jobs_before(self):
            job.stop(Outcome(TaskState.TASK_STATE_CANCELED, SUPERSEDED, code("superseded")))
            await job.over.wait()
            if job.request is not None:
                answer = answer_text(job.ended) if job.ended is not None else ""
                earlier.append(EarlierMessage(job.request.text, answer))
        if not earlier:
            return request
        prompt = superseding_prompt(earlier)
        turn_input = [*text_input(prompt), *request.turn_input]
        return replace(request, turn_input=turn_input, text=f"{prompt}\n\n{request.text}")

    # --- Outcomes ---

    def _outcome(self, turn: RunningTurn) -> Outcome:
        usage = usage_metadata(turn.usage, turn.thread_usage)
        outcome = self._stop_outcome or turn_outcome(turn.ended, self._services.redactor)
        return replace(outcome, metadata={**outcome.metadata, **usage})

    def _failed(self, sentence: str, reason: str) -> Outcome:
        return failed_outcome(self._services.redactor(sentence), reason)

    def _new_client_message_id(self) -> str:
        """Return an id for codex's history; its prefix identifies the task."""
        return f"{self._delivery.task_id}/{uuid.uuid4()}"

    async def _send(self, events: Iterable[A2AEvent]) -> None:
        for event in events:
            await self._queue.enqueue_event(event)
