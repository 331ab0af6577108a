"""`CodexAppServerExecutor`: the A2A executor that answers messages with turns of a coding agent.

How messages reach it:

- **Our own host** serves A2A with `server.handler.IdempotentHandler`, which stores each message before it calls
  `execute`, and at start calls it again for every message without an answer. The host also polls the platform's inbox.
- **A foreign host**, such as the platform's runtime, calls `execute` with its own request handler, which neither
  recognizes a resent message nor resumes one after a restart. `host_adapter` (`platform.host_adapter`) therefore takes
  these calls: it passes each message to an `IdempotentHandler` of its own, which calls `execute` again with `HANDLED`
  in the call's state, and answers the host with one message.
- **An inbox** (`InboxSource`, supplied by `platform`) holds messages that the host does not deliver. `poll` reads it
  with the handler of `host_adapter`, so that the rules for stored messages hold there as well.

`tasks.answering` answers one message, and `tasks.replies` converts a turn's events into A2A events.
"""

from itertools import dropwhile, takewhile
from typing import Final, Protocol

import anyio
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import RequestHandler
from a2a.types import Message, SendMessageRequest, TaskState
from anyio.abc import TaskGroup

from codex_workspace.common.redact import Redactor
from codex_workspace.runtimes.backend import RecoveryPolicy, Thread, ThreadRegistry
from codex_workspace.storage.deliveries import ANSWERED_PROMPT, HANDLED, RESUMED, Deliveries, Delivery, DeliveryKey
from codex_workspace.tasks.answering import Job
from codex_workspace.tasks.replies import (
    NOT_BEGUN,
    STOPPED,
    STOPPING,
    Outcome,
    Reply,
    canceled_outcome,
    closing_events,
    code,
)
from codex_workspace.tasks.request import RequestReader, task_and_context_ids
from codex_workspace.tasks.scheduling import AdmissionControl
from codex_workspace.tasks.telemetry import Telemetry

CANCEL_TIMEOUT_S: Final = 7.0
"""Time for a canceled task to end: an interrupt takes milliseconds, and a hanging codex is killed after 5 s."""

STOP_TIMEOUT_S: Final = 2.0
"""The same while the agent stops; with the grace period and the end of codex the sum must stay below 10 s."""


class InboxSource(Protocol):
    """Messages that are stored outside of this process until the agent fetches and acknowledges them."""

    async def run(self, handler: RequestHandler) -> None:
        """Fetch messages until cancelled: pass each to `handler`, send its answer, then acknowledge the message."""


