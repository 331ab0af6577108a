"""Tests `runtimes/convert.py` and `runtimes/events.py` with recordings of `codex exec` and arbitrary lines.

Covers `runtimes.events` and `protocol.exec_reader`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codex_workspace.backends.codex_exec.runtime import ExecConverter
from codex_workspace.common.redact import Redactor, redact_value
from codex_workspace.protocol.codex_events import (
    NO_SESSION,
    CommandOutput,
    CommandStarted,
    DiffUpdated,
    ErrorReported,
    MessageCompleted,
    MessageDelta,
    MessageStarted,
    PlanUpdated,
    ReasoningCompleted,
    ReasoningDelta,
    TokenUsage,
    ToolCallCompleted,
    ToolCallStarted,
    TurnCompleted,
    TurnError,
    TurnEvent,
    TurnStarted,
    UnknownEvent,
    WarningReported,
    process_exit_error,
)
from codex_workspace.protocol.codex_events import ItemStatus as Status
from codex_workspace.protocol.codex_events import PlanItem as CodexStep
from codex_workspace.protocol.codex_events import TokensUpdated as CodexUsage
from codex_workspace.runtimes.convert import NO_RESULT, NONE_USED, EventConverter, EventRedactor
from codex_workspace.runtimes.events import (
    BASH,
    COMMAND,
    AgentEvent,
    AgentMessage,
    Done,
    Error,
    FileChange,
    FileDiff,
    Plan,
    PlanStep,
    Reasoning,
    ReasoningSummary,
    RunDiff,
    RunWarning,
    Text,
    TokenCounts,
    ToolOutput,
    ToolResult,
    ToolUse,
    UnmappedEvent,
    Usage,
    as_json,
)
from tests.integration.test_recordings import RECORDINGS as THREAD_RECORDINGS
from tests.integration.test_recordings import TRIMMED, replays_of
from tests.support.paths import ROOT
from tests.support.record_exec import SCENARIOS

if TYPE_CHECKING:
    from codex_workspace.common.values import JsonObject

FOLDER: Final = ROOT / "tests" / "recordings" / "exec"
VERSIONS: Final = sorted((path.name for path in FOLDER.iterdir() if path.is_dir()), key=lambda name: name.split("."))
RECORDINGS: Final = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.ndjson"))
WATCHDOG: Final = TurnError("no line for 300 s", "watchdogTimeout", None, None)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a recording."""

    lines: tuple[str, ...]
    exit_code: int


@cache
def runs_of(recording: str) -> tuple[Run, ...]:
    runs, lines = list[Run](), list[str]()
    for text in (FOLDER / f"{recording}.ndjson").read_text().split("\n"):
        record = json.loads(text or "{}")
        if "line" in record:
            lines.append(record["line"])
        if "exit" in record:
            runs.append(Run(tuple(lines), record["exit"]))
            lines = []
    return tuple(runs)


def finish(lines: ExecConverter, exit_code: int | None, *, stopped: bool = False) -> list[AgentEvent]:
    """Finish as `CliRun` does when the process has ended."""
    failure = None if stopped or lines.ended or lines.failure else process_exit_error(exit_code)
    return lines.finish(failure, stopped=stopped)


def replayed(run: Run, used_before: TokenUsage | None = NONE_USED) -> list[AgentEvent]:
    lines = ExecConverter(used_before)
    events = [event for line in run.lines for event in lines.feed(line)]
    return events + finish(lines, run.exit_code, stopped=run.exit_code < 0)


def told(recording: str) -> list[AgentEvent]:
    """Return the events of a recording's only run, without the warning of an unknown model."""
    (run,) = runs_of(recording)
    return replayed(run)


def done(events: Sequence[AgentEvent]) -> Done:
    last = events[-1]
    assert isinstance(last, Done)
    return last


