"""Requests of the Responses API as codex sends them, and the step of a script that answers one."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from codex_workspace.devkit.script import SAY_DONE, Json, Scene, ScriptError, Step, read_steps

MARKER = "@script "
"""Stands in a user message before its script; the last one counts, so that a quoted earlier message does not."""


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
