"""What a client sees of a turn: tables for each event, and the rule of artifacts by property."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from a2a.types import Artifact, Message, Part, Role, Task, TaskArtifactUpdateEvent, TaskState, TaskStatusUpdateEvent
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.codex_events import (
    Activity,
    CommandCompleted,
    CommandOutput,
    CommandStarted,
    DiffUpdated,
    ErrorReported,
    FilePatch,
    ItemStatus,
    MessageCompleted,
    MessageDelta,
    MessageStarted,
    PatchCompleted,
    PatchStarted,
    Phase,
    PlanItem,
    PlanUpdated,
    ReasoningCompleted,
    ReasoningDelta,
    ThreadIdle,
    TokensUpdated,
    TokenUsage,
    ToolCallCompleted,
    ToolCallStarted,
    TurnCompleted,
    TurnError,
    TurnEvent,
    TurnStarted,
    UnknownEvent,
    WarningReported,
    WebSearchCompleted,
)
from codex_workspace.protocol.jsonrpc import safe_text
from codex_workspace.runtimes.events import FILES, WRITE, FileChange, FileDiff, Text, ToolUse
from codex_workspace.runtimes.markdown import MAX_SHOWN_CHARS
from codex_workspace.tasks.replies import (
    COPIED_CHARS_PER_S,
    MAX_REMARK_CHARS,
    MAX_REMARK_S,
    USAGE,
    A2AEvent,
    Outcome,
    Reply,
    usage_metadata,
)
from codex_workspace.tasks.scheduling import UPDATE_INTERVAL_S
from tests.support.codex_replies import CodexReply

DONE = Outcome(TaskState.TASK_STATE_COMPLETED)


def reply() -> CodexReply:
    return CodexReply()


@dataclass(slots=True)
class Seen:
    """A client: it keeps artifacts by the rule of A2A, and statuses in order."""

    artifacts: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    statuses: list[TaskStatusUpdateEvent] = field(default_factory=list)
    updates: int = 0

    def take(self, events: list[A2AEvent]) -> None:
        for event in events:
            match event:
                case TaskArtifactUpdateEvent():
                    self._update(event)
                case TaskStatusUpdateEvent():
                    self.statuses.append(event)
                case Task():
                    pytest.fail("a second Task")

    def _update(self, event: TaskArtifactUpdateEvent) -> None:
        name, text = event.artifact.artifact_id, "".join(part.text for part in event.artifact.parts)
        if event.append:
            assert name in self.artifacts, "an update continues what is there"
            self.artifacts[name] += text
        else:
            self.artifacts[name] = text
        if event.last_chunk:
            self.closed.add(name)
        self.updates += 1

    @property
    def notes(self) -> list[JsonObject]:
        return [
            MessageToDict(status.status.message.metadata) for status in self.statuses if status.status.message.parts
        ]

    @property
    def texts(self) -> list[str]:
        return [status.status.message.parts[0].text for status in self.statuses if status.status.message.parts]


def seen_of(*events: TurnEvent) -> Seen:
    """Return what a client sees of events that come a second apart."""
    seen, speaker = Seen(), reply()
    for second, event in enumerate(events):
        seen.take(speaker.see(event, 100.0 + second))
    return seen


# --- A task's frame ---


def test_the_task_comes_first_with_the_message_that_opened_it() -> None:
    message = Message(role=Role.ROLE_USER, message_id="m-1", parts=[Part(text="hello")])
    task = reply().opened(message)
    assert (task.id, task.context_id, task.status.state) == ("task-1", "context-1", TaskState.TASK_STATE_SUBMITTED)
    assert [part.text for part in task.history[0].parts] == ["hello"]
    assert task.status.HasField("timestamp")
    assert len(reply().opened(None).history) == 0


def test_working_has_no_text_and_a_notice_has_its_kind() -> None:
    working = reply().working()
    assert working.status.state == TaskState.TASK_STATE_WORKING
    assert not working.status.HasField("message")
    notice = reply().notice("a new one begins")
    assert notice.status.message.parts[0].text == "a new one begins"
    assert MessageToDict(notice.status.message.metadata) == {"kind": "notice"}
    assert (notice.task_id, notice.context_id) == ("task-1", "context-1")
    assert (notice.status.message.task_id, notice.status.message.context_id) == ("task-1", "context-1")


def test_the_end_is_the_whole_answer_and_one_terminal_status() -> None:
    speaker = reply()
    speaker.see(MessageDelta("m", "Hel"), 1.0)
    speaker.see(MessageDelta("m", "lo"), 1.01)
    closing, status = speaker.close(Outcome(TaskState.TASK_STATE_FAILED, "It failed.", {"code": "x", "n": {"a": [1]}}))
    assert isinstance(closing, TaskArtifactUpdateEvent)
    assert (closing.artifact.parts[0].text, closing.append, closing.last_chunk) == ("Hello", False, True)
    assert isinstance(status, TaskStatusUpdateEvent)
    assert status.status.state == TaskState.TASK_STATE_FAILED
    assert status.status.message.parts[0].text == "It failed."
    assert MessageToDict(status.metadata) == {"code": "x", "n": {"a": [1.0]}}


def test_a_turn_without_text_has_no_answer() -> None:
    only = reply().close(DONE)
    assert [type(event) for event in only] == [TaskStatusUpdateEvent]
    assert isinstance(only[0], TaskStatusUpdateEvent)
    assert not only[0].status.HasField("message")


# --- The answer ---


def test_the_first_piece_is_sent_at_once_and_the_rest_in_order() -> None:
    speaker, seen = reply(), Seen()
    assert speaker.due is None
    seen.take(speaker.see(MessageStarted("m", "final_answer"), 50.0))
    seen.take(speaker.see(MessageDelta("m", "a"), 50.0))
    assert seen.artifacts == {"answer": "a"}
    assert speaker.due is None
    seen.take(speaker.see(MessageDelta("m", "b"), 50.01))
    seen.take(speaker.see(MessageDelta("m", "c"), 50.02))
    assert seen.artifacts == {"answer": "a"}
    assert speaker.due == pytest.approx(50.0 + UPDATE_INTERVAL_S)
    seen.take(speaker.flush(50.1))
    assert seen.artifacts == {"answer": "abc"}
    assert seen.updates == 2
    assert speaker.due is None
    assert speaker.flush(60.0) == []
    seen.take(speaker.see(MessageDelta("m", "d"), 60.0))
    assert seen.artifacts == {"answer": "abcd"}


def test_the_first_text_is_needed_at_once_and_further_pieces_by_the_next_update() -> None:
    interval_s = 0.25
    speaker = Reply("task", "context", interval_s=lambda: interval_s)
    assert speaker.text_by == -math.inf
    assert speaker.apply(Text("m", "a", phase="final_answer"), 50.0) != []
    assert speaker.text_by == 50.25
    interval_s = 0.5
    assert speaker.text_by == 50.5
    assert speaker.apply(Text("m", "b"), 50.2) == []
    assert speaker.due == 50.5
    assert speaker.apply(Text("m", "c"), speaker.due) != []
    assert speaker.due is None


def test_a_long_answer_is_updated_less_often() -> None:
    speaker = reply()
    speaker.see(MessageDelta("m", "x" * COPIED_CHARS_PER_S * 3), 50.0)
    speaker.see(MessageDelta("m", "y"), 50.01)
    assert speaker.due == pytest.approx(53.0)


def test_a_message_before_the_answer_becomes_a_remark() -> None:
    seen = seen_of(
        MessageStarted("m-1", None),
        MessageDelta("m-1", "I look first."),
        MessageCompleted("m-1", "I look first.", None),
        CommandStarted("c", "ls", "/w"),
        MessageDelta("m-2", "It is "),
        MessageDelta("m-2", "there."),
    )
    assert seen.artifacts == {"answer": "It is there."}
    assert ("commentary", "I look first.") in [
        (note["kind"], text) for note, text in zip(seen.notes, seen.texts, strict=True)
    ]


def test_commentary_is_never_the_answer() -> None:
    seen = seen_of(
        MessageStarted("m-1", "commentary"),
        MessageDelta("m-1", "First I "),
        MessageDelta("m-1", "look."),
        MessageCompleted("m-1", "First I look.", "commentary"),
        MessageCompleted("m-2", "Done.", "final_answer"),
    )
    assert seen.artifacts == {"answer": "Done."}
    assert seen.texts == ["First I look."]


@pytest.mark.parametrize(("phase", "length"), [("final_answer", 1), (None, MAX_REMARK_CHARS + 1)])
def test_a_whole_message_without_deltas_is_streamed_at_once(phase: Phase, length: int) -> None:
    assert seen_of(MessageCompleted("m", "x" * length, phase)).artifacts == {"answer": "x" * length}


def test_a_text_without_a_phase_that_grows_for_a_while_is_the_answer() -> None:
    speaker, seen = reply(), Seen()
    seen.take(speaker.see(MessageDelta("m", "a"), 50.0))
    seen.take(speaker.see(MessageDelta("m", "b"), 50.5))
    assert (seen.artifacts, speaker.due) == ({}, 50.0 + MAX_REMARK_S)
    seen.take(speaker.see(MessageDelta("m", "c"), 50.0 + MAX_REMARK_S))
    assert (seen.artifacts, speaker.due) == ({"answer": "abc"}, None)


def test_a_text_without_a_phase_that_is_longer_than_a_remark_is_the_answer() -> None:
    speaker, seen = reply(), Seen()
    seen.take(speaker.see(MessageDelta("m", "x" * MAX_REMARK_CHARS), 50.0))
    assert seen.artifacts == {}
    seen.take(speaker.see(MessageDelta("m", "y"), 50.1))
    assert seen.artifacts == {"answer": "x" * MAX_REMARK_CHARS + "y"}


def test_a_complete_text_without_a_phase_is_the_answer_at_the_turns_end_only() -> None:
    speaker, seen = reply(), Seen()
    seen.take(speaker.see(MessageCompleted("m", "Done.", None), 50.0))
    assert (seen.artifacts, speaker.due, speaker.flush(99.0)) == ({}, None, [])
    seen.take(speaker.close(DONE))
    assert (seen.artifacts, seen.updates) == ({"answer": "Done."}, 1)


def test_a_remark_before_a_tool_is_no_artifact() -> None:
    speaker, seen = reply(), Seen()
    for event in (
        MessageDelta("m-1", "I look "),
        MessageCompleted("m-1", "I look first.", None),
        CommandStarted("c", "ls", "/w"),
        PatchCompleted("f", (FilePatch("/w/a", "add", "x"),), ItemStatus.COMPLETED),
        MessageCompleted("m-2", "Done.", None),
    ):
        seen.take(speaker.see(event, 50.0))
    seen.take(speaker.close(DONE))
    assert list(seen.artifacts) == ["patch-1", "answer"]
    assert (seen.artifacts["answer"], seen.texts[0]) == ("Done.", "I look first.")


def test_a_text_before_a_question_is_a_remark_or_the_answer_so_far() -> None:
    speaker, seen = reply(), Seen()
    seen.take(speaker.see(MessageCompleted("m-1", "I must ask.", None), 50.0))
    seen.take(speaker.before_question(50.0))
    assert (seen.artifacts, seen.texts) == ({}, ["I must ask."])
    seen.take(speaker.see(MessageDelta("m-2", "So"), 50.0))
    seen.take(speaker.before_question(50.0))
    assert (seen.artifacts, seen.texts) == ({"answer": "So"}, ["I must ask."])


def test_a_whole_message_adds_what_was_not_streamed() -> None:
    assert seen_of(MessageDelta("m", "who"), MessageCompleted("m", "whole", None)).artifacts == {"answer": "whole"}


def test_a_differing_whole_message_wins_at_the_end() -> None:
    speaker, seen = reply(), Seen()
    seen.take(speaker.see(MessageDelta("m", "wrong"), 1.0))
    seen.take(speaker.see(MessageCompleted("m", "right", None), 2.0))
    seen.take(speaker.close(DONE))
    assert seen.artifacts == {"answer": "right"}


def test_lone_surrogates_can_be_sent() -> None:
    speaker, seen = reply(), Seen()
    for event in (
        MessageDelta("m", "a\ud800"),
        CommandStarted("c", "echo \udfff", "/\ud83d"),
        CommandCompleted("c", "echo \udfff", "/w", "\ud83d", 0, ItemStatus.COMPLETED, 1),
        ToolCallStarted("t", "s\ud800", "t\udc00", {"\ud800": ["\ud800"]}),
        ToolCallCompleted("t", "s\ud800", "t", {}, "\ud800", False, ItemStatus.COMPLETED, 1),
        PlanUpdated((PlanItem("\ud800", "pending"),), "\ud800"),
        ReasoningCompleted("r", ("\ud800",)),
        WebSearchCompleted("w", "\ud800"),
        WarningReported("\ud800", will_retry=False),
        PatchCompleted("f", (FilePatch("/\ud800", "add", "\ud800"),), ItemStatus.COMPLETED),
        PatchCompleted("g", (FilePatch("/\ud800", "add", "\ud800"),), ItemStatus.FAILED),
    ):
        seen.take(speaker.see(event, 1.0))
    seen.take(speaker.close(Outcome(TaskState.TASK_STATE_FAILED, "\ud800"), "b\udfff"))
    assert seen.artifacts["answer"] == "b\ufffd"
    for status in seen.statuses:
        status.SerializeToString()


messages = st.sampled_from(["m-1", "m-2", "m-3"])
phases: st.SearchStrategy[Phase] = st.sampled_from([None, "commentary", "final_answer"])
pieces = st.text(st.characters(categories=None), max_size=4)
turn_events: st.SearchStrategy[TurnEvent] = st.one_of(
    st.just(WarningReported("Reconnecting... 1/5", will_retry=True)),
    st.builds(MessageDelta, messages, pieces),
    st.builds(MessageDelta, messages, pieces),
    st.builds(MessageCompleted, messages, pieces, phases),
    st.builds(MessageStarted, messages, phases),
    st.just(CommandStarted("c", "ls", "/w")),
    st.just(CommandCompleted("c", "ls", "/w", "out", 0, ItemStatus.COMPLETED, 1)),
    st.just(PlanUpdated((), None)),
)
steps = st.sampled_from([0.0, 0.001, 0.03, 0.0999, 0.1, 0.5, 30.0])


@given(st.lists(st.tuples(turn_events, steps), max_size=40))
def test_any_turn_ends_with_exactly_its_answer(turn: list[tuple[TurnEvent, float]]) -> None:
    speaker, seen = reply(), Seen()
    now, sent_at = 1000.0, []
    for event, step in turn:
        # As the executor does: what is due goes out at its time, events as they come.
        until = now + step
        while speaker.due is not None and max(now, speaker.due) <= until:
            now = max(now, speaker.due)
            before = seen.updates
            seen.take(speaker.flush(now))
            sent_at += [now] * (seen.updates - before)
        now = until
        out = speaker.see(event, now)
        sent_at += [now] * sum(isinstance(each, TaskArtifactUpdateEvent) and not each.last_chunk for each in out)
        seen.take(out)
    states = [status.status.state for status in seen.statuses]
    assert set(states) <= {TaskState.TASK_STATE_WORKING}
    assert "answer" not in seen.closed
    assert all(later - earlier >= UPDATE_INTERVAL_S - 1e-9 for earlier, later in pairwise(sent_at))
    answer = speaker.converter.answer
    closing = speaker.close(DONE, answer)
    seen.take(closing)
    assert seen.artifacts.get("answer", "") == safe_text(answer)
    assert isinstance(closing[-1], TaskStatusUpdateEvent)
    assert closing[-1].status.state == TaskState.TASK_STATE_COMPLETED
    assert ("answer" in seen.closed) == ("answer" in seen.artifacts)


@given(st.lists(st.tuples(pieces, steps), max_size=30))
def test_streamed_text_is_always_a_prefix_of_its_message(deltas: list[tuple[str, float]]) -> None:
    speaker, seen, now, whole = reply(), Seen(), 5.0, ""
    for text, step in deltas:
        now += step
        whole += text
        seen.take(speaker.see(MessageDelta("m", text), now))
        shown = seen.artifacts.get("answer", "")
        assert len(shown) <= len(whole)
        waits = speaker.due is not None
        assert waits == (len(shown) < len(whole))
    seen.take(speaker.flush(now + 1))
    # A pair of surrogates may be cut between two updates; only whole characters are compared.
    if whole.isprintable() or not any("\ud800" <= char <= "\udfff" for char in whole):
        assert seen.artifacts.get("answer", "") == whole


# --- Everything else ---


def test_a_command_is_shown_at_start_and_end_with_its_output_truncated() -> None:
    output = "first\n" + "x" * 10_000 + "\nlast\n"
    seen = seen_of(
        CommandStarted("c", "make", "/w"),
        CommandOutput("c", output),
        CommandCompleted("c", "make", "/w", output, 2, ItemStatus.FAILED, 12),
    )
    assert seen.notes[0] == {
        "kind": "command",
        "itemId": "c",
        "command": "make",
        "cwd": "/w",
        "status": "inProgress",
    }
    assert seen.texts[0] == "**Bash**\n\n```bash\nmake\n```"
    assert len(seen.texts) == 2
    finished, text = seen.notes[1], seen.texts[1]
    assert {name: finished[name] for name in ("status", "exitCode", "durationMs")} == {
        "status": "failed",
        "exitCode": 2.0,
        "durationMs": 12.0,
    }
    shown = finished["output"]
    assert isinstance(shown, str)
    assert shown.startswith("first\n")
    assert shown.endswith("\nlast\n")
    assert f"[… {len(output) - MAX_SHOWN_CHARS} characters left out …]" in shown
    assert len(shown) < MAX_SHOWN_CHARS + 100
    assert text.startswith("**Failed** (exit code 2)\n\n```\nfirst\n")
    assert text.endswith("last\n```")
    assert len(text) < MAX_SHOWN_CHARS + 200


def test_a_command_that_was_stopped_has_no_exit_code() -> None:
    seen = seen_of(CommandCompleted("c", "sleep 9", "/w", "", None, ItemStatus.FAILED, None))
    assert seen.texts == ["**Bash**\n\n```bash\nsleep 9\n```", "**Stopped**"]
    assert seen.notes[1]["exitCode"] is None


def test_every_file_change_is_a_separate_patch() -> None:
    change = (FilePatch("/w/a", "add", "hello\n"),)
    seen = seen_of(
        PatchStarted("f", change),
        PatchCompleted("f", change, ItemStatus.COMPLETED),
        PatchCompleted("g", change, ItemStatus.DECLINED),
        PatchCompleted("h", change, ItemStatus.COMPLETED),
    )
    diff = "--- /dev/null\n+++ /w/a\n@@ -0,0 +1,1 @@\n+hello\n"
    assert seen.artifacts == {"patch-1": diff, "patch-2": diff}
    assert seen.closed == {"patch-1", "patch-2"}
    assert seen.texts == ["**Write**\n\n- add `/w/a`\n\n**Failed**\n\n```\nNo file was changed (declined).\n```"]
    assert seen.notes == [
        {
            "kind": "tool",
            "itemId": "g",
            "tool": "file_change",
            "server": None,
            "status": "declined",
            "isError": True,
            "durationMs": None,
            "output": "No file was changed (declined).",
        }
    ]


def test_a_patch_lists_its_files() -> None:
    changes = (FilePatch("/w/a", "add", "x"), FilePatch("/w/b", "update", "@@ -1 +1 @@\n-x\n+y\n"))
    (event,) = reply().see(PatchCompleted("f", changes, ItemStatus.COMPLETED), 1.0)
    assert isinstance(event, TaskArtifactUpdateEvent)
    assert event.artifact.description == "**Edit**\n\n- add `/w/a`\n- update `/w/b`"


def test_a_plan_replaces_the_one_before() -> None:
    speaker = reply()
    for status in ("pending", "inProgress", "completed"):
        (event,) = speaker.see(PlanUpdated((PlanItem("test", status),), "why"), 1.0)
        assert isinstance(event, TaskArtifactUpdateEvent)
        assert (event.artifact.artifact_id, event.append) == ("plan", False)
        assert event.artifact.description.startswith("**TodoWrite**\n\nwhy\n\n- [")
        assert MessageToDict(event.artifact.parts[0].data) == {
            "explanation": "why",
            "steps": [{"step": "test", "status": status}],
        }


def test_a_tool_is_shown_with_server_name_arguments_and_result() -> None:
    seen = seen_of(
        ToolCallStarted("t", "srv", "echo", {"x": [1, None]}),
        ToolCallCompleted("t", "srv", "echo", {"x": [1, None]}, "pong", False, ItemStatus.COMPLETED, 5),
        ToolCallStarted("u", None, "look", None),
        ToolCallCompleted("u", None, "look", None, "no such thing", True, ItemStatus.FAILED, None),
        ToolCallStarted("v", None, "much", {"text": "x" * 9000}),
    )
    assert seen.texts[:4] == [
        '**echo** (srv)\n\n```json\n{\n  "x": [\n    1,\n    null\n  ]\n}\n```',
        "```\npong\n```",
        "**look**",
        "**Failed**\n\n```\nno such thing\n```",
    ]
    assert seen.notes[0]["input"] == {"x": [1.0, None]}
    assert seen.notes[3]["isError"] is True
    assert isinstance(seen.notes[4]["input"], str)


BASH_ONE = "**Bash**\n\n```bash\none\n```"
CHANGED = PatchCompleted("f", (FilePatch("/w/a", "add", "x"),), ItemStatus.COMPLETED)


@pytest.mark.parametrize(
    ("between", "head"),
    [
        ((), ""),
        ((CommandOutput("1", "o"), DiffUpdated("d")), ""),
        ((CommandStarted("2", "two", "/w"),), f"{BASH_ONE}\n\n"),
        ((MessageStarted("m", "final_answer"), MessageDelta("m", "By the way")), f"{BASH_ONE}\n\n"),
        ((ReasoningCompleted("r", ("Hm",)),), f"{BASH_ONE}\n\n"),
        ((CHANGED,), f"{BASH_ONE}\n\n"),
    ],
)
def test_a_result_apart_from_its_tool_names_it(between: tuple[TurnEvent, ...], head: str) -> None:
    ended = CommandCompleted("1", "one", "/w", "out\n", 0, ItemStatus.COMPLETED, 1)
    assert seen_of(CommandStarted("1", "one", "/w"), *between, ended).texts[-1] == f"{head}```\nout\n```"


def test_concurrent_tools_are_distinguished() -> None:
    first = ToolCallCompleted("1", "srv", "f", {"x": 1}, "one", False, ItemStatus.COMPLETED, 1)
    second = ToolCallCompleted("2", None, "g", {}, "two", False, ItemStatus.COMPLETED, 1)
    seen = seen_of(ToolCallStarted("1", "srv", "f", {"x": 1}), ToolCallStarted("2", None, "g", {}), first, second)
    assert seen.texts[2:] == ["**f** (srv)\n\n```\none\n```", "**g**\n\n```\ntwo\n```"]


def test_tool_arguments_of_any_type_are_shown() -> None:
    assert seen_of(ToolCallStarted("t", None, "f", ["x"])).texts == [
        '**f**\n\n```json\n{\n  "arguments": [\n    "x"\n  ]\n}\n```'
    ]


@pytest.mark.parametrize(
    ("event", "kind", "text"),
    [
        (ReasoningCompleted("r", ("Look at it.",)), "reasoning", "Look at it."),
        (WebSearchCompleted("w", "codex"), "search", "**WebSearch** `codex`"),
        (WarningReported("Reconnecting... 1/5", will_retry=True), "notice", "Reconnecting... 1/5"),
    ],
)
def test_a_note_has_its_kind(event: TurnEvent, kind: str, text: str) -> None:
    seen = seen_of(event)
    assert (seen.notes[0]["kind"], seen.texts) == (kind, [text])


def test_every_section_of_reasoning_is_a_separate_note() -> None:
    assert seen_of(ReasoningCompleted("r", ("one", " \n", "two"))).texts == ["one", "two"]


@pytest.mark.parametrize(
    "event",
    [
        TurnStarted(),
        MessageStarted("m", None),
        ReasoningDelta("r", 0, "x"),
        CommandOutput("c", "x"),
        PatchStarted("f", ()),
        DiffUpdated("x"),
        TokensUpdated(TokenUsage(1, 1)),
        ErrorReported(TurnError("x", "other", None, None)),
        ThreadIdle(),
        TurnCompleted("completed", None, None),
        Activity(),
        UnknownEvent("new/thing", {}),
        MessageCompleted("m", "", None),
        ReasoningCompleted("r", ()),
    ],
)
def test_other_events_are_not_shown(event: TurnEvent) -> None:
    assert reply().see(event, 1.0) == []


def test_usage_is_reported_for_turn_and_thread() -> None:
    assert usage_metadata(None, None) == {}
    turn: JsonObject = {
        "totalTokens": 5,
        "inputTokens": 3,
        "cachedInputTokens": 1,
        "outputTokens": 2,
        "reasoningOutputTokens": 1,
    }
    count = TokenUsage(5, 3, 1, 2, 1)
    assert usage_metadata(count, None) == {USAGE: turn}
    assert usage_metadata(None, count) == {USAGE: {"thread": turn}}
    assert usage_metadata(count, count) == {USAGE: {**turn, "thread": turn}}


def test_a_resumed_answer_continues_the_earlier_processs_numbering() -> None:
    before = [
        Artifact(artifact_id=name, name=name, parts=[Part(text=name)]) for name in ("answer", "patch-1", "file-1")
    ]
    reply = Reply("task", "context", before=before)
    reply.apply(ToolUse("item", WRITE, FILES, {}), 0.0)
    (update,) = reply.apply(FileChange("item", (FileDiff("/w/new.txt", "add", "one\n"),)), 0.0)
    assert isinstance(update, TaskArtifactUpdateEvent)
    assert update.artifact.artifact_id == "patch-2"
    assert len(reply.files) == 1
    ended = reply.ended(Outcome(TaskState.TASK_STATE_COMPLETED))
    assert [each.artifact_id for each in ended.artifacts] == ["patch-1", "file-1", "patch-2"]