class CodexAppServerExecutor(AgentExecutor):
    """Answers A2A messages with turns of a codex app-server.

    Args:
        tasks: runs the jobs; a task that waits for an approval outlives the request that started it.
        threads: the threads by owner and context.
        deliveries: the stored messages.
        requests: reads messages into turn requests, and serves the tools that the model calls.
        policy: what happens to interrupted turns.
        redactor: removes secrets from everything that a peer receives.
        admission: the limits on queued messages and running turns.
        question_timeout_s: how long a question waits for an answer before it is declined.
        asks_people: whether questions are passed on at all; otherwise each is declined at once.
        telemetry: records messages and turns.
        inbox: messages that the host does not deliver; see `poll`.
    """

    def __init__(
        self,
        tasks: TaskGroup,
        threads: ThreadRegistry[Thread],
        deliveries: Deliveries,
        requests: RequestReader,
        policy: RecoveryPolicy = RecoveryPolicy.RESUME,
        redactor: Redactor | None = None,
        admission: AdmissionControl | None = None,
        question_timeout_s: float = 3600.0,
        *,
        asks_people: bool = True,
        telemetry: Telemetry | None = None,
        inbox: InboxSource | None = None,
    ) -> None:
        self.telemetry = telemetry or Telemetry()
        self.threads = threads
        self.deliveries = deliveries
        self.requests = requests
        self.admission = admission or AdmissionControl()
        self.policy = policy
        self.question_timeout_s = question_timeout_s
        self.asks_people = asks_people
        self.redactor = redactor or Redactor()
        self.inbox = inbox
        self.host_adapter: AgentExecutor | None = None
        self._tasks = tasks
        self._jobs: dict[str, Job] = {}
        self._stopping = False

    @property
    def running(self) -> int:
        """How many tasks run, wait for their turn, or wait for an answer to a question."""
        return len(self._jobs)

    async def poll(self, handler: RequestHandler) -> None:
        """Answer the messages of the inbox through `handler` until cancelled; return at once without an inbox."""
        if self.inbox is not None:
            await self.inbox.run(handler)

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Answer one message, or pass an answer on to the task that asked the question.

        Returns when the task has ended or asks a question. In the second case the task continues with the next
        message, or by itself when the question times out. A message of an earlier process is resumed.
        """
        if self.host_adapter is not None and not _is_handled(context):
            await self.host_adapter.execute(context, event_queue)
            return
        task_id, _ = task_and_context_ids(context)
        job = self._jobs.get(task_id)
        message = context.message
        assert message is not None
        prompt_id = context.call_context.state.get(ANSWERED_PROMPT)
        if _is_resumed_answer(context) or (job is None and prompt_id is not None):
            # The question no longer exists: its process or its task has ended. The task's own message is resumed.
            await self._complete_delivery(context, message)
            return
        if job is None:
            job = self._start(context, event_queue)
        else:
            await self._complete_delivery(context, message)
            job.receive(message, event_queue, prompt_id)
        await job.wait_or_raise()

    def _start(self, context: RequestContext, event_queue: EventQueue) -> Job:
        job = self._jobs[task_and_context_ids(context)[0]] = Job(self, context, event_queue)
        if self._stopping and self.policy is RecoveryPolicy.FAIL:
            job.stop(Outcome(TaskState.TASK_STATE_REJECTED, STOPPING))
        elif self._stopping:
            job.suspend()
        self._tasks.start_soon(self._run, job)
        return job

    async def _run(self, job: Job) -> None:
        try:
            await job.run()
        finally:
            del self._jobs[job.task_id]

    async def _complete_delivery(self, context: RequestContext, message: Message) -> None:
        """Record that an answer to a question needs no answer of its own."""
        await self.deliveries.complete(DeliveryKey(context.call_context.user.user_name, message.message_id))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Stop a task and wait until it has sent its last status; the thread keeps its history."""
        if self.host_adapter is not None and not _is_handled(context):
            await self.host_adapter.cancel(context, event_queue)
            return
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
        """Start no more turns, let running turns continue for `grace_s` seconds, and suspend the other tasks.

        The next process resumes those tasks; if the operator turned recovery off, they fail now. Tasks that ask a
        question are always suspended.
        """
        self._stopping = True
        with anyio.move_on_after(grace_s):
            await self._all_idle()
        if self.policy is RecoveryPolicy.FAIL:
            await self._fail_all()
        for job in list(self._jobs.values()):
            job.suspend()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_over()
        for job in self._jobs.values():
            job.kill()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_over()

    async def _fail_all(self) -> None:
        for job in self._active():
            sentence = STOPPED if job.turn is not None else NOT_BEGUN
            job.stop(Outcome(TaskState.TASK_STATE_FAILED, sentence, code("agentStopped")))
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._all_idle()

    async def _all_idle(self) -> None:
        while jobs := self._active():
            await jobs[0].wait_until_idle()

    async def _all_over(self) -> None:
        for job in list(self._jobs.values()):
            await job.over.wait()

    def _active(self) -> list[Job]:
        return [job for job in self._jobs.values() if not job.is_asking]

    def jobs_before(self, job: Job) -> list[Job]:
        """Return the unfinished jobs of the same context that came before `job`, in their order."""
        return list(takewhile(lambda each: each is not job, self._same_context(job)))

    def jobs_after(self, job: Job) -> list[Job]:
        """Return the unfinished jobs of the same context that came after `job`, in their order."""
        return list(dropwhile(lambda each: each is not job, self._same_context(job)))[1:]

    def _same_context(self, job: Job) -> list[Job]:
        same = [each for each in self._jobs.values() if (each.owner, each.context_id) == (job.owner, job.context_id)]
        return [each for each in same if each is job or not each.over.is_set()]


def _is_handled(context: RequestContext) -> bool:
    """Return whether the request comes from a handler of this agent, and not from another host."""
    return not context.call_context.state.keys().isdisjoint((HANDLED, RESUMED))


def _is_resumed_answer(context: RequestContext) -> bool:
    """Return whether a resumed message was an answer to a question; only an answer contains a task ID."""
    delivery = context.call_context.state.get(RESUMED)
    return isinstance(delivery, Delivery) and bool(SendMessageRequest.FromString(delivery.request).message.task_id)
