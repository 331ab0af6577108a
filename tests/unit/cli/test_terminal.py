"""What a person sees of a turn: events in, Markdown out."""

import io
import re

import pytest
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
    TaskStatusUpdateEvent,
)
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct, Value
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from codex_workspace.cli.terminal import TurnView, open_console
from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.codex_events import (
    CommandCompleted,
    CommandStarted,
    FilePatch,
    ItemStatus,
    MessageCompleted,
    MessageDelta,
    PatchCompleted,
    PlanItem,
    PlanUpdated,
    ReasoningCompleted,
    ToolCallCompleted,
    ToolCallStarted,
    TurnEvent,
    WarningReported,
    WebSearchCompleted,
)
from codex_workspace.runtimes.markdown import clean
from codex_workspace.tasks.replies import USAGE, Outcome
from tests.support.codex_replies import CodexReply

COMPLETED, FAILED, CANCELED, WORKING = (
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_WORKING,
)
END = "\n[completed, 0.0 s]\n"


def piece(text: str, *, append: bool = True, last: bool = False, name: str = "answer") -> StreamResponse:
    update = TaskArtifactUpdateEvent(
        task_id="t",
        context_id="c",
        artifact=Artifact(artifact_id=name, parts=[Part(text=text)]),
        append=append,
        last_chunk=last,
    )
    return StreamResponse(artifact_update=update)


def first(text: str, name: str = "answer") -> StreamResponse:
    return piece(text, append=False, name=name)


def closing(text: str) -> StreamResponse:
    return piece(text, append=False, last=True)


def diff(text: str, description: str = "") -> StreamResponse:
    part = Part(text=text, media_type="text/x-diff")
    artifact = Artifact(artifact_id="patch-1", description=description, parts=[part])
    return StreamResponse(artifact_update=TaskArtifactUpdateEvent(artifact=artifact, last_chunk=True))


def held(name: str, value: Value, description: str = "") -> StreamResponse:
    artifact = Artifact(artifact_id=name, description=description, parts=[Part(data=value)])
    return StreamResponse(artifact_update=TaskArtifactUpdateEvent(artifact=artifact, last_chunk=True))


def said(text: str, about: JsonObject | None = None, message_id: str = "") -> Message:
    message = Message(role=Role.ROLE_AGENT, message_id=message_id, parts=[Part(text=text)] if text else [])
    if about is not None:
        message.metadata.update(about)
    return message


def status(
    state: TaskState, text: str = "", about: JsonObject | None = None, metadata: JsonObject | None = None, of: str = ""
) -> StreamResponse:
    update = TaskStatusUpdateEvent(task_id="t", context_id="c", status=TaskStatus(state=state))
    if text or about:
        update.status.message.CopyFrom(said(text, about, of))
    if metadata:
        struct = Struct()
        struct.update(metadata)
        update.metadata.CopyFrom(struct)
    return StreamResponse(status_update=update)


def note(kind: str, text: str, about: JsonObject | None = None) -> StreamResponse:
    return status(WORKING, text, {"kind": kind, **(about or {})})


def ended(command: str, output: str, exit_code: float | None) -> StreamResponse:
    about: JsonObject = {"command": command, "itemId": "i", "status": "completed"}
    return note("command", output, {**about, "output": output, "exitCode": exit_code})


DONE = status(COMPLETED)


