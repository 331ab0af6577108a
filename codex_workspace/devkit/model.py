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
import re
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import pairwise
from pathlib import Path
from typing import Literal, Never, assert_never
from uuid import uuid4

import h11
import yaml

from codex_workspace.common.errors import ConfigError

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
"""What JSON and YAML decode to."""

MARKER = "@script "
"""Stands in a user message before its script; the last one counts, so that a quoted earlier message does not."""

LOGGED_REQUESTS = 200
"""How many requests `ScriptedModel.requests` keeps; each holds its whole conversation."""

BLOCK_BYTES = 1 << 16
"""Events with no pause between them are written in blocks of this size: a write per delta costs more than the delta."""

MAX_HEAD_BYTES = 1 << 16
"""h11 allows 16 KiB for a request's head; codex repeats its turn's metadata there, with paths of any length."""

WORD_CHARS = 10
MEGABYTE_DELTA_CHARS = 4096
CHARS_PER_TOKEN = 4


def numbered_text(chars: int) -> str:
    """Text of exactly `chars` characters in which a lost, doubled or swapped piece shows: "no 000000.no 000001.…"."""
    words = -(-chars // WORD_CHARS)
    return "".join([f"no {number:06d}." for number in range(words)])[:chars]


# --- Steps: what a script can say ---


class ScriptError(ValueError):
    """A script that cannot be carried out; the text names the step and its key."""


@dataclass(frozen=True, slots=True)
class ModelToolCall:
    """A call of the function `name`; `namespace` is an MCP server's, such as `mcp__srv`."""

    name: str
    namespace: str | None
    arguments: dict[str, Json]


@dataclass(frozen=True, slots=True)
class ModelPlanItem:
    """A line of the plan; `status` is `pending`, `in_progress` or `completed`."""

    step: str
    status: str


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """Token counts; `cached_tokens` are part of the input, `reasoning_tokens` of the output."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HttpFault:
    """Answer with this HTTP status; `body` replaces OpenAI's usual error object."""

    status: int
    code: str | None
    message: str
    body: str | None


@dataclass(frozen=True, slots=True)
class ResponseFailed:
    """End the stream with `response.failed`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ConnectionCut:
    """Drop the connection in the middle of the text."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Fall silent until the client leaves; `before_head`: before anything was sent at all."""

    before_head: bool


Fault = HttpFault | ResponseFailed | ConnectionCut | Stall
Phase = Literal["commentary", "final_answer"]


@dataclass(frozen=True, slots=True)
class Step:
    """One model call; the module's table says what each field does. `say`, `megabytes`, `repeat` or `relay`."""

    say: str | None = None
    chunks: int | None = None
    chunk_chars: int | None = None
    megabytes: float | None = None
    repeat: bool = False
    relay: bool = False
    delay_ms: float = 0
    phase: Phase | None = None
    reason: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    yield_ms: int | None = None
    escalate: bool = False
    patch: str | None = None
    search: str | None = None
    tools: tuple[ModelToolCall, ...] = ()
    plan: tuple[ModelPlanItem, ...] = ()
    fault: Fault | None = None
    times: int | None = None
    usage: ModelUsage | None = None

    @property
    def calls_tools(self) -> bool:
        return bool(self.run or self.patch or self.tools or self.plan)

    @property
    def has_text(self) -> bool:
        return (
            self.say is not None or self.repeat or self.relay or self.megabytes is not None or self.chunks is not None
        )


SAY_DONE = Step(say="done.")

# fmt: off
STEP_KEYS = (
    "say", "chunks", "chunk_chars", "megabytes", "repeat", "relay", "delay_ms", "phase", "reason",
    "run", "yield_ms", "escalate", "patch", "search", "tool", "plan", "fail", "code",
    "message", "body", "cut", "stall", "times", "usage",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class _Fields:
    """The keys of one object of a script, read as the types they must have; `where` begins every error."""

    where: str
    values: dict[str, Json]

    def check_keys(self, known: Sequence[str]) -> None:
        for key in self.values:
            if key not in known:
                raise ScriptError(f"{self.where}: unknown key `{key}`; known are {', '.join(known)}")

    def wrong(self, key: str, wanted: str) -> ScriptError:
        return ScriptError(
            f"{self.where}: `{key}` must be {wanted}, not {json.dumps(self.values.get(key), default=str)}"
        )

    def text(self, key: str) -> str | None:
        match self.values.get(key):
            case None | str() as value:
                return value
            case _:
                raise self.wrong(key, "a text")

    def texts(self, key: str) -> tuple[str, ...]:
        match self.values.get(key):
            case None:
                return ()
            case str(one):
                return (one,)
            case list(several):
                texts = tuple(item for item in several if isinstance(item, str))
                if len(texts) == len(several):
                    return texts
        raise self.wrong(key, "a text or a list of texts")

    def number(self, key: str) -> float | None:
        match self.values.get(key):
            case None:
                return None
            case int() | float() as value if not isinstance(value, bool) and value >= 0:
                return value
            case _:
                raise self.wrong(key, "a number that is not negative")

    def whole(self, key: str, at_least: int = 0) -> int | None:
        match self.values.get(key):
            case None:
                return None
            case int(value) if not isinstance(value, bool) and value >= at_least:
                return value
            case _:
                raise self.wrong(key, f"a whole number of at least {at_least}")

    def flag(self, key: str) -> bool:
        match self.values.get(key):
            case None:
                return False
            case bool(value):
                return value
            case _:
                raise self.wrong(key, "true or false")

    def objects(self, key: str) -> list[Json]:
        match self.values.get(key):
            case None:
                return []
            case list(several):
                return several
            case one:
                return [one]


def read_steps(script: Json) -> tuple[Step, ...]:
    """The steps of a script: one step object, or a list of them.

    Raises:
        ScriptError: it holds something that is no step.
    """
    listed = script if isinstance(script, list) else [script]
    return tuple(_read_step(step, f"script, step {number}") for number, step in enumerate(listed, 1))


def _read_step(value: Json, where: str) -> Step:
    if not isinstance(value, dict):
        raise ScriptError(f"{where}: must be an object with keys such as `say`, not {json.dumps(value, default=str)}")
    fields = _Fields(where, value)
    fields.check_keys(STEP_KEYS)
    step = Step(
        say=fields.text("say"),
        chunks=fields.whole("chunks", 1),
        chunk_chars=fields.whole("chunk_chars", 1),
        megabytes=fields.number("megabytes"),
        repeat=fields.flag("repeat"),
        relay=fields.flag("relay"),
        delay_ms=fields.number("delay_ms") or 0,
        phase=_read_phase(fields),
        reason=fields.texts("reason"),
        run=fields.texts("run"),
        yield_ms=fields.whole("yield_ms"),
        escalate=fields.flag("escalate"),
        patch=fields.text("patch"),
        search=fields.text("search"),
        tools=tuple(_read_tool(item, f"{where}, `tool`") for item in fields.objects("tool")),
        plan=tuple(_read_plan_item(item, fields) for item in fields.objects("plan")),
        fault=_read_fault(fields),
        times=fields.whole("times", 1),
        usage=_read_usage(fields),
    )
    _check_combination(step, fields)
    return step


def _check_combination(step: Step, fields: _Fields) -> None:
    texts = [key for key in ("say", "megabytes", "repeat", "relay") if fields.values.get(key)]
    if len(texts) > 1:
        raise ScriptError(f"{fields.where}: `{texts[0]}` and `{texts[1]}` both give the text; take one")
    if texts and step.chunks and step.chunk_chars:
        raise ScriptError(f"{fields.where}: `chunks` and `chunk_chars` cannot both cut `{texts[0]}`; take one")
    for key, needs, given in (
        ("escalate", "run", step.run),
        ("yield_ms", "run", step.run),
        ("times", "fail, cut or stall", step.fault),
        ("code", "fail", "fail" in fields.values),
        ("message", "fail", "fail" in fields.values),
        ("body", "fail: <status>", isinstance(step.fault, HttpFault)),
    ):
        if key in fields.values and not given:
            raise ScriptError(f"{fields.where}: `{key}` says nothing without `{needs}`")


def _read_phase(fields: _Fields) -> Phase | None:
    match fields.values.get("phase"):
        case None | "commentary" | "final_answer" as phase:
            return phase
        case _:
            raise fields.wrong("phase", "commentary or final_answer")


def _read_tool(value: Json, where: str) -> ModelToolCall:
    if not isinstance(value, dict):
        raise ScriptError(f"{where}: must be an object with `name`, not {json.dumps(value, default=str)}")
    fields = _Fields(where, value)
    fields.check_keys(("name", "namespace", "arguments"))
    name, arguments = fields.text("name"), value.get("arguments", {})
    if not name:
        raise fields.wrong("name", "the function's name")
    if not isinstance(arguments, dict):
        raise fields.wrong("arguments", "an object")
    return ModelToolCall(name, fields.text("namespace"), arguments)


def _read_plan_item(value: Json, fields: _Fields) -> ModelPlanItem:
    match value:
        case str(step):
            return ModelPlanItem(step, "pending")
        case {"step": str(step), "status": "pending" | "in_progress" | "completed" as status}:
            return ModelPlanItem(step, status)
        case _:
            raise fields.wrong("plan", "a list of texts or {step, status: pending, in_progress or completed}")


def _read_usage(fields: _Fields) -> ModelUsage | None:
    match fields.values.get("usage"):
        case None:
            return None
        case dict(values):
            counts = _Fields(f"{fields.where}, `usage`", values)
            counts.check_keys(("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"))
            return ModelUsage(
                input_tokens=counts.whole("input_tokens") or 0,
                output_tokens=counts.whole("output_tokens") or 0,
                cached_tokens=counts.whole("cached_tokens") or 0,
                reasoning_tokens=counts.whole("reasoning_tokens") or 0,
            )
        case _:
            raise fields.wrong("usage", "an object of token counts")


def _read_fault(fields: _Fields) -> Fault | None:
    faults = [key for key in ("fail", "cut", "stall") if fields.values.get(key)]
    match faults:
        case []:
            return None
        case ["fail"]:
            return _read_failure(fields)
        case ["cut"]:
            return ConnectionCut() if fields.flag("cut") else None
        case ["stall"]:
            if fields.values["stall"] not in (True, "headers"):
                raise fields.wrong("stall", "true or headers")
            return Stall(before_head=fields.values["stall"] == "headers")
        case _:
            raise ScriptError(f"{fields.where}: `{faults[0]}` and `{faults[1]}` are both faults; take one")


def _read_failure(fields: _Fields) -> HttpFault | ResponseFailed:
    message = fields.text("message")
    match fields.values["fail"]:
        case int(status) if 400 <= status <= 599:
            body = fields.values.get("body")
            text = body if body is None or isinstance(body, str) else json.dumps(body)
            return HttpFault(status, fields.text("code"), message or f"scripted failure {status}", text)
        case str(code):
            return ResponseFailed(code, message or f"scripted failure {code}")
        case _:
            raise fields.wrong("fail", "an HTTP status from 400 to 599 or an error code")


@dataclass(frozen=True, slots=True)
class Scene:
    """An entry of a scenario file: `steps` answer a message in which `match` is found."""

    match: re.Pattern[str]
    steps: tuple[Step, ...]


def read_scenario(path: Path) -> tuple[Scene, ...]:
    """The scenes of a scenario file, in its order.

    Raises:
        ConfigError: the file cannot be read, or says what no scenario says.
    """
    try:
        return _read_scenes(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"scenario {path}: {error}") from error


def _read_scenes(value: Json) -> tuple[Scene, ...]:
    if not isinstance(value, list):
        raise ScriptError("must be a list of {match, steps}")
    return tuple(_read_scene(scene, f"entry {number}") for number, scene in enumerate(value, 1))


def _read_scene(value: Json, where: str) -> Scene:
    match value:
        case {"match": str(pattern), "steps": steps, **rest} if not rest:
            try:
                return Scene(re.compile(pattern, re.DOTALL), read_steps(steps))
            except re.error as error:
                raise ScriptError(f"{where}: `match` is no regular expression: {error}") from error
            except ScriptError as error:
                raise ScriptError(f"{where}: {error}") from error
        case _:
            raise ScriptError(f"{where}: must be an object of exactly `match` (a regular expression) and `steps`")


# --- Requests: what codex sent ---


@dataclass(frozen=True, slots=True)
class Message:
    """Something said. `text` is without what codex adds to a user's message; `images` are URLs, mostly `data:`."""

    role: str
    text: str
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model made earlier; `arguments` as it was sent: JSON, or a custom tool's plain text."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What the tool call `call_id` gave."""

    call_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning of an earlier model call."""


@dataclass(frozen=True, slots=True)
class Other:
    """An item of a kind that the scripted model has no use for."""

    kind: str


InputItem = Message | Call | Output | Thought | Other


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the request lets the model call. `kind`: `function`, `custom`, `local_shell` or a hosted tool's.

    `live` is said of a search in the web: whether it is today's, and not what is kept of it.
    """

    kind: str
    name: str
    namespace: str | None = None
    properties: frozenset[str] = frozenset()
    live: bool | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What codex sent. `conversation` is codex's thread id, `time` seconds since the epoch, `size` the body's bytes.

    `account` is the subscription's, None where codex goes by an API key.
    `effort` is the reasoning effort, `output_schema` what the answer has to obey; None where codex asked for none.
    """

    path: str
    authorization: str | None
    time: float
    model: str = ""
    conversation: str = ""
    input: tuple[InputItem, ...] = ()
    tools: tuple[OfferedTool, ...] = ()
    size: int = 0
    effort: str | None = None
    output_schema: Json = None
    account: str | None = None

    @property
    def last_user_message(self) -> Message | None:
        return next((item for item in reversed(self.input) if isinstance(item, Message) and item.role == "user"), None)


_ADDED_BY_CODEX = re.compile(
    r"<(environment_context|user_instructions|turn_aborted|user_shell_command|skill|subagent_notification|goal_context)\b.*"
    r"|# AGENTS\.md instructions.*|</?image\b[^>]*>",
    re.DOTALL,
)
"""Text parts that codex sends in the user's role although no user wrote them (0.72 to 0.169)."""


def _read_message(role: str, content: Json) -> InputItem:
    parts = content if isinstance(content, list) else [{"text": content}]
    texts: list[str] = []
    images: list[str] = []
    for part in parts:
        match part:
            case {"text": str(text)} if role != "user" or not _ADDED_BY_CODEX.fullmatch(text.strip()):
                texts.append(text)
            case {"image_url": str(url)}:
                images.append(url)
            case _:
                pass
    return Message(role, "\n".join(texts), tuple(images)) if texts or images else Other("message")


def _part_text(part: Json) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else ""


def _output_text(output: Json) -> str:
    match output:
        case str():
            return output
        case {"content": str(text)}:
            return text
        case list():
            return "\n".join(_part_text(part) for part in output)
        case _:
            return json.dumps(output)


def _read_item(item: Json) -> InputItem:
    match item:
        case {"role": str(role), "content": content}:
            return _read_message(role, content)
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments), **rest}:
            namespace = rest.get("namespace")
            return Call(call_id, name, arguments, namespace if isinstance(namespace, str) else None)
        case {"type": "custom_tool_call", "call_id": str(call_id), "name": str(name), "input": str(text)}:
            return Call(call_id, name, text)
        case {"type": "local_shell_call", "call_id": str(call_id), "action": action}:
            return Call(call_id, "local_shell", json.dumps(action))
        case {"type": "function_call_output" | "custom_tool_call_output", "call_id": str(call_id), "output": output}:
            return Output(call_id, _output_text(output))
        case {"type": "reasoning"}:
            return Thought()
        case {"type": str(kind)}:
            return Other(kind)
        case _:
            return Other("unknown")