def check_balance(events: Sequence[AgentEvent]) -> None:
    """Every use of a tool has one result behind it, every result a use before it, and the end is one."""
    opened, closed = list[str](), set[str]()
    for event in events:
        match event:
            case ToolUse(id=id_):
                assert id_ not in opened
                opened.append(id_)
            case ToolResult(id=id_):
                assert id_ in opened
                assert id_ not in closed
                closed.add(id_)
            case FileChange(item_id=id_):
                assert id_ in opened
                assert id_ not in closed
            case _:
                pass
    assert set(opened) == closed
    assert [type(event) for event in events].count(Done) == 1
    assert isinstance(events[-1], Done)


def texts_of(events: Sequence[AgentEvent]) -> dict[str, str]:
    """Return the messages as a reader puts them together."""
    texts: dict[str, str] = {}
    for event in events:
        if isinstance(event, Text):
            texts[event.item_id] = event.text if event.replaces else texts.get(event.item_id, "") + event.text
    return texts


def test_every_version_has_recordings() -> None:
    assert set(VERSIONS) == {"0.163.0", "0.169.0"}
    assert {Path(recording).name for recording in RECORDINGS} == set(SCENARIOS)


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_recording_is_understood_and_ends_once(recording: str) -> None:
    for run in runs_of(recording):
        events = replayed(run)
        check_balance(events)
        assert not [event for event in events if isinstance(event, UnmappedEvent)]
        assert done(events).session_id
        assert json.loads(json.dumps([as_json(event) for event in events]))


@pytest.mark.parametrize("version", VERSIONS)
def test_an_answer_comes_with_its_reasoning(version: str) -> None:
    events = told(f"{version}/answer")
    thought = [event.text for event in events if isinstance(event, Reasoning)]
    assert "\n".join(thought) == "think hard\nand again"
    end = done(events)
    assert (end.text, end.stop_reason, end.error) == ("It is done, as you said.", "completed", None)
    assert list(texts_of(events).values()) == ["It is done, as you said."]
    assert end.usage is not None
    assert "cost" not in json.dumps(as_json(end))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_resumed_session_has_its_id_and_memory(version: str) -> None:
    first, second = runs_of(f"{version}/resume")
    before, after = done(replayed(first)), done(replayed(second))
    assert before.session_id == after.session_id
    assert "assistant: The word is basalt." in after.text


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tokens_of_a_resumed_run_are_its_own(version: str) -> None:
    first, second = runs_of(f"{version}/resume")
    lines = ExecConverter()
    for line in first.lines:
        lines.feed(line)
    assert lines.session_usage is not None
    before, after = done(replayed(first)).usage, done(replayed(second, lines.session_usage)).usage
    assert before is not None
    assert after is not None
    # The second call says the first turn again, and little more.
    assert before.input < after.input < before.input * 1.5
    assert done(replayed(second, None)).usage is None


