"""Values and errors of the platform's HTTP API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from codex_workspace.common.errors import AgentError
from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.config.environment import Secret

DeliveryMode = Literal["push", "poll"]


class PlatformError(AgentError):
    """A call to the platform failed. `retry_after_s`: how long the platform wants the agent to wait."""

    retry_after_s: float = 0.0


class PlatformUnauthorized(PlatformError):
    """The platform rejects every token that the agent has."""


class WorkspaceRemoved(PlatformError):
    """The workspace was removed from the platform."""


class CursorLost(PlatformError):
    """The platform does not know the inbox's cursor (any more)."""


class PlatformRejected(PlatformError):
    """The platform rejects this request, and would reject it again; `status` is the HTTP status."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class PlatformBusy(PlatformError):
    """The rate limit is reached, or the other agent is busy; the request had no effect."""

    def __init__(self, sentence: str, retry_after_s: float) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class PlatformUnreachable(PlatformError):
    """The platform does not respond, or fails. `outcome_unknown`: the request may have taken effect."""

    def __init__(self, sentence: str, *, outcome_unknown: bool) -> None:
        super().__init__(sentence)
        self.outcome_unknown = outcome_unknown


class ResponseTooLarge(PlatformUnreachable):
    """The platform's response is larger than the client reads."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"The platform's response has more than {max_bytes} bytes.", outcome_unknown=True)


@dataclass(frozen=True, slots=True)
class Registration:
    """The platform's response to a registration. `inbound_secret`: authenticates the platform's calls to the agent."""

    delivery: DeliveryMode
    inbound_secret: Secret | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """The content of a heartbeat. `error_rate`: between 0 and 1."""

    active_tasks: int
    current_task: str = ""
    error_rate: float = 0.0
    sample_error: str = ""
    uptime_s: int = 0
    wedged: bool = False
    capabilities: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ActivityRow:
    """A row of a workspace's activity.

    created_at: the platform's timestamp, by which rows are ordered. source_id: the sender's workspace, None for the
    user. target_id: the workspace that the row is about. request: the JSON-RPC request, None if it is not an object.
    has_response: the row holds a response, so the message was pushed. seq: a growing number, None before August.
    """

    id: str
    created_at: str
    method: str = ""
    source_id: str | None = None
    summary: str = ""
    request: JsonObject | None = None
    response: JsonValue = None
    has_response: bool = False
    seq: int | None = None
    target_id: str | None = None


@dataclass(frozen=True, slots=True)
class PlatformPeer:
    """An agent that this workspace may send messages to."""

    id: str
    name: str = ""
    role: str = ""
    status: str = ""
    card: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class ProxyReply:
    """The response to a message to another agent. `queued`: the platform delivers it later, without a reply here."""

    queued: bool
    text: str = ""


@dataclass(frozen=True, slots=True)
class Delegation:
    """A task that was given to another agent through the platform."""

    id: str
    target_id: str = ""
    status: str = ""
    result: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class PlatformMemory:
    """A text that the platform stores for the workspace."""

    content: str
    created_at: str = ""
