"""A stream's view of the answer: by property for every mode, and which request gets which mode."""

from collections.abc import AsyncGenerator, Sequence

import pytest
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.types import Artifact, Part, Task, TaskArtifactUpdateEvent, TaskState, TaskStatus, TaskStatusUpdateEvent
from a2a.utils.errors import InvalidParamsError
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.a2a_terms import HEADERS, OFFSET
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.a2a_server import AnswerMode, AnswerUpdates
from codex_workspace.server.answer_updates import ANSWER_UPDATES, MODES, AnswerView, answer_updates, shaped


def update(text: str, *, offset: int | None = None, last: bool = False, name: str = "answer") -> Event:
    artifact = Artifact(artifact_id=name, name=name, parts=[Part(text=text)])
    event = TaskArtifactUpdateEvent(artifact=artifact, append=offset is not None, last_chunk=last)
    if offset is not None:
        event.metadata[OFFSET] = offset
    return event


def sent(pieces: Sequence[str], whole: str) -> list[Event]:
    """The events of an executor: pieces, then the whole answer."""
    grown = [update(each, offset=len("".join(pieces[:at])) if at else None) for at, each in enumerate(pieces)]
    return [*grown, update(whole, last=True)]


def shown(mode: AnswerMode, events: Sequence[Event]) -> list[TaskArtifactUpdateEvent]:
    """The updates that a stream brings."""
    view = AnswerView(mode)
    return [each for event in events if isinstance(each := view.of(event), TaskArtifactUpdateEvent)]


def text_of(event: TaskArtifactUpdateEvent) -> str:
    (part,) = event.artifact.parts
    assert part.HasField("text")
    return part.text


def kept(updates: Sequence[TaskArtifactUpdateEvent], text: str = "") -> str:
    """What a client has that follows A2A's rule."""
    for each in updates:
        text = text + text_of(each) if each.append else text_of(each)
    return text


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)


@given(st.lists(texts, min_size=1, max_size=8), st.sampled_from([*MODES]))
def test_each_mode_brings_the_answer_and_closes_it_once(pieces: list[str], mode: AnswerMode) -> None:
    whole = "".join(pieces)
    updates = shown(mode, sent(pieces[:-1], whole))
    assert kept(updates) == whole
    assert [each.last_chunk for each in updates] == [False] * (len(updates) - 1) + [True]
    printed = "".join(map(text_of, updates))
    match mode:
        case "pieces":
            assert printed == whole
        case "pieces-then-whole":
            assert printed == "".join(pieces[:-1]) + whole
        case "whole":
            assert len(updates) == 1


@given(st.lists(texts, min_size=1, max_size=8), st.data())
def test_a_reader_who_joins_late_gets_the_rest(pieces: list[str], data: st.DataObject) -> None:
    joined = data.draw(st.integers(0, len(pieces)))
    known, whole = "".join(pieces[:joined]), "".join(pieces)
    snapshot = Task(artifacts=[Artifact(artifact_id="answer", parts=[Part(text=known)])] if joined else [])
    updates = shown("pieces", [snapshot, *sent(pieces, whole)[joined:]])
    assert known + "".join(map(text_of, updates)) == whole
    assert kept(updates, known) == whole


def test_the_last_piece_says_where_it_belongs() -> None:
    last = shown("pieces", sent(["ab", "c"], "abcde"))[-1]
    assert (text_of(last), last.append, last.last_chunk, last.metadata[OFFSET]) == ("de", True, True, 3)
    assert (last.artifact.artifact_id, last.artifact.name) == ("answer", "answer")


def test_an_answer_that_was_sent_completely_is_closed_with_an_empty_piece() -> None:
    last = shown("pieces", sent(["ab", "c"], "abc"))[-1]
    assert (text_of(last), last.append, last.last_chunk) == ("", True, True)


@pytest.mark.parametrize("whole", ["", "other", "a"])
def test_an_answer_that_differs_from_its_pieces_replaces_them(whole: str) -> None:
    last = shown("pieces", sent(["ab"], whole))[-1]
    assert (text_of(last), last.append, last.last_chunk) == (whole, False, True)


