"""Tables and values of the stand-in platform's store."""

import hashlib
import json
import sqlite3
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from codex_workspace.common.values import JsonObject, JsonValue

Era = Literal["may", "august"]
"""How rows with the same timestamp are ordered: not at all (May 2026), or by a growing number (August 2026)."""

Mode = Literal["push", "poll"]

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS workspaces (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, parent_id TEXT, url TEXT NOT NULL,
    url_is_fixed INTEGER NOT NULL, delivery_mode TEXT NOT NULL, card TEXT NOT NULL, status TEXT NOT NULL,
    removed_at TEXT, talks_to_user INTEGER NOT NULL, token_file TEXT, inbound_secret TEXT NOT NULL,
    heartbeat TEXT NOT NULL, beats INTEGER NOT NULL DEFAULT 0, acked_seq INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS tokens (digest TEXT PRIMARY KEY, workspace_id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS activity (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, workspace_id TEXT NOT NULL,
    activity_type TEXT NOT NULL, source_id TEXT, target_id TEXT, method TEXT, summary TEXT, request_body TEXT,
    response_body TEXT, duration_ms INTEGER, status TEXT NOT NULL, error_detail TEXT, created_at INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS activity_by_time ON activity (workspace_id, created_at, seq);
CREATE TABLE IF NOT EXISTS queue (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, workspace_id TEXT NOT NULL, caller_id TEXT,
    message_id TEXT, body BLOB NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, response TEXT
);
CREATE UNIQUE INDEX IF NOT EXISTS queued_once ON queue (workspace_id, message_id)
    WHERE status IN ('queued', 'dispatched');
CREATE TABLE IF NOT EXISTS delegations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, source_id TEXT NOT NULL,
    target_id TEXT NOT NULL, task TEXT NOT NULL, key TEXT, status TEXT NOT NULL, result TEXT NOT NULL DEFAULT '',
    error TEXT NOT NULL DEFAULT '', created_at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS memories (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, workspace_id TEXT NOT NULL, scope TEXT NOT NULL,
    content TEXT NOT NULL, created_at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS shown (
    number INTEGER PRIMARY KEY AUTOINCREMENT, workspace_id TEXT NOT NULL, how TEXT NOT NULL, text TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT PRIMARY KEY, workspace_id TEXT NOT NULL, content BLOB NOT NULL, acked INTEGER NOT NULL DEFAULT 0
);
"""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A workspace. `beats`: the number of heartbeats; `heartbeat`: the last one."""

    id: str
    name: str
    role: str
    parent_id: str | None
    url: str
    delivery: Mode
    card: JsonObject
    status: str
    removed_at: str | None
    talks_to_user: bool
    token_file: Path | None
    inbound_secret: str
    heartbeat: JsonObject
    beats: int

    @property
    def active_tasks(self) -> int:
        """The running turns that it reported."""
        reported = self.heartbeat.get("active_tasks")
        return reported if isinstance(reported, int) else 0

    @property
    def queues_itself(self) -> bool:
        """Whether it declared the capability `session`: then a message to a busy agent is rejected."""
        metadata = self.heartbeat.get("runtime_metadata")
        capabilities = metadata.get("capabilities") if isinstance(metadata, dict) else None
        return isinstance(capabilities, dict) and capabilities.get("session") is True


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row of the activity to add; bodies are JSON."""

    workspace_id: str
    activity_type: str = "a2a_receive"
    source_id: str | None = None
    target_id: str | None = None
    method: str | None = None
    summary: str = ""
    request: JsonValue = None
    response: JsonValue = None
    duration_ms: int | None = None
    status: str = "ok"
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """A message that waits for a busy agent, byte by byte as it is sent."""

    id: str
    workspace_id: str
    caller_id: str | None
    body: bytes
    attempts: int


@dataclass(frozen=True, slots=True)
class StoredDelegation:
    """A task that one workspace gave another."""

    id: str
    source_id: str
    target_id: str
    task: str
    status: str
    result: str
    error: str
    created_at: str


def workspace_of_row(row: sqlite3.Row) -> Workspace:
    """Read a row of the table `workspaces`."""
    return Workspace(
        id=row["id"],
        name=row["name"],
        role=row["role"],
        parent_id=row["parent_id"],
        url=row["url"],
        delivery=row["delivery_mode"],
        card=json.loads(row["card"]),
        status=row["status"],
        removed_at=row["removed_at"],
        talks_to_user=bool(row["talks_to_user"]),
        token_file=None if row["token_file"] is None else Path(row["token_file"]),
        inbound_secret=row["inbound_secret"],
        heartbeat=json.loads(row["heartbeat"]),
        beats=row["beats"],
    )


def delegation_of_row(row: sqlite3.Row) -> StoredDelegation:
    """Read a row of the table `delegations`."""
    return StoredDelegation(
        row["id"],
        row["source_id"],
        row["target_id"],
        row["task"],
        row["status"],
        row["result"],
        row["error"],
        format_time(row["created_at"]),
    )


def activity_of_row(row: sqlite3.Row, era: Era) -> JsonObject:
    """Return a row of the activity as the platform of an era lists it."""
    fields: JsonObject = {
        name: row[name]
        for name in (
            *("id", "workspace_id", "activity_type", "source_id", "target_id", "method", "summary", "duration_ms"),
            *("status", "error_detail"),
        )
    }
    fields["created_at"] = format_time(row["created_at"])
    for name in ("request_body", "response_body"):
        if row[name] is not None:
            fields[name] = from_json(row[name])
    if era == "august":
        fields["seq"] = row["seq"]
    return fields


def now_us() -> int:
    """Return the time in microseconds since 1970."""
    return time.time_ns() // 1000


def format_time(microseconds: int) -> str:
    """Return a time as Go formats it: without trailing zeros, so that sorting the texts does not sort the times."""
    seconds, rest = divmod(microseconds, 1_000_000)
    fraction = f".{rest:06d}".rstrip("0").rstrip(".")
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}{fraction}Z"


def token_digest(token: str) -> str:
    """Return what is stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def to_json(value: JsonValue) -> str | None:
    """Return JSON for a column; None for no value."""
    return None if value is None else json.dumps(value)


def from_json(text: str | None) -> JsonValue:
    """Return the value of a JSON column."""
    value: JsonValue = None if text is None else json.loads(text)
    return value
