"""Our own tools on the platform: peers, memory and user through its API; who may talk to whom, it decides.

Work is given by the platform's delegations, which it keeps itself: a handle is good after a restart of ours. A peer
that the platform delivers to by `poll` answers by a message of its own later; its delegation tells nothing of that.
"""

import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

import anyio

from codex_workspace.common.errors import AgentError, ToolRefused
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.platform.client import PlatformClient
from codex_workspace.platform.client_types import (
    ActivityRow,
    Delegation,
    PlatformBusy,
    PlatformPeer,
    PlatformRejected,
    PlatformUnreachable,
)
from codex_workspace.platform.payloads import is_queued, text_of_parts, text_of_result
from codex_workspace.runtimes.backend import ToolCaller
from codex_workspace.storage.memories import Exchange, Memory
from codex_workspace.tools.interface import (
    MemoryTool,
    PeerInfo,
    PeerTaskHandle,
    PeerTaskReport,
    PeerTasks,
    PeerTaskState,
    Toolbox,
)

POLL_S: Final = 1.0
"""How often the platform is asked how far work is; it takes 600 requests a minute of a workspace."""

LONGEST_POLL_S: Final = 5.0

CUT_BYTES: Final = 290
"""The platform lists 300 bytes of a result at the most, and cuts between characters."""

CUT: Final = "\n[The platform tells no more of it; it may have been longer.]"

TRIES: Final = 3
"""How often work is given where the answer is lost; the platform takes what has the same key once."""

MAX_PEERS: Final = 200
"""So many are told of, and may be given work."""

MAX_SAID_CHARS: Final = 2000
"""Of what one of them says of itself."""

_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENDS: Final = {"completed": PeerTaskState.DONE, "failed": PeerTaskState.FAILED}
OF_THE_PLATFORM: Final = "the platform's agents"
"""Stands for them in the list of peers where they are not known."""

_LATER: Final = "It has the work in its inbox; what it says to it comes as a message of its own."


def platform_toolbox(
    own: Toolbox, api: PlatformClient, configured: Collection[str], principals: Collection[str]
) -> Toolbox:
    """Return the tools of an agent that is on the platform, given those that it has without.

    configured: the names of the peers of config.yaml. principals: whoever calls this agent beside the platform, by a
    name of their own: they stay among themselves, with a memory of ours, and reach nobody's user.
    """
    return Toolbox(
        CombinedPeers(own.peer_tasks, configured, PlatformPeers(api)),
        CombinedMemory(own.memory, principals, PlatformMemoryTool(api)),
        PlatformNotifier(api, principals),
        own.files,
    )


