"""The open items of a turn: codex does not complete them when a turn is interrupted."""

from codex_workspace.protocol.codex_events import (
    CommandCompleted,
    CommandStarted,
    FilePatch,
    ItemStatus,
    PatchCompleted,
    PatchStarted,
    ToolCallCompleted,
    ToolCallStarted,
    TurnEvent,
)

StartEvent = CommandStarted | PatchStarted | ToolCallStarted


class OpenItems:
    """Tracks the items of a turn; `close` completes those that codex has not."""

    def __init__(self) -> None:
        self._open: dict[str, StartEvent] = {}
        self._ended: set[str] = set()

    def apply(self, event: TurnEvent) -> bool:
        """Track the start or end of an item; return False for a second end.

        An interrupted command may end twice: as a tool call, and as a process that is cleaned up.
        """
        match event:
            case CommandStarted() | PatchStarted() | ToolCallStarted():
                self._open[event.item_id] = event
            case CommandCompleted() | PatchCompleted() | ToolCallCompleted():
                if event.item_id in self._ended:
                    return False
                self._ended.add(event.item_id)
                self._open.pop(event.item_id, None)
            case _:
                pass
        return True

    def changes(self, item_id: str) -> tuple[FilePatch, ...]:
        """Return the changes of an open patch; nothing for any other item."""
        started = self._open.get(item_id)
        return started.changes if isinstance(started, PatchStarted) else ()

    def close(self) -> list[TurnEvent]:
        """Return an end for each open item, in the order of their starts."""
        opened, self._open = self._open, {}
        return [_end_of(started) for started in opened.values()]


def _end_of(started: StartEvent) -> TurnEvent:
    match started:
        case CommandStarted(item_id=item, command=command, cwd=cwd):
            return CommandCompleted(item, command, cwd, "", None, ItemStatus.FAILED, None)
        case PatchStarted(item_id=item, changes=changes):
            return PatchCompleted(item, changes, ItemStatus.FAILED)
        case ToolCallStarted(item_id=item, server=server, tool=tool, arguments=arguments):
            return ToolCallCompleted(item, server, tool, arguments, "stopped", True, ItemStatus.FAILED, None)
