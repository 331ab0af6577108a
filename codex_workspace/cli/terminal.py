"""Show a turn to a person: A2A events in, Markdown out. Of any A2A agent; what `replies` marks is shown best.

How commands, tools and plans look is `presentation`'s business: an agent of ours has said them by it, in messages and
in the descriptions of artifacts, and what comes otherwise is made Markdown by it here. A terminal adds colours and
leaves every character as it is.

`TurnView` is pure: it takes events and a clock's time and returns strings. Whoever uses it writes them; `Console` does
that for a real stream. All that comes from the agent is data from outside and passes through `clean` first: an escape
sequence in an answer must not move the cursor, set the title or answer a question for the person at the keyboard.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from a2a.types import (
    Artifact,
    Message,
    Part,
    Role,
    StreamResponse,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
)
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct, Value

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.runtimes.events import Reasoning
from codex_workspace.runtimes.markdown import CONTROLS, FAILED, NOTE, STOPPED, data, fenced, markdown, marked, unwrapped
from codex_workspace.tasks.outcomes import USAGE

ENDINGS: Final = frozenset(
    {
        TaskState.TASK_STATE_COMPLETED,
        TaskState.TASK_STATE_FAILED,
        TaskState.TASK_STATE_CANCELED,
        TaskState.TASK_STATE_REJECTED,
    }
)
PAUSES: Final = frozenset({TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_AUTH_REQUIRED})
"""States in which the task waits for the person: the stream ends, and the next message belongs to the same task."""

_SEQUENCES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: cursor, colours
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)"  # OSC and such: the title
    r"|\x1b[ -/]*[0-~]"  # the short ones
)
_FENCE: Final = re.compile("(`{3,})([a-z]*)")
_STRONG: Final = re.compile(r"\*\*.+?\*\*")
_BAD: Final = (f"**{FAILED}**", f"**{STOPPED}**")


def clean(text: str) -> str:
    """Return `text` with nothing in it that a terminal would obey, newlines and tabs apart.

    A sequence that is cut in two loses its control character, and its rest shows as plain text.
    """
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    return CONTROLS.sub("", _SEQUENCES.sub("", unified))


@dataclass(frozen=True, slots=True)
class Style:
    """How to emphasise; without `colour` everything is plain text."""

    colour: bool = False

    def dim(self, text: str) -> str:
        """What stands beside the answer."""
        return self._set("2", text)

    def bold(self, text: str) -> str:
        """What a person looks for."""
        return self._set("1", text)

    def good(self, text: str) -> str:
        """What went well, or was added."""
        return self._set("32", text)

    def bad(self, text: str) -> str:
        """What went wrong, or was taken away."""
        return self._set("31", text)

    def markdown(self, text: str) -> str:
        """Markdown: names bold, fences dim, commands bold, diffs in their colours, and what failed as bad."""
        if not self.colour:
            return text
        shown, fence, language = list[str](), "", ""
        for line in text.split("\n"):
            opening = _FENCE.fullmatch(line)
            if fence:
                shown.append(self.dim(line) if line == fence else self._fenced(line, language))
                fence = "" if line == fence else fence
            elif opening is not None:
                shown.append(self.dim(line))
                fence, language = opening.groups()
            else:
                shown.append(self._prose(line))
        return "\n".join(shown)

    def _fenced(self, line: str, language: str) -> str:
        match language:
            case "bash":
                return self.bold(line)
            case "diff" if line.startswith(("+++ ", "--- ")):
                return self.bold(line)
            case "diff" if line.startswith("+"):
                return self.good(line)
            case "diff" if line.startswith("-"):
                return self.bad(line)
            case _:
                return line

    def _prose(self, line: str) -> str:
        return self.bad(line) if line.startswith(_BAD) else _STRONG.sub(lambda found: self.bold(found[0]), line)

    def _set(self, code: str, text: str) -> str:
        if not self.colour or not text:
            return text
        # Line by line, so that a pager or a cut screen never inherits a colour.
        return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else line for line in text.split("\n"))


class Console:
    """A text stream that takes any text, at once, and knows whether a person sees it."""

    def __init__(self, stream: TextIO, env: Mapping[str, str]) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        plain = bool(env.get("NO_COLOR")) or env.get("TERM") == "dumb"
        self.style = Style(colour=self.is_terminal and not plain)

    def write(self, text: str) -> None:
        """Write and flush; a character that the stream's encoding lacks becomes a question mark."""
        if not text:
            return
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()

    def line(self, text: str = "") -> None:
        """Write a line."""
        self.write(f"{text}\n")


