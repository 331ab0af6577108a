"""Items that codex leaves open."""

from codex_workspace.protocol.codex_events import (
    CommandCompleted,
    CommandStarted,
    FilePatch,
    ItemStatus,
    MessageDelta,
    OpenItems,
    PatchCompleted,
    PatchStarted,
    ToolCallCompleted,
    ToolCallStarted,
)


def test_every_opening_without_an_end_gets_one_in_order() -> None:
    changes = (FilePatch("/w/a", "add", "x"),)
    items = OpenItems()
    for event in (
        ToolCallStarted("t", "srv", "echo", {"x": 1}),
        CommandStarted("c", "sleep 9", "/w"),
        MessageDelta("m", "text"),
        PatchStarted("f", changes),
    ):
        items.apply(event)
    assert items.close() == [
        ToolCallCompleted("t", "srv", "echo", {"x": 1}, "stopped", True, ItemStatus.FAILED, None),
        CommandCompleted("c", "sleep 9", "/w", "", None, ItemStatus.FAILED, None),
        PatchCompleted("f", changes, ItemStatus.FAILED),
    ]
    assert items.close() == []


def test_what_has_ended_is_not_open() -> None:
    items = OpenItems()
    items.apply(CommandStarted("c", "true", "/w"))
    items.apply(CommandCompleted("c", "true", "/w", "", 0, ItemStatus.COMPLETED, 3))
    items.apply(CommandCompleted("unheard of", "true", "/w", "", 0, ItemStatus.COMPLETED, 3))
    assert items.close() == []


def test_an_end_that_comes_twice_is_told_once() -> None:
    items = OpenItems()
    items.apply(CommandStarted("c", "sleep 9", "/w"))
    stopped = CommandCompleted("c", "sleep 9", "/w", "", None, ItemStatus.FAILED, None)
    assert [items.apply(stopped), items.apply(stopped)] == [True, False]
    assert items.apply(CommandCompleted("d", "true", "/w", "", 0, ItemStatus.COMPLETED, 3))
