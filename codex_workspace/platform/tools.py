"""The agent's tools on the platform: peers, memory and user notifications through the platform's API.

A task for a peer is a delegation, which the platform stores, so that a handle stays valid after a restart. A peer in
delivery mode `poll` answers by a message of its own, which its delegation does not show.
"""

import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import anyio

from codex_workspace.common.errors import AgentError, ToolRefused
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.client_types import (
    ActivityRow,
    Delegation,
    PlatformBusy,
    PlatformPeer,
    PlatformRejected,
    PlatformUnreachable,
    as_object,
    is_queued,
    text_field,
    text_of_parts,
    text_of_result,
)
from codex_workspace.protocol.jsonrpc import nested_or_empty
from codex_workspace.runtimes.backend import ToolCaller
from codex_workspace.storage.memories import Exchange, Memory
from codex_workspace.tools.mcp_server import PeerTasks, Toolbox
from codex_workspace.tools.peer_client import PeerInfo, PeerTaskHandle, PeerTaskReport, PeerTaskState

POLL_S: Final = 1.0
"""The interval between looks at a delegation; the platform allows 600 requests a minute."""

LONGEST_POLL_S: Final = 5.0

CUT_BYTES: Final = 290
"""The platform lists at most 300 bytes of a result, cut between characters."""

CUT: Final = "\n[The platform truncated this text; the original may be longer.]"

TRIES: Final = 3
"""How often a delegation is sent if the response is lost; its key makes the platform accept it once."""

MAX_PEERS: Final = 200
MAX_CARD_CHARS: Final = 2000

_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENDS: Final = {"completed": PeerTaskState.DONE, "failed": PeerTaskState.FAILED}

PLATFORM_PEERS: Final = "the platform's agents"
"""Replaces them in the list of peers if the platform does not respond."""

_LATER: Final = "The task is in the peer's inbox; its answer comes as a separate message."


def platform_toolbox(
    own: Toolbox, client: PlatformClient, configured: Collection[str], principals: Collection[str]
) -> Toolbox:
    """Return the tools of an agent on the platform, from those it has without.

    configured: the names of config.yaml's peers. principals: callers with a name of their own, which the platform does
    not know: their memory is the agent's own, and they cannot notify the platform's user.
    """
    memory = PlatformMemoryTool(client, own, principals)
    return Toolbox(
        PlatformPeers(client, own.peer_tasks, configured),
        memory,
        memory.history,
        PlatformNotifier(client, principals).notify,
        own.hand_over,
    )


@dataclass(frozen=True, slots=True)
class PlatformPeers:
    """`PeerTasks` by the platform's delegations; the peers of config.yaml, by their `names`, are `configured`."""

    client: PlatformClient
    configured: PeerTasks
    names: Collection[str]

    async def peers(self) -> list[PeerInfo]:
        """Return all peers, the platform's by their ids; if the platform does not respond, its entry says so."""
        configured = await self.configured.peers()
        try:
            known = await self._known()
        except AgentError as error:
            return [*configured, PeerInfo(PLATFORM_PEERS, problem=error.public)]
        return [*configured, *(PeerInfo(peer.id, card_text=peer.card_text[:MAX_CARD_CHARS]) for peer in known)]

    async def delegate(self, peer: str, task: str, wait_s: float, continues: PeerTaskHandle | None) -> PeerTaskReport:
        """See `PeerTasks`."""
        if peer in self.names:
            return await self.configured.delegate(peer, task, wait_s, continues)
        if continues is not None:
            raise ToolRefused(
                "Tasks on the platform cannot be continued; delegate a new task that contains all the information the "
                "peer needs."
            )
        until = anyio.current_time() + wait_s
        found = [each.id for each in await self._known() if peer in (each.id, each.name)]
        if len(found) != 1:
            raise ToolRefused("No peer, or more than one, has that name; use an ID from list_peers.")
        handle = PeerTaskHandle(found[0], await self._start(found[0], task))
        return await self._follow(handle, until, Delegation(handle.task))

    async def check(self, handle: PeerTaskHandle, wait_s: float) -> PeerTaskReport:
        """See `PeerTasks`."""
        if handle.peer in self.names:
            return await self.configured.check(handle, wait_s)
        return await self._follow(handle, anyio.current_time() + wait_s, None)

    async def _known(self) -> list[PlatformPeer]:
        return [peer for peer in await self.client.peers() if _PLAIN_ID.fullmatch(peer.id)][:MAX_PEERS]

    async def _start(self, target_id: str, task: str) -> str:
        """Return the delegation's id."""
        key = str(uuid.uuid4())
        for left in reversed(range(TRIES)):
            try:
                started = await self.client.delegate(target_id, task, key)
                break
            except PlatformUnreachable as error:
                if not left:
                    raise ToolRefused(f"{error.public} It is unknown whether the peer received the task.") from error
                await anyio.sleep(POLL_S)
        if not _PLAIN_ID.fullmatch(started):
            raise ToolRefused("The platform accepted the task, but its response has no usable delegation_id.")
        return started

    async def _follow(self, handle: PeerTaskHandle, until: float, known: Delegation | None) -> PeerTaskReport:
        """Wait for the end of a delegation, and record that a tool returns its result."""
        self.client.awaited_delegations.append(handle.task)
        try:
            report = await self._wait(handle, until, known)
            if report.state in _ENDS.values():
                self.client.reported_delegations.append(handle.task)
        finally:
            self.client.awaited_delegations.remove(handle.task)
        return report

    async def _wait(self, handle: PeerTaskHandle, until: float, known: Delegation | None) -> PeerTaskReport:
        pause_s = POLL_S / 4
        while True:
            try:
                known = await self._read(handle) or known
            except (PlatformBusy, PlatformUnreachable) as error:
                if anyio.current_time() >= until:
                    return PeerTaskReport(handle.peer, PeerTaskState.UNREACHABLE, handle=handle, note=error.public)
            else:
                if known is None:
                    raise ToolRefused("The platform does not have this task, or no longer has it.")
            if known is not None and known.status in _ENDS:
                return _report(handle, replace(known, result=await self._full_result(known)))
            left_s = until - anyio.current_time()
            if left_s <= 0:
                return PeerTaskReport(handle.peer, PeerTaskState.WORKING, handle=handle)
            await anyio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, LONGEST_POLL_S)

    async def _read(self, handle: PeerTaskHandle) -> Delegation | None:
        """Return the delegation's latest state: the platform may list its start and its end."""
        rows = [each for each in await self.client.delegations() if each.id == handle.task]
        return next((each for each in rows if each.status in _ENDS), next(iter(rows), None))

    async def _full_result(self, ended: Delegation) -> str:
        """Return the whole of a result that the list has cut, from the activity."""
        if len(ended.result.encode()) < CUT_BYTES:
            return ended.result
        try:
            rows = await self.client.activity(type="delegation")
        except (PlatformBusy, PlatformRejected, PlatformUnreachable):
            rows = []
        results = [as_object(row.response) for row in rows if row.method == "delegate_result"]
        found = [text_field(each, "text") for each in results if each.get("delegation_id") == ended.id]
        return next((text for text in found if text), f"{ended.result}{CUT}")


