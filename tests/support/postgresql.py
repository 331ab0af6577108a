"""A PostgreSQL server from Debian's package `postgresql`, for tests."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

import psycopg

from tests.support.ports import free_port

USER: Final = "postgres"
PASSWORD: Final = "a-word"

FAST: Final = "fsync = off\nfull_page_writes = off\nmax_connections = 200\nunix_socket_directories = ''\n"


class PostgresqlServer:
    """A server on loopback that can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.port: Final = free_port()
        self._data: Final = folder / "data"
        self._names = count(1)
        self._programs: Final = _programs()
        password = folder / "password"
        password.write_text(PASSWORD)
        _give(folder, password)
        self._run("initdb", "--auth=scram-sha-256", f"--username={USER}", f"--pwfile={password}", "--no-sync")
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.write(f"{FAST}listen_addresses = '127.0.0.1'\nport = {self.port}\n")

    def start(self) -> None:
        """Start the server; return when it accepts connections."""
        self._run("pg_ctl", "start", "--wait", "--log", str(self._data / "log"))

    def stop(self) -> None:
        """Break all connections and stop the server."""
        self._run("pg_ctl", "stop", "--wait", "--mode=fast")

    def disconnect(self) -> None:
        """End all connections of clients."""
        others = "backend_type = 'client backend' and pid <> pg_backend_pid()"
        self.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {others}")

    def url(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def create_database(self) -> str:
        """Create an empty database; return its URL."""
        name = f"test_{next(self._names)}"
        self.execute(f"create database {name}")
        return self.url(name)

    def execute(self, sql: str) -> None:
        """Run a statement of the administrator."""
        with psycopg.connect(self.url(USER), autocommit=True) as connection:
            connection.execute(sql.encode())

    def select(self, sql: str) -> list[tuple[object, ...]]:
        """Return the rows of a query of the administrator, about all databases."""
        with psycopg.connect(self.url(USER)) as connection:
            return connection.execute(sql.encode()).fetchall()

    def _run(self, program: str, *options: str) -> None:
        """Run a program of the package; root runs it as the package's user, because a server refuses root."""
        # Not by an option of subprocess: that would fork, which crashes beside the threads of a gRPC client.
        owner = ["runuser", "-u", USER, "--"] if os.geteuid() == 0 else []
        command = [*owner, str(self._programs / program), f"--pgdata={self._data}", *options]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
        log = self._data / "log"
        assert done.returncode == 0, (
            f"{program} ended with {done.returncode}: {done.stdout}{done.stderr}"
            f"{log.read_text()[-2000:] if log.exists() else ''}"
        )


@contextmanager
def running_postgresql() -> Iterator[PostgresqlServer]:
    """Run a server with an empty folder while the block is open."""
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    try:
        server = PostgresqlServer(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


def _programs() -> Path:
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    assert installed, "these tests need a PostgreSQL server: apt-get install postgresql"
    return installed[-1].parent


def _give(*paths: Path) -> None:
    if os.geteuid() == 0:
        user = pwd.getpwnam(USER)
        for path in paths:
            os.chown(path, user.pw_uid, user.pw_gid)
