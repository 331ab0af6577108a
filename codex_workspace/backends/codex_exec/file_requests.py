"""What the model asks of its sender's task by our own tools, where each turn is a `codex exec`: files handed over.

The app-server asks over its pipe, and so the turn's reader hears of it. A `codex exec` calls our MCP server instead,
which knows the caller and no turn; here the two meet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio

from codex_workspace.backends.codex_exec.turn import ExecTurn
from codex_workspace.common.errors import ToolRefused
from codex_workspace.common.values import JsonObject
from codex_workspace.runtimes.backend import HANDOVER_TOOL, DynamicToolCall, ToolCaller

NO_TURN: Final = "There is no message at work here any more, so there is nobody to hand a file to."


@dataclass(slots=True)
class ExpectedTurn:
    """A turn that is about to begin; `turn` is None until it has, and where it never does."""

    turn: ExecTurn | None = None
    is_known: anyio.Event = field(default_factory=anyio.Event)

    def begun(self, turn: ExecTurn) -> None:
        """Let calls through to the turn."""
        self.turn = turn
        self.is_known.set()


class FileRequests:
    """The running turns, by on whose behalf they work; each caller has one at a time."""

    def __init__(self) -> None:
        self._turns: dict[ToolCaller, ExpectedTurn] = {}

    @contextmanager
    def expecting(self, caller: ToolCaller) -> Iterator[ExpectedTurn]:
        """Let calls of `caller` wait for a turn, which the block begins; they are refused once it is left."""
        expected = self._turns[caller] = ExpectedTurn()
        try:
            yield expected
        finally:
            del self._turns[caller]
            expected.is_known.set()
            if expected.turn is not None:
                expected.turn.leave()

    async def hand_over(self, caller: ToolCaller, arguments: JsonObject) -> str:
        """Hand a file to whoever sent the caller's message; return what the model is told.

        Raises:
            ToolRefused: it cannot be, or no turn of the caller's is at work.
        """
        expected = self._turns.get(caller)
        if expected is None:
            raise ToolRefused(NO_TURN)
        # The model may be quicker than the note of its session.
        await expected.is_known.wait()
        result = (
            await expected.turn.serve(DynamicToolCall(HANDOVER_TOOL, arguments)) if expected.turn is not None else None
        )
        match result:
            case {"contentItems": [{"text": str(said)}], "success": True}:
                return said
            case {"contentItems": [{"text": str(said)}], "success": False}:
                raise ToolRefused(said)
            case _:
                raise ToolRefused(NO_TURN)