def _read_offered(tool: Json, namespace: str | None = None) -> Iterator[OfferedTool]:
    match tool:
        case {"type": "namespace", "name": str(inner), "tools": list(tools)}:
            for nested in tools:
                yield from _read_offered(nested, inner)
        case {"type": str(kind), **rest}:
            name, parameters = rest.get("name", kind), rest.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            known = frozenset(properties if isinstance(properties, dict) else ())
            live = rest.get("external_web_access")
            yield OfferedTool(kind, str(name), namespace, known, live if isinstance(live, bool) else None)
        case _:
            pass


def _effort(reasoning: object) -> str | None:
    match reasoning:
        case {"effort": str(effort)}:
            return effort
        case _:
            return None


def _schema(text: object) -> Json:
    match text:
        case {"format": {"schema": dict(schema)}}:
            return schema
        case _:
            return None


def read_request(path: str, headers: dict[str, str], body: bytes) -> Request:
    """The request as values; `headers` have lower-case names.

    Raises:
        ScriptError: the body is no JSON object with `model` and a list `input`.
    """
    account = headers.get("chatgpt-account-id")
    request = Request(path, headers.get("authorization"), time.time(), size=len(body), account=account)
    if not body:
        return request
    try:
        decoded: Json = json.loads(body)
    except ValueError as error:
        raise ScriptError(f"the request's body is no JSON: {error}") from error
    match decoded:
        case {"model": str(model), "input": list(items), **rest}:
            tools, key = rest.get("tools"), rest.get("prompt_cache_key")
            return Request(
                path=path,
                authorization=request.authorization,
                time=request.time,
                account=account,
                model=model,
                conversation=key if isinstance(key, str) else headers.get("session_id", ""),
                input=tuple(_read_item(item) for item in items),
                tools=tuple(o for tool in (tools if isinstance(tools, list) else []) for o in _read_offered(tool)),
                size=len(body),
                effort=_effort(rest.get("reasoning")),
                output_schema=_schema(rest.get("text")),
            )
        case _:
            raise ScriptError("the request's body needs `model` and a list `input`")


