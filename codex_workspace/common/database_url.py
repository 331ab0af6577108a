"""The URL of the agent's database: a SQLite file, or a PostgreSQL server."""

from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

_FORMS: Final = "must be sqlite:////absolute/path or postgresql://user:password@host/name"


def url_problem(url: str) -> str | None:
    """Return what is wrong with a URL, without its content; None if it names a SQLite file or a PostgreSQL server."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        return _FORMS
    if scheme == "postgresql" or sqlite_file(url) is not None:
        return None
    database, _, driver = scheme.partition("+")
    if driver and database in ("sqlite", "postgresql"):
        return f"names the driver {driver}, but the agent has its own; remove +{driver}"
    return _FORMS


def sqlite_file(url: str) -> Path | None:
    """Return the file that a URL names by its absolute path; None for other URLs."""
    parsed = urlsplit(url)
    # sqlite:////path: no host, and a path that begins with the third slash.
    file = Path(unquote(parsed.path[1:]))
    is_file = parsed.scheme == "sqlite" and not parsed.netloc and file.is_absolute()
    return file if is_file and not (parsed.query or parsed.fragment) else None


def sqlite_url(file: Path) -> str:
    """Return the URL of a SQLite file."""
    return f"sqlite:///{quote(str(file.absolute()))}"
