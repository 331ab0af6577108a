"""The items of a turn that have begun and not ended: codex leaves them open when a turn is interrupted."""

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

Opening = CommandStarted | PatchStarted | ToolCallStarted


class OpenItems:
    """Follows a turn's events; `close` gives the endings that codex did not."""

    def __init__(self) -> None:
        self._open: dict[str, Opening] = {}
        self._ended: set[str] = set()

    def apply(self, event: TurnEvent) -> bool:
        """Take note of an item's beginning or end; False for an end that came before.

        A command that is interrupted may end twice: once as its tool call's, once as the process's that is cleaned up.
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
        """Return what an open change of files would do; nothing for any other item."""
        opening = self._open.get(item_id)
        return opening.changes if isinstance(opening, PatchStarted) else ()

    def close(self) -> list[TurnEvent]:
        """Return an ending for each item that is still open, in the order of their beginnings."""
        opened, self._open = self._open, {}
        return [_ending(opening) for opening in opened.values()]


def _ending(opening: Opening) -> TurnEvent:
    match opening:
        case CommandStarted(item_id=item, command=command, cwd=cwd):
            return CommandCompleted(item, command, cwd, "", None, ItemStatus.FAILED, None)
        case PatchStarted(item_id=item, changes=changes):
            return PatchCompleted(item, changes, ItemStatus.FAILED)
        case ToolCallStarted(item_id=item, server=server, tool=tool, arguments=arguments):
            return ToolCallCompleted(item, server, tool, arguments, "stopped", True, ItemStatus.FAILED, None)