class PlatformPeers:
    """`toolbox.Work` by the platform's delegations."""

    def __init__(self, api: PlatformClient) -> None:
        self._api = api

    async def peers(self) -> list[PeerInfo]:
        """Return the agents that this one may talk to, by their ids."""
        return [_about(peer) for peer in await self._known()]

    async def delegate(self, peer: str, task: str, wait_s: float, continues: PeerTaskHandle | None) -> PeerTaskReport:
        """Have the platform give a peer work; see `toolbox.Work`."""
        if continues is not None:
            raise ToolRefused("On the platform nothing is continued; give the peer new work that tells all it needs.")
        until = anyio.current_time() + wait_s
        known = _one_of(await self._known(), peer)
        handle = PeerTaskHandle(known.id, await self._given(known.id, task))
        return await self._followed(handle, until, Delegation(handle.task))

    async def check(self, handle: PeerTaskHandle, wait_s: float) -> PeerTaskReport:
        """Ask the platform how far work is; see `toolbox.Work`."""
        return await self._followed(handle, anyio.current_time() + wait_s, None)

    async def _known(self) -> list[PlatformPeer]:
        return [peer for peer in await self._api.peers() if _PLAIN_ID.fullmatch(peer.id)][:MAX_PEERS]

    async def _given(self, target_id: str, task: str) -> str:
        """Return the delegation's id.

        Raises:
            ToolRefused: it is not known whether the peer got the work.
        """
        key = str(uuid.uuid4())
        for left in reversed(range(TRIES)):
            try:
                given = await self._api.delegate(target_id, task, key)
            except PlatformUnreachable as error:
                if left:
                    await anyio.sleep(POLL_S)
                    continue
                if error.outcome_unknown:
                    raise ToolRefused(f"{error.public} It is not known whether the peer got the work.") from error
                raise
            if _PLAIN_ID.fullmatch(given):
                return given
            break
        raise ToolRefused("The platform has taken the work without a word on how to ask for it.")

    async def _followed(self, handle: PeerTaskHandle, until: float, known: Delegation | None) -> PeerTaskReport:
        """Wait for the end of work. Once it was told here, its row in the inbox tells nothing new."""
        self._api.awaited_delegations.append(handle.task)
        try:
            report = await self._wait(handle, until, known)
            if report.state in _ENDS.values():
                self._api.reported_delegations.append(handle.task)
        finally:
            self._api.awaited_delegations.remove(handle.task)
        return report

    async def _wait(self, handle: PeerTaskHandle, until: float, known: Delegation | None) -> PeerTaskReport:
        pause_s = POLL_S / 4
        while True:
            try:
                known = await self._state_of(handle) or known
            except (PlatformBusy, PlatformUnreachable) as error:
                if anyio.current_time() >= until:
                    return PeerTaskReport(handle.peer, PeerTaskState.UNREACHABLE, handle=handle, note=error.public)
            else:
                if known is None:
                    raise ToolRefused("The platform knows no such work, or does not any more.")
            if known is not None and known.status in _ENDS:
                return _report(handle, replace(known, result=await self._whole(known)))
            left_s = until - anyio.current_time()
            if left_s <= 0:
                return PeerTaskReport(handle.peer, PeerTaskState.WORKING, handle=handle)
            await anyio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, LONGEST_POLL_S)

    async def _state_of(self, handle: PeerTaskHandle) -> Delegation | None:
        """Return the delegation's last word: the platform may list its beginning and its end."""
        rows = [each for each in await self._api.delegations() if each.id == handle.task]
        ended = [each for each in rows if each.status in _ENDS]
        return next(iter([*ended, *rows]), None)

    async def _whole(self, ended: Delegation) -> str:
        """Return all of a result whose beginning is listed: it is in the activity, for as long as that is kept."""
        if len(ended.result.encode()) < CUT_BYTES:
            return ended.result
        try:
            rows = await self._api.activity(kind="delegation")
        except (PlatformBusy, PlatformRejected, PlatformUnreachable):
            rows = []
        results = [_object(row.response) for row in rows if row.method == "delegate_result"]
        found = [_words(each.get("text")) for each in results if each.get("delegation_id") == ended.id]
        return next((text for text in found if text), f"{ended.result}{CUT}")


class PlatformMemoryTool:
    """`toolbox.Recollection` by what the platform keeps: the workspace's, whoever asks."""

    def __init__(self, api: PlatformClient) -> None:
        self._api = api

    async def commit(self, caller: ToolCaller, content: str) -> None:
        """Have the platform keep a text."""
        del caller
        await self._api.commit_memory(content)

    async def recall(self, caller: ToolCaller, query: str, limit: int) -> Sequence[Memory]:
        """Return what the platform finds, in its order."""
        del caller
        found = await self._api.recall_memories(query)
        return [Memory(each.content, _seconds(each.created_at)) for each in found[:limit]]

    async def history(self, caller: ToolCaller, limit: int) -> Sequence[Exchange]:
        """Return what came in lately, with its answers where the platform has them, and what the user was told."""
        del caller
        rows = [_exchange(row) for row in await self._api.chat_history(limit)]
        return [row for row in rows if row.request or row.reply]


class PlatformNotifier:
    """`toolbox.Speaker` by the platform's notifications."""

    def __init__(self, api: PlatformClient, principals: Collection[str] = ()) -> None:
        self._api = api
        self._principals = frozenset(principals)

    async def notify(self, caller: ToolCaller, text: str) -> None:
        """Show the user a message. It is not tried again where its success is unknown: it would be there twice."""
        if caller.owner in self._principals:
            raise ToolRefused("Whoever you talk to is not the platform's user; your answer is all that they see.")
        try:
            await self._api.notify(text)
        except PlatformUnreachable as error:
            if error.outcome_unknown:
                raise ToolRefused("It is not known whether the user got it; do not send it again.") from error
            raise


