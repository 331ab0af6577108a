"""Creates the schema in an empty database, and rejects databases of any other version."""

import time
from typing import Final

from a2a.server.models import TaskModel
from sqlalchemy import Connection, func, insert, inspect, select

from codex_workspace.common.errors import ConfigError
from codex_workspace.storage.schema import metadata, schema_version

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
