"""What to answer codex's own requests with when nobody is there to ask: a well-formed refusal for each kind.

Every request has to be answered by a *result* of its shape: codex 0.72 hangs for ever on an error, and no version
gives up waiting by itself. Shapes: `codex app-server generate-json-schema`; recordings 0.72 to 0.169.
"""

from typing import Final

from codex_workspace.wire import JsonObject, Request

NOBODY_TO_ASK: Final = "nobody is there to answer; go on without it"
"""What the model reads where a refusal has room for a sentence."""

_REFUSALS: Final[dict[str, JsonObject]] = {
    "item/commandExecution/requestApproval": {"decision": "decline"},
    "item/fileChange/requestApproval": {"decision": "decline"},
    "item/permissions/requestApproval": {"permissions": {}},
    "item/tool/requestUserInput": {"answers": {}},
    "mcpServer/elicitation/request": {"action": "decline"},
    "item/tool/call": {"contentItems": [{"type": "inputText", "text": NOBODY_TO_ASK}], "success": False},
    "execCommandApproval": {"decision": "denied"},
    "applyPatchApproval": {"decision": "denied"},
}


def refuse(request: Request) -> JsonObject | None:
    """Return the refusal for `request`, or None for a kind that is not known: answer that one with an error.

    The token refresh is left unknown on purpose: there is no well-formed refusal of it, and an error ends the turn at
    once where silence would take codex 10 s.
    """
    return _REFUSALS.get(request.method)
