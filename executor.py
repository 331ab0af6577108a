"""The A2A side of a turn: `CodexAppServerExecutor` makes a codex turn of each message and a task's events of the turn.

Where messages come from is left to the hosts, what codex's events mean to `codex_workspace.events`, what A2A shows of
them to `codex_workspace.replies`, and the rules of a thread to `codex_workspace.conversation`.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import anyio
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.types import TaskState

from codex_workspace.conversation import Begun, Conversations, Turn
from codex_workspace.errors import AgentError, InputRefused
from codex_workspace.events import TurnEnded, TurnFailure, TurnText
from codex_workspace.failures import explain
from codex_workspace.replies import FAILURE, A2AEvent, Outcome, Reply, usage_metadata
from codex_workspace.wire import JsonObject

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S: Final = 7.0
"""An interrupt takes milliseconds; a codex that does not obey is killed after 5 s."""

STOP_TIMEOUT_S: Final = 2.0
"""When the agent stops there is less patience: with the grace before and codex's end after it, 10 s have to do."""

STOPPED: Final = "The agent stopped before the turn was done. What was said is kept; send the message again to go on."


@dataclass(eq=False, slots=True)
class _Running:
    """A task at work: how to stop it, why it was stopped, and when it is over."""

    waiting: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    turn: Turn | None = None
    stopped_as: Outcome | None = None
    over: anyio.Event = field(default_factory=anyio.Event)

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


class CodexAppServerExecutor(AgentExecutor):
    """Answers A2A messages with turns of a codex app-server.

    Args:
        conversations: gives the conversation of an owner's context.
        scrub: takes secrets out of a text that goes to a peer.
    """

    def __init__(self, conversations: Conversations, scrub: Callable[[str], str] = str) -> None:
        self._conversations = conversations
        self._scrub = scrub
        self._running: dict[str, _Running] = {}
        self._stopping = False

    @property
    def running(self) -> int:
        """How many tasks are at work or wait for their turn."""
        return len(self._running)

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Answer one message: a Task first, a terminal status last, and no exception in between."""
        task_id, context_id = _ids(context)
        reply = Reply(task_id, context_id)
        running = self._running[task_id] = _Running()
        if context.current_task is None:
            await event_queue.enqueue_event(reply.opened(context.message))
        try:
            ending = await self._answer(context, reply, running, event_queue)
            await _send(event_queue, ending)
        finally:
            del self._running[task_id]
            running.over.set()

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
            running.stop(Outcome(TaskState.TASK_STATE_FAILED, STOPPED, _code("agentStopped")))
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_over()
        for running in self._running.values():
            running.kill()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_over()

    async def _all_over(self) -> None:
        for running in list(self._running.values()):
            await running.over.wait()

    async def _answer(
        self, context: RequestContext, reply: Reply, running: _Running, event_queue: EventQueue
    ) -> list[A2AEvent]:
        """Run the turn, send what comes of it, and return the last events."""
        if self._stopping:
            running.stop(Outcome(TaskState.TASK_STATE_REJECTED, "The agent is stopping and takes no new messages."))
        try:
            with running.waiting:
                return await self._run(context, reply, running, event_queue)
        except InputRefused as error:
            return reply.close(Outcome(TaskState.TASK_STATE_REJECTED, str(error), _code("inputRefused")))
        except AgentError as error:
            logger.warning("task %s failed: %s", context.task_id, error)
            return reply.close(running.stopped_as or self._failed(error.public, type(error).__name__))
        except Exception:
            logger.exception("task %s failed for a reason that nobody foresaw", context.task_id)
            return reply.close(self._failed("The agent made a mistake of its own; its log says more.", "internal"))
        return reply.close(running.stopped_as or _canceled())

    async def _run(
        self, context: RequestContext, reply: Reply, running: _Running, event_queue: EventQueue
    ) -> list[A2AEvent]:
        owner, (_, context_id) = context.call_context.user.user_name, _ids(context)
        text = text_of(context)
        async with self._conversations.of(owner, context_id).turn(text) as begun:
            running.turn = begun.turn
            if running.stopped_as is not None:
                begun.turn.interrupt()
            await _send(event_queue, _beginning(reply, begun))
            said = await _follow(begun.turn, reply, event_queue)
        return reply.close(self._outcome(begun.turn, running.stopped_as), said.answer)

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
                logger.warning("turn failed: %s", self._scrub(str(failure)))
                return Outcome(TaskState.TASK_STATE_FAILED, self._scrub(explain(failure)), _code_of(failure))
            case _:
                return self._failed("Codex says that the turn failed, and not why.", "unknown")

    def _failed(self, sentence: str, code: str) -> Outcome:
        return Outcome(TaskState.TASK_STATE_FAILED, self._scrub(sentence), _code(code))


def text_of(context: RequestContext) -> str:
    """Return the text of the request's message.

    Raises:
        InputRefused: the message holds something else too, which would be passed over without a word.
    """
    others = {part.WhichOneof("content") for part in context.message.parts} - {"text"} if context.message else set()
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