@pytest.mark.parametrize("version", VERSIONS)
def test_commands_are_pairs_with_their_output(version: str) -> None:
    events = told(f"{version}/commands")
    uses = [event for event in events if isinstance(event, ToolUse)]
    results = {event.id: event for event in events if isinstance(event, ToolResult)}
    assert {(use.name, use.tool) for use in uses} == {("Bash", "command_execution")}
    said = {str(use.input["command"]).split("-lc ")[1]: results[use.id] for use in uses}
    outcomes = {command: (each.output, each.exit_code, each.is_error) for command, each in said.items()}
    assert outcomes == {
        "\"echo hi; printf 'no newline'\"": ("hi\nno newline", 0, False),
        "false": ("", 1, True),
        "'echo to-stderr >&2; exit 3'": ("to-stderr\n", 3, True),
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_changed_files_are_listed_with_their_kinds(version: str) -> None:
    events = told(f"{version}/files")
    assert [event.name for event in events if isinstance(event, ToolUse)] == ["Write", "Edit"]
    changes = [event.changes for event in events if isinstance(event, FileChange)]
    a, gone = "/home/agent/work/a.txt", "/home/agent/work/gone.txt"
    assert [set(each) for each in changes] == [
        {FileDiff(a, "add"), FileDiff(gone, "add")},
        {FileDiff(a, "update"), FileDiff(gone, "delete")},
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_mcp_tools_have_qualified_names(version: str) -> None:
    events = told(f"{version}/mcp")
    uses = [(event.name, event.server, event.input) for event in events if isinstance(event, ToolUse)]
    assert uses == [
        ("echo", "probe", {"text": "hello"}),
        ("echo", "probe", {"wrong": 1}),
        ("crash", "probe", {}),
    ]
    results = [event for event in events if isinstance(event, ToolResult)]
    assert [event.is_error for event in results] == [False, True, True]
    assert results[0].output.startswith("echo hello from process")
    assert "Field required" in results[1].output
    assert "Transport closed" in results[2].output


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plan_is_emitted_whenever_it_changes(version: str) -> None:
    plans = [event for event in told(f"{version}/plan") if isinstance(event, Plan)]
    assert [sum(step.status == "completed" for step in plan.steps) for plan in plans] == [0, 1, 3]
    assert plans[1].steps[:2] == (PlanStep("look", "completed"), PlanStep("write", "pending"))
    assert plans[0].name == "TodoWrite"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_search_is_a_pair(version: str) -> None:
    events = told(f"{version}/search")
    (use,) = [event for event in events if isinstance(event, ToolUse)]
    assert (use.name, use.tool, use.input) == ("WebSearch", "web_search", {"query": "basalt density"})


@pytest.mark.parametrize("version", VERSIONS)
def test_a_retry_is_a_warning(version: str) -> None:
    events = told(f"{version}/retried")
    assert [event.will_retry for event in events if isinstance(event, RunWarning)] == [True]
    assert not [event for event in events if isinstance(event, Error)]
    assert (done(events).stop_reason, done(events).text) == ("completed", "Cut off here and said again.")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rejected_credential_is_one_fatal_error(version: str) -> None:
    events = told(f"{version}/refused")
    (fatal,) = [event for event in events if isinstance(event, Error) and event.fatal]
    assert fatal.code == "UNAUTHORIZED"
    assert (done(events).stop_reason, done(events).error) == ("failed", fatal)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_failure_keeps_the_earlier_events(version: str) -> None:
    events = told(f"{version}/failed")
    assert [event.output for event in events if isinstance(event, ToolResult)] == ["before\n"]
    (fatal,) = [event for event in events if isinstance(event, Error) and event.fatal]
    assert fatal.code == "CONTEXT_WINDOW_EXCEEDED"
    assert done(events).error == fatal


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stopped_run_closes_what_is_open(version: str) -> None:
    events = told(f"{version}/stopped")
    assert [event.output for event in events if isinstance(event, ToolResult)] == [NO_RESULT]
    assert (done(events).stop_reason, done(events).text, done(events).error) == ("interrupted", "Now.", None)
    assert done(told(f"{version}/stopped_in_words")).stop_reason == "interrupted"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_command_that_outlives_its_turn_has_a_result_all_the_same(version: str) -> None:
    events = told(f"{version}/outlived")
    assert [(event.output, event.is_error) for event in events if isinstance(event, ToolResult)] == [(NO_RESULT, True)]
    assert done(events).stop_reason == "completed"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_warning_ends_nothing(version: str) -> None:
    events = told(f"{version}/unknown_model")
    assert not [event for event in events if isinstance(event, Error)]
    assert not [event for event in events if isinstance(event, RunWarning) and event.will_retry]
    assert done(events).stop_reason == "completed"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_cut_anywhere_fails_with_one_end(version: str) -> None:
    (run,) = runs_of(f"{version}/commands")
    for cut in range(len(run.lines)):
        events = replayed(Run(run.lines[:cut], 101))
        check_balance(events)
        error = done(events).error
        assert error is not None
        assert error.code == "PROCESS_EXITED"
        assert "exit code 101" in error.message


def line(kind: str, **fields: object) -> str:
    return json.dumps({"type": kind, **fields})


def item(stage: str, **fields: object) -> str:
    return line(f"item.{stage}", item=fields)


def events_of(*lines: str | bytes, exit_code: int | None = 0) -> list[AgentEvent]:
    run = ExecConverter(clock=lambda: 0.0)
    return [event for each in lines for event in run.feed(each)] + finish(run, exit_code)


ENDED: Final = line("turn.completed")


def end(text: str = "", session: str | None = None, usage: TokenCounts | None = None) -> Done:
    return Done(text, session, 0, usage, "completed")


def test_orphans_and_duplicates_become_pairs() -> None:
    command: Mapping[str, object] = {"type": "command_execution", "command": "true", "aggregated_output": "x"}
    events = events_of(
        item("completed", id="orphan", **command, exit_code=0, status="completed"),
        item("started", id="twice", **command),
        item("started", id="twice", **command),
        item("completed", id="twice", **command, exit_code=0, status="completed"),
        item("completed", id="twice", **command, exit_code=1, status="failed"),
        item("started", id="twice", **command),
        ENDED,
    )
    used: JsonObject = {"command": "true"}
    assert events == [
        ToolUse("orphan", "Bash", "command_execution", used),
        ToolResult("orphan", "x", is_error=False, exit_code=0),
        ToolUse("twice", "Bash", "command_execution", used),
        ToolResult("twice", "x", is_error=False, exit_code=0),
        end(),
    ]


def test_a_skipped_line_is_reported() -> None:
    lines = ExecConverter()
    assert lines.skipped(5_000) == [RunWarning("skipped a line of 5000 bytes, which exceeds the limit")]
    assert done(lines.finish(process_exit_error(0))).stop_reason == "failed"
    assert lines.skipped(5_000) == []


def test_unknown_types_are_passed_through() -> None:
    strange, stranger = {"type": "moon.risen", "phase": 3}, {"id": "x", "type": "dance", "steps": ["a"]}
    assert events_of(json.dumps(strange), item("started", **stranger), ENDED) == [
        UnmappedEvent("moon.risen", {"type": "moon.risen", "phase": 3}),
        UnmappedEvent("dance", {"type": "item.started", "item": {"id": "x", "type": "dance", "steps": ["a"]}}),
        end(),
    ]


def test_items_without_ids_are_passed_through() -> None:
    events = events_of(item("completed", type="agent_message", text="ok"), ENDED)
    assert [type(event) for event in events] == [UnmappedEvent, Done]


def test_only_the_first_of_several_reasons_is_fatal() -> None:
    first, second = Error("A", "OTHER", fatal=True), Error("B", "OTHER", fatal=False)
    failed = Done("", None, 0, None, "failed", Error("B", "OTHER", fatal=True))
    last = line("turn.failed", error={"message": "B"})
    assert events_of(line("error", message="A"), last) == [first, second, failed]
    assert events_of(line("error", message="A"), line("error", message="B"), last) == [first, second, failed]
    assert events_of(line("error", message="B"), line("error", message="B"), last) == [failed.error, failed]


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        "  ",
        "WARNING: proceeding",
        b"\xff\xfe{}",
        "[" * 100_000,
        "[1]",
        "3",
        '{"type": "turn.comp',
        "1" * 5000,
        "null",
    ],
)
def test_lines_that_are_no_events_are_tolerated(noise: bytes | str) -> None:
    assert events_of(noise, item("completed", id="m", type="agent_message", text="ok"), ENDED) == [
        Text("m", "ok"),
        AgentMessage("m", "ok"),
        end("ok"),
    ]


