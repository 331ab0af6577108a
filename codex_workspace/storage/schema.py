"""The tables of this agent, in one `MetaData`. The tables `tasks` and `push_notification_configs` are the SDK's."""

from typing import Final

from sqlalchemy import Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

MAX_CONTEXT_ID_CHARS: Final = 36
"""The width of the column in the SDK's task table; PostgreSQL and MySQL reject longer values."""

MAX_ID_CHARS: Final = 255
"""The width of columns for IDs that clients or the platform choose."""

metadata: Final = MetaData()

schema_version: Final = Table(
    "schema_version",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("created_at", Float, nullable=False),
)
contexts: Final = Table(
    "contexts",
    metadata,
    Column("owner", String(255), primary_key=True),
    Column("context_id", String(MAX_CONTEXT_ID_CHARS), primary_key=True),
    Column("thread_id", String(64), nullable=True),
    Column("created_at", Float, nullable=False),
    Column("instructions", String(64), nullable=True),
)
main_contexts: Final = Table(
    "main_contexts",
    metadata,
    Column("owner", String(255), primary_key=True),
    Column("context_id", String(MAX_CONTEXT_ID_CHARS), nullable=False),
)
deliveries: Final = Table(
    "deliveries",
    metadata,
    Column("owner", String(255), primary_key=True),
    Column("message_id", String(MAX_ID_CHARS), primary_key=True),
    Column("digest", LargeBinary(32), nullable=False),
    Column("task_id", String(36), nullable=False, index=True),
    Column("context_id", String(MAX_CONTEXT_ID_CHARS), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("request", LargeBinary, nullable=False),
    Column("thread_id", String(64), nullable=True),
    Column("turn_id", String(64), nullable=True),
    Column("deaths", Integer, nullable=False, default=0),
    Column("ending", LargeBinary, nullable=False, default=b""),
    Column("accepted_at", Float, nullable=False),
    Column("changed_at", Float, nullable=False),
)
task_restarts: Final = Table(
    "task_restarts",
    metadata,
    Column("task_id", String(36), primary_key=True),
    Column("restarts", Integer, nullable=False),
)
"""How many agent processes ended during a task's turn."""

push_due: Final = Table(
    "push_due",
    metadata,
    Column("task_id", String(36), primary_key=True),
    Column("config_id", String(MAX_ID_CHARS), primary_key=True),
    Column("registered_at", Float, nullable=False),
)
push_0_3_configs: Final = Table(
    "push_0_3_configs",
    metadata,
    Column("task_id", String(36), primary_key=True),
    Column("config_id", String(MAX_ID_CHARS), primary_key=True),
    Column("owner", String(255), nullable=False),
)
"""The push configurations that were registered over A2A 0.3, and their owners."""

memories: Final = Table(
    "memories",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("content", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("idx_memories_owner", "owner", "id"),
)
outbox: Final = Table(
    "outbox",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("id", String(MAX_ID_CHARS), nullable=False, unique=True),
    Column("owner", String(255), nullable=False),
    Column("message_id", String(MAX_ID_CHARS), nullable=False, index=True),
    Column("route", String(16), nullable=False),
    Column("peer", String(MAX_ID_CHARS), nullable=False),
    Column("source_id", String(MAX_ID_CHARS), nullable=False),
    Column("delegation_id", String(MAX_ID_CHARS), nullable=False),
    Column("created_at", String(64), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("reply", Text, nullable=False),
    Column("is_failure", Boolean, nullable=False),
    Column("may_be_sent", Boolean, nullable=False),
    Column("received_at", Float, nullable=False),
    Column("changed_at", Float, nullable=False),
)
inbox_cursors: Final = Table(
    "inbox_cursors",
    metadata,
    Column("workspace_id", String(255), primary_key=True),
    Column("row_id", String(MAX_ID_CHARS), nullable=False),
    Column("created_at", String(64), nullable=False),
)
write_probe: Final = Table(
    "write_probe",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("filler", LargeBinary, nullable=False),
)