# --- Which step answers a request ---


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """The step that answers a request. `script` and `number` (from 0) say which it is; `last`: no step follows."""

    step: Step
    script: str
    number: int
    last: bool


def choose_step(request: Request, scenes: Sequence[Scene] = ()) -> ChosenStep:
    """The step that answers `request`: its message's own script, else the first scene that matches, else an echo.

    Raises:
        ScriptError: the message's script cannot be read.
    """
    message = request.last_user_message
    text = message.text if message else ""
    steps = _script_of(text)
    if steps is None:
        echo = (Step(say=f"You said: {text}"),)
        steps = next((scene.steps for scene in scenes if scene.match.search(text)), echo)
    number = _model_calls_since_user(request.input)
    step = steps[number] if number < len(steps) else SAY_DONE
    return ChosenStep(step, text, number, last=number >= len(steps) - 1)


def _script_of(text: str) -> tuple[Step, ...] | None:
    start = text.rfind(MARKER)
    if start < 0:
        return None
    try:
        script, _ = json.JSONDecoder(strict=False).raw_decode(text[start + len(MARKER) :].lstrip())
    except ValueError as error:
        raise ScriptError(f"script: what stands behind `{MARKER.strip()}` is no JSON: {error}") from error
    return read_steps(script)


def _model_calls_since_user(items: Sequence[InputItem]) -> int:
    """How often the model was called since the last user message.

    A call gives thoughts, then a message, then tool calls, and the tools' outputs follow all of them: it begins where
    one of these stands behind something that comes later in that order.
    """
    calls = 0
    rank = 3
    for item in items:
        match item:
            case Message(role="user"):
                calls, rank = 0, 3
            case Thought():
                calls, rank = calls + (rank > 0), 0
            case Message(role="assistant"):
                calls, rank = calls + (rank >= 1), 1
            case Call():
                calls, rank = calls + (rank > 2), 2
            case Output():
                rank = 3
            case Message() | Other():
                pass
            case _:
                assert_never(item)
    return calls


