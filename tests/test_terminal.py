"""What a person sees of a turn: events in, text out."""

import io

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

from codex_workspace.presentation import unwrapped
from codex_workspace.replies import USAGE
from codex_workspace.terminal import MAX_OUTPUT_LINES, Console, Style, TurnView, clean
from codex_workspace.wire import JsonObject

COMPLETED, FAILED, CANCELED, WORKING = (
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_WORKING,
)
END = "[completed, 2.0 s]\n"


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


def diff(text: str) -> StreamResponse:
    artifact = Artifact(artifact_id="patch-1", parts=[Part(text=text, media_type="text/x-diff")])
    return StreamResponse(artifact_update=TaskArtifactUpdateEvent(artifact=artifact, last_chunk=True))


def plan(*steps: tuple[str, str]) -> StreamResponse:
    data: JsonObject = {"explanation": None, "steps": [{"step": step, "status": status} for step, status in steps]}
    artifact = Artifact(artifact_id="plan", parts=[Part(data=ParseDict(data, Value()))])
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


def started(command: str, item: str = "i") -> StreamResponse:
    return note("command", f"$ {command}", {"command": command, "itemId": item, "status": "inProgress"})


def ended(command: str, output: str, exit_code: int | None, item: str = "i") -> StreamResponse:
    about: JsonObject = {"command": command, "itemId": item, "status": "completed"}
    return note("command", output, {**about, "output": output, "exitCode": exit_code})


DONE = status(COMPLETED)


def shown(*events: StreamResponse, style: Style = Style()) -> str:  # noqa: B008
    view = TurnView(style, 10.0)
    return "".join(view.apply(event, 12.0) for event in events)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([first("You "), piece("said"), piece(": hi"), closing("You said: hi"), DONE], f"You said: hi\n{END}"),
        ([first("You "), closing("You said: hi"), DONE], f"You said: hi\n{END}"),
        ([closing("all at once"), DONE], f"all at once\n{END}"),
        ([first("I look."), first("There"), piece(" it is."), closing("There it is.")], "I look.\n\nThere it is."),
        ([first("one"), first("two"), closing("one")], "one\n\ntwo"),
        ([first("a draft"), closing("the answer")], "a draft\n\nthe answer"),
        ([first("ends\n"), DONE], f"ends\n{END}"),
        ([piece("an append without a beginning"), DONE], f"an append without a beginning\n{END}"),
        ([first("A", name="one"), first("B", name="two"), piece("a", name="one")], "A\n\nB\na"),
        ([first("before "), started("ls"), piece("after")], "before \n$ ls\nafter"),
        ([note("commentary", "I look."), first("Done.")], "I look.\n\nDone."),
        ([first("I look."), note("commentary", "I look."), first("Done.")], "I look.\n\nDone."),
        ([first("I "), note("commentary", "I look."), piece("look."), first("Done.")], "I look.\n\nDone."),
        ([note("commentary", "I look."), note("commentary", "I look.")], "I look."),
        ([note("reasoning", "**Hm**\n"), note("notice", "slow")], "thinking: **Hm**\nnote: slow\n"),
        ([note("search", "Searched the web: x"), note("tool", "Calling f")], "Searched the web: x\nCalling f\n"),
        ([status(WORKING, "a plain agent's note")], "a plain agent's note\n"),
        ([note("tool", "**f**", {"tool": "f", "server": "s", "status": "inProgress"})], "Calling s.f\n"),
        ([note("tool", "**f**", {"tool": "f", "isError": False, "output": "1"})], "f answered: 1\n"),
        ([note("tool", "**f**", {"tool": "f", "isError": True, "output": "no"})], "f failed: no\n"),
        ([started("ls"), ended("ls", "a\nb\n", 0)], "$ ls\n  a\n  b\n  [exit 0]\n"),
        ([started("ls"), ended("ls", "", 3)], "$ ls\n  [exit 3]\n"),
        ([started("ls"), ended("ls", "", None)], "$ ls\n  [stopped]\n"),
        ([ended("ls", "a", 0)], "$ ls\n  a\n  [exit 0]\n"),
        (
            [started("one", "1"), started("two", "2"), ended("one", "1", 0, "1"), ended("two", "2", 0, "2")],
            "$ one\n$ two\n$ one\n  1\n  [exit 0]\n  2\n  [exit 0]\n",
        ),
        ([diff("--- a\n+++ b\n-x\n+y\n")], "--- a\n+++ b\n-x\n+y\n"),
        ([plan(("look", "completed"), ("do", "inProgress"))], "plan:\n  [x] look\n  [>] do\n"),
        ([status(FAILED, "The model refused.")], "error: The model refused.\n[failed, 2.0 s]\n"),
        ([first("some"), status(CANCELED, "Canceled.")], "some\n[canceled, 2.0 s]\n"),
        ([status(COMPLETED, "an answer in the status")], f"an answer in the status\n{END}"),
        ([first("hi"), status(COMPLETED, "hi")], f"hi\n{END}"),
        ([status(TaskState.TASK_STATE_INPUT_REQUIRED, "Which?")], "Which?\n[input required, 2.0 s]\n"),
        ([StreamResponse(message=said("a mere message"))], "a mere message\n[answered, 2.0 s]\n"),
        ([DONE, first("too late"), DONE], END),
    ],
)  # fmt: skip
def test_a_turn_reads_as_it_happened(events: list[StreamResponse], expected: str) -> None:
    assert shown(*events) == expected


