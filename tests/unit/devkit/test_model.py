"""The scripted model: its scripts as values, its server over plain HTTP, and the real codex in front of it."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from codex_cli_bin import bundled_codex_path  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.errors import ConfigError
from codex_workspace.devkit.model import ScriptedModel, main, scripted_model
from codex_workspace.devkit.model_requests import (
    Call,
    InputItem,
    Message,
    OfferedTool,
    Output,
    Request,
    Thought,
    choose_step,
    read_request,
)
from codex_workspace.devkit.responses_api import Break, Pause, answer, answer_text, tool_calls
from codex_workspace.devkit.script import (
    ConnectionCut,
    HttpFault,
    Json,
    ModelToolCall,
    ScriptError,
    Stall,
    Step,
    numbered_text,
    read_scenario,
    read_steps,
)

EXEC_COMMAND = OfferedTool("function", "exec_command", None, frozenset({"cmd", "sandbox_permissions", "justification"}))

# --- Scripts ---


def asking(script: Json | str, *after: InputItem, tools: tuple[OfferedTool, ...] = (EXEC_COMMAND,)) -> Request:
    """A request whose last user message holds `script` (as it is, where it is a text), with `after` behind it."""
    text = script if isinstance(script, str) else f"please @script {json.dumps(script)}"
    return Request("/v1/responses", None, 0.0, "scripted", "thread-1", (Message("user", text), *after), tools)


def events_of(stream: bytes | bytearray) -> list[dict[str, Json]]:
    """The data of the events of an SSE stream, in order."""
    return [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: ")]


def answered(request: Request) -> tuple[list[dict[str, Json]], list[Pause | Break]]:
    """The events of the answer to `request`, and what else is in the stream."""
    pieces = list(answer(choose_step(request), request))
    return events_of(b"".join(p for p in pieces if isinstance(p, bytes))), [
        p for p in pieces if not isinstance(p, bytes)
    ]


def deltas_of(events: list[dict[str, Json]]) -> list[str]:
    return [str(event["delta"]) for event in events if event["type"] == "response.output_text.delta"]


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_numbered_text_has_its_length_and_begins_like_a_longer_one(shorter: int, more: int) -> None:
    text = numbered_text(shorter)
    assert len(text) == shorter
    assert numbered_text(shorter + more).startswith(text)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("hello", "step 1: must be an object"),
        ([{"say": "a"}, {"sya": "b"}], "step 2: unknown key `sya`; known are say, chunks"),
        ({"say": 5}, "`say` must be a text, not 5"),
        ({"chunks": 0}, "`chunks` must be a whole number of at least 1, not 0"),
        ({"chunks": True}, "`chunks` must be a whole number"),
        ({"delay_ms": -1}, "`delay_ms` must be a number that is not negative"),
        ({"phase": "final"}, "`phase` must be commentary or final_answer"),
        ({"run": [1]}, "`run` must be a text or a list of texts"),
        ({"tool": {"arguments": {}}}, "`tool`: `name` must be the function's name"),
        ({"tool": {"name": "f", "args": {}}}, "`tool`: unknown key `args`"),
        ({"plan": [{"step": "x", "status": "maybe"}]}, "`plan` must be"),
        ({"fail": 200}, "`fail` must be an HTTP status from 400 to 599"),
        ({"fail": 401, "cut": True}, "`fail` and `cut` are both faults"),
        ({"stall": "body"}, "`stall` must be true or headers"),
        ({"say": "a", "repeat": True}, "`say` and `repeat` both give the text"),
        ({"say": "a", "chunks": 2, "chunk_chars": 3}, "`chunks` and `chunk_chars` cannot both cut `say`"),
        ({"say": "a", "times": 2}, "`times` says nothing without `fail, cut or stall`"),
        ({"say": "a", "escalate": True}, "`escalate` says nothing without `run`"),
        ({"usage": {"tokens": 3}}, "`usage`: unknown key `tokens`"),
    ],
)
def test_an_error_in_a_script_is_reported(script: Json, sentence: str) -> None:
    with pytest.raises(ScriptError) as caught:
        read_steps(script)
    assert sentence in str(caught.value)


def test_a_script_is_one_step_or_several() -> None:
    assert read_steps({"say": "a", "run": "ls"}) == (Step(say="a", run=("ls",)),)
    assert read_steps([{"say": "a"}, {"stall": "headers"}]) == (Step(say="a"), Step(fault=Stall(before_head=True)))
    assert read_steps({"tool": {"name": "f", "arguments": {"x": 1}}})[0].tools == (ModelToolCall("f", None, {"x": 1}),)


def test_the_last_script_within_a_text_counts() -> None:
    request = asking('earlier: @script {"say": "old"} now: @script {"say": "new"} thank you')
    assert choose_step(request).step == Step(say="new")


THREE_STEPS: Json = [{"reason": "hm", "say": "a", "run": ["x", "y"]}, {"run": "z"}, {"say": "c"}]
FIRST_CALL: tuple[InputItem, ...] = (
    Thought(),
    Message("assistant", "a"),
    Call("1", "exec_command", "{}"),
    Call("2", "exec_command", "{}"),
    Output("1", ""),
    Output("2", ""),
)
SECOND_CALL: tuple[InputItem, ...] = (Call("3", "exec_command", "{}"), Output("3", ""))


@pytest.mark.parametrize(
    ("after", "number"),
    [
        ((), 0),
        (FIRST_CALL, 1),
        ((*FIRST_CALL, *SECOND_CALL), 2),
        ((*FIRST_CALL, *SECOND_CALL, Message("assistant", "c")), 3),
        ((Message("assistant", "said, and to go on"), Message("assistant", "again")), 2),
        ((Message("developer", "not the model's"),), 0),
    ],
)
def test_the_step_is_the_one_behind_the_models_calls_so_far(after: tuple[InputItem, ...], number: int) -> None:
    chosen = choose_step(asking(THREE_STEPS, *after))
    assert chosen.number == number
    assert chosen.step == (*read_steps(THREE_STEPS), Step(say="done."))[number]


def test_only_what_follows_the_last_user_message_counts() -> None:
    request = asking("first", *FIRST_CALL, Message("user", "hello"))
    assert choose_step(request).step == Step(say="You said: hello")


def test_a_scenario_answers_by_its_first_match(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("- {match: 'weather|rain', steps: {say: sunny}}\n- match: .\n  steps: [{run: ls}, {say: other}]\n")
    scenes = read_scenario(file)
    assert choose_step(asking("will it rain?"), scenes).step == Step(say="sunny")
    assert choose_step(asking("list", *SECOND_CALL), scenes).step == Step(say="other")
    assert choose_step(asking({"say": "own"}), scenes).step == Step(say="own")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("match: x", "must be a list of"),
        ("- {match: x}", "entry 1: must be an object of exactly"),
        ("- {match: '(', steps: []}", "entry 1: `match` is no regular expression"),
        ("- {match: x, steps: {sya: 1}}", "entry 1: script, step 1: unknown key `sya`"),
        ("- {", "scenario"),
    ],
)
def test_an_error_in_a_scenario_is_reported(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_scenario(file)
    assert str(file) in str(caught.value)
    assert sentence in str(caught.value)


# --- Requests ---


def test_a_request_is_read_without_codexs_additions() -> None:
    body: Json = {
        "model": "m",
        "prompt_cache_key": "thread-7",
        "tools": [
            {"type": "function", "name": "shell", "parameters": {"properties": {"command": {}}}},
            {"type": "namespace", "name": "mcp__srv", "tools": [{"type": "function", "name": "echo"}]},
            {"type": "web_search"},
        ],
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>x"}]},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "look"},
                    {"type": "input_text", "text": "<image name=a>"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
                    {"type": "input_text", "text": "</image>"},
                ],
            },
            {"type": "function_call", "call_id": "c", "name": "echo", "namespace": "mcp__srv", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "out"}]},
        ],
    }
    request = read_request("/v1/responses", {"authorization": "Bearer k"}, json.dumps(body).encode())
    assert (request.model, request.conversation, request.authorization) == ("m", "thread-7", "Bearer k")
    assert request.last_user_message == Message("user", "look", ("data:image/png;base64,AA==",))
    assert request.input[2:] == (Call("c", "echo", "{}", "mcp__srv"), Output("c", "out"))
    assert request.tools == (
        OfferedTool("function", "shell", None, frozenset({"command"})),
        OfferedTool("function", "echo", "mcp__srv"),
        OfferedTool("web_search", "web_search"),
    )


# --- Tool calls ---


@pytest.mark.parametrize(
    ("tool", "wanted"),
    [
        (EXEC_COMMAND, {"name": "exec_command", "arguments": '{"yield_time_ms": 9, "cmd": "ls"}'}),
        (
            OfferedTool("function", "shell_command"),
            {"name": "shell_command", "arguments": '{"timeout_ms": 9, "command": "ls"}'},
        ),
        (
            OfferedTool("function", "shell"),
            {"name": "shell", "arguments": '{"timeout_ms": 9, "command": ["bash", "-lc", "ls"]}'},
        ),
        (
            OfferedTool("local_shell", "local_shell"),
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["bash", "-lc", "ls"], "env": {}}},
        ),
    ],
)
def test_a_command_uses_the_offered_tool(tool: OfferedTool, wanted: dict[str, Json]) -> None:
    (item,) = tool_calls(Step(run=("ls",), yield_ms=9), (tool,))
    assert wanted.items() <= item.items()


def test_escalation_uses_the_tools_own_arguments() -> None:
    old = OfferedTool("function", "shell", None, frozenset({"command", "with_escalated_permissions"}))
    (new_item, old_item) = (tool_calls(Step(run=("ls",), escalate=True), (tool,))[0] for tool in (EXEC_COMMAND, old))
    assert '"sandbox_permissions": "require_escalated"' in str(new_item["arguments"])
    assert '"with_escalated_permissions": true' in str(old_item["arguments"])


def test_a_patch_uses_its_own_tool_or_the_shell() -> None:
    step = Step(patch="*** Begin Patch\n*** End Patch")
    (custom,) = tool_calls(step, (EXEC_COMMAND, OfferedTool("custom", "apply_patch")))
    (function,) = tool_calls(step, (OfferedTool("function", "apply_patch"),))
    (shell,) = tool_calls(step, (EXEC_COMMAND,))
    assert (custom["type"], custom["input"]) == ("custom_tool_call", step.patch)
    assert json.loads(str(function["arguments"])) == {"input": step.patch}
    assert json.loads(str(shell["arguments"]))["cmd"].startswith("apply_patch <<'")


@pytest.mark.parametrize(
    ("offered", "named"),
    [
        (OfferedTool("function", "mcp__srv__echo"), ("mcp__srv__echo", None)),
        (OfferedTool("function", "echo", "mcp__srv__"), ("echo", "mcp__srv__")),
        (OfferedTool("function", "echo", "mcp__srv"), ("echo", "mcp__srv")),
        (EXEC_COMMAND, ("echo", "mcp__srv")),
    ],
)
def test_an_mcp_tool_is_called_by_the_name_that_codex_gave_it(
    offered: OfferedTool, named: tuple[str, str | None]
) -> None:
    (item,) = tool_calls(Step(tools=(ModelToolCall("echo", "mcp__srv", {}),)), (offered,))
    assert (item["name"], item.get("namespace")) == named


def test_a_step_without_a_tool_is_rejected() -> None:
    for step in (Step(run=("ls",)), Step(patch="p"), read_steps({"plan": ["think"]})[0]):
        with pytest.raises(ScriptError, match="codex offers view_image"):
            tool_calls(step, (OfferedTool("function", "view_image"),))


def test_a_plan_is_made_if_codex_offers_the_tool() -> None:
    step = read_steps({"plan": ["a", {"step": "b", "status": "completed"}]})[0]
    (item,) = tool_calls(step, (OfferedTool("function", "update_plan"),))
    statuses = [{"step": "a", "status": "pending"}, {"step": "b", "status": "completed"}]
    assert json.loads(str(item["arguments"])) == {"plan": statuses}


# --- The stream ---


@given(
    say=st.text(min_size=1, max_size=60),
    chunks=st.none() | st.integers(1, 70),
    chunk_chars=st.none() | st.integers(1, 70),
)
def test_any_chunking_yields_the_same_text(say: str, chunks: int | None, chunk_chars: int | None) -> None:
    request = asking({"say": say, "chunks": chunks, "chunk_chars": None if chunks else chunk_chars})
    events, _ = answered(request)
    assert "".join(deltas_of(events)) == answer_text(choose_step(request).step, request) == say
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_chunks_without_text_are_numbered() -> None:
    assert deltas_of(answered(asking({"chunks": 3}))[0]) == ["no 000000.", "no 000001.", "no 000002."]
    assert "".join(deltas_of(answered(asking({"chunks": 40, "chunk_chars": 7}))[0])) == numbered_text(280)
    assert "".join(deltas_of(answered(asking({"megabytes": 0.1}))[0])) == numbered_text(100_000)


def test_the_events_come_in_the_apis_order() -> None:
    events, _ = answered(asking({"reason": "hm", "say": "hi", "run": "ls", "phase": "commentary"}))
    assert [str(event["type"]).removeprefix("response.") for event in events] == [
        "created",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_item.done",
        "output_item.added",
        "output_item.done",
        "completed",
    ]


def test_delays_stand_before_every_delta() -> None:
    assert answered(asking({"chunks": 3, "delay_ms": 20}))[1] == [Pause(0.02)] * 3
    assert answered(asking({"run": "ls", "delay_ms": 20}))[1] == [Pause(0.02)]


def test_faults_end_the_stream() -> None:
    events, rest = answered(asking({"chunks": 10, "cut": True}))
    assert (len(deltas_of(events)), rest) == (5, [Break.CUT])
    events, rest = answered(asking({"say": "so far", "stall": True}))
    assert (deltas_of(events), rest) == (["so ", "far"], [Break.STALL])
    events, rest = answered(asking({"fail": "server_is_overloaded"}))
    assert (events[-1]["type"], rest) == ("response.failed", [])


def test_repeat_returns_the_conversation_so_far() -> None:
    request = asking("hello", Message("assistant", "hi there"), Message("user", '@script {"repeat": true}'))
    text = "".join(deltas_of(answered(request)[0]))
    assert text.splitlines()[:2] == ["user: hello", "assistant: hi there"]


def test_relay_returns_the_last_tool_result() -> None:
    steps: list[Json] = [{"run": "one"}, {"run": "two"}, {"relay": True}]
    after = (
        Call("1", "exec_command", "{}"),
        Output("1", "first"),
        Call("2", "exec_command", "{}"),
        Output("2", "second one"),
    )
    assert "".join(deltas_of(answered(asking(steps, *after))[0])) == "second one"
    assert "".join(deltas_of(answered(asking({"relay": True}))[0])) == ""


# --- The server, over plain HTTP ---


def body_of(text: str, conversation: str = "thread-1") -> dict[str, Json]:
    """A small request of the Responses API with one user message."""
    part: Json = {"type": "input_text", "text": text}
    return {
        "model": "m",
        "stream": True,
        "prompt_cache_key": conversation,
        "input": [{"type": "message", "role": "user", "content": [part]}],
    }


@asynccontextmanager
async def served(scenario: Path | None = None) -> AsyncIterator[tuple[ScriptedModel, httpx.AsyncClient]]:
    async with (
        asyncio.timeout(10),
        scripted_model(scenario=scenario) as model,
        httpx.AsyncClient(base_url=model.base_url, trust_env=False) as client,
    ):
        yield model, client


async def test_a_message_is_answered_and_logged() -> None:
    async with served() as (model, client):
        for text in ("hello", "again"):
            response = await client.post("/responses", json=body_of(text), headers={"authorization": "Bearer key"})
            assert response.headers["content-type"] == "text/event-stream"
            assert "".join(deltas_of(events_of(response.content))) == f"You said: {text}"
    assert [(r.path, r.authorization, r.input) for r in model.requests] == [
        ("/v1/responses", "Bearer key", (Message("user", text),)) for text in ("hello", "again")
    ]


async def test_models_are_listed_and_other_paths_are_not_found() -> None:
    async with served() as (_, client):
        assert (await client.get("/models")).json()["data"][0]["id"] == "scripted"
        missing = await client.get("/files")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"] == "the scripted model has no GET /v1/files"


@pytest.mark.parametrize("content", [b"no json", b"[]", b'{"model": "m"}', json.dumps(body_of("@script {")).encode()])
async def test_an_unreadable_body_is_a_bad_request(content: bytes) -> None:
    async with served() as (_, client):
        response = await client.post("/responses", content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_script")


async def test_a_failure_repeats_as_configured_per_conversation() -> None:
    text = '@script {"fail": 429, "code": "rate_limit_exceeded", "times": 2, "say": "at last"}'
    async with served() as (_, client):
        for conversation in ("a", "b"):
            answers = [await client.post("/responses", json=body_of(text, conversation)) for _ in range(3)]
            assert [answer.status_code for answer in answers] == [429, 429, 200]
            assert answers[0].json()["error"]["code"] == "rate_limit_exceeded"


async def test_an_outage_fails_every_call_and_ends() -> None:
    async with served() as (model, client):
        text = '@script {"fail": 429, "times": 1, "say": "hello"}'
        with model.failing(HttpFault(500, None, "down", None)):
            assert [(await client.post("/responses", json=body_of(text))).status_code for _ in range(2)] == [500, 500]
            with model.failing(ConnectionCut()), pytest.raises(httpx.RemoteProtocolError):
                await client.post("/responses", json=body_of(text))
            assert (await client.post("/responses", json=body_of(text))).status_code == 500
        # The script's own fault is still to come.
        assert [(await client.post("/responses", json=body_of(text))).status_code for _ in range(2)] == [429, 200]


async def test_a_failure_may_have_its_own_body() -> None:
    async with served() as (_, client):
        response = await client.post("/responses", json=body_of('@script {"fail": 529, "body": {"detail": "later"}}'))
        assert (response.status_code, response.json()) == (529, {"detail": "later"})


async def test_a_cut_loses_the_connection_behind_some_text() -> None:
    received = bytearray()
    async with served() as (_, client):
        with pytest.raises(httpx.RemoteProtocolError):
            await _post_into(received, client, body_of('@script {"chunks": 10, "cut": true}'))
    assert len(deltas_of(events_of(received))) == 5


async def _post_into(received: bytearray, client: httpx.AsyncClient, body: dict[str, Json]) -> None:
    async with client.stream("POST", "/responses", json=body) as stream:
        async for data in stream.aiter_bytes():
            received += data


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what has no event of its own, such as a log that a server writes."""
    while not condition():
        await asyncio.sleep(0.01)