# --- Tool calls, in the shapes that this codex offers ---


def tool_calls(step: Step, offered: Sequence[OfferedTool]) -> list[dict[str, Json]]:
    """The step's tool calls as output items of the Responses API, without their ids.

    Raises:
        ScriptError: codex offers no tool for what the step wants.
    """
    items = [_run_item(command, step, offered) for command in step.run]
    if step.patch is not None:
        items.append(_patch_item(step.patch, offered))
    items += [_function_item(call, offered) for call in step.tools]
    if step.plan:
        if not any(tool.name == "update_plan" for tool in offered):
            raise ScriptError(f"script: `plan` needs the tool update_plan, but codex offers {_names(offered)}")
        plan: list[Json] = [{"step": item.step, "status": item.status} for item in step.plan]
        items.append(_call_item("update_plan", {"plan": plan}))
    return items


def _names(offered: Sequence[OfferedTool]) -> str:
    return ", ".join(tool.name for tool in offered) or "no tool at all"


def _call_item(name: str, arguments: dict[str, Json], namespace: str | None = None) -> dict[str, Json]:
    item: dict[str, Json] = {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}
    return item if namespace is None else item | {"namespace": namespace}


def _run_item(command: str, step: Step, offered: Sequence[OfferedTool]) -> dict[str, Json]:
    for tool in offered:
        match tool:
            case OfferedTool(kind="function", name="exec_command"):
                return _call_item("exec_command", _limits(step, tool, "yield_time_ms") | {"cmd": command})
            case OfferedTool(kind="function", name="shell_command"):
                return _call_item("shell_command", _limits(step, tool, "timeout_ms") | {"command": command})
            case OfferedTool(kind="function", name="shell"):
                argv: list[Json] = ["bash", "-lc", command]
                return _call_item("shell", _limits(step, tool, "timeout_ms") | {"command": argv})
            case OfferedTool(kind="local_shell"):
                action: dict[str, Json] = {"type": "exec", "command": ["bash", "-lc", command], "env": {}}
                return {"type": "local_shell_call", "status": "completed", "action": action}
            case _:
                pass
    raise ScriptError(f"script: `run` needs a tool for commands, but codex offers {_names(offered)}")