def shown(*events: StreamResponse, is_terminal: bool = False) -> str:
    """Return what is written of the events."""
    output = io.StringIO()
    view = TurnView(Console(file=output, force_terminal=is_terminal, highlight=False, color_system="standard"))
    for event in events:
        view.show(event)
    return output.getvalue()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([first("You "), piece("said"), piece(": hi"), closing("You said: hi"), DONE], f"You said: hi\n{END}"),
        ([first("You "), closing("You said: hi"), DONE], f"You said: hi\n{END}"),
        ([closing("all at once"), DONE], f"all at once\n{END}"),
        ([first("I look."), first("There"), piece(" it is."), closing("There it is.")], "I look.\n\nThere it is."),
        ([first("a draft"), closing("the answer")], "a draft\n\nthe answer"),
        ([first("ends\n"), DONE], f"ends\n{END}"),
        ([piece("an append without a beginning"), DONE], f"an append without a beginning\n{END}"),
        ([first("A", name="one"), first("B", name="two"), piece("a", name="one")], "A\n\nB\n\na"),
        ([first("before "), note("tool", "**f**"), piece("after")], "before \n\n**f**\n\nafter"),
        ([note("commentary", "I look."), first("Done.")], "I look.\n\nDone."),
        ([first("I look."), note("commentary", "I look."), first("Done.")], "I look.\n\nDone."),
        ([note("commentary", "I look."), note("commentary", "I look.")], "I look."),
        ([note("reasoning", "Hm\nso"), note("notice", "slow")], "> Hm\n> so\n\n**Note**: slow\n"),
        ([note("search", "Looked for x"), note("tool", "Calling f\n")], "Looked for x\n\nCalling f\n"),
        ([status(WORKING, "a plain agent's note")], "a plain agent's note\n"),
        ([ended("ls", "as it *is*", 0)], "as it *is*\n"),
        ([diff("--- a\n+++ b\n-x\n+y\n")], "```diff\n--- a\n+++ b\n-x\n+y\n```\n"),
        ([diff("@@ @@\n+x", "Two files.\n")] * 2, "Two files.\n\n```diff\n@@ @@\n+x\n```\n"),
        ([diff("rename from a\nrename to b\n", "A rename.")],
         "A rename.\n\n```diff\nrename from a\nrename to b\n```\n"),
        ([diff("1c1\n< x\n---\n> y\n", "A line.")], "A line.\n\n```diff\n1c1\n< x\n---\n> y\n```\n"),
        ([held("sum", ParseDict({}, Value()), "A *sum*.")] * 2, "A *sum*.\n"),
        ([held("sum", ParseDict({"x": ["y"]}, Value()))], '```json\n{\n  "x": [\n    "y"\n  ]\n}\n```\n'),
        ([status(FAILED, "The model refused.")], "The model refused.\n\n[failed, 0.0 s]\n"),
        ([first("some"), status(CANCELED, "Canceled.")], "some\n\nCanceled.\n\n[canceled, 0.0 s]\n"),
        ([status(COMPLETED, "an answer in the status")], f"an answer in the status\n{END}"),
        ([first("hi"), status(COMPLETED, "hi")], f"hi\n{END}"),
        ([status(TaskState.TASK_STATE_INPUT_REQUIRED, "Which?")], "Which?\n\n[input required, 0.0 s]\n"),
        ([StreamResponse(message=said("a mere message"))], "a mere message\n\n[answered, 0.0 s]\n"),
        ([DONE, first("too late"), DONE], END.lstrip()),
    ],
)  # fmt: skip
def test_a_turn_reads_as_it_happened(events: list[StreamResponse], expected: str) -> None:
    assert shown(*events) == expected


def test_the_last_line_shows_the_tokens() -> None:
    usage: JsonObject = {USAGE: {"totalTokens": 12345, "inputTokens": 12000, "outputTokens": 345, "thread": {}}}
    assert shown(status(COMPLETED, metadata=usage)) == "[completed, 12,345 tokens (12,000 in, 345 out), 0.0 s]\n"


def test_a_snapshot_shows_only_what_is_missing() -> None:
    task = Task(
        id="t",
        context_id="c",
        status=TaskStatus(state=COMPLETED),
        history=[said("on the way", {"kind": "notice"}, "1"), said("later", {"kind": "notice"}, "2")],
        artifacts=[Artifact(artifact_id="answer", parts=[Part(text="All is "), Part(text="well.")])],
    )
    before = status(WORKING, "on the way", {"kind": "notice"}, of="1")
    assert (
        shown(before, first("All"), StreamResponse(task=task))
        == f"**Note**: on the way\n\nAll\n\n**Note**: later\n\n is well.\n{END}"
    )
    assert shown(StreamResponse(task=task)) == f"**Note**: on the way\n\n**Note**: later\n\nAll is well.\n{END}"


def test_a_view_knows_what_it_has_shown() -> None:
    view = TurnView(Console(file=io.StringIO()))
    for event in (first("I go."), ended("ls -l", "a\n", 0), first("Do"), closing("Done."), DONE):
        assert not view.outcome
        view.show(event)
    assert view.completed
    assert (view.task_id, view.context_id, view.answer, view.text_updates) == ("t", "c", "Done.", 2)
    assert [(each["command"], each["output"], each["exitCode"]) for each in view.notes] == [("ls -l", "a\n", 0)]


def turn(*events: TurnEvent) -> list[StreamResponse]:
    """Return the responses that our agent sends for codex's events, a second apart."""
    reply, responses = CodexReply(), list[StreamResponse]()
    outcome = Outcome(COMPLETED)
    sent = [*(each for at, event in enumerate(events) for each in reply.see(event, float(at))), *reply.close(outcome)]
    for event in sent:
        match event:
            case TaskArtifactUpdateEvent():
                responses.append(StreamResponse(artifact_update=event))
            case TaskStatusUpdateEvent():
                responses.append(StreamResponse(status_update=event))
            case Task():
                responses.append(StreamResponse(task=event))
    return responses


