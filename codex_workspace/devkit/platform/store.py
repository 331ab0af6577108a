"""What the stand-in of the platform keeps, in SQLite: workspaces, their activity, and what is on its way to them.

Who may ask for what, and what is sent to agents, is left to `platform_stand_in` and `stand_in_delivery`. The calls are
synchronous: a few rows of a local file take less than a change of threads.
"""

import hashlib
import json
import secrets
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from codex_workspace.common.values import JsonObject, JsonValue

Era = Literal["may", "august"]
"""How rows of the same time are told apart: not at all (May 2026), or by a number that grows (August 2026)."""

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
    """A workspace as the platform has it; `beats`: how many heartbeats came, `heartbeat`: the last one."""

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
        """Return how many turns it said to be running."""
        told = self.heartbeat.get("active_tasks")
        return told if isinstance(told, int) else 0

    @property
    def queues_itself(self) -> bool:
        """Tell whether it declared the capability `session`: who is busy is then told so."""
        metadata = self.heartbeat.get("runtime_metadata")
        capabilities = metadata.get("capabilities") if isinstance(metadata, dict) else None
        return isinstance(capabilities, dict) and capabilities.get("session") is True


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row of activity to be written; bodies are JSON."""

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
    """A message that waits for its agent to have time: the very bytes that are to be sent."""

    id: str
    workspace_id: str
    caller_id: str | None
    body: bytes
    attempts: int


@dataclass(frozen=True, slots=True)
class StoredDelegation:
    """Work that one workspace gave another."""

    id: str
    source_id: str
    target_id: str
    task: str
    status: str
    result: str
    error: str
    created_at: str


class CursorGone(LookupError):
    """There is no row of this id for this workspace."""


class PlatformStore:
    """All of it; one connection, used by one event loop."""

    def __init__(self, file: Path | None) -> None:
        self._db = sqlite3.connect(":memory:" if file is None else file, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        # What a process has committed outlives the process; the stand-in promises nothing about power cuts.
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextmanager
    def _together(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _one(self, query: str, *values: object) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute(query, values).fetchone()
        return row

    # --- Workspaces ---

    def add_workspace(
        self,
        workspace_id: str,
        *,
        delivery: Mode,
        name: str = "",
        role: str = "",
        parent_id: str | None = None,
        url: str = "",
        token_file: Path | None = None,
    ) -> None:
        """Write a workspace down; one that is there stays as it is. A `url` that is given here is kept for good."""
        self._db.execute(
            "INSERT OR IGNORE INTO workspaces (id, name, role, parent_id, url, url_is_fixed, delivery_mode, card,"
            " status, talks_to_user, token_file, inbound_secret, heartbeat)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, '{}', 'provisioning', 1, ?, ?, '{}')",
            (
                workspace_id,
                name or workspace_id[:8],
                role,
                parent_id,
                url,
                bool(url),
                delivery,
                None if token_file is None else str(token_file),
                secrets.token_urlsafe(24),
            ),
        )

    def workspace(self, workspace_id: str) -> Workspace | None:
        """Return a workspace, a removed one too."""
        row = self._one("SELECT * FROM workspaces WHERE id = ?", workspace_id)
        return None if row is None else _workspace(row)

    def workspaces(self) -> list[Workspace]:
        """Return all that are not removed."""
        rows = self._db.execute("SELECT * FROM workspaces WHERE status != 'removed' ORDER BY name, id")
        return [_workspace(row) for row in rows]

    def register(self, workspace_id: str, card: JsonObject, url: str, delivery: Mode) -> None:
        """Take over what a workspace says of itself."""
        self._db.execute(
            "UPDATE workspaces SET card = ?, delivery_mode = ?, status = 'online',"
            " url = CASE WHEN url_is_fixed THEN url ELSE ? END WHERE id = ? AND status != 'removed'",
            (json.dumps(card), delivery, url, workspace_id),
        )

    def beat(self, workspace_id: str, heartbeat: JsonObject, status: str) -> None:
        """Take note of a heartbeat."""
        self._db.execute(
            "UPDATE workspaces SET heartbeat = ?, beats = beats + 1, status = ? WHERE id = ? AND status != 'removed'",
            (json.dumps(heartbeat), status, workspace_id),
        )

    def remove(self, workspace_id: str) -> None:
        """Remove a workspace: its tokens are void, and it is not brought back by registering."""
        with self._together():
            removed = _text_of_time(_now())
            self._db.execute(
                "UPDATE workspaces SET status = 'removed', removed_at = ? WHERE id = ?", (removed, workspace_id)
            )
            self._db.execute("DELETE FROM tokens WHERE workspace_id = ?", (workspace_id,))

    def let_talk_to_user(self, workspace_id: str, *, allowed: bool) -> None:
        """Say whether a workspace may notify the user."""
        self._db.execute("UPDATE workspaces SET talks_to_user = ? WHERE id = ?", (allowed, workspace_id))

    # --- Tokens ---

    def mint(self, workspace_id: str, token: str | None = None) -> str:
        """Return a workspace's new token; those that it has stay good."""
        minted = token or secrets.token_urlsafe(32)
        self._db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", (_digest(minted), workspace_id))
        return minted

    def revoke(self, workspace_id: str) -> None:
        """Make all tokens of a workspace void."""
        self._db.execute("DELETE FROM tokens WHERE workspace_id = ?", (workspace_id,))

    def has_token(self, workspace_id: str) -> bool:
        """Tell whether a workspace has a token that is good."""
        return self._one("SELECT 1 FROM tokens WHERE workspace_id = ?", workspace_id) is not None

    def owner_of(self, token: str) -> str | None:
        """Return whose token it is; a removed workspace's is nobody's."""
        row = self._one(
            "SELECT workspace_id FROM tokens JOIN workspaces ON workspaces.id = workspace_id"
            " WHERE digest = ? AND status != 'removed'",
            _digest(token),
        )
        return None if row is None else row["workspace_id"]

    # --- Activity ---

    def write(self, new: NewRow, *, at_same_time: bool = False) -> str:
        """Write a row and return its id; `at_same_time`: with the time of the workspace's row before."""
        row_id, created_at = str(uuid.uuid4()), _now()
        if at_same_time:
            last = self._one("SELECT max(created_at) AS at FROM activity WHERE workspace_id = ?", new.workspace_id)
            created_at = created_at if last is None or last["at"] is None else last["at"]
        self._db.execute(
            "INSERT INTO activity (id, workspace_id, activity_type, source_id, target_id, method, summary,"
            " request_body, response_body, duration_ms, status, error_detail, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row_id,
                new.workspace_id,
                new.activity_type,
                new.source_id,
                new.target_id,
                new.method,
                new.summary,
                _dumped(new.request),
                _dumped(new.response),
                new.duration_ms,
                new.status,
                new.error,
                created_at,
            ),
        )
        return row_id

    def page(
        self,
        workspace_id: str,
        era: Era,
        *,
        since_id: str | None = None,
        since_s: int | None = None,
        before_us: int | None = None,
        kind: str | None = None,
        source: str | None = None,
        peer_id: str | None = None,
        limit: int = 100,
    ) -> list[JsonObject]:
        """Return rows as the platform does: after a cursor oldest first, else newest first.

        Raises:
            CursorGone: there is no row `since_id` of this workspace.
        """
        wheres, values = ["workspace_id = ?"], list[object]((workspace_id,))
        if kind is not None:
            wheres.append("activity_type = ?")
            values.append(kind)
        if source is not None:
            wheres.append("source_id IS NULL" if source == "canvas" else "source_id IS NOT NULL")
        if peer_id is not None:
            wheres.append("(source_id = ? OR target_id = ?)")
            values += [peer_id, peer_id]
        if since_s is not None:
            wheres.append("created_at >= ?")
            values.append(_now() - since_s * 1_000_000)
        if before_us is not None:
            wheres.append("created_at < ?")
            values.append(before_us)
        order = "created_at DESC, seq DESC"
        if since_id is not None:
            cursor = self._one(
                "SELECT created_at, seq FROM activity WHERE id = ? AND workspace_id = ?", since_id, workspace_id
            )
            if cursor is None:
                raise CursorGone(since_id)
            order = "created_at, seq"
            if era == "may":
                wheres.append("created_at > ?")
                values.append(cursor["created_at"])
            else:
                wheres.append("(created_at, seq) > (?, ?)")
                values += [cursor["created_at"], cursor["seq"]]
        query = f"SELECT * FROM activity WHERE {' AND '.join(wheres)} ORDER BY {order} LIMIT ?"
        return [_activity(row, era) for row in self._db.execute(query, (*values, limit))]

    def prune(self, workspace_id: str, row_ids: Sequence[str] | None = None) -> None:
        """Forget rows, all of the workspace's where none are named."""
        if row_ids is None:
            self._db.execute("DELETE FROM activity WHERE workspace_id = ?", (workspace_id,))
            return
        self._db.executemany(
            "DELETE FROM activity WHERE workspace_id = ? AND id = ?", [(workspace_id, row_id) for row_id in row_ids]
        )

    def acknowledge(self, workspace_id: str, seq: int) -> int:
        """Take note up to which row a workspace is done; returns the highest that it ever said."""
        self._db.execute("UPDATE workspaces SET acked_seq = max(acked_seq, ?) WHERE id = ?", (seq, workspace_id))
        row = self._one("SELECT acked_seq FROM workspaces WHERE id = ?", workspace_id)
        return 0 if row is None else int(row["acked_seq"])

    # --- The canvas ---

    def show(self, workspace_id: str, how: str, text: str) -> None:
        """Show the user a text: by `how`, as the answer to a message or as a notification."""
        self._db.execute("INSERT INTO shown (workspace_id, how, text) VALUES (?, ?, ?)", (workspace_id, how, text))

    def shown(self, workspace_id: str) -> list[tuple[str, str]]:
        """Return what the user was shown, with how."""
        rows = self._db.execute("SELECT how, text FROM shown WHERE workspace_id = ? ORDER BY number", (workspace_id,))
        return [(row["how"], row["text"]) for row in rows]

    def upload(self, workspace_id: str, content: bytes) -> str:
        """Keep a file until its workspace fetches it; returns its id."""
        file_id = str(uuid.uuid4())
        self._db.execute(
            "INSERT INTO uploads (id, workspace_id, content) VALUES (?, ?, ?)", (file_id, workspace_id, content)
        )
        return file_id

    def uploaded(self, workspace_id: str, file_id: str) -> bytes | None:
        """Return a file's content, None where it is unknown or was fetched."""
        row = self._one(
            "SELECT content FROM uploads WHERE id = ? AND workspace_id = ? AND NOT acked", file_id, workspace_id
        )
        return None if row is None else row["content"]

    def fetched(self, workspace_id: str, file_id: str) -> None:
        """Take note that a file was fetched."""
        self._db.execute("UPDATE uploads SET acked = 1 WHERE id = ? AND workspace_id = ?", (file_id, workspace_id))

    # --- What waits for an agent ---

    def enqueue(self, workspace_id: str, caller_id: str | None, message_id: str | None, body: bytes) -> tuple[str, int]:
        """Keep a message for later; returns its place's id, and how many wait.

        A message that waits or is on its way is kept once.
        """
        self._db.execute(
            "INSERT OR IGNORE INTO queue (id, workspace_id, caller_id, message_id, body, status)"
            " VALUES (?, ?, ?, ?, ?, 'queued')",
            (str(uuid.uuid4()), workspace_id, caller_id, message_id, body),
        )
        of_it = "SELECT id FROM queue WHERE workspace_id = ? AND message_id IS ? ORDER BY number DESC"
        kept = self._one(of_it, workspace_id, message_id)
        waiting = self._one(
            "SELECT count(*) AS n FROM queue WHERE workspace_id = ? AND status = 'queued'", workspace_id
        )
        assert kept is not None
        assert waiting is not None
        return kept["id"], waiting["n"]

    def take_queued(self, workspace_id: str) -> Queued | None:
        """Return the message that has waited longest, and mark it as on its way."""
        row = self._one(
            "UPDATE queue SET status = 'dispatched', attempts = attempts + 1 WHERE number = (SELECT number FROM queue"
            " WHERE workspace_id = ? AND status = 'queued' ORDER BY number LIMIT 1) RETURNING *",
            workspace_id,
        )
        if row is None:
            return None
        return Queued(row["id"], row["workspace_id"], row["caller_id"], row["body"], row["attempts"])

    def settle_queued(self, queue_id: str, status: str, response: JsonValue = None) -> None:
        """Say what became of a message that was on its way."""
        self._db.execute(
            "UPDATE queue SET status = ?, response = ? WHERE id = ?", (status, _dumped(response), queue_id)
        )

    def requeue_dispatched(self) -> None:
        """Let wait again what was on its way when the process ended."""
        self._db.execute("UPDATE queue SET status = 'queued' WHERE status = 'dispatched'")

    def queued(self, workspace_id: str, queue_id: str) -> JsonObject | None:
        """Return how far a message that was queued is."""
        row = self._one("SELECT * FROM queue WHERE id = ? AND workspace_id = ?", queue_id, workspace_id)
        if row is None:
            return None
        return {
            "queue_id": row["id"],
            "status": row["status"],
            "attempts": row["attempts"],
            "response_body": _loaded(row["response"]),
        }

    # --- Delegations ---

    def delegate(self, source_id: str, target_id: str, task: str, key: str | None) -> tuple[str, bool]:
        """Write work down that is given; returns its id, and whether it was known by its key already."""
        if key is not None:
            known = self._one(
                "SELECT id FROM delegations WHERE source_id = ? AND key = ? AND status != 'failed'", source_id, key
            )
            if known is not None:
                return known["id"], True
        delegation_id = str(uuid.uuid4())
        self._db.execute(
            "INSERT INTO delegations (id, source_id, target_id, task, key, status, created_at)"
            " VALUES (?, ?, ?, ?, ?, 'dispatched', ?)",
            (delegation_id, source_id, target_id, task, key, _now()),
        )
        return delegation_id, False

    def settle_delegation(self, delegation_id: str, status: str, result: str = "", error: str = "") -> None:
        """Say how far work is that was given."""
        self._db.execute(
            "UPDATE delegations SET status = ?, result = ?, error = ? WHERE id = ?",
            (status, result, error, delegation_id),
        )

    def delegations(self, source_id: str | None = None) -> list[StoredDelegation]:
        """Return the work that a workspace has given, or everybody, newest first."""
        rows = self._db.execute(
            "SELECT * FROM delegations WHERE ? IS NULL OR source_id = ? ORDER BY number DESC", (source_id, source_id)
        )
        return [_given(row) for row in rows]

    def delegation(self, delegation_id: str) -> StoredDelegation | None:
        """Return work that was given."""
        row = self._one("SELECT * FROM delegations WHERE id = ?", delegation_id)
        return None if row is None else _given(row)

    # --- Memories ---

    def remember(self, workspace_id: str, scope: str, content: str) -> str:
        """Keep a text; returns its id."""
        memory_id = str(uuid.uuid4())
        self._db.execute(
            "INSERT INTO memories (id, workspace_id, scope, content, created_at) VALUES (?, ?, ?, ?, ?)",
            (memory_id, workspace_id, scope, content, _now()),
        )
        return memory_id

    def memories(self, workspace_id: str, scope: str, query: str) -> list[JsonObject]:
        """Return the texts that hold all words of `query`, newest first."""
        rows = self._db.execute(
            "SELECT * FROM memories WHERE workspace_id = ? AND (? = '' OR scope = ?) ORDER BY number DESC",
            (workspace_id, scope, scope),
        )
        words = query.casefold().split()
        return [
            {
                "id": row["id"],
                "workspace_id": workspace_id,
                "content": row["content"],
                "scope": row["scope"],
                "namespace": "general",
                "created_at": _text_of_time(row["created_at"]),
            }
            for row in rows
            if all(word in row["content"].casefold() for word in words)
        ]