async def test_leaving_ends_open_streams_and_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    scripts = ('{"stall": true}', '{"stall": "headers"}', '{"chunks": 9, "delay_ms": 60000}')
    async with asyncio.timeout(10), httpx.AsyncClient(trust_env=False) as client:
        async with asyncio.TaskGroup() as posts, scripted_model() as model:
            for script in scripts:
                posts.create_task(_post_and_break(client, f"{model.base_url}/responses", body_of(f"@script {script}")))
            await until(lambda: len(model.requests) == len(scripts))
        assert asyncio.all_tasks() == before
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{model.base_url}/models")


async def _post_and_break(client: httpx.AsyncClient, url: str, body: dict[str, Json]) -> None:
    with pytest.raises(httpx.TransportError):
        await client.post(url, json=body, timeout=None)


async def test_a_stall_ends_when_the_client_leaves() -> None:
    before = asyncio.all_tasks()
    async with served() as (_, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/responses", json=body_of('@script {"stall": true}'), timeout=0.1)
        await until(lambda: asyncio.all_tasks() == before)


@pytest.mark.alone
async def test_fifty_thousand_deltas_cost_little() -> None:
    async with served() as (model, _):
        port = httpx.URL(model.base_url).port
        content = json.dumps(body_of('@script {"chunks": 50000}')).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        started = time.process_time()
        writer.write(b"POST /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(content), content))
        received = await reader.read()
        spent_s = time.process_time() - started
        writer.close()
        await writer.wait_closed()
    assert received.count(b'"delta":"no ') == 50_000
    assert spent_s < 1.5


# --- The command line ---


async def test_the_command_prints_its_url_and_stops_on_sigterm(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("- {match: ., steps: {say: from the file}}")
    module = ("-m", "codex_workspace.devkit.model", "--scenario", str(scenario))
    process = await asyncio.create_subprocess_exec(sys.executable, *module, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(10):
        base_url = (await process.stdout.readline()).decode().strip()
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
            response = await client.post("/responses", json=body_of("hello"))
        assert "".join(deltas_of(events_of(response.content))) == "from the file"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


def test_the_command_refuses_a_wrong_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scenario", str(tmp_path / "missing.yaml")]) == 2
    assert "missing.yaml" in capsys.readouterr().err


# --- The real codex in front of it ---


@dataclass(slots=True)
class Turn:
    """What a turn of codex gave: its end, its deltas joined, completed items by type, what codex asked meanwhile."""

    status: str = ""
    error: str = ""
    streamed: str = ""
    deltas: int = 0
    items: dict[str, list[dict[str, Json]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    @property
    def answer(self) -> str:
        return str(self.items["agentMessage"][-1]["text"])


@dataclass(slots=True)
class Codex:
    """A bare client of `codex app-server`: one request at a time, every question of codex accepted."""

    process: asyncio.subprocess.Process
    thread: str = ""
    requests: int = 0

    async def send(self, message: dict[str, Json]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        await self.process.stdin.drain()

    async def receive(self) -> dict[str, Json]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "codex ended"
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    async def call(self, method: str, params: dict[str, Json]) -> dict[str, Json]:
        self.requests += 1
        await self.send({"id": self.requests, "method": method, "params": params})
        while True:
            message = await self.receive()
            if message.get("id") == self.requests and "method" not in message:
                assert "result" in message, message
                result = message["result"]
                assert isinstance(result, dict)
                return result

    async def turn(self, text: str) -> Turn:
        """Run one turn to its end."""
        self.requests += 1
        said: Json = [{"type": "text", "text": text}]
        params: dict[str, Json] = {"threadId": self.thread, "input": said}
        await self.send({"id": self.requests, "method": "turn/start", "params": params})
        turn = Turn()
        while not turn.status:
            match await self.receive():
                case {"id": question, "method": str(method)}:
                    turn.asked.append(method)
                    await self.send({"id": question, "result": {"decision": "accept"}})
                case {"method": str(method), "params": dict(told)}:
                    note(turn, method, told)
                case _:
                    pass
        return turn


def note(turn: Turn, method: str, told: dict[str, Json]) -> None:
    match method, told:
        case "item/agentMessage/delta", {"delta": str(delta)}:
            turn.streamed += delta
            turn.deltas += 1
        case "item/completed", {"item": dict(item)}:
            turn.items.setdefault(str(item["type"]), []).append(item)
        case "turn/completed", {"turn": {"status": str(status), "error": error}}:
            turn.status = status
            turn.error = json.dumps(error)
        case _:
            pass


SWITCHED_OFF = ("plugins", "apps", "goals", "multi_agent", "unbounded_connection_retries")
"""Features of codex that would look up hosts, start turns of their own, or retry for ever."""


@asynccontextmanager
async def codex_with(
    model: ScriptedModel, folder: Path, *, approvals: str = "never", name: str = "scripted"
) -> AsyncIterator[Codex]:
    """The real codex with a fresh home in `folder`, a thread open in `folder / "work"`, and `model` as its provider."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    provider = (
        f'{{name="scripted",base_url="{model.base_url}",wire_api="responses",env_key="SCRIPTED_KEY",'
        "request_max_retries=0,stream_max_retries=0,stream_idle_timeout_ms=500}"
    )
    settings = [f"features.{feature}=false" for feature in SWITCHED_OFF]
    settings += ["analytics.enabled=false", "check_for_update_on_startup=false", 'web_search="disabled"']
    settings += ['model_provider="scripted"', f"model_providers.scripted={provider}", f'model="{name}"']
    options = [part for setting in settings for part in ("-c", setting)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "CODEX_HOME": str(home), "SCRIPTED_KEY": "key-1"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        str(bundled_codex_path()), "app-server", *options, stdin=pipe, stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL, env=environment, limit=1 << 26,
    )  # fmt: skip
    codex = Codex(process)
    try:
        await codex.call("initialize", {"clientInfo": {"name": "test", "version": "0"}})
        await codex.send({"method": "initialized"})
        params: dict[str, Json] = {"cwd": str(work), "sandbox": "workspace-write", "approvalPolicy": approvals}
        thread = (await codex.call("thread/start", params))["thread"]
        assert isinstance(thread, dict)
        codex.thread = str(thread["id"])
        yield codex
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.communicate()


@asynccontextmanager
async def codex_alone(folder: Path, *, approvals: str = "never", name: str = "scripted") -> AsyncIterator[Codex]:
    """As `codex_with`, with a scripted model of its own, and 30 s for all of it."""
    async with (
        asyncio.timeout(30),
        scripted_model() as model,
        codex_with(model, folder, approvals=approvals, name=name) as codex,
    ):
        yield codex


async def test_codex_streams_text_completely_and_remembers(tmp_path: Path) -> None:
    async with asyncio.timeout(30), scripted_model() as model, codex_with(model, tmp_path) as codex:
        plain = await codex.turn("hello there")
        assert (plain.status, plain.streamed, plain.answer) == ("completed", *["You said: hello there"] * 2)
        chunked = await codex.turn('@script {"chunks": 500, "reason": ["one", "two"], "phase": "final_answer"}')
        assert (chunked.deltas, chunked.streamed, chunked.answer) == (500, *[numbered_text(5000)] * 2)
        assert chunked.items["reasoning"][0]["summary"] == ["one", "two"]
        assert chunked.items["agentMessage"][0]["phase"] == "final_answer"
        repeated = await codex.turn('@script {"repeat": true}')
        assert repeated.answer.splitlines()[:2] == ["user: hello there", "assistant: You said: hello there"]
        large = await codex.turn('@script {"megabytes": 1}')
        assert large.streamed == large.answer == numbered_text(1_000_000)
        assert {request.authorization for request in model.requests} == {"Bearer key-1"}
        assert {request.conversation for request in model.requests} == {codex.thread}


async def test_codex_runs_commands_and_all_steps(tmp_path: Path) -> None:
    script: Json = [
        {"say": "first", "run": ["echo one > made.txt", "echo two"]},
        {"run": "cat made.txt; exit 3"},
        {"say": "no tool, but more to come"},
        {"say": "last"},
    ]
    async with codex_alone(tmp_path) as codex:
        turn = await codex.turn(f"@script {json.dumps(script)}")
    assert turn.status == "completed"
    assert [message["text"] for message in turn.items["agentMessage"]] == ["first", "no tool, but more to come", "last"]
    outputs = [(str(item["aggregatedOutput"]), item["exitCode"]) for item in turn.items["commandExecution"]]
    assert len(outputs) == 3
    assert any(output.endswith("two\n") and code == 0 for output, code in outputs)
    assert outputs[-1][0].endswith("one\n")
    assert outputs[-1][1] == 3


@pytest.mark.parametrize("name", ["scripted", "gpt-5.5"])
async def test_codex_applies_patches(tmp_path: Path, name: str) -> None:
    """Codex offers `apply_patch` for models that it knows to speak it, and takes it from the shell for others."""
    script: Json = {"patch": "*** Begin Patch\n*** Add File: note.txt\n+hello\n*** End Patch"}
    async with codex_alone(tmp_path, name=name) as codex:
        turn = await codex.turn(f"@script {json.dumps(script)}")
    assert (turn.status, turn.answer) == ("completed", "done.")
    assert turn.items["fileChange"][0]["status"] == "completed"
    assert (tmp_path / "work" / "note.txt").read_text() == "hello\n"


async def test_codex_asks_before_it_leaves_the_sandbox(tmp_path: Path) -> None:
    async with codex_alone(tmp_path, approvals="on-request") as codex:
        turn = await codex.turn('@script {"run": "echo outside", "escalate": true}')
    assert turn.asked == ["item/commandExecution/requestApproval"]
    assert str(turn.items["commandExecution"][0]["aggregatedOutput"]).endswith("outside\n")


async def test_codex_sees_every_fault_as_an_error(tmp_path: Path) -> None:
    faults = {
        '{"fail": 401, "message": "bad key"}': "bad key",
        '{"fail": 500}': "internalServerError",
        '{"fail": "context_length_exceeded"}': "contextWindowExceeded",
        '{"chunks": 10, "cut": true}': "stream disconnected before completion",
        '{"say": "so far", "stall": true}': "idle timeout",
        '{"sya": 1}': "unknown key `sya`",
        '{"plan": ["a"]}': "`plan` needs the tool update_plan",
    }
    async with codex_alone(tmp_path) as codex:
        for script, sentence in faults.items():
            turn = await codex.turn(f"@script {script}")
            assert (script, turn.status) == (script, "failed")
            assert sentence in turn.error
        assert (await codex.turn("still there?")).answer == "You said: still there?"


async def test_codex_reports_the_usage_of_the_script(tmp_path: Path) -> None:
    usage: Json = {"input_tokens": 70, "cached_tokens": 20, "output_tokens": 9, "reasoning_tokens": 4}
    async with codex_alone(tmp_path) as codex:
        await codex.send({"id": "t", "method": "turn/start", "params": {
            "threadId": codex.thread, "input": [{"type": "text", "text": f'@script {{"usage": {json.dumps(usage)}}}'}],
        }})  # fmt: skip
        while (told := await codex.receive()).get("method") != "thread/tokenUsage/updated":
            pass
    match told:
        case {"params": {"tokenUsage": {"last": dict(last)}}}:
            counts = ("inputTokens", "cachedInputTokens", "outputTokens", "reasoningOutputTokens", "totalTokens")
            assert [last[key] for key in counts] == [70, 20, 9, 4, 79]
        case _:
            pytest.fail(f"no usage in {told}")
