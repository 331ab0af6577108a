"""A `Reply` that is given codex's events."""

from codex_workspace.protocol.codex_events import TurnEvent
from codex_workspace.runtimes.convert import EventConverter
from codex_workspace.tasks.replies import A2AEvent, Outcome, Reply, closing_events


class CodexReply(Reply):
    """Converts codex's events as a turn does."""

    def __init__(self) -> None:
        super().__init__("task-1", "context-1")
        self.converter = EventConverter()

    def see(self, event: TurnEvent, now: float) -> list[A2AEvent]:
        """Return what to send for an event of codex."""
        return [each for converted in self.converter.convert(event) for each in self.apply(converted, now)]

    def close(self, outcome: Outcome, final: str | None = None) -> list[A2AEvent]:
        """Return the last events."""
        return closing_events(self.ended(outcome, final))
