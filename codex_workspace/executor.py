"""The A2A side of a turn: `CodexAppServerExecutor` makes a job of each message, and tells the SDK how far it has got.

`tasks.answering` answers one message, `tasks.replies` turns codex's events into A2A events, and `codex.thread` has the
rules of a thread.
"""

import logging
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Final

import anyio
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.types import Message, SendMessageRequest, TaskState
from anyio.abc import TaskGroup

from codex_workspace.codex.recovery import RecoveryPolicy
from codex_workspace.common.redact import Redactor
from codex_workspace.common.values import JsonObject
from codex_workspace.runtimes.backend import DynamicToolCall, Thread, ThreadRegistry
from codex_workspace.storage.deliveries import ANSWERED_PROMPT, RESUMED, Deliveries, Delivery, Key
from codex_workspace.tasks.answering import (
    NOT_BEGUN,
    STOPPED,
    STOPPING,
    Job,
    TurnRequest,
    canceled_outcome,
    code,
    task_and_context_ids,
)
from codex_workspace.tasks.replies import A2AEvent, Outcome, Reply, closing_events
from codex_workspace.tasks.request import RequestReader
from codex_workspace.tasks.scheduling import AdmissionControl
from codex_workspace.tasks.telemetry import Telemetry

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S: Final = 7.0
"""An interrupt takes milliseconds; a codex that does not obey is killed after 5 s."""

STOP_TIMEOUT_S: Final = 2.0
"""When the agent stops there is less patience: with the grace before and codex's end after it, 10 s have to do."""


