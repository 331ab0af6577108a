"""The scripted model's scripts: steps and scenes, read from JSON or YAML and checked. See `model` for the keys."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import read_config_file

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
"""What JSON and YAML decode to."""

WORD_CHARS = 10


def numbered_text(chars: int) -> str:
    """Text of exactly `chars` characters in which a lost, doubled or swapped piece shows: "no 000000.no 000001.…"."""
    words = -(-chars // WORD_CHARS)
    return "".join([f"no {number:06d}." for number in range(words)])[:chars]


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
        return _read_scenes(yaml.safe_load(read_config_file(path)))
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
