"""The A2A side of a turn: `CodexAppServerExecutor` makes a codex turn of each message and a task's events of the turn.

Where messages come from is left to the hosts, what codex's events mean to `codex_workspace.events`, what A2A shows of
them to `codex_workspace.replies`, and the rules of a thread to `codex_workspace.conversation`.
"""

import logging
import math
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, assert_never

import anyio
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.types import SendMessageRequest, Task, TaskState
from a2a.utils.errors import UnsupportedOperationError

from codex_workspace.admission import Admission, Place
from codex_workspace.conversation import Begun, Conversations, Floor, Turn
from codex_workspace.deliveries import TAKEN_UP, Deliveries, Delivery, DeliveryState, Key, digest_of
from codex_workspace.errors import AgentError, CodexError, CodexGone, InputRefused
from codex_workspace.events import TurnEnded, TurnFailure, TurnText
from codex_workspace.failures import explain
from codex_workspace.recovery import Ended, GiveUp, RecoveryPolicy, Say, Step, next_step
from codex_workspace.replies import FAILURE, A2AEvent, Outcome, Reply, closing, replayed, usage_metadata
from codex_workspace.wire import JsonObject

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S: Final = 7.0
"""An interrupt takes milliseconds; a codex that does not obey is killed after 5 s."""

STOP_TIMEOUT_S: Final = 2.0
"""When the agent stops there is less patience: with the grace before and codex's end after it, 10 s have to do."""

AGENT_ENDED: Final = "the agent ended in the middle of it"
"""Why a turn was cut off that an earlier process had begun."""

STOPPED: Final = "The agent stopped before the turn was done. What was said is kept; send the message again to go on."
NOT_BEGUN: Final = "The agent stopped before it came to this message; send it again."

MAX_LOGGED_CHARS: Final = 2000
"""Of what a model endpoint says of its failure; some send whole pages."""


@dataclass(eq=False, slots=True)
class _Running:
    """A task at work: its place in the line, how to stop it, why it was stopped, and when it is over."""

    place: Place
    waiting: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    turn: Turn | None = None
    stopped_as: Outcome | None = None
    over: anyio.Event = field(default_factory=anyio.Event)

    def take(self, turn: Turn) -> None:
        """Follow a turn that has begun; one that was stopped meanwhile is interrupted."""
        self.turn = turn
        if self.stopped_as is not None:
            turn.interrupt()

    def stop(self, outcome: Outcome) -> None:
        """Have the task end with `outcome`: leave the queue, or interrupt the turn."""
        self.stopped_as = self.stopped_as or outcome
        if self.turn is None:
            self.waiting.cancel()
        else:
            self.turn.interrupt()

    def kill(self) -> None:
        """End the codex that does not obey, and the turn with it."""
        if self.turn is not None:
            self.turn.kill()


class CutOff(CodexError):
    """A turn ended with its codex, against everybody's wish."""


@dataclass(frozen=True, slots=True)
class _Work:
    """All that belongs to the answering of one message."""

    context: RequestContext
    delivery: Delivery
    reply: Reply
    running: _Running
    event_queue: EventQueue