class CombinedPeers:
    """The operator's peers by their names, and everybody else by the platform."""

    def __init__(self, configured: PeerTasks, names: Collection[str], platform: PeerTasks) -> None:
        self._configured = configured
        self._names = frozenset(names)
        self._platform = platform

    async def peers(self) -> list[PeerInfo]:
        """Return the peers of both; those of one, where the platform does not answer."""
        configured = list(await self._configured.peers())
        try:
            return [*configured, *await self._platform.peers()]
        except AgentError as error:
            return [*configured, PeerInfo(OF_THE_PLATFORM, problem=error.public)]

    async def delegate(self, peer: str, task: str, wait_s: float, continues: PeerTaskHandle | None) -> PeerTaskReport:
        """See `toolbox.Work`."""
        return await self._of(peer).delegate(peer, task, wait_s, continues)

    async def check(self, handle: PeerTaskHandle, wait_s: float) -> PeerTaskReport:
        """See `toolbox.Work`."""
        return await self._of(handle.peer).check(handle, wait_s)

    def _of(self, peer: str) -> PeerTasks:
        return self._configured if peer in self._names else self._platform


class CombinedMemory:
    """What principals of a name of their own remember is kept by us, everything else by the platform."""

    def __init__(self, own: MemoryTool, principals: Collection[str], platform: MemoryTool) -> None:
        self._own = own
        self._principals = frozenset(principals)
        self._platform = platform

    async def commit(self, caller: ToolCaller, content: str) -> None:
        """See `toolbox.Recollection`."""
        await self._of(caller).commit(caller, content)

    async def recall(self, caller: ToolCaller, query: str, limit: int) -> Sequence[Memory]:
        """See `toolbox.Recollection`."""
        return await self._of(caller).recall(caller, query, limit)

    async def history(self, caller: ToolCaller, limit: int) -> Sequence[Exchange]:
        """See `toolbox.Recollection`."""
        return await self._of(caller).history(caller, limit)

    def _of(self, caller: ToolCaller) -> MemoryTool:
        return self._own if caller.owner in self._principals else self._platform


def _one_of(peers: Sequence[PlatformPeer], name: str) -> PlatformPeer:
    found = [peer for peer in peers if name in (peer.id, peer.name)]
    if len(found) != 1:
        raise ToolRefused("There is no one peer of that name; list_peers tells who there is, with their ids.")
    return found[0]


def _about(peer: PlatformPeer) -> PeerInfo:
    card = peer.card or {}
    listed = card.get("skills")
    skills = [_object(skill) for skill in (listed if isinstance(listed, list) else [])]
    lines = [
        f"name: {peer.name}, role: {peer.role}, status: {peer.status}",
        _words(card.get("description")),
        *(f"- {_words(skill.get('name'))}: {_words(skill.get('description'))}" for skill in skills),
    ]
    return PeerInfo(peer.id, card_text="\n".join(line for line in lines if line)[:MAX_SAID_CHARS])


def _report(handle: PeerTaskHandle, ended: Delegation) -> PeerTaskReport:
    if is_queued(ended.result):
        return PeerTaskReport(handle.peer, PeerTaskState.WORKING, note=_LATER)
    said = "\n".join(text for text in (ended.result, ended.error) if text)
    return PeerTaskReport(handle.peer, _ENDS[ended.status], said)


def _exchange(row: ActivityRow) -> Exchange:
    params = _object((row.request or {}).get("params"))
    asked = text_of_parts(_object(params.get("message")).get("parts"))
    answer = _object(row.response)
    answered = text_of_result(_object(answer.get("result"))) or _words(answer.get("result"))
    if row.method == "notify":
        # What we have told the user stands here as a row of its own.
        return Exchange("", answered or row.summary, row.method, row.created_at)
    return Exchange(asked or row.summary, answered, row.method, row.created_at)


def _seconds(time: str) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return 0.0


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _words(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""