def test_text_that_was_taken_back_is_not_counted() -> None:
    updates = shown("pieces", [update("a long remark"), update("ab"), update("abc", last=True)])
    assert [text_of(each) for each in updates] == ["a long remark", "ab", "c"]


def test_the_stream_after_a_question_continues_the_one_before() -> None:
    updates = shown("pieces", [update("de", offset=3), update("abcdefg", last=True)])
    assert ["".join(map(text_of, updates)), kept(updates, "abc")] == ["defg", "abcdefg"]


def test_a_snapshot_has_no_unfinished_answer_if_the_whole_comes_later() -> None:
    artifacts = [Artifact(artifact_id=name, parts=[Part(text=name)]) for name in ("patch-1", "answer")]
    task = Task(id="t", status=TaskStatus(state=TaskState.TASK_STATE_WORKING), artifacts=artifacts)
    seen = AnswerView("whole").of(task)
    assert isinstance(seen, Task)
    assert (seen.id, [each.artifact_id for each in seen.artifacts]) == ("t", ["patch-1"])
    assert len(task.artifacts) == 2, "the task of all readers"
    task.status.state = TaskState.TASK_STATE_COMPLETED
    assert AnswerView("whole").of(task) == task


@pytest.mark.parametrize("mode", [*MODES])
async def test_other_events_pass(mode: AnswerMode) -> None:
    others = [TaskStatusUpdateEvent(), update("a", name="patch-1"), update("b", offset=1, name="output-1")]

    async def events() -> AsyncGenerator[Event, None]:
        for each in others:
            yield each

    assert [each async for each in shaped(events(), mode)] == others


# --- Which mode ---


def context(agent: str = "", version: str = "1.0", extensions: Sequence[str] = ()) -> ServerCallContext:
    headers = {"user-agent": agent, "a2a-version": version}
    asked = {f"{ANSWER_UPDATES}:{mode}" for mode in extensions}
    return ServerCallContext(state={HEADERS: headers}, requested_extensions=asked)


def about(content: JsonObject) -> Struct:
    return ParseDict(content, Struct())


@pytest.mark.parametrize(
    ("agent", "version", "mode"),
    [
        ("python-httpx/0.28.1", "1.0", "pieces-then-whole"),
        ("python-httpx/0.28.1", "0.3", "whole"),
        ("python-httpx/0.28.1", "", "whole"),
        ("agent-framework-python/1.0 python-httpx/0.27.2", "1.0", "pieces"),
        ("Go-http-client/1.1", "1.0", "pieces"),
        ("node", "0.3", "pieces"),
        ("grpc-python-asyncio/1.76.0 grpc-c/51.0.0", "0.3", "pieces"),
        ("curl/8.5.0", "1.0", "pieces"),
        ("", "1.0", "pieces"),
    ],
)
def test_a_request_without_a_wish_gets_the_mode_of_its_client(agent: str, version: str, mode: str) -> None:
    assert answer_updates(context(agent, version), None, "by-client") == mode


@pytest.mark.parametrize(
    ("metadata", "extensions", "usual", "mode"),
    [
        ({ANSWER_UPDATES: "whole"}, ["pieces"], "pieces-then-whole", "whole"),
        ({"another": "whole"}, ["pieces"], "pieces-then-whole", "pieces"),
        ({}, ["pieces"], "whole", "pieces"),
        ({}, ["unknown"], "whole", "whole"),
        ({}, [], "pieces", "pieces"),
        ({}, [], "by-client", "pieces-then-whole"),
    ],
)
def test_the_request_is_asked_first_and_then_the_operator(
    metadata: JsonObject, extensions: Sequence[str], usual: AnswerUpdates, mode: str
) -> None:
    asked = context("python-httpx/0.28.1", extensions=extensions)
    assert answer_updates(asked, about(metadata), usual) == mode


@pytest.mark.parametrize("wish", ["by-client", "WHOLE", 1, None, {}])
def test_an_unknown_wish_is_refused(wish: JsonValue) -> None:
    with pytest.raises(InvalidParamsError, match="must be one of pieces, pieces-then-whole, whole"):
        answer_updates(context(), about({ANSWER_UPDATES: wish}), "by-client")


def test_a_call_without_headers_gets_pieces() -> None:
    assert answer_updates(ServerCallContext(), None, "by-client") == "pieces"
