"""The options of a codex thread, and the check that codex applies them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from codex_workspace.common.errors import ProtocolError
from codex_workspace.common.values import JsonObject, JsonValue, nested_or_empty, text_or_none
from codex_workspace.config.prompts import Instructions
from codex_workspace.protocol.mcp_status import ExpectedServers

SANDBOX_TYPES: Final = {
    "read-only": "readOnly",
    "workspace-write": "workspaceWrite",
    "danger-full-access": "dangerFullAccess",
}
"""The sandbox mode in requests, and its name in codex's results."""


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """The options of a thread; sent at start and at every resume, because codex does not store all of them.

    profile: codex's permission profile that defines the sandbox; `sandbox` is then only compared.
    """

    cwd: Path
    model: str
    model_provider: str
    sandbox: str
    approval_policy: str
    effort: str | None = None
    instructions: Instructions = field(default_factory=Instructions)
    tools: tuple[JsonObject, ...] = ()
    servers: ExpectedServers = field(default_factory=ExpectedServers)
    profile: str | None = None

    def params(self) -> JsonObject:
        """Return the fields of `thread/start` and `thread/resume`."""
        return {
            "cwd": str(self.cwd),
            "model": self.model,
            "modelProvider": self.model_provider,
            **({"permissions": self.profile} if self.profile else {"sandbox": self.sandbox}),
            "approvalPolicy": self.approval_policy,
            "developerInstructions": self.instructions.text or None,
            **({"config": config} if (config := self.servers.config()) else {}),
        }

    def check_applied(self, result: JsonValue) -> None:
        """Compare the sandbox that codex reports with the requested one.

        Raises:
            ProtocolError: they differ.
        """
        fields = result if isinstance(result, dict) else {}
        sandbox, requested = text_or_none(nested_or_empty(fields, "sandbox"), "type"), SANDBOX_TYPES[self.sandbox]
        if sandbox != requested:
            raise ProtocolError(f"codex runs the thread with sandbox {sandbox} instead of {requested}")
        profile = text_or_none(nested_or_empty(fields, "activePermissionProfile"), "id")
        if self.profile is not None and profile != self.profile:
            raise ProtocolError(f"codex runs the thread with the profile {profile} instead of {self.profile}")


def id_in(result: JsonValue, name: str) -> str:
    """Return `result[name]["id"]`, the id of the thread or turn in a result.

    Raises:
        ProtocolError: the result has no such id.
    """
    id_ = text_or_none(nested_or_empty(result, name), "id") if isinstance(result, dict) else None
    if id_ is None:
        raise ProtocolError(f"codex's response lacks the id of the {name}")
    return id_
