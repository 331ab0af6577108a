"""The login of a ChatGPT subscription: codex's auth.json, which the operator provides once and codex refreshes.

A refresh invalidates the earlier tokens. The operator's login, which is provided again at each start, therefore
replaces codex's own only if it is newer or of another account.
"""

import base64
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AwareDatetime, BaseModel, Field, ValidationError, WrapValidator, model_validator

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import read_config_file, replace_file
from codex_workspace.config.environment import IN_ENVIRONMENT, Secret, read_secret
from codex_workspace.config.validation import problem

logger = logging.getLogger(__name__)

AUTH_NAME: Final = "auth.json"
"""The file of the login in CODEX_HOME; the name is codex's."""

DIGEST_NAME: Final = ".codex-workspace-login"
"""The file with the SHA-256 of the login that the operator provided last."""

MAX_BYTES: Final = 64 * 1024
"""A login has about 5 KB."""

REFRESH_AHEAD_S: Final = 300.0
"""Codex refreshes the access token this long before it expires (0.136 to 0.169)."""

REFRESH_AFTER_S: Final = 8 * 86_400.0
"""Codex refreshes an access token without an expiry this long after the last refresh (0.163)."""

_REMEDY: Final = "run `codex login` on a machine with a browser, and provide the content of its auth.json"


def _or_none(value: object, validate: Callable[[object], object]) -> object:
    try:
        return validate(value)
    except ValidationError:
        return None


_UNKNOWN_IF_INVALID: Final = WrapValidator(_or_none)

_Token = Annotated[str, Field(min_length=1)]


class Tokens(BaseModel):
    """The tokens of a login; `account_id` identifies the account at ChatGPT."""

    id_token: _Token
    access_token: _Token
    refresh_token: _Token
    account_id: Annotated[str | None, _UNKNOWN_IF_INVALID] = None

    @property
    def account(self) -> str | None:
        """The account; without `account_id`, that of the ID token."""
        match _claims(self.id_token).get("https://api.openai.com/auth"):
            case {"chatgpt_account_id": str(account)} if not self.account_id:
                return account
            case _:
                return self.account_id


class Login(BaseModel):
    """The content of an auth.json."""

    tokens: Tokens
    last_refresh: Annotated[AwareDatetime | None, _UNKNOWN_IF_INVALID] = None

    @model_validator(mode="before")
    @classmethod
    def _reject_api_key(cls, content: object) -> object:
        match content:
            case {"OPENAI_API_KEY": str(), **others} if not others.get("tokens"):
                raise problem("holds an API key and no subscription's login; set OPENAI_API_KEY instead")
            case _:
                return content


def read_login(content: str) -> Login:
    """Return the login in the content of an auth.json.

    Raises:
        ValueError: `content` is not a subscription's login; the message continues a sentence, and omits the content.
    """
    if len(content.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ValueError(f"must have at most {MAX_BYTES} bytes")
    try:
        return Login.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "problem":
            raise ValueError(first["msg"]) from None
        key = ".".join(map(str, first["loc"])) or "tokens"
        raise ValueError("is not JSON" if first["type"] == "json_invalid" else f"has no valid {key}") from None


def configured_login(env: Mapping[str, str], names: Sequence[str]) -> tuple[str, Secret] | None:
    """Return the first of the variables (or of their files, `…_FILE`) that is set, with its content.

    Raises:
        ConfigError: it is not a login.
    """
    for name in names:
        content = read_secret(env, name)
        if content is not None:
            try:
                read_login(content.reveal())
            except ValueError as error:
                raise IN_ENVIRONMENT.at(name).error(f"{error}; {_REMEDY}") from error
            return name, content
    return None


def stored_login(codex_home: Path) -> Secret | None:
    """Return the login in CODEX_HOME; None if it is missing or invalid."""
    try:
        content = _read_auth_file(codex_home)
        read_login(content)
    except (OSError, ValueError):
        return None
    return Secret(content)


def _read_auth_file(codex_home: Path) -> str:
    return read_config_file(codex_home / AUTH_NAME, MAX_BYTES).decode()


def refresh_due_at(codex_home: Path) -> float | None:
    """Return the Unix time after which codex refreshes CODEX_HOME's login before it calls the model.

    None if there is no login, or it has neither expiry nor last refresh; minus infinity while codex writes the file.
    """
    try:
        content = _read_auth_file(codex_home)
        json.loads(content)
    except OSError:
        return None
    except (RecursionError, ValueError):
        # Codex truncates the file before it writes it.
        return -math.inf
    try:
        login = read_login(content)
    except ValueError:
        return None
    try:
        return float(_claims(login.tokens.access_token)["exp"]) - REFRESH_AHEAD_S
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return login.last_refresh.timestamp() + REFRESH_AFTER_S if login.last_refresh is not None else None


def _claims(token: str) -> dict[str, Any]:
    """Return the claims of a JWT, unchecked; empty if it is not a JWT."""
    try:
        claims = json.loads(base64.urlsafe_b64decode(f"{token.split('.')[1]}=="))
    except (LookupError, RecursionError, ValueError):
        return {}
    return claims if isinstance(claims, dict) else {}


def update_login(codex_home: Path, provided: Secret) -> None:
    """Write the operator's login to CODEX_HOME, unless codex has the same or a newer one; only this user may read it.

    Raises:
        ConfigError: it cannot be written.
    """
    file, digest_file = codex_home / AUTH_NAME, codex_home / DIGEST_NAME
    content = provided.reveal()
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    try:
        stored = stored_login(codex_home)
        is_recorded = digest_file.exists() and read_config_file(digest_file) == digest.encode()
        if stored is None or not (is_recorded or _is_newer(stored, provided)):
            replace_file(file, content.encode())
            replace_file(digest_file, digest.encode())
            logger.info("wrote the subscription's login to %s", file)
        file.chmod(0o600)
    except OSError as error:
        raise ConfigError(
            f"CODEX_HOME: cannot write the login to {codex_home}: {error.strerror}; "
            "free disk space, or make the folder writable for this user"
        ) from error


def _is_newer(stored: Secret, provided: Secret) -> bool:
    """Return whether `stored` has the same account as `provided`, and was refreshed no earlier."""
    old, new = read_login(stored.reveal()), read_login(provided.reveal())
    if old.last_refresh is None or new.last_refresh is None:
        return False
    return old.tokens.account == new.tokens.account and old.last_refresh >= new.last_refresh