class CodexAppServerExecutor(AgentExecutor):
    """Answers A2A messages with turns of a codex app-server.

    Args:
        conversations: gives the conversation of an owner's context.
        deliveries: where messages are written down.
        policy: what happens to turns that are cut off.
        scrub: takes secrets out of a text that goes to a peer.
        admission: how many turns may run.
    """

    def __init__(
        self,
        conversations: Conversations,
        deliveries: Deliveries,
        policy: RecoveryPolicy = RecoveryPolicy.RESUME,
        scrub: Callable[[str], str] = str,
        admission: Admission | None = None,
    ) -> None:
        self._conversations = conversations
        self._deliveries = deliveries
        self._policy = policy
        self._scrub = scrub
        self._admission = admission or Admission()
        self._running: dict[str, _Running] = {}
        self._stopping = False

    @property
    def running(self) -> int:
        """How many tasks are at work or wait for their turn."""
        return len(self._running)

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Answer one message: a Task first, a terminal status last, and no exception in between.

        A message that an earlier process has taken on is taken up where that one left it.
        """
        task_id, context_id = _ids(context)
        message_id = context.message.message_id if context.message is not None else ""
        with self._admission.claim(context.call_context.user.user_name, context_id, message_id or task_id) as place:
            await self._execute(context, place, event_queue)

    async def _execute(self, context: RequestContext, place: Place, event_queue: EventQueue) -> None:
        task_id, context_id = _ids(context)
        reply = Reply(task_id, context_id)
        running = self._running[task_id] = _Running(place)
        try:
            if context.current_task is None:
                await event_queue.enqueue_event(reply.opened(context.message))
            delivery = await self._delivery(context)
            if delivery.state in (DeliveryState.ANSWERED, DeliveryState.ACKNOWLEDGED):
                await _send(event_queue, replayed(Task.FromString(delivery.ending)))
                return
            ended = await self._answer(_Work(context, delivery, reply, running, event_queue))
            # Down on disk first: from here on, the answer is only handed out.
            await self._deliveries.answered(delivery.key, ended.SerializeToString())
            await _send(event_queue, closing(ended))
        finally:
            del self._running[task_id]
            running.over.set()

    async def _delivery(self, context: RequestContext) -> Delivery:
        """Return the written-down message; a host that writes none down has it done here."""
        task_id, context_id = _ids(context)
        known = await self._deliveries.of_task(task_id)
        message = context.message
        if known is not None and (message is None or known.key.message_id == message.message_id):
            return known
        assert message is not None
        request = SendMessageRequest(message=message)
        key = Key(context.call_context.user.user_name, message.message_id)
        accepted = await self._deliveries.accept(key, request, digest_of(request), task_id, context_id)
        if accepted is None:
            raise UnsupportedOperationError(message=f"message {key.message_id} is answered by another task")
        return accepted

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Stop a task and wait until it has said so itself; the thread keeps its memory."""
        task_id, context_id = _ids(context)
        running = self._running.get(task_id)
        if running is None:
            await _send(event_queue, Reply(task_id, context_id).close(_canceled()))
            return
        running.stop(_canceled())
        with anyio.move_on_after(CANCEL_TIMEOUT_S):
            await running.over.wait()

    async def drain(self, grace_s: float) -> None:
        """Take no new message, give running turns `grace_s` seconds, then end them as failed: the agent stops."""
        self._stopping = True
        with anyio.move_on_after(grace_s):
            await self._all_over()
        for running in self._running.values():
            sentence = STOPPED if running.turn is not None else NOT_BEGUN
            running.stop(Outcome(TaskState.TASK_STATE_FAILED, sentence, _code("agentStopped")))
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_over()
        for running in self._running.values():
            running.kill()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_over()

    async def _all_over(self) -> None:
        for running in list(self._running.values()):
            await running.over.wait()

    async def _answer(self, work: "_Work") -> Task:
        """Run the turn, send what comes of it, and return what the task has come to."""
        reply, running = work.reply, work.running
        if self._stopping:
            running.stop(Outcome(TaskState.TASK_STATE_REJECTED, "The agent is stopping and takes no new messages."))
        try:
            with running.waiting:
                return await self._run(work)
        except InputRefused as error:
            return reply.ended(Outcome(TaskState.TASK_STATE_REJECTED, str(error), _code("inputRefused")))
        except AgentError as error:
            logger.warning("task %s failed: %s", work.delivery.task_id, error)
            return reply.ended(running.stopped_as or self._failed(error.public, type(error).__name__))
        except Exception:
            logger.exception("task %s failed for a reason that nobody foresaw", work.delivery.task_id)
            return reply.ended(self._failed("The agent made a mistake of its own; its log says more.", "internal"))
        return reply.ended(running.stopped_as or _canceled())

    async def _run(self, work: "_Work") -> Task:
        conversation = self._conversations.of(work.delivery.key.owner, work.delivery.context_id)
        message = text_of(work.context)
        conversation.check(message)
        # First this context's turn, then the agent's: whoever waits for the former keeps nobody from the latter.
        async with conversation.floor() as floor, self._admission.turn(work.running.place):
            step: Step = Say(message)
            if was_taken_up(work.context):
                step = await self._take_up(work, floor, work.delivery.deaths, AGENT_ENDED)
            while isinstance(step, Say):
                try:
                    return await self._turn(work, floor, step.text)
                except CutOff as cut_off:
                    deaths = await self._deliveries.died(work.delivery.key)
                    step = await self._take_up(work, floor, deaths, str(cut_off))
                    if isinstance(step, Say):
                        await _send(work.event_queue, [*work.reply.cut_off(), work.reply.notice(_again(cut_off))])
        match step:
            case Ended(end):
                last = end.last_message.text if end.last_message is not None else None
                return work.reply.ended(self._ended(end), last)
            case GiveUp(sentence):
                return work.reply.ended(self._failed(sentence, "cutOff"))
            case _:
                assert_never(step)

    async def _turn(self, work: "_Work", floor: Floor, text: str) -> Task:
        """Run one turn to its end.

        Raises:
            CutOff: codex died in it, and nobody wanted it stopped.
        """
        running, queue = work.running, work.event_queue
        begun: Begun | None = None
        try:
            async with floor.turn(text, mark=f"{_mark(work.delivery)}{uuid.uuid4()}") as begun:
                await self._deliveries.started(work.delivery.key, begun.turn.thread_id, begun.turn.turn_id)
                running.take(begun.turn)
                await _send(queue, _beginning(work.reply, begun))
                said = await _follow(begun.turn, work.reply, queue)
        except CodexGone as gone:
            running.turn = None
            if begun is None or running.stopped_as is not None:
                raise
            raise CutOff(gone.public) from gone
        return work.reply.ended(self._outcome(begun.turn, running.stopped_as), said.answer)

    async def _take_up(self, work: "_Work", floor: Floor, deaths: int, why: str) -> Step:
        """Find out what became of a message's earlier turns, and how to go on."""
        found = await floor.recorded(_mark(work.delivery))
        step = next_step(self._policy, found, text_of(work.context), deaths, why)
        logger.info("task %s is taken up: %s, so %s", work.delivery.task_id, found, type(step).__name__)
        return step

    def _outcome(self, turn: Turn, stopped_as: Outcome | None) -> Outcome:
        usage = usage_metadata(turn.usage, turn.thread_usage)
        outcome = stopped_as or self._ended(turn.ended)
        return Outcome(outcome.state, outcome.sentence, {**outcome.metadata, **usage})

    def _ended(self, ended: TurnEnded | None) -> Outcome:
        match ended:
            case TurnEnded(status="completed"):
                return Outcome(TaskState.TASK_STATE_COMPLETED)
            case TurnEnded(status="interrupted"):
                return self._failed("The turn was interrupted from outside.", "interrupted")
            case TurnEnded(failure=TurnFailure() as failure):
                logger.warning("turn failed (%s): %s", failure.kind, self._scrub(failure.message)[:MAX_LOGGED_CHARS])
                return Outcome(TaskState.TASK_STATE_FAILED, self._scrub(explain(failure)), _code_of(failure))
            case _:
                return self._failed("Codex says that the turn failed, and not why.", "unknown")

    def _failed(self, sentence: str, code: str) -> Outcome:
        return Outcome(TaskState.TASK_STATE_FAILED, self._scrub(sentence), _code(code))