@pytest.mark.parametrize(
    "odd",
    [
        line("item.completed"),
        line("item.completed", item=[]),
        item("completed", id="a", type="agent_message", text=3),
        item("started", id="a", type="command_execution"),
        line("thread.started"),
        line("error"),
        "{}",
    ],
)
def test_a_line_of_an_odd_shape_is_passed_through(odd: str) -> None:
    events = events_of(odd, ENDED)
    assert [type(event) for event in events] == [UnmappedEvent, Done]


def test_an_aborted_run_has_a_reason() -> None:
    run = ExecConverter()
    run.feed(line("thread.started", thread_id="t"))
    run.feed(item("started", id="c", type="command_execution", command="sleep"))
    result, error, last = run.finish(failure=WATCHDOG)
    assert result == ToolResult("c", NO_RESULT, is_error=True, status="failed")
    assert error == Error("no line for 300 s", "WATCHDOG_TIMEOUT", fatal=True)
    assert isinstance(last, Done)
    assert (last.stop_reason, last.session_id, last.error) == ("failed", "t", error)
    assert run.finish() == []
    assert run.feed(item("completed", id="m", type="agent_message", text="late")) == []


def test_a_session_that_codex_began_instead_is_not_the_run_s() -> None:
    run = ExecConverter()
    run.feed(line("thread.started", thread_id="another"))
    last = done(run.finish(failure=TurnError("none", NO_SESSION, None, None)))
    assert last.session_id is None
    assert last.error == Error("none", "SESSION_NOT_FOUND", fatal=True)


