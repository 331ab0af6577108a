"""Folds a task's events, of A2A 1.0 and 0.3, into its answer."""

import json
from dataclasses import dataclass, field
from typing import Final

from codex_workspace.common.a2a_terms import ANSWER
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.tasks.replies import FAILURE

TERMINAL: Final = frozenset({"completed", "failed", "canceled", "rejected"})


class ProtocolFault(Exception):
    """The response violates A2A."""


class Unavailable(Exception):
    """The agent returned a temporary error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A task's final state. `failure` is the code of a failed task."""

    task_id: str
    state: str
    text: str
    sentence: str
    failure: str


@dataclass(slots=True)
class TaskReader:
    """The state of the task after the events of one connection."""

    task_id: str = ""
    state: str = ""
    sentence: str = ""
    failure: str = ""
    artifacts: dict[str, str] = field(default_factory=dict)

    @property
    def answer(self) -> Answer | None:
        """The final state, or None before the end."""
        if self.state not in TERMINAL:
            return None
        return Answer(self.task_id, self.state, self.artifacts.get(ANSWER, ""), self.sentence, self.failure)

    def take(self, response: JsonValue) -> None:
        """Apply a JSON-RPC response.

        Raises:
            Unavailable: it is a temporary error.
            ProtocolFault: it is another error, no response, or an event after the final state.
        """
        match response:
            case {"error": {"code": -32603 | -32000}}:
                raise Unavailable(json.dumps(response))
            case {"result": dict(result)}:
                self.take_event(result)
            case _:
                raise ProtocolFault(json.dumps(response))

    def take_event(self, result: JsonObject) -> None:
        """Apply an event, as HTTP+JSON and gRPC send it without an envelope.

        Raises:
            Unavailable: it is a temporary error of HTTP+JSON.
            ProtocolFault: it is another error, no event, or an event after the final state.
        """
        if self.state in TERMINAL:
            raise ProtocolFault(f"behind the end of task {self.task_id}: {json.dumps(result)}")
        match _unwrapped(result):
            case "task", task:
                self._task(task)
            case "status", {"status": dict(status), **rest}:
                self._status(status, rest.get("metadata"))
            case "artifact", {"artifact": dict(artifact), **rest}:
                self._artifact(artifact, append=rest.get("append") is True)
            case "error", {"code": 500}:
                raise Unavailable(json.dumps(result))
            case _:
                raise ProtocolFault(json.dumps(result))

    def _task(self, task: JsonObject) -> None:
        self.task_id = str(task.get("id"))
        self.artifacts.clear()
        artifacts = task.get("artifacts")
        for artifact in artifacts if isinstance(artifacts, list) else []:
            if isinstance(artifact, dict):
                self._artifact(artifact, append=False)
        status = task.get("status")
        self._status(status if isinstance(status, dict) else {}, task.get("metadata"))

    def _status(self, status: JsonObject, metadata: JsonValue) -> None:
        self.state = str(status.get("state")).removeprefix("TASK_STATE_").lower()
        message = status.get("message")
        self.sentence = _text_of(message) if isinstance(message, dict) else ""
        failure = metadata.get(FAILURE) if isinstance(metadata, dict) else None
        if isinstance(failure, dict):
            self.failure = str(failure.get("code"))

    def _artifact(self, artifact: JsonObject, *, append: bool) -> None:
        name = str(artifact.get("artifactId"))
        self.artifacts[name] = (self.artifacts.get(name, "") if append else "") + _text_of(artifact)


def _unwrapped(result: JsonObject) -> tuple[str, JsonObject]:
    """Return the type of event and the event: in 1.0 the type is the key around it, in 0.3 its `kind`."""
    match result:
        case {"task": dict(event)}:
            return "task", event
        case {"statusUpdate": dict(event)}:
            return "status", event
        case {"artifactUpdate": dict(event)}:
            return "artifact", event
        case {"error": dict(error)}:
            return "error", error
        case {"kind": "task" | "status-update" | "artifact-update" as kind}:
            return str(kind).removesuffix("-update"), result
        case _:
            return "", result


def _text_of(holder: JsonObject) -> str:
    parts = holder.get("parts")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))
