"""The scripted model: a loopback server that speaks OpenAI's Responses API and says what a script tells it to.

It is all that demo, end-to-end tests and benchmark fake about codex, which talks to it as to any custom provider:

    [model_providers.scripted]
    name = "scripted"
    base_url = "http://127.0.0.1:PORT/v1"     # ScriptedModel.base_url
    wire_api = "responses"
    env_key = "SCRIPTED_KEY"                  # any value is accepted, and logged

A script is one step or a list of steps; a step is one model call of a turn (codex calls again after a tool call). It
stands in the last user message, as JSON behind the marker `@script `, or in a scenario file, a YAML list of
`{match: <regular expression on the last user message>, steps: <step or list>}` whose first match wins. Behind the last
step the model says "done."; a message without a script is answered "You said: …". A script with a mistake is answered
HTTP 400 with a sentence that names the key.

| key of a step | what the model does |
|---|---|
| `say: text` | says this word by word; with `chunks: N` in N deltas, with `chunk_chars: n` in deltas of n characters |
| `chunks: N` (no `say`) | N deltas of `chunk_chars` (10) characters: `numbered_text(N * chunk_chars)` |
| `megabytes: x` | says `numbered_text(round(x * 1_000_000))` |
| `repeat: true` | says all that user and assistant said so far, one `role: text` per message |
| `relay: true` | says what the last tool call gave |
| `delay_ms: n` | waits n ms before every delta, the first one included |
| `phase: commentary` or `final_answer` | marks the message so |
| `reason: text or [texts]` | thinks first: reasoning summary sections |
| `run: command or [commands]`, `yield_ms: n` | asks for shell commands, through the tool that this codex offers |
| `escalate: true` | asks to run them outside the sandbox |
| `patch: "*** Begin Patch…"` | asks for a patch, through `apply_patch` or, where that is not offered, the shell |
| `tool: {name, namespace, arguments}` or a list | calls any function, such as an MCP server's |
| `search: query` | says that it has searched the web for this, before it says anything |
| `plan: [texts or {step, status}]` | calls `update_plan`, where codex offers it |
| `fail: 401` (a status), `code`, `message`, `body` | HTTP error instead of an answer |
| `fail: rate_limit_exceeded` (a code), `message` | `response.failed` in the stream, behind the text that was given |
| `cut: true` | drops the connection half-way through the text |
| `stall: true` or `headers` | says nothing more behind the text that was given; `headers`: not even a response's head |
| `times: N` | the fault of this step happens to its first N calls in a conversation only |
| `usage: {input_tokens, cached_tokens, output_tokens, reasoning_tokens}` | these instead of counts from sizes |

`ScriptedModel.failing` makes every call end with a fault for a while, whatever the scripts say: an outage.

Text, reasoning and several tool calls may stand in one step. A step without a tool call ends the turn unless steps
follow it: then `end_turn: false` is sent, which makes codex 0.163 call again. A message that is steered into a running
turn is the last user message from then on. After a megabyte, codex compacts the conversation before its next turn
unless `usage` reports few tokens.

Left out of the real API: the events that repeat the whole text (`output_text.done`, `content_part.done`), and `output`
in `response.completed`; codex reads neither.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Never, assert_never

import h11

from codex_workspace.common.errors import ConfigError
from codex_workspace.devkit.model_requests import ChosenStep, Request, choose_step, read_request
from codex_workspace.devkit.responses_api import Break, Pause, Piece, answer
from codex_workspace.devkit.script import Fault, HttpFault, Scene, ScriptError, Stall, read_scenario

LOGGED_REQUESTS = 200
"""How many requests `ScriptedModel.requests` keeps; each holds its whole conversation."""

BLOCK_BYTES = 1 << 16
"""Events with no pause between them are written in blocks of this size: a write per delta costs more than the delta."""

MAX_HEAD_BYTES = 1 << 16
"""h11 allows 16 KiB for a request's head; codex repeats its turn's metadata there, with paths of any length."""


class _ClientLeft(ConnectionError):
    """The client closed its side."""


@dataclass(slots=True)
class _Connection:
    """One client's connection, as HTTP/1.1. Everything here raises `ConnectionError` once the client has left."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection = field(default_factory=lambda: h11.Connection(h11.SERVER, MAX_HEAD_BYTES))

    async def requests(self) -> AsyncIterator[tuple[h11.Request, bytes]]:
        """Every request with its body, each to be answered before the next is taken."""
        while True:
            head: h11.Request | None = None
            body = bytearray()
            while not isinstance(event := await self._next_event(), h11.EndOfMessage):
                match event:
                    case h11.Request():
                        head = event
                    case h11.Data():
                        body += event.data
                    case _:
                        return
            if head is None:
                return
            yield head, bytes(body)
            if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
                return
            self.http.start_next_cycle()

    async def _next_event(self) -> h11.Event:
        while True:
            event = self.http.next_event()
            if isinstance(event, h11.Event):
                return event
            self.http.receive_data(await self.reader.read(BLOCK_BYTES))

    async def send(self, *events: h11.Event) -> None:
        for event in events:
            self.writer.write(self.http.send(event) or b"")
        await self.writer.drain()
        # `drain` returns at once while the client keeps up; the other connections must have their turn all the same.
        await asyncio.sleep(0)

    async def send_json(self, status: int, body: str) -> None:
        data = body.encode(errors="replace")
        headers = [("content-type", "application/json"), ("content-length", str(len(data)))]
        head = h11.Response(status_code=status, headers=headers)
        await self.send(head, h11.Data(data=data), h11.EndOfMessage())

    async def send_events(self, pieces: Iterator[Piece]) -> None:
        """Send a stream of events as the body of one response, coalescing what has no pause between it."""
        headers = [
            ("content-type", "text/event-stream"),
            ("cache-control", "no-cache"),
            ("transfer-encoding", "chunked"),
        ]
        await self.send(h11.Response(status_code=200, headers=headers, reason=b"OK"))
        block = bytearray()
        for piece in pieces:
            if isinstance(piece, bytes):
                block += piece
                if len(block) < BLOCK_BYTES:
                    continue
            if block:
                await self.send(h11.Data(data=bytes(block)))
                block.clear()
            match piece:
                case Pause(seconds):
                    await self._pause(seconds)
                case Break.CUT:
                    self.writer.close()
                    raise _ClientLeft("cut, as the script wants")
                case Break.STALL:
                    await self.stall()
                case bytes():
                    pass
                case _:
                    assert_never(piece)
        await self.send(h11.Data(data=bytes(block)), h11.EndOfMessage())

    async def stall(self) -> Never:
        """Wait until the client leaves, and raise `ConnectionError` then."""
        while data := await self.reader.read(BLOCK_BYTES):
            self.http.receive_data(data)
        raise _ClientLeft

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stall()


