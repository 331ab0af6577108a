"""The tables of this agent, in one `MetaData`, and their version.

The tables `tasks` and `push_notification_configs` are the SDK's. Databases of any other version are rejected.
"""

import time
from typing import Final

from a2a.server.models import TaskModel
from sqlalchemy import (
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    func,
    insert,
    inspect,
    select,
)

from codex_workspace.common.a2a_terms import TERMINAL, state_names
from codex_workspace.common.errors import ConfigError

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

SCHEMA_VERSION: Final = 1

SDK_TABLES: Final = ("tasks", "push_notification_configs")

TABLES: Final = frozenset({*SDK_TABLES, *metadata.tables})
"""The names of all tables of a database."""


def version_of(connection: Connection) -> int | None:
    """Return the schema version of a database: 0 for an empty one, None for tables without a version."""
    names = set(inspect(connection).get_table_names())
    if schema_version.name not in names:
        return None if names & TABLES else 0
    version: int | None = connection.execute(select(func.max(schema_version.c.version))).scalar_one_or_none()
    return version


def require_known_version(version: int | None, database: str) -> None:
    """Accept an empty database and one of `SCHEMA_VERSION`.

    Raises:
        ConfigError: the version is another one, or unknown.
    """
    if version not in (0, SCHEMA_VERSION):
        found = "an unknown schema" if version is None else f"schema version {version}"
        raise ConfigError(
            f"DATABASE_URL: the database {database} has {found}, and this agent supports only version "
            f"{SCHEMA_VERSION}; use the agent's version that created it, or set DATABASE_URL to another database"
        )


def create_schema(connection: Connection) -> None:
    """Create the tables of an empty database, in the caller's transaction."""
    if connection.dialect.name == "sqlite":
        # Python's driver begins transactions before changes of rows only; this also excludes other processes.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    if version_of(connection) == 0:
        TaskModel.metadata.create_all(connection, [TaskModel.metadata.tables[name] for name in SDK_TABLES])
        metadata.create_all(connection)
        connection.execute(insert(schema_version).values(version=SCHEMA_VERSION, created_at=time.time()))


def has_ended() -> ColumnElement[bool]:
    """Return the condition that a task has ended."""
    ended: ColumnElement[bool] = TaskModel.status["state"].as_string().in_(state_names(TERMINAL))
    return ended