def _limits(step: Step, tool: OfferedTool, wait_key: str) -> dict[str, Json]:
    arguments: dict[str, Json] = {}
    if step.yield_ms is not None:
        arguments[wait_key] = step.yield_ms
    if step.escalate:
        if "sandbox_permissions" in tool.properties:
            arguments["sandbox_permissions"] = "require_escalated"
        else:
            arguments["with_escalated_permissions"] = True
        arguments["justification"] = "The script asks to run this outside the sandbox."
    return arguments


def _patch_item(patch: str, offered: Sequence[OfferedTool]) -> dict[str, Json]:
    kind = next((tool.kind for tool in offered if tool.name == "apply_patch"), None)
    match kind:
        case "custom":
            return {"type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": patch}
        case "function":
            return _call_item("apply_patch", {"input": patch})
        case _:
            # Codex recognises exactly this form in a command and applies the patch itself.
            return _run_item(f"apply_patch <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH", Step(), offered)


def _function_item(call: ModelToolCall, offered: Sequence[OfferedTool]) -> dict[str, Json]:
    """The call under codex's own name: 0.72 `mcp__srv__tool`, 0.130 with namespace `mcp__srv__`, later `mcp__srv`.

    A function that is not offered is called all the same: what codex answers then is worth a test, too.
    """
    full_name = _full_name(call.namespace, call.name)
    for tool in offered:
        if full_name in (_full_name(tool.namespace, tool.name), tool.name):
            return _call_item(tool.name, call.arguments, tool.namespace)
    return _call_item(call.name, call.arguments, call.namespace)