@dataclass(frozen=True, slots=True)
class PlatformMemoryTool:
    """`MemoryTool` by the platform's memories, which belong to the workspace; `principals` have the agent's own."""

    client: PlatformClient
    own: Toolbox
    principals: Collection[str]

    async def commit(self, owner: str, content: str) -> None:
        """See `MemoryTool`."""
        if owner in self.principals:
            await self.own.memory.commit(owner, content)
        else:
            await self.client.commit_memory(content)

    async def recall(self, owner: str, query: str, limit: int) -> Sequence[Memory]:
        """See `MemoryTool`; in the platform's order."""
        if owner in self.principals:
            return await self.own.memory.recall(owner, query, limit)
        return (await self.client.recall_memories(query))[:limit]

    async def history(self, owner: str, context_id: str, limit: int) -> Sequence[Exchange]:
        """See `Toolbox.history`; with the user's notifications."""
        if owner in self.principals:
            return await self.own.history(owner, context_id, limit)
        rows = [_exchange(row) for row in await self.client.activity(limit=limit)]
        return [row for row in rows if row.request or row.reply]


@dataclass(frozen=True, slots=True)
class PlatformNotifier:
    """Sends messages to the user by the platform's notifications."""

    client: PlatformClient
    principals: Collection[str]

    async def notify(self, caller: ToolCaller, text: str) -> None:
        """Send a message. It is not retried if its outcome is unknown: the user might get it twice."""
        if caller.owner in self.principals:
            raise ToolRefused("This caller is not the platform's user and receives only your answer.")
        try:
            await self.client.notify(text)
        except PlatformUnreachable as error:
            if error.outcome_unknown:
                raise ToolRefused(
                    "It is unknown whether the user received the message; do not send it again."
                ) from error
            raise


def _report(handle: PeerTaskHandle, ended: Delegation) -> PeerTaskReport:
    if is_queued(ended.result):
        return PeerTaskReport(handle.peer, PeerTaskState.WORKING, note=_LATER)
    text = "\n".join(text for text in (ended.result, ended.error) if text)
    return PeerTaskReport(handle.peer, _ENDS[ended.status], text)


def _exchange(row: ActivityRow) -> Exchange:
    params = nested_or_empty(row.request or {}, "params")
    request = text_of_parts(nested_or_empty(params, "message").get("parts"))
    response = as_object(row.response)
    reply = text_of_result(nested_or_empty(response, "result")) or text_field(response, "result")
    if row.method == "notify":
        # A notification of the user is a row of its own.
        return Exchange("", reply or row.summary, row.method, row.created_at)
    return Exchange(request or row.summary, reply, row.method, row.created_at)
