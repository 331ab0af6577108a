"""Which URLs name a database, and what is said of the others."""

from pathlib import Path

import pytest

from codex_workspace.common.database_url import sqlite_file, sqlite_url, url_problem

FORMS = "must be sqlite:////absolute/path or postgresql://user:password@host/name"


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite:////state/workspace.sqlite3", "/state/workspace.sqlite3"),
        ("sqlite:////with%20space/a%3Fb", "/with space/a?b"),
        ("postgresql://host/name", None),
        ("sqlite:///relative.sqlite3", None),
        ("sqlite://", None),
        ("sqlite://host//file", None),
        ("sqlite:////file?mode=ro", None),
    ],
)
def test_a_file_is_named_by_its_absolute_path(url: str, file: str | None) -> None:
    assert sqlite_file(url) == (None if file is None else Path(file))


@pytest.mark.parametrize("file", ["/state/workspace.sqlite3", "/a b/ü?#%/c"])
def test_a_file_and_its_url_belong_together(file: str) -> None:
    assert sqlite_file(sqlite_url(Path(file))) == Path(file)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sqlite:////file", None),
        ("postgresql://me:secret@host:5433/name?sslmode=require", None),
        ("postgresql:///name?host=/run/postgresql", None),
        ("sqlite:///relative", FORMS),
        ("sqlite:///:memory:", FORMS),
        ("secret", FORMS),
        ("mysql://me:secret@host/name", FORMS),
        ("http://[secret/", FORMS),
        ("sqlite+aiosqlite:////file", "names the driver aiosqlite, but the agent has its own; remove +aiosqlite"),
        ("postgresql+asyncpg://me:secret@h/n", "names the driver asyncpg, but the agent has its own; remove +asyncpg"),
    ],
)
def test_a_url_of_another_form_is_refused_without_its_content(url: str, problem: str | None) -> None:
    assert url_problem(url) == problem
    assert "secret" not in str(problem)