def _full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


# --- The answer as a stream of events ---


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so long before what follows is sent."""

    seconds: float


class Break(Enum):
    """How a stream ends that does not end well."""

    CUT = auto()
    STALL = auto()


Piece = bytes | Pause | Break


def answer_text(step: Step, request: Request) -> str:
    """The whole text of the step's message; empty where it has none."""
    if step.say is not None:
        return step.say
    if step.repeat:
        said = (item for item in request.input if isinstance(item, Message) and item.role in ("user", "assistant"))
        return "\n".join(f"{message.role}: {message.text}" for message in said)
    if step.relay:
        return next((item.text for item in reversed(request.input) if isinstance(item, Output)), "")
    if step.megabytes is not None:
        return numbered_text(round(step.megabytes * 1_000_000))
    if step.chunks is not None:
        return numbered_text(step.chunks * (step.chunk_chars or WORD_CHARS))
    silent = step.calls_tools or isinstance(step.fault, Stall | ResponseFailed)
    return "" if silent else "done."


def _deltas(step: Step, text: str) -> list[str]:
    """The text in the pieces that the step wants: so many, so long, or else words. None is empty."""
    if step.chunks is not None:
        edges = [len(text) * number // step.chunks for number in range(step.chunks + 1)]
        return [text[start:end] for start, end in pairwise(edges) if end > start]
    size = step.chunk_chars or (MEGABYTE_DELTA_CHARS if step.megabytes is not None else None)
    if size is None:
        return re.findall(r"\s*\S+\s*|\s+", text)
    return [text[start : start + size] for start in range(0, len(text), size)]


@dataclass(slots=True)
class _Stream:
    """Numbers the events and output items of one response."""

    response: dict[str, Json]
    events: int = 0
    items: int = 0

    def event(self, kind: str, **fields: Json) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self.events, **fields}, separators=(",", ":"))
        self.events += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    def deltas(self, kind: str, texts: Sequence[str], delay_s: float, **fields: Json) -> Iterator[Piece]:
        """One event per text. The constant part is encoded once: bursts of 50,000 deltas go through here."""
        constant = json.dumps(fields, separators=(",", ":"))[1:-1]
        head = f'event: {kind}\ndata: {{"type":"{kind}",{constant},"delta":'
        for number, text in enumerate(texts, self.events):
            if delay_s:
                yield Pause(delay_s)
            yield f'{head}{json.dumps(text)},"sequence_number":{number}}}\n\n'.encode()
        self.events += len(texts)

    def item_added(self, item: dict[str, Json]) -> bytes:
        return self.event("response.output_item.added", output_index=self.items, item=item)

    def item_done(self, item: dict[str, Json]) -> bytes:
        self.items += 1
        return self.event("response.output_item.done", output_index=self.items - 1, item=item)

    def ended(self, status: str, **fields: Json) -> bytes:
        return self.event(f"response.{status}", response=self.response | {"status": status} | fields)


