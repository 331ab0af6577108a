"""The stand-in platform's SQLite database: workspaces, their activity, and the messages that wait for them.

The calls are synchronous: a few rows of a local file take less time than a switch of threads.
"""

import json
import secrets
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from codex_workspace.common.values import JsonObject, JsonValue
from codex_workspace.devkit.platform.records import (
    SCHEMA,
    Era,
    Mode,
    NewRow,
    Queued,
    StoredDelegation,
    Workspace,
    activity_of_row,
    delegation_of_row,
    format_time,
    from_json,
    now_us,
    to_json,
    token_digest,
    workspace_of_row,
)


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
        return None if row is None else workspace_of_row(row)

    def workspaces(self) -> list[Workspace]:
        """Return all that are not removed."""
        rows = self._db.execute("SELECT * FROM workspaces WHERE status != 'removed' ORDER BY name, id")
        return [workspace_of_row(row) for row in rows]

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
            removed = format_time(now_us())
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
        self._db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", (token_digest(minted), workspace_id))
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
            token_digest(token),
        )
        return None if row is None else row["workspace_id"]

    # --- Activity ---

    def write(self, new: NewRow, *, at_same_time: bool = False) -> str:
        """Write a row and return its id; `at_same_time`: with the time of the workspace's row before."""
        row_id, created_at = str(uuid.uuid4()), now_us()
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
                to_json(new.request),
                to_json(new.response),
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
            values.append(now_us() - since_s * 1_000_000)
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
        return [activity_of_row(row, era) for row in self._db.execute(query, (*values, limit))]

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
            "UPDATE queue SET status = ?, response = ? WHERE id = ?", (status, to_json(response), queue_id)
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
            "response_body": from_json(row["response"]),
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
            (delegation_id, source_id, target_id, task, key, now_us()),
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
        return [delegation_of_row(row) for row in rows]

    def delegation(self, delegation_id: str) -> StoredDelegation | None:
        """Return work that was given."""
        row = self._one("SELECT * FROM delegations WHERE id = ?", delegation_id)
        return None if row is None else delegation_of_row(row)

    # --- Memories ---

    def remember(self, workspace_id: str, scope: str, content: str) -> str:
        """Keep a text; returns its id."""
        memory_id = str(uuid.uuid4())
        self._db.execute(
            "INSERT INTO memories (id, workspace_id, scope, content, created_at) VALUES (?, ?, ?, ?, ?)",
            (memory_id, workspace_id, scope, content, now_us()),
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
                "created_at": format_time(row["created_at"]),
            }
            for row in rows
            if all(word in row["content"].casefold() for word in words)
        ]
