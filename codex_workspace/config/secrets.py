"""Finds the secrets inside of credentials and URLs, for redaction."""

import json
from typing import Final
from urllib.parse import unquote, urlsplit

SHORTEST_TOKEN: Final = 20
"""Shorter texts in a JSON credential are its kind, an account number or a date."""


def tokens_in(credential: str) -> list[str]:
    """Return the tokens in a credential that is JSON, such as a subscription's login."""
    try:
        parts = [json.loads(credential)] if credential.lstrip().startswith("{") else []
    except ValueError:
        return []
    found: list[str] = []
    while parts:
        match parts.pop():
            case dict() as members:
                parts += members.values()
            case list() as members:
                parts += members
            case str(text) if len(text) >= SHORTEST_TOKEN:
                found.append(text)
            case _:
                pass
    return found


def secrets_in_url(url: str) -> list[str]:
    """Return a URL and its password if it has one, or the text itself if it is not a URL."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return [url]
    if password is None:
        return [] if "://" in url else [url]
    return [url, password, unquote(password)]
