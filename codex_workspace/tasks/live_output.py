"""Live output of a turn for clients that request the extension `ITEMS`: command output and the diff so far.

Pure, as `replies` is. Each command has an artifact `output-1`, `output-2`, …, which grows as it prints and is closed
with the output's beginning and end; `diff` is replaced as the turn changes files. An artifact's metadata under `ITEMS`
say which item of codex's it is about. What a command prints while it runs is best effort on codex's side, too.
"""

from dataclasses import dataclass
from typing import Final

from a2a.types import Artifact, Part, TaskArtifactUpdateEvent
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.protocol.jsonrpc import safe_text
from codex_workspace.runtimes.events import AgentEvent, RunDiff, ToolOutput, ToolResult, ToolUse
from codex_workspace.runtimes.markdown import shortened

ITEMS: Final = "urn:codex-workspace:items"
"""The extension's name, and the key of the artifacts' metadata."""

INTERVAL_S: Final = 0.25
"""At most four updates per second; each one costs every client and the store some work."""

MAX_OUTPUT_CHARS: Final = 65_536
"""At most this much of a command's output is streamed."""

MAX_DIFF_CHARS: Final = 262_144


@dataclass(slots=True)
class _Output:
    """A command's output: how much was sent, and what waits."""

    name: str
    about: JsonObject
    waiting: str = ""
    sent_chars: int = 0


class LiveOutput:
    """The live artifacts of one task."""

    def __init__(self, task_id: str, context_id: str) -> None:
        self._task_id = task_id
        self._context_id = context_id
        self._outputs: dict[str, _Output] = {}
        self._count = 0
        self._diff: str | None = None
        self._last = -INTERVAL_S

    def due(self, interval_s: float) -> float | None:
        """When `flush` has something to send, `interval_s` or more after the last update; None while nothing waits."""
        waits = self._diff is not None or any(output.waiting for output in self._outputs.values())
        return self._last + max(INTERVAL_S, interval_s) if waits else None

    def see(self, event: AgentEvent) -> list[TaskArtifactUpdateEvent]:
        """Apply an event; return what to send at once."""
        match event:
            case ToolUse(id=item, kind="command", input=given):
                self._started(item, given.get("command"))
            case ToolOutput(id=item, text=text) if item in self._outputs:
                output = self._outputs[item]
                room = MAX_OUTPUT_CHARS - output.sent_chars - len(output.waiting)
                output.waiting += text[: max(0, room)]
            case ToolResult(id=item, output=whole) if item in self._outputs:
                return [self._closed(self._outputs.pop(item), whole)]
            case RunDiff(diff=diff):
                self._diff = diff
            case _:
                pass
        return []

    def _started(self, item: str, command: JsonValue) -> None:
        self._count += 1
        about: JsonObject = {"kind": "commandOutput", "itemId": item, "command": command}
        self._outputs[item] = _Output(f"output-{self._count}", about)

    def flush(self, now: float) -> list[TaskArtifactUpdateEvent]:
        """Return the output that waits, whether it is due or not."""
        out = [self._grown(output) for output in self._outputs.values() if output.waiting]
        if self._diff is not None:
            out.append(self._shown_diff(self._diff))
            self._diff = None
        if out:
            self._last = now
        return out

    def _grown(self, output: _Output) -> TaskArtifactUpdateEvent:
        text, output.waiting = output.waiting, ""
        is_first = output.sent_chars == 0
        output.sent_chars += len(text)
        return self._update(output.name, Part(text=safe_text(text)), output.about, append=not is_first)

    def _closed(self, output: _Output, whole: str) -> TaskArtifactUpdateEvent:
        return self._update(output.name, Part(text=safe_text(shortened(whole))), output.about, last=True)

    def _shown_diff(self, diff: str) -> TaskArtifactUpdateEvent:
        about: JsonObject = {"kind": "diff", "isCut": len(diff) > MAX_DIFF_CHARS}
        part = Part(text=safe_text(diff[:MAX_DIFF_CHARS]), media_type="text/x-diff")
        return self._update("diff", part, about)

    def _update(
        self, name: str, part: Part, about: JsonObject, *, append: bool = False, last: bool = False
    ) -> TaskArtifactUpdateEvent:
        artifact = Artifact(artifact_id=name, name=name, parts=[part], extensions=[ITEMS])
        artifact.metadata.CopyFrom(ParseDict({ITEMS: about}, Struct()))
        return TaskArtifactUpdateEvent(
            task_id=self._task_id, context_id=self._context_id, artifact=artifact, append=append, last_chunk=last
        )