@dataclass(frozen=True, slots=True)
class Command:
    """A command that has ended. `exit_code` None: it was stopped."""

    command: str
    output: str
    exit_code: int | None


class TurnView:
    """One turn as text, and what was learned of it on the way.

    Args:
        style: how to emphasise.
        started: when the message was sent, in seconds on the clock whose time `apply` is given.
    """

    def __init__(self, style: Style, started: float) -> None:
        self.task_id: str | None = None
        self.context_id: str | None = None
        self.state: TaskState | None = None
        self.answered = False
        self.text_updates = 0
        self.commands: list[Command] = []
        self._style = style
        self._started = started
        self._page = _Page()
        self._texts: dict[str, str] = {}
        self._shown: dict[str, str] = {}
        self._said: list[str] = []
        self._growing_key: str | None = None
        self._at_cursor: str | None = None
        self._seen: set[str] = set()

    @property
    def ended(self) -> bool:
        """Whether nothing more comes: the task is over or waits for the person, or a mere message was the answer."""
        return self.answered or self.state in ENDINGS or self.state in PAUSES

    @property
    def completed(self) -> bool:
        """Whether it ended well."""
        return self.answered or self.state == TaskState.TASK_STATE_COMPLETED

    @property
    def answer(self) -> str:
        """The last message of the agent, as it came."""
        return self._said[-1] if self._said else ""

    def apply(self, event: StreamResponse, now: float) -> str:
        """Return what to write for an event; nothing for all that follows the end."""
        if self.ended:
            return ""
        match event.WhichOneof("payload"):
            case "task":
                return self._task(event.task, now)
            case "message":
                return self._message(event.message, now)
            case "status_update":
                update = event.status_update
                self._know(update.task_id, update.context_id)
                return self._status(update.status, update.metadata, now)
            case "artifact_update":
                self._know(event.artifact_update.task_id, event.artifact_update.context_id)
                return self._artifact_update(event.artifact_update)
            case _:
                return ""

    def broken(self, sentence: str) -> str:
        """Return what to write when the turn cannot be followed to its end, for the reason given."""
        return self._block(self._style.bad(marked("Error", clean(sentence))))

    def _know(self, task_id: str, context_id: str) -> None:
        self.task_id = task_id or self.task_id
        self.context_id = context_id or self.context_id

    def _task(self, task: Task, now: float) -> str:
        """Show what of a snapshot was not shown yet: the whole turn of a blocking send, the gap of a broken stream."""
        self._know(task.id, task.context_id)
        notes = [self._note(message) for message in task.history if message.role == Role.ROLE_AGENT]
        artifacts = [self._artifact(artifact) for artifact in task.artifacts]
        return "".join([*notes, *artifacts, self._status(task.status, task.metadata, now)])

    def _message(self, message: Message, now: float) -> str:
        self._know(message.task_id, message.context_id)
        self.answered = True
        said = self._whole("message", _text(message.parts)) + self._others(message.parts)
        return said + self._ending("answered", "", now)

    def _status(self, status: TaskStatus, metadata: Struct, now: float) -> str:
        self.state = status.state
        if not self.ended:
            return self._note(status.message) if status.HasField("message") else ""
        word = state_word(status.state)
        sentence = _text(status.message.parts).strip()
        if status.state in (TaskState.TASK_STATE_COMPLETED, *PAUSES):
            said = self._whole("status", sentence) if sentence else ""
        elif sentence.rstrip(".").lower() in ("", word):
            said = ""
        else:
            said = self._block(self._style.bad(marked(word.capitalize(), clean(sentence))))
        return said + self._ending(word, _tokens(metadata), now)

    def _ending(self, word: str, tokens: str, now: float) -> str:
        facts = [word, *([tokens] if tokens else []), f"{now - self._started:.1f} s"]
        shown = self._style.good if self.completed else self._style.bad
        return self._block(f"[{shown(facts[0])}, {', '.join(facts[1:])}]")

    def _artifact_update(self, update: TaskArtifactUpdateEvent) -> str:
        if update.append or not update.last_chunk:
            return self._growing(update.artifact, append=update.append)
        return self._artifact(update.artifact)

    def _growing(self, artifact: Artifact, *, append: bool) -> str:
        text, key = _text(artifact.parts), artifact.artifact_id
        if not text or _is_diff(artifact):
            return self._artifact(artifact)
        self.text_updates += 1
        self._growing_key = key
        if append and key in self._texts:
            return self._reach(key, self._texts[key] + text) + self._others(artifact.parts)
        return self._begun(key, text) + self._others(artifact.parts)

    def _artifact(self, artifact: Artifact) -> str:
        """Show an artifact that is given whole; nothing of it where it was shown before."""
        if _is_diff(artifact):
            return self._once(artifact, _diff(artifact))
        text, about = _text(artifact.parts), clean(artifact.description).strip()
        if about and not text and any(part.HasField("data") for part in artifact.parts):
            return self._once(artifact, about)
        return (self._whole(artifact.artifact_id, text) if text else "") + self._others(artifact.parts)

    def _once(self, artifact: Artifact, shown: str) -> str:
        key = f"{artifact.artifact_id}\n{shown}"
        if key in self._seen:
            return ""
        self._seen.add(key)
        return self._block(self._style.markdown(shown))

    def _whole(self, key: str, text: str) -> str:
        shown = self._shown.get(key, "")
        if shown and text.startswith(shown):
            return self._reach(key, text)
        return "" if self._was_said(text) else self._begun(key, text)

    def _begun(self, key: str, text: str) -> str:
        """Show the beginning of a message."""
        self._texts[key] = self._shown[key] = text
        self._said.append(text)
        self._at_cursor = key
        return self._page.paragraph() + self._page.put(clean(text))

    def _reach(self, key: str, text: str) -> str:
        """Show what is missing where `text` is what the message holds now; more may have been shown already."""
        shown = self._shown[key]
        self._texts[key] = text
        if len(text) <= len(shown):
            return ""
        self._shown[key] = text
        if self._said and self._said[-1] == shown:
            self._said[-1] = text
        # A note came in between: the text goes on below it.
        onward = "" if self._at_cursor == key else self._page.paragraph()
        self._at_cursor = key
        return onward + self._page.put(clean(text[len(shown) :]))

    def _remark(self, text: str, message_id: str) -> str:
        """Show a message on the way, which may have been shown, all or in part, while it was taken for the answer."""
        if self._was_said(text):
            return ""
        key = self._growing_key
        if key is not None and text.startswith(self._shown[key]):
            before = self._texts[key]
            rest = self._reach(key, text)
            self._texts[key] = before
            return rest
        return self._begun(f"commentary {message_id}", text)

    def _was_said(self, text: str) -> bool:
        head, cut, _ = text.partition("\n[… ")
        return text in self._said or (bool(cut) and any(said.startswith(head) for said in self._said))

    def _note(self, message: Message) -> str:
        """Show something said on the way, once."""
        if message.message_id in self._seen:
            return ""
        if message.message_id:
            self._seen.add(message.message_id)
        text, about = clean(_text(message.parts)).strip(), _plain(message.metadata)
        match about.get("kind"):
            case "commentary":
                return self._remark(_text(message.parts), message.message_id)
            case "command" | "tool" | "search":
                self._note_command(about)
                return self._block(self._style.markdown(text))
            case "reasoning" if text:
                return self._block(self._style.dim(markdown(Reasoning("", text))))
            case "notice" if text:
                return self._block(self._style.dim(marked(NOTE, text)))
            case _:
                return self._block(self._style.dim(text))

    def _note_command(self, about: JsonObject) -> None:
        """Remember a command that has ended."""
        match about:
            case {"status": "inProgress"}:
                return
            case {"kind": "command", "command": str(command)}:
                output, exit_code = about.get("output"), about.get("exitCode")
                ended = Command(
                    command=unwrapped(command),
                    output=output if isinstance(output, str) else "",
                    exit_code=int(exit_code) if isinstance(exit_code, int | float) else None,
                )
                self.commands.append(ended)
            case _:
                return

    def _others(self, parts: Sequence[Part]) -> str:
        """Show that there are parts which are no text."""
        return "".join(self._block(self._style.dim(shown)) for part in parts if (shown := _no_text(part)))

    def _block(self, text: str) -> str:
        """Show a paragraph, or several, apart from what stands before."""
        if not text:
            return ""
        self._at_cursor = None
        return self._page.paragraph() + self._page.put(f"{text}\n")


