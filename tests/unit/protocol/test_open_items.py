"""Items that codex leaves open."""

from codex_workspace.protocol.codex_events import (
    Change,
    CommandFinished,
    CommandStarted,
    FilesChanged,
    FilesChanging,
    ItemStatus,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from codex_workspace.protocol.open_items import OpenItems


def test_every_opening_without_an_end_gets_one_in_order() -> None:
    changes = (Change("/w/a", "add", "x"),)
    items = OpenItems()
    for event in (
        ToolStarted("t", "srv", "echo", {"x": 1}),
        CommandStarted("c", "sleep 9", "/w"),
        TextDelta("m", "text"),
        FilesChanging("f", changes),
    ):
        items.see(event)
    assert items.close() == [
        ToolFinished("t", "srv", "echo", {"x": 1}, "stopped", True, ItemStatus.FAILED, None),
        CommandFinished("c", "sleep 9", "/w", "", None, ItemStatus.FAILED, None),
        FilesChanged("f", changes, ItemStatus.FAILED),
    ]
    assert items.close() == []


def test_what_has_ended_is_not_open() -> None:
    items = OpenItems()
    items.see(CommandStarted("c", "true", "/w"))
    items.see(CommandFinished("c", "true", "/w", "", 0, ItemStatus.COMPLETED, 3))
    items.see(CommandFinished("unheard of", "true", "/w", "", 0, ItemStatus.COMPLETED, 3))
    assert items.close() == []


def test_an_end_that_comes_twice_is_told_once() -> None:
    items = OpenItems()
    items.see(CommandStarted("c", "sleep 9", "/w"))
    stopped = CommandFinished("c", "sleep 9", "/w", "", None, ItemStatus.FAILED, None)
    assert [items.see(stopped), items.see(stopped)] == [True, False]
    assert items.see(CommandFinished("d", "true", "/w", "", 0, ItemStatus.COMPLETED, 3))