def _error_body(message: str, code: str | None, kind: str) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


@dataclass(slots=True)
class ScriptedModel:
    """A running scripted model; made by `scripted_model`.

    `base_url` is what a provider's `base_url` wants. `requests` are the last `LOGGED_REQUESTS` that came, oldest first.
    """

    base_url: str
    requests: deque[Request]
    _model: str
    _scenes: tuple[Scene, ...]
    _fault_counts: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    _outages: list[Fault] = field(default_factory=list)

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Have every model call that comes while the block is open end with `fault`; of several the newest counts."""
        self._outages.append(fault)
        try:
            yield
        finally:
            self._outages.remove(fault)

    async def _answer(self, connection: _Connection, head: h11.Request, body: bytes) -> None:
        path = head.target.decode("ascii").partition("?")[0]
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
        try:
            request = read_request(path, headers, body)
            self.requests.append(request)
            match (head.method, path):
                case (b"POST", "/v1/responses"):
                    await self._respond(connection, request)
                case (b"GET", "/v1/models"):
                    model = {"id": self._model, "object": "model", "created": 0, "owned_by": "codex-workspace"}
                    await connection.send_json(200, json.dumps({"object": "list", "data": [model]}))
                case (method, _):
                    message = f"the scripted model has no {method.decode('ascii')} {path}"
                    await connection.send_json(404, _error_body(message, None, "invalid_request_error"))
        except ScriptError as error:
            await connection.send_json(400, _error_body(str(error), "bad_script", "invalid_request_error"))

    async def _respond(self, connection: _Connection, request: Request) -> None:
        choice = choose_step(request, self._scenes)
        if self._outages:
            choice = replace(choice, step=replace(choice.step, fault=self._outages[-1], times=None))
        faulty = self._is_faulty(choice, request)
        match choice.step.fault:
            case HttpFault(status, code, message, body) if faulty:
                await connection.send_json(status, body or _error_body(message, code, code or "scripted_failure"))
            case Stall(before_head=True) if faulty:
                await connection.stall()
            case _:
                await connection.send_events(answer(choice, request, faulty=faulty))

    def _is_faulty(self, choice: ChosenStep, request: Request) -> bool:
        if choice.step.fault is None or choice.step.times is None:
            return choice.step.fault is not None
        call = (request.conversation, choice.script, choice.number)
        self._fault_counts[call] += 1
        return self._fault_counts[call] <= choice.step.times


@dataclass(slots=True)
class _Connections:
    """The connections that are open, so that leaving can end them and wait for them.

    asyncio starts a task per connection. None is cancelled: each waits only for its own socket, which `end` aborts.
    """

    model: ScriptedModel | None = None
    open: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        model = self.model
        if task is None or model is None:
            writer.transport.abort()
            return
        self.open[task] = writer
        connection = _Connection(reader, writer)
        try:
            with suppress(ConnectionError, h11.RemoteProtocolError):
                async for head, body in connection.requests():
                    await model._answer(connection, head, body)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        finally:
            del self.open[task]

    async def end(self) -> None:
        self.model = None
        for writer in self.open.values():
            writer.transport.abort()
        if self.open:
            await asyncio.wait(self.open)


@asynccontextmanager
async def scripted_model(
    *, host: str = "127.0.0.1", port: int = 0, scenario: Path | None = None, model: str = "scripted"
) -> AsyncIterator[ScriptedModel]:
    """A scripted model that listens while the block runs; port 0 takes a free one. Leaving ends open streams.

    `model` is the one name that `GET /v1/models` lists; requests may name any.

    Raises:
        ConfigError: the scenario file is wrong.
        OSError: the port is taken.
    """
    scenes = read_scenario(scenario) if scenario else ()
    connections = _Connections()
    server = await asyncio.start_server(connections.serve, host, port, start_serving=False)
    bound_port = server.sockets[0].getsockname()[1]
    address = f"[{host}]" if ":" in host else host
    connections.model = ScriptedModel(f"http://{address}:{bound_port}/v1", deque(maxlen=LOGGED_REQUESTS), model, scenes)
    try:
        await server.start_serving()
        yield connections.model
    finally:
        server.close()
        await connections.end()
        await server.wait_closed()


async def _serve_until_told(host: str, port: int, scenario: Path | None) -> None:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with scripted_model(host=host, port=port, scenario=scenario) as model:
        sys.stdout.write(f"{model.base_url}\n")
        sys.stdout.flush()
        await told.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m codex_workspace.devkit.model`: print the base URL as the first line, serve until SIGTERM or SIGINT.

    Returns the exit code: 0 when told to stop, 2 when the scenario or the address is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m codex_workspace.devkit.model", description="A scripted Responses API."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free port")
    parser.add_argument("--scenario", type=Path, help="YAML list of {match, steps}")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(_serve_until_told(options.host, options.port, options.scenario))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