def test_the_last_line_tells_the_tokens() -> None:
    usage: JsonObject = {USAGE: {"totalTokens": 12345, "inputTokens": 12000, "outputTokens": 345, "thread": {}}}
    assert shown(status(COMPLETED, metadata=usage)) == "[completed, 12,345 tokens (12,000 in, 345 out), 2.0 s]\n"


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
        == f"note: on the way\n\nAll\nnote: later\n is well.\n{END}"
    )
    assert shown(StreamResponse(task=task)) == f"note: on the way\nnote: later\n\nAll is well.\n{END}"


def test_a_view_knows_what_it_has_seen() -> None:
    view = TurnView(Style(), 0.0)
    for event in (first("I go."), ended("/bin/bash -lc 'ls -l'", "a\n", 0), first("Do"), closing("Done."), DONE):
        assert not view.ended
        view.apply(event, 1.0)
    assert view.completed
    assert (view.task_id, view.context_id, view.answer, view.text_updates) == ("t", "c", "Done.", 2)
    assert [(each.command, each.output, each.exit_code) for each in view.commands] == [("ls -l", "a\n", 0)]


def test_long_output_loses_its_middle() -> None:
    text = shown(ended("seq", "\n".join(str(number) for number in range(1000)), 0))
    assert text.startswith("$ seq\n  0\n")
    assert f"… {1000 - MAX_OUTPUT_LINES} lines left out …" in text
    assert text.endswith("  999\n  [exit 0]\n")
    assert len(text.splitlines()) == MAX_OUTPUT_LINES + 3


def test_colours_are_only_for_those_who_want_them() -> None:
    events = [first("the answer"), ended("ls", "", 1), diff("+x\n"), DONE]
    assert "\x1b" not in shown(*events)
    coloured = shown(*events, style=Style(colour=True))
    assert "\x1b[32m+x\x1b[0m" in coloured
    assert coloured.count("\x1b[0m") * 2 == coloured.count("\x1b[")


def test_a_console_that_is_no_terminal_is_plain_and_takes_any_text() -> None:
    bytes_out = io.BytesIO()
    console = Console(io.TextIOWrapper(bytes_out, encoding="ascii"), {})
    console.line("naïve … \ud800")
    assert console.style == Style(colour=False)
    assert bytes_out.getvalue() == b"na?ve ? ?\n"


EVIL = "\x1b]0;owned\x07\x1b[2Jsafe\x1b[31m\x9b1m\x1bc\u202eevil\x08\x7f"


@pytest.mark.parametrize(
    "event",
    [
        first(EVIL),
        closing(EVIL),
        note("command", EVIL, {"command": EVIL, "output": EVIL, "status": "completed", "exitCode": 0}),
        note("reasoning", EVIL),
        note("whatever", EVIL),
        diff(f"+{EVIL}\n"),
        plan((EVIL, "pending")),
        status(FAILED, EVIL),
        StreamResponse(message=said(EVIL)),
    ],
)
def test_nothing_that_an_agent_says_reaches_the_terminal_as_a_command(event: StreamResponse) -> None:
    text = shown(event)
    assert "safeevil" in text
    assert "owned" not in text
    assert [character for character in text if character not in "\n" and not character.isprintable()] == []


@given(st.text())
def test_cleaned_text_holds_no_control_character(text: str) -> None:
    assert not set(clean(text)) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2028)}


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert clean(text) == text


@given(st.text(), st.lists(st.integers(0, 50)))
def test_any_cut_of_an_answer_shows_all_of_it_once(text: str, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    view = TurnView(Style(), 0.0)
    for number, text_piece in enumerate(pieces):
        view.apply(piece(text_piece, append=number > 0), 0.0)
    view.apply(closing(text), 0.0)
    assert view.answer == text
    assert view.apply(closing(text), 0.0) == ""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/bin/bash -lc 'uname -sr; ls'", "uname -sr; ls"),
        ("/usr/bin/zsh -c ls", "ls"),
        ("ls -l", "ls -l"),
        ("echo 'unclosed", "echo 'unclosed"),
        ("python -c 1", "python -c 1"),
    ],
)
def test_a_command_is_shown_as_a_person_would_type_it(command: str, expected: str) -> None:
    assert unwrapped(command) == expected
