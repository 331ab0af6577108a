"""Connects calls of the file tool to the running turn.

The app-server calls the tool over its pipe. `codex exec` calls our MCP server, which knows the caller but not the turn.
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

NO_TURN: Final = "The message has ended, so no file can be handed over."


@dataclass(slots=True)
class ExpectedTurn:
    """A turn that is about to start; `turn` is None until it has started."""

    turn: ExecTurn | None = None
    is_known: anyio.Event = field(default_factory=anyio.Event)

    def begun(self, turn: ExecTurn) -> None:
        """Pass calls to the turn."""
        self.turn = turn
        self.is_known.set()


class FileRequests:
    """The running turns by caller; each caller has one at a time."""

    def __init__(self) -> None:
        self._turns: dict[ToolCaller, ExpectedTurn] = {}

    @contextmanager
    def expecting(self, caller: ToolCaller) -> Iterator[ExpectedTurn]:
        """Let calls of `caller` wait for the turn that the block starts; reject them after the block."""
        expected = self._turns[caller] = ExpectedTurn()
        try:
            yield expected
        finally:
            del self._turns[caller]
            expected.is_known.set()
            if expected.turn is not None:
                expected.turn.leave()

    async def hand_over(self, caller: ToolCaller, arguments: JsonObject) -> str:
        """Hand a file to the sender of the caller's message; return the answer for the model.

        Raises:
            ToolRefused: the file cannot be handed over, or the caller has no running turn.
        """
        expected = self._turns.get(caller)
        if expected is None:
            raise ToolRefused(NO_TURN)
        # The model may call the tool before the session is stored.
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
