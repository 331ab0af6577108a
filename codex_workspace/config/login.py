"""The login of a ChatGPT subscription: codex's auth.json, handed in once by the operator and refreshed by codex.

A refresh makes the tokens before it worthless. So codex's own copy stays, whatever is handed in again at each start,
until something newer is handed in, or the login of another account.
"""

import base64
import binascii
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import replace_file
from codex_workspace.config.environment import IN_ENVIRONMENT, Secret, read_secret

logger = logging.getLogger(__name__)

AUTH_NAME: Final = "auth.json"
"""Of the login in CODEX_HOME; the name is codex's."""

RECORD_NAME: Final = ".codex-workspace-login"
"""Holds the SHA-256 of what was handed in last, so that the same is not taken for news."""

MAX_BYTES: Final = 64 * 1024
"""A login has about 5 KB."""

REFRESHED_AHEAD_S: Final = 300.0
"""How long an access token may hold still when codex refreshes it (0.136 to 0.169)."""

REFRESHED_AFTER_S: Final = 8 * 86_400.0
"""How long after the last refresh codex makes another where the token does not say how long it holds (0.163, 0.169)."""

_NO_TIME: Final = 1e12
"""No Unix time is so large: 30,000 years."""

_CLAIMS: Final = "https://api.openai.com/auth"
_TOKENS: Final = ("id_token", "access_token", "refresh_token")
_HOW: Final = "run `codex login` where there is a browser, and hand in the content of its auth.json"


@dataclass(frozen=True, slots=True)
class Login:
    """What tells one login from another. `account`: ChatGPT's id of it; None: it does not say."""

    account: str | None
    refreshed_at: datetime | None


def read_login(content: str) -> Login:
    """Read the content of an auth.json.

    Raises:
        ValueError: it is no subscription's login; the rest of a sentence that says why, without the content.
    """
    if len(content.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ValueError(f"must have at most {MAX_BYTES} bytes")
    try:
        held = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not JSON") from error
    match held:
        case {"tokens": dict(tokens)}:
            missing = [name for name in _TOKENS if not isinstance(tokens.get(name), str) or not tokens[name]]
            if missing:
                raise ValueError(f"has no tokens.{missing[0]}")
            return Login(_account(tokens), _time(held.get("last_refresh")))
        case {"OPENAI_API_KEY": str()}:
            raise ValueError("holds an API key and no subscription's login; set OPENAI_API_KEY instead")
        case _:
            raise ValueError("has no tokens")


def configured_login(env: Mapping[str, str], names: Sequence[str]) -> tuple[str, Secret] | None:
    """Return the first of the variables (or of their files, `…_FILE`) that is set, with its content.

    Raises:
        ConfigError: it holds no login.
    """
    for name in names:
        content = read_secret(env, name)
        if content is not None:
            try:
                read_login(content.reveal())
            except ValueError as error:
                raise IN_ENVIRONMENT.at(name).error(f"{error}; {_HOW}") from error
            return name, content
    return None


def stored_login(codex_home: Path) -> Secret | None:
    """Return the login that CODEX_HOME holds, None where it holds none that can be read."""
    try:
        with (codex_home / AUTH_NAME).open("rb") as file:
            content = file.read(MAX_BYTES + 1).decode()
        read_login(content)
    except (OSError, ValueError):
        return None
    return Secret(content)


def refresh_due_at(codex_home: Path) -> float | None:
    """Return the Unix time from which on codex refreshes CODEX_HOME's login before it calls the model.

    None: there is no login, or it does not say; minus infinity while the file is being written.
    """
    try:
        with (codex_home / AUTH_NAME).open("rb") as file:
            held = json.loads(file.read(MAX_BYTES + 1))
    except OSError:
        return None
    except (ValueError, RecursionError):
        # Codex empties the file before it writes it.
        return -math.inf
    return _due_at(held)


def _due_at(held: object) -> float | None:
    match held:
        case {"tokens": {"access_token": str(token), "refresh_token": str()}, **rest}:
            until = _claims(token).get("exp")
            if isinstance(until, int | float) and not isinstance(until, bool) and abs(until) < _NO_TIME:
                return until - REFRESHED_AHEAD_S
            refreshed = _time(rest.get("last_refresh"))
            return refreshed.timestamp() + REFRESHED_AFTER_S if refreshed is not None else None
        case _:
            return None


def update_login(codex_home: Path, handed: Secret) -> None:
    """Bring CODEX_HOME's login up to date: write what was handed in, unless codex has the same or a newer one.

    It is for this user's eyes only afterwards, whoever has made the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        _settle(codex_home, handed)
        (codex_home / AUTH_NAME).chmod(0o600)
    except OSError as error:
        raise ConfigError(
            f"CODEX_HOME: the login cannot be written to {codex_home}: {error.strerror}; "
            "make room, or give this user the right to write there"
        ) from error


def _settle(codex_home: Path, handed: Secret) -> None:
    content = handed.reveal()
    mark = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    held = stored_login(codex_home)
    if held is not None and held.reveal() == content:
        return
    if held is not None and (_last_mark(codex_home) == mark or _is_newer(held, handed)):
        logger.info("codex's own login in %s stays: it is newer than the one that was handed in", codex_home)
        return
    replace_file(codex_home / AUTH_NAME, content.encode())
    replace_file(codex_home / RECORD_NAME, mark.encode())
    logger.info("the subscription's login was written to %s", codex_home / AUTH_NAME)


def _is_newer(held: Secret, handed: Secret) -> bool:
    """Tell whether one login is of the same account as another, and was refreshed no earlier."""
    mine, other = read_login(held.reveal()), read_login(handed.reveal())
    if mine.account != other.account or mine.refreshed_at is None or other.refreshed_at is None:
        return False
    return mine.refreshed_at >= other.refreshed_at


def _account(tokens: Mapping[str, object]) -> str | None:
    match tokens:
        case {"account_id": str(account)} if account:
            return account
        case {"id_token": str(token)}:
            match _claims(token).get(_CLAIMS):
                case {"chatgpt_account_id": str(told)}:
                    return told
                case _:
                    return None
        case _:
            return None


def _claims(token: str) -> Mapping[str, object]:
    """Return what a JWT says, unchecked; nothing where it is none."""
    _, _, rest = token.partition(".")
    payload, _, _ = rest.partition(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}


def _time(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        told = datetime.fromisoformat(value)
    except ValueError:
        return None
    return told if told.tzinfo is not None else None


def _last_mark(codex_home: Path) -> str | None:
    try:
        return (codex_home / RECORD_NAME).read_text()
    except (OSError, ValueError):
        return None
