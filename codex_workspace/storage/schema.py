"""The tables of this agent, and their version. Databases of any other version are rejected."""

import time
from collections.abc import Mapping
from typing import Final

from a2a.types import TaskState

from codex_workspace.common.a2a_terms import TERMINAL, WORKING, state_names
from codex_workspace.common.errors import ConfigError
from codex_workspace.storage.database import Connection

SCHEMA_VERSION: Final = 2

MAX_CONTEXT_ID_CHARS: Final = 36
"""The length of a context ID that a client chooses: that of a UUID."""

MAX_ID_CHARS: Final = 255
"""The length of other IDs that clients or the platform choose."""

_COLUMNS: Final[Mapping[str, str]] = {
    "schema_version": "version INTEGER PRIMARY KEY, created_at DOUBLE PRECISION NOT NULL",
    # state: the name of the A2A state. updated_at: the time of the status in ns; 0 if it has none. body: the `Task`.
    "tasks": """
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, context_id TEXT NOT NULL, state TEXT NOT NULL,
        updated_at BIGINT NOT NULL, body {blob} NOT NULL""",
    # How many agent processes ended during a task's turn.
    "task_restarts": "task_id TEXT PRIMARY KEY, restarts INTEGER NOT NULL",
    "contexts": """
        owner TEXT, context_id TEXT, thread_id TEXT, instructions TEXT, created_at DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (owner, context_id)""",
    "main_contexts": "owner TEXT PRIMARY KEY, context_id TEXT NOT NULL",
    "deliveries": """
        owner TEXT, message_id TEXT, digest {blob} NOT NULL, task_id TEXT NOT NULL, context_id TEXT NOT NULL,
        state TEXT NOT NULL, request {blob} NOT NULL, thread_id TEXT, turn_id TEXT, deaths INTEGER NOT NULL,
        ending {blob} NOT NULL, accepted_at DOUBLE PRECISION NOT NULL, changed_at DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (owner, message_id)""",
    # due_since: when the configuration was registered; null once its webhook has the end of the task, or was given up.
    # is_0_3: whether it was registered over A2A 0.3. body: the `TaskPushNotificationConfig`.
    "push_configs": """
        task_id TEXT, id TEXT, owner TEXT NOT NULL, body {blob} NOT NULL, due_since DOUBLE PRECISION,
        is_0_3 INTEGER NOT NULL, PRIMARY KEY (task_id, id)""",
    "memories": """
        id {serial} PRIMARY KEY, owner TEXT NOT NULL, content TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL""",
    "outbox": """
        number {serial} PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, message_id TEXT NOT NULL,
        route TEXT NOT NULL, peer TEXT NOT NULL, source_id TEXT NOT NULL, delegation_id TEXT NOT NULL,
        created_at TEXT NOT NULL, digest {blob} NOT NULL, request {blob} NOT NULL, state TEXT NOT NULL,
        reply TEXT NOT NULL, is_failure INTEGER NOT NULL, may_be_sent INTEGER NOT NULL,
        received_at DOUBLE PRECISION NOT NULL, changed_at DOUBLE PRECISION NOT NULL""",
    "inbox_cursors": "workspace_id TEXT PRIMARY KEY, row_id TEXT NOT NULL, created_at TEXT NOT NULL",
    "write_probe": "id INTEGER PRIMARY KEY, filler {blob} NOT NULL",
}

_INDEXES: Final[Mapping[str, str]] = {
    # Has every column by which tasks are listed and counted.
    "tasks_of_owner": "tasks (owner, updated_at, id, context_id, state)",
    "tasks_of_context": "tasks (owner, context_id, updated_at)",
    "tasks_in_state": "tasks (state, updated_at)",
    "deliveries_of_task": "deliveries (task_id)",
    "deliveries_in_state": "deliveries (state)",
    "memories_of_owner": "memories (owner, id)",
    "outbox_of_message": "outbox (message_id)",
    "outbox_in_state": "outbox (state)",
}

TABLES: Final = frozenset(_COLUMNS)
"""The names of all tables of a database."""


def _in_states(states: frozenset[TaskState]) -> str:
    names = ", ".join(f"'{name}'" for name in state_names(states))
    return f"state in ({names})"


HAS_ENDED: Final = _in_states(TERMINAL)
"""The condition that a task has ended."""

IS_WORKING: Final = _in_states(WORKING)
"""The condition that a task has neither ended nor asks a question."""


def version_of(connection: Connection, table_names: str) -> int | None:
    """Return the schema version of a database: 0 for an empty one, None for tables without a version."""
    names = set(connection.all(str, table_names))
    if "schema_version" not in names:
        return None if names & TABLES else 0
    return connection.first(lambda version: version, "select max(version) from schema_version")


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


def create_schema(connection: Connection, types: Mapping[str, str]) -> None:
    """Create the tables of an empty database, in the caller's transaction."""
    for name, columns in _COLUMNS.items():
        connection.change(f"create table if not exists {name} ({columns.format(**types)})")
    for name, columns in _INDEXES.items():
        connection.change(f"create index if not exists {name} on {columns}")
    created = "insert into schema_version (version, created_at) values (?, ?) on conflict do nothing"
    connection.change(created, SCHEMA_VERSION, time.time())
