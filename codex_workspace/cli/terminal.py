"""Shows a turn of any A2A agent on a terminal, and as Markdown if the output is not a terminal.

An agent's text passes through `clean` first: an escape sequence in it must not control the terminal.
"""

import io
import sys
import time
from collections.abc import Sequence
from typing import Final

import anyio
from a2a.types import Artifact, Message, Part, Role, StreamResponse, TaskState, TaskStatus
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct, Value
from rich.console import Console
from rich.markdown import Markdown

from codex_workspace.common.a2a_terms import ANSWER, AWAITING_INPUT, TERMINAL
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.runtimes.events import Reasoning
from codex_workspace.runtimes.markdown import NOTE, clean, data, fenced, markdown, marked
from codex_workspace.tasks.replies import USAGE

ANSWERED: Final = "answered"
"""The outcome if the agent answers with a message instead of a task."""


def open_console() -> Console:
    """Return a console for standard output; it replaces characters that the output's encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


class TurnView:
    """Shows the events of one turn as they arrive.

    outcome: how the turn ended, such as "completed"; "" before its end.
    awaits_input: whether the next message belongs to the same task.
    notes: the metadata of the agent's remarks.
    """

    def __init__(self, console: Console) -> None:
        self.began = anyio.Event()
        self.task_id = ""
        self.context_id = ""
        self.outcome = ""
        self.awaits_input = False
        self.answer = ""
        self.text_updates = 0
        self.notes: list[JsonObject] = []
        self._console = console
        self._started = time.monotonic()
        self._texts: dict[str, str] = {}
        self._seen: set[str] = set()
        # The text that ends at the cursor, and the last characters that were written.
        self._at_cursor: str | None = None
        self._end = ""

    @property
    def completed(self) -> bool:
        """Whether the turn succeeded."""
        return self.outcome in (ANSWERED, "completed")

    def show(self, event: StreamResponse) -> None:
        """Show what is new in an event; nothing after the end."""
        if self.outcome:
            return
        self.began.set()
        match event.WhichOneof("payload"):
            case "task":
                task = event.task
                self.task_id, self.context_id = task.id, task.context_id
                for message in task.history:
                    if message.role == Role.ROLE_AGENT:
                        self._show_note(message)
                for artifact in task.artifacts:
                    self._show_artifact(artifact, append=False)
                self._show_status(task.status, task.metadata)
            case "message":
                self.context_id = event.message.context_id
                self._show_parts(ANSWER, event.message.parts)
                self._show_end(ANSWERED)
            case "status_update":
                self.task_id, self.context_id = event.status_update.task_id, event.status_update.context_id
                self._show_status(event.status_update.status, event.status_update.metadata)
            case "artifact_update":
                self.text_updates += not event.artifact_update.last_chunk
                self._show_artifact(event.artifact_update.artifact, append=event.artifact_update.append)
            case _:
                pass

    def show_problem(self, sentence: str) -> None:
        """Show why the turn cannot be followed or canceled."""
        self._show_block(clean(sentence), "red")

    def _show_status(self, status: TaskStatus, metadata: Struct) -> None:
        text = _text(status.message.parts)
        self.awaits_input = status.state in AWAITING_INPUT
        if status.state not in AWAITING_INPUT | TERMINAL:
            self._show_note(status.message)
            return
        if status.state in {*AWAITING_INPUT, TaskState.TASK_STATE_COMPLETED}:
            if text != self.answer:
                self._show_text("status", text)
        else:
            self._show_block(clean(text), "red")
        word = TaskState.Name(status.state).removeprefix("TASK_STATE_").replace("_", " ").lower()
        self._show_end(word, _tokens(metadata))

    def _show_end(self, outcome: str, tokens: str = "") -> None:
        self.outcome = outcome
        self._start_paragraph()
        self._write(f"[{outcome}{tokens}, {time.monotonic() - self._started:.1f} s]\n")

    def _show_artifact(self, artifact: Artifact, *, append: bool) -> None:
        key, about = artifact.artifact_id, clean(artifact.description).strip()
        if any(part.media_type == "text/x-diff" for part in artifact.parts):
            self._show_once(key, f"{about}\n\n{fenced(_text(artifact.parts), 'diff')}".lstrip())
        elif about and not _text(artifact.parts):
            self._show_once(key, about)
        else:
            self._show_parts(key, artifact.parts, self._texts.get(key, "") if append else "")

    def _show_parts(self, key: str, parts: Sequence[Part], before: str = "") -> None:
        self._show_text(key, before + _text(parts))
        for part in parts:
            self._show_once(key, _not_text(part))

    def _show_note(self, message: Message) -> None:
        """Show a remark once."""
        if message.message_id and message.message_id in self._seen:
            return
        self._seen.add(message.message_id)
        text, about = _text(message.parts), _plain(message.metadata)
        self.notes.append(about if isinstance(about, dict) else {})
        match self.notes[-1].get("kind"):
            case "commentary":
                # It can have been shown as the beginning of the answer.
                self._show_text(ANSWER, text)
            case "command" | "tool" | "search":
                self._show_block(clean(text))
            case "reasoning":
                self._show_block(markdown(Reasoning("", text)), "dim")
            case "notice":
                self._show_block(marked(NOTE, clean(text)), "dim")
            case _:
                self._show_block(clean(text), "dim")

    def _show_text(self, key: str, text: str) -> None:
        """Show what is new of a text that grows or is replaced."""
        if not text:
            return
        before = self._texts.get(key, "")
        self._texts[key] = self.answer = text
        added = text.removeprefix(before)
        if added:
            if self._at_cursor != key or added == text:
                self._start_paragraph()
            self._at_cursor = key
            self._write(clean(added))

    def _show_once(self, key: str, text: str) -> None:
        if f"{key}\n{text}" not in self._seen:
            self._seen.add(f"{key}\n{text}")
            self._show_block(text)

    def _show_block(self, text: str, style: str = "") -> None:
        if not text.strip():
            return
        self._start_paragraph()
        self._at_cursor = None
        if self._console.is_terminal:
            self._console.print(_parsed(text), style=style)
            self._end = "\n"
        else:
            self._write(f"{text.rstrip()}\n")

    def _start_paragraph(self) -> None:
        if self._end:
            self._write("\n" * (2 - len(self._end) + len(self._end.rstrip("\n"))))

    def _write(self, text: str) -> None:
        self._end = (self._end + text)[-2:]
        print(text, end="", file=self._console.file, flush=True)


def _parsed(text: str) -> Markdown:
    """Parse Markdown, and clean what the parser decodes: entities, and the %XX of a URL in angle brackets."""
    parsed = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    for token in parsed.parsed:
        for child in token.children or ():
            child.content = clean(child.content)
    return parsed


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts)


def _not_text(part: Part) -> str:
    name = clean(f"{part.filename or 'unnamed'} {part.media_type}").strip()
    match part.WhichOneof("content"):
        case "raw":
            return f"[file {name}, {len(part.raw)} bytes]"
        case "url":
            return f"[file {name} at {clean(part.url)}]"
        case "data":
            return data(_plain(part.data))
        case _:
            return ""


def _plain(content: Struct | Value) -> JsonValue:
    """Return an agent's data; None if it contains a number that JSON does not have, such as 1e999."""
    try:
        value: JsonValue = MessageToDict(content)
    except ValueError:
        return None
    return value


def _tokens(metadata: Struct) -> str:
    about = _plain(metadata)
    match about.get(USAGE) if isinstance(about, dict) else None:
        case {"totalTokens": float(total), "inputTokens": float(sent), "outputTokens": float(received)}:
            return f", {total:,.0f} tokens ({sent:,.0f} in, {received:,.0f} out)"
        case _:
            return ""