class _Page:
    """Where the cursor is: how the text that was put so far ends."""

    def __init__(self) -> None:
        self._end = ""

    def put(self, text: str) -> str:
        self._end = (self._end + text)[-2:]
        return text

    def paragraph(self) -> str:
        if not self._end or self._end == "\n\n":
            return ""
        return self.put("\n" if self._end.endswith("\n") else "\n\n")


def state_word(state: TaskState) -> str:
    """Return a task state's name as people say it."""
    return TaskState.Name(state).removeprefix("TASK_STATE_").replace("_", " ").lower()


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if part.WhichOneof("content") == "text")


def _is_diff(artifact: Artifact) -> bool:
    return any(part.media_type == "text/x-diff" for part in artifact.parts)


def _no_text(part: Part) -> str:
    name = clean(f"{part.filename or 'unnamed'} {part.media_type}").strip()
    match part.WhichOneof("content"):
        case "raw":
            return f"[file {name}, {len(part.raw)} bytes]"
        case "url":
            return f"[file {name} at {clean(part.url)}]"
        case "data":
            return data(_value(part.data))
        case _:
            return ""


def _value(content: Struct | Value) -> JsonValue:
    """Return what an agent has said for programs; None where it holds a number that JSON has not, such as 1e999."""
    try:
        value: JsonValue = MessageToDict(content)
    except ValueError:
        return None
    return value


def _diff(artifact: Artifact) -> str:
    """Return a change of files: what the agent says of it, and its lines where they are told."""
    about, diff = clean(artifact.description).strip(), clean(_text(artifact.parts))
    # Of codex exec nothing but the names, which the description has.
    if about and all(line.startswith(("--- ", "+++ ")) for line in diff.splitlines()):
        return about
    return f"{about}\n\n{fenced(diff, 'diff')}".lstrip()


def _tokens(metadata: Struct) -> str:
    usage = _plain(metadata).get(USAGE)
    if not isinstance(usage, dict):
        return ""
    counts = {name: int(count) for name, count in usage.items() if isinstance(count, int | float)}
    if "totalTokens" not in counts:
        return ""
    return (
        f"{counts['totalTokens']:,} tokens ({counts.get('inputTokens', 0):,} in, {counts.get('outputTokens', 0):,} out)"
    )


def _plain(struct: Struct) -> JsonObject:
    content = _value(struct)
    return content if isinstance(content, dict) else {}