def answer(choice: ChosenStep, request: Request, *, faulty: bool = True) -> Iterator[Piece]:
    """The SSE events of the response that carries out a step; `faulty=False` leaves the step's fault out.

    An `HttpFault` is not in here: it has no stream.

    Raises:
        ScriptError: before the first piece, where codex offers no tool for what the step wants.
    """
    calls = tool_calls(choice.step, request.tools)
    return _answer(choice, request, calls, choice.step.fault if faulty else None)


def _answer(choice: ChosenStep, request: Request, calls: list[dict[str, Json]], fault: Fault | None) -> Iterator[Piece]:
    step = choice.step
    delay_s = step.delay_ms / 1000
    stream = _Stream({"id": _new_id("resp"), "object": "response", "model": request.model, "output": []})
    yield stream.event("response.created", response=stream.response | {"status": "in_progress"})
    if delay_s and not step.has_text:
        yield Pause(delay_s)
    if step.reason:
        yield from _reasoning(stream, step.reason)
    if step.search is not None:
        yield from _search(stream, step.search)
    text = answer_text(step, request)
    if text:
        yield from _message(stream, step, text, fault, delay_s)
    match fault:
        case ResponseFailed(code, message):
            yield stream.ended("failed", error={"code": code, "message": message})
            return
        case ConnectionCut():
            yield Break.CUT
            return
        case Stall():
            yield Break.STALL
            return
        case HttpFault() | None:
            pass
        case _:
            assert_never(fault)
    for call in calls:
        yield from _tool_call(stream, call)
    more = {} if choice.last or calls else {"end_turn": False}
    yield stream.ended("completed", usage=_usage(step, request, len(text)), **more)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def _reasoning(stream: _Stream, sections: Sequence[str]) -> Iterator[Piece]:
    item_id = _new_id("rs")
    item: dict[str, Json] = {"type": "reasoning", "id": item_id, "summary": []}
    yield stream.item_added(item)
    for index, section in enumerate(sections):
        place: dict[str, Json] = {"item_id": item_id, "output_index": stream.items, "summary_index": index}
        yield stream.event("response.reasoning_summary_part.added", **place, part={"type": "summary_text", "text": ""})
        yield from stream.deltas("response.reasoning_summary_text.delta", _deltas(SAY_DONE, section), 0, **place)
        yield stream.event("response.reasoning_summary_text.done", **place, text=section)
    summary: list[Json] = [{"type": "summary_text", "text": section} for section in sections]
    yield stream.item_done(item | {"summary": summary})


