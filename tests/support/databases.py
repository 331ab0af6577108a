"""Rows in a database, for tests of single stores."""

from a2a.types import Task, TaskState

from codex_workspace.storage.database import Connection, Database, Value


async def change(database: Database, sql: str, *values: Value) -> None:
    """Run a statement that changes rows."""
    await database.write(lambda connection: connection.change(sql, *values))


async def column(database: Database, sql: str) -> list[object]:
    """Return the only column of the selected rows."""

    def values(connection: Connection) -> list[object]:
        return [value for (value,) in connection.run(sql).fetchall()]

    return await database.read(values)


async def insert_task(database: Database, task: Task, owner: str = "me") -> None:
    """Store a task; its age is that of its status."""
    await change(
        database,
        "insert into tasks (id, owner, context_id, state, updated_at, body) values (?, ?, ?, ?, ?, ?)",
        *(task.id, owner, task.context_id, TaskState.Name(task.status.state)),
        *(task.status.timestamp.ToNanoseconds(), task.SerializeToString()),
    )