def was_taken_up(context: RequestContext) -> bool:
    """Tell whether an earlier process has accepted the message, and may have begun with it."""
    return TAKEN_UP in context.call_context.state


def text_of(context: RequestContext) -> str:
    """Return the text of the request's message.

    Raises:
        InputRefused: the message holds something else too, which would be passed over without a word.
    """
    parts = context.message.parts if context.message else []
    others = {part.WhichOneof("content") or "empty" for part in parts} - {"text"}
    if others:
        raise InputRefused(
            f"This agent takes text; the message has parts of another kind ({', '.join(sorted(others))})."
        )
    return context.get_user_input()


async def _follow(turn: Turn, reply: Reply, event_queue: EventQueue) -> TurnText:
    """Send the turn's events as they come, text at most ten times a second, until the turn has ended."""
    said = TurnText()
    while turn.ended is None:
        due = reply.due
        out: list[A2AEvent] = []
        for event in await turn.receive(by=math.inf if due is None else due):
            said.apply(event)
            out += reply.apply(event, anyio.current_time())
        due = reply.due
        if due is not None and anyio.current_time() >= due:
            out += reply.flush(anyio.current_time())
        await _send(event_queue, out)
    return said


async def _send(event_queue: EventQueue, events: Iterable[A2AEvent]) -> None:
    for event in events:
        await event_queue.enqueue_event(event)


def _beginning(reply: Reply, begun: Begun) -> list[A2AEvent]:
    return [reply.working(), *([reply.notice(begun.note)] if begun.note else [])]


def _mark(delivery: Delivery) -> str:
    """Return how the ids begin under which codex is sent this message: so its record tells what became of it."""
    return f"{delivery.task_id}/"


def _again(cut_off: CutOff) -> str:
    return f"{cut_off}; the turn is taken up again."


def _canceled() -> Outcome:
    return Outcome(TaskState.TASK_STATE_CANCELED, "Canceled.")


def _code(code: str) -> JsonObject:
    return {FAILURE: {"code": code}}


def _code_of(failure: TurnFailure) -> JsonObject:
    status: JsonObject = {} if failure.http_status is None else {"httpStatus": failure.http_status}
    return {FAILURE: {"code": failure.kind, **status}}


def _ids(context: RequestContext) -> tuple[str, str]:
    """Return task id and context id, which the SDK has made up where the client named none.

    A follow-up that names only its task comes with a fresh context id; the task knows the true one.
    """
    task = context.current_task
    context_id = task.context_id if task is not None else context.context_id
    if context.task_id is None or context_id is None:
        raise ValueError("the SDK gives every request a task id and a context id")
    return context.task_id, context_id