def _workspace(row: sqlite3.Row) -> Workspace:
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


def _given(row: sqlite3.Row) -> StoredDelegation:
    return StoredDelegation(
        row["id"],
        row["source_id"],
        row["target_id"],
        row["task"],
        row["status"],
        row["result"],
        row["error"],
        _text_of_time(row["created_at"]),
    )


def _activity(row: sqlite3.Row, era: Era) -> JsonObject:
    told: JsonObject = {
        name: row[name]
        for name in (
            *("id", "workspace_id", "activity_type", "source_id", "target_id", "method", "summary", "duration_ms"),
            *("status", "error_detail"),
        )
    }
    told["created_at"] = _text_of_time(row["created_at"])
    for name in ("request_body", "response_body"):
        if row[name] is not None:
            told[name] = _loaded(row[name])
    if era == "august":
        told["seq"] = row["seq"]
    return told


def _now() -> int:
    return time.time_ns() // 1000


def _text_of_time(microseconds: int) -> str:
    """Return a time as Go writes it: without the zeros at its end, so that its texts are not in its order."""
    seconds, rest = divmod(microseconds, 1_000_000)
    fraction = f".{rest:06d}".rstrip("0").rstrip(".")
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}{fraction}Z"


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _dumped(value: JsonValue) -> str | None:
    return None if value is None else json.dumps(value)


def _loaded(text: str | None) -> JsonValue:
    value: JsonValue = None if text is None else json.loads(text)
    return value
