"""Each client shows the answer once: how a stream brings it, and where the task has it.

Covers `server.answer_updates` and `tasks.tool_notes`.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import httpx
import pytest
from a2a.client.client import ClientCallContext
from a2a.client.service_parameters import ServiceParametersFactory, with_a2a_extensions
from a2a.types import GetTaskRequest, ListTasksRequest, Part, SendMessageRequest, StreamResponse
from a2a.utils.errors import InvalidParamsError

from codex_workspace.devkit.script import numbered_text
from tests.e2e.agent_process import AgentProcess, AgentSetup, Backend, running_agent
from tests.e2e.client import Peer, peer, request, script

pytestmark = [pytest.mark.both_backends, pytest.mark.slow]

TEXT = "ALPHA brings\nmany words, cut anywhere, and it ends with OMEGA."
SLOWLY = {"say": TEXT, "chunk_chars": 7, "delay_ms": 60, "phase": "final_answer"}
ADDED = "*** Begin Patch\n*** Add File: made.txt\n+made\n*** End Patch"
EXTENSION = "urn:codex-workspace:answer-updates"
PIECES, BOTH, WHOLE = "pieces", "pieces-then-whole", "whole"


@dataclass
class Stream:
    """What came of a stream: its artifact updates and, printed one after the other, the texts of `answer`."""

    headers: httpx.Headers
    updates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [each for each in self.updates if each["artifact"]["artifactId"] == "answer"]

    @property
    def texts(self) -> list[str]:
        assert all(len(each["artifact"]["parts"]) == 1 for each in self.answers)
        return [str(each["artifact"]["parts"][0]["text"]) for each in self.answers]

    @property
    def printed(self) -> str:
        return "".join(self.texts)

    @property
    def mode(self) -> str:
        """The mode that shows TEXT like this."""
        last = self.answers[-1]
        assert [each.get("lastChunk", False) for each in self.answers] == [False] * (len(self.answers) - 1) + [True]
        if len(self.answers) == 1:
            assert (self.printed, last.get("append", False)) == (TEXT, False)
            return WHOLE
        if last.get("append", False):
            assert self.printed == TEXT
            return PIECES
        assert TEXT.startswith("".join(self.texts[:-1]))
        assert self.texts[-1] == TEXT
        return BOTH


async def stream(
    url: str, text: str, headers: Mapping[str, str], *, is_old: bool = False, metadata: Mapping[str, str] | None = None
) -> Stream:
    """Send a message and read its stream as bytes, so that no SDK adds headers or joins texts."""
    message: dict[str, object] = {"messageId": str(uuid.uuid4()), "metadata": dict(metadata or {})}
    message |= {"parts": [{"text": text}], "role": "ROLE_USER"}
    if is_old:
        message |= {"kind": "message", "parts": [{"kind": "text", "text": text}], "role": "user"}
    method = "message/stream" if is_old else "SendStreamingMessage"
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": message}}
    sent = {"A2A-Version": "0.3" if is_old else "1.0", **headers}
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", url, json=body, headers=sent) as response,
    ):
        seen = Stream(response.headers)
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                result = json.loads(line.removeprefix("data:"))["result"]
                update = result if result.get("kind") == "artifact-update" else result.get("artifactUpdate")
                seen.updates += [update] if update is not None else []
    return seen


@pytest.mark.versions
async def test_a_loop_that_prints_a_stream_prints_the_answer_once(agent: AgentProcess, backend: Backend) -> None:
    seen = await stream(agent.url, script(SLOWLY), {"User-Agent": "curl/8.5.0"})
    assert seen.printed == TEXT
    # codex exec tells a text when it is whole.
    assert (len(seen.answers) > 2) == (backend == "app-server")


CLIENTS = [
    ("python-httpx/0.28.1", False, BOTH),
    ("python-httpx/0.28.1", True, WHOLE),
    ("agent-framework-python/1.0 python-httpx/0.27", False, PIECES),
    ("Go-http-client/1.1", False, PIECES),
    ("node", False, PIECES),
    ("node", True, PIECES),
]


@pytest.mark.app_server_only(reason="codex exec tells a text when it is whole")
async def test_each_request_gets_the_updates_that_its_client_needs_or_that_it_wants(agent: AgentProcess) -> None:
    text = script(SLOWLY)
    for user_agent, is_old, mode in CLIENTS:
        seen = await stream(agent.url, text, {"User-Agent": user_agent}, is_old=is_old)
        assert (seen.mode, user_agent, is_old) == (mode, user_agent, is_old)
    for mode in (PIECES, BOTH, WHOLE):
        for name, is_old in (("A2A-Extensions", False), ("X-A2A-Extensions", True)):
            seen = await stream(agent.url, text, {name: f"urn:other, {EXTENSION}:{mode}"}, is_old=is_old)
            assert (seen.mode, seen.headers[name]) == (mode, f"{EXTENSION}:{mode}")
            seen = await stream(agent.url, text, {}, is_old=is_old, metadata={EXTENSION: mode})
            assert seen.mode == mode


@pytest.mark.app_server_only(reason="codex exec tells a text when it is whole")
async def test_the_operator_chooses_for_requests_without_a_wish(setup: AgentSetup) -> None:
    chosen = replace(setup, config={"a2a": {"answer_updates": WHOLE}})
    async with running_agent(chosen) as agent:
        assert (await stream(agent.url, script(SLOWLY), {"User-Agent": "node"})).mode == WHOLE
        assert (await stream(agent.url, script(SLOWLY), {}, metadata={EXTENSION: PIECES})).mode == PIECES


async def test_an_unknown_wish_is_refused_and_the_card_names_the_known_ones(client: Peer, agent: AgentProcess) -> None:
    sent = request("hello")
    sent.message.metadata[EXTENSION] = "letters"
    with pytest.raises(InvalidParamsError, match="must be one of pieces, pieces-then-whole, whole"):
        async for _ in client.streaming.send_message(sent):
            pass
    assert (await client.blocking.list_tasks(ListTasksRequest())).total_size == 0
    async with httpx.AsyncClient(base_url=agent.url) as http:
        card = (await http.get("/.well-known/agent-card.json")).json()
    named = [each["uri"] for each in card["capabilities"]["extensions"] if each["uri"].startswith(EXTENSION)]
    assert named == [f"{EXTENSION}:{mode}" for mode in (PIECES, BOTH, WHOLE)]


@pytest.mark.app_server_only(reason="codex exec tells a text when it is whole")
async def test_every_reader_of_a_task_gets_the_rest_in_its_own_way(client: Peer) -> None:
    sent = request(script({"chunks": 60, "delay_ms": 30, "phase": "final_answer"}))
    readers: dict[str, list[StreamResponse]] = {PIECES: [], WHOLE: []}

    async def read(mode: str) -> None:
        again = SendMessageRequest()
        again.CopyFrom(sent)
        parameters = ServiceParametersFactory.create([with_a2a_extensions([f"{EXTENSION}:{mode}"])])
        # The same message again joins its task.
        async for event in client.streaming.send_message(
            again, context=ClientCallContext(service_parameters=parameters)
        ):
            readers[mode].append(event)

    async with anyio.create_task_group() as tasks:
        async for event in client.streaming.send_message(sent):
            if event.artifact_update.artifact.artifact_id == "answer" and not readers[PIECES]:
                tasks.start_soon(read, PIECES)
                tasks.start_soon(read, WHOLE)
                readers[PIECES] = [StreamResponse()]
    whole = numbered_text(600)
    pieces, snapshot = readers[PIECES][2:], readers[PIECES][1].task.artifacts[-1].parts[0].text
    assert snapshot + "".join(part.text for each in pieces for part in each.artifact_update.artifact.parts) == whole
    assert 0 < len(snapshot) < len(whole)
    assert not readers[WHOLE][0].task.artifacts
    (only,) = [each.artifact_update for each in readers[WHOLE] if each.HasField("artifact_update")]
    assert ([part.text for part in only.artifact.parts], only.append, only.last_chunk) == ([whole], False, True)


@pytest.mark.versions
async def test_the_answer_is_the_last_artifact_and_a_remark_is_none(client: Peer, agent: AgentProcess) -> None:
    text = script({"say": "I look first.", "run": "true"}, {"patch": ADDED}, {"say": TEXT})
    seen = await stream(agent.url, text, {"User-Agent": "curl/8.5.0"})
    names = list(dict.fromkeys(each["artifact"]["artifactId"] for each in seen.updates))
    assert names == ["patch-1", "answer"]
    assert seen.printed == TEXT
    (listed,) = (await client.blocking.list_tasks(ListTasksRequest(include_artifacts=True))).tasks
    got = await client.blocking.get_task(GetTaskRequest(id=listed.id))
    sent = request(text.replace("made", "done"))
    (blocking,) = [each.task async for each in client.blocking.send_message(sent)]
    for task in (listed, got, blocking):
        assert [each.artifact_id for each in task.artifacts] == ["patch-1", "answer"]
        assert [part.text for part in task.artifacts[-1].parts] == [TEXT]


@pytest.mark.app_server_only(reason="codex exec tells a text when it is whole")
async def test_a_long_text_before_a_tool_is_replaced_and_a_snapshot_has_the_answer_last(client: Peer) -> None:
    seen = await client.ask(script({"say": "Long. " * 50, "patch": ADDED}, {"say": TEXT}))
    assert (seen.answer, list(seen.artifacts)) == (TEXT, ["answer", "patch-1"])
    task = await client.blocking.get_task(GetTaskRequest(id=seen.task_id))
    assert [each.artifact_id for each in task.artifacts] == ["patch-1", "answer"]


@pytest.mark.app_server_only(reason="codex exec asks nothing")
async def test_a_question_splits_no_answer(setup: AgentSetup) -> None:
    asking = replace(setup, codex={"approval_policy": "untrusted"})
    async with running_agent(asking) as agent, peer(agent.url) as client:
        asked = await client.ask(script({"say": "I must ask.", "run": "touch x"}, {"say": TEXT}))
        assert (asked.artifacts, asked.kinds()[0]) == ({}, "commentary")
        seen = await client.answer(asked, Part(text="yes"), streaming=True)
        assert (seen.answer, seen.final_chunks) == (TEXT, 1)