def began(command: str, item: str = "c") -> CommandStarted:
    return CommandStarted(item, f"/bin/bash -lc '{command}'", "/w")


def came_of(command: str, output: str, exit_code: int | None = 0, item: str = "c") -> CommandCompleted:
    status = ItemStatus.COMPLETED if exit_code == 0 else ItemStatus.FAILED
    return CommandCompleted(item, f"/bin/bash -lc '{command}'", "/w", output, exit_code, status, 1)


def bash(command: str) -> str:
    return f"**Bash**\n\n```bash\n{command}\n```\n"


EVIL = "\x1b]0;owned\x07\x1b[2Jsafe\x1b[31m\x9b1m\x1bc\u202eevil\x08\x7f"
SEEN_EVIL = r"\x1b]0;owned\x07\x1b[2Jsafe\x1b[31m\x9b1m\x1bc\u202eevil\x08\x7f"

SAID_EVIL = re.sub(r"([\\\[\]])", r"\\\1", SEEN_EVIL)
"""Where it stands outside of fences."""

JSON_EVIL = r"\u001b]0;owned\u0007\u001b[2Jsafe\u001b[31m\x9b1m\u001bc\u202eevil\b\x7f"

TURNS: dict[str, tuple[list[TurnEvent], str]] = {
    "a command and its output": (
        [MessageDelta("m", "I look."), MessageCompleted("m", "I look.", None), began("ls"), came_of("ls", "a\nb\n"),
         MessageCompleted("n", "Two.", None)],
        f"I look.\n\n{bash('ls')}\n```\na\nb\n```\n\nTwo.\n",
    ),
    "one that prints nothing": ([began("true"), came_of("true", "")], f"{bash('true')}\n*No output.*\n"),
    "one that fails": (
        [began("make"), came_of("make", "no rule\n", 2)],
        f"{bash('make')}\n**Failed** (exit code 2)\n\n```\nno rule\n```\n",
    ),
    "one that is stopped": (
        [began("sleep 9"), came_of("sleep 9", "", None)],
        f"{bash('sleep 9')}\n**Stopped**\n",
    ),
    "one that is stopped after it has printed": (
        [began("yes"), came_of("yes", "y\ny\n", None)],
        f"{bash('yes')}\n**Stopped**\n\n```\ny\ny\n```\n",
    ),
    "two side by side": (
        [began("one", "1"), began("two", "2"), came_of("one", "1", 0, "1"), came_of("two", "2", 0, "2")],
        f"{bash('one')}\n{bash('two')}\n{bash('one')}\n```\n1\n```\n\n{bash('two')}\n```\n2\n```\n",
    ),
    "fences inside": (
        [began("cat <<E\n```\nE"), came_of("cat <<E\n```\nE", "````sh\n````\n")],
        "**Bash**\n\n````bash\ncat <<E\n```\nE\n````\n\n`````\n````sh\n````\n`````\n",
    ),
    "escape sequences": (
        [began(EVIL), came_of(EVIL, EVIL, 1)],
        f"{bash(SEEN_EVIL)}\n**Failed** (exit code 1)\n\n```\n{SEEN_EVIL}\n```\n",
    ),
    "a long output": (
        [began("seq 1000"), came_of("seq 1000", "".join(f"{each}\n" for each in range(1, 1001)))],
        "\n".join([bash("seq 1000"), "```", *map(str, range(1, 11)), "[… 3752 characters left out …]",
                   *map(str, range(971, 1001)), "```", ""]),
    ),
    "a long line": (
        [began("cat x.js"), came_of("cat x.js", "a" * 100_000)],
        f"{bash('cat x.js')}\n```\n{'a' * 1000}\n[… 96000 characters left out …]\n{'a' * 3000}\n```\n",
    ),
    "an MCP tool": (
        [ToolCallStarted("t", "files", "read_file", {"path": "a`b", "n": 1}),
         ToolCallCompleted("t", "files", "read_file", {}, "1\n2", False, ItemStatus.COMPLETED, 1)],
        '**read_file** (files)\n\n```json\n{\n  "path": "a`b",\n  "n": 1\n}\n```\n\n```\n1\n2\n```\n',
    ),
    "an MCP tool that fails": (
        [ToolCallStarted("t", EVIL, EVIL, {EVIL: EVIL}),
         ToolCallCompleted("t", EVIL, EVIL, {}, EVIL, True, ItemStatus.FAILED, 1)],
        f'**{SAID_EVIL}** ({SAID_EVIL})\n\n```json\n{{\n  "{JSON_EVIL}": "{JSON_EVIL}"\n}}\n```\n\n'
        f"**Failed**\n\n```\n{SEEN_EVIL}\n```\n",
    ),
    "files": (
        [
            PatchCompleted(
                "f", (FilePatch("/w/a", "add", "x\n"), FilePatch("/w/b", "delete", "y\n")), ItemStatus.COMPLETED
            ),
        ],
        "**Edit**\n\n- add `/w/a`\n- delete `/w/b`\n\n```diff\n--- /dev/null\n+++ /w/a\n@@ -0,0 +1,1 @@\n+x\n"
        "--- /w/b\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-y\n```\n",
    ),
    "files of which no lines are told": (
        [PatchCompleted("f", (FilePatch("/w/a", "update", ""),), ItemStatus.COMPLETED)],
        "**Edit**\n\n- update `/w/a`\n\n```diff\n--- /w/a\n+++ /w/a\n```\n",
    ),
    "files that were not changed": (
        [PatchCompleted("f", (FilePatch("/w/a", "add", "x\n"),), ItemStatus.DECLINED)],
        "**Write**\n\n- add `/w/a`\n\n**Failed**\n\n```\nNo file was changed (declined).\n```\n",
    ),
    "a plan": (
        [PlanUpdated((PlanItem("look *up*", "completed"), PlanItem("write", "inProgress")), "Why")] * 2,
        "**TodoWrite**\n\nWhy\n\n- [x] look \\*up\\*\n- [ ] *now:* write\n",
    ),
    "a plan with escape sequences": (
        [PlanUpdated((PlanItem(EVIL, EVIL),), EVIL)],
        f"**TodoWrite**\n\n{SAID_EVIL}\n\n- [ ] {SAID_EVIL}\n",
    ),
    "a search": ([WebSearchCompleted("w", "basalt")], "**WebSearch** `basalt`\n"),
    "thoughts and notices": (
        [ReasoningCompleted("r", ("**Hm**\nso",)), WarningReported("slow", will_retry=False)],
        "> **Hm**\n> so\n\n**Note**: slow\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_is_shown_as_its_events_state(name: str) -> None:
    events, expected = TURNS[name]
    text = shown(*turn(*events))
    assert text == f"{expected}{END}"
    assert "\n\n\n" not in text
    assert [character for character in text if character not in "\n" and not character.isprintable()] == []


def test_a_terminal_shows_markdown_in_colors() -> None:
    events = turn(began("make"), came_of("make", "done\n"))
    assert "\x1b[1mBash\x1b[0m" in shown(*events, is_terminal=True)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_number_that_json_does_not_have_is_ignored(number: float) -> None:
    assert shown(ended("ls", "text", number)) == "text\n"
    assert "null" in shown(held("sum", Value(number_value=number)))
    assert shown(status(COMPLETED, metadata={USAGE: {"totalTokens": number}})) == "[completed, 0.0 s]\n"


def test_output_that_is_not_a_terminal_has_no_colors_and_takes_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    open_console().out("naïve … \ud800", style="bold")
    assert written.getvalue() == b"na?ve ? ?\n"


@pytest.mark.parametrize(
    "event",
    [
        first(EVIL),
        closing(EVIL),
        note("command", EVIL, {"command": EVIL, "output": EVIL, "status": "completed", "exitCode": 0}),
        note("reasoning", EVIL),
        note("whatever", EVIL),
        note("tool", EVIL),
        note("notice", EVIL),
        diff(f"+{EVIL}\n", EVIL),
        held("plan", Value(string_value="x"), EVIL),
        status(FAILED, EVIL),
        StreamResponse(message=said(EVIL)),
        note("notice", "<http://owned/%1b]0;evil%07%1b[2J>"),
        held("plan", Value(string_value="x"), "owned\n\n| a |\n|---|\n| <http://y/%c2%9b1m%1b[2J> |"),
        status(FAILED, "owned &#x202e;evil"),
    ],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_text_of_an_agent_controls_the_terminal(event: StreamResponse, is_terminal: bool) -> None:
    text = re.sub(r"\x1b\[[\d;]*m", "", shown(event, is_terminal=is_terminal))
    assert "owned" in text
    assert [character for character in text if character not in "\n" and not character.isprintable()] == []


@given(st.text())
def test_cleaned_text_holds_no_control_character(text: str) -> None:
    assert not set(clean(text)) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2028)}


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert clean(text) == text


@given(st.text(min_size=1), st.lists(st.integers(0, 50)))
def test_any_cut_of_an_answer_shows_all_of_it_once(text: str, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    events = [piece(each, append=number > 0) for number, each in enumerate(pieces)]
    assert shown(*events, closing(text)) == shown(closing(text)) == clean(text)