def test_a_completed_turn_stays_completed_if_the_process_fails() -> None:
    for outcome in ({"failure": WATCHDOG}, {"stopped": True}):
        run = ExecConverter()
        run.feed(ENDED)
        assert run.ended
        assert done(run.finish(**outcome)).stop_reason == "completed"


IDS: Final = st.sampled_from(["a", "b", "c", None])
STAGES: Final = st.sampled_from(["started", "updated", "completed"])
ITEMS: Final = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["agent_message", "reasoning"]), "text": st.text()}),
    st.fixed_dictionaries(
        {
            "type": st.just("command_execution"),
            "command": st.text(),
            "aggregated_output": st.text(),
            "exit_code": st.none() | st.integers(-1, 2),
            "status": st.sampled_from(["in_progress", "completed", "failed", "declined", "new"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("file_change"),
            "changes": st.lists(st.fixed_dictionaries({"path": st.text(), "kind": st.sampled_from(["add", "update"])})),
            "status": st.sampled_from(["completed", "failed"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("mcp_tool_call"),
            "tool": st.text(),
            "arguments": st.none() | st.integers() | st.dictionaries(st.text(), st.integers()),
            "status": st.sampled_from(["completed", "failed"]),
        }
    ),
    st.fixed_dictionaries({"type": st.just("web_search"), "query": st.text()}),
    st.fixed_dictionaries({"type": st.just("todo_list"), "items": st.just([{"text": "a", "completed": True}])}),
    st.fixed_dictionaries({"type": st.just("error"), "message": st.text()}),
    st.fixed_dictionaries({"type": st.text()}),
)


@st.composite
def item_lines(draw: st.DrawFn) -> str:
    id_ = draw(IDS)
    fields = draw(ITEMS) | ({} if id_ is None else {"id": id_})
    return json.dumps({"type": f"item.{draw(STAGES)}", "item": fields})


LINES: Final = st.one_of(
    item_lines(),
    item_lines(),
    st.sampled_from(
        [
            line("thread.started", thread_id="t"),
            line("turn.started"),
            ENDED,
            line("turn.failed", error={"message": "no"}),
            line("error", message="no"),
            line("error", message="Reconnecting... 1/5"),
        ]
    ),
    st.text(),
    st.binary(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(LINES, max_size=30), st.none() | st.integers(-15, 1), st.booleans())
def test_any_lines_give_balanced_pairs_and_one_end(lines: list[str | bytes], code: int | None, stopped: bool) -> None:
    run = ExecConverter()
    events = [event for each in lines for event in run.feed(each)]
    assert not [event for event in events if isinstance(event, Done)]
    events += finish(run, code, stopped=stopped)
    check_balance(events)
    assert (done(events).error is not None) == (done(events).stop_reason == "failed")
    errors = [event for event in events if isinstance(event, Error)]
    assert [error.fatal for error in errors].count(True) <= 1
    error = done(events).error
    assert error is None or (error.message, error.code) in [(each.message, each.code) for each in errors]
    for event in events:
        assert as_json(event)["type"] == event.TYPE


# --- Tests `EventRedactor` (`runtimes/convert.py`): secrets in the pieces of a text, and in every other event

KEY = "sk-secret-1"
DONE = Done("", None, 1, None, "interrupted")


def redacted(*events: AgentEvent) -> list[AgentEvent]:
    redactor = EventRedactor(Redactor([KEY]))
    return [each for event in events for each in redactor.redact(event)]


def test_a_secret_that_is_split_between_two_pieces_is_redacted() -> None:
    assert redacted(Text("a", "it is sk-se"), Text("a", "cret-1."), AgentMessage("a", f"it is {KEY}.")) == [
        Text("a", "it is "),
        Text("a", "***."),
        AgentMessage("a", "it is ***."),
    ]


def test_each_item_has_its_own_stream() -> None:
    assert redacted(Text("a", "sk-se"), Text("b", "cret-1"), Reasoning("a", "cret-1"), Text("a", "cret-1")) == [
        Text("b", "cret-1"),
        Reasoning("a", "cret-1"),
        Text("a", "***"),
    ]


def test_the_output_of_a_command_is_redacted() -> None:
    assert redacted(ToolOutput("a", "KEY=sk-"), ToolOutput("a", "secret-1\nX=1")) == [
        ToolOutput("a", "KEY="),
        ToolOutput("a", "***\nX=1"),
    ]


def test_text_that_is_held_back_is_sent_at_the_end_of_its_message_or_of_the_turn() -> None:
    assert redacted(Text("a", "the end: "), Text("a", "s"), AgentMessage("a", "the end: s", "final_answer")) == [
        Text("a", "the end: "),
        Text("a", "s", phase="final_answer"),
        AgentMessage("a", "the end: s", "final_answer"),
    ]
    assert redacted(Text("a", "s"), DONE) == [Text("a", "s"), DONE]
    assert redacted(Text("a", "sk-secret"), DONE) == [Text("a", "***"), DONE]


def test_text_that_is_held_back_is_dropped_if_its_message_is_replaced_or_repeated() -> None:
    again = RunWarning("Reconnecting", will_retry=True)
    assert redacted(Text("a", "x s"), again, Text("b", "k")) == [Text("a", "x "), again, Text("b", "k")]
    assert redacted(Text("a", "x s"), Text("a", f"y {KEY}", replaces=True), AgentMessage("a", f"y {KEY}")) == [
        Text("a", "x "),
        Text("a", "y ***", replaces=True),
        AgentMessage("a", "y ***"),
    ]


@pytest.mark.parametrize(
    "event",
    [
        ToolUse("a", BASH, COMMAND, {"command": f"curl -H {KEY}", "cwd": f"/{KEY}"}),
        ToolUse("a", "tool", "tool", {"deep": [{KEY: KEY}, 1, None, True]}, "server"),
        ToolResult("a", f"x{KEY}", is_error=False),
        FileChange("a", (FileDiff("x", "add", "nothing"), FileDiff(f"/{KEY}", "add", f"{KEY}\n"))),
        Plan((PlanStep(f"use {KEY}", "pending"),), KEY),
        Done(KEY, None, 1, None, "failed", Error(f"bad key {KEY}", "OTHER", fatal=True)),
        UnmappedEvent("x", {"y": KEY}),
    ],
)
def test_every_text_of_an_event_is_redacted(event: AgentEvent) -> None:
    (shown,) = redacted(event)
    assert KEY not in repr(shown)
    assert "***" in repr(shown)
    assert type(shown) is type(event)


def test_an_event_without_a_secret_is_not_copied() -> None:
    event = ToolUse("a", BASH, COMMAND, {"command": "ls"})
    assert redacted(event)[0] is event
    assert redact_value(event, Redactor([KEY])) is event
    text = Text("a", KEY)
    assert EventRedactor(Redactor()).redact(text)[0] is text


# --- Tests `EventConverter` (`runtimes/convert.py`) with recordings of the app-server and with single events

COMPLETED = TurnCompleted("completed", None, None)
FULL = TurnError("limit", "usageLimitExceeded", None, None)


@pytest.mark.parametrize("recording", THREAD_RECORDINGS)
def test_recordings_of_the_app_server_become_balanced_streams(recording: str) -> None:
    for turn in replays_of(recording):
        stream = EventConverter()
        events = [said for event in turn.events for said in stream.convert(event)] + stream.finish()
        check_balance(events)
        assert not [event for event in events if isinstance(event, UnmappedEvent)]
        end = done(events)
        assert end.text == turn.answer
        if turn.ends:
            assert end.stop_reason == turn.ends[-1].status
        whole = {said.item_id: said.text for said in turn.events if isinstance(said, MessageCompleted)}
        texts = texts_of(events)
        for item, text in whole.items():
            assert texts.get(item, "") == text or TRIMMED in text + texts[item]


def said_of(*events: TurnEvent, used_before: TokenUsage | None = NONE_USED) -> Sequence[object]:
    stream = EventConverter(used_before, clock=lambda: 0.0)
    return [said for event in events for said in stream.convert(event)] + list(stream.finish())


def thread_end(text: str = "") -> Done:
    return Done(text, None, 0, None, "completed")


def test_streamed_text_is_not_repeated() -> None:
    said = said_of(MessageDelta("m", "Hel"), MessageCompleted("m", "Hello", None), MessageDelta("m", "late"), COMPLETED)
    assert said == [Text("m", "Hel"), Text("m", "lo"), AgentMessage("m", "Hello"), thread_end("Hello")]


def test_sections_of_reasoning_are_separated_and_not_repeated() -> None:
    said = said_of(
        ReasoningDelta("r", 0, "a"),
        ReasoningDelta("r", 0, "b"),
        ReasoningDelta("r", 1, "c"),
        ReasoningCompleted("r", ("ab", "c")),
        ReasoningCompleted("s", ("once",)),
        COMPLETED,
    )
    texts = ["a", "b", "\n\nc"]
    assert said == [
        *(Reasoning("r", text) for text in texts),
        ReasoningSummary("r", ("ab", "c")),
        Reasoning("s", "once"),
        ReasoningSummary("s", ("once",)),
        thread_end(),
    ]


def test_a_failure_is_emitted_once() -> None:
    error = Error("limit", "USAGE_LIMIT_EXCEEDED", fatal=True)
    failed = Done("", None, 0, None, "failed", error)
    assert said_of(ErrorReported(FULL), TurnCompleted("failed", FULL, None)) == [error, failed]
    assert said_of(TurnCompleted("failed", FULL, None)) == [error, failed]
    assert said_of(ErrorReported(FULL)) == [error, failed]


def test_a_missing_end_is_a_failure() -> None:
    *_, last = said_of(CommandStarted("c", "ls", ""))
    assert isinstance(last, Done)
    assert last.error is not None
    assert (last.stop_reason, last.error.code) == ("failed", "NO_END")


def test_an_interrupted_turn_closes_its_tools() -> None:
    said = said_of(ToolCallStarted("t", "srv", "echo", "words"), TurnCompleted("interrupted", None, None))
    assert said == [
        ToolUse("t", "echo", "echo", {"arguments": "words"}, "srv"),
        ToolResult("t", NO_RESULT, is_error=True, status="failed"),
        Done("", None, 0, None, "interrupted"),
    ]


def test_a_further_turn_of_the_run_counts() -> None:
    *_, last = said_of(COMPLETED, TurnStarted(), TurnCompleted("interrupted", None, None))
    assert isinstance(last, Done)
    assert last.stop_reason == "interrupted"


def test_other_events_are_converted() -> None:
    finished = ToolCallCompleted("t", None, "look", None, "no", True, Status.FAILED, 5)
    said = said_of(
        PlanUpdated((CodexStep("a", "inProgress"),), "why"),
        WarningReported("careful", will_retry=False),
        finished,
        UnknownEvent("x/y", {"a": 1}),
        COMPLETED,
    )
    assert said == [
        Plan((PlanStep("a", "in_progress"),), "why"),
        RunWarning("careful"),
        ToolUse("t", "look", "look", {}),
        ToolResult("t", "no", is_error=True, duration_ms=5, status="failed"),
        UnmappedEvent("x/y", {"a": 1}),
        thread_end(),
    ]


def test_a_message_has_its_phase_from_its_start() -> None:
    said = said_of(
        MessageStarted("m", "commentary"), MessageDelta("m", "I"), MessageCompleted("m", "I", None), COMPLETED
    )
    assert said[:2] == [Text("m", "I", phase="commentary"), AgentMessage("m", "I", "commentary")]


def test_output_and_diffs_are_sent_as_they_grow() -> None:
    said = said_of(CommandStarted("c", "ls", ""), CommandOutput("c", "a\n"), DiffUpdated("+x"), COMPLETED)
    assert said[1:3] == [ToolOutput("c", "a\n"), RunDiff("+x")]


def test_a_resumed_sessions_tokens_are_those_of_its_newest_call() -> None:
    count = TokenUsage(120, 100, 10, 20, 5)
    used = CodexUsage(count, TokenUsage(12, 10, 1, 2, 0))
    session = TokenCounts(100, 10, 20, 5)
    assert said_of(used)[0] == Usage(session, session)
    assert said_of(used, used_before=None)[0] == Usage(TokenCounts(10, 1, 2, 0), session)
    assert said_of(used, used_before=replace(count))[0] == Usage(TokenCounts(0, 0, 0, 0), session)
    untold = CodexUsage(count)
    assert said_of(untold, used_before=None)[0] == Usage(None, session)


@pytest.mark.parametrize(
    ("events", "answer"),
    [
        ([], ""),
        ([MessageDelta("a", "he"), MessageDelta("a", "llo")], "hello"),
        ([MessageStarted("a", None), MessageDelta("a", "hel"), MessageCompleted("a", "hello", None)], "hello"),
        ([MessageCompleted("a", "hello", None), MessageDelta("a", "late")], "hello"),
        ([MessageCompleted("a", "first", None), MessageCompleted("b", "second", None)], "second"),
        (
            [MessageCompleted("a", "answer", "final_answer"), MessageCompleted("b", "by the way", "commentary")],
            "answer",
        ),
        ([MessageCompleted("a", "looking", "commentary"), MessageStarted("b", None)], "looking"),
        ([MessageCompleted("a", "looking", None), MessageStarted("b", None), MessageDelta("b", "do")], "do"),
        ([MessageCompleted("a", "hello", None), MessageCompleted("b", "", None)], "hello"),
        ([MessageDelta("a", "hal"), WarningReported("again", will_retry=True)], ""),
        (
            [MessageCompleted("a", "one", None), MessageDelta("b", "hal"), WarningReported("again", will_retry=True)],
            "one",
        ),
        ([TurnCompleted("completed", None, MessageCompleted("a", "hello", None))], "hello"),
        (
            [
                MessageCompleted("a", "hello", None),
                TurnCompleted("completed", None, MessageCompleted("a", "hello", None)),
            ],
            "hello",
        ),
    ],
)
def test_the_answer_so_far(events: list[TurnEvent], answer: str) -> None:
    stream = EventConverter()
    for event in events:
        stream.convert(event)
    assert stream.answer == answer