def _search(stream: _Stream, query: str) -> Iterator[Piece]:
    """A search that the model's side has done by itself: codex is only told of it."""
    item: dict[str, Json] = {"type": "web_search_call", "id": _new_id("ws"), "status": "in_progress"}
    yield stream.item_added(item)
    yield stream.item_done(item | {"status": "completed", "action": {"type": "search", "query": query}})


def _message(stream: _Stream, step: Step, text: str, fault: Fault | None, delay_s: float) -> Iterator[Piece]:
    item: dict[str, Json] = {
        "type": "message",
        "id": _new_id("msg"),
        "role": "assistant",
        "content": [],
    }
    if step.phase:
        item["phase"] = step.phase
    deltas = _deltas(step, text)
    if isinstance(fault, ConnectionCut):
        deltas = deltas[: max(1, len(deltas) // 2)]
    yield stream.item_added(item)
    place: dict[str, Json] = {"item_id": item["id"], "output_index": stream.items, "content_index": 0}
    yield stream.event("response.content_part.added", **place, part={"type": "output_text", "text": ""})
    yield from stream.deltas("response.output_text.delta", deltas, delay_s, **place)
    if fault is None:
        content: list[Json] = [{"type": "output_text", "text": text, "annotations": []}]
        yield stream.item_done(item | {"content": content})


def _tool_call(stream: _Stream, call: dict[str, Json]) -> Iterator[Piece]:
    item = call | {"id": _new_id("fc"), "call_id": _new_id("call")}
    yield stream.item_added(item)
    yield stream.item_done(item)


def _usage(step: Step, request: Request, answer_chars: int) -> dict[str, Json]:
    usage = step.usage or ModelUsage(
        input_tokens=request.size // CHARS_PER_TOKEN,
        output_tokens=answer_chars // CHARS_PER_TOKEN + 1,
    )
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


# --- The server ---


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
