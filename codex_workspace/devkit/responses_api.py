"""Answers of the Responses API: tool calls and the stream of events for a step."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import assert_never
from uuid import uuid4

from codex_workspace.devkit.model_requests import ChosenStep, Message, OfferedTool, Output, Request
from codex_workspace.devkit.script import (
    SAY_DONE,
    WORD_CHARS,
    ConnectionCut,
    Fault,
    HttpFault,
    Json,
    ModelToolCall,
    ModelUsage,
    ResponseFailed,
    ScriptError,
    Stall,
    Step,
    numbered_text,
)

MEGABYTE_DELTA_CHARS = 4096
CHARS_PER_TOKEN = 4


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