class CodexAppServerExecutor(AgentExecutor):
    """Answers A2A messages with turns of a codex app-server.

    Args:
        tasks: where jobs run; a task that asks a person something outlives the request that began it.
        threads: gives the thread of an owner's context.
        deliveries: where messages are written down.
        orders: reads what a message wants, and does what the model calls our tools for.
        policy: what happens to turns that are cut off.
        scrub: takes secrets out of what goes to a peer.
        admission: how many turns may run.
        question_timeout_s: how long a question waits for an answer before it counts as declined.
        asks_people: whether anybody is asked at all; else all questions are declined at once.
        telemetry: is told of messages on their way.
    """

    def __init__(
        self,
        tasks: TaskGroup,
        threads: ThreadRegistry[Thread],
        deliveries: Deliveries,
        orders: RequestReader,
        policy: RecoveryPolicy = RecoveryPolicy.RESUME,
        scrub: Redactor | None = None,
        admission: AdmissionControl | None = None,
        question_timeout_s: float = 3600.0,
        *,
        asks_people: bool = True,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.telemetry = telemetry or Telemetry()
        self.threads = threads
        self.deliveries = deliveries
        self.admission = admission or AdmissionControl()
        self.policy = policy
        self.question_timeout_s = question_timeout_s
        self.asks_people = asks_people
        self.scrub = scrub or Redactor()
        self._tasks = tasks
        self._orders = orders
        self._jobs: dict[str, Job] = {}
        self._stopping = False

    @property
    def running(self) -> int:
        """How many tasks are at work, wait for their turn, or wait for a person."""
        return len(self._jobs)

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Answer one message, or pass a person's word on to the task that has asked for it.

        Returns when the task has ended, and when it asks a person something: then it goes on with the next message, or
        by itself when nobody has answered for too long. A message that an earlier process has taken on is taken up
        where that one left it.
        """
        task_id, _ = task_and_context_ids(context)
        job = self._jobs.get(task_id)
        message = context.message
        assert message is not None
        prompt_id = context.call_context.state.get(ANSWERED_PROMPT)
        if _is_lost_word(context) or (job is None and prompt_id is not None):
            # The question that it answers ended with its process, whose own message is taken up; or with its task.
            await self._settle(context, message)
            return
        if job is None:
            job = self._begin(context, event_queue)
        else:
            await self._settle(context, message)
            job.hear(message, event_queue, prompt_id)
        await job.rested()

    def _begin(self, context: RequestContext, event_queue: EventQueue) -> Job:
        job = self._jobs[task_and_context_ids(context)[0]] = Job(self, context, event_queue)
        if self._stopping and self.policy is RecoveryPolicy.FAIL:
            job.stop(Outcome(TaskState.TASK_STATE_REJECTED, STOPPING))
        elif self._stopping:
            job.set_aside()
        self._tasks.start_soon(self._run, job)
        return job

    async def _run(self, job: Job) -> None:
        try:
            await job.run()
        finally:
            del self._jobs[job.task_id]

    async def _settle(self, context: RequestContext, message: Message) -> None:
        """Take note that a person's word needs no answer of its own: the task gives it."""
        await self.deliveries.settle(Key(context.call_context.user.user_name, message.message_id))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Stop a task and wait until it has said so itself; the thread keeps its memory."""
        task_id, context_id = task_and_context_ids(context)
        job = self._jobs.get(task_id)
        if job is None:
            for event in closing_events(Reply(task_id, context_id).ended(canceled_outcome())):
                await event_queue.enqueue_event(event)
            return
        job.stop(canceled_outcome())
        with anyio.move_on_after(CANCEL_TIMEOUT_S):
            await job.over.wait()

    async def drain(self, grace_s: float) -> None:
        """Begin nothing any more, give running turns `grace_s` seconds, and leave the rest: the agent stops.

        What is left is taken up by the next process; where the operator wants no recovery it ends as failed. Questions
        are left in any case.
        """
        self._stopping = True
        with anyio.move_on_after(grace_s):
            await self._all_at_rest()
        if self.policy is RecoveryPolicy.FAIL:
            await self._fail_all()
        for job in list(self._jobs.values()):
            job.set_aside()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_over()
        for job in self._jobs.values():
            job.kill()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_over()

    async def _fail_all(self) -> None:
        for job in self._at_work():
            sentence = STOPPED if job.turn is not None else NOT_BEGUN
            job.stop(Outcome(TaskState.TASK_STATE_FAILED, sentence, code("agentStopped")))
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_at_rest()

    async def _all_at_rest(self) -> None:
        while jobs := self._at_work():
            await jobs[0].at_rest()

    async def _all_over(self) -> None:
        for job in list(self._jobs.values()):
            await job.over.wait()

    def _at_work(self) -> list[Job]:
        return [job for job in self._jobs.values() if not job.is_asking]

    # --- What jobs need ---

    async def read(self, message: Message, task_id: str) -> TurnRequest:
        """Return what a message wants; raises InputRefused where it cannot be had."""
        return await self._orders.read(message, task_id)

    async def serve(self, call: DynamicToolCall, reply: Reply, cwd: Path | None) -> tuple[JsonObject, list[A2AEvent]]:
        """Do what the model, at work in `cwd`, calls a tool of ours for: its result, and what goes out."""
        return await self._orders.serve(call, reply, cwd)

    def before(self, job: Job) -> list[Job]:
        """Return the jobs of the same context that were there first and are not over, in their order."""
        return list(takewhile(lambda each: each is not job, self._beside(job)))

    def behind(self, job: Job) -> list[Job]:
        """Return the jobs of the same context that came after it and are not over, in their order."""
        return list(dropwhile(lambda each: each is not job, self._beside(job)))[1:]

    def _beside(self, job: Job) -> list[Job]:
        same = [each for each in self._jobs.values() if (each.owner, each.context_id) == (job.owner, job.context_id)]
        return [each for each in same if each is job or not each.over.is_set()]


def _is_lost_word(context: RequestContext) -> bool:
    """Tell whether a message that is taken up was somebody's word on a question: it named its task when it came."""
    delivery = context.call_context.state.get(RESUMED)
    return isinstance(delivery, Delivery) and bool(SendMessageRequest.FromString(delivery.request).message.task_id)
